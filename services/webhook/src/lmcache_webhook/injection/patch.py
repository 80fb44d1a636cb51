"""Operations of RFC 6902 on a JSON document."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

Operation = dict[str, Any]
Step = str | int


class Patch:
    """Collects operations, and knows what the document looks like after them.

    Copies only the containers on the path to a change: a document may be large, and nested too
    deeply for a recursive copy.

    Args:
        document: The document to change; it is not modified.

    Attributes:
        operations: The operations so far, in order.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._after: Any = dict(document)
        self.operations: list[Operation] = []

    def put(self, path: tuple[Step, ...], value: Any) -> None:
        """Set a member of an object, replacing an existing one. Create objects above it that are
        missing or null.
        """
        *above, last = path
        for length in range(1, len(path)):
            if self.at(path[:length]) is None:
                self._set(path[:length], {})
        parent = self.at(tuple(above))
        if str(last) not in parent or parent[str(last)] != value:
            self._set(path, value)

    def append(self, path: tuple[Step, ...], item: Any) -> None:
        """Append an item to a list. Create the list if it is missing or null."""
        items = self.at(path)
        if not isinstance(items, list):
            self.put(path, [item])
            return
        self._add((*path, "-"), item)
        self._own(path).append(item)

    def insert(self, path: tuple[Step, ...], index: int, item: Any) -> None:
        """Insert an item into an existing list, before the one at `index`."""
        self._add((*path, index), item)
        self._own(path).insert(index, item)

    def replace(self, path: tuple[Step, ...], value: Any) -> None:
        """Replace an existing value."""
        self.operations.append({"op": "replace", "path": pointer(path), "value": value})
        self._own(path[:-1])[path[-1]] = value

    def _set(self, path: tuple[Step, ...], value: Any) -> None:
        self._add(path, value)
        self._own(path[:-1])[str(path[-1])] = value

    def _add(self, path: tuple[Step, ...], value: Any) -> None:
        self.operations.append({"op": "add", "path": pointer(path), "value": value})

    def at(self, path: tuple[Step, ...]) -> Any:
        """Return the value at a path after the operations so far; None if there is none."""
        found: Any = self._after
        for step in path:
            if isinstance(found, dict):
                found = found.get(str(step))
            elif isinstance(found, list) and isinstance(step, int):
                found = found[step]
            else:
                return None
        return found

    def _own(self, path: tuple[Step, ...]) -> Any:
        """Return the value at a path, after replacing all containers on the path with copies."""
        found: Any = self._after
        for step in path:
            found[step] = copy.copy(found[step])
            found = found[step]
        return found


def pointer(path: tuple[Step, ...]) -> str:
    """Return the JSON pointer (RFC 6901) of a path."""
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in path)


KEPT_PREFIX: Final = "INJECTED_"
"""Where a variable goes that comes from a ConfigMap or the like: Kubernetes puts it into ours."""


def extend_variable(
    patch: Patch, at: tuple[Step, ...], name: str, text: str, separator: str
) -> None:
    """Append a text to a variable of a container.

    Args:
        at: Path of the container.
        name: Name of the variable, which is created if missing.
        separator: Put before the text, unless the variable is empty.
    """
    variables = patch.at((*at, "env")) or []
    places = [index for index, variable in enumerate(variables) if variable["name"] == name]
    if not places:
        patch.append((*at, "env"), {"name": name, "value": text})
        return
    place = places[-1]  # of several with that name, the last one counts
    variable = variables[place]
    if variable.get("valueFrom") is not None:
        kept = f"{KEPT_PREFIX}{name}"
        patch.insert((*at, "env"), place, {"name": kept, "valueFrom": variable["valueFrom"]})
        patch.replace(
            (*at, "env", place + 1), {"name": name, "value": f"$({kept}){separator}{text}"}
        )
        return
    value = variable.get("value")
    patch.replace(
        (*at, "env", place),
        {"name": name, "value": f"{value}{separator}{text}" if value else text},
    )
