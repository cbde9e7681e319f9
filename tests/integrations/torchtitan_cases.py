"""What ranks run in the tests of torchtitan's parallelisms. Imported by their processes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.integrations.torchtitan_models import batch, llama, maxima, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental._context_parallel import _attention as cp_attention
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.context_parallel import apply_cp_to_forward, cp_shard
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from keel.integrations.torchtitan import KeelFlexAttention
from keel.optim import QKClip

LENGTH = 512
"""Two blocks of flex_attention for each rank."""


def tensors() -> tuple[Any, list[torch.Tensor]]:
    """A BlockMask of documents in two samples, and q, k, v."""
    document = torch.arange(LENGTH)[None] // torch.tensor([[100], [300]])
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (document[b, q] == document[b, k]),
        *(2, None, LENGTH, LENGTH, "cpu"),
    )
    random = torch.Generator().manual_seed(0)
    shapes = (2, LENGTH, 4, 8), (2, LENGTH, 2, 8), (2, LENGTH, 2, 8)
    return mask, [torch.randn(x, generator=random, dtype=torch.float64) for x in shapes]


def one_rank() -> list[torch.Tensor]:
    mask, qkv = tensors()
    return _attended(KeelFlexAttention.Config().build(), mask, qkv)


def two_ranks(rank: int) -> tuple[Any, list[list[Any]]]:
    """What `context_parallel` gives, and `sharded` for FSDP2 and for tensor parallelism."""
    return context_parallel(), [sharded(rank, tp) for tp in (1, 2)]


def sharded(rank: int, tp: int) -> list[Any]:
    """[(got, expected), ..] of a model that torchtitan has shared out: logits, maxima, clipped."""
    set_spmd_backend("partial_dtensor")
    sizes = ParallelismConfig(
        data_parallel_shard_degree=2 // tp,
        tensor_parallel_degree=tp,
        spmd_backend="partial_dtensor",
    )
    dims = ParallelDims.from_config(sizes, 2)
    with mock.patch.object(parallel_dims, "device_type", "cpu"):
        dims.build_mesh()
    whole = llama("varlen")
    ids, positions = batch()
    expected = run(whole, ids, positions)
    tops = maxima(whole)[0]
    set_llama3_sharding_config(whole.config, enable_sp=False)
    model = whole.config.build()
    model.load_state_dict(whole.state_dict())
    model = parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=sizes,
        compile_config=CompileConfig(enable=False),
        ac_config=None,
        dump_folder="",
    )
    got = run(model, ids, positions)
    got = got.full_tensor() if isinstance(got, DTensor) else got
    mine = slice(2 * rank, 2 * rank + 2) if tp == 2 else slice(4)  # heads of this rank
    pairs = [(got.detach(), expected.detach()), (maxima(model)[0], tops[mine])]
    tau = float(tops.median())
    QKClip.from_model(model, tau=tau, group=dims.get_mesh("fsdp").get_group()).step()
    run(model, ids, positions)
    return [*pairs, (maxima(model)[0], tops[mine].clamp(max=tau))]


def context_parallel() -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """([max logits, out, gradients..] of this rank, its tokens, what they should be)."""
    cp_attention._compiled_create_block_mask = create_block_mask  # compiling it takes long
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    mask, qkv = tensors()
    where = torch.arange(LENGTH)[None]
    (where, *mine), mine_mask = cp_shard(mesh, (where, *qkv), mask, "headtail")
    module = KeelFlexAttention.Config().build()
    apply_cp_to_forward([module], mesh)
    found = _attended(module, mine_mask, list(mine))
    dist.all_reduce(found[0], dist.ReduceOp.MAX)
    expected = one_rank()
    return found, where[0], [expected[0], *(x[:, where[0]] for x in expected[1:])]


def _attended(module: Any, mask: Any, qkv: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    out = module(q, k, v, attention_masks=mask)
    gradients = torch.autograd.grad((out * out).sum(), (q, k, v))
    return [module.current_max_attn_logits.clone(), out.detach(), *gradients]
