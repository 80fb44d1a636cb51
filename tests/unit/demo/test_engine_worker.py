"""The demo's engine counts on answers of the length that it asks for."""

from __future__ import annotations

from lmcache_demo.engine_worker import Worker
from lmcache_demo.engines import Prompt


def test_an_answer_has_the_length_asked_for_wherever_the_model_would_end() -> None:
    worker = Worker()
    worker._model.generation_config.eos_token_id = list(range(worker._model.config.vocab_size))
    assert len(worker.answer(Prompt("One. Two.", 4)).tokens) == 4
