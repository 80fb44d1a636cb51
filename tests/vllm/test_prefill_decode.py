"""Prefill and decode in two pods: each engine with a sidecar of its own, lookup and broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from tests.vllm.engines import BLOCK_SIZE, CHUNK_SIZE, Answer, Ask, Engine, running_engine
from tests.vllm.models import LLAMA, LOCAL, LORA, SLIDING
from tests.vllm.processes import EngineProcess, Service
from tests.vllm.references import prompt
from tests.vllm.sidecars import await_calm, eventually, neighbourhood
from tests.vllm.test_states import GATED, MAMBA, Kind
from tests.vllm.worlds import World

EDGES = (
    *(1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1),
    *(CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, CHUNK_SIZE + BLOCK_SIZE, 2 * CHUNK_SIZE, 700),
)
ARENA_GB = 0.2
"""The ends of all prompts of a test find room (`TAILS_SHARE`)."""
SAYS: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "nothing": (None, None),
    "llm-d": (
        {"remote_decoder": {"kv_request_id": "1"}},
        {"remote_prefiller": {"kv_request_id": "1", "remote_host": "127.0.0.1"}},
    ),
    "vllm": (
        {"do_remote_decode": True, "do_remote_prefill": False},
        {"do_remote_prefill": True, "do_remote_decode": False, "lmcache.source": "prefill"},
    ),
}
"""What the two engines are told of each other, by way of telling."""


@dataclass
class Pods:
    """Two pods."""

    prefill: Engine
    decode: EngineProcess
    sidecars: dict[str, Service]
    services: dict[str, Service]

    def compute(self, ask: Ask, says: str = "nothing") -> None:
        """Let the first pod compute a prompt."""
        self.prefill.ask(replace(ask, num_new=1, transfer=SAYS[says][0]))

    def answer(self, ask: Ask, says: str = "nothing") -> Answer:
        """The second pod's answer."""
        return self.decode.ask(replace(ask, transfer=SAYS[says][1]))


def num_held(sidecar: Service) -> int:
    """What a sidecar holds for requests: pins, reservations and tickets."""
    clients = sidecar.get("/v1/clients")["clients"]
    kinds = ("num_pins", "num_reservations", "num_tickets")
    return sum(int(client[kind]) for client in clients for kind in kinds)


@contextmanager
def pods(
    world: World,
    model: str = LLAMA,
    make: Callable[..., dict[str, Any]] | None = None,
    **options: Any,
) -> Iterator[Pods]:
    """A prefill and a decode pod that know each other through lookup and broker alone.

    Args:
        world: The test's.
        model: Which model.
        make: Makes the options of an engine instead of `World.options`.
        **options: As for `World.options`.
    """
    near = neighbourhood(world.owner)
    both = [world.sidecar(name, **near, arena_gb=ARENA_GB) for name in ("prefill", "decode")]
    decode = world.owner.engine("decode")

    def in_role(role: str, at: str) -> dict[str, Any]:
        options_of = make or partial(world.options, model)
        made = options_of(at=at, **options)
        return made | {"kv_transfer_config": made["kv_transfer_config"] | {"kv_role": role}}

    for one in both:
        eventually(lambda one=one: one.get("/v1/status")["registered"], "it is not registered")
    with running_engine(in_role("kv_producer", "prefill")) as prefill:
        decode.open(in_role("kv_consumer", "decode"))
        services = {service.name: service for service in world.owner.services}
        yield Pods(prefill, decode, {one.name: one for one in both}, services)


@pytest.mark.parametrize(
    "says", [pytest.param("nothing", marks=pytest.mark.smoke), "llm-d", "vllm"]
)
def test_a_prompt_computed_in_one_pod_is_answered_in_another(world: World, says: str) -> None:
    """All but a part of a block is loaded."""
    asks = [Ask(prompt(500 + number, length)) for number, length in enumerate(EDGES)]
    with pods(world) as two:
        for ask in asks:
            two.compute(ask, says)
        await_calm(two.sidecars["prefill"])
        answers = [two.answer(ask, says) for ask in asks]
    whole = [length // BLOCK_SIZE * BLOCK_SIZE for length in EDGES]
    assert [answer.num_cached for answer in answers] == whole
    world.references.check(answers, asks, LLAMA)


@pytest.mark.parametrize("model", [SLIDING, LOCAL])
def test_every_kind_of_attention_is_handed_over(world: World, model: str) -> None:
    asks = [Ask(prompt(520 + number, length)) for number, length in enumerate(EDGES)]
    with pods(world, model) as two:
        for ask in asks:
            two.compute(ask)
        await_calm(two.sidecars["prefill"])
        answers = [two.answer(ask) for ask in asks]
    assert any(answer.num_cached >= 2 * CHUNK_SIZE - 1 for answer in answers)
    world.references.check(answers, asks, model)


@pytest.mark.since("0.32")
@pytest.mark.parametrize("kind", [GATED, MAMBA], ids=lambda kind: kind.model)
def test_recurrent_state_is_handed_over(world: World, kind: Kind) -> None:
    asks = [Ask(prompt(530 + number, kind.length + number)) for number in range(3)]
    with pods(world, make=partial(kind.options, world)) as two:
        for ask in asks:
            two.compute(ask)
        await_calm(two.sidecars["prefill"])
        answers = [two.answer(ask) for ask in asks]
    assert all(answer.num_cached >= kind.chunk_size for answer in answers)
    world.references.check(answers, asks, kind.model, kind.dtype)


def test_adapters_and_salts_are_kept_apart(world: World) -> None:
    adapter = str(world.models / LORA)
    plain = Ask(prompt(540, 700))
    asks = [plain, replace(plain, salt="a"), replace(plain, adapter=adapter)]
    with pods(world, enable_lora=True, max_lora_rank=8) as two:
        two.compute(asks[1])
        await_calm(two.sidecars["prefill"])
        cold = [two.answer(asks[0]), two.answer(asks[2])]
        two.compute(asks[2])
        two.compute(asks[0])
        await_calm(two.sidecars["prefill"])
        two.decode.reset()
        warm = [two.answer(ask) for ask in asks]
    assert [answer.num_cached for answer in cold] == [0, 0]
    assert [answer.num_cached for answer in warm] == [5 * BLOCK_SIZE] * 3
    world.references.check([*cold, *warm], [asks[0], asks[2], *asks], LLAMA)


@pytest.mark.smoke
def test_the_answer_is_right_as_soon_as_the_prompt_is_computed(world: World) -> None:
    """The first pod may still be storing it."""
    asks = [Ask(prompt(550 + number, 1000)) for number in range(6)]
    ways = [*SAYS, *SAYS]
    answers = []
    with pods(world) as two:
        for ask, says in zip(asks, ways, strict=True):
            two.compute(ask, says)
            answers.append(two.answer(ask, says))
    world.references.check(answers, asks, LLAMA)


@pytest.mark.parametrize("says", ["nothing", "llm-d"])
@pytest.mark.parametrize("fault", ["killed sidecar", "hanging sidecar", "no broker", "no lookup"])
def test_the_answer_is_right_whatever_fails_between_the_two(
    world: World, says: str, fault: str
) -> None:
    asks = [Ask(prompt(560 + number, 900)) for number in range(2)]
    with pods(world) as two:
        two.compute(asks[0], says)
        await_calm(two.sidecars["prefill"])
        match fault:
            case "killed sidecar":
                two.sidecars["prefill"].kill()
            case "hanging sidecar":
                two.sidecars["prefill"].freeze()
            case "no broker":
                two.services["broker"].kill()
            case "no lookup":
                two.services["lookup"].kill()
        answers = [two.answer(ask, says) for ask in asks]
        two.sidecars["prefill"].thaw()

        def is_given_back() -> bool:
            """An engine that was kept waiting says so with its next question."""
            two.answer(Ask(prompt(599, 300)))
            return not num_held(two.sidecars["decode"])

        eventually(is_given_back, "something is held")
    world.references.check(answers, asks, LLAMA)
