"""Measures of a language model on held-out text: loss in bits per byte, by position, and what it
owes to its context.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lmcache_demo.model.reference import render_question

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

LossArray = npt.NDArray[np.float64]

WINDOW_TOKENS: Final = 4_000
WINDOW_STRIDE_TOKENS: Final = 1_000
# Windows of positions, each [start, stop); the last is the one that long context is judged by.
POSITION_RANGES: Final = (
    (0, 100),
    (100, 400),
    (400, 600),
    (600, 1_000),
    (1_000, 2_000),
    (2_000, 3_000),
    (3_000, 4_000),
    (2_000, 4_000),
)
NEAR_RANGE: Final = (400, 600)
FAR_RANGE: Final = (2_000, 4_000)
SEGMENT_TOKENS: Final = 200
FILLER_TOKENS: Final = 600


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same thing measured twice, in nats per token.

    Attributes:
        without: Mean loss without the help of the context in question.
        with_: Mean loss with it.
        num_tokens: Number of tokens that the means are over.
    """

    without: float
    with_: float
    num_tokens: int

    @property
    def gain(self) -> float:
        """How much the context helps, in nats per token."""
        return self.without - self.with_


class Meter:
    """Computes losses of one model."""

    def __init__(self, model: "LlamaForCausalLM", tokenizer: "PreTrainedTokenizerFast") -> None:
        """Keeps the two; both are only read.

        Args:
            model: The model, in evaluation mode.
            tokenizer: Its tokenizer.
        """
        self._model = model
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of a text, with nothing added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def token_losses(self, ids: Sequence[int]) -> LossArray:
        """Returns the loss of each token, in nats, shape ``[len(ids)]``; an end-of-text token
        stands in front of them.
        """
        tokens = torch.tensor([[self._model.config.bos_token_id, *ids]], dtype=torch.int64)
        with torch.inference_mode():
            logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits[0]
            losses = F.cross_entropy(logits.float(), tokens[0, 1:], reduction="none")
        return losses.double().numpy()

    def bits_per_byte(self, texts: Iterable[str]) -> float:
        """Returns the mean loss per byte of UTF-8, in bits; texts are read in windows of 4,000
        tokens.
        """
        nats, num_bytes = 0.0, 0
        for text in texts:
            ids = self.encode(text)
            num_bytes += len(text.encode())
            for start in range(0, len(ids), WINDOW_TOKENS):
                nats += float(self.token_losses(ids[start : start + WINDOW_TOKENS]).sum())
        return nats / math.log(2) / num_bytes

    def loss_by_position(self, texts: Iterable[str]) -> Mapping[tuple[int, int], float]:
        """Returns the mean loss in each range of positions, in nats per token.

        Args:
            texts: Every window of 4,000 tokens in them counts, at a stride of 1,000; shorter texts
                do not count.

        Returns:
            The mean per range of :data:`POSITION_RANGES`.

        Raises:
            ValueError: If no text is long enough.
        """
        rows: list[LossArray] = []
        for text in texts:
            ids = self.encode(text)
            starts = range(0, len(ids) - WINDOW_TOKENS + 1, WINDOW_STRIDE_TOKENS)
            rows.extend(self.token_losses(ids[start : start + WINDOW_TOKENS]) for start in starts)
        if not rows:
            msg = f"no text of {WINDOW_TOKENS} tokens to measure positions on"
            raise ValueError(msg)
        mean = np.mean(rows, axis=0)
        return {(start, stop): float(mean[start:stop].mean()) for start, stop in POSITION_RANGES}

    def far_context(self, texts: Iterable[str]) -> Comparison:
        """Compares the same tokens at positions 2,000-4,000 and at positions 400-600 of their
        window.
        """
        near_losses, far_losses = [], []
        near_start, near_stop = NEAR_RANGE
        for text in texts:
            ids = self.encode(text)[:WINDOW_TOKENS]
            if len(ids) < WINDOW_TOKENS:
                continue
            far_losses.append(self.token_losses(ids)[FAR_RANGE[0] :])
            for target in range(*FAR_RANGE, near_stop - near_start):
                window = ids[target - near_start : target - near_start + near_stop]
                near_losses.append(self.token_losses(window)[near_start:])
        near, far = np.concatenate(near_losses), np.concatenate(far_losses)
        return Comparison(without=float(near.mean()), with_=float(far.mean()), num_tokens=len(far))

    def repeated_segment(self, texts: Sequence[str]) -> Comparison:
        """Compares a segment's loss with its loss when it is read again, 600 tokens of another
        text later.
        """
        first_losses, second_losses = [], []
        encoded = [ids for ids in map(self.encode, texts) if len(ids) >= 2 * FILLER_TOKENS]
        for index, ids in enumerate(encoded):
            segment = ids[FILLER_TOKENS : FILLER_TOKENS + SEGMENT_TOKENS]
            filler = encoded[(index + 1) % len(encoded)][:FILLER_TOKENS]
            losses = self.token_losses([*segment, *filler, *segment])
            first_losses.append(losses[:SEGMENT_TOKENS])
            second_losses.append(losses[-SEGMENT_TOKENS:])
        first, second = np.concatenate(first_losses), np.concatenate(second_losses)
        return Comparison(
            without=float(first.mean()), with_=float(second.mean()), num_tokens=len(first)
        )

    def repeated_noise(self, num_sequences: int, seed: int = 0) -> Comparison:
        """Compares the first and second copy of uniformly random tokens: what copying alone
        achieves.
        """
        rng = np.random.default_rng(seed)
        vocab_size = int(self._model.config.vocab_size)
        first_losses, second_losses = [], []
        for _ in range(num_sequences):
            segment = rng.integers(1, vocab_size, SEGMENT_TOKENS).tolist()
            losses = self.token_losses(segment * 2)
            first_losses.append(losses[:SEGMENT_TOKENS])
            second_losses.append(losses[SEGMENT_TOKENS:])
        first, second = np.concatenate(first_losses), np.concatenate(second_losses)
        return Comparison(
            without=float(first.mean()), with_=float(second.mean()), num_tokens=len(first)
        )

    def answers(self, documents: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> Comparison:
        """Compares the loss of answers with and without the document that they stand in.

        Args:
            documents: Pairs of a document and its questions, each a name and the summary that
                answers it.
        """
        without, with_ = [], []
        for document, questions in documents:
            for name, summary in questions:
                prompt, answer = self.encode(render_question(name)), self.encode(f" {summary}")
                if not answer:
                    continue
                without.append(self.token_losses([*prompt, *answer])[-len(answer) :])
                context = self.encode(f"{document}\n\n")
                with_.append(self.token_losses([*context, *prompt, *answer])[-len(answer) :])
        bare, read = np.concatenate(without), np.concatenate(with_)
        return Comparison(
            without=float(bare.mean()), with_=float(read.mean()), num_tokens=len(read)
        )

    def generate(self, prompt: str, max_new_tokens: int) -> str:
        """Returns the greedy continuation of a prompt."""
        tokens = torch.tensor(
            [[self._model.config.bos_token_id, *self.encode(prompt)]], dtype=torch.int64
        )
        with torch.inference_mode():
            output = self._model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_new_tokens,
                do_sample=False,
            )
        text: str = self._tokenizer.decode(output[0, tokens.shape[1] :], skip_special_tokens=True)
        return text
