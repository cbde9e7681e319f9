"""The softmax kernels on a real GPU, against the fp64 oracle by the tolerance rule."""

from __future__ import annotations

import random

import pytest
import torch
from tests.softmax_cases import SoftmaxCase, assert_right, random_case, run
from tests.unit.test_softmax_modules import TheirMaskedSoftmax

from keel.compat import megatron
from keel.softmax import AttnMaskType, FusedScaleMaskSoftmax, scaled_masked_softmax
from keel.testing import poisoned_memory

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("batch", range(9))
def test_random_cases(batch):
    for seed in range(batch * 50, batch * 50 + 50):
        rng = random.Random(seed)
        limit = rng.choice([40, 300, 1500, 5000])
        case = random_case(
            rng, DTYPES[seed % 3], limit, rows=min(limit, 60_000 // limit), device="cuda"
        )
        with poisoned_memory():
            assert_right(case, "triton")


@pytest.mark.parametrize("sk", [4096, 8192, 8193, 16_384, 20_000, 32_768, 65_536, 131_072, 262_144])
@pytest.mark.parametrize("kind", ["plain", "causal", "masked", "window"])
def test_long_rows(sk, kind):
    torch.manual_seed(sk)
    x, dy = torch.randn(2, 1, 2, 5, sk, device="cuda", dtype=torch.bfloat16).unbind()
    options = {"scale": 0.7, "causal": kind == "causal", "window": None, "fully_masked": "zeros"}
    if kind == "masked":
        options["mask"] = torch.rand(1, 1, 5, sk, device="cuda") > 0.5
    if kind == "window":
        options["window"] = (1000, 3)
    with poisoned_memory():
        assert_right(SoftmaxCase(x, dy, None, options), "triton")


def test_results_repeat_bitwise():
    case = random_case(random.Random(5), torch.bfloat16, 2000, rows=50, device="cuda")
    case.sink = torch.randn(case.x.shape[1], device="cuda")
    first, second = run(case, "triton"), run(case, "triton")
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_rows_sum_to_one():
    x = torch.randn(2, 3, 50, 3000, device="cuda") * 5
    sums = scaled_masked_softmax(x, causal=True).double().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_memory_is_input_output_gradient(causal):
    x = torch.randn(1, 8, 2048, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn_like(x)
    size = x.numel() * x.element_size()
    scaled_masked_softmax(x, causal=causal).backward(dy)  # compile first
    x.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scaled_masked_softmax(x, causal=causal).backward(dy)
    assert torch.cuda.max_memory_allocated() - before <= 2 * size + (1 << 20)


def test_int64_addressing():
    """Heads that lie more than 2**31 elements apart."""
    storage = torch.empty((1 << 31) + (1 << 22), device="cuda", dtype=torch.bfloat16)
    x = storage.as_strided((1, 3, 20, 64), (0, (1 << 30) + 16, 64, 1))
    x.copy_(torch.randn(1, 3, 20, 64, device="cuda"))
    assert torch.equal(scaled_masked_softmax(x), scaled_masked_softmax(x.contiguous()))


def test_cuda_graph_capture():
    x = torch.randn(2, 3, 40, 100, device="cuda", dtype=torch.bfloat16)
    scaled_masked_softmax(x, causal=True, return_max_logits=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, top = scaled_masked_softmax(x, causal=True, return_max_logits=True)
    x.normal_()
    graph.replay()
    want, want_top = scaled_masked_softmax(x, causal=True, return_max_logits=True)
    assert torch.equal(y, want) and torch.equal(top, want_top)


def test_compiled_step():
    x = torch.randn(2, 3, 40, 48, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sink = torch.randn(3, device="cuda", requires_grad=True)

    def step(x, sink):
        y = scaled_masked_softmax(x, causal=True, sink=sink, scale=0.3)
        return (y.float() * torch.arange(48, device="cuda")).sum()

    results = []
    for call in (step, torch.compile(step, fullgraph=True)):
        results.append(torch.autograd.grad(call(x, sink), (x, sink)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)


def test_megatron_wrapper_at_the_reference_shape():
    """[8, 32, 2048, 2048] with fusion on, through the modules that Megatron imports."""
    megatron.install()
    try:
        x = torch.randn(8, 32, 2048, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        mask = torch.rand(8, 1, 2048, 2048, device="cuda") > 0.5
        y = TheirMaskedSoftmax.apply(x, mask, 0.5)
        y.backward(torch.ones_like(y))
        want = torch.softmax((x[3, 5].detach().double() * 0.5).masked_fill(mask[3, 0], -1e4), -1)
        torch.testing.assert_close(y[3, 5].double(), want, atol=1e-4, rtol=1e-2)
        assert x.grad.abs().max() < 1e-3  # rows sum to 1, whatever x
        del y, want
        softmax = FusedScaleMaskSoftmax(
            False, True, AttnMaskType.causal, True, lambda s, m: s.masked_fill(m, -1e4), True, 0.5
        )
        y = softmax(x.detach(), None)
        want = (x[7, 31].detach().double() * 0.5).masked_fill(
            torch.ones(2048, 2048, device="cuda").triu(1).bool(), -torch.inf
        )
        torch.testing.assert_close(y[7, 31].double(), want.softmax(-1), atol=1e-4, rtol=1e-2)
    finally:
        megatron.uninstall()
