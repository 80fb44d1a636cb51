"""What the demo prints of its blended step, and what it calls a fault there."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from lmcache_demo.blending import Way
from lmcache_demo.engine_messages import Answer, BlendedAnswers
from lmcache_demo.report import print_steps
from lmcache_demo.scenario import NOWHERE, Step
from rich.console import Console

WIDTH = 80
PLAIN = Answer([1, 2], "", 3000, 0, {}, 0, 0, 0, 1.0, 32)
STEPS = [Step("A", NOWHERE, PLAIN, PLAIN)]
REASON = "the model failed its certificate"
BLENDED = Way(
    "deviation", 0.25, BlendedAnswers(0.001, 0.999, None, 24, 24, 24, 24, 2352, 2304), is_good=True
)
REFUSED = Way(
    "none", 0.0, BlendedAnswers(10.669, 0.934, REASON, 24, 0, 24, 24, 2352, 0), is_good=False
)


def changed(way: Way, **fields: object) -> Way:
    return replace(way, answers=msgspec.structs.replace(way.answers, **fields))


def printed(blended: list[Way], capsys: pytest.CaptureFixture[str]) -> tuple[bool, list[str]]:
    is_good = print_steps(STEPS, blended, Console(width=WIDTH))
    return is_good, capsys.readouterr().out.splitlines()


def joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).split())


def test_ways_as_said_have_no_fault() -> None:
    assert BLENDED.faults == []
    assert REFUSED.faults == []


@pytest.mark.parametrize(
    "way",
    [
        changed(BLENDED, num_equal=22, num_right=22),
        changed(BLENDED, num_reused_tokens=1882),
        changed(REFUSED, num_right=22),
    ],
)
def test_a_little_less_is_no_fault(way: Way) -> None:
    assert way.faults == []


@pytest.mark.parametrize(
    ("way", "fault"),
    [
        (changed(BLENDED, reason_against=REASON), f"blend, deviation: not blended: {REASON}"),
        (changed(BLENDED, num_blended=23), "blend, deviation: 23 of 24 prompts were blended"),
        (changed(REFUSED, num_blended=1), "blend, none: 1 of 24 prompts were blended"),
        (
            changed(BLENDED, num_reused_tokens=1881),
            "blend, deviation: only 1881 of 2352 tokens were reused",
        ),
        (
            changed(BLENDED, num_equal=21),
            "blend, deviation: 21 of 24 answers are those of full recompute",
        ),
        (changed(BLENDED, num_right=21), "blend, deviation: 21 of 24 answers are right"),
        (
            changed(REFUSED, reason_against=None),
            "blend, none: passed its certificate, and should not have",
        ),
        (
            changed(REFUSED, num_equal=23),
            "blend, none: 23 of 24 answers are those of full recompute",
        ),
        (changed(REFUSED, num_right=21), "blend, none: 21 of 24 answers are right"),
    ],
)
def test_anything_else_is_a_fault(way: Way, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert way.faults == [fault]
    is_good, lines = printed([way], capsys)
    assert not is_good
    text = joined(lines)
    assert f"NOT AS SAID {fault}" in text
    assert "No process is left" not in text


def test_the_table_fits_a_terminal_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """With the longest cells that it can be given, none is cut."""
    longest = changed(
        BLENDED,
        num_prompt_tokens=123456,
        num_reused_tokens=123456,
        top1_agreement=1.0,
        kl_nats=10.0,
    )
    is_good, lines = printed(
        [REFUSED, replace(longest, policy="first_of_chunk", recompute_ratio=1.0)], capsys
    )
    assert is_good
    assert max(map(len, lines)) <= WIDTH
    assert not any("…" in line for line in lines)
    rows = [line.split() for line in lines]
    assert [
        "policy",
        "anew",
        "KL",
        "agree",
        "gate",
        "prompts",
        "reused",
        "as",
        "full",
        "right",
    ] in rows
    assert ["none", "0%", "10.669", "93%", "failed", "2352", "0", "24", "of", "24", "24"] in rows
    assert [
        "first_of_chunk",
        "100%",
        "10.000",
        "100%",
        "passed",
        "123456",
        "123456",
        "24",
        "of",
        "24",
        "24",
    ] in rows
    assert f"none, computed in full: {REASON}" in lines


def test_blended_answers_that_differ_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = printed([REFUSED, changed(BLENDED, num_equal=23)], capsys)
    verdict = (
        "Every answer equals the one without a cache, token for token, but 1 of 48 about documents"
        " in another order. No process is left."
    )
    assert verdict in joined(lines)


def test_equal_blended_answers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, lines = printed([REFUSED, BLENDED], capsys)
    assert (
        "Every answer equals the one without a cache, token for token. No process is left."
        in joined(lines)
    )
