"""Bytes that are not what was stored: found by their digest and recomputed. And the control:
bytes with a valid digest are used.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record import decode_head, decode_prefix, encode_head, payload_digest

from tests.vllm.engines import CHUNK_SIZE, Ask, running_engine
from tests.vllm.models import LLAMA
from tests.vllm.processes import Service
from tests.vllm.references import distance, prompt
from tests.vllm.sidecars import Growth, delete, eventually, fetch, num_chunks, put, storage
from tests.vllm.worlds import BOUND_S, World, await_found, fill

PAGE = 4096


def test_a_chunk_damaged_in_the_arena(world: World) -> None:
    arena = world.owner.directory / "arena"
    sidecar = world.sidecar(arena_path=arena, verify_hot="always")
    ask = Ask(prompt(200, 1000))
    with running_engine(world.options()) as engine:
        fill(engine, sidecar, ask)
        (file,) = [path for path in arena.iterdir() if path.stat().st_size > PAGE * 1000]
        with file.open("r+b") as memory:
            for at in range(0, file.stat().st_size, PAGE):
                memory.seek(at)
                if any(head := memory.read(8)):
                    memory.seek(at)
                    memory.write(bytes(byte ^ 0x40 for byte in head))
        damaged = engine.ask(ask)
        assert damaged.took_s < BOUND_S
        engine.reset()
        await_found(engine, ask)
        hit = engine.ask(ask)
    world.references.check([damaged, hit], [ask, ask], LLAMA)


def test_records_damaged_on_the_disk(world: World) -> None:
    disk = world.owner.directory / "disk"
    sidecar = world.sidecar(disk_path=disk, disk_gb=0.5)
    ask = Ask(prompt(201, 1000))
    with running_engine(world.options()) as engine:
        fill(engine, sidecar, ask)
        eventually(lambda: sidecar.get("/v1/status")["settled"], "written to the disk")
        sidecar.kill()
        records = [
            path for path in disk.rglob("*") if path.is_file() and path.stat().st_size > 100_000
        ]
        assert len(records) >= 3
        for path in records:
            with path.open("r+b") as file:
                file.seek(60_000)
                file.write(b"\x55" * 64)
        sidecar.start(arena_path=world.owner.directory / "another-arena")
        eventually(lambda: num_chunks(sidecar, "disk") >= 3, "the disk has been read")
        answers = [engine.ask(ask)]
        for _ in range(3):
            engine.reset()
            answers.append(engine.ask(ask))
        assert max(answer.took_s for answer in answers) < BOUND_S
        await_found(engine, ask)
    world.references.check(answers, [ask] * 4, LLAMA)


def forge(keeper: Service, change: Callable[[bytes], bytes], of: str = "") -> int:
    """Replace the payloads of a storage's records, with digests that fit; how many.

    Args:
        keeper: The storage.
        change: Makes a payload.
        of: Part of the names of the groups whose records are replaced.
    """
    keys = [chunk["key"] for chunk in keeper.get("/v1/chunks")["chunks"]]
    keys = [key for key in keys if of in CacheEngineKey.from_url(key).group]
    for key in keys:
        record = fetch(keeper, f"/v1/chunks/{key}")
        head_bytes = decode_prefix(record).head_bytes
        header, payload_bytes = decode_head(record[:head_bytes])
        payload = change(record[head_bytes : head_bytes + payload_bytes])
        digest = payload_digest(payload)
        head = encode_head(msgspec.structs.replace(header, digest=digest), payload_bytes)
        delete(keeper, f"/v1/chunks/{key}")
        put(keeper, f"/v1/chunks/{key}", head + payload)
    return len(keys)


@pytest.mark.parametrize("zeroed", [False, True])
def test_zeros_with_a_valid_digest_change_the_answer(world: World, zeroed: bool) -> None:
    """The control of all other tests: what is loaded is what is computed with. Without the zeros
    the same way gives the same answer.
    """
    keeper = storage(world.owner)
    remote = {"remote_url": f"lm://127.0.0.1:{keeper.ports['lm_port']}"}
    ask = Ask(prompt(202, 1000))
    first = world.sidecar("first", **remote)
    with running_engine(world.options(at="first")) as engine:
        stored = Growth(keeper)
        fill(engine, first, ask)
        stored.reaches(3)
    if zeroed:
        assert forge(keeper, lambda payload: bytes(len(payload))) >= 3
    world.sidecar("second", **remote)
    with running_engine(world.options(at="second")) as engine:
        answer = engine.ask(ask)
    assert answer.num_cached == 3 * CHUNK_SIZE
    if not zeroed:
        world.references.check([answer], [ask], LLAMA)
        return
    (expected,) = world.references.answers([ask], LLAMA)
    assert answer.tokens != expected.tokens
    assert distance(answer, expected) > 0.01
