"""The Megatron family by its own names, on the fused softmax.

Same constructors and calls; what the originals drop or refuse is honoured here: masks compose with
causality and windows, any length, stride and dtype is fused, nothing of the caller is overwritten.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any

import torch

from keel.softmax.functional import FullyMasked, Window, scaled_masked_softmax

MaskFunc = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class AttnMaskType(enum.Enum):
    """Megatron's mask types, with its numbers."""

    padding = 1
    causal = 2
    no_mask = 3
    padding_causal = 4
    arbitrary = 5
    causal_bottom_right = 6


class UsageError(ValueError, AssertionError):
    """A ValueError that is also what Megatron's assertions raise."""


def as_mask_type(value: Any) -> AttnMaskType:
    """Our mask type for ours, Megatron's or a name."""
    name = getattr(value, "name", value)
    if name not in AttnMaskType.__members__:
        known = ", ".join(AttnMaskType.__members__)
        raise UsageError(f"unknown attn_mask_type {name!r}: expected one of {known}")
    return AttnMaskType[name]


def hides_future(kind: AttnMaskType, window: Window | None, sq: int, sk: int) -> bool:
    """Whether row i sees columns up to i + sk - sq only."""
    if kind in (AttnMaskType.causal, AttnMaskType.padding_causal):
        if sq != sk and sq > 1 and window is None:
            raise UsageError(
                f"attn_mask_type {kind.name} needs sq == sk, got {(sq, sk)}; "
                "causal_bottom_right works for any shape"
            )
        return True
    return kind is AttnMaskType.causal_bottom_right


class ScaledUpperTriangMaskedSoftmax:
    """Causal softmax of (n, s, s) or (b, h, s, s) scores: row i sees columns 0..i."""

    @staticmethod
    def apply(inputs: torch.Tensor, scale: float | torch.Tensor | None = None) -> torch.Tensor:
        if inputs.ndim < 2 or inputs.shape[-1] != inputs.shape[-2]:
            raise UsageError(
                f"causal scores must be square, got {tuple(inputs.shape)}; for sq != sk say which "
                "corner the diagonal meets: scaled_masked_softmax(x, causal='bottom-right')"
            )
        return scaled_masked_softmax(inputs, scale=1.0 if scale is None else scale, causal=True)


class ScaledMaskedSoftmax:
    """Softmax of (b, h, sq, sk) scores; a broadcastable mask hides where nonzero."""

    @staticmethod
    def apply(
        inputs: torch.Tensor,
        mask: torch.Tensor | None = None,
        scale: float | torch.Tensor | None = None,
    ) -> torch.Tensor:
        return scaled_masked_softmax(inputs, mask, scale=1.0 if scale is None else scale)


class ScaledSoftmax:
    """Softmax of scaled scores, nothing hidden."""

    @staticmethod
    def apply(inputs: torch.Tensor, scale: float | torch.Tensor | None = None) -> torch.Tensor:
        return scaled_masked_softmax(inputs, scale=1.0 if scale is None else scale)


class SoftmaxOne(torch.nn.Module):
    """Softmax with something extra in the denominator, so that a row may attend to nothing.

    Args:
        dim: the dim to normalise; the head dim is the second of four.
        denominator_offset: a number c > 0 is added to each row's sum of exponentials, 1.0 is
            "softmax off by one"; a tensor (h,) holds logits, that is log c, for each head.

    >>> SoftmaxOne()(torch.zeros(1, 1, 1, 3)).tolist()
    [[[[0.25, 0.25, 0.25]]]]
    """

    def __init__(
        self, dim: int | None = None, denominator_offset: torch.Tensor | float = 1.0
    ) -> None:
        super().__init__()
        self.dim = -1 if dim is None else dim
        if not isinstance(denominator_offset, torch.Tensor) and not (
            0 <= denominator_offset < math.inf
        ):
            raise ValueError(
                f"denominator_offset must be at least 0 and finite, got {denominator_offset}; a "
                "tensor holds logits instead"
            )
        self.denominator_offset = denominator_offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        offset = self.denominator_offset
        sink: torch.Tensor | float | None
        if isinstance(offset, torch.Tensor):
            sink = offset.reshape(-1).to(x.device)
        else:
            sink = math.log(offset) if offset > 0 else None
        moved = x.movedim(self.dim, -1)
        return scaled_masked_softmax(moved, sink=sink).movedim(-1, self.dim)


class FusedScaleMaskSoftmax(torch.nn.Module):
    """scale + mask + softmax of (b, np, sq, sk) scores, with Megatron's constructor.

    Args:
        input_in_fp16, input_in_bf16: what the model computes in; probabilities come out in it.
        attn_mask_type: `AttnMaskType` (Megatron's own works too). Causal types hide the future
            whether or not a mask is passed.
        scaled_masked_softmax_fusion: run the fused kernel; False runs plain torch.
        mask_func: what the plain path masks with. One that does more than hide where the mask is
            True cannot be fused; then, and only then, the plain path runs in spite of the flag.
        softmax_in_fp32: compute in fp32. The fused kernel always does.
        scale: a number, needs softmax_in_fp32.
        window_size: (left, right), -1 for an open side.
        fully_masked: rows that see nothing become "zeros" or "uniform", on both paths.
    """

    def __init__(
        self,
        input_in_fp16: bool,
        input_in_bf16: bool,
        attn_mask_type: Any,
        scaled_masked_softmax_fusion: bool,
        mask_func: MaskFunc | None,
        softmax_in_fp32: bool,
        scale: float | None,
        window_size: Window | None = None,
        *,
        fully_masked: FullyMasked = "zeros",
    ) -> None:
        super().__init__()
        if input_in_fp16 and input_in_bf16:
            raise UsageError("input_in_fp16 and input_in_bf16 cannot both be set")
        if scale is not None and not softmax_in_fp32:
            raise UsageError(f"softmax should be in fp32 when scaled, got scale={scale}")
        self.attn_mask_type = as_mask_type(attn_mask_type)
        self.input_in_fp16, self.input_in_bf16 = input_in_fp16, input_in_bf16
        self.input_in_float16 = input_in_fp16 or input_in_bf16
        self.scaled_masked_softmax_fusion = scaled_masked_softmax_fusion
        self.mask_func = mask_func
        self.softmax_in_fp32 = softmax_in_fp32
        self.scale = scale
        self.window_size = window_size
        self.fully_masked = fully_masked
        self._mask_func_hides = mask_func is None or _only_hides(mask_func)

    def forward(
        self,
        input: torch.Tensor,
        mask: torch.Tensor | None,
        softmax_offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if input.ndim != 4:
            raise UsageError(f"scores must be (b, np, sq, sk), got shape {tuple(input.shape)}")
        if self.is_kernel_available(mask, *input.shape):
            return self.forward_fused_softmax(input, mask, softmax_offset)
        return self.forward_torch_softmax(input, mask, softmax_offset)

    def is_kernel_available(
        self, mask: torch.Tensor | None, b: int, np: int, sq: int, sk: int
    ) -> bool:
        """Whether the fused path runs: for every shape, if asked for."""
        return self.scaled_masked_softmax_fusion and (mask is None or self._mask_func_hides)

    def forward_fused_softmax(
        self,
        input: torch.Tensor,
        mask: torch.Tensor | None,
        softmax_offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        causal, window = self._hides(*input.shape[2:])
        probs = scaled_masked_softmax(
            *(input, mask),
            scale=1.0 if self.scale is None else self.scale,
            causal=causal,
            window=window,
            sink=None if softmax_offset is None else softmax_offset.reshape(-1),
            fully_masked=self.fully_masked,
        )
        return probs.to(self._output_dtype(input))

    def forward_torch_softmax(
        self,
        input: torch.Tensor,
        mask: torch.Tensor | None,
        softmax_offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The same in plain torch, step by step."""
        x = input.float() if self.input_in_float16 and self.softmax_in_fp32 else input
        if self.scale is not None:
            x = x * self.scale
        sq, sk = x.shape[2:]
        causal, window = self._hides(sq, sk)
        offset = torch.arange(sk, device=x.device) - torch.arange(sq, device=x.device)[:, None]
        offset = offset - (sk - sq)  # columns right of the bottom-right diagonal
        hidden = torch.zeros(1, 1, sq, sk, dtype=torch.bool, device=x.device)
        if causal:
            hidden = hidden | (offset > 0)
        if window is not None:
            left, right = (-1 if side is None else side for side in window)
            hidden = hidden | ((offset < -left) if left >= 0 else False)
            hidden = hidden | ((offset > right) if right >= 0 else False)
        if mask is not None and mask.is_floating_point():
            x = x + mask
        elif mask is not None and self._mask_func_hides:
            hidden = hidden | mask.bool()
        elif mask is not None:
            assert self.mask_func is not None
            x = self.mask_func(x.clone(), mask)  # it may write to what it gets
        x = x.masked_fill(hidden, -torch.inf)
        empty = (x == -torch.inf).all(-1, keepdim=True)
        x = x.masked_fill(empty, 0.0)
        if softmax_offset is None:
            probs = torch.softmax(x, -1)
            if self.fully_masked == "zeros":
                probs = probs.masked_fill(empty, 0.0)
        else:
            sink = softmax_offset.reshape(1, -1, 1, 1).expand(*x.shape[:3], 1).to(x.dtype)
            probs = torch.softmax(torch.cat([x, sink], -1), -1)[..., :-1]
            probs = probs.masked_fill(empty, 0.0)
        return probs.to(self._output_dtype(input))

    @staticmethod
    def get_batch_per_block(sq: int, sk: int, b: int, np: int) -> int:
        """Rows that one block of Megatron's CUDA kernel takes; for callers who ask."""
        power = 1 << max(sk - 1, 0).bit_length()
        warp = min(power, 32)
        return (128 // warp) * (2 if power <= 128 else 1)

    def _hides(self, sq: int, sk: int) -> tuple[bool, Window | None]:
        """(causal, window), both from the bottom-right corner."""
        return hides_future(self.attn_mask_type, self.window_size, sq, sk), self.window_size

    def _output_dtype(self, input: torch.Tensor) -> torch.dtype:
        if self.softmax_in_fp32 and self.input_in_fp16:
            return torch.float16
        if self.softmax_in_fp32 and self.input_in_bf16:
            return torch.bfloat16
        return input.dtype


def _only_hides(mask_func: MaskFunc) -> bool:
    """Whether a mask function leaves False alone and makes True a large negative number."""
    scores = torch.tensor([[[[1.5, 1.5, -2.0]]]])
    mask = torch.tensor([[[[False, True, False]]]])
    try:
        found = mask_func(scores.clone(), mask)
    except Exception:  # a function of the caller: whatever it needs, it is not plain hiding
        return False
    return bool(found.shape == scores.shape and found[..., 1] <= -1e4) and torch.equal(
        found[..., ::2], scores[..., ::2]
    )
