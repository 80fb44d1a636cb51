"""Draws training sequences; what a step sees depends on the seed and the step alone, so that a
resumed run continues alike.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from tests.training.corpus import Document, DocumentKind

TokenArray = npt.NDArray[np.uint16]

# How often a text of this kind is read, relative to library sources.
KIND_WEIGHTS: Final[Mapping[DocumentKind, float]] = {
    "library": 1.0,
    "test": 0.3,
    "topic": 3.0,
    "reference": 2.5,
}
# Reference documents are always read from their start, because the questions at their end need the
# entries before them.
START_RATIOS: Final[Mapping[DocumentKind, float]] = {
    "library": 0.5,
    "test": 0.5,
    "topic": 0.5,
    "reference": 1.0,
}

REPEAT_RATIO: Final = 0.15
MIN_REPEAT_TOKENS: Final = 24
MAX_REPEAT_TOKENS: Final = 200


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """The sequences of one step.

    Attributes:
        tokens: Inputs, and targets one to the right: ``[num_rows, length + 1]``, dtype int64.
        weights: What each target counts in the loss, ``[num_rows, length]``, dtype float32; None:
            all the same. The loss is the weighted mean over the rows of a process.
        blocks: Which inputs each input sees, ``[num_rows, length]``, dtype int16: 0 sees all before
            it, another number only those of the same number; None: all see all before them.
    """

    tokens: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32] | None = None
    blocks: npt.NDArray[np.int16] | None = None

    def mask(self) -> npt.NDArray[np.bool_] | None:
        """Whether each input sees each, ``[num_rows, length, length]``; None where all see all
        before them.
        """
        if self.blocks is None:
            return None
        same = self.blocks[:, :, None] == self.blocks[:, None]
        seen: npt.NDArray[np.bool_] = np.tril(same | (self.blocks == 0)[:, :, None])
        return seen


class Sampler(Protocol):
    """Where training sequences come from."""

    @property
    def num_tokens(self) -> int:
        """Number of distinct training tokens."""

    def draw(self, step: int, num_rows: int, length: int) -> TrainingRows:
        """Returns the sequences of one step, the same whenever it is asked for them."""


class BatchSampler:
    """Cuts sequences out of the concatenated documents of each kind.

    In some sequences an earlier segment is written again over a later place, which teaches the
    model early on to look for what it has already read.
    """

    def __init__(
        self, documents: Sequence[Document], encoded: Sequence[TokenArray], seed: int
    ) -> None:
        """Concatenate the documents of each kind in a seeded order.

        Args:
            encoded: Token ids of each document, end-of-text first, uint16 ``[num_tokens]``.
            seed: Fixes the order of documents and every later draw.
        """
        self._seed = seed
        self._kinds: list[DocumentKind] = []
        self._streams: list[TokenArray] = []
        self._starts: list[npt.NDArray[np.int64]] = []
        weights = []
        rng = np.random.default_rng(seed)
        for kind, weight in KIND_WEIGHTS.items():
            parts = [
                tokens for doc, tokens in zip(documents, encoded, strict=True) if doc.kind == kind
            ]
            if not parts:
                continue
            order = rng.permutation(len(parts))
            ordered = [parts[i] for i in order]
            self._kinds.append(kind)
            self._streams.append(np.concatenate(ordered))
            self._starts.append(np.cumsum([0, *(len(part) for part in ordered[:-1])]))
            weights.append(weight * len(self._streams[-1]))
        self._probabilities = np.array(weights) / np.sum(weights)

    @property
    def num_tokens(self) -> int:
        """Number of distinct training tokens."""
        return sum(len(stream) for stream in self._streams)

    def draw(self, step: int, num_rows: int, length: int) -> TrainingRows:
        """Returns the sequences of one step; all their tokens count the same."""
        rng = np.random.default_rng([self._seed, step])
        rows = [self._draw_row(rng, length + 1) for _ in range(num_rows)]
        return TrainingRows(np.stack(rows).astype(np.int64))

    def _draw_row(self, rng: np.random.Generator, size: int) -> TokenArray:
        choice = int(rng.choice(len(self._kinds), p=self._probabilities))
        stream = self._streams[choice]
        if rng.random() < START_RATIOS[self._kinds[choice]]:
            offset = int(rng.choice(self._starts[choice]))
        else:
            offset = int(rng.integers(len(stream)))
        row = np.take(stream, np.arange(offset, offset + size), mode="wrap")
        if rng.random() < REPEAT_RATIO:
            _repeat_segment(rng, row)
        return row


def _repeat_segment(rng: np.random.Generator, row: TokenArray) -> None:
    """Copies a random segment of the row over a later place, in place."""
    length = int(rng.integers(MIN_REPEAT_TOKENS, min(MAX_REPEAT_TOKENS, len(row) // 3)))
    source = int(rng.integers(0, len(row) - 2 * length))
    target = int(rng.integers(source + length, len(row) - length + 1))
    row[target : target + length] = row[source : source + length].copy()
