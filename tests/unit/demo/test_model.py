"""The shipped language model: small, offline, and better the more of its context it may read."""

import json
import sysconfig
from pathlib import Path

import pytest
import torch
from lmcache_demo.model import MODEL_DIR, load_model

from tests.training.batches import BatchSampler
from tests.training.corpus import (
    Document,
    build_reference,
    extract_entries,
    is_held_out,
    iter_sources,
)
from tests.training.evaluate import FAR_RANGE, WINDOW_TOKENS, Meter, split_questions
from tests.training.recipe import MAX_POSITIONS, VOCAB_SIZE, Recipe
from tests.training.tokenizer import END_OF_TEXT, encode_documents, train_tokenizer
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
    root = Path(sysconfig.get_path("stdlib"))
    return [(root / name).read_text(encoding="utf-8") for name in HELD_OUT_SOURCES]


class TestAssets:
    def test_all_files_together_are_small(self) -> None:
        sizes = {path.name: path.stat().st_size for path in MODEL_DIR.iterdir() if path.is_file()}
        assert {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        } <= sizes.keys()
        assert sum(sizes.values()) <= MAX_ASSET_BYTES

    def test_architecture(self) -> None:
        config = json.loads((MODEL_DIR / "config.json").read_text())
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["num_hidden_layers"] >= 12
        assert config["num_attention_heads"] > config["num_key_value_heads"] > 1
        assert config["max_position_embeddings"] == MAX_POSITIONS >= 4_096
        assert config["vocab_size"] == VOCAB_SIZE
        assert config["hidden_act"] == "silu"

    def test_loads_in_the_requested_type(self) -> None:
        model, _ = load_model("bfloat16")
        assert model.dtype == torch.bfloat16
        assert not model.training

    @pytest.mark.parametrize(
        "text",
        [
            "def f(x):\n\treturn x  # ok\n",
            "  Zürich, 北京, 🐍\r\n\r\n",
            "\x00\x7f",
            "a  b   c",
            "1234567890",
            "",
        ],
    )
    def test_tokenizer_gives_every_text_back(self, text: str) -> None:
        _, tokenizer = load_model()
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id == 0 == tokenizer.bos_token_id
        assert 0 not in ids


class TestQuality:
    def test_the_sample_is_held_out(self) -> None:
        assert all(is_held_out(f"library:{name}") for name in HELD_OUT_SOURCES)

    def test_held_out_loss_is_below_two_bits_per_byte(
        self, meter: Meter, held_out_texts: list[str]
    ) -> None:
        assert meter.bits_per_byte([text[:SAMPLE_CHARS] for text in held_out_texts]) < 2.0

    def test_far_positions_are_no_worse_than_near_ones(
        self, meter: Meter, held_out_texts: list[str]
    ) -> None:
        """The same tokens are compared at both, since a few texts differ more between their
        parts than a model by position.
        """
        result = meter.far_context(held_out_texts)
        assert result.num_tokens == len(HELD_OUT_SOURCES) * (WINDOW_TOKENS - FAR_RANGE[0])
        assert result.with_ <= result.without

    def test_positions_are_measured_on_whole_windows_only(
        self, meter: Meter, held_out_texts: list[str]
    ) -> None:
        losses = meter.loss_by_position([held_out_texts[0][:16_000], "too short"])
        assert losses[FAR_RANGE] == pytest.approx((losses[2_000, 3_000] + losses[3_000, 4_000]) / 2)
        with pytest.raises(ValueError, match="4000 tokens"):
            meter.loss_by_position(["too short"])

    def test_a_repeated_segment_is_recognised(
        self, meter: Meter, held_out_texts: list[str]
    ) -> None:
        result = meter.repeated_segment(held_out_texts)
        assert result.with_ < 0.95 * result.without

    def test_repeated_noise_is_recognised(self, meter: Meter) -> None:
        """Random tokens can be foretold from their first copy only."""
        assert meter.repeated_noise(num_sequences=4).gain > 2.0

    def test_answers_come_from_the_document(self, meter: Meter, held_out_texts: list[str]) -> None:
        documents = [
            split_questions(document) for document in build_reference("dis.py", held_out_texts[0])
        ]
        result = meter.answers((entries, questions[:3]) for entries, questions in documents)
        assert result.gain > 0.8

    def test_greedy_generation_with_a_cache_matches_reading_it_all(
        self, meter: Meter, held_out_texts: list[str]
    ) -> None:
        model, tokenizer = load_model()
        prompt = torch.tensor([meter.encode(held_out_texts[0])[:300]])
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False
        )
        with torch.inference_mode():
            reread = model(output).logits.argmax(-1)
        assert output[0, 300:].tolist() == reread[0, 299:-1].tolist()
        assert tokenizer.decode(output[0, 300:])


class TestTraining:
    """The parts of the training script, on texts of a few lines."""

    def test_split_depends_on_the_name_alone(self) -> None:
        names = [f"library:{i}.py" for i in range(2_000)]
        held_out = [name for name in names if is_held_out(name)]
        assert held_out == [name for name in names if is_held_out(name)]
        assert 60 <= len(held_out) <= 180

    def test_sources_leave_out_data_and_build_settings(self, tmp_path: Path) -> None:
        for name in (
            "json/decoder.py",
            "test/test_json.py",
            "encodings/cp037.py",
            "_sysconfigdata__linux.py",
            "empty.py",
        ):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("" if name == "empty.py" else "x = 1\n")
        (tmp_path / "bad.py").write_bytes(b"\xff\xfe")
        assert [doc.name for doc in iter_sources(tmp_path)] == [
            "library:json/decoder.py",
            "test:test/test_json.py",
        ]

    def test_reference_asks_only_what_it_has_told(self) -> None:
        source = "".join(
            f'def f{i}():\n    """Does thing {i}.\n\n    At length.\n    """\n' for i in range(9)
        )
        documents = list(build_reference("pkg/things.py", source))
        assert documents == list(build_reference("pkg/things.py", source))
        for document in documents:
            entries, questions = split_questions(document)
            assert questions
            assert all(
                f"\n\n{name}: {summary}\n\nAt length." in entries for name, summary in questions
            )

    def test_entries_of_invalid_source_are_none(self) -> None:
        assert extract_entries("def f(:\n") == []

    def test_a_killed_run_goes_on_as_if_it_had_not_been(self, tmp_path: Path) -> None:
        documents = [Document("library:a.py", "library", "value = 1\n" * 200)]
        encoded = encode_documents(train_tokenizer([documents[0].text], 300), [documents[0].text])
        recipe = Recipe(
            num_steps=2, tokens_per_step=64, short_length=32, long_length=64, long_ratio=0.5
        )

        def new_trainer() -> Trainer:
            return Trainer(recipe, BatchSampler(documents, encoded, seed=1), rank=0)

        straight, killed, resumed = new_trainer(), new_trainer(), new_trainer()
        num_values = (
            sum(parameter.numel() for parameter in straight.model.parameters()) + NUM_EXTRA_VALUES
        )
        exchange = MeanExchange(1, num_values)
        for _ in range(2):
            assert not straight.train_step(exchange, stop=False)
        killed.train_step(exchange, stop=False)
        killed.save(tmp_path / "checkpoint.pt")
        resumed.load(tmp_path / "checkpoint.pt")
        assert resumed.train_step(exchange, stop=True)
        assert resumed.progressed.step == straight.progressed.step == 2
        assert resumed.progressed.num_tokens == straight.progressed.num_tokens == 2 * 64
        pairs = zip(straight.model.parameters(), resumed.model.parameters(), strict=True)
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in pairs)

    def test_batches_depend_on_seed_and_step_alone(self) -> None:
        documents = [
            Document(f"library:{i}.py", "library", f"value_{i} = {i}\n" * 50) for i in range(4)
        ]
        tokenizer = train_tokenizer([doc.text for doc in documents], 300)
        encoded = encode_documents(tokenizer, [doc.text for doc in documents])
        assert tokenizer.token_to_id(END_OF_TEXT) == encoded[0][0] == 0
        one, other = (BatchSampler(documents, encoded, seed=7) for _ in range(2))
        other.draw(3, 2, 128)
        rows = one.draw(5, 2, 128)
        assert rows.tokens.shape == (2, 129)
        assert rows.weights is None
        assert rows.mask() is None
        assert (rows.tokens == other.draw(5, 2, 128).tokens).all()
        assert (rows.tokens != one.draw(6, 2, 128).tokens).any()

    def test_schedule_rises_holds_and_falls(self) -> None:
        recipe = Recipe(num_steps=100, warmup_steps=10)
        scales = [recipe.lr_scale_at(step) for step in range(100)]
        assert scales[0] == pytest.approx(0.1)
        assert scales[9:60] == [1.0] * 51
        assert scales[-1] < 0.06
        assert [recipe.length_at(step) for step in (0, 84, 85, 99)] == [1_024, 1_024, 4_096, 4_096]
