"""Measures the shipped model on held-out text: ``python -m tests.training.evaluate``."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from lmcache_demo.model import MODEL_DIR
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.training.corpus import Document, DocumentKind, collect_corpus, render_question
from tests.training.recipe import Recipe, build_config

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

# The library's tests are read in training, but say little about prose and programs: they are not
# measured.
MEASURED_KINDS: Final[tuple[DocumentKind, ...]] = ("library", "topic", "reference")
QUESTION_START: Final = "\n\nQuestion: What is "
ANSWER_START: Final = "\nAnswer: "
MAX_ANSWERED_DOCUMENTS: Final = 20
NUM_NOISE_SEQUENCES: Final = 16
SAMPLE_PROMPT: Final = 'def read_lines(path):\n    """Read'


def split_questions(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Takes a reference document apart.

    Args:
        text: The document as :func:`tests.training.corpus.build_reference` wrote it.

    Returns:
        The entries, and the questions after them: names with the summaries that answer them.
    """
    entries, *blocks = text.rstrip("\n").split(QUESTION_START)
    questions = []
    for block in blocks:
        name, _, answer = block.partition(f"?{ANSWER_START}")
        questions.append((name, answer.removeprefix(f"{name}: ")))
    return entries, questions


def load(folder: Path, *, trained: bool) -> Meter:
    """Loads a meter of the model in a folder, or of an untrained one with the same tokenizer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    if trained:
        model = LlamaForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True
        )
    else:
        torch.manual_seed(Recipe().seed)
        model = LlamaForCausalLM(build_config())
    return Meter(model.eval(), tokenizer)


def report_bytes(
    console: Console, trained: Meter, untrained: Meter, documents: Sequence[Document]
) -> None:
    """Prints bits per byte of each kind of held-out text, trained beside untrained."""
    table = Table(
        "held-out text", "documents", "bytes", "trained", "untrained", title="Loss, bits per byte"
    )
    groups = [
        (kind, [doc.text for doc in documents if doc.kind == kind]) for kind in MEASURED_KINDS
    ]
    for name, texts in [*groups, ("all", [doc.text for doc in documents])]:
        if texts:
            size = sum(len(text.encode()) for text in texts)
            figures = [f"{meter.bits_per_byte(texts):.3f}" for meter in (trained, untrained)]
            table.add_row(name, str(len(texts)), f"{size:,}", *figures)
    console.print(table)


def report_context(console: Console, meter: Meter, documents: Sequence[Document]) -> None:
    """Prints the loss by position and what context is worth to the model."""
    sources = [doc.text for doc in documents if doc.kind != "reference"]
    table = Table("positions", "nats per token", title="Loss by position, windows of 4,000 tokens")
    for (start, stop), loss in meter.loss_by_position(sources).items():
        table.add_row(f"{start:,}-{stop:,}", f"{loss:.3f}")
    console.print(table)
    references = [split_questions(doc.text) for doc in documents if doc.kind == "reference"]
    comparisons: list[tuple[str, Comparison]] = [
        ("same tokens at 400-600, then at 2,000-4,000", meter.far_context(sources)),
        ("held-out segment, then repeated 600 tokens later", meter.repeated_segment(sources)),
        ("random tokens, then repeated", meter.repeated_noise(NUM_NOISE_SEQUENCES)),
        (
            "answers without, then with their document",
            meter.answers(references[:MAX_ANSWERED_DOCUMENTS]),
        ),
    ]
    table = Table(
        "what", "tokens", "without", "with", "gain", title="What context is worth, nats per token"
    )
    for name, result in comparisons:
        table.add_row(
            name,
            f"{result.num_tokens:,}",
            f"{result.without:.3f}",
            f"{result.with_:.3f}",
            f"{result.gain:.3f}",
        )
    console.print(table)


def report_samples(console: Console, meter: Meter, documents: Sequence[Document]) -> None:
    """Prints greedy continuations: of a program, and of a question about a held-out document."""
    console.rule("program")
    console.print(SAMPLE_PROMPT + meter.generate(SAMPLE_PROMPT, 80), markup=False, highlight=False)
    for doc in [doc for doc in documents if doc.kind == "reference"][:3]:
        entries, questions = split_questions(doc.text)
        name, summary = questions[0]
        prompt = f"{entries}\n\n{render_question(name)}"
        console.rule(f"{doc.name}, {len(meter.encode(prompt)):,} tokens")
        console.print(
            f"{render_question(name)}{meter.generate(prompt, 40)}", markup=False, highlight=False
        )
        console.print(f"expected: {summary}", markup=False, highlight=False)


def main() -> None:
    """Command line of the measurement."""
    parser = argparse.ArgumentParser(prog="python -m tests.training.evaluate", description=__doc__)
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL_DIR,
        help="folder of the model (default: the shipped one)",
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    documents = [doc for doc in collect_corpus().held_out if doc.kind in MEASURED_KINDS]
    console = Console(width=120)
    trained, untrained = load(args.model, trained=True), load(args.model, trained=False)
    report_bytes(console, trained, untrained, documents)
    report_context(console, trained, documents)
    report_samples(console, trained, documents)


if __name__ == "__main__":
    main()


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

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
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
