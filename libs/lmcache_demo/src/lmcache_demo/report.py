"""What the demo finds, what of it is a fault, and how it is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import msgspec
from lmcache_core.names import DISK_TIER, MEMORY_TIER, PEER_TIER, STORAGE_TIER
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MIB = 1 << 20
MILLISECONDS = 1000
NOWHERE = ""
PLACES = {
    MEMORY_TIER: "own sidecar",
    PEER_TIER: "sidecar A",
    STORAGE_TIER: "cache_storage",
    DISK_TIER: "D's disk",
    NOWHERE: "computed",
}
MIN_PROMPT_TOKENS = 2000
MIN_REUSED_SHARE, MIN_EQUAL_SHARE, MIN_RIGHT_SHARE = 0.8, 0.9, 0.9
"""Of blended prompts' tokens, and of the answers to them."""


class Answer(msgspec.Struct):
    """One generation of an engine.

    Attributes:
        num_reused_tokens: Tokens of the prompt that were not computed.
        reused_by_tier: The tokens that the cache delivered, by tier.
        retrieved_bytes: KV that the cache delivered.
        stored_bytes: KV that was stored.
        kv_bits: Of each element of the KV.
    """

    tokens: list[int]
    text: str
    num_prompt_tokens: int
    num_reused_tokens: int
    reused_by_tier: dict[str, int]
    retrieved_bytes: int
    stored_bytes: int
    time_to_first_token_s: float
    kv_bits: int


class BlendedAnswers(msgspec.Struct):
    """The answers to all questions about documents in another order, for one way to blend.

    Attributes:
        policy: Which tokens are recomputed.
        recompute_ratio: Share of them.
        kl_nats: The divergence from full recompute per token, by the certificate.
        top1_agreement: And the share of equal first choices.
        reason_against: Why prompts were computed in full instead; None if they were blended.
        num_equal: Answers that are those of an engine without a cache.
    """

    policy: str
    recompute_ratio: float
    kl_nats: float
    top1_agreement: float
    reason_against: str | None = None
    num_answers: int = 0
    num_blended: int = 0
    num_equal: int = 0
    num_right: int = 0
    num_prompt_tokens: int = 0
    num_reused_tokens: int = 0

    @property
    def is_good(self) -> bool:
        """Whether this way must pass its certificate. Documents as they are must fail it, so that
        prompts are computed in full.
        """
        return self.recompute_ratio > 0

    @property
    def faults(self) -> list[str]:
        """List what differs from the expectation."""
        found = []
        if (self.reason_against is None) != self.is_good:
            passed = "passed its certificate, and should not have"
            found.append(f"not blended: {self.reason_against}" if self.is_good else passed)
        elif self.num_blended != (self.num_answers if self.is_good else 0):
            found.append(f"{self.num_blended} of {self.num_answers} prompts were blended")
        reused, of = self.num_reused_tokens, self.num_prompt_tokens
        if self.is_good and reused < of * MIN_REUSED_SHARE:
            found.append(f"only {reused} of {of} tokens were reused")
        asked = f"of {self.num_answers} answers are"
        if self.num_equal < self.num_answers * (MIN_EQUAL_SHARE if self.is_good else 1):
            found.append(f"{self.num_equal} {asked} those of full recompute")
        if self.num_right < self.num_answers * MIN_RIGHT_SHARE:
            found.append(f"{self.num_right} {asked} right")
        way = f"{self.policy} {self.recompute_ratio:.0%}"
        return [f"blend, {way}: {fault}" for fault in found]


@dataclass(frozen=True)
class Compression:
    """How the KV of a step was stored.

    Attributes:
        is_lossy: Whether other values come back, so that the answer may be another one.
        raw_bytes: KV that the writer's sidecar encoded, before.
        encoded_bytes: The same after.
        num_decoded_chunks: Chunks that the reader's sidecar decoded.
        max_error: Largest error that the encoder measured, relative to the largest value of a token
            or channel; 0 for none.
        rms_error: Largest root mean square error of a group of layers, relative; 0 for none.
    """

    is_lossy: bool
    raw_bytes: int
    encoded_bytes: int
    num_decoded_chunks: int
    max_error: float
    rms_error: float

    @property
    def ratio(self) -> float:
        """How many times smaller it was stored."""
        return self.raw_bytes / max(1, self.encoded_bytes)

    @property
    def faults(self) -> list[str]:
        """List what differs from the expectation."""
        found = []
        if self.ratio <= 1:
            sizes = f"{self.raw_bytes} bytes of KV were stored in {self.encoded_bytes}"
            found.append(f"{sizes}, which is not smaller")
        if not self.num_decoded_chunks:
            found.append("nothing was decoded")
        if self.is_lossy != (self.rms_error > 0):
            found.append(f"the encoder measured an error of {self.rms_error:.2%}")
        return found


@dataclass(frozen=True)
class Step:
    """One finished step.

    Attributes:
        expected: Tier that the KV had to come from.
        reference: The answer of an engine without a cache.
        compression: How the KV that the engine got was compressed; None for not.
    """

    title: str
    expected: str
    answer: Answer
    reference: Answer
    compression: Compression | None = None

    @property
    def place(self) -> str:
        """Where the KV came from."""
        places = (PLACES.get(tier, tier) for tier in self.answer.reused_by_tier)
        return ", ".join(places) or PLACES[NOWHERE]

    @property
    def first_difference(self) -> int | None:
        """Return the number, from 1, of the first token that differs from the reference's."""
        pairs = enumerate(zip_longest(self.answer.tokens, self.reference.tokens), 1)
        return next((number for number, (got, want) in pairs if got != want), None)

    @property
    def may_differ(self) -> bool:
        """Whether another answer is no fault."""
        return self.compression is not None and self.compression.is_lossy

    @property
    def faults(self) -> list[str]:
        """List what differs from the expectation."""
        found = [] if self.compression is None else self.compression.faults
        reused, tokens = self.answer.num_reused_tokens, self.answer.num_prompt_tokens
        if self.first_difference is not None and not self.may_differ:
            found.append(f"generated {self.answer.tokens}, without a cache {self.reference.tokens}")
        if set(self.answer.reused_by_tier) != ({self.expected} - {NOWHERE}):
            found.append(f"KV came from {self.place}, expected {PLACES[self.expected]}")
        if self.expected and reused < MIN_PROMPT_TOKENS * 9 // 10:
            found.append(f"only {reused} tokens were reused")
        if not self.expected and reused:
            found.append(f"{reused} tokens were reused, expected none")
        if tokens < MIN_PROMPT_TOKENS:
            found.append(f"the prompt has {tokens} tokens, fewer than {MIN_PROMPT_TOKENS}")
        return [f"{self.title}: {fault}" for fault in found]


def print_report(
    steps: Sequence[Step], blended: Sequence[BlendedAnswers], console: Console
) -> bool:
    """Print the tables and a verdict; return False when a step differs from its expectation."""

    def say(style: str, title: str, text: str = "") -> None:
        console.print(f"[{style}]{escape(title)}[/] {escape(text)}".rstrip(), highlight=False)

    console.print(_table("A prompt's KV, computed once", [_row_of(step) for step in steps]))
    faults = [fault for step in steps for fault in step.faults]
    faults += [fault for way in blended for fault in way.faults]
    for fault in faults:
        say("red", "NOT AS SAID", fault)
    if faults:
        return False
    say(
        "dim",
        "prompt, reused: tokens · MiB: + into the engine, - out of it · TTFT: ms to the first"
        " token",
    )
    raw_bits = steps[0].answer.kv_bits
    console.print(
        _table(
            f"The same KV, stored smaller (raw: {raw_bits} bits an element)",
            [
                _compressed_row_of(step, step.compression)
                for step in steps
                if step.compression is not None
            ],
        )
    )
    say(
        "dim",
        "MiB: raw · stored: MiB · bits: of an element · max err: the largest, of the largest value"
        " of its token or channel · rms err: root mean square, of that of the values",
    )
    for step in steps:
        if step.first_difference is not None:
            for who, answer in ((step.title, step.answer), ("without a cache", step.reference)):
                say("dim", f"{who} said:", repr(answer.text))
    console.print(
        _table(
            "Documents stored one by one, read in another order",
            [_blended_row_of(way) for way in blended],
        )
    )
    say(
        "dim",
        "share: of the tokens, recomputed · KL (nats), agree: of its certificate · as full, right:"
        " answers",
    )
    for way in blended:
        if way.reason_against is not None:
            say("dim", f"{way.policy}, computed in full:", way.reason_against)
    console.print(_verdict(steps, blended), highlight=False)
    return True


def _table(title: str, rows: Sequence[Mapping[str, str]]) -> Table:
    """Return a table of rows by heading, whose cells are never cut; all but the first and `from`
    are flush right.
    """
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False
    )
    for number, heading in enumerate(rows[0] if rows else ()):
        is_left = number == 0 or heading == "from"
        table.add_column(heading, justify="left" if is_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    return table


def _row_of(step: Step) -> dict[str, str]:
    answer, reference = step.answer, step.reference
    moved = [f"+{answer.retrieved_bytes / MIB:.0f}"] if answer.retrieved_bytes else []
    moved += [f"-{answer.stored_bytes / MIB:.0f}"] if answer.stored_bytes else []
    return {
        "engine, step": step.title,
        "prompt": str(answer.num_prompt_tokens),
        "reused": str(answer.num_reused_tokens),
        "from": step.place,
        "MiB": " ".join(moved) or "0",
        "TTFT": f"{answer.time_to_first_token_s * MILLISECONDS:.0f}",
        "no cache": f"{reference.time_to_first_token_s * MILLISECONDS:.0f}",
        "equal": "yes" if step.first_difference is None else "no" if step.may_differ else "NO",
    }


def _compressed_row_of(step: Step, compression: Compression) -> dict[str, str]:
    max_error, rms_error = (
        f"{error:.1%}" if error else "0" for error in (compression.max_error, compression.rms_error)
    )
    difference = step.first_difference
    return {
        "engine, serde": step.title,
        "MiB": f"{compression.raw_bytes / MIB:.1f}",
        "stored": f"{compression.encoded_bytes / MIB:.1f}",
        "ratio": f"{compression.ratio:.2f}x",
        "bits": f"{step.answer.kv_bits / compression.ratio:.2f}",
        "max err": max_error,
        "rms err": rms_error,
        f"{len(step.reference.tokens)} new tokens": (
            "all equal" if difference is None else f"differ at token {difference}"
        ),
    }


def _blended_row_of(way: BlendedAnswers) -> dict[str, str]:
    return {
        "policy": way.policy,
        "share": f"{way.recompute_ratio:.0%}",
        "KL": f"{way.kl_nats:.3f}",
        "agree": f"{way.top1_agreement:.0%}",
        "gate": "passed" if way.reason_against is None else "failed",
        "prompts": str(way.num_prompt_tokens),
        "reused": str(way.num_reused_tokens),
        "as full": f"{way.num_equal} of {way.num_answers}",
        "right": str(way.num_right),
    }


def _verdict(steps: Sequence[Step], blended: Sequence[BlendedAnswers]) -> str:
    exceptions = [
        f"that of {step.title}: its KV was stored with loss"
        for step in steps
        if step.first_difference is not None
    ]
    num_answers = sum(way.num_answers for way in blended)
    num_equal = sum(way.num_equal for way in blended)
    if num_equal < num_answers:
        other = num_answers - num_equal
        exceptions.append(f"{other} of {num_answers} about documents in another order")
    verdict = "Every answer equals the one without a cache, token for token"
    if exceptions:
        verdict += f", but {'; and '.join(exceptions)}"
    return f"{verdict}. No process is left."
