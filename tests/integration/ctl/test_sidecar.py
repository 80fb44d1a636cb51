"""`lmcachectl explain` with a real sidecar and a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.keys import ChunkChain
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.telemetry import Counters

from tests.fixtures.ctl import Ctl, FakeVllm
from tests.fixtures.frames import HELLO
from tests.fixtures.kv import CHUNK_SIZE, random_kv, tokens_of
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.sidecar import engine_at

NUM_CHUNKS = 3


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sidecar")


@pytest.fixture(scope="module")
def sidecar(directory: Path) -> Iterator[ServiceProcess]:
    settings = {
        "PORT": "0",
        "LM_PORT": "0",
        "ARENA_GB": "0.01",
        "ARENA_PATH": str(directory / "arena"),
        "SOCKET_PATH": str(directory / "s.sock"),
        "INSTANCE_ID": "sidecar-0",
    }
    with running_service(
        "lmcache_sidecar",
        directory,
        {f"LMCACHE_SIDECAR_{name}": value for name, value in settings.items()},
    ) as service:
        yield service


def ctl(service: ServiceProcess, *arguments: str | Path, code: int = 0, stdin: str = "") -> str:
    return Ctl([f"--url={service.url}"]).text(*arguments, code=code, stdin=stdin)


def test_a_prompt_is_explained_after_its_engine_has_gone(
    sidecar: ServiceProcess, directory: Path
) -> None:
    """First: no engine has been there before."""
    ids = " ".join(str(token) for token in tokens_of((NUM_CHUNKS + 1) * CHUNK_SIZE).tolist())
    (directory / "tokens").write_text(ids)
    assert "an engine must have connected to this sidecar once" in ctl(
        sidecar, "explain", "--tokens", directory / "tokens", code=1
    )
    tokens = tokens_of((NUM_CHUNKS + 1) * CHUNK_SIZE)[: NUM_CHUNKS * CHUNK_SIZE]
    with engine_at(directory / "s.sock") as engine:
        engine.store(tokens, kvcaches=random_kv(len(tokens)))
    told: dict[str, Any] = json.loads(
        ctl(sidecar, "explain", "--tokens", directory / "tokens", "-o", "json", code=1)
    )
    [explanation] = told["explanations"]
    assert (explanation["model_name"], explanation["num_prefix"]) == ("org/model", NUM_CHUNKS)
    assert [chunk["states"][0]["missing"] for chunk in explanation["chunks"]] == [
        None
    ] * NUM_CHUNKS + ["never_stored"]
    table = " ".join(ctl(sidecar, "explain", "--tokens", "-", code=1, stdin=ids).split())
    assert "the first 3 are complete" in table
    assert "MISSING: never_stored" in table
    assert table.count("memory") == NUM_CHUNKS
    assert "agrees with the prompt up to token 48 and differs after it" in table
    table = ctl(sidecar, "explain", explanation["chunks"][0]["chunk_hash"], "--model", "org/model")
    assert explanation["chunks"][0]["chunk_hash"][:16] in table


def test_a_rest_that_fills_no_chunk_is_not_missed(sidecar: ServiceProcess, directory: Path) -> None:
    tokens = tokens_of(NUM_CHUNKS * CHUNK_SIZE + 1)
    with engine_at(directory / "s.sock") as engine:
        engine.store(tokens[: NUM_CHUNKS * CHUNK_SIZE], kvcaches=random_kv(NUM_CHUNKS * CHUNK_SIZE))
    ids = " ".join(str(token) for token in tokens.tolist())
    assert "MISSING: never_stored (a rest: vLLM stores whole chunks)" in ctl(
        sidecar, "explain", "--tokens", "-", stdin=ids
    )


def test_a_prompt_and_messages_are_tokenized_by_vllm(
    sidecar: ServiceProcess, directory: Path, vllm: FakeVllm
) -> None:
    url, asked = vllm
    tokens = tokens_of(NUM_CHUNKS * CHUNK_SIZE)
    with engine_at(directory / "s.sock") as engine:
        engine.store(tokens, kvcaches=random_kv(len(tokens)))
    text = " ".join(str(token) for token in tokens.tolist())
    (directory / "prompt").write_text(text + "\n")
    where = ("--prompt", directory / "prompt", "--vllm-url", url)
    assert f"All {NUM_CHUNKS} whole chunks are cached." in ctl(sidecar, "explain", *where)
    messages = [{"role": "user", "content": "7 " + text}]
    request = {"model": "m", "messages": messages, "tools": []}
    for body in (request, messages):
        (directory / "chat").write_text(json.dumps(body))
        told = ctl(sidecar, "explain", "--messages", directory / "chat", *where[2:], code=1)
        assert f"The first {CHUNK_SIZE} tokens differ from everything stored" in told
    assert asked == [
        {"path": "/tokenize", "authorization": None, **question}
        for question in (
            {"prompt": text},
            {"messages": messages, "tools": []},
            {"messages": messages},
        )
    ]
    (directory / "prompt").write_text("secret words")
    told = ctl(sidecar, "explain", *where, code=1)
    assert told == f"lmcachectl: {url}/tokenize: no such model\n"
    nowhere = (*where[:2], "--vllm-url", "http://127.0.0.1:9")
    told = ctl(sidecar, "explain", *nowhere, code=1)
    assert "vLLM does not answer at http://127.0.0.1:9" in told


def test_a_request_is_explained_by_its_id(sidecar: ServiceProcess, directory: Path) -> None:
    tokens = tokens_of(NUM_CHUNKS * CHUNK_SIZE)
    with engine_at(directory / "s.sock") as engine:
        engine.store(tokens, kvcaches=random_kv(len(tokens)))
        ids = " ".join(str(token) for token in tokens.tolist())
        told = json.loads(ctl(sidecar, "explain", "--tokens", "-", "-o", "json", stdin=ids))
        [one] = told["explanations"]
        hashes = [chunk["chunk_hash"] for chunk in one["chunks"]]
        store = SidecarChunkStore(directory / "s.sock", HELLO, 5.0, Counters())
        store.open(lambda salt: None)
        for name, of_prompt in (
            ("0a1b2c3d:chatcmpl-7-ff", [*hashes[:2], "ab" * 32]),
            ("0a1b2c3d:chatcmpl-8-ff", hashes),
        ):
            packed = bytes.fromhex("".join(of_prompt))
            store.stage(name, [ChunkChain(one["fmt"], one["model_name"], 1, "", packed)])
        store.close()
    told = ctl(sidecar, "explain", "--request", "chatcmpl-7", code=1)
    assert "The request found 2 of 3 chunks (2 in memory)" in told
    assert f"agrees with the prompt up to token {2 * CHUNK_SIZE} and differs after it" in told
    assert f"{2 * CHUNK_SIZE}-{3 * CHUNK_SIZE}" in told
    assert "The request found 3 of 3 chunks" in ctl(sidecar, "explain", "--request", "chatcmpl-8")
    told = ctl(sidecar, "explain", "--request", "chatcmpl-9", code=1)
    assert "no sidecar remembers a lookup of 'chatcmpl-9'" in told
