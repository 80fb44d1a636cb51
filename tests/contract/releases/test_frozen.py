"""Today's clients and services with those of a release as processes of their own, in both
directions: an upgrade in the middle.

Which capabilities are not agreed upon is tried too, as between releases of which one does not know
them yet.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmcache_core.lookup import LookupClient
from lmcache_core.p2p import BrokerClient, Peer, PeerFigures, TierFigures
from lmcache_core.p2p.messages import DrainReport
from lmcache_core.security.tickets import Ticket, TicketSigner, TicketVerifier
from lmcache_core.telemetry.request_context import Carried, working_for

from tests.contract.releases import conversations as talks
from tests.contract.releases.programs import FROZEN, Program, frozen_server, running, said_by
from tests.fixtures.embedded import PATIENT, embedded_engine
from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.redis_server import running_redis
from tests.fixtures.service_process import running_service
from tests.fixtures.sidecar import engine_at
from tests.fixtures.wire import Arena, client_of

pytestmark = pytest.mark.parametrize("frozen", FROZEN, ids=lambda path: path.name)
THIRD_PARTY = {"msgspec", "xxhash", "redis"}
LM_CAPABILITIES = ((), ("context",), ("lossy", "serde:cachegen", "context", "of the future"))
SOCKET_CAPABILITIES = (
    ("locks",),
    ("locks", "stage", "reject", "describe", "context", "on_device", "of the future"),
)
SECRET = b"0123456789abcdef"
NUM_TOKENS = 3 * CHUNK_SIZE
WHOSE = Carried("today-1", "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01")
"""Whoever agrees upon it is told of this with each request."""


def test_nobody_has_edited_it(frozen: Path) -> None:
    listed = dict(
        line.split("  ")[::-1] for line in (frozen / "CHECKSUMS").read_text().splitlines()
    )
    assert {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in frozen.glob("*.py")
    } == listed


def test_it_imports_nothing_of_ours(frozen: Path) -> None:
    may = set(sys.stdlib_module_names) | THIRD_PARTY | {path.stem for path in frozen.glob("*.py")}
    imported = set()
    for path in frozen.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert not node.level
                imported.add(str(node.module).partition(".")[0])
    assert {"formats", "msgspec", "xxhash", "redis"} <= imported <= may


def test_old_clients_at_our_storage(frozen: Path, tmp_path: Path) -> None:
    options = {"PORT": "0", "LM_PORT": "0", "MEMORY_GB": "0.03", "INSTANCE_ID": "storage-0"}
    with running_service(
        "lmcache_storage",
        tmp_path,
        {f"LMCACHE_STORAGE_{name}": value for name, value in options.items()},
    ) as storage:
        outcomes = {
            capabilities: said_by(frozen / "lm.py", storage.ports["lm_port"], *capabilities)
            for capabilities in LM_CAPABILITIES
        }
        over_rest = said_by(frozen / "storage_rest.py", storage.ports["port"])
    for capabilities, said in outcomes.items():
        assert said.pop("agreed") == [name for name in capabilities if name in ("lossy", "context")]
        assert said == {
            "ping": [],
            "put": [True, True],
            "damaged": [False, "corrupt"],
            "contains": [[True, True, False]],
            "get": [[0, 2], [[1, "never_stored"]]],
            "prefix": [[0], [[1, "never_stored"]]],
            "other": [[0], []],
            "remove": [2],
            "after": [[False] * 3],
        }
    assert over_rest == {
        "put": [201, 201, 204],
        "damaged": 422,
        "head": [200, 404],
        "get": [200, True, 404],
        "contains": [200, [True, True, False]],
        "get_many": [200, [True, True]],
        "delete": [204, 204, 404],
    }


@pytest.mark.parametrize("capabilities", LM_CAPABILITIES)
async def test_our_lm_client_at_an_old_storage(frozen: Path, capabilities: tuple[str, ...]) -> None:
    arena = Arena()
    with frozen_server(frozen / "lm.py", *capabilities) as port, working_for("test", WHOSE, None):
        async with client_of(int(port)) as client:
            assert await talks.talk_lm(client, arena) == talks.LM_OUTCOME
    arena.check_empty()


def test_our_engine_at_an_old_storage(frozen: Path) -> None:
    tokens, kv, got = tokens_of(NUM_TOKENS), random_kv(NUM_TOKENS), empty_kv(NUM_TOKENS)
    with frozen_server(frozen / "lm.py", "lossy", "context") as port:
        remote: dict[str, Any] = {"remote_url": f"lm://127.0.0.1:{port}", **PATIENT}
        with embedded_engine(**remote) as first:
            first.engine.store(tokens, kvcaches=kv)
            first.drain()
        with embedded_engine(**remote) as second:
            assert int(second.engine.retrieve(tokens, kvcaches=got).sum()) == NUM_TOKENS
    assert_equal_prefix(got, kv, NUM_TOKENS)


@pytest.mark.parametrize("capabilities", SOCKET_CAPABILITIES)
def test_an_old_engine_at_our_sidecar(
    frozen: Path, capabilities: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "s.sock"
    options = {
        "PORT": 0,
        "LM_PORT": 0,
        "SOCKET_PATH": path,
        "ARENA_PATH": tmp_path / "arena",
        "ARENA_GB": 0.01,
        "INSTANCE_ID": "sidecar-0",
    }
    environ = {f"LMCACHE_SIDECAR_{name}": str(value) for name, value in options.items()}
    with running_service("lmcache_sidecar", tmp_path, environ):
        said = said_by(frozen / "sidecar.py", path, *capabilities)
    known = sorted({"stage", "reject", "describe", "context"} & set(capabilities))
    assert said.pop("can") == known, "`locks` and `on_device` are the client's to say"
    assert said.pop("staged", None) == ([True, ["01"]] if known else None)
    assert said == {
        "before": [[False]],
        "stored": [[True]],
        "lookup": [[True, False]],
        "loaded": [True, "Hot", "never_stored"],
        "stats": ["Hot"],
    }


@pytest.mark.parametrize("capabilities", SOCKET_CAPABILITIES)
def test_our_engine_at_an_old_sidecar(
    frozen: Path, capabilities: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "s.sock"
    tokens, kv, got = tokens_of(NUM_TOKENS), random_kv(NUM_TOKENS), empty_kv(NUM_TOKENS)
    with frozen_server(frozen / "sidecar.py", path, tmp_path / "arena", *capabilities):
        with engine_at(path) as first, working_for("test", WHOSE, None):
            first.store(tokens, kvcaches=kv)
        with engine_at(path) as second, working_for("test", WHOSE, None):
            assert second.lookup(tokens) == NUM_TOKENS
            assert int(second.retrieve(tokens, kvcaches=got).sum()) == NUM_TOKENS
    assert_equal_prefix(got, kv, NUM_TOKENS)


def test_every_request_of_ours_at_an_old_sidecar(frozen: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with (
        frozen_server(frozen / "sidecar.py", path, tmp_path / "arena", *SOCKET_CAPABILITIES[1]),
        working_for("test", WHOSE, None),
    ):
        assert (
            talks.talk_socket(path, lambda connection: connection.arena.store_view)
            == talks.SOCKET_OUTCOME
        )


@pytest.mark.parametrize("index", ["embedded", "redis"])
def test_an_old_instance_at_our_lookup(frozen: Path, index: str, tmp_path: Path) -> None:
    with running_redis() as redis:
        environ = {"LMCACHE_LOOKUP_PORT": "0"} | (
            {"LMCACHE_LOOKUP_REDIS_URL": redis.url} if index == "redis" else {}
        )
        with running_service("lmcache_lookup", tmp_path, environ) as lookup:
            outcomes = [
                said_by(frozen / "lookup.py", lookup.ports["port"], form)
                for form in ("msgpack", "json")
            ]
    held = [["old-1", "sidecar", "Hot", 4096]]
    expected = {
        "lease": [0, False],
        "events": [[3, False], [3, False], [4, False]],
        "lookup": [2, False, [held, held]],
        "excluded": 0,
        "route": [["old-1", 2]],
        "contains": [True, True, False],
        "locations": [["old-1", "Hot"]],
        "gap": True,
        "ended": [False] * 3,
    }
    assert outcomes == [expected] * 2


@pytest.mark.parametrize("form", ["msgpack", "json"])
async def test_our_instance_at_an_old_lookup(frozen: Path, form: str) -> None:
    with frozen_server(frozen / "lookup.py", form) as port, working_for("test", WHOSE, None):
        client = LookupClient(f"http://127.0.0.1:{port}", timeout_s=10.0)
        await client.open()
        assert await talks.talk_lookup(client) == talks.LOOKUP_OUTCOME
        await client.close()


def test_an_old_instance_at_our_broker(frozen: Path, tmp_path: Path) -> None:
    with running_service("lmcache_broker", tmp_path, {"LMCACHE_BROKER_PORT": "0"}) as broker:
        said = said_by(frozen / "broker.py", broker.ports["port"])
    assert said == {
        "leases": [[True, False, []]] * 2,
        "assigned": ["old-2", "lm://old-2.example:65433", ["11" * 16], ["22" * 16], []],
        "renewed": [True, True, 2],
        "ended": 1,
        "peers": ["old-1", "old-2"],
        "draining": True,
        "left": ["old-2"],
    }


async def test_our_instance_at_an_old_broker(frozen: Path) -> None:
    with frozen_server(frozen / "broker.py") as port, working_for("test", WHOSE, None):
        client = BrokerClient(f"http://127.0.0.1:{port}", None, 10.0)
        await client.open()
        assert await talks.talk_broker(client) == talks.BROKER_OUTCOME
        told = {
            "drain": DrainReport("serving", 1, 0, 0, 0, 1),
            "figures": PeerFigures(tiers=(TierFigures("Hot", 1, 2, 3),)),
        }
        lease = await client.register(
            Peer("pod-3", 7, "lm://pod-3.example:1"), load=0.0, ttl_ms=None, **told
        )
        assert (lease.draining, lease.copies) == (False, ())
        await client.call("POST", "/v1/peers/pod-3:drain")
        assert (
            await client.register(Peer("pod-3", 8, "lm://pod-3.example:1"), load=0.0, ttl_ms=None)
        ).draining
        await client.close()


class Replica:
    """Today's lookup service, on the same Redis as the frozen one."""

    def __init__(self, rest: httpx.Client) -> None:
        self._rest = rest

    def _said(self, response: httpx.Response) -> Any:
        assert response.status_code in (200, 204), response.text
        return response.json() if response.content else None

    def renew(self, instance: str, incarnation: int) -> list[int]:
        lease = self._said(
            self._rest.put(
                f"/v1/instances/{instance}", json={"incarnation": incarnation, "kind": "sidecar"}
            )
        )
        return [lease["next_sequence"], int(lease["resync"])]

    def apply(
        self, instance: str, incarnation: int, first: int, events: list[list[Any]]
    ) -> list[int]:
        named = [
            dict(zip(("op", "chunk_id", "tier", "size_bytes"), event, strict=True))
            for event in events
        ]
        body = {
            "instance": instance,
            "incarnation": incarnation,
            "first_sequence": first,
            "events": named,
        }
        ack = self._said(self._rest.post("/v1/events", json=body))
        return [ack["next_sequence"], int(ack["resync"])]

    def holders(self, chunk_id: str) -> list[list[Any]]:
        found = self._said(self._rest.get(f"/v1/chunks/{chunk_id}/locations"))["holders"]
        return sorted(
            [each["instance"], each["kind"], each["tier"], each["size_bytes"]] for each in found
        )

    def end(self, instance: str) -> None:
        self._said(self._rest.delete(f"/v1/instances/{instance}"))


def check_shared_index(old: Program, new: Replica) -> None:
    """Whatever one replica writes, the other reads and goes on with."""
    one, two, three = ("0a" + "11" * 15, "7b" + "22" * 15, "ff" + "33" * 15)
    assert old.ask("renew", "by-old", 7, "sidecar") == [0, 0]
    assert old.ask(
        "apply", "by-old", 7, 0, [["store", one, "Hot", 5], ["store", two, "Hot", 6]]
    ) == [2, 0]
    assert new.renew("by-new", 8) == [0, 0]
    assert new.apply(
        "by-new", 8, 0, [["store", one, "Hot", 7], ["store", three, "LocalDiskBackend", 8]]
    ) == [2, 0]
    everywhere = {
        one: [["by-new", "sidecar", "Hot", 7], ["by-old", "sidecar", "Hot", 5]],
        two: [["by-old", "sidecar", "Hot", 6]],
        three: [["by-new", "sidecar", "LocalDiskBackend", 8]],
    }
    for chunk_id, holders in everywhere.items():
        assert old.ask("holders", chunk_id) == new.holders(chunk_id) == holders
    # Instances go from one replica to the other in the middle of their events.
    assert new.renew("by-old", 7) == old.ask("renew", "by-old", 7, "sidecar") == [2, 0]
    assert new.apply("by-old", 7, 2, [["remove", two, "Hot", 0], ["store", three, "Hot", 9]]) == [
        4,
        0,
    ]
    assert old.ask("renew", "by-new", 8, "sidecar") == [2, 0]
    assert old.ask(
        "apply", "by-new", 8, 2, [["remove", one, "Hot", 0], ["store", two, "Hot", 10]]
    ) == [4, 0]
    everywhere = {
        one: [["by-old", "sidecar", "Hot", 5]],
        two: [["by-new", "sidecar", "Hot", 10]],
        three: [["by-new", "sidecar", "LocalDiskBackend", 8], ["by-old", "sidecar", "Hot", 9]],
    }
    for chunk_id, holders in everywhere.items():
        assert old.ask("holders", chunk_id) == new.holders(chunk_id) == holders
    # A restart that one sees, and an end that the other sees.
    assert old.ask("renew", "by-new", 9, "sidecar") == [0, 0]
    assert new.holders(two) == old.ask("holders", two) == []
    assert new.apply("by-new", 8, 4, [["store", two, "Hot", 1]])[1] == 1
    assert new.apply("by-new", 9, 0, [["store", two, "Hot", 11]]) == [1, 0]
    assert old.ask("holders", two) == [["by-new", "sidecar", "Hot", 11]]
    assert old.ask("end", "by-old") == 1
    assert new.holders(one) == []
    new.end("by-new")
    assert old.ask("holders", two) == []


def test_two_replicas_of_lookup_at_one_redis(frozen: Path, tmp_path: Path) -> None:
    with running_redis() as redis, running(frozen / "redis_index.py", redis.port) as old:
        token = "a-client-0123456789abcdef"
        (tmp_path / "tokens.yaml").write_text(
            f"tokens:\n  - {{name: c, tenant: default, role: client, token: {token}}}\n"
        )
        environ = {
            "LMCACHE_LOOKUP_PORT": "0",
            "LMCACHE_LOOKUP_REDIS_URL": redis.url,
            "LMCACHE_LOOKUP_AUTH_TOKENS_FILE": str(tmp_path / "tokens.yaml"),
        }
        headers = {"authorization": f"Bearer {token}"}
        with (
            running_service("lmcache_lookup", tmp_path, environ) as service,
            httpx.Client(base_url=service.url, headers=headers, trust_env=False) as rest,
        ):
            check_shared_index(old, Replica(rest))


def test_two_replicas_of_the_broker_at_one_redis(frozen: Path, tmp_path: Path) -> None:
    """Peers that one of them knows are everybody's, and so is that they end."""
    with running_redis() as redis, running(frozen / "redis_peers.py", redis.port) as old:
        environ = {
            "LMCACHE_BROKER_PORT": "0",
            "LMCACHE_BROKER_REDIS_URL": redis.url,
            "LMCACHE_BROKER_TICKET_KEYS_FILE": str(tmp_path / "keys"),
        }
        (tmp_path / "keys").write_text(f"k1:{base64.b64encode(SECRET).decode()}\n")
        with (
            running_service("lmcache_broker", tmp_path, environ) as broker,
            httpx.Client(base_url=broker.url, trust_env=False) as rest,
        ):

            def renew() -> Any:
                drain = {
                    "state": "serving",
                    "total": 1,
                    "handed_over": 0,
                    "already_elsewhere": 0,
                    "failed": 0,
                    "left": 1,
                }
                place = {
                    "distributed_url": "lm://new-1.example:1",
                    "kind": "sidecar",
                    "zone": "",
                    "node": "",
                }
                body = {
                    "incarnation": 7,
                    **place,
                    "load": 0.5,
                    "ttl_ms": None,
                    "drain": drain,
                    "figures": {"stored_chunks": 1},
                }
                return rest.put("/v1/peers/new-1", json=body).json()

            def known() -> dict[str, Any]:
                return {peer["id"]: peer for peer in rest.get("/v1/peers").json()["peers"]}

            assert not renew()["draining"]
            ((field, said),) = eventually(lambda: old.ask("peers")).items()
            assert said == [7, "lm://new-1.example:1", False, 0.5]
            owner = field.removesuffix("new-1")
            old.ask("announce", f"{owner}old-1", 3, "lm://old-1.example:1")
            assert (
                eventually(lambda: known().get("old-1"))["distributed_url"]
                == "lm://old-1.example:1"
            )
            wanted = {
                "requester": "new-1",
                "chunks": [{"chunk_id": "11" * 16, "holders": ["old-1"]}],
            }
            (assigned,) = rest.post("/v1/transfers", json=wanted).json()["assignments"]
            assert said_by(frozen / "tickets.py", "check", SECRET.hex(), assigned["ticket"])[
                :3
            ] == ["k1", "old-1", "new-1"]
            old.ask("drain", field)
            assert eventually(lambda: renew()["draining"])
            old.ask("leave", f"{owner}old-1")
            assert eventually(lambda: "old-1" not in known())


def test_tickets_are_taken_by_either_side(frozen: Path) -> None:
    expires_ms = int(time.time() * 1000) + 60_000
    named = {"instance": "pod-2", "requester": "pod-1", "tenant": "acme"}
    ours = TicketSigner({"k1": SECRET}).sign(**named, expires_unix_ms=expires_ms)
    assert said_by(frozen / "tickets.py", "check", SECRET.hex(), ours) == [
        "k1",
        *named.values(),
        expires_ms,
    ]
    theirs = said_by(frozen / "tickets.py", "sign", "k1", SECRET.hex(), *named.values(), expires_ms)
    assert TicketVerifier({"k1": SECRET}, "pod-2").verify(theirs) == Ticket(
        "k1", *named.values(), expires_ms
    )


def eventually(seen: Callable[[], Any]) -> Any:
    """What is there before long; replicas of the broker tell each other now and then."""
    deadline = time.monotonic() + 60.0
    while not (found := seen()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
    return found
