"""Equal tokens are not enough: adapters, contents, salts and weights keep KV apart.

The engine would notice KV of another adapter, of another content or of other weights; what belongs
to another salt it can only miss.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from tests.fixtures.vllm_engine import Adapter, Engine, Feature, Request, running
from tests.fixtures.vllm_engine.worlds import embedded, make_adapter, prompt

TOKENS = prompt(1, 40)
LONGER = [*TOKENS, 7, 7, 7]


def loaded(engine: Engine, request: Request) -> int:
    engine.forget()
    return engine.tally(request).num_external


def test_an_adapter_that_was_trained_again_under_its_name(
    module: ModuleType, model: Path, tmp_path: Path
) -> None:
    adapter = Adapter("first", str(make_adapter(tmp_path, "one")))
    with running(module, model, embedded()) as engine:
        engine.ask(TOKENS, adapter=adapter)
        engine.forget()
        make_adapter(tmp_path, "one, and one more epoch")
        assert loaded(engine, engine.ask(LONGER, adapter=adapter)) == 0


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


def test_requests_that_wait_while_weights_are_replaced(module: ModuleType, model: Path) -> None:
    """They were looked up under the old weights, and would load the KV of these."""
    with running(module, model, embedded()) as engine:
        engine.ask(TOKENS)
        engine.forget()
        waiting = engine.add(LONGER)
        engine.replace_weights("new")
        engine.run()
        assert loaded(engine, waiting) == 0
