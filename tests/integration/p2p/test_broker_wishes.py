"""What the broker wishes of sidecars: copies of hot chunks, and that one that is about to end
hands over.
"""

from __future__ import annotations

import hashlib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_demo.settings import quiet_environment

from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.neighbourhood import Neighbourhood, Sidecar, eventually, get_json
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 4
NUM_TOKENS = NUM_CHUNKS * CHUNK_SIZE
TOKEN = "sidecars-0123456789abcdef"

Start = Callable[[str], Sidecar]


@pytest.fixture
def neighbourhood(tmp_path: Path) -> Iterator[Neighbourhood]:
    with Processes(tmp_path, quiet_environment()) as processes:
        yield Neighbourhood(
            processes,
            tmp_path,
            hot_chunk_pulls=1,
            hot_chunk_copies=3,
            max_lease_ttl_ms=1500,
            default_lease_ttl_ms=1500,
        )


@pytest.fixture
def start(neighbourhood: Neighbourhood, tmp_path: Path) -> Start:
    """Starts sidecars that take chunks from one another."""
    tokens, token = tmp_path / "tokens.yaml", tmp_path / "token"
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    tokens.write_text(
        f"tokens:\n  - {{name: sidecar, tenant: default, role: admin, token_sha256: {digest}}}\n"
    )
    token.write_text(TOKEN)

    def started(name: str) -> Sidecar:
        sidecar = neighbourhood.guarded_sidecar(
            name, auth_tokens_file=tokens, service_token_file=token
        )
        eventually(lambda: name in live(neighbourhood))
        return sidecar

    return started


def live(neighbourhood: Neighbourhood) -> dict[str, dict[str, Any]]:
    return {peer["id"]: peer for peer in get_json(f"{neighbourhood.broker_url}/v1/peers")["peers"]}


def figure(sidecar: Sidecar, name: str) -> float:
    lines = [
        line
        for line in sidecar.text("/metrics").splitlines()
        if line.startswith(f"lmcache_sidecar_{name}")
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def store_at(sidecar: Sidecar) -> None:
    with engine_at(sidecar.socket) as engine:
        engine.store(tokens_of(NUM_TOKENS), kvcaches=random_kv(NUM_TOKENS, 1))


def hot_at(sidecar: Sidecar) -> int:
    with engine_at(sidecar.socket) as engine:
        return engine.lookup(tokens_of(NUM_TOKENS), ["Hot"])


def test_a_chunk_that_is_asked_for_often_gets_a_further_holder(
    neighbourhood: Neighbourhood, start: Start
) -> None:
    a, b, c = (start(name) for name in "abc")
    store_at(a)
    with engine_at(b.socket) as engine:
        eventually(lambda: engine.lookup(tokens_of(NUM_TOKENS), ["P2PBackend"]) == NUM_TOKENS)
        assert engine.retrieve(tokens_of(NUM_TOKENS), kvcaches=empty_kv(NUM_TOKENS)).all()
    eventually(lambda: figure(c, "received_chunks_total") == NUM_CHUNKS)
    assert figure(a, "copied_chunks_total") == NUM_CHUNKS
    target = empty_kv(NUM_TOKENS)
    with engine_at(c.socket) as engine:
        assert engine.lookup(tokens_of(NUM_TOKENS), ["Hot"]) == NUM_TOKENS, (
            "though no engine of c has ever asked"
        )
        assert engine.retrieve(tokens_of(NUM_TOKENS), kvcaches=target).all()
    assert_equal_prefix(target, random_kv(NUM_TOKENS, 1), NUM_TOKENS)


def test_a_drain_that_the_broker_is_asked_for_is_done_and_its_progress_seen(
    neighbourhood: Neighbourhood, start: Start
) -> None:
    a, b = start("a"), start("b")
    store_at(a)
    assert live(neighbourhood)["a"]["drain"] is None
    request = urllib.request.Request(
        f"{neighbourhood.broker_url}/v1/admin/peers/a:drain", method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.status == 200

    def is_done() -> bool:
        drain = live(neighbourhood)["a"]["drain"]
        return bool(drain and drain["state"] == "done")

    eventually(is_done, 20.0)
    drain = live(neighbourhood)["a"]["drain"]
    assert drain == {
        "state": "done",
        "total": NUM_CHUNKS,
        "handed_over": NUM_CHUNKS,
        "already_elsewhere": 0,
        "failed": 0,
        "left": 0,
    }
    assert hot_at(b) == NUM_TOKENS
    first, _ = get_json(f"{neighbourhood.broker_url}/v1/overview")["peers"]
    assert (first["id"], first["drain"]) == ("a", drain), (
        "for the web page, which shows first who drains"
    )
