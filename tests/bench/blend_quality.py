"""What blending costs answers that need two documents, by policy and share of tokens computed
anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from lmcache_core.blend import CacheBlendImpl, RotaryEmbedding
from lmcache_core.blend.selection import (
    Candidates,
    FirstOfChunk,
    MostDeviating,
    SelectionPolicy,
    create_policy,
)
from lmcache_core.integrations.transformers.architectures import rope_parameters_of
from lmcache_core.integrations.transformers.blend_quality import DocumentRetriever, SplitPrompt
from lmcache_core.integrations.transformers.blended import BlendingModel
from transformers import PreTrainedModel

from tests.bench.codec_quality import NORMAL_95, Change

RATIOS = (0.05, 0.10, 0.15, 0.25, 0.50, 1.0)
UNMOVED, NAIVE, BOTH_SIDES = "none, keys not rotated", "none", "deviation of K and V"
POLICIES = ("deviation", "first_of_chunk")


@dataclass(frozen=True)
class Arm:
    """One way to read a prompt.

    Attributes:
        policy: Its name.
        ratio: Share of the retrieved tokens that are computed anew; 0 without a selection.
    """

    policy: str
    ratio: float


@dataclass(frozen=True)
class ArmQuality:
    """What came of it.

    Attributes:
        arm: Which.
        loss_nats: Of an answer.
        accuracy: Share of the answers that are the most probable token.
        divergence_nats: From the distribution after full recompute, where an answer stands.
        added: Loss over that of full recompute, with its half width at 95 %.
        closed: Share of the gap between naive reuse and full recompute that is closed, likewise.
        computed_share: Share of the prompts' tokens that were computed behind the check layer.
    """

    arm: Arm
    loss_nats: float
    accuracy: float
    divergence_nats: float
    added: Change
    closed: Change
    computed_share: float


@dataclass
class _Reading:
    """Of one arm, sums over a prompt's answers, one entry for each prompt."""

    nats: list[float]
    divergence: list[float]
    num_right: int = 0
    num_computed: int = 0


class BothSides:
    """The tokens whose K and V together deviate most, each side as a share of its own size: for
    comparison.

    Args:
        model: Whose KV it is.
        ratio: Share of the valid tokens.
    """

    def __init__(self, model: PreTrainedModel, ratio: float) -> None:
        self._model = model
        self._chosen_by = MostDeviating(ratio)
        self._deviation = torch.zeros(0)
        self.check_layer = self._chosen_by.check_layer
        self.needs_deviation = False

    def look_at(
        self, prompt: SplitPrompt, retriever: DocumentRetriever, rotary: RotaryEmbedding
    ) -> None:
        """Take the prompt that is read next."""
        tokens = prompt.tokens()
        layer = self._model(
            input_ids=tokens[None], use_cache=True, logits_to_keep=1
        ).past_key_values.layers[self.check_layer]
        found = retriever.result(self.check_layer)
        k, v = (side[0].transpose(0, 1).flatten(1) for side in (layer.keys, layer.values))
        moved = rotary.mover(found.original_positions, torch.arange(len(tokens)))(found.k)
        sides = (
            (k - moved).square().sum(1) / k.square().mean(),
            (v - found.v).square().sum(1) / v.square().mean(),
        )
        self._deviation = (sides[0] + sides[1]) * found.valid_mask

    def choose(self, candidates: Candidates) -> torch.Tensor:
        """See `SelectionPolicy.choose`."""
        return self._chosen_by.choose(replace(candidates, deviation=self._deviation))


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
        self._both_sides: list[BothSides] = []
        self._arms = {
            Arm(UNMOVED, 0.0): self._blending(FirstOfChunk(0.0), moves=False),
            Arm(NAIVE, 0.0): self._blending(FirstOfChunk(0.0)),
        }
        for ratio in RATIOS:
            self._arms |= {
                Arm(policy, ratio): self._blending(create_policy(policy, ratio))
                for policy in POLICIES
            }
            self._both_sides.append(BothSides(model, ratio))
            self._arms[Arm(BOTH_SIDES, ratio)] = self._blending(self._both_sides[-1])

    def _blending(self, policy: SelectionPolicy, *, moves: bool = True) -> BlendingModel:
        executor = CacheBlendImpl(0.0, policy)
        executor.set_mover(self._rotary.mover if moves else lambda _from, _to: lambda k: k)
        return BlendingModel(self._model, self._retriever, executor)

    def measure(
        self, progress: Callable[[int], None] = lambda _: None
    ) -> tuple[ArmQuality, Mapping[Arm, ArmQuality]]:
        """Read all prompts in all ways.

        Args:
            progress: Called with the number of prompts read.

        Returns:
            Full recompute, and all else.
        """
        full = _Reading([], [])
        found = {arm: _Reading([], []) for arm in self._arms}
        for number, prompt in enumerate(self._prompts, 1):
            self._read(prompt, full, found)
            progress(number)
        num_answers = sum(len(prompt.judged_places()) for prompt in self._prompts)
        num_tokens = sum(len(prompt.tokens()) for prompt in self._prompts)
        naive = found[Arm(NAIVE, 0.0)]
        rows = {
            arm: _quality(arm, reading, full, naive, num_answers, num_tokens)
            for arm, reading in found.items()
        }
        return (
            _quality(Arm("full recompute", 1.0), full, full, naive, num_answers, num_tokens),
            rows,
        )

    @torch.inference_mode()
    def _read(self, prompt: SplitPrompt, full: _Reading, found: Mapping[Arm, _Reading]) -> None:
        tokens, ending = prompt.tokens(), prompt.ending
        kept, places = len(ending), prompt.judged_places()
        answers = ending[places]
        logits = self._model(input_ids=tokens[None], use_cache=False, logits_to_keep=kept).logits[0]
        expected = _note(full, logits[places - 1], answers, None, len(tokens))
        self._retriever.compute(prompt)
        for both in self._both_sides:
            both.look_at(prompt, self._retriever, self._rotary)
        for arm, blending in self._arms.items():
            got = blending.prefill(tokens, torch.tensor([0, len(tokens)]), kept)
            _note(found[arm], got.logits[0, places - 1], answers, expected, got.num_computed)


def _note(
    reading: _Reading,
    logits: torch.Tensor,
    answers: torch.Tensor,
    expected: torch.Tensor | None,
    computed: int,
) -> torch.Tensor:
    """Add one prompt's answers, `[num_questions, vocabulary]`; returns their log-probabilities."""
    log_probs = logits.double().log_softmax(-1)
    reading.nats.append(float(F.nll_loss(log_probs, answers, reduction="sum")))
    divergence = (
        0.0
        if expected is None
        else float(F.kl_div(log_probs, expected, reduction="sum", log_target=True))
    )
    reading.divergence.append(divergence)
    reading.num_right += int((log_probs.argmax(-1) == answers).sum())
    reading.num_computed += computed
    return log_probs


def _quality(
    arm: Arm, reading: _Reading, full: _Reading, naive: _Reading, num_answers: int, num_tokens: int
) -> ArmQuality:
    nats, base, worst = (
        torch.tensor(one.nats, dtype=torch.float64) for one in (reading, full, naive)
    )
    added, gap = nats - base, worst - base
    return ArmQuality(
        arm,
        float(nats.sum()) / num_answers,
        reading.num_right / num_answers,
        sum(reading.divergence) / num_answers,
        share_of_total(added, torch.full_like(added, num_answers / len(added))),
        closed_share(added, gap),
        reading.num_computed / num_tokens,
    )


def closed_share(added: torch.Tensor, gap: torch.Tensor) -> Change:
    """How much of a gap is closed, one minus a ratio of sums, with its half width at 95 % over
    prompts.

    Args:
        added: What is left of each prompt's gap, float64 `[num_prompts]`.
        gap: The gap.
    """
    left = share_of_total(added, gap)
    return Change(1.0 - left.value, left.half_width)


def share_of_total(part: torch.Tensor, whole: torch.Tensor) -> Change:
    """The ratio of two sums over prompts, and the half width of its 95 % interval (linearised, the
    prompts being independent).

    Args:
        part: float64 `[num_prompts]`, at least two.
        whole: The same; its sum is not 0.
    """
    count, total = len(part), whole.sum()
    value = part.sum() / total
    spread = (part - value * whole).square().sum() * count / (count - 1)
    return Change(float(value), NORMAL_95 * float(spread.sqrt() / total))
