"""The shipped language model: small, offline, and better the more of its context it may read."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import torch
from lmcache_demo.model import MODEL_DIR, load_model

from tests.training.corpus import build_reference, is_held_out
from tests.training.evaluate import Meter, split_questions
from tests.training.recipe import MAX_POSITIONS, VOCAB_SIZE

MAX_ASSET_BYTES = 5_000_000
# Held-out sources that every Python since 3.11 ships; all are longer than 4,000 tokens.
HELD_OUT_SOURCES = ("dis.py", "tempfile.py", "traceback.py")
SAMPLE_CHARS = 8_000


@pytest.fixture(scope="module")
def meter() -> Meter:
    return Meter(*load_model())


@pytest.fixture(scope="module")
def held_out_texts() -> list[str]:
    assert all(is_held_out(f"library:{name}") for name in HELD_OUT_SOURCES)
    root = Path(sysconfig.get_path("stdlib"))
    return [(root / name).read_text(encoding="utf-8") for name in HELD_OUT_SOURCES]


def test_the_model_is_small_and_of_the_documented_shape() -> None:
    files = [path for path in MODEL_DIR.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MAX_ASSET_BYTES
    config = json.loads((MODEL_DIR / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["max_position_embeddings"] == MAX_POSITIONS
    assert config["vocab_size"] == VOCAB_SIZE
    model, _ = load_model("bfloat16")
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn x  # ok\n", "  Zürich, 北京, 🐍\r\n\r\n", ""]
)
def test_the_tokenizer_gives_every_text_back(text: str) -> None:
    _, tokenizer = load_model()
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_token_id == 0 == tokenizer.bos_token_id
    assert 0 not in ids


def test_held_out_loss_is_below_two_bits_per_byte(meter: Meter, held_out_texts: list[str]) -> None:
    assert meter.bits_per_byte([text[:SAMPLE_CHARS] for text in held_out_texts]) < 2.0


def test_answers_depend_on_the_context(meter: Meter, held_out_texts: list[str]) -> None:
    """Otherwise damage to a cache would not show in them."""
    assert meter.repeated_noise(num_sequences=4).gain > 2.0
    documents = map(split_questions, build_reference("dis.py", held_out_texts[0]))
    assert meter.answers((entries, asked[:3]) for entries, asked in documents).gain > 0.8


def test_greedy_generation_with_a_cache_matches_reading_it_all(
    meter: Meter, held_out_texts: list[str]
) -> None:
    model, _ = load_model()
    prompt = torch.tensor([meter.encode(held_out_texts[0])[:300]])
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
    )
    with torch.inference_mode():
        reread = model(output).logits.argmax(-1)
    assert output[0, 300:].tolist() == reread[0, 299:-1].tolist()
