"""The section `blend-quality` of docs/benchmarks.md: what blending costs answers that need several
documents, by policy and share of tokens recomputed, and what it costs on running text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from lmcache_core.blend import BlendRetriever, CacheBlendImpl, RotaryEmbedding
from lmcache_core.blend.certificate import BlendProfile
from lmcache_core.blend.selection import FirstOfChunk, SelectionPolicy, create_policy
from lmcache_core.integrations.transformers.architectures import rope_parameters_of
from lmcache_core.integrations.transformers.blend_quality import DocumentRetriever, SplitPrompt
from lmcache_core.integrations.transformers.blend_quality import measure as measure_text
from lmcache_core.integrations.transformers.blended import BlendingModel, blending_model_of
from lmcache_demo.model import load_model, load_two_document_model
from lmcache_demo.model.two_documents import SEPARATOR, Vocabulary, draw_prompt, encode_questions
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.bench.codecs import NORMAL_95, Change
from tests.bench.measure import Run
from tests.bench.plot import Axis, Chart
from tests.bench.report import Findings, Section
from tests.training.corpus import collect_corpus

NUM_PROMPTS = 300
NUM_OWNERS, NUM_THINGS, NUM_QUESTIONS = 10, 20, 4
FILLER_TOKENS = 48
SEED = 11_22
RATIOS = (0.05, 0.10, 0.15, 0.25, 0.50, 1.0)
SHOWN_RATIOS = (0.0, 0.05, 0.15, 0.25)
"""In the table; the plot has all."""
UNMOVED, NAIVE = "none, keys not rotated", "none"
POLICIES = ("deviation", "first_of_chunk")
GOAL_CLOSED, GOAL_ERRORS = 0.9, 5

NUM_TEXT_PROMPTS, TEXT_DOCUMENTS, TEXT_DOCUMENT_TOKENS, TEXT_ENDING_TOKENS = 120, 3, 160, 32
MAX_TEXT_CHARS = 8_000
TEXT_ARMS = (
    (NAIVE, "first_of_chunk", 0.0),
    ("first_of_chunk", "first_of_chunk", 0.15),
    ("deviation", "deviation", 0.15),
)


@dataclass(frozen=True)
class Shape:
    """What stands before the owners' document.

    Attributes:
        num_mark_documents: Documents of marks.
        is_filled: Whether a document of plain text, which nothing needs, stands somewhere among
            them.
    """

    name: str
    num_mark_documents: int
    is_filled: bool


TWO_DOCUMENTS = Shape("two documents", 1, is_filled=False)
FIVE_DOCUMENTS = Shape("five documents, four in any order", 3, is_filled=True)


def measure(run: Run) -> Findings:
    """Measure everything, and plot the two-document prompts; takes about ten minutes on one
    core.
    """
    model, tokenizer = load_two_document_model()
    texts = [
        doc.text[:MAX_TEXT_CHARS]
        for doc in collect_corpus().held_out
        if doc.kind in ("library", "topic")
    ]
    source = PromptSource(tokenizer, texts)
    sections, remarks, plots = [], [], []
    for shape in (TWO_DOCUMENTS, FIVE_DOCUMENTS):
        prompts = list(source.draw(NUM_PROMPTS, shape))
        found = run(f"blend: {shape.name}", lambda: QualityBench(model, prompts).measure())  # noqa: B023 (run at once)
        sections.append(quality_table(shape.name, *found))
        remarks.append(_remark(shape.name, prompts, found[1]))
        plots.append(quality_plot(found[1], f"Answers that need {shape.name}"))
    sections.append(run("blend: running text", lambda: _text_table(*load_model(), texts)))
    plot = ("blend-quality.svg", "Gap closed by share of tokens recomputed", plots[0])
    return Findings(sections, remarks, plot=plot)


# --- Prompts whose answers need several documents -------------------------------------------------


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
        """Yield the same prompts at every call; their answers are judged."""
        dice = np.random.default_rng(SEED)
        separator = self._encode(SEPARATOR)
        for _ in range(count):
            prompt = draw_prompt(
                dice, self._words, NUM_OWNERS, NUM_THINGS, num_documents=shape.num_mark_documents
            )
            first = list(map(self._encode, prompt.marks))
            if shape.is_filled:
                place = int(dice.integers(len(self._stream) - FILLER_TOKENS))
                first.append(self._stream[place : place + FILLER_TOKENS])
            documents = [first[i] for i in dice.permutation(len(first))]
            documents.append(self._encode("\n".join(prompt.owners)))
            ending, places = encode_questions(self._tokenizer, prompt.questions[:NUM_QUESTIONS])
            cached = [torch.tensor([*document, *separator]) for document in documents]
            yield SplitPrompt(cached, torch.tensor(ending), torch.tensor(places))

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))


@dataclass(frozen=True)
class Arm:
    """One way to read a prompt.

    Attributes:
        ratio: Share of the retrieved tokens that are recomputed; 0 without a selection.
    """

    policy: str
    ratio: float


@dataclass(frozen=True)
class ArmQuality:
    """What came of an arm.

    Attributes:
        accuracy: Share of the answers that are the most probable token.
        added: Loss of an answer over that of full recompute, nats.
        closed: Share of the gap between naive reuse and full recompute that is closed.
    """

    accuracy: float
    added: Change
    closed: Change


@dataclass
class _Reading:
    """Of one arm: the loss of each prompt's answers, summed."""

    nats: list[float] = field(default_factory=list)
    num_right: int = 0

    def add(self, logits: torch.Tensor, answers: torch.Tensor) -> None:
        """Add one prompt's answers, logits `[num_questions, vocabulary]`."""
        self.nats.append(float(F.cross_entropy(logits.double(), answers, reduction="sum")))
        self.num_right += int((logits.argmax(-1) == answers).sum())


class QualityBench:
    """Reads the same prompts in every way.

    Args:
        model: In eval mode.
        prompts: At least two.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[SplitPrompt]) -> None:
        self._model = model
        self._prompts = prompts
        self._retriever = DocumentRetriever(model)
        self._rotary = RotaryEmbedding(rope_parameters_of(model.config))
        self._arms = {
            Arm(UNMOVED, 0.0): self._blending(FirstOfChunk(0.0), moves=False),
            Arm(NAIVE, 0.0): self._blending(FirstOfChunk(0.0)),
        } | {
            Arm(policy, ratio): self._blending(create_policy(policy, ratio))
            for ratio in RATIOS
            for policy in POLICIES
        }

    def _blending(self, policy: SelectionPolicy, *, moves: bool = True) -> BlendingModel:
        executor = CacheBlendImpl(0.0, policy)
        executor.set_mover(self._rotary.mover if moves else lambda _from, _to: lambda k: k)
        return BlendingModel(self._model, self._retriever, executor)

    def measure(self) -> tuple[ArmQuality, dict[Arm, ArmQuality]]:
        """Read all prompts in all ways; return full recompute, and all else."""
        full, found = _Reading(), {arm: _Reading() for arm in self._arms}
        for prompt in self._prompts:
            self._read(prompt, full, found)
        num_answers = sum(len(prompt.judged_places()) for prompt in self._prompts)
        naive = found[Arm(NAIVE, 0.0)]
        return (
            _quality(full, full, naive, num_answers),
            {arm: _quality(reading, full, naive, num_answers) for arm, reading in found.items()},
        )

    @torch.inference_mode()
    def _read(self, prompt: SplitPrompt, full: _Reading, found: Mapping[Arm, _Reading]) -> None:
        tokens, kept = prompt.tokens(), len(prompt.ending)
        places = prompt.judged_places()
        answers = prompt.ending[places]
        logits = self._model(input_ids=tokens[None], use_cache=False, logits_to_keep=kept).logits
        full.add(logits[0, places - 1], answers)
        self._retriever.compute(prompt)
        for arm, blending in self._arms.items():
            got = blending.prefill(tokens, torch.tensor([0, len(tokens)]), kept)
            found[arm].add(got.logits[0, places - 1], answers)


def _quality(reading: _Reading, full: _Reading, naive: _Reading, num_answers: int) -> ArmQuality:
    nats, base, worst = (
        torch.tensor(one.nats, dtype=torch.float64) for one in (reading, full, naive)
    )
    added = nats - base
    return ArmQuality(
        reading.num_right / num_answers,
        share_of_total(added, torch.full_like(added, num_answers / len(added))),
        closed_share(added, worst - base),
    )


def closed_share(added: torch.Tensor, gap: torch.Tensor) -> Change:
    """Return how much of a gap is closed, one minus a ratio of sums over prompts.

    Args:
        added: What is left of each prompt's gap, float64 `[num_prompts]`.
        gap: The gap.
    """
    left = share_of_total(added, gap)
    return Change(1.0 - left.value, left.half_width)


def share_of_total(part: torch.Tensor, whole: torch.Tensor) -> Change:
    """Return the ratio of two sums over prompts, with its 95 % interval (linearised, the prompts
    being independent).

    Args:
        part: float64 `[num_prompts]`, at least two.
        whole: The same; its sum is not 0.
    """
    count, total = len(part), whole.sum()
    value = part.sum() / total
    spread = (part - value * whole).square().sum() * count / (count - 1)
    return Change(float(value), NORMAL_95 * float(spread.sqrt() / total))


def quality_table(name: str, full: ArmQuality, rows: Mapping[Arm, ArmQuality]) -> Section:
    """Return the table of one kind of prompt."""
    cells = [_cells("full recompute", "", full)]
    for arm, row in rows.items():
        if arm.ratio in SHOWN_RATIOS:
            goal = f"goal: {GOAL_CLOSED:.0%}" if arm == Arm("deviation", 0.15) else ""
            cells.append(_cells(arm.policy, f"{arm.ratio:.0%}", row, goal))
    headings = ("policy", "recomputed", "right answers", "gap closed", "note")
    return Section(f"Blend: answers that need {name}", headings, cells)


def _cells(policy: str, ratio: str, row: ArmQuality, goal: str = "") -> tuple[str, ...]:
    return (policy, ratio, f"{row.accuracy:.1%}", f"{row.closed.value:.1%}", goal)


def quality_plot(rows: Mapping[Arm, ArmQuality], title: str) -> str:
    """Return the share of the gap that is closed by the share of tokens recomputed (root scale), as
    SVG.
    """
    x = Axis(
        "share of the reused tokens that is recomputed",
        {ratio: f"{ratio:.0%}" for ratio in (0.0, *RATIOS)},
        math.sqrt,
    )
    low, high = -0.05, 1.1
    y = Axis(
        "share of the gap closed",
        {closed: f"{closed:g}" for closed in (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)},
        lambda closed: (closed - low) / (high - low),
        dark=(0.0, 1.0),
    )
    chart = Chart(title, 420, x, y)
    for policy in POLICIES:
        closed = {ratio: rows[Arm(policy, ratio)].closed for ratio in RATIOS}
        dots = [(ratio, one.value) for ratio, one in closed.items()]
        bars = [
            (ratio, one.value - one.half_width, one.value + one.half_width)
            for ratio, one in closed.items()
        ]
        chart.add(policy, [(0.0, 0.0), *dots], dots=dots, bars=bars)
    return chart.svg(
        "0: as much as naive reuse loses", "1: as full recompute", "bars: 95 % intervals"
    )


def _remark(name: str, prompts: Sequence[SplitPrompt], rows: Mapping[Arm, ArmQuality]) -> str:
    """Say how large the gap is that there is to close."""
    gap = rows[Arm(NAIVE, 0.0)].added
    errors = gap.value / (gap.half_width / NORMAL_95)
    num_tokens = sum(len(prompt.tokens()) for prompt in prompts) / len(prompts)
    return (
        f"{name[0].upper()}{name[1:]}: {len(prompts)} prompts of {num_tokens:.0f} tokens on"
        f" average, {NUM_QUESTIONS} questions each. Naive reuse loses {gap.value:.3f} nats an"
        f" answer, {errors:.1f} standard errors (goal: {GOAL_ERRORS})."
    )


# --- Running text ---------------------------------------------------------------------------------


def _text_table(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]
) -> Section:
    """Measure the first model on held-out running text, whose neighbouring slices are its
    documents, as `python -m lmcache_core.blend.certify` measures.
    """
    separator = torch.tensor(tokenizer.encode("\n---\n", add_special_tokens=False))
    prompts = _text_prompts(tokenizer, texts, separator)
    cells = []
    for name, policy, ratio in TEXT_ARMS:
        profile = BlendProfile(policy, ratio, tuple(separator.tolist()))

        def blending(retriever: BlendRetriever, profile: BlendProfile = profile) -> BlendingModel:
            return blending_model_of(model, retriever, profile)

        found = measure_text(model, prompts, blending)
        added = f"{found.delta_loss_nats:+.4f} ± {NORMAL_95 * found.delta_loss_error:.4f}"
        cells.append((name, f"{ratio:.0%}", added, f"{found.top1_agreement:.1%}", ""))
    title = (
        f"Blend: {TEXT_ENDING_TOKENS} tokens of running text after {TEXT_DOCUMENTS} documents of"
        f" {TEXT_DOCUMENT_TOKENS}, the first model"
    )
    headings = ("policy", "recomputed", "loss over full recompute", "equal first choices", "")
    return Section(title, headings, cells)


def _text_prompts(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], separator: torch.Tensor
) -> list[SplitPrompt]:
    """Cut as many from each text as it has room for, until there are enough."""
    own = TEXT_DOCUMENT_TOKENS - len(separator)
    width = TEXT_DOCUMENTS * own + TEXT_ENDING_TOKENS
    prompts: list[SplitPrompt] = []
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False, verbose=False))
        for window in ids[: len(ids) - len(ids) % width].view(-1, width):
            parts = window[: TEXT_DOCUMENTS * own].view(TEXT_DOCUMENTS, own)
            documents = [torch.cat([part, separator]) for part in parts]
            prompts.append(SplitPrompt(documents, window[TEXT_DOCUMENTS * own :]))
    return prompts[:NUM_TEXT_PROMPTS]
