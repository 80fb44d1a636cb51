"""Prompts whose answers need two documents, and the model that was taught them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from lmcache_core.blend.certificate import BlendProfile, Quality
from lmcache_core.integrations.transformers.blend_quality import SplitPrompt, measure
from lmcache_core.integrations.transformers.blended import blending_model_of
from lmcache_demo.model import TWO_DOCUMENT_DIR, load_tokenizer, load_two_document_model
from lmcache_demo.model.two_documents import (
    SEPARATOR,
    TwoDocumentPrompt,
    Vocabulary,
    draw_prompt,
    encode_questions,
)
from transformers import PreTrainedTokenizerFast

from tests.training.recipe import TWO_DOCUMENT_RECIPE, VOCAB_SIZE, Curriculum
from tests.training.two_documents import TEXT_WEIGHT, TwoDocumentSampler

MAX_ASSET_BYTES = 5_000_000
NUM_OWNERS, NUM_THINGS = 10, 20
LATE_STEP = TWO_DOCUMENT_RECIPE.num_steps - 1


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer()


@pytest.fixture(scope="module")
def words(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    return Vocabulary(tokenizer)


@pytest.fixture(scope="module")
def encode(tokenizer: PreTrainedTokenizerFast) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def pairs_of(lines: list[str]) -> dict[str, str]:
    pairs = [line.split() for line in lines]
    assert all(len(pair) == 2 for pair in pairs)
    found = dict(pairs)
    assert len(found) == len(pairs)
    return found


def marks_of(prompt: TwoDocumentPrompt) -> dict[str, str]:
    return pairs_of([line for document in prompt.marks for line in document.split("\n")])


class TestPrompts:
    def test_lists_have_no_word_in_common_and_each_word_is_one_token(
        self, words: Vocabulary, encode: Callable[[str], list[int]]
    ) -> None:
        everything = [*words.things, *words.marks, *words.owners]
        assert len(set(everything)) == len(everything) == 3 * len(words) == 399
        assert all(len(encode(f" {word}")) == 1 for word in everything)
        assert all(word.isascii() and word.islower() and len(word) >= 3 for word in everything)

    @pytest.mark.parametrize(
        ("num_owners", "num_things", "num_documents"),
        [(10, 20, 1), (5, 7, 3), (2, 2, 2), (1, 1, 1), (4, 1, 1)],
    )
    def test_each_answer_needs_both_documents(
        self, words: Vocabulary, num_owners: int, num_things: int, num_documents: int
    ) -> None:
        prompt = draw_prompt(rng_of(3), words, num_owners, num_things, num_documents=num_documents)
        marks, owned = marks_of(prompt), pairs_of(list(prompt.owners))
        assert len(prompt.marks) == num_documents
        assert all(prompt.marks)
        assert (len(marks), len(owned)) == (num_things, num_owners)
        answers = {
            question.removeprefix("? "): answer.strip() for question, answer in prompt.questions
        }
        assert answers == {owner: marks[thing] for owner, thing in owned.items()}
        # Neither document has both the name and the mark, and two things never bear the same one.
        assert len(set(marks.values())) == num_things
        assert not set(answers) & (set(marks) | set(marks.values()))
        assert not set(answers.values()) & (set(owned) | set(owned.values()))
        assert set(prompt.noted) == {""}

    def test_notes_say_the_mark_of_their_line(self, words: Vocabulary) -> None:
        prompt = draw_prompt(rng_of(4), words, 12, 12, noted_ratio=0.5)
        marks = marks_of(prompt)
        noted = [
            (line.split()[1], note)
            for line, note in zip(prompt.owners, prompt.noted, strict=True)
            if note
        ]
        assert 0 < len(noted) < 12
        assert all(note == f" {marks[thing]}" for thing, note in noted)

    def test_a_pool_is_all_that_is_drawn_from(self, words: Vocabulary) -> None:
        drawn = [draw_prompt(rng_of(seed), words, 4, 5, pool=5) for seed in range(20)]
        assert {name for prompt in drawn for name in pairs_of(list(prompt.owners))} == set(
            words.owners[:5]
        )
        assert {thing for prompt in drawn for thing in marks_of(prompt)} == set(words.things[:5])

    def test_draws_depend_on_the_generator_alone(self, words: Vocabulary) -> None:
        assert draw_prompt(rng_of(1), words, 9, 9) == draw_prompt(rng_of(1), words, 9, 9)
        assert draw_prompt(rng_of(1), words, 9, 9) != draw_prompt(rng_of(2), words, 9, 9)

    @pytest.mark.parametrize(
        ("num_owners", "num_things", "num_documents", "pool", "reason"),
        [
            (0, 3, 1, None, "0 owners and 3 things out of 133 words"),
            (134, 3, 1, None, "134 owners and 3 things"),
            (3, 6, 1, 5, "3 owners and 6 things out of 5 words"),
            (3, 3, 1, 134, "out of 134 words; the vocabulary has 133 of each kind"),
            (3, 3, 4, None, "3 things in 4 documents; each document needs at least one"),
            (3, 3, 0, None, "3 things in 0 documents"),
        ],
    )
    def test_what_there_are_no_words_for_is_refused(
        self,
        words: Vocabulary,
        num_owners: int,
        num_things: int,
        num_documents: int,
        pool: int | None,
        reason: str,
    ) -> None:
        with pytest.raises(ValueError, match=reason):
            draw_prompt(
                rng_of(1), words, num_owners, num_things, num_documents=num_documents, pool=pool
            )

    def test_pieces_have_the_tokens_of_the_whole(
        self,
        tokenizer: PreTrainedTokenizerFast,
        words: Vocabulary,
        encode: Callable[[str], list[int]],
    ) -> None:
        """So that a document that is encoded alone is what stands in the prompt."""
        for seed in range(20):
            prompt = draw_prompt(rng_of(seed), words, NUM_OWNERS, NUM_THINGS, num_documents=3)
            documents = [*prompt.marks, "\n".join(prompt.owners)]
            ending, places = encode_questions(tokenizer, prompt.questions)
            pieces = [
                token for document in documents for token in encode(document) + encode(SEPARATOR)
            ] + ending
            asked = "".join(f"{question}{answer}\n" for question, answer in prompt.questions)
            assert pieces == encode("".join(document + SEPARATOR for document in documents) + asked)
            assert [[ending[place]] for place in places] == [
                encode(answer) for _, answer in prompt.questions
            ]
            assert len(places) == NUM_OWNERS


@pytest.fixture(scope="module")
def sampler_of(tokenizer: PreTrainedTokenizerFast) -> Callable[[int], TwoDocumentSampler]:
    """Samplers whose plain text is one that no prompt has."""
    text = np.full(2_000, tokenizer.encode(";", add_special_tokens=False)[0], dtype=np.uint16)
    return lambda seed: TwoDocumentSampler(tokenizer, [text], seed)


class TestSampler:
    def test_draws_depend_on_seed_and_step_alone(
        self, sampler_of: Callable[[int], TwoDocumentSampler]
    ) -> None:
        one, other = sampler_of(1), sampler_of(1)
        other.draw(3, 2, 256)
        first, again = one.draw(200, 4, 256), other.draw(200, 4, 256)
        for name in ("tokens", "weights", "blocks"):
            assert np.array_equal(getattr(first, name), getattr(again, name))
        assert not np.array_equal(first.tokens, one.draw(201, 4, 256).tokens)
        assert not np.array_equal(first.tokens, sampler_of(2).draw(200, 4, 256).tokens)

    def test_every_learned_token_of_a_prompt_can_be_foretold(
        self, sampler_of: Callable[[int], TwoDocumentSampler], tokenizer: PreTrainedTokenizerFast
    ) -> None:
        """A target counts fully where an owner's mark stands behind a question, half where it
        stands behind its line.
        """
        rows = sampler_of(1).draw(LATE_STEP, 24, 512)
        assert rows.tokens.shape == (24, 513)
        assert rows.weights is not None
        assert rows.weights.shape == (24, 512)
        num_text = num_answers = num_notes = 0
        for tokens, weights in zip(rows.tokens, rows.weights, strict=True):
            if (weights == np.float32(TEXT_WEIGHT)).all():
                num_text += 1
                continue
            texts = np.array([tokenizer.decode([token]) for token in tokens])
            answers, notes = np.flatnonzero(weights == 1.0) + 1, np.flatnonzero(weights == 0.5) + 1
            assert len(answers) + len(notes) == np.count_nonzero(weights)
            assert (texts[answers - 2] == "?").all()
            assert (texts[answers + 1] == "\n").all()
            starts = [*np.flatnonzero(tokens == 0), len(tokens)]
            for start, end in itertools.pairwise(starts):
                marks, owned = learned_facts("".join(texts[start + 1 : end]))
                for place in answers[(answers > start) & (answers < end)]:
                    assert marks[owned[texts[place - 1].strip()]] == texts[place].strip()
                for place in notes[(notes > start) & (notes < end)]:
                    assert marks[texts[place - 1].strip()] == texts[place].strip()
            num_answers, num_notes = num_answers + len(answers), num_notes + len(notes)
        assert 0 < num_text < 12
        assert num_answers > num_notes > 100

    def test_only_documents_before_the_owners_stand_alone(
        self, sampler_of: Callable[[int], TwoDocumentSampler], tokenizer: PreTrainedTokenizerFast
    ) -> None:
        rows = sampler_of(1).draw(LATE_STEP, 24, 512)
        assert rows.blocks is not None
        num_blocks = 0
        for tokens, blocks in zip(rows.tokens, rows.blocks, strict=True):
            for block in range(1, int(blocks.max()) + 1):
                places = np.flatnonzero(blocks == block)
                assert places.tolist() == list(range(places[0], places[-1] + 1))
                text = tokenizer.decode(tokens[places])
                assert text.endswith(SEPARATOR)
                assert text.count(SEPARATOR) == 1
                assert "?" not in text
                num_blocks += 1
            assert (blocks[tokens[:-1] == 0] == 0).all()
        assert num_blocks > 24
        mask = rows.mask()
        assert mask is not None
        assert mask.shape == (24, 512, 512)

    def test_prompts_grow_harder_and_fit(
        self, sampler_of: Callable[[int], TwoDocumentSampler]
    ) -> None:
        early, late = (
            len(np.unique(sampler_of(1).draw(step, 16, 256).tokens)) for step in (0, LATE_STEP)
        )
        assert early < late <= VOCAB_SIZE
        curriculum = Curriculum()
        assert [curriculum.max_owners_at(step) for step in (0, 179, 180, LATE_STEP)] == [
            4,
            4,
            5,
            14,
        ]
        assert [curriculum.num_words_at(step) for step in (0, 120)] == [24, 24]
        assert curriculum.num_words_at(LATE_STEP) > 133


def learned_facts(prompt: str) -> tuple[dict[str, str], dict[str, str]]:
    """Marks by thing and things by owner, read from a prompt of a training row."""
    *documents, owners, _ = prompt.split(SEPARATOR) if SEPARATOR in prompt else ("", "", "")
    lines = [
        line.split() for document in documents for line in document.split("\n") if ";" not in line
    ]
    return {line[0]: line[1] for line in lines if line}, {
        line[0]: line[1] for line in map(str.split, owners.split("\n")) if line
    }


class TestModel:
    def test_loads_offline_and_is_small(self) -> None:
        sizes = {path.name: path.stat().st_size for path in TWO_DOCUMENT_DIR.iterdir()}
        assert sizes.keys() == {"config.json", "generation_config.json", "model.safetensors"}
        assert sum(sizes.values()) < MAX_ASSET_BYTES
        model, tokenizer = load_two_document_model("bfloat16")
        assert model.dtype == torch.bfloat16
        assert not model.training
        assert len(tokenizer) == model.config.vocab_size == VOCAB_SIZE

    def test_it_answers_in_full_and_naive_reuse_makes_it_clearly_worse(
        self,
        words: Vocabulary,
        tokenizer: PreTrainedTokenizerFast,
        encode: Callable[[str], list[int]],
    ) -> None:
        """The owners' document, computed alone, lacks the notes on the marks before it."""
        model, _ = load_two_document_model()
        prompts, num_right, num_asked, loss = [], 0, 0, 0.0
        for seed in range(16):
            drawn = draw_prompt(rng_of(seed), words, NUM_OWNERS, NUM_THINGS)
            ending, places = encode_questions(tokenizer, drawn.questions)
            documents = [
                torch.tensor(encode(text) + encode(SEPARATOR))
                for text in (*drawn.marks, "\n".join(drawn.owners))
            ]
            prompts.append(SplitPrompt(documents, torch.tensor(ending), torch.tensor(places)))
            tokens = prompts[-1].tokens()
            before = len(tokens) - len(ending)
            with torch.inference_mode():
                logits = model(input_ids=tokens[None]).logits[
                    0, [before + place - 1 for place in places]
                ]
            answers = tokens[[before + place for place in places]]
            num_right += int((logits.argmax(-1) == answers).sum())
            loss += float(torch.nn.functional.cross_entropy(logits, answers, reduction="sum"))
            num_asked += len(places)
        assert num_asked == 160
        assert num_right >= 0.95 * num_asked
        assert loss / num_asked < 0.2

        def quality(policy: str, ratio: float) -> Quality:
            profile = BlendProfile(policy, ratio, tuple(encode(SEPARATOR)))
            return measure(
                model, prompts, lambda retriever: blending_model_of(model, retriever, profile)
            )

        naive, blended = quality("deviation", 0.0), quality("deviation", 0.25)
        assert naive.num_tokens == 160
        assert naive.delta_loss_nats > max(0.3, 3 * naive.delta_loss_error)
        assert naive.top1_agreement < blended.top1_agreement
        assert blended.delta_loss_nats < naive.delta_loss_nats / 5
