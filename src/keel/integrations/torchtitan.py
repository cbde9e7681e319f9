"""Inner attention for torchtitan's models, by its overrides.

    --override.imports keel.integrations.torchtitan.keel_varlen    # models with attn_backend varlen
    --override.imports keel.integrations.torchtitan.keel_flex      # ... with attn_backend flex

Shapes, by torchtitan's letters: B samples of L tokens (LK of keys), N heads of H channels (HV of
values); T = B * L packed tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask

from keel import masks
from keel.attention import flex_flash_attn_func, traced_documents
from keel.masks import AttnMask
from keel.masks.inputs import remembered
from keel.nn.max_logits import KeepsMaxLogits

try:
    from torchtitan.config import derive, override
    from torchtitan.distributed.utils import is_in_batch_invariant_mode
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention, VarlenMetadata
    from torchtitan.protocols.module import Module
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"keel.integrations.torchtitan needs {missing.name}: pip install 'keel-attn[torchtitan]'",
        name=missing.name,
    ) from missing

import spmd_types as spmd  # torchtitan needs it

Tensor = torch.Tensor
OutTransform = Callable[[Tensor, Tensor], Tensor]


class KeelVarlenAttention(KeepsMaxLogits, VarlenAttention):
    """`VarlenAttention` in any dtype, with max logits for QK-Clip in training.

    Documents are those of `VarlenMetadata`, windows those of the config. Works inside of
    torch.compile.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        self.window_size = config.window_size

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
        **others: Any,
    ) -> Tensor:
        """-> (B, L, N, HV)."""
        _refuse(others)
        if not isinstance(attention_masks, VarlenMetadata):
            raise TypeError(
                "KeelVarlenAttention takes VarlenMetadata, got "
                f"{type(attention_masks).__name__}: for BlockMasks use keel_flex"
            )
        tokens = (q_BLNH.shape[0] * q_BLNH.shape[1], k_BLNH.shape[0] * k_BLNH.shape[1])
        mask = _documents(attention_masks, self.window_size, *tokens)
        return _attend(self, q_BLNH, k_BLNH, v_BLNH, mask, scale, out_transform)


class KeelFlexAttention(KeepsMaxLogits, FlexAttention):
    """`FlexAttention` for any BlockMask, with max logits for QK-Clip in training.

    The mask is read on the host, once for each BlockMask: `KeelVarlenAttention` gets by with the
    bounds of documents. Context parallelism works as torchtitan has it for FlexAttention, which
    gathers all keys.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        if config.kernel_options:
            raise ValueError(
                f"kernel_options {config.kernel_options} are those of flex_attention's kernels: "
                "leave them out (attn_backend flex instead of flex_flash)"
            )

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: OutTransform | None = None,
        **others: Any,
    ) -> Tensor:
        """-> (B, L, N, HV)."""
        _refuse(others | {"score_mod": score_mod})
        if not isinstance(attention_masks, BlockMask):
            raise TypeError(
                f"KeelFlexAttention takes a BlockMask, got {type(attention_masks).__name__}: for "
                "VarlenMetadata use keel_varlen"
            )
        if torch.compiler.is_compiling():
            raise NotImplementedError(
                "a BlockMask is read on the host, which torch.compile cannot trace: set "
                "compile.enable=False, or use attn_backend varlen and keel_varlen"
            )
        mask = _mask_of_blocks(attention_masks, q_BLNH, k_BLNH)
        return _attend(self, q_BLNH, k_BLNH, v_BLNH, mask, scale, out_transform)


@override(
    target=VarlenAttention.Config,
    exact=True,
    description="Attention over documents by Keel, which reports max logits",
)
def keel_varlen(config: VarlenAttention.Config) -> KeelVarlenAttention.Config:
    """For `--override.imports keel.integrations.torchtitan.keel_varlen`."""
    return derive(config, KeelVarlenAttention.Config)


@override(
    target=FlexAttention.Config,
    exact=True,
    description="Attention by Keel for any BlockMask, which reports max logits",
)
def keel_flex(config: FlexAttention.Config) -> KeelFlexAttention.Config:
    """For `--override.imports keel.integrations.torchtitan.keel_flex`."""
    return derive(config, KeelFlexAttention.Config)


def _refuse(others: dict[str, Any]) -> None:
    unknown = [name for name, x in others.items() if x is not None]
    if unknown:
        raise ValueError(
            f"attention got {', '.join(unknown)}, which Keel does not know: leave it out, or keep "
            "torchtitan's attention in these layers (override with fqns)"
        )
    if is_in_batch_invariant_mode():
        raise NotImplementedError(
            "batch-invariant mode is not supported: turn it off, or keep torchtitan's attention"
        )
    if spmd.is_type_checking():
        raise NotImplementedError(
            "attention by Keel says nothing about its types: set debug.spmd_typechecking=False"
        )


def _attend(
    module: Any,
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    v_BLNH: Tensor,
    mask: AttnMask | Tensor,
    scale: float | None,
    out_transform: OutTransform | None,
) -> Tensor:
    (B, L, N, H), HV = q_BLNH.shape, v_BLNH.shape[3]
    # Rotations may widen queries and keys.
    q, k, v = (_padded(x.to(v_BLNH.dtype).flatten(0, 1)) for x in (q_BLNH, k_BLNH, v_BLNH))
    out, meta = flex_flash_attn_func(
        *(q, k, v, mask),
        softmax_scale=H**-0.5 if scale is None else scale,
        max_logits_out=module.running_maximum(N, q),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    out_BLNH = out[..., :HV].unflatten(0, (B, L)).to(q_BLNH.dtype)
    if out_transform is None:
        return out_BLNH
    return out_transform(out_BLNH, meta.lse.unflatten(0, (B, L)))


def _documents(
    said: VarlenMetadata, window: tuple[int, int], tq: int, tk: int
) -> AttnMask | Tensor:
    if torch.compiler.is_compiling():
        return traced_documents(said.cu_seq_q, said.cu_seq_k, window)
    return remembered(
        (said.cu_seq_q, said.cu_seq_k),
        ("torchtitan", window, tq, tk),
        lambda: masks.documents(said.cu_seq_q, said.cu_seq_k, window=window, tq=tq, tk=tk),
    )


_read: weakref.WeakKeyDictionary[BlockMask, tuple[int, AttnMask]] = weakref.WeakKeyDictionary()
"""(samples, mask) of BlockMasks: all layers of a step have the same one."""


def _mask_of_blocks(block_mask: BlockMask, q_BLNH: Tensor, k_BLNH: Tensor) -> AttnMask:
    """The masks of all samples, one behind the other."""
    B, L, LK = q_BLNH.shape[0], q_BLNH.shape[1], k_BLNH.shape[1]
    known = _read.get(block_mask)
    if known is not None and known[0] == B:
        return known[1]
    samples, heads, lq, lk = block_mask.shape
    if samples not in (1, B) or heads != 1 or (lq, lk) != (L, LK):
        raise ValueError(
            f"the BlockMask is for (B, N, L, LK) = {tuple(block_mask.shape)}, but attention has "
            f"{(B, 1, L, LK)}: heads share one mask, and samples have one each or share one"
        )
    slices = []
    for n in range(B):
        of_sample = masks.from_block_mask(block_mask, batch=n if samples > 1 else None)
        move = np.array([n * L, n * L, n * LK, n * LK, n * (LK - L), n * (LK - L)])
        slices.append(of_sample.array + move)
    mask = AttnMask(np.concatenate(slices), B * L, B * LK)
    _read[block_mask] = (B, mask)
    return mask


def _padded(x: Tensor) -> Tensor:
    """Channels up to a multiple of 8, as the kernels want them; zeros add nothing to any sum."""
    missing = -x.shape[-1] % 8
    return F.pad(x, (0, missing)) if missing else x
