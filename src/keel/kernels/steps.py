"""The launches of a backward, noted once and done again with other addresses."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from keel.kernels.launch import Recipe, Tensors

ABSENT = ("BIAS", "SLOPES", "OFFSET", "COUNTER", "DBIAS", "DQ32")


@dataclass(slots=True)
class Steps:
    """Empty where a backward is more than launches."""

    recipes: list[Recipe] = field(default_factory=list)
    room: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    """Shape and dtype of what lies between launches, by its name as an argument of kernels."""

    def add(self, recipe: Recipe, **between: torch.Tensor) -> None:
        """A launch, and tensors that it found or left in such places."""
        self.recipes.append(recipe)
        for name, x in between.items():
            self.room[name] = (tuple(x.shape), x.dtype)

    def clear(self) -> None:
        self.recipes.clear()

    def repeat(
        self,
        stream: int | None,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(dq, dk, dv) for tensors laid out as before; `stream` is from `launch_stream`.

        For backwards without bias, ALiBi and sink.
        """
        empty, device = torch.empty, q.device
        dq = empty(q.shape, dtype=q.dtype, device=device)
        dk = empty(k.shape, dtype=k.dtype, device=device)
        dv = empty(v.shape, dtype=v.dtype, device=device)
        tensors: Tensors = dict.fromkeys(ABSENT)
        tensors |= {
            **{"Q": q, "K": k, "V": v, "OUT": out, "LSE": lse},
            **{"DOUT": dout, "DO": dout, "DLSE": dlse, "DQ": dq, "DQ_OUT": dq},
            **{"DK": dk, "DK_OUT": dk, "DV": dv, "DV_OUT": dv, "DVAL": dv},
        }
        for name, (shape, dtype) in self.room.items():
            tensors[name] = empty(shape, dtype=dtype, device=device)
        addresses = {name: x.data_ptr() for name, x in tensors.items() if x is not None}
        for recipe in self.recipes:
            if stream is None or not recipe.run_at(stream, addresses):
                recipe.run(tensors)
        return dq, dk, dv
