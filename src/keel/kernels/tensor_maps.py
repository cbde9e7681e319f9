"""Encoded TMA descriptors, kept by address: encoding one takes longer than looking it up.

An encoded map depends on an address, shape, strides, box, dtype and how it is swizzled. All but
the address are fixed for a `TensorMaps`; allocators hand out the same addresses again and again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

from keel.bounded import make_room

MAX_ADDRESSES = 1024
"""Of one layout, about half a kilobyte each; the oldest go first."""

MAX_LAYOUTS = 256

_by_layout: dict[Hashable, TensorMaps] = {}
"""Launches of one layout share their maps, whatever the mask."""


class TensorMaps(dict[int, Any]):
    """Maps of one layout by address; one that is missing is encoded."""

    def __init__(self, encode: Callable[[int], Any]) -> None:
        self._encode = encode

    def __missing__(self, address: int) -> Any:
        made = self._encode(address)
        make_room(self, MAX_ADDRESSES)
        self[address] = made
        return made


class _Address:
    """What stands for a tensor where only its address is asked for."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def tensor_maps(descriptor: Any, form: Any, expand: Callable[[Any, Any], list[Any]]) -> TensorMaps:
    """The maps of tensors with the layout of a descriptor; expand(descriptor, form)[0] is one."""
    template = copy.copy(descriptor)
    template.base = None  # the first tensor must not live on
    key = (repr(template), repr(form), descriptor.base.dtype, expand)

    def encode(address: int) -> Any:
        one = copy.copy(template)
        one.base = _Address(address)
        return expand(one, form)[0]

    found = _by_layout.get(key)
    if found is None:
        make_room(_by_layout, MAX_LAYOUTS)
        found = _by_layout[key] = TensorMaps(encode)
    return found
