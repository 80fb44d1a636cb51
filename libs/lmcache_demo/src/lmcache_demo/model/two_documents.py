"""Prompts whose answers need two documents: one says which thing is whose, another what mark each
thing bears.

A prompt reads, for example::

    quick blue          the marks: a thing and its mark on each line, in one or more documents
    lamp stone
    ---
    north lamp          the owners: a name and the thing that is its own
    ---
    ? north stone       the questions: a name, and the mark of its thing

The words stand for nothing: they are the common words of the model's vocabulary, drawn again
for every prompt, so that nothing but the prompt answers the question. A model that reads the owners
after the marks can note each owner's mark there; where the owners' KV was computed without the
marks before it, that note is missing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEPARATOR: Final = "\n---\n"
MIN_WORD_CHARS: Final = 3


@dataclass(frozen=True, slots=True)
class TwoDocumentPrompt:
    """One prompt, as text.

    Attributes:
        marks: Documents of marks, without separators; at least one.
        owners: Lines of the document of owners.
        noted: For each of these lines the mark at its end, "" where it gives none.
        questions: Pairs of a question, ``"? north"``, and its answer, ``" stone"``.
    """

    marks: tuple[str, ...]
    owners: tuple[str, ...]
    noted: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]


class Vocabulary:
    """The words that prompts are made of: three lists without a word in common.

    Args:
        tokenizer: Words are those of its tokens that are a whole lower-case word with its leading
            space.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        words = sorted(
            token[1:]
            for token in tokenizer.get_vocab()
            if token[:1] == "Ġ"
            and token[1:].isascii()
            and token[1:].isalpha()
            and token[1:].islower()
            and len(token) > MIN_WORD_CHARS
        )
        whole = [
            word
            for word in words
            if len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1
        ]
        np.random.default_rng(1).shuffle(whole)
        third = len(whole) // 3
        self.things, self.marks, self.owners = (
            whole[:third],
            whole[third : 2 * third],
            whole[2 * third : 3 * third],
        )

    def __len__(self) -> int:
        return len(self.things)


def draw_prompt(
    rng: np.random.Generator,
    words: Vocabulary,
    num_owners: int,
    num_things: int,
    *,
    num_documents: int = 1,
    noted_ratio: float = 0.0,
    pool: int | None = None,
) -> TwoDocumentPrompt:
    """Makes one prompt.

    Args:
        rng: Advanced in place.
        words: What to choose from.
        num_owners: Lines of the owners' document, and questions; at most ``pool``.
        num_things: Lines of all documents of marks together; at most ``pool``.
        num_documents: Documents of marks, at most ``num_things``.
        noted_ratio: Share of the owners' lines that give the mark as well.
        pool: How many words of each list are used; None is all.

    Raises:
        ValueError: There are not as many words as that, or not as many things as documents.
    """
    size = len(words) if pool is None else pool
    if not (1 <= num_owners <= size <= len(words) and num_things <= size):
        msg = (
            f"{num_owners} owners and {num_things} things out of {size} words; the vocabulary has"
            f" {len(words)} of each kind"
        )
        raise ValueError(msg)
    if not 1 <= num_documents <= num_things:
        msg = f"{num_things} things in {num_documents} documents; each document needs at least one"
        raise ValueError(msg)
    things = [words.things[i] for i in rng.choice(size, num_things, replace=False)]
    marks = [words.marks[i] for i in rng.choice(size, num_things, replace=False)]
    owners = [words.owners[i] for i in rng.choice(size, num_owners, replace=False)]
    owned = rng.integers(num_things, size=num_owners)
    lines = [f" {thing} {mark}" for thing, mark in zip(things, marks, strict=True)]
    documents = tuple(
        "\n".join(part) for part in np.array_split(np.array(lines, dtype=object), num_documents)
    )
    noted = tuple(f" {marks[thing]}" if rng.random() < noted_ratio else "" for thing in owned)
    questions = [
        (f"? {owner}", f" {marks[thing]}") for owner, thing in zip(owners, owned, strict=True)
    ]
    order = rng.permutation(num_owners)
    return TwoDocumentPrompt(
        marks=documents,
        owners=tuple(
            f" {owner} {things[thing]}" for owner, thing in zip(owners, owned, strict=True)
        ),
        noted=noted,
        questions=tuple(questions[i] for i in order),
    )


def encode_questions(
    tokenizer: "PreTrainedTokenizerFast", questions: Sequence[tuple[str, str]]
) -> tuple[list[int], list[int]]:
    """Encodes questions with their answers, a line each.

    Returns:
        Token ids, and where among them the answers stand, which are one token each.
    """
    ids: list[int] = []
    places = []
    for question, answer in questions:
        ids += tokenizer.encode(question, add_special_tokens=False)
        places.append(len(ids))
        ids += tokenizer.encode(answer + "\n", add_special_tokens=False)
    return ids, places
