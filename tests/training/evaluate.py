"""Measure the shipped model on held-out text: `python -m tests.training.evaluate`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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

# The library's tests are read in training, but say little about prose and programs: they are not
# measured.
MEASURED_KINDS: Final[tuple[DocumentKind, ...]] = ("library", "topic", "reference")
QUESTION_START: Final = "\n\nQuestion: What is "
ANSWER_START: Final = "\nAnswer: "
WINDOW_TOKENS: Final = 4_000
SEGMENT_TOKENS: Final = 200

LossArray = npt.NDArray[np.float64]


def split_questions(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Take a reference document apart.

    Args:
        text: The document as `tests.training.corpus.build_reference` wrote it.

    Returns:
        The entries, and the questions after them: names with the summaries that answer them.
    """
    entries, *blocks = text.rstrip("\n").split(QUESTION_START)
    questions = []
    for block in blocks:
        name, _, answer = block.partition(f"?{ANSWER_START}")
        questions.append((name, answer.removeprefix(f"{name}: ")))
    return entries, questions


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same tokens measured twice: mean loss without and with some context, nats per token."""

    without: float
    with_: float

    @property
    def gain(self) -> float:
        """How much the context helps, in nats per token."""
        return self.without - self.with_


class Meter:
    """Computes losses of one model.

    Args:
        model: In evaluation mode.
    """

    def __init__(self, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
        self._model = model
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, with nothing added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def token_losses(self, ids: Sequence[int]) -> LossArray:
        """Return the loss of each token, in nats, after an end-of-text token."""
        tokens = torch.tensor([[self._model.config.bos_token_id, *ids]], dtype=torch.int64)
        with torch.inference_mode():
            logits = self._model(input_ids=tokens[:, :-1], use_cache=False).logits[0]
            losses = F.cross_entropy(logits.float(), tokens[0, 1:], reduction="none")
        return losses.double().numpy()

    def bits_per_byte(self, texts: Iterable[str]) -> float:
        """Return the mean loss per byte of UTF-8, in bits; texts are read in windows of 4,000
        tokens.
        """
        nats, num_bytes = 0.0, 0
        for text in texts:
            ids = self.encode(text)
            num_bytes += len(text.encode())
            for start in range(0, len(ids), WINDOW_TOKENS):
                nats += float(self.token_losses(ids[start : start + WINDOW_TOKENS]).sum())
        return nats / math.log(2) / num_bytes

    def repeated_noise(self, num_sequences: int) -> Comparison:
        """Compare the first and second copy of random tokens: what copying alone achieves."""
        rng = np.random.default_rng(0)
        vocab_size = int(self._model.config.vocab_size)
        losses = [
            self.token_losses(rng.integers(1, vocab_size, SEGMENT_TOKENS).tolist() * 2)
            for _ in range(num_sequences)
        ]
        first, second = np.split(np.array(losses), 2, axis=1)
        return Comparison(float(first.mean()), float(second.mean()))

    def answers(self, documents: Iterable[tuple[str, Sequence[tuple[str, str]]]]) -> Comparison:
        """Compare the loss of answers without and with the document that they stand in.

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
        return Comparison(
            float(np.concatenate(without).mean()), float(np.concatenate(with_).mean())
        )


def load(folder: Path, *, trained: bool) -> Meter:
    """Load a meter of the model in a folder, or of an untrained one with the same tokenizer."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    if trained:
        model = LlamaForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True
        )
    else:
        torch.manual_seed(Recipe().seed)
        model = LlamaForCausalLM(build_config())
    return Meter(model.eval(), tokenizer)


def loss_table(trained: Meter, untrained: Meter, documents: Sequence[Document]) -> Table:
    """Return bits per byte of each kind of held-out text, of the trained and an untrained model."""
    table = Table(
        "held-out text", "documents", "bytes", "trained", "untrained", title="Loss, bits per byte"
    )
    groups = [
        (kind, [doc.text for doc in documents if doc.kind == kind]) for kind in MEASURED_KINDS
    ]
    for name, texts in [*groups, ("all", [doc.text for doc in documents])]:
        size = sum(len(text.encode()) for text in texts)
        figures = [f"{meter.bits_per_byte(texts):.3f}" for meter in (trained, untrained)]
        table.add_row(name, str(len(texts)), f"{size:,}", *figures)
    return table


def main() -> None:
    """Print the table of the model card."""
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
    trained, untrained = load(args.model, trained=True), load(args.model, trained=False)
    Console(width=120).print(loss_table(trained, untrained, documents))


if __name__ == "__main__":
    main()
