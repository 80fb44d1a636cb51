"""What blending costs answers: all prompts, policies and shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lmcache_core.blend import BlendRetriever
from lmcache_core.blend.certificate import BlendProfile
from lmcache_core.integrations.transformers.blend_quality import SplitPrompt
from lmcache_core.integrations.transformers.blend_quality import measure as measure_text
from lmcache_core.integrations.transformers.blended import BlendingModel, blending_model_of
from lmcache_demo.model import load_model, load_two_document_model
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.bench import blend_plot
from tests.bench.blend_quality import BOTH_SIDES, NAIVE, POLICIES, Arm, ArmQuality, QualityBench
from tests.bench.codec_quality import NORMAL_95
from tests.bench.report import Section
from tests.bench.two_document_prompts import (
    FIVE_DOCUMENTS,
    NUM_QUESTIONS,
    TWO_DOCUMENTS,
    PromptSource,
    Shape,
)
from tests.training.corpus import collect_corpus

NUM_PROMPTS = 300
NUM_TEXT_PROMPTS, TEXT_DOCUMENTS, TEXT_DOCUMENT_TOKENS, TEXT_ENDING_TOKENS = 120, 3, 160, 32
MAX_TEXT_CHARS = 8_000
GOAL_CLOSED, GOAL_ERRORS = 0.9, 5
NAMES: Mapping[Shape, str] = {
    TWO_DOCUMENTS: "two documents",
    FIVE_DOCUMENTS: "five documents, four in any order",
}
Run = Callable[[str, Callable[[], Any]], Any]


@dataclass(frozen=True)
class BlendFigures:
    """What was found.

    Attributes:
        sections: The tables.
        remarks: Sentences below them.
        plot: SVG of the two-document prompts.
    """

    sections: Sequence[Section]
    remarks: Sequence[str]
    plot: str


def measure(run: Run) -> BlendFigures:
    """Measure everything; takes about ten minutes on one core.

    Args:
        run: Given a name and work, says the name, does the work, and returns what it returns.
    """
    model, tokenizer = load_two_document_model()
    texts = [
        doc.text[:MAX_TEXT_CHARS]
        for doc in collect_corpus().held_out
        if doc.kind in ("library", "topic")
    ]
    source = PromptSource(tokenizer, texts)
    sections, remarks, plot = [], [], ""
    for shape, name in NAMES.items():
        prompts = list(source.draw(NUM_PROMPTS, shape))
        full, rows = run(f"blend: quality, {name}", lambda: QualityBench(model, prompts).measure())  # noqa: B023 (run at once)
        sections.append(quality_section(name, full, rows))
        remarks.append(_remark(name, prompts, rows))
        if shape == TWO_DOCUMENTS:
            plot = blend_plot.draw(rows, (*POLICIES, BOTH_SIDES), f"Answers that need {name}")
    sections.append(run("blend: quality, running text", lambda: text_section(*load_model(), texts)))
    return BlendFigures(sections, remarks, plot)


def quality_section(name: str, full: ArmQuality, rows: Mapping[Arm, ArmQuality]) -> Section:
    """The table of one kind of prompt."""
    cells = []
    for row in (full, *rows.values()):
        note = f"goal: {GOAL_CLOSED:.0%}" if row.arm == Arm("deviation", 0.15) else ""
        cells.append(
            (
                row.arm.policy,
                "" if row is full else f"{row.arm.ratio:.0%}",
                f"{row.computed_share:.0%}",
                f"{row.loss_nats:.4f}",
                f"{row.added.value:+.4f} ± {row.added.half_width:.4f}",
                f"{row.accuracy:.1%}",
                f"{row.divergence_nats:.4f}",
                f"{row.closed.value:.1%}",
                f"{row.closed.half_width:.1%}",
                note,
            )
        )
    headings = (
        "policy",
        "recomputed",
        "computed",
        "loss, nats an answer",
        "over full recompute",
        "right answers",
        "divergence, nats",
        "gap closed",
        "gap closed, ±",
        "note",
    )
    return Section(
        f"Blend: answers that need {name}",
        headings,
        cells,
        left_out=frozenset({"10%", "50%", "100%"}),
    )


def _remark(name: str, prompts: Sequence[SplitPrompt], rows: Mapping[Arm, ArmQuality]) -> str:
    """How large the gap is that there is to close."""
    gap = rows[Arm(NAIVE, 0.0)].added
    errors = gap.value / (gap.half_width / NORMAL_95)
    num_tokens = sum(len(prompt.tokens()) for prompt in prompts) / len(prompts)
    return (
        f"{name[0].upper()}{name[1:]}: {len(prompts)} prompts of {num_tokens:.0f} tokens on"
        f" average, {NUM_QUESTIONS} questions each. Naive reuse loses {gap.value:.3f} nats an"
        f" answer, {errors:.1f} standard errors (goal: {GOAL_ERRORS})."
    )


def text_section(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> Section:
    """The first model on held-out running text, whose neighbouring slices are its documents: as
    `python -m lmcache_core.blend.certify` measures.
    """
    separator = torch.tensor(tokenizer.encode("\n---\n", add_special_tokens=False))
    prompts = _text_prompts(tokenizer, texts, separator)
    cells = []
    for name, policy, ratio in (
        (NAIVE, "first_of_chunk", 0.0),
        ("first_of_chunk", "first_of_chunk", 0.15),
        ("deviation", "deviation", 0.15),
    ):
        profile = BlendProfile(policy, ratio, tuple(separator.tolist()))

        def blending(retriever: BlendRetriever, profile: BlendProfile = profile) -> BlendingModel:
            return blending_model_of(model, retriever, profile)

        found = measure_text(model, prompts, blending)
        added = f"{found.delta_loss_nats:+.4f} ± {NORMAL_95 * found.delta_loss_error:.4f}"
        cells.append(
            (
                name,
                f"{ratio:.0%}",
                added,
                f"{found.kl_nats:.4f}",
                f"{found.top1_agreement:.1%}",
                "",
            )
        )
    title = (
        f"Blend: {TEXT_ENDING_TOKENS} tokens of running text after {TEXT_DOCUMENTS} documents of"
        f" {TEXT_DOCUMENT_TOKENS}, the first model"
    )
    return Section(
        title,
        (
            "policy",
            "recomputed",
            "loss over full recompute",
            "divergence, nats",
            "equal first choices",
            "note",
        ),
        cells,
    )


def _text_prompts(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], separator: torch.Tensor
) -> list[SplitPrompt]:
    """As many from each text as it has room for, until there are enough."""
    own = TEXT_DOCUMENT_TOKENS - len(separator)
    width = TEXT_DOCUMENTS * own + TEXT_ENDING_TOKENS
    prompts: list[SplitPrompt] = []
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))
        for window in ids[: len(ids) - len(ids) % width].view(-1, width):
            documents = [
                torch.cat([part, separator])
                for part in window[: TEXT_DOCUMENTS * own].view(TEXT_DOCUMENTS, own)
            ]
            prompts.append(SplitPrompt(documents, window[TEXT_DOCUMENTS * own :]))
    return prompts[:NUM_TEXT_PROMPTS]
