"""The worker sees what must not be: wrong KV, errors, calls past their bound."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lmcache_core.engine import LMCacheEngine
from lmcache_core.telemetry import Counters

from tests.chaos.cluster import worker
from tests.chaos.cluster.worker import CHUNK_SIZE, Pages, Worker, kv_of, prompt_of

Retrieve = Callable[..., torch.Tensor]


def told(capsys: pytest.CaptureFixture[str], retrieve: Retrieve) -> dict[str, Any]:
    engine = SimpleNamespace(retrieve=retrieve, store=lambda *_, **__: None, counters=Counters())
    working = Worker(cast("LMCacheEngine", engine), 3)
    working.retrieve(prompt_of(1, 2, 3, 40))
    working.report()
    line: dict[str, Any] = json.loads(capsys.readouterr().out)
    return line


def answer(num_tokens: int, spoil: Callable[[torch.Tensor], object] = lambda kv: None) -> Retrieve:
    """An engine that has this many tokens."""

    def retrieve(
        tokens: torch.Tensor, kvcaches: list[torch.Tensor], slot_mapping: torch.Tensor
    ) -> torch.Tensor:
        kv = kv_of(tokens)
        spoil(kv)
        for layer, values in zip(kvcaches, kv, strict=True):
            layer.flatten(1, 2)[:, slot_mapping[:num_tokens]] = values[:, :num_tokens]
        return torch.arange(len(tokens)) < num_tokens

    return retrieve


@pytest.mark.parametrize("num_tokens", [0, CHUNK_SIZE, 7 * CHUNK_SIZE + 40])
def test_right_kv_is_no_fault(capsys: pytest.CaptureFixture[str], num_tokens: int) -> None:
    assert told(capsys, answer(num_tokens))["faults"] == []


def test_one_wrong_number_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    faults = told(capsys, answer(CHUNK_SIZE, lambda kv: kv[2, 1, CHUNK_SIZE - 1, 0, 3].mul_(2)))[
        "faults"
    ]
    assert [fault.split(":")[0] for fault in faults] == ["wrong"]


def test_kv_that_was_not_written_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    faults = told(capsys, lambda tokens, **_: torch.ones(len(tokens), dtype=torch.bool))["faults"]
    assert [fault.split(":")[0] for fault in faults] == ["wrong"]


def test_a_hole_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    def retrieve(tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        mask = answer(len(tokens))(tokens, **kwargs)
        mask[CHUNK_SIZE] = False
        return mask

    assert len(told(capsys, retrieve)["faults"]) == 1


def test_an_error_is_seen(capsys: pytest.CaptureFixture[str]) -> None:
    def retrieve(*_: object, **__: object) -> torch.Tensor:
        raise OSError("away")

    assert told(capsys, retrieve)["faults"] == ["error: retrieve raised OSError: away"]


def test_a_late_call_is_seen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "BOUND_S", 0.01)

    def retrieve(tokens: torch.Tensor, **_: object) -> torch.Tensor:
        time.sleep(0.02)
        return torch.zeros(len(tokens), dtype=torch.bool)

    assert told(capsys, retrieve)["faults"][0].startswith("late: retrieve lasted")


def test_kv_depends_on_every_token_before() -> None:
    tokens = prompt_of(0, 0, 0, 0)
    other = tokens.clone()
    other[0] += 1
    assert (kv_of(tokens) != kv_of(other)).all()


def test_pages_give_back_what_lies_in_them() -> None:
    pages, kv = Pages(random.Random(1)), kv_of(prompt_of(0, 0, 0, 5))
    slots = pages.slots(kv.shape[2])
    assert len(set(slots.tolist())) == kv.shape[2]
    pages.poison()
    pages.write(slots, kv)
    assert torch.equal(pages.read(slots), kv)
