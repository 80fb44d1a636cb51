"""EndpointSlices, as the Kubernetes API writes them, to sightings."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from lmcache_core.p2p import PeerKind, parse_distributed_url
from lmcache_core.security import validate_instance_id


@dataclass(frozen=True, slots=True)
class Sighting:
    """What a list or the cluster tells of a peer.

    Attributes:
        id: The instance's id; in a cluster the pod's name.
        distributed_url: Where it serves.
        kind: What it is.
        zone: Failure domain, or empty.
        node: Machine, or empty.
        is_ready: It may be asked for chunks, though it has not registered.
        is_leaving: It is about to end.
    """

    id: str
    distributed_url: str
    kind: PeerKind = "sidecar"
    zone: str = ""
    node: str = ""
    is_ready: bool = True
    is_leaving: bool = False


MAX_SLICES: Final = 4096


class SliceTable:
    """The slices of one service. What cannot be read in them is passed over: a newer API may say
    things that we do not know.

    Args:
        port: Of lm://, where a slice names no port called `port_name`.
        port_name: The slice's port to take.
        is_encrypted: Whether what is served there is lm+tls://.
    """

    def __init__(self, port: int, port_name: str, is_encrypted: bool = False) -> None:
        self._port = port
        self._port_name = port_name
        self._scheme = "lm+tls" if is_encrypted else "lm"
        self._slices: dict[str, Mapping[str, Any]] = {}

    def replace(self, items: list[Mapping[str, Any]]) -> None:
        """Replace all slices."""
        self._slices = {name: item for item in items[:MAX_SLICES] if (name := _name_of(item))}

    def apply(self, kind: str, item: Mapping[str, Any]) -> None:
        """Add, replace or remove a slice."""
        name = _name_of(item)
        if kind == "DELETED":
            self._slices.pop(name, None)
        elif (
            kind in ("ADDED", "MODIFIED")
            and name
            and (name in self._slices or len(self._slices) < MAX_SLICES)
        ):
            self._slices[name] = item

    def sightings(self) -> dict[str, Sighting]:
        """Peers by id. One that two slices name, as happens while it moves from one to the
        other, is there if it is in either.
        """
        found: dict[str, Sighting] = {}
        for item in self._slices.values():
            for sighting in self._of(item):
                known = found.get(sighting.id)
                if known is None or (sighting.is_ready and not known.is_ready):
                    found[sighting.id] = sighting
        return found

    def _of(self, item: Mapping[str, Any]) -> Iterator[Sighting]:
        ports = {port.get("name"): port.get("port") for port in item.get("ports") or ()}
        port = ports.get(self._port_name) or self._port
        for endpoint in item.get("endpoints") or ():
            conditions, target = endpoint.get("conditions") or {}, endpoint.get("targetRef") or {}
            addresses = endpoint.get("addresses") or ()
            if target.get("kind") != "Pod" or not addresses:
                continue
            is_leaving = conditions.get("terminating") is True
            try:
                url = _url(self._scheme, str(addresses[0]), int(port))
                instance = validate_instance_id(str(target.get("name", "")))
            except ValueError:
                continue
            yield Sighting(
                instance,
                url,
                zone=str(endpoint.get("zone") or ""),
                node=str(endpoint.get("nodeName") or ""),
                is_ready=conditions.get("ready") is not False and not is_leaving,
                is_leaving=is_leaving,
            )


def _name_of(item: Mapping[str, Any]) -> str:
    return str((item.get("metadata") or {}).get("name") or "")


def _url(scheme: str, address: str, port: int) -> str:
    host = (
        f"[{address}]"
        if isinstance(ipaddress.ip_address(address), ipaddress.IPv6Address)
        else address
    )
    url = f"{scheme}://{host}:{port}"
    parse_distributed_url(url)
    return url
