"""What is loaded, and that it is right: the engine itself checks every block that it reads."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.fixtures.vllm_engine import (
    FULL,
    MLA,
    STATE,
    GroupShape,
    Limits,
    Shape,
    running,
    window,
)
from tests.fixtures.vllm_engine.shapes import (
    BLOCK_FIRST,
    HND,
    KV_FIRST,
    LATENT_3D,
    LATENT_4D,
    NHD,
    PACKED,
)
from tests.fixtures.vllm_engine.worlds import CHUNK_SIZE, embedded, prompt

LAYOUTS = [
    ("blocks", PACKED, FULL),
    ("blocks", BLOCK_FIRST, FULL),
    ("tokens", HND, FULL),
    ("tokens", NHD, FULL),
    ("tokens", BLOCK_FIRST, FULL),
    ("tokens", KV_FIRST, FULL),
    ("blocks", PACKED, MLA),
    ("tokens", LATENT_3D, MLA),
    ("tokens", LATENT_4D, MLA),
]
HYBRID = Shape((FULL, window(6), window(6)), num_blocks=96)


def test_a_prompt_that_vllm_has_evicted_is_loaded(any_module: ModuleType, model: Path) -> None:
    with running(any_module, model, embedded()) as engine:
        cold = engine.ask(prompt(1, 43), max_tokens=5)
        engine.forget()
        hit = engine.ask(prompt(1, 43), max_tokens=5)
    assert engine.tally(cold).num_loads == 0
    assert engine.tally(hit).num_external == 40
    assert hit.output == cold.output


def test_drafts_with_recurrent_state(module: ModuleType, model: Path) -> None:
    """vLLM copies a request's state from block to block as it accepts drafts. Only the states of
    prompts are stored.
    """
    shape = Shape((FULL, STATE), block_size=CHUNK_SIZE, num_drafts=3)
    with running(module, model, embedded()) as plain:
        expected = plain.ask(prompt(1, 43), max_tokens=30).output
    with running(module, model, embedded(save_decode_cache=True), shape=shape) as engine:
        cold = engine.ask(prompt(1, 43), max_tokens=30)
        assert engine.num_steps < 30, "no draft is right: the test tests nothing"
        engine.forget()
        turn = [*prompt(1, 43), *cold.output, *prompt(2, 20)]
        next_turn = engine.ask(turn)
        engine.forget()
        hit = engine.ask(prompt(1, 43), max_tokens=30)
        branches = [engine.ask([*turn[:length], 1]) for length in (50, 58, 66)]
    assert cold.output == hit.output == expected
    assert [engine.tally(one).num_external for one in (cold, next_turn, hit)] == [0, 40, 40]
    num_local = [engine.tally(branch).num_local for branch in branches]
    assert num_local == [48, 56, 64], "vLLM itself keeps states of answers"


def test_logprobs_of_the_prompt_are_computed(any_module: ModuleType, model: Path) -> None:
    """Before 0.31 vLLM leaves that to the connector: logprobs of tokens that are loaded would be
    uninitialised memory.
    """
    with running(any_module, model, embedded()) as engine:
        engine.ask(prompt(1, 43), prompt_logprobs=True)
        engine.forget()
        again = engine.ask(prompt(1, 43), prompt_logprobs=True)
        assert engine.tally(again).num_external == 0
        engine.forget()
        without = engine.ask(prompt(1, 43))
    assert engine.tally(without).num_external == 40, "what it computed is stored all the same"


@pytest.mark.parametrize(("layout", "tensors", "group"), LAYOUTS)
def test_every_layout(
    module: ModuleType, model: Path, layout: str, tensors: str, group: GroupShape
) -> None:
    with running(
        module, model, embedded(layout=layout), shape=Shape((group,), layout=tensors)
    ) as engine:
        engine.ask(prompt(1, 40))
        engine.forget()
        hit = engine.ask(prompt(1, 40) + prompt(2, 5))
    assert engine.tally(hit).num_external == 40


def test_chunks_of_tokens_are_read_by_an_engine_with_another_layout(
    module: ModuleType, model: Path
) -> None:
    """The store is that of the first engine, which is still open."""
    extra = embedded(layout="tokens")
    with (
        running(module, model, extra, shape=Shape(layout=HND), engine_id="shared") as engine,
        running(module, model, extra, shape=Shape(layout=BLOCK_FIRST), engine_id="shared") as other,
    ):
        engine.ask(prompt(1, 40))
        hit = other.ask(prompt(1, 43))
    assert other.tally(hit).num_external == 40


@pytest.mark.parametrize(
    "shape", [Shape(), Shape((window(10),)), HYBRID], ids=["full", "windowed", "hybrid"]
)
@pytest.mark.parametrize("num_tokens", [40, 41])
def test_a_prompt_of_whole_chunks_leaves_a_token_to_compute(
    module: ModuleType, model: Path, shape: Shape, num_tokens: int
) -> None:
    with running(module, model, embedded(), shape=shape) as engine:
        engine.ask(prompt(1, num_tokens))
        engine.forget()
        hit = engine.ask(prompt(1, num_tokens), max_tokens=3)
    assert engine.tally(hit).num_external >= num_tokens // CHUNK_SIZE * CHUNK_SIZE - 1


@pytest.mark.parametrize("reach", [2, 5, 6, 13])
def test_windows_of_several_sizes(module: ModuleType, model: Path, reach: int) -> None:
    """In an asynchronous load of a whole prompt the last token is computed again; its window
    must not have lost a block by then.
    """
    with running(
        module, model, embedded(), shape=Shape((FULL, window(reach)), num_blocks=96)
    ) as engine:
        for num_tokens in (16, 24, 27):
            engine.ask(prompt(1, num_tokens))
            engine.forget()
            hit = engine.ask(prompt(1, num_tokens), max_tokens=6)
            assert engine.tally(hit).num_external >= 15
            engine.forget()


@pytest.mark.parametrize(("token_budget", "num_windowed"), [(3, 0), (64, 2)])
def test_chunks_that_a_window_has_left_before_they_were_whole(
    module: ModuleType, model: Path, token_budget: int, num_windowed: int
) -> None:
    """Their first blocks have other contents by then, which must not be stored."""
    shape = Shape((FULL, window(6)), num_blocks=40)
    with running(
        module, model, embedded(chunk_size=16), shape=shape, limits=Limits(token_budget)
    ) as engine:
        engine.ask(prompt(1, 36))
        engine.forget()
        assert engine.tally(engine.ask(prompt(1, 36))).num_external == 16 * num_windowed


@pytest.mark.parametrize("saves", [True, False])
def test_the_next_turn_loads_the_answer_where_it_is_saved(
    module: ModuleType, model: Path, saves: bool
) -> None:
    with running(module, model, embedded(save_decode_cache=saves)) as engine:
        first = engine.ask(prompt(1, 20), max_tokens=21)
        engine.forget()
        second = engine.ask([*prompt(1, 20), *first.output, *prompt(2, 9)])
    assert engine.tally(second).num_external == (40 if saves else 16)


def test_blocks_that_vllm_spreads_are_served_without_the_cache(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As opaque bytes a block must lie in one piece."""
    with running(module, model, embedded(layout="blocks"), shape=Shape(layout=KV_FIRST)) as engine:
        for _ in range(2):
            request = engine.ask(prompt(1, 40))
            assert engine.tally(request).num_loads == 0
            engine.forget()
    assert "neither loads nor stores" in caplog.text
    assert "contiguous" in caplog.text


def test_windows_alone_are_served_without_the_cache_before_030(
    any_module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """There a failed load is reported by blocks, and vLLM would continue without them."""
    with running(any_module, model, embedded(), shape=Shape((window(6),))) as engine:
        engine.ask(prompt(1, 40))
        engine.forget()
        num_loads = engine.tally(engine.ask(prompt(1, 43))).num_loads
    assert num_loads == (1 if any_module.HAS_TRANSFER_RESULTS else 0)
    assert ("served without the cache" in caplog.text) == (not any_module.HAS_TRANSFER_RESULTS)
