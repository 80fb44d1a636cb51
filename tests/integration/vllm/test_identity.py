"""Equal tokens are not enough: adapters, contents, salts and weights keep KV apart.

The engine would notice KV of another adapter, of another content or of other weights; what belongs
to another salt it can only miss.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.fixtures.vllm_engine import Adapter, Engine, Feature, Request, running
from tests.fixtures.vllm_engine.worlds import embedded, make_adapter, make_model, prompt

TOKENS = prompt(1, 40)
LONGER = [*TOKENS, 7, 7, 7]
SHARED = {"engine_id": "shared"}
"""Engines of one id in one process have one store."""


def loaded(engine: Engine, request: Request) -> int:
    engine.forget()
    return engine.tally(request).num_external


def test_salts(module: ModuleType, model: Path) -> None:
    with running(module, model, embedded()) as engine:
        engine.ask(TOKENS, salt="one")
        engine.forget()
        assert loaded(engine, engine.ask(LONGER, salt="two")) == 0
        assert loaded(engine, engine.ask(LONGER)) == 0
        assert loaded(engine, engine.ask(LONGER, salt="one")) == 40


def test_adapters(module: ModuleType, model: Path, tmp_path: Path) -> None:
    first = Adapter("first", str(make_adapter(tmp_path / "1", "one")), 1)
    second = Adapter("second", str(make_adapter(tmp_path / "2", "two")), 2)
    with running(module, model, embedded()) as engine:
        engine.ask(TOKENS, adapter=first)
        engine.forget()
        assert loaded(engine, engine.ask(LONGER, adapter=second)) == 0
        assert loaded(engine, engine.ask(LONGER)) == 0
        assert loaded(engine, engine.ask(LONGER, adapter=first)) == 40


def test_an_adapter_that_was_trained_again_under_its_name(
    module: ModuleType, model: Path, tmp_path: Path
) -> None:
    adapter = Adapter("first", str(make_adapter(tmp_path, "one")))
    with running(module, model, embedded()) as engine:
        engine.ask(TOKENS, adapter=adapter)
        engine.forget()
        make_adapter(tmp_path, "one, and one more epoch")
        assert loaded(engine, engine.ask(LONGER, adapter=adapter)) == 0


def test_contents_behind_equal_placeholders(module: ModuleType, model: Path) -> None:
    cat, dog = Feature("cat", 10, 6), Feature("dog", 10, 6)
    with running(module, model, embedded()) as engine:
        engine.ask(TOKENS, features=[cat])
        engine.forget()
        assert loaded(engine, engine.ask(LONGER, features=[dog])) == 8, (
            "only what lies in front of the content is shared"
        )
        assert loaded(engine, engine.ask(LONGER, features=[Feature("cat", 11, 6)])) == 8
        assert loaded(engine, engine.ask(LONGER, features=[cat])) == 40


def test_a_content_without_a_name(module: ModuleType, model: Path) -> None:
    with running(module, model, embedded()) as engine:
        engine.ask(TOKENS, features=[Feature("", 10, 6, "cat")])
        engine.forget()
        assert loaded(engine, engine.ask(LONGER, features=[Feature("", 10, 6, "cat")])) == 0
        assert loaded(engine, engine.ask(LONGER)) == 0


def test_prompts_of_embeddings_are_neither_loaded_nor_stored(
    module: ModuleType, model: Path
) -> None:
    with running(module, model, embedded()) as engine:
        engine.ask(TOKENS, embeds=object())
        engine.forget()
        assert loaded(engine, engine.ask(LONGER)) == 0


@pytest.mark.parametrize("name", ["model", "other"])
def test_models(module: ModuleType, model: Path, tmp_path: Path, name: str) -> None:
    """Another model, of the same name or not, finds nothing of this one."""
    other = make_model(tmp_path / "elsewhere", "other weights", name)
    with (
        running(module, model, embedded(), **SHARED) as engine,
        running(module, other, embedded(), **SHARED) as stranger,
    ):
        engine.ask(TOKENS)
        assert stranger.tally(stranger.ask(LONGER)).num_loads == 0


def test_the_same_weights_at_another_place(module: ModuleType, model: Path, tmp_path: Path) -> None:
    copy = make_model(tmp_path / "elsewhere")
    with (
        running(module, model, embedded(), **SHARED) as engine,
        running(module, copy, embedded(), **SHARED) as replica,
    ):
        engine.ask(TOKENS)
        assert replica.tally(replica.ask(LONGER)).num_external == 40


def test_weights_that_are_replaced_under_way(module: ModuleType, model: Path) -> None:
    """`reset_cache`: what the old weights made is not found again, what the new ones make is."""
    with running(module, model, embedded()) as engine:
        engine.ask(TOKENS)
        engine.replace_weights("new")
        assert loaded(engine, engine.ask(LONGER)) == 0
        assert loaded(engine, engine.ask(LONGER)) == 40


def test_requests_that_wait_while_weights_are_replaced(module: ModuleType, model: Path) -> None:
    """They were looked up under the old weights, and would load the KV of these."""
    with running(module, model, embedded()) as engine:
        engine.ask(TOKENS)
        engine.forget()
        waiting = engine.add(LONGER)
        engine.replace_weights("new")
        engine.run()
        assert loaded(engine, waiting) == 0
