"""What is loaded, and that it is right: the engine itself checks every block that it reads."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.fixtures.vllm_engine import FULL, MLA, GroupShape, Limits, Shape, running, window
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
from tests.suites.chunks import held_keys

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


def test_a_prompt_that_vllm_has_forgotten(any_module: ModuleType, model: Path) -> None:
    with running(any_module, model, embedded()) as engine:
        cold = engine.ask(prompt(1, 43), max_tokens=5)
        engine.forget()
        hit = engine.ask(prompt(1, 43), max_tokens=5)
    assert engine.tally(cold).num_loads == 0
    assert engine.tally(hit).num_external == 40
    assert hit.output == cold.output


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


def test_chunks_of_blocks_are_not_read_by_an_engine_with_other_blocks(
    module: ModuleType, model: Path
) -> None:
    with (
        running(module, model, embedded(), engine_id="shared") as engine,
        running(module, model, embedded(), shape=Shape(block_size=8), engine_id="shared") as other,
    ):
        engine.ask(prompt(1, 40))
        assert other.tally(other.ask(prompt(1, 43))).num_loads == 0


@pytest.mark.parametrize(
    "shape", [Shape(), Shape((window(10),)), HYBRID], ids=["full", "windowed", "hybrid"]
)
@pytest.mark.parametrize("num_tokens", [39, 40, 41])
def test_a_prompt_of_whole_chunks_leaves_a_token_to_compute(
    module: ModuleType, model: Path, shape: Shape, num_tokens: int
) -> None:
    with running(module, model, embedded(), shape=shape) as engine:
        engine.ask(prompt(1, num_tokens))
        engine.forget()
        hit = engine.ask(prompt(1, num_tokens), max_tokens=3)
    assert engine.tally(hit).num_external >= num_tokens // CHUNK_SIZE * CHUNK_SIZE - 1


@pytest.mark.parametrize("reach", range(2, 14))
def test_windows_of_every_size(module: ModuleType, model: Path, reach: int) -> None:
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


@pytest.mark.parametrize("shape", [Shape(), HYBRID], ids=["full", "hybrid"])
def test_what_vllm_has_itself_is_not_loaded(module: ModuleType, model: Path, shape: Shape) -> None:
    with running(module, model, embedded(), shape=shape) as engine:
        engine.ask(prompt(1, 40))
        engine.forget()
        engine.ask(prompt(1, 16))
        hit = engine.ask(prompt(1, 43))
        tally = engine.tally(hit)
    assert (tally.num_local, tally.num_external) == (16, 24)


def test_a_shared_prefix_with_another_end(module: ModuleType, model: Path) -> None:
    with running(module, model, embedded()) as engine:
        engine.ask(prompt(1, 40))
        engine.forget()
        branch = engine.ask(prompt(1, 29) + prompt(2, 20))
        assert engine.tally(branch).num_external == 24
        engine.forget()
        assert engine.tally(engine.ask(prompt(1, 29) + prompt(2, 20))).num_external == 48


@pytest.mark.parametrize(
    "shape",
    [Shape(num_blocks=128), Shape((FULL, window(6)), num_blocks=160)],
    ids=["full", "hybrid"],
)
def test_many_at_once(module: ModuleType, model: Path, shape: Shape) -> None:
    prompts = [prompt(1, 24) + prompt(number, 20) for number in range(2, 8)]
    with running(module, model, embedded(), shape=shape, limits=Limits(16)) as engine:
        cold = [engine.add(tokens, max_tokens=4) for tokens in prompts]
        engine.run()
        engine.forget()
        hot = [engine.add(tokens, max_tokens=4) for tokens in prompts]
        engine.run()
    assert [request.output for request in hot] == [request.output for request in cold]
    assert all(engine.tally(request).num_loads == 1 for request in hot), (
        "those behind the first share its blocks, and load their own rest"
    )


@pytest.mark.parametrize("token_budget", [3, 8, 11, 64])
def test_prompts_in_pieces(module: ModuleType, model: Path, token_budget: int) -> None:
    with running(module, model, embedded(), limits=Limits(token_budget)) as engine:
        engine.ask(prompt(1, 43))
        engine.forget()
        hit = engine.ask(prompt(1, 43) + prompt(2, 30))
        assert engine.tally(hit).num_external == 40
        engine.forget()
        assert engine.tally(engine.ask(prompt(1, 43) + prompt(2, 30))).num_external == 72


@pytest.mark.parametrize(("token_budget", "num_windowed"), [(3, 0), (64, 2)])
def test_chunks_that_a_window_has_left_before_they_were_whole(
    module: ModuleType, model: Path, token_budget: int, num_windowed: int
) -> None:
    """Their first blocks are somebody else's by then, and what lies in those is not stored as if
    it were theirs.
    """
    shape = Shape((FULL, window(6)), num_blocks=40)
    with running(
        module, model, embedded(chunk_size=16), shape=shape, limits=Limits(token_budget)
    ) as engine:
        engine.ask(prompt(1, 36))
        engine.forget()
        groups = [key.key.group for key in list(held_keys(engine.connector._open_store.store._hot))]
        assert (groups.count("0:full"), groups.count("1:window6")) == (2, num_windowed)
        assert engine.tally(engine.ask(prompt(1, 36))).num_external == 16 * num_windowed


@pytest.mark.parametrize("saves", [True, False])
def test_the_answer_is_there_in_the_next_turn(module: ModuleType, model: Path, saves: bool) -> None:
    with running(module, model, embedded(save_decode_cache=saves)) as engine:
        first = engine.ask(prompt(1, 20), max_tokens=21)
        engine.forget()
        second = engine.ask([*prompt(1, 20), *first.output, *prompt(2, 9)])
    assert engine.tally(second).num_external == (40 if saves else 16)


@pytest.mark.parametrize(
    "shape", [Shape(num_blocks=20), Shape((FULL, window(6)), num_blocks=24)], ids=["full", "hybrid"]
)
def test_preempted_requests_load_again(module: ModuleType, model: Path, shape: Shape) -> None:
    """The answers need more room than there is: whoever came last is thrown out, and what it had
    is loaded when it resumes.
    """
    extra = embedded(save_decode_cache=True)
    with running(
        module, model, extra, shape=shape, limits=Limits(16, reserves_whole_prompt=False)
    ) as engine:
        requests = [engine.add(prompt(number, 24), max_tokens=24) for number in (1, 2)]
        engine.run()
        resumed = next(request for request in requests if request.num_preemptions)
        assert engine.tally(resumed).num_loads == resumed.num_preemptions
        engine.forget()
        again = [engine.ask(prompt(number, 24), max_tokens=24).output for number in (1, 2)]
    assert [request.output for request in requests] == again


def test_a_second_engine_beside_the_same_store(module: ModuleType, model: Path) -> None:
    """Two engines of one id share the tiers of their process: what one has stored the other
    loads, and closing one leaves them open.
    """
    with running(module, model, embedded(), engine_id="shared") as engine:
        with running(module, model, embedded(), engine_id="shared") as other:
            other.ask(prompt(1, 40))
        assert engine.tally(engine.ask(prompt(1, 43))).num_external == 40


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
    """A failed load could only be told by blocks there, and vLLM would compute on behind blocks
    that it never had.
    """
    with running(any_module, model, embedded(), shape=Shape((window(6),))) as engine:
        engine.ask(prompt(1, 40))
        engine.forget()
        num_loads = engine.tally(engine.ask(prompt(1, 43))).num_loads
    assert num_loads == (1 if any_module.HAS_TRANSFER_RESULTS else 0)
    assert ("served without the cache" in caplog.text) == (not any_module.HAS_TRANSFER_RESULTS)
