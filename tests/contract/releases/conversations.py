"""What a client and a server of each protocol say to each other, always the same; recorded at a
release, and replayed since then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from lmcache_core.lookup import LookupClient, StoreEvent
from lmcache_core.p2p import BrokerClient, HeldBy, Peer
from lmcache_core.record import Chunk
from lmcache_core.sidecar.connection import SidecarConnection
from lmcache_core.wire import messages as m
from lmcache_core.wire.client import LmClient

from tests.suites.chunks import make_chunk, make_key

SERVER, CLIENT = "storage-0", "release"
IDS = [bytes([number]) * 16 for number in (1, 2, 3)]
CHUNKS = ("one", "two")
ARENA_BYTES = 1 << 20
ENGINE = m.EngineInfo(CLIENT, 4242, 0, "org/model", "layout-1", 1)
HELLO = m.engine_hello(ENGINE, [])


async def talk_lm(client: LmClient, allocate: Callable[[int], Any]) -> list[object]:
    """Over lm://; what came of it."""
    one, two = (make_key(name) for name in CHUNKS)
    chunk = make_chunk("one")
    said: list[object] = []
    await client.ping()
    said.append(await client.put([chunk]))
    said.append(await client.contains([one, two]))
    for result in await client.get([one, two], allocate):
        if isinstance(result, Chunk):
            said.append(
                result.head == chunk.head
                and bytes(result.memory.byte_array) == bytes(chunk.memory.byte_array)
            )
            result.release()
        else:
            said.append(str(result.reason))
    said.append(await client.remove([one, two]))
    said += [
        str(getattr(result, "reason", "there")) for result in await client.get([one], allocate)
    ]
    chunk.release()
    return said


LM_OUTCOME: list[object] = [[True], [True, False], True, "never_stored", 1, "never_stored"]


def talk_socket(path: Path, arena: Callable[[SidecarConnection], memoryview]) -> list[object]:
    """Over the sidecar's socket; what came of it."""
    chunk = make_chunk("one")
    size = len(chunk.memory.byte_array)
    connection = SidecarConnection(path, HELLO, 5.0)
    connection.open()
    said: list[object] = []
    try:
        names = connection.names([chunk.key.key])
        connection.call(m.Describe("vllm", "org/model", 1, 256, bytes(32), ("",)), m.Ok)
        said.append(connection.call(m.Lookup(names, (), 1000), m.ContainsOk).present)
        (lent,) = connection.call(m.ReserveExtents((size,), names), m.Extents).items
        assert isinstance(lent, m.Extent)
        arena(connection)[lent.offset : lent.offset + size] = chunk.memory.byte_array
        said.append(connection.call(m.Commit(((lent.id, chunk.head),)), m.ContainsOk).present)
        said.append(connection.call(m.Lookup(names, ("Hot",), 1000), m.ContainsOk).present)
        connection.call(m.Prefetch(names), m.Ok)
        (loaded,) = connection.call(m.LoadExtents(names, 1000, 5000), m.Extents).items
        assert isinstance(loaded, m.Extent)
        said.append((loaded.length == size, loaded.tier))
        connection.call(m.DoneWith((loaded.id,)), m.Ok)
        chains = ((connection.lane_number(chunk.key.key.lane()), names[0][1]),)
        said.append(connection.call(m.Stage("ticket-1", chains, True, 1000, 5000), m.Promise).tiers)
        connection.call(m.DoneWith((), ("ticket-1",)), m.Ok)
        connection.call(m.Ping(), m.Pong)
        said.append("Hot" in connection.call(m.Stats(), m.StatsOk).stats)
    finally:
        connection.close()
        chunk.release()
    return said


SOCKET_OUTCOME: list[object] = [[False], [True], [True], (True, "Hot"), (b"\x01",), True]


async def talk_lookup(client: LookupClient) -> list[object]:
    """To the lookup service; what came of it."""
    lease = await client.renew_instance("pod-1", incarnation=7, kind="sidecar")
    events = [StoreEvent("store", each, "Hot", 4096) for each in IDS[:2]] + [
        StoreEvent("remove", IDS[2], "Hot")
    ]
    ack = await client.send_events("pod-1", incarnation=7, first_sequence=0, events=events)
    found = await client.lookup(IDS, exclude=["pod-2"])
    routed = await client.route(IDS)
    present = await client.contains(IDS)
    at = await client.locations(IDS[0])
    await client.end_instance("pod-1", incarnation=7)
    told = [holder.instance for holder in at.holders]
    return [
        lease.ttl_ms > 0,
        ack.next_sequence,
        found.num_prefix,
        routed.instances[0].num_prefix,
        list(present.present),
        told,
    ]


LOOKUP_OUTCOME: list[object] = [True, 3, 2, 2, [True, True, False], ["pod-1"]]


async def talk_broker(client: BrokerClient) -> list[object]:
    """To the broker; what came of it."""
    for name in ("pod-1", "pod-2"):
        peer = Peer(name, 7, f"lm://{name}.example:65433", "sidecar", "zone-a", "node-a")
        lease = await client.register(peer, load=0.25, ttl_ms=None)
    (assigned,) = await client.transfers(
        "pod-1", [(IDS[0], [HeldBy("pod-2", "Hot")]), (IDS[1], [HeldBy("pod-2", "Hot")])]
    )
    renewal = await client.renew("pod-1", assigned.pull)
    await client.done("pod-1", [assigned.pull])
    peers = await client.peers()
    await client.deregister("pod-2")
    return [
        lease.ttl_ms > 0,
        assigned.instance,
        len(assigned.chunk_ids),
        renewal is not None,
        sorted(peer.id for peer in peers),
    ]


BROKER_OUTCOME: list[object] = [True, "pod-2", 2, True, ["pod-1", "pod-2"]]


def covers(old: Any, new: Any, *, exactly: bool, volatile: Sequence[str] = ()) -> bool:
    """Return whether a reader of `old` understands `new`: no field is missing or of another kind.

    Args:
        old: Of the release.
        new: Of today.
        exactly: Whether values are to be equal, too.
        volatile: Fields whose values may differ all the same.
    """
    if isinstance(old, dict):
        return isinstance(new, dict) and all(
            name in new
            and covers(
                value, new[name], exactly=exactly and name not in volatile, volatile=volatile
            )
            for name, value in old.items()
        )
    if isinstance(old, list):
        return (
            isinstance(new, list)
            and len(new) >= len(old)
            and all(
                covers(a, b, exactly=exactly, volatile=volatile)
                for a, b in zip(old, new, strict=False)
            )
        )
    return (
        old == new
        if exactly
        else isinstance(new, type(old)) or {type(old), type(new)} <= {int, float}
    )


def body_of(content_type: str, data: bytes) -> Any:
    """The content of a REST body."""
    if not data:
        return None
    return msgspec.msgpack.decode(data) if "msgpack" in content_type else msgspec.json.decode(data)


def in_thread(work: Callable[[], None]) -> threading.Thread:
    """Begin work in a thread of its own."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
