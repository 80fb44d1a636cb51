"""What the demo calls a fault, and what it prints."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import msgspec
import pytest
from lmcache_core.names import DISK_TIER, MEMORY_TIER, PEER_TIER
from lmcache_demo.report import NOWHERE, Answer, BlendedAnswers, Compression, Step, print_report
from rich.console import Console

WIDTH = 80
PLAIN = Answer([1, 2], "", 3000, 0, {}, 0, 0, 1.0, 32)
HIT = Answer([1, 2], "", 3000, 2900, {MEMORY_TIER: 2900}, 1, 0, 0.1, 32)
FROM_DISK = msgspec.structs.replace(HIT, reused_by_tier={DISK_TIER: 2900})
LOSSY = Compression(True, 3000, 1000, 12, 0.5, 0.25)
LOSSLESS = Compression(False, 3000, 1000, 12, 0.0, 0.0)
REASON = "the model failed its certificate"
BLENDED = BlendedAnswers("deviation", 0.25, 0.001, 0.999, None, 24, 24, 24, 24, 2352, 2304)
REFUSED = BlendedAnswers("deviation", 0.0, 10.669, 0.934, REASON, 24, 0, 24, 24, 2352, 0)
T = TypeVar("T", Answer, BlendedAnswers)


def changed(one: T, **fields: object) -> T:
    return msgspec.structs.replace(one, **fields)


def step(expected: str, answer: Answer, compression: Compression | None = None) -> Step:
    return Step("x", expected, answer, PLAIN, compression)


def printed(
    capsys: pytest.CaptureFixture[str], steps: list[Step], blended: list[BlendedAnswers]
) -> tuple[bool, list[str], str]:
    """Whether all is as said; lines; and the same as one text without line ends."""
    is_good = print_report(steps, blended, Console(width=WIDTH))
    lines = capsys.readouterr().out.splitlines()
    return is_good, lines, " ".join(" ".join(lines).split())


@pytest.mark.parametrize(
    "one",
    [
        step(MEMORY_TIER, HIT),
        step(NOWHERE, PLAIN),
        step(DISK_TIER, FROM_DISK, LOSSY),
        step(DISK_TIER, changed(FROM_DISK, tokens=[1, 3]), LOSSY),  # loss may change the answer
        step(DISK_TIER, FROM_DISK, LOSSLESS),
        REFUSED,
        changed(BLENDED, num_equal=22, num_right=22, num_reused_tokens=1882),
    ],
)
def test_what_is_as_said_has_no_fault(one: Step | BlendedAnswers) -> None:
    assert one.faults == []


@pytest.mark.parametrize(
    ("one", "fault"),
    [
        (step(MEMORY_TIER, changed(HIT, tokens=[1, 3])), "without a cache"),
        (step(PEER_TIER, HIT), "expected sidecar A"),
        (step(MEMORY_TIER, changed(HIT, num_reused_tokens=100)), "only 100 tokens"),
        (step(MEMORY_TIER, changed(HIT, num_prompt_tokens=1500)), "fewer than 2000"),
        (
            step(MEMORY_TIER, changed(HIT, reused_by_tier={MEMORY_TIER: 2000, PEER_TIER: 900})),
            "came from",
        ),
        (step(DISK_TIER, changed(FROM_DISK, tokens=[1, 3]), LOSSLESS), "without a cache"),
        *(
            (step(DISK_TIER, FROM_DISK, compression), fault)
            for compression, fault in [
                (replace(LOSSLESS, encoded_bytes=3000), "not smaller"),
                (replace(LOSSLESS, num_decoded_chunks=0), "nothing was decoded"),
                (replace(LOSSY, is_lossy=False), "an error of 25.00%"),
            ]
        ),
        (changed(BLENDED, reason_against=REASON), f"blend, deviation 25%: not blended: {REASON}"),
        (changed(BLENDED, num_blended=23), "blend, deviation 25%: 23 of 24 prompts were blended"),
        (changed(BLENDED, num_reused_tokens=1881), "only 1881 of 2352 tokens were reused"),
        (changed(BLENDED, num_equal=21), "21 of 24 answers are those of full recompute"),
        (changed(BLENDED, num_right=21), "blend, deviation 25%: 21 of 24 answers are right"),
        (changed(REFUSED, reason_against=None), "passed its certificate, and should not have"),
    ],
)
def test_anything_else_is_a_fault(
    one: Step | BlendedAnswers, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert any(fault in found for found in one.faults)
    assert (isinstance(one, Step) and one.compression is None) or len(one.faults) == 1
    steps, blended = ([one], []) if isinstance(one, Step) else ([step(NOWHERE, PLAIN)], [one])
    is_good, _, text = printed(capsys, steps, blended)
    assert not is_good
    assert f"NOT AS SAID {one.faults[0]}" in text
    assert "No process is left" not in text


def test_the_table_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """With the longest cells that it can be given, none is cut."""
    longest = changed(
        BLENDED,
        policy="first_of_chunk",
        recompute_ratio=1.0,
        num_prompt_tokens=123456,
        num_reused_tokens=123456,
        top1_agreement=1.0,
        kl_nats=10.0,
    )
    ways = [REFUSED, longest]
    is_good, lines, _ = printed(capsys, [step(NOWHERE, PLAIN)], ways)
    assert is_good
    assert max(map(len, lines)) <= WIDTH
    assert not any("…" in line for line in lines)
