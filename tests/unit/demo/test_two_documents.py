"""Prompts whose answers need two documents, and the model that was taught them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from lmcache_core.blend.certificate import BlendProfile, Quality
from lmcache_core.integrations.transformers.blend_quality import SplitPrompt, measure
from lmcache_core.integrations.transformers.blended import blending_model_of
from lmcache_demo.model import TWO_DOCUMENT_DIR, load_tokenizer, load_two_document_model
from lmcache_demo.model.two_documents import SEPARATOR, Vocabulary, draw_prompt, encode_questions
from transformers import PreTrainedTokenizerFast

MAX_ASSET_BYTES = 5_000_000
NUM_OWNERS, NUM_THINGS = 10, 20
Encode = Callable[[str], list[int]]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return load_tokenizer()


@pytest.fixture(scope="module")
def words(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    return Vocabulary(tokenizer)


@pytest.fixture(scope="module")
def encode(tokenizer: PreTrainedTokenizerFast) -> Encode:
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False))


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def pairs_of(lines: list[str]) -> dict[str, str]:
    found = dict(line.split() for line in lines if line)
    assert len(found) == len([line for line in lines if line])
    return found


# --- Prompts --------------------------------------------------------------------------------------


def test_lists_have_no_word_in_common_and_each_word_is_one_token(
    words: Vocabulary, encode: Encode
) -> None:
    everything = [*words.things, *words.marks, *words.owners]
    assert len(set(everything)) == len(everything) == 3 * len(words) == 399
    assert all(len(encode(f" {word}")) == 1 for word in everything)


@pytest.mark.parametrize(
    ("num_owners", "num_things", "num_documents"), [(10, 20, 1), (5, 7, 3), (1, 1, 1)]
)
def test_each_answer_needs_both_documents(
    words: Vocabulary, num_owners: int, num_things: int, num_documents: int
) -> None:
    prompt = draw_prompt(rng_of(3), words, num_owners, num_things, num_documents=num_documents)
    assert len(prompt.marks) == num_documents
    marks = pairs_of([line for document in prompt.marks for line in document.split("\n")])
    owned = pairs_of(list(prompt.owners))
    assert (len(marks), len(owned)) == (num_things, num_owners)
    answers = {name.removeprefix("? "): answer.strip() for name, answer in prompt.questions}
    assert answers == {owner: marks[thing] for owner, thing in owned.items()}
    # Neither document has both the name and the mark, and two things never have the same one.
    assert len(set(marks.values())) == num_things
    assert not set(answers) & (set(marks) | set(marks.values()))
    assert not set(answers.values()) & (set(owned) | set(owned.values()))


@pytest.mark.parametrize(
    ("num_owners", "num_things", "options", "reason"),
    [
        (0, 3, {}, "0 owners and 3 things out of 133 words"),
        (3, 6, {"pool": 5}, "3 owners and 6 things out of 5 words"),
        (3, 3, {"pool": 134}, "out of 134 words; the vocabulary has 133 of each kind"),
        (3, 3, {"num_documents": 4}, "3 things in 4 documents; each document needs at least one"),
    ],
)
def test_what_there_are_no_words_for_is_refused(
    words: Vocabulary, num_owners: int, num_things: int, options: dict[str, int], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        draw_prompt(rng_of(1), words, num_owners, num_things, **{"num_documents": 1} | options)


def test_pieces_have_the_tokens_of_the_whole(
    tokenizer: PreTrainedTokenizerFast, words: Vocabulary, encode: Encode
) -> None:
    """So a document that is encoded alone is what stands in the prompt."""
    for seed in range(5):
        prompt = draw_prompt(rng_of(seed), words, NUM_OWNERS, NUM_THINGS, num_documents=3)
        documents = [*prompt.marks, "\n".join(prompt.owners)]
        ending, places = encode_questions(tokenizer, prompt.questions)
        pieces = [token for document in documents for token in encode(document) + encode(SEPARATOR)]
        asked = "".join(f"{question}{answer}\n" for question, answer in prompt.questions)
        whole = "".join(document + SEPARATOR for document in documents) + asked
        assert pieces + ending == encode(whole)
        answers = [[ending[place]] for place in places]
        assert answers == [encode(answer) for _, answer in prompt.questions]


# --- The model ------------------------------------------------------------------------------------


def test_it_answers_in_full_and_naive_reuse_makes_it_clearly_worse(
    words: Vocabulary, tokenizer: PreTrainedTokenizerFast, encode: Encode
) -> None:
    """The owners' document, computed alone, lacks the notes on the marks before it."""
    assert sum(path.stat().st_size for path in TWO_DOCUMENT_DIR.iterdir()) < MAX_ASSET_BYTES
    model, _ = load_two_document_model()
    prompts, num_right, num_asked = [], 0, 0
    for seed in range(12):
        drawn = draw_prompt(rng_of(seed), words, NUM_OWNERS, NUM_THINGS)
        ending, places = encode_questions(tokenizer, drawn.questions)
        documents = [
            torch.tensor(encode(text) + encode(SEPARATOR))
            for text in (*drawn.marks, "\n".join(drawn.owners))
        ]
        prompts.append(SplitPrompt(documents, torch.tensor(ending), torch.tensor(places)))
        tokens = prompts[-1].tokens()
        asked = torch.tensor(places) + len(tokens) - len(ending)
        with torch.inference_mode():
            logits = model(input_ids=tokens[None]).logits[0, asked - 1]
        num_right += int((logits.argmax(-1) == tokens[asked]).sum())
        num_asked += len(places)
    assert num_right >= 0.95 * num_asked

    def quality(ratio: float) -> Quality:
        profile = BlendProfile("deviation", ratio, tuple(encode(SEPARATOR)))
        return measure(
            model, prompts, lambda retriever: blending_model_of(model, retriever, profile)
        )

    naive, blended = quality(0.0), quality(0.25)
    assert naive.delta_loss_nats > max(0.3, 3 * naive.delta_loss_error)
    assert naive.top1_agreement < blended.top1_agreement
    assert blended.delta_loss_nats < naive.delta_loss_nats / 5
