"""Operations of RFC 6902 on a JSON document."""

from __future__ import annotations

import copy
from typing import Any

Operation = dict[str, Any]
Step = str | int


class Patch:
    """Collects operations, and knows what the document looks like after them.

    Args:
        document: What is to be changed; it is copied.

    Attributes:
        operations: So far, in order.
    """

    def __init__(self, document: dict[str, Any]) -> None:
        self._after = copy.deepcopy(document)
        self.operations: list[Operation] = []

    def put(self, path: tuple[Step, ...], value: Any) -> None:
        """Set a member of an object, which may be there already; objects above it that are missing or null are made."""
        *above, last = path
        name = str(last)
        parent = self._object(tuple(above))
        if name in parent and parent[name] == value:
            return
        self._add(path, value)
        parent[name] = copy.deepcopy(value)

    def append(self, path: tuple[Step, ...], item: Any) -> None:
        """Add an item at the end of a list, which is made where it is missing or null."""
        items = self._at(path)
        if not isinstance(items, list):
            self.put(path, [item])
            return
        self._add((*path, "-"), item)
        items.append(copy.deepcopy(item))

    def insert(self, path: tuple[Step, ...], index: int, item: Any) -> None:
        """Add an item to a list that is there, before the one at `index`."""
        items = self._at(path)
        assert isinstance(items, list)
        self._add((*path, index), item)
        items.insert(index, copy.deepcopy(item))

    def replace(self, path: tuple[Step, ...], value: Any) -> None:
        """Put another value in the place of one that is there."""
        *above, last = path
        parent = self._at(tuple(above))
        self.operations.append({"op": "replace", "path": pointer(path), "value": copy.deepcopy(value)})
        parent[last] = copy.deepcopy(value)

    def _add(self, path: tuple[Step, ...], value: Any) -> None:
        self.operations.append({"op": "add", "path": pointer(path), "value": copy.deepcopy(value)})

    def _at(self, path: tuple[Step, ...]) -> Any:
        found: Any = self._after
        for step in path:
            if isinstance(found, dict):
                found = found.get(str(step))
            elif isinstance(found, list) and isinstance(step, int):
                found = found[step]
            else:
                return None
        return found

    def _object(self, path: tuple[Step, ...]) -> dict[str, Any]:
        found = self._at(path)
        if isinstance(found, dict):
            return found
        *above, name = path
        parent = self._object(tuple(above))
        self._add(path, {})
        made: dict[str, Any] = {}
        parent[str(name)] = made
        return made


def pointer(path: tuple[Step, ...]) -> str:
    """The JSON pointer (RFC 6901) of a path."""
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in path)
