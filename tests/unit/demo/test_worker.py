"""The demo's engine counts on answers of the length that it asks for."""

from __future__ import annotations

from lmcache_demo.worker import TextWorker


def test_an_answer_has_the_length_asked_for_wherever_the_model_would_end() -> None:
    worker = TextWorker()
    worker._model.generation_config.eos_token_id = list(range(worker._model.config.vocab_size))
    assert len(worker.ask("One. Two.", 4).tokens) == 4
