"""What ranks run in the tests of torchtitan's context parallelism. Imported by their processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention as cp_attention
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.distributed.context_parallel import apply_cp_to_forward, cp_shard

from keel.integrations.torchtitan import KeelFlexAttention

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


def two_ranks(rank: int) -> tuple[list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
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
