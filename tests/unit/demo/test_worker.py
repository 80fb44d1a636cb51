"""The demo's engine counts on answers of the length that it asks for."""

from __future__ import annotations

import pytest
from lmcache_demo import worker


def test_an_answer_has_the_length_asked_for_wherever_the_model_would_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokenizer = worker.load_model()
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))
    monkeypatch.setattr(worker, "load_model", lambda: (model, tokenizer))
    assert len(worker.TextWorker().ask("One. Two.", 4).tokens) == 4
