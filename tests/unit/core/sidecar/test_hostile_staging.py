"""A sidecar that answers nonsense about tickets, or nothing, is as one that is absent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.record import Staged
from lmcache_core.sidecar import SidecarChunkStore
from lmcache_core.wire import messages as m

from tests.fixtures.chains import chain_of
from tests.fixtures.frames import HELLO
from tests.fixtures.scripted_sidecar import (
    PATIENCE_S,
    Answer,
    ScriptedSidecar,
    scripted_sidecar,
    store_at,
)
from tests.fixtures.waiting import wait_until

CHAINS = [chain_of(range(3)), chain_of(range(2), world_size=2)]


@contextlib.contextmanager
def answered(
    directory: Path, answer: Answer | Callable[[Any], Answer], **options: Any
) -> Iterator[tuple[SidecarChunkStore, ScriptedSidecar]]:
    """A client of a sidecar that answers everything but HELLO so."""

    def script(request: m.Message) -> Answer:
        if isinstance(request, m.Hello):
            return None
        return answer(request) if callable(answer) else answer

    with (
        scripted_sidecar(directory, script) as sidecar,
        store_at(sidecar.path, **options) as store,
    ):
        yield store, sidecar


@pytest.mark.parametrize(
    "answer",
    [
        m.Promise(True, (b"\1\1\0",)),
        m.Promise(True, (b"\1\1\0", b"\2\2", b"")),
        m.Promise(True, (b"\1\1", b"\2\2")),
        m.Promise(True, (b"\1\1\0\0", b"\2\2")),
        m.Promise(True, (b"\2\2", b"\1\1\0")),
        m.Ok(),
        m.ErrorMessage("protocol", "no"),
        b"\xff\xff\xff\xff",
        m.build_frame(2, m.Promise(True, ()))[:-1] + b"\xc1",
    ],
)
def test_impossible_answer_ends_the_connection(tmp_path: Path, answer: Answer) -> None:
    with answered(tmp_path, answer) as (store, sidecar):
        assert store.stage("t", CHAINS) is None
        wait_until(lambda: sidecar.num_ended == 1)


def test_long_question_is_cut_to_one_message(tmp_path: Path) -> None:
    wide, narrow = chain_of(range(40_000), world_size=3), chain_of(range(10))

    def all_there(request: m.Stage) -> m.Promise:
        return m.Promise(True, tuple(b"\1" * (len(hashes) // 32) for _, hashes in request.chains))

    with answered(tmp_path, all_there) as (store, _):
        staged = store.stage("t", [wide, narrow])
        assert staged is not None
        num_asked = m.MAX_STAGE_KEYS // 4
        assert staged.tiers == (b"\1" * num_asked + bytes(40_000 - num_asked), b"\1" * 10)
        with pytest.raises(ValueError, match="17 chains"):
            store.stage("t", [narrow] * 17)
        with pytest.raises(ValueError, match="a chain of 1025 ranks"):
            store.stage("t", [chain_of([1], world_size=m.MAX_RANKS + 1)])


def test_sidecar_that_takes_no_description_is_not_used(tmp_path: Path) -> None:
    described = m.Describe("vllm", "m", 1, 16, bytes(32), ("",))
    with answered(tmp_path, m.ErrorMessage("protocol", "no"), describe=lambda salt: described) as (
        store,
        sidecar,
    ):
        assert store.stage("t", CHAINS) is None
        wait_until(lambda: sidecar.num_ended >= 1)
        assert sidecar.requests[:2] == [HELLO, described]


def test_good_answer_is_believed(tmp_path: Path) -> None:
    """Also one with a tier of a later version."""
    tiers = (b"\1\x63\0", b"\2\2")
    with answered(tmp_path, m.Promise(True, tiers)) as (store, sidecar):
        assert store.stage("t", CHAINS, is_prefix=False, recompute_s=0.5) == Staged(True, tiers)
        runs = tuple(enumerate(chain.hashes for chain in CHAINS))
        assert sidecar.requests[-1] == m.Stage("t", runs, False, int(PATIENCE_S * 1000), 500_000)


def test_silence_after_unstage_is_not_waited_for(tmp_path: Path) -> None:
    with answered(tmp_path, b"") as (store, sidecar):
        store.unstage(["t"] * (m.MAX_NAMES + 1))
        store.unstage(["t"])
        wait_until(lambda: len(sidecar.requests) == 4)
        assert sidecar.num_ended == 0, "an answer was awaited for its whole deadline"
