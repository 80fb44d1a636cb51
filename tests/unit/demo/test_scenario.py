"""What the demo calls a fault."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from lmcache_demo.cluster import CodecFigures
from lmcache_demo.document import long_document, prompts
from lmcache_demo.engine_messages import Answer
from lmcache_demo.report import print_steps
from lmcache_demo.scenario import DISK, HOT, NOWHERE, PEER, Compression, Step
from rich.console import Console

PLAIN = Answer([1, 2], "", 3000, 0, {}, 0, 0, 0, 1.0, 32)
HIT = Answer([1, 2], "", 3000, 2900, {HOT: 2900}, 1, 0, 0, 0.1, 32)


def test_a_step_as_said_has_no_fault() -> None:
    assert Step("x", HOT, HIT, PLAIN).faults == []
    assert Step("x", NOWHERE, PLAIN, PLAIN).faults == []


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (
            Step("x", HOT, Answer([1, 3], "", 3000, 2900, {HOT: 2900}, 1, 0, 0, 0.1, 32), PLAIN),
            "without a cache",
        ),
        (Step("x", PEER, HIT, PLAIN), "expected sidecar A"),
        (Step("x", HOT, PLAIN, PLAIN), "expected own sidecar"),
        (Step("x", NOWHERE, HIT, PLAIN), "expected none"),
        (
            Step("x", HOT, Answer([1, 2], "", 3000, 100, {HOT: 100}, 1, 0, 0, 0.1, 32), PLAIN),
            "only 100 tokens",
        ),
        (
            Step("x", HOT, Answer([1, 2], "", 1500, 1500, {HOT: 1500}, 1, 0, 0, 0.1, 32), PLAIN),
            "fewer than 2000",
        ),
        (
            Step(
                "x",
                HOT,
                Answer([1, 2], "", 3000, 2900, {HOT: 2000, PEER: 900}, 1, 0, 0, 0.1, 32),
                PLAIN,
            ),
            "came from",
        ),
    ],
)
def test_anything_else_is_a_fault(step: Step, fault: str) -> None:
    assert any(fault in found for found in step.faults)


@pytest.mark.parametrize(
    ("tokens", "first"),
    [([1, 2], None), ([1, 3], 2), ([2, 1], 1), ([1], 2), ([1, 2, 3], 3), ([], 1)],
)
def test_the_first_difference(tokens: list[int], first: int | None) -> None:
    step = replace(Step("x", HOT, HIT, PLAIN), answer=replace_tokens(HIT, tokens))
    assert step.first_difference == first


def replace_tokens(answer: Answer, tokens: list[int]) -> Answer:
    return msgspec.structs.replace(answer, tokens=tokens)


WRITTEN, READ = CodecFigures(3000, 1000, 0, 0.5, 0.25), CodecFigures(0, 0, 12, 0.5, 0.25)
EXACT = replace(WRITTEN, max_error=0.0, rms_error=0.0)
FROM_DISK = msgspec.structs.replace(HIT, reused_by_tier={DISK: 2900})


@pytest.mark.parametrize("tokens", [[1, 2], [1, 3]])
def test_loss_may_change_the_answer(tokens: list[int]) -> None:
    step = Step(
        "x", DISK, replace_tokens(FROM_DISK, tokens), PLAIN, Compression(True, WRITTEN, READ)
    )
    assert step.may_differ
    assert step.faults == []


def test_without_loss_it_may_not() -> None:
    compression = Compression(False, EXACT, READ)
    assert Step("x", DISK, FROM_DISK, PLAIN, compression).faults == []
    [fault] = Step("x", DISK, replace_tokens(FROM_DISK, [1, 3]), PLAIN, compression).faults
    assert "without a cache" in fault


@pytest.mark.parametrize(
    ("compression", "fault"),
    [
        (Compression(False, replace(EXACT, encoded_bytes=3000), READ), "not smaller"),
        (Compression(False, CodecFigures(0, 0, 0, 0.0, 0.0), READ), "not smaller"),
        (Compression(False, EXACT, replace(READ, num_decoded_chunks=0)), "nothing was decoded"),
        (Compression(False, WRITTEN, READ), "an error of 25.00%"),
        (Compression(True, EXACT, READ), "an error of 0.00%"),
    ],
)
def test_compression_that_is_none_is_a_fault(compression: Compression, fault: str) -> None:
    [found] = Step("x", DISK, FROM_DISK, PLAIN, compression).faults
    assert fault in found


def printed(steps: list[Step], capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_steps(steps, [], Console(width=80))
    return capsys.readouterr().out.splitlines()


def test_an_answer_that_differs_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    lossy = Step(
        "E, lossy", DISK, replace_tokens(FROM_DISK, [1, 3]), PLAIN, Compression(True, WRITTEN, READ)
    )
    exact = Step("F, exact", DISK, FROM_DISK, PLAIN, Compression(False, EXACT, READ))
    rows = [
        line.split() for line in printed([Step("A, hit", HOT, HIT, PLAIN), lossy, exact], capsys)
    ]
    assert [row[-1] for row in rows if row[:1] in (["A,"], ["E,"], ["F,"]) and "MiB" not in row][
        :3
    ] == ["yes", "no", "yes"]
    assert [
        "E,",
        "lossy",
        "0.0",
        "0.0",
        "3.00x",
        "10.67",
        "50.0%",
        "25.0%",
        "differ",
        "at",
        "token",
        "2",
    ] in rows
    assert ["F,", "exact", "0.0", "0.0", "3.00x", "10.67", "0", "0", "all", "equal"] in rows
    text = " ".join(" ".join(row) for row in rows)
    assert "token for token, but that of E, lossy: its KV was stored with loss" in text
    assert "without a cache said:" in text


def test_equal_answers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    lossy = Step("E, lossy", DISK, FROM_DISK, PLAIN, Compression(True, WRITTEN, READ))
    text = " ".join(" ".join(printed([lossy], capsys)).split())
    assert (
        "Every answer equals the one without a cache, token for token. No process is left." in text
    )
    assert "said:" not in text


def test_both_prompts_share_the_document_and_differ_behind_it() -> None:
    first, second = prompts()
    assert first != second
    assert first.startswith(long_document())
    assert second.startswith(long_document())
