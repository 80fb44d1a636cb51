"""Sets with the same order in each run: by default the order depends on addresses of objects."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def numbered(cls: C) -> C:
    """Make the hashes of a class's objects consecutive numbers, in the order of the first calls."""
    made = itertools.count(1)
    numbers: dict[int, tuple[int, Any]] = {}

    def number(self: object) -> int:
        address = id(self)
        if (known := numbers.get(address)) is None:
            known = next(made), weakref.ref(self, lambda _: numbers.pop(address))
            numbers[address] = known
        return known[0]

    cls.__hash__ = number  # type: ignore[method-assign, assignment]
    return cls


class OrderedWeakSet(weakref.WeakKeyDictionary[Any, None]):
    """A `WeakSet` in order of insertion, for objects that cannot be numbered."""

    def add(self, member: Any) -> None:
        self[member] = None

    def discard(self, member: Any) -> None:
        self.pop(member, None)
