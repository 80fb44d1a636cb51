"""The loops of the codecs as plain Python over arrays that check every index, so that a fuzzer sees
where they go and where they reach.

Machine code is compiled without bounds checks and cannot be instrumented. numba's number types are
callable outside of it and give numpy's numbers, with the same width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from lmcache_core.serde import planes, rans, symbols, values
from lmcache_core.serde.machine_code import Loops


class Checked(np.ndarray):
    """An array without negative indices; numpy itself refuses those after the end."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_in_front(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_in_front(index), value)


def _in_front(index: Any) -> Any:
    for part in index if isinstance(index, tuple) else (index,):
        numbers = (part.start, part.stop) if isinstance(part, slice) else (part,)
        for number in numbers:
            if number is not None and np.ndim(number) == 0 and number < 0:
                raise IndexError(f"index {number} lies before the array")
    return index


def _checked(loop: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        # machine code counts around the end of a number, and divides as IEEE 754 says, without a
        # word
        with np.errstate(all="ignore"):
            return loop(*(_viewed(argument) for argument in arguments))

    return call


def _viewed(argument: Any) -> Any:
    if not isinstance(argument, np.ndarray):
        return argument
    view: npt.NDArray[Any] = argument.view(Checked)
    return view


def plain_loops() -> Loops:
    """All loops of `load_loops`, as Python."""
    return Loops(
        encode_sections=_checked(rans.encode_sections),
        decode_sections=_checked(rans.decode_sections),
        quantise_by_token=_checked(values.quantise_by_token),
        quantise_by_plane=_checked(values.quantise_by_plane),
        restore=_checked(values.restore),
        choose=_checked(symbols.choose),
        split=_checked(planes.split),
        join=_checked(planes.join),
        count=_checked(planes.count),
    )
