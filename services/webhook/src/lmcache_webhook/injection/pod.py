"""The part of a pod that decides what is injected, or why the pod stays unchanged. The rest is
neither read nor changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Annotated, Any, Final, TypeVar

from lmcache_core.errors import LMCacheError
from pydantic import BaseModel, ConfigDict, Field

MAX_TEXT_CHARS: Final = 128 << 10
"""Linux runs no program with a longer argument or variable."""

GPU_RESOURCES: Final = ("nvidia.com/gpu", "amd.com/gpu")
"""As the chart's `lmcache.gpuResources`."""
MAX_GPUS: Final = 64
"""No node has more."""

_Item = TypeVar("_Item")
_Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
# An error takes over a kilobyte, and a review has room for half a million invalid items.
_Items = Annotated[list[_Item], Field(fail_fast=True)]


class DeclinedError(LMCacheError):
    """Nothing is injected into this pod; the text says why and what to change, in one sentence."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, hide_input_in_errors=True)


class EnvVar(_Part):
    """A variable of a container."""

    name: _Text
    value: _Text | None = None
    valueFrom: dict[str, Any] | None = None


class VolumeMount(_Part):
    """Where a container sees a volume."""

    name: str
    mountPath: str
    readOnly: bool | None = None


class ContainerPort(_Part):
    """A port that a container says it listens on."""

    containerPort: int | None = None


class SecurityContext(_Part):
    """Who a container or a pod runs as."""

    runAsUser: int | None = None
    runAsGroup: int | None = None


class Resources(_Part):
    """What a container asks for."""

    requests: dict[str, Any] | None = None
    limits: dict[str, Any] | None = None

    @property
    def is_guaranteed(self) -> bool:
        """Whether a pod with only such containers has the quality of service `Guaranteed`."""
        limits, requests = self.limits or {}, self.requests or {}
        return all(
            name in limits and is_same(requests.get(name, limits[name]), limits[name])
            for name in ("cpu", "memory")
        )

    @property
    def num_gpus(self) -> int:
        """How many GPUs the container gets, at most `MAX_GPUS`."""
        amounts = [amount_of((self.limits or {}).get(name)) or 0 for name in GPU_RESOURCES]
        return min(sum(int(max(amount, 0)) for amount in amounts), MAX_GPUS)


class Container(_Part):
    """A container or init container."""

    name: str
    image: _Text | None = None
    command: _Items[_Text] | None = None
    args: _Items[_Text] | None = None
    env: _Items[EnvVar] | None = None
    envFrom: _Items[dict[str, Any]] | None = None
    ports: _Items[ContainerPort] | None = None
    resources: Resources | None = None
    volumeMounts: _Items[VolumeMount] | None = None
    securityContext: SecurityContext | None = None


class Volume(_Part):
    """A volume; only its name matters here."""

    name: str


class OperatingSystem(_Part):
    """What a pod's nodes must run."""

    name: str


class PodSpec(_Part):
    """The specification of a pod."""

    containers: _Items[Container]
    initContainers: _Items[Container] | None = None
    volumes: _Items[Volume] | None = None
    hostNetwork: bool | None = None
    hostIPC: bool | None = None
    os: OperatingSystem | None = None
    resources: dict[str, Any] | None = None
    securityContext: SecurityContext | None = None

    @property
    def all_containers(self) -> Iterator[Container]:
        """Init containers, then the others."""
        yield from self.initContainers or []
        yield from self.containers


class Metadata(_Part):
    """Who a pod is."""

    name: str | None = None
    generateName: str | None = None
    annotations: dict[str, str] | None = None
    labels: dict[str, str] | None = None


class Pod(_Part):
    """A pod, as the API server sends it."""

    metadata: Metadata = Field(default_factory=Metadata)
    spec: PodSpec


_QUANTITY: Final = re.compile(
    r"([+-]?(?:\d{1,40}(?:\.\d{0,40})?|\.\d{1,40}))(n|u|m|k|[MGTPE]i?|Ki|[eE][+-]?\d{1,2})?"
)
_DECIMAL: Final = {
    "n": -9,
    "u": -6,
    "m": -3,
    "": 0,
    "k": 3,
    "M": 6,
    "G": 9,
    "T": 12,
    "P": 15,
    "E": 18,
}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def amount_of(quantity: Any) -> Decimal | None:
    """Return the number that a quantity stands for; None if it is not a quantity."""
    if isinstance(quantity, bool) or not isinstance(quantity, str | int | float):
        return None
    found = _QUANTITY.fullmatch(str(quantity))
    if found is None:
        return None
    number, suffix = Decimal(found[1]), found[2] or ""
    if suffix in _BINARY:
        return number * (1 << _BINARY[suffix])
    return number.scaleb(_DECIMAL[suffix] if suffix in _DECIMAL else int(suffix[1:]))


def is_same(one: Any, other: Any) -> bool:
    """Return whether two quantities are equal; a value that is not a quantity equals nothing."""
    amount = amount_of(one)
    return amount is not None and amount == amount_of(other)
