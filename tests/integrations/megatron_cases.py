"""What ranks run in the tests of Megatron's context parallelism. Imported by their processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_batch_on_this_cp_rank
from tests.integrations.megatron_models import (
    AttnMaskType,
    KeelDotProductAttention,
    PackedSeqParams,
    config_of,
    losses,
    megatron_on_cpu,
    model_of,
    tokens,
)

from keel.compat.megatron import clip_qk

LENGTH = 24
CASES = [(mla, packed) for mla in (False, True) for packed in (False, True)]
BOUNDS, PADDED = [0, 7, 15, 21], [0, 8, 16, 24]


def one_rank(mla: bool, packed: bool) -> list[torch.Tensor]:
    return _trained(config_of(mla, qk_clip=True), packed, lambda x: x)


def two_ranks(rank: int) -> tuple[dict[tuple[bool, bool], list[torch.Tensor]], list[str]]:
    """Every case; and what is said of tokens that cannot be cut."""
    found = {}
    with megatron_on_cpu(context_parallel_size=2):
        for mla, packed in CASES:
            mine = _documents_of_rank(rank) if packed else _own_order
            config = config_of(mla, qk_clip=True, context_parallel_size=2)
            found[mla, packed] = _trained(config, packed, mine)
        return found, _refusals()


def _own_order(ids: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = get_batch_on_this_cp_rank({"tokens": ids})["tokens"]
    return found


def _documents_of_rank(rank: int) -> Any:
    """Documents of 8 tokens in 4 pieces: this rank's from the front, and from the back."""
    where = [s + 2 * piece + n for s in PADDED[:-1] for piece in (rank, 3 - rank) for n in (0, 1)]
    return lambda ids: ids[:, where]


def _trained(config: Any, packed: bool, mine: Any) -> list[torch.Tensor]:
    """[sum of losses, max logits, gradients..] over all ranks of one step."""
    model = model_of(config)
    ids = tokens(1 if packed else 2, LENGTH)
    counted = torch.ones_like(ids, dtype=torch.float64)
    inputs: dict[str, Any] = {}
    if packed:
        cu, padded = (torch.tensor(x, dtype=torch.int32) for x in (BOUNDS, PADDED))
        inputs["packed_seq_params"] = PackedSeqParams("thd", cu, cu, padded, padded, 8, 8)
        for start, after, length in zip(PADDED, PADDED[1:], cu.diff().tolist(), strict=False):
            counted[:, start + length : after] = 0
    labels = ids.flip(1)
    loss = losses(model, mine(ids), labels=mine(labels), **inputs)
    total = (loss * mine(counted)).square().sum()
    total.backward()
    tops = [x.self_attention.core_attention.current_max_attn_logits for x in model.decoder.layers]
    found = [total.detach(), *(x.grad for x in model.parameters()), torch.stack(tops)]
    if config.context_parallel_size > 1:
        for n, x in enumerate(found):
            op = dist.ReduceOp.MAX if n == len(found) - 1 else dist.ReduceOp.SUM
            dist.all_reduce(x, op)
    return found


HEADS = {"groups": {"num_query_groups": 2}, "fewer groups": {"num_query_groups": 1}, "mla": {}}
TAU = 8.0


def heads_over(ranks: int) -> dict[str, list[torch.Tensor]]:
    """[losses, max logits, those behind a clip] of the same tokens, with heads over ranks."""
    found = {}
    for name, changes in HEADS.items():
        sizes = {"tensor_model_parallel_size": ranks, "qk_clip_threshold": TAU}
        model = model_of(config_of(name == "mla", qk_clip=True, **sizes, **changes))
        ids = tokens(2, 11)
        loss = losses(model, ids)
        core = model.decoder.layers[0].self_attention.core_attention
        before = core.current_max_attn_logits.clone()
        found[name] = [loss.detach(), before]
        if name != "fewer groups":  # ranks then share rows of a head, and the clip refuses
            clip_qk(model, gqa="q_only")
            losses(model, ids)
            found[name].append(core.current_max_attn_logits.clone())
    return found


def heads_of_rank(rank: int) -> dict[str, list[torch.Tensor]]:
    with megatron_on_cpu(tensor_model_parallel_size=2):
        return heads_over(2)


def _refusals() -> list[str]:
    """Of five tokens a rank, and of a document of six."""
    core = KeelDotProductAttention(
        config=config_of(context_parallel_size=2),
        layer_number=1,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
    )
    cu = torch.tensor([0, 4, 10], dtype=torch.int32)
    errors = []
    for packed in (None, PackedSeqParams("thd", cu, cu)):
        try:
            core(*torch.randn(3, 5, 1, 4, 8).double(), packed_seq_params=packed)
        except ValueError as error:
            errors.append(str(error))
    return errors
