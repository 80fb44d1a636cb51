"""What a blended prefill costs: floating-point operations, and time to first token, beside
transformers' own full prefill.

In the time of a blended prompt its documents are looked up in host memory, loaded, moved and
mended; the peer is `model(...)` on the whole prompt. Models have random weights: neither time nor
operations depend on these, and quality is measured elsewhere.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lmcache_core.integrations.transformers import CachedCausalLM
from transformers import LlamaForCausalLM

from tests.bench.blend_flops import Flops, counted, layers_in_full, prefill_flops
from tests.bench.blend_prompts import Prompt, blending_models, made_model, made_prompt
from tests.bench.codec_neighbours import Neighbours
from tests.bench.report import Section

NUM_THREADS = 2
NUM_ROUNDS = 3
GOAL_RATIO, GOAL_TIMES, GOAL_TOKENS = 0.15, 2.2, 4_096
DTYPES = (torch.float32, torch.bfloat16)
TRIED_TOKENS = 2_048
"""Prompt on which the faster of `DTYPES` is found."""
ALL_RATIOS = (0.0, 0.05, 0.15, 0.25, 0.5)
LOW_RATIOS = ALL_RATIOS[:-1]
"""Where half of the prompt takes long."""
ENDS = (0.0, GOAL_RATIO)
"""Where a full prefill takes long too."""
Run = Callable[[str, Callable[[], Any]], Any]


@dataclass(frozen=True)
class Shape:
    """A model with random weights, and what is measured on it.

    Attributes:
        name: Its size.
        options: Of its configuration.
        ratios: For each length of a prompt, the shares that are computed anew.
    """

    name: str
    options: Mapping[str, int]
    ratios: Mapping[int, Sequence[float]]


SMALL = Shape(
    "0.1 B",
    {
        "num_hidden_layers": 12,
        "hidden_size": 768,
        "intermediate_size": 2_048,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 32_000,
    },
    {2_048: ALL_RATIOS, 4_096: ALL_RATIOS, 8_192: ENDS},
)
LARGE = Shape(  # layers, widths and vocabulary of Qwen2.5-0.5B
    "0.5 B",
    {
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4_864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    {2_048: ALL_RATIOS, 4_096: LOW_RATIOS, 8_192: (GOAL_RATIO,)},
)


@dataclass(frozen=True)
class BlendSpeed:
    """What was measured.

    Attributes:
        sections: The table of first tokens, and that of the dtypes that were tried.
        remark: In what dtype, and what else the machine did.
    """

    sections: tuple[Section, Section]
    remark: str


@dataclass(frozen=True)
class Arm:
    """One way to the first token of a prompt.

    Attributes:
        ratio: Share of the retrieved tokens that is computed anew; None recomputes everything, and
            nothing is retrieved.
        first_token: Computes it.
        flops: Of one time.
    """

    ratio: float | None
    first_token: Callable[[], int]
    flops: Flops

    @property
    def name(self) -> str:
        """What is computed anew."""
        return "all: full recompute" if self.ratio is None else f"{self.ratio:.0%}"


@dataclass(frozen=True)
class Took:
    """What an arm took.

    Attributes:
        name: Of the arm.
        flops: Of one time.
        seconds: Of each round.
    """

    name: str
    flops: Flops
    seconds: Sequence[float]


@dataclass(frozen=True)
class Measured:
    """All arms of one prompt.

    Attributes:
        model: Name of its shape.
        num_tokens: Of the prompt.
        arms: The first recomputes everything.
    """

    model: str
    num_tokens: int
    arms: Sequence[Took]


def full_arm(model: LlamaForCausalLM, prompt: Prompt) -> Arm:
    """What transformers does by itself."""

    @torch.inference_mode()
    def first_token() -> int:
        output = model(input_ids=prompt.tokens[None], use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    return Arm(
        None,
        first_token,
        prefill_flops(model.config, layers_in_full(model.config, len(prompt.tokens))),
    )


def blended_arm(model: CachedCausalLM, prompt: Prompt, ratio: float) -> Arm:
    """What a user calls; it is done once, and its operations are counted.

    Raises:
        RuntimeError: The prompt was not blended, or not all of its documents were found.
    """

    def first_token() -> int:
        answer = model.generate(prompt.tokens, 1)
        if not answer.is_blended or answer.num_reused_tokens != prompt.num_in_documents:
            raise RuntimeError(
                f"of {prompt.num_in_documents} tokens of documents {answer.num_reused_tokens} were"
                f" found, blended: {answer.is_blended}"
            )
        return answer.tokens[0]

    flops, _ = counted(first_token)
    return Arm(ratio, first_token, flops)


def measure_prompt(
    run: Run, name: str, model: LlamaForCausalLM, prompt: Prompt, ratios: Sequence[float]
) -> Measured:
    """Every arm once in each round.

    Args:
        run: Given a name and work, says the name, does the work, and returns what it returns.
        name: Of the model.
        model: In eval mode.
        prompt: Whose first token is computed.
        ratios: Of the blended arms.
    """
    what = f"blend: {name}, {len(prompt.tokens):,} tokens"
    with blending_models(model, prompt, ratios) as blending:
        arms = [full_arm(model, prompt)]
        for one, ratio in zip(blending, ratios, strict=True):
            arms.append(
                run(f"{what}, counting {ratio:.0%}", lambda: blended_arm(one, prompt, ratio))  # noqa: B023
            )
        seconds: list[list[float]] = [[] for _ in arms]
        for number in range(NUM_ROUNDS):
            for arm, taken in zip(arms, seconds, strict=True):
                begin = time.perf_counter()
                run(f"{what}, round {number + 1} of {NUM_ROUNDS}, {arm.name}", arm.first_token)
                taken.append(time.perf_counter() - begin)
    return Measured(
        name,
        len(prompt.tokens),
        [Took(arm.name, arm.flops, taken) for arm, taken in zip(arms, seconds, strict=True)],
    )


def faster_dtype(run: Run) -> tuple[torch.dtype, Section]:
    """In which dtype this machine computes the smaller model faster without any blending, and
    the table that shows it.
    """
    rows, seconds = [], {}
    for dtype in DTYPES:
        model = made_model(SMALL.options, dtype)
        prompt = made_prompt(TRIED_TOKENS, model.config.vocab_size)
        name = named(dtype)
        full, blended = measure_prompt(
            run, f"{SMALL.name} {name}", model, prompt, (GOAL_RATIO,)
        ).arms
        seconds[dtype] = statistics.median(full.seconds)
        rows.append(
            (name, f"{seconds[dtype]:.2f}", f"{statistics.median(blended.seconds):.2f}", "")
        )
    chosen = min(seconds, key=lambda dtype: seconds[dtype])
    rows = [(*row[:-1], "measured in" if row[0] == named(chosen) else "") for row in rows]
    headings = ("dtype", "full recompute, s", f"{GOAL_RATIO:.0%} anew, s", "note")
    return chosen, Section(
        f"Blend: dtype, {SMALL.name} parameters, {TRIED_TOKENS:,} tokens", headings, rows
    )


def first_tokens(measured: Sequence[Measured]) -> Section:
    """The table. Speed-ups are medians over the rounds, in each of which all arms were measured
    in turn.
    """
    rows = []
    for one in measured:
        full = one.arms[0]
        for arm in one.arms:
            faster = statistics.median(
                whole / mine for whole, mine in zip(full.seconds, arm.seconds, strict=True)
            )
            goal = arm.name == f"{GOAL_RATIO:.0%}" and one.num_tokens >= GOAL_TOKENS
            rows.append(
                (
                    one.model,
                    f"{one.num_tokens:,}",
                    arm.name,
                    f"{arm.flops.total / 1e12:.3f}",
                    f"{arm.flops.total / full.flops.total:.2f}",
                    f"{statistics.median(arm.seconds):.2f}",
                    f"{min(arm.seconds):.2f} … {max(arm.seconds):.2f}",
                    f"{faster:.2f}",
                    f"goal: {GOAL_TIMES:g} times" if goal else "",
                )
            )
    headings = (
        "model",
        "tokens",
        "recomputed",
        "TFLOP",
        "share of full",
        "first token, s",
        "fastest … slowest",
        "times faster",
        "note",
    )
    return Section(
        "Blend: first token of a prompt whose documents are in host memory",
        headings,
        rows,
        left_out=frozenset({"2,048", "0%", "5%", "50%"}),
    )


def measure(run: Run) -> BlendSpeed:
    """Measure everything; takes about eight minutes on two cores, with `NUM_THREADS` torch threads.

    Args:
        run: Given a name and work, says the name, does the work, and returns what it returns.
    """
    measured = []
    with _threads(NUM_THREADS), Neighbours() as others:
        dtype, dtypes = faster_dtype(run)
        for shape in (SMALL, LARGE):
            model = run(
                f"blend: {shape.name}, random weights",
                lambda: made_model(shape.options, dtype),  # noqa: B023
            )
            for num_tokens, ratios in shape.ratios.items():
                prompt = made_prompt(num_tokens, model.config.vocab_size)
                measured.append(measure_prompt(run, shape.name, model, prompt, ratios))
                gc.collect()
    remark = (
        f"{named(dtype)}, {NUM_THREADS} torch thread{'s' if NUM_THREADS > 1 else ''}, medians of"
        f" {NUM_ROUNDS} rounds. While this was measured, other processes kept {others.cores:.2f} of"
        f" {os.cpu_count()} cores busy."
    )
    return BlendSpeed((first_tokens(measured), dtypes), remark)


def named(dtype: torch.dtype) -> str:
    """Its name alone."""
    return str(dtype).removeprefix("torch.")


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
