"""How vLLM's Python finds the connector."""

from __future__ import annotations

from typing import Final

from lmcache_webhook.injection.patch import Patch, Step
from lmcache_webhook.injection.pod import Container

PYTHONPATH: Final = "PYTHONPATH"
KEPT_PYTHONPATH: Final = "INJECTED_PYTHONPATH"
"""Where a PYTHONPATH goes that comes from a ConfigMap or the like: Kubernetes puts it into ours."""


def add_python_path(
    patch: Patch, at: tuple[Step, ...], container: Container, directory: str
) -> None:
    """Put a directory behind those of a container's PYTHONPATH.

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
