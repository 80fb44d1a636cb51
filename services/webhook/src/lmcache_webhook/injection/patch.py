"""Operations of RFC 6902 on a JSON document."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final

from lmcache_webhook.injection.pod import Container

Operation = dict[str, Any]
Step = str | int


class Patch:
    """Collects operations, and knows what the document looks like after them.

    Copies only what lies on the way to a change: a document may be large, and nested so deeply
    that a recursive copy would fail.

    Args:
        document: What is to be changed; it is not modified.

    Attributes:
        operations: So far, in order.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._after: Any = dict(document)
        self.operations: list[Operation] = []

    def put(self, path: tuple[Step, ...], value: Any) -> None:
        """Set a member of an object, which may be there already; objects above it that are
        missing or null are made.
        """
        *above, last = path
        for length in range(1, len(path)):
            if self._at(path[:length]) is None:
                self._set(path[:length], {})
        parent = self._at(tuple(above))
        if str(last) not in parent or parent[str(last)] != value:
            self._set(path, value)

    def append(self, path: tuple[Step, ...], item: Any) -> None:
        """Add an item at the end of a list, which is made where it is missing or null."""
        items = self._at(path)
        if not isinstance(items, list):
            self.put(path, [item])
            return
        self._add((*path, "-"), item)
        self._own(path).append(item)

    def insert(self, path: tuple[Step, ...], index: int, item: Any) -> None:
        """Add an item to a list that is there, before the one at `index`."""
        self._add((*path, index), item)
        self._own(path).insert(index, item)

    def replace(self, path: tuple[Step, ...], value: Any) -> None:
        """Put another value in the place of one that is there."""
        self.operations.append({"op": "replace", "path": pointer(path), "value": value})
        self._own(path[:-1])[path[-1]] = value

    def _set(self, path: tuple[Step, ...], value: Any) -> None:
        self._add(path, value)
        self._own(path[:-1])[str(path[-1])] = value

    def _add(self, path: tuple[Step, ...], value: Any) -> None:
        self.operations.append({"op": "add", "path": pointer(path), "value": value})

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

    def _own(self, path: tuple[Step, ...]) -> Any:
        """Return what is at a path, after copies of all containers on the way have taken their
        place.
        """
        found: Any = self._after
        for step in path:
            found[step] = copy.copy(found[step])
            found = found[step]
        return found


def pointer(path: tuple[Step, ...]) -> str:
    """Return the JSON pointer (RFC 6901) of a path."""
    return "".join(f"/{str(step).replace('~', '~0').replace('/', '~1')}" for step in path)


PYTHONPATH: Final = "PYTHONPATH"
KEPT_PYTHONPATH: Final = "INJECTED_PYTHONPATH"
"""Where a PYTHONPATH goes that comes from a ConfigMap or the like: Kubernetes puts it into ours."""


def add_python_path(
    patch: Patch, at: tuple[Step, ...], container: Container, directory: str
) -> None:
    """Append a directory to those of a container's PYTHONPATH.

    Args:
        patch: Gets the operations.
        at: The container.
        container: The same, with types.
        directory: Where the connector's packages are.
    """
    variables = list(container.env or ())
    places = [index for index, variable in enumerate(variables) if variable.name == PYTHONPATH]
    if not places:
        patch.append((*at, "env"), {"name": PYTHONPATH, "value": directory})
        return
    place = places[-1]  # of several the last one counts
    variable = variables[place]
    if variable.valueFrom is not None:
        patch.insert(
            (*at, "env"), place, {"name": KEPT_PYTHONPATH, "valueFrom": variable.valueFrom}
        )
        patch.replace(
            (*at, "env", place + 1),
            {"name": PYTHONPATH, "value": f"$({KEPT_PYTHONPATH}):{directory}"},
        )
        return
    value = variable.value or ""
    patch.replace(
        (*at, "env", place),
        {"name": PYTHONPATH, "value": f"{value}:{directory}" if value else directory},
    )
