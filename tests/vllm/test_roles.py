"""Prefill here, decode there: roles of engines, and what clients ask for one request."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_SIZE, CHUNK_SIZE, Ask, release, running_engine
from tests.vllm.models import LLAMA, SEEING, SLIDING
from tests.vllm.pictures import PICTURE_TOKENS
from tests.vllm.references import prompt
from tests.vllm.sidecars import Growth, await_calm
from tests.vllm.test_pictures import HASHER, seen
from tests.vllm.worlds import World, fill, whole_chunks

EDGES = (1, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 2 * CHUNK_SIZE, 700, 1000)


def in_role(role: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same engine in another role."""
    transfer = options["kv_transfer_config"] | {"kv_role": role}
    return options | {"kv_transfer_config": transfer}


@pytest.mark.parametrize("model", [pytest.param(LLAMA, marks=pytest.mark.smoke), SLIDING])
def test_one_engine_computes_prompts_and_another_one_answers(world: World, model: str) -> None:
    """As routers do it that pass nothing on: the prefill engine is asked for one token."""
    sidecar = world.sidecar()
    asks = [Ask(prompt(400 + number, length)) for number, length in enumerate(EDGES)]
    decode = world.owner.engine("decode")
    with running_engine(in_role("kv_producer", world.options(model))) as prefill:
        stored = Growth(sidecar)
        for ask in asks:
            prefill.ask(replace(ask, num_new=1))
        stored.reaches(whole_chunks(*EDGES))
        await_calm(sidecar)
        prefill.reset()
        again = prefill.ask(replace(asks[-1], num_new=1))
        assert again.num_cached == 0, "it loads nothing"
        decode.open(in_role("kv_consumer", world.options(model)))
        answers = [decode.ask(ask) for ask in asks]
        own = decode.ask(Ask(prompt(450, 700)))
        assert own.num_cached == 0, "it computes what is not there"
        assert decode.metrics()["vllm:lmcache_stored_chunks"] == 0
    reaches_back = model == SLIDING and release() >= (0, 30)  # older ones see no windows
    most = [length - reaches_back for length in EDGES]
    size = CHUNK_SIZE if reaches_back else BLOCK_SIZE
    assert [answer.num_cached for answer in answers] == [
        min(length // size * size, limit) for length, limit in zip(EDGES, most, strict=True)
    ]
    world.references.check([*answers, own], [*asks, Ask(prompt(450, 700))], model)


def test_consumer_stores_what_it_decodes_if_it_is_told_to(world: World) -> None:
    sidecar = world.sidecar()
    ask = Ask(prompt(410, 500), num_new=300)
    options = in_role("kv_consumer", world.options(lmcache_save_decode_cache=True))
    with running_engine(options) as engine:
        stored = Growth(sidecar)
        engine.ask(ask)
        stored.reaches(2)  # the second and the third chunk


def test_roles_share_what_they_compute_from_pictures(world: World) -> None:
    """vLLM configures consumers otherwise: they may get embeddings instead of pictures."""
    sidecar = world.sidecar()
    ask = seen(1)
    num_tokens = len(ask.tokens) - 1 + PICTURE_TOKENS
    decode = world.owner.engine("decode")
    with running_engine(in_role("kv_producer", world.options(SEEING, **HASHER))) as prefill:
        stored = Growth(sidecar)
        prefill.ask(replace(ask, num_new=1))
        stored.reaches(num_tokens // CHUNK_SIZE)
        await_calm(sidecar)
        decode.open(in_role("kv_consumer", world.options(SEEING, **HASHER)))
        answer = decode.ask(ask)
    assert answer.num_cached == num_tokens // BLOCK_SIZE * BLOCK_SIZE
    world.references.check([answer], [ask], SEEING, **HASHER)


@pytest.mark.smoke
def test_client_asks_for_no_lookup_or_no_store(world: World) -> None:
    sidecar = world.sidecar()
    asks = [Ask(prompt(420 + number, 600)) for number in range(2)]
    unsaved = replace(asks[0], transfer={"lmcache.skip_save": True})
    unread = replace(asks[1], transfer={"lmcache.skip_lookup": True, "lmcache.skip_save": "no"})
    with running_engine(world.options()) as engine:
        engine.ask(unsaved)
        fill(engine, sidecar, asks[1])
        answers = [engine.ask(unread)]
        engine.reset()
        answers += [engine.ask(one) for one in asks]
        assert [answer.num_cached for answer in answers] == [0, 0, 2 * CHUNK_SIZE]
    world.references.check(answers, [asks[1], *asks], LLAMA)


@pytest.mark.smoke
def test_vllm_keeps_running_steps_away_from_loads_for_consumers_alone() -> None:
    """So a producer loads nothing (`Role`)."""
    from vllm.v1.core.sched.scheduler import Scheduler

    lines = inspect.getsource(Scheduler.__init__).splitlines()
    [at] = [i for i, line in enumerate(lines) if "defer_block_free = True" in line]
    assert lines[at - 1].strip().startswith("if multiple_inflight_batches and ")
    assert lines[at - 1].endswith("kv_transfer_config.is_kv_consumer:")
