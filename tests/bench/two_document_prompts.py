"""Prompts whose answers need two documents, cut as a cache has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lmcache_core.integrations.transformers.blend_quality import SplitPrompt
from lmcache_demo.model.two_documents import SEPARATOR, Vocabulary, draw_prompt, encode_questions
from transformers import PreTrainedTokenizerFast

NUM_OWNERS, NUM_THINGS, NUM_QUESTIONS = 10, 20, 4
FILLER_TOKENS = 48
SEED = 11_22


@dataclass(frozen=True)
class Shape:
    """What stands before the owners' document.

    Attributes:
        num_mark_documents: Documents of marks.
        is_filled: Whether a document of plain text, which nothing needs, stands somewhere among
            them.
    """

    num_mark_documents: int
    is_filled: bool


TWO_DOCUMENTS, FIVE_DOCUMENTS = Shape(1, is_filled=False), Shape(3, is_filled=True)


class PromptSource:
    """Draws prompts: the documents that a shape asks for, in any order, then the owners', then
    questions.

    Args:
        tokenizer: The model's.
        texts: Held-out plain texts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._words = Vocabulary(tokenizer)
        self._stream = [token for text in texts for token in self._encode(text)]

    def draw(self, count: int, shape: Shape) -> Iterator[SplitPrompt]:
        """The same prompts at every call; their answers are judged."""
        rng = np.random.default_rng(SEED)
        separator = self._encode(SEPARATOR)
        for _ in range(count):
            prompt = draw_prompt(
                rng, self._words, NUM_OWNERS, NUM_THINGS, num_documents=shape.num_mark_documents
            )
            first = list(map(self._encode, prompt.marks))
            if shape.is_filled:
                place = int(rng.integers(len(self._stream) - FILLER_TOKENS))
                first.append(self._stream[place : place + FILLER_TOKENS])
            documents = [first[i] for i in rng.permutation(len(first))] + [
                self._encode("\n".join(prompt.owners))
            ]
            ending, places = encode_questions(self._tokenizer, prompt.questions[:NUM_QUESTIONS])
            cached = [torch.tensor([*document, *separator]) for document in documents]
            yield SplitPrompt(cached, torch.tensor(ending), torch.tensor(places))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))
