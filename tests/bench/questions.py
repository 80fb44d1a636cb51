"""How soon a scheduler has its answer: lookup and stage of 400 chunks that are all in memory,
embedded and through the socket.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lmcache_core.engine import ChunkStore
from lmcache_core.record import Staged

from tests.bench import engines
from tests.bench.measure import timed
from tests.fixtures.chains import chain_of, keys_of_rank, store_chunks

NUM_CHUNKS = 400
NUM_ROUNDS = 201
"""A round takes less than a millisecond."""
GOAL_MS = 1.0


@dataclass(frozen=True)
class AnswerTime:
    """One row.

    Attributes:
        name: What was asked, and whom.
        seconds: Each round.
        goal_ms: At most so much at the median, None where there is no goal.
        note: What it is made of.
    """

    name: str
    seconds: tuple[float, ...]
    goal_ms: float | None
    note: str

    @property
    def elapsed_ms(self) -> float:
        """Median, milliseconds."""
        return statistics.median(self.seconds) * 1e3

    @property
    def spread_ms(self) -> tuple[float, float]:
        """Fastest round, and the one that nine of ten are faster than, milliseconds."""
        return min(self.seconds) * 1e3, statistics.quantiles(self.seconds, n=10)[-1] * 1e3


def answer_times(directory: Path) -> list[AnswerTime]:
    """All rows; takes about five seconds."""
    with ExitStack() as opened:
        socket_directory = Path(opened.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        embedded = opened.enter_context(engines.embedded("never"))._store
        sidecar = opened.enter_context(engines.behind_sidecar(socket_directory, "never"))._store
        return [*_rows("embedded", embedded, None), *_rows("sidecar", sidecar, GOAL_MS)]


def _rows(where: str, store: ChunkStore, goal_ms: float | None) -> Iterator[AnswerTime]:
    chain = chain_of(range(NUM_CHUNKS))
    if store_chunks(store, keys_of_rank(chain, 0)) != NUM_CHUNKS:
        raise AssertionError(f"{where}: the prompt is not in memory")
    keys = keys_of_rank(chain, 0)

    def look_up(_: int) -> None:
        if store.lookup(keys, None) != NUM_CHUNKS:
            raise AssertionError(f"{where}: the prompt is not found")

    def stage(turn: int) -> None:
        if store.stage(f"request {turn}", [chain]) != Staged(True, (b"\1" * NUM_CHUNKS,)):
            raise AssertionError(f"{where}: the prompt is not staged")

    yield AnswerTime(
        f"lookup of {NUM_CHUNKS} chunks, {where}",
        timed(look_up, rounds=NUM_ROUNDS),
        goal_ms,
        "their keys, and who has them",
    )
    yield AnswerTime(
        f"stage of {NUM_CHUNKS} chunks, {where}",
        timed(stage, rounds=NUM_ROUNDS),
        goal_ms,
        "besides, a hold on each",
    )
    store.unstage([f"request {turn}" for turn in range(NUM_ROUNDS + 1)])
