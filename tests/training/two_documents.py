"""Draw training rows of prompts whose answers need two documents.

In some training rows the documents of marks do not see what stands before them, as if their KV had
been stored: a model that has never seen such a thing is as surprised by where each document begins
as by what it lacks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from lmcache_demo.model.two_documents import SEPARATOR, Vocabulary, draw_prompt

from tests.training.batches import TokenArray, TrainingRows
from tests.training.recipe import Curriculum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Loss weights of the tokens that are learned, by what they are; everything else in a prompt is
# chance.
ANSWER_WEIGHT: Final = 1.0
NOTE_WEIGHT: Final = 0.5
TEXT_WEIGHT: Final = 0.15
# Share of the owners' lines that give the mark too in training, which teaches the model to look it
# up there.
NOTED_RATIO: Final = 0.4
# Share of the training rows that are plain text, so that the model does not forget it.
TEXT_RATIO: Final = 0.125
FILLED_RATIO: Final = 0.3
# Share of the training prompts whose documents of marks, and filling, see nothing but themselves.
ALONE_RATIO: Final = 0.5
MAX_FILLING_TOKENS: Final = 48
MAX_MARK_DOCUMENTS: Final = 3


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a prompt: its text, its weight in the loss, and whether it is a document that
    may stand alone.
    """

    text: str
    weight: float = 0.0
    is_document: bool = False


class TwoDocumentSampler:
    """Training sequences of such prompts, with some plain text; what a step sees depends on the
    seed and the step alone.

    Args:
        tokenizer: The model's.
        texts: Token ids of plain texts, each ``[num_tokens]``, dtype uint16.
        seed: Of every draw.
    """

    def __init__(
        self, tokenizer: "PreTrainedTokenizerFast", texts: Sequence[TokenArray], seed: int
    ) -> None:
        self._tokenizer = tokenizer
        self._words = Vocabulary(tokenizer)
        self._curriculum = Curriculum()
        self._stream = np.concatenate(list(texts))
        self._seed = seed

    @property
    def num_tokens(self) -> int:
        """Number of distinct tokens of plain text."""
        return len(self._stream)

    def draw(self, step: int, num_rows: int, length: int) -> TrainingRows:
        """Returns the sequences of one step; see `TrainingRows`."""
        rng = np.random.default_rng([self._seed, step])
        tokens = np.zeros((num_rows, length + 1), dtype=np.int64)
        weights = np.zeros((num_rows, length + 1), dtype=np.float32)
        blocks = np.zeros((num_rows, length + 1), dtype=np.int16)
        for row in range(num_rows):
            if rng.random() < TEXT_RATIO:
                tokens[row], weights[row] = self._text(rng, length + 1), TEXT_WEIGHT
            else:
                self._fill(rng, step, tokens[row], weights[row], blocks[row])
        return TrainingRows(tokens, weights[:, 1:], blocks[:, :-1])

    def _fill(
        self,
        rng: np.random.Generator,
        step: int,
        tokens: "np.ndarray",
        weights: "np.ndarray",
        blocks: "np.ndarray",
    ) -> None:
        """Writes prompts into a row, each after an end-of-text token, until the next has no
        room.
        """
        used, block = 1, 0
        while True:
            pieces = list(self._pieces(rng, step))
            is_alone = rng.random() < ALONE_RATIO
            encoded = self._tokenizer([piece.text for piece in pieces], add_special_tokens=False)[
                "input_ids"
            ]
            size = sum(len(ids) for ids in encoded)
            if used + size + 1 > len(tokens):
                return
            for ids, piece in zip(encoded, pieces, strict=True):
                own = slice(used, used + len(ids))
                tokens[own], weights[own] = ids, piece.weight
                if is_alone and piece.is_document:
                    block += 1
                    blocks[own] = block
                used += len(ids)
            used += 1

    def _pieces(self, rng: np.random.Generator, step: int) -> Iterator[_Piece]:
        """One prompt's texts in order; their tokens are those of the whole, but for filling,
        which begins as it likes.
        """
        most = self._curriculum.max_owners_at(step)
        num_owners = int(rng.integers(max(2, most // 3), most + 1))
        num_things = num_owners + int(rng.integers(num_owners + 1))
        pool = min(self._curriculum.num_words_at(step), len(self._words))
        num_documents = int(rng.integers(1, min(MAX_MARK_DOCUMENTS, num_things) + 1))
        prompt = draw_prompt(
            rng,
            self._words,
            num_owners,
            min(num_things, pool),
            num_documents=num_documents,
            noted_ratio=NOTED_RATIO,
            pool=pool,
        )
        filling = int(rng.integers(len(prompt.marks) + 1)) if rng.random() < FILLED_RATIO else None
        for number, document in enumerate((*prompt.marks, None)):
            if number == filling:
                text = self._text(rng, int(rng.integers(8, MAX_FILLING_TOKENS)))
                yield _Piece(self._tokenizer.decode(text) + SEPARATOR, is_document=True)
            if document is not None:
                yield _Piece(document + SEPARATOR, is_document=True)
        for number, (line, mark) in enumerate(zip(prompt.owners, prompt.noted, strict=True)):
            yield _Piece(("\n" if number else "") + line)
            if mark:
                yield _Piece(mark, NOTE_WEIGHT)
        yield _Piece(SEPARATOR)
        for question, answer in prompt.questions:
            yield _Piece(question)
            yield _Piece(answer, ANSWER_WEIGHT)
            yield _Piece("\n")

    def _text(self, rng: np.random.Generator, size: int) -> TokenArray:
        offset = int(rng.integers(len(self._stream) - size))
        return self._stream[offset : offset + size]
