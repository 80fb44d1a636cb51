"""What a pod's annotations ask for."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from lmcache_core.security import validate_tenant

from lmcache_webhook.injection.pod import DeclinedError, Metadata

PREFIX: Final = "lmcache.io/"
INJECT: Final = f"{PREFIX}inject"
STATUS: Final = f"{PREFIX}inject-status"
INJECTED: Final = f"{PREFIX}injected"
"""A label: network policies find injected pods by it."""
SIDECARS: Final = f"{PREFIX}sidecars"
"""A label with the name of the Service by which the broker finds a pod's sidecar; the chart's
own pods have it too.
"""
CONTAINER: Final = f"{PREFIX}container"
ARENA_GB: Final = f"{PREFIX}arena-gb"
DISK_GB: Final = f"{PREFIX}disk-gb"
TENANT: Final = f"{PREFIX}tenant"
RUN_AS_USER: Final = f"{PREFIX}run-as-user"
KNOWN: Final = (INJECT, STATUS, CONTAINER, ARENA_GB, DISK_GB, TENANT, RUN_AS_USER)

MAX_USER: Final = 2**31 - 1
MAX_SHOWN_CHARS: Final = 60


@dataclass(frozen=True, slots=True)
class PodRequest:
    """What one pod asks for; None: as the webhook's settings say.

    Attributes:
        container: Name of the container that runs vLLM; None: the one that looks like it.
        arena_gb: Shared memory, GiB.
        disk_gb: Disk of the node, GiB; 0 for none.
        tenant: Whose cache it is.
        run_as_user: Whom vLLM's image runs as, where the pod does not say.
    """

    container: str | None = None
    arena_gb: float | None = None
    disk_gb: float | None = None
    tenant: str | None = None
    run_as_user: int | None = None


def is_asked_for(metadata: Metadata) -> bool:
    """Return whether a pod has the label or annotation that asks for injection. An annotation wins
    over a label.
    """
    annotation = (metadata.annotations or {}).get(INJECT)
    return (annotation if annotation is not None else (metadata.labels or {}).get(INJECT)) == "true"


def read_request(annotations: Mapping[str, str]) -> PodRequest:
    """Read a pod's annotations.

    Raises:
        DeclinedError: One of them is misspelt or impossible: guessing would give the pod something
            that was not asked for.
    """
    for name in annotations:
        if name.startswith(PREFIX) and name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, n=1)
            raise DeclinedError(
                f"the annotation {_shown(name)} is not known: "
                + (f"did you mean {near[0]}?" if near else "remove it")
            )
    user = _number(annotations, RUN_AS_USER, 1, MAX_USER)
    if user is not None and not user.is_integer():
        raise _impossible(RUN_AS_USER, annotations[RUN_AS_USER], "a whole number")
    tenant = annotations.get(TENANT)
    if tenant is not None:
        try:
            validate_tenant(tenant)
        except ValueError as exc:
            raise DeclinedError(f"{TENANT}={_shown(tenant)!r}: {exc}") from None
    return PodRequest(
        container=annotations.get(CONTAINER),
        arena_gb=_number(annotations, ARENA_GB, 0.0625, 65_536),
        disk_gb=_number(annotations, DISK_GB, 0, 1 << 20),
        tenant=tenant,
        run_as_user=None if user is None else int(user),
    )


def _number(annotations: Mapping[str, str], name: str, least: float, most: float) -> float | None:
    text = annotations.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise _impossible(name, text, f"a number from {least:g} to {most:g}")
    return value


def _impossible(name: str, text: str, wanted: str) -> DeclinedError:
    return DeclinedError(f"{name}={_shown(text)!r}: write {wanted}")


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"
