"""Measures the shipped model on held-out text: ``python -m lmcache_demo.model.evaluate``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from lmcache_demo.model import MODEL_DIR
from lmcache_demo.model.corpus import Document, DocumentKind, collect_corpus
from lmcache_demo.model.measure import Comparison, Meter
from lmcache_demo.model.recipe import Recipe, build_config
from lmcache_demo.model.reference import render_question

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
        text: The document as :func:`lmcache_demo.model.reference.build_reference` wrote it.

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
    parser = argparse.ArgumentParser(
        prog="python -m lmcache_demo.model.evaluate", description=__doc__
    )
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
