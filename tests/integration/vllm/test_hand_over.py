"""One engine computes prompts, another one decodes: what the second finds of them at a real sidecar
process. The engines compare all KV that a request reads.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fixtures.neighbourhood import Sidecar
from tests.fixtures.vllm_engine import FULL, STATE, Engine, Limits, Shape, local, running, window
from tests.fixtures.vllm_engine.stores import FlakyStore
from tests.fixtures.vllm_engine.worlds import prompt, with_sidecar

ROOT = Path(__file__).resolve().parents[3]
CHUNK, BLOCK = 16, 4
LENGTHS = (3, 4, 9, 15, 16, 17, 20, 31, 32, 33, 47, 48, 63)


class Pair:
    """An engine that prefills, and one that decodes."""

    def __init__(
        self, exits: ExitStack, module: ModuleType, model: Path, sidecar: Sidecar, **options: Any
    ) -> None:
        extra = with_sidecar(sidecar.socket, chunk_size=options.pop("chunk_size", CHUNK))

        def start(role: str) -> Engine:
            return exits.enter_context(running(module, model, extra, kv_role=role, **options))

        self.prefill, self.decode = start("kv_producer"), start("kv_consumer")

    def found(self, tokens: list[int]) -> int:
        """Prefill a prompt, then decode it; how many of its tokens were found."""
        self.prefill.ask(tokens)
        self.prefill.forget()
        request = self.decode.ask(tokens, max_tokens=5)
        self.decode.forget()
        return self.decode.tally(request).num_external


def whole(num_tokens: int, size: int) -> int:
    return num_tokens // size * size


@pytest.mark.parametrize("tokens_in_a_step", [6, 64])
def test_the_engine_that_decodes_computes_less_than_a_block(
    any_module: ModuleType, own_model: Path, shared: Sidecar, tokens_in_a_step: int
) -> None:
    with ExitStack() as exits:
        limits = Limits(tokens_in_a_step)
        pair = Pair(exits, any_module, own_model, shared, limits=limits)
        found = {length: pair.found(prompt(length, length)) for length in LENGTHS}
    assert found == {length: whole(length, BLOCK) for length in LENGTHS}


@pytest.mark.parametrize(
    "shape",
    [Shape((FULL, FULL)), Shape(num_ranks=2), Shape((FULL, window(10))), Shape((FULL, local(16)))],
    ids=["two groups", "two ranks", "window", "sections"],
)
def test_every_kind_of_attention_is_handed_over(
    module: ModuleType, own_model: Path, shared: Sidecar, shape: Shape
) -> None:
    size = BLOCK if all(group == FULL for group in shape.groups) else CHUNK
    with ExitStack() as exits:
        pair = Pair(exits, module, own_model, shared, shape=shape)
        for length in LENGTHS:
            limit = length if size == BLOCK else length - 1
            assert pair.found(prompt(length, length)) == min(whole(length, size), limit), length


def test_recurrent_state_is_handed_over_as_far_as_it_is_stored(
    module: ModuleType, own_model: Path, shared: Sidecar
) -> None:
    with ExitStack() as exits:
        shape = Shape((FULL, STATE), block_size=8)
        pair = Pair(exits, module, own_model, shared, shape=shape, chunk_size=8)
        assert pair.found(prompt(1, 47)) == 40


def test_no_longer_or_other_prompt_finds_the_end_of_one(
    module: ModuleType, own_model: Path, shared: Sidecar
) -> None:
    """It finds all whole chunks, and the last blocks only if they are its own last ones."""
    with ExitStack() as exits:
        pair = Pair(exits, module, own_model, shared)
        pair.found(prompt(1, 44))
        for length in range(45, 70):
            request = pair.decode.ask(prompt(1, length))
            pair.decode.forget()
            expected = 44 if length < 48 else 32
            assert pair.decode.tally(request).num_external == expected, length
        other = [*prompt(1, 43), 7]
        assert pair.decode.tally(pair.decode.ask(other)).num_external == 32


def test_an_engine_that_does_both_has_nothing_to_do_with_ends_of_prompts(
    module: ModuleType, own_model: Path, shared: Sidecar
) -> None:
    with ExitStack() as exits:
        pair = Pair(exits, module, own_model, shared)
        pair.prefill.ask(prompt(1, 44))
        extra = with_sidecar(shared.socket, chunk_size=CHUNK)
        engine = exits.enter_context(running(module, own_model, extra))
        assert engine.tally(engine.ask(prompt(1, 44))).num_external == 32
        engine.ask(prompt(2, 44))
        assert pair.decode.tally(pair.decode.ask(prompt(2, 44))).num_external == 32


def test_a_sidecar_knows_what_its_engines_do(
    module: ModuleType, own_model: Path, shared: Sidecar
) -> None:
    with ExitStack() as exits:
        Pair(exits, module, own_model, shared)
        roles = {client["role"] for client in shared.get("/v1/clients")["clients"]}
    assert roles == {"kv_producer", "kv_consumer"}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_end_that_cannot_be_loaded_is_computed(
    any_module: ModuleType, own_model: Path, shared: Sidecar, policy: str
) -> None:
    """Stores that fail at random."""

    def wrap(store: Any) -> FlakyStore:
        return FlakyStore(store, seed=5, share=0.3)

    with ExitStack() as exits:
        pair = Pair(exits, any_module, own_model, shared, policy=policy, wrap_store=wrap)
        for length in 4 * LENGTHS:
            pair.found(prompt(length, length))
