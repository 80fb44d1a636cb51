"""The remote tier of the core against the real cache_storage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lmcache_core.errors import UnavailableError
from lmcache_core.record import Chunk, Miss, MissReason
from lmcache_core.storage.remote import create_remote_backend

from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.storage_app import TOKENS, write_tokens
from tests.fixtures.wire import Arena
from tests.suites.chunks import make_chunk, make_key, make_payload

NUM_CHUNKS = 200
SIZES = (0, 1, 5000, 100_000, 1_500_000)


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    directory = tmp_path_factory.mktemp("storage")
    options = {"PORT": "0", "LM_PORT": "0", "MEMORY_GB": "0.05", "INSTANCE_ID": "storage-0"}
    options["AUTH_TOKENS_FILE"] = str(write_tokens(directory / "tokens.yaml"))
    with running_service(
        "lmcache_storage",
        directory,
        {f"LMCACHE_STORAGE_{name}": value for name, value in options.items()},
    ) as service:
        yield service


@pytest.fixture
def url(storage: ServiceProcess) -> str:
    return f"lm://127.0.0.1:{storage.ports['lm_port']}"


async def test_there_and_back(url: str) -> None:
    arena = Arena()
    backend = create_remote_backend(url, TOKENS["acme"], timeout_s=20)
    await backend.open()
    chunks = [make_chunk((url, size), payload=make_payload(size, size)) for size in SIZES]
    keys = [chunk.key for chunk in chunks]
    assert await backend.batched_contains(keys) == [False] * len(keys)
    assert await backend.batched_put(chunks) == [True] * len(keys)
    assert await backend.batched_contains([*keys, make_key("no")]) == [True] * len(keys) + [False]
    *results, missing = await backend.batched_get([*keys, make_key("no")], arena)
    assert missing == Miss(MissReason.NEVER_STORED)
    for chunk, result in zip(chunks, results, strict=True):
        assert isinstance(result, Chunk)
        assert (result.key, result.head, bytes(result.memory.byte_array)) == (
            chunk.key,
            chunk.head,
            bytes(chunk.memory.byte_array),
        )
        result.release()
    assert await backend.batched_remove([*keys, make_key("no")]) == len(keys)
    await backend.close()
    arena.check_empty()


async def test_more_keys_than_one_request_takes(url: str) -> None:
    arena = Arena()
    backend = create_remote_backend(url, TOKENS["acme"], timeout_s=20)
    await backend.open()
    names = [(url, i) for i in range(NUM_CHUNKS)]
    assert all(await backend.batched_put([make_chunk(name) for name in names]))
    assert all(await backend.batched_contains([make_key(name) for name in names]))
    for name, result in zip(
        names, await backend.batched_get([make_key(name) for name in names], arena), strict=True
    ):
        assert isinstance(result, Chunk)
        assert bytes(result.memory.byte_array) == make_payload(name)
        result.release()
    await backend.close()
    arena.check_empty()


async def test_tenants_do_not_see_one_another(url: str) -> None:
    mine = create_remote_backend(url, TOKENS["acme"], timeout_s=20)
    yours = create_remote_backend(url, TOKENS["rival"], timeout_s=20)
    for backend in (mine, yours):
        await backend.open()
    await mine.batched_put([make_chunk((url, "secret"))])
    assert await mine.batched_contains([make_key((url, "secret"))]) == [True]
    assert await yours.batched_contains([make_key((url, "secret"))]) == [False]
    assert await yours.batched_get([make_key((url, "secret"))], Arena()) == [
        Miss(MissReason.NEVER_STORED)
    ]
    for backend in (mine, yours):
        await backend.close()


@pytest.mark.parametrize("token", [None, "no-token-of-theirs-123"])
async def test_without_a_token_the_tier_is_away(url: str, token: str | None) -> None:
    backend = create_remote_backend(url, token, timeout_s=20)
    await backend.open()
    with pytest.raises(UnavailableError):
        await backend.batched_contains([make_key(1)])
    with pytest.raises(UnavailableError):
        await backend.batched_put([make_chunk(1)])
    await backend.close()
