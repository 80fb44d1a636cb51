"""The shipped language model: small, offline, and better the more of its context it may read; and
its training, as far as a text of a few lines can show it.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest
import torch
from lmcache_demo.model import MODEL_DIR, load_model

from tests.training.batches import BatchSampler
from tests.training.corpus import Document, build_reference, is_held_out, iter_sources
from tests.training.evaluate import Meter, split_questions
from tests.training.recipe import MAX_POSITIONS, VOCAB_SIZE, Recipe
from tests.training.tokenizer import encode_documents, train_tokenizer
from tests.training.trainer import NUM_EXTRA_VALUES, MeanExchange, Trainer

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


def test_the_split_depends_on_the_name_alone() -> None:
    held_out = [name for name in (f"library:{i}.py" for i in range(2_000)) if is_held_out(name)]
    assert 60 <= len(held_out) <= 180


def test_sources_leave_out_data_and_build_settings(tmp_path: Path) -> None:
    names = ("json/decoder.py", "test/test_json.py", "encodings/cp037.py", "_sysconfigdata_.py")
    for name in names:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n")
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe")
    found = [doc.name for doc in iter_sources(tmp_path)]
    assert found == ["library:json/decoder.py", "test:test/test_json.py"]


def test_references_ask_only_what_they_say() -> None:
    source = "".join(
        f'def f{i}():\n    """Does thing {i}.\n\n    At length.\n    """\n' for i in range(9)
    )
    for document in build_reference("pkg/things.py", source):
        entries, questions = split_questions(document)
        assert questions
        assert all(f"\n\n{name}: {summary}\n\nAt length." in entries for name, summary in questions)


def test_a_killed_run_continues_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    documents = [Document("library:a.py", "library", "value = 1\n" * 200)]
    encoded = encode_documents(train_tokenizer([documents[0].text], 300), [documents[0].text])
    recipe = Recipe(
        num_steps=2, tokens_per_step=64, short_length=32, long_length=64, long_ratio=0.5
    )
    straight, killed, resumed = (
        Trainer(recipe, BatchSampler(documents, encoded, seed=1), rank=0) for _ in range(3)
    )
    num_parameters = sum(parameter.numel() for parameter in straight.model.parameters())
    exchange = MeanExchange(1, num_parameters + NUM_EXTRA_VALUES)
    for _ in range(2):
        assert not straight.train_step(exchange, stop=False)
    killed.train_step(exchange, stop=False)
    killed.save(tmp_path / "checkpoint.pt")
    resumed.load(tmp_path / "checkpoint.pt")
    assert resumed.train_step(exchange, stop=True)
    assert resumed.progressed.step == straight.progressed.step == 2
    pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)
