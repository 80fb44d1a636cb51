"""One run: start, warm up, hurt, let heal, look for what is left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_demo.processes import DemoError
from lmcache_demo.settings import quiet_environment

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.engines import Engines
from tests.chaos.cluster.inspection import Usage, grown, until_tidy, usages
from tests.chaos.cluster.plan import SIDECARS, Fault

HEAL_TIMEOUT_S = 90.0
HIT_BEFORE = 0.3
"""Hit ratio that must be there before the faults."""
HIT_SHARE = 0.7
"""Of the hit ratio before the faults: that much must be back after them."""
SLOW_MACHINE = 6.0
"""On a slow machine, hits may take so many times as long to come."""
FIRST_PROBE = 10_000


@dataclass(frozen=True)
class Times:
    """Of a run, in seconds.

    Attributes:
        warm_up_s: Workload before the faults, at least.
        chaos_s: Faults.
        after_s: Workload after all is healed, at least.
    """

    warm_up_s: float
    chaos_s: float
    after_s: float


@dataclass
class Outcome:
    """What came out.

    Attributes:
        wrong: What must not be, in words; empty is good.
        begin_s: `time.monotonic()` at the first fault's zero.
        healed_s: How long after the last fault each engine found again what another had stored.
        hits: `(second, hit ratio)` from the start of the warm-up on; seconds count from `begin_s`.
    """

    seed: int
    times: Times
    plan: Sequence[Fault]
    wrong: list[str] = field(default_factory=list)
    begin_s: float = 0.0
    healed_s: float = 0.0
    hit_before: float = 0.0
    hit_during: float = 0.0
    hit_after: float = 0.0
    hits: list[tuple[float, float]] = field(default_factory=list)
    before: dict[str, Usage] = field(default_factory=dict)
    after: dict[str, Usage] = field(default_factory=dict)
    num_requests: int = 0
    num_calls: int = 0
    longest_s: float = 0.0
    num_flips: int = 0
    num_cut: int = 0
    misses: dict[str, int] = field(default_factory=dict)


class Run:
    """One run.

    Args:
        directory: For everything that is written.
        plan: What is done.
        seed: It was made from.
        times: How long.
        say: Takes a line of progress.
    """

    def __init__(
        self,
        directory: Path,
        plan: Sequence[Fault],
        seed: int,
        times: Times,
        say: Callable[[str], None],
    ) -> None:
        self.outcome = Outcome(seed, times, plan)
        self._directory, self._say = directory, say

    def go(self) -> Outcome:
        """All of it; what went wrong is in the outcome."""
        cluster = Cluster(self._directory, self.outcome.seed, quiet_environment())
        try:
            cluster.open()
            self._say("all services are ready")
            with _closing(
                Engines(
                    cluster.processes,
                    [cluster.socket(name) for name in SIDECARS],
                    self.outcome.seed,
                )
            ) as engines:
                try:
                    self._go(cluster, engines)
                finally:
                    self._sum_up(cluster, engines)
        except DemoError as exc:
            self.outcome.wrong.append(str(exc))
        finally:
            cluster.close()
        return self.outcome

    def _go(self, cluster: Cluster, engines: Engines) -> None:
        outcome, times = self.outcome, self.outcome.times
        engines.tell_all("work")
        outcome.hit_before, warm_up_s = _until_hits(
            engines, times.warm_up_s, times.warm_up_s / 3, HIT_BEFORE
        )
        if outcome.hit_before < HIT_BEFORE:
            outcome.wrong.append(f"there is nothing to lose: {outcome.hit_before:.2f} hits before")
        self._say(
            f"hit ratio after {warm_up_s:.0f} s of warm-up: {outcome.hit_before:.2f}; now the"
            " faults"
        )
        outcome.before = usages(cluster)
        outcome.begin_s = begin_s = time.monotonic()
        self._hurt(cluster, engines)
        outcome.hit_during = engines.hit_ratio(begin_s, time.monotonic()) or 0.0
        outcome.healed_s = self._heal(cluster, engines)
        self._say(f"healed within {outcome.healed_s:.1f} s")
        engines.tell_all("work")
        wanted = HIT_SHARE * outcome.hit_before
        outcome.hit_after, _ = _until_hits(engines, times.after_s, times.after_s / 2, wanted)
        if outcome.hit_after < wanted:
            outcome.wrong.append(
                f"hits are not back: {outcome.hit_after:.2f} after, {outcome.hit_before:.2f} before"
            )
        engines.tell_all("pause")
        outcome.wrong += until_tidy(cluster)
        outcome.after = usages(cluster)
        outcome.wrong += grown(outcome.before, outcome.after)

    def _hurt(self, cluster: Cluster, engines: Engines) -> None:
        """Do what the plan says, each in a thread, and wait until all is undone."""
        underway: list[Future[None]] = []
        for fault in self.outcome.plan:
            _sleep(self.outcome.begin_s + fault.at_s - time.monotonic(), engines)
            self._say(str(fault))
            underway.append(cluster.starters.submit(inflict, cluster, fault))
        _sleep(self.outcome.begin_s + self.outcome.times.chaos_s - time.monotonic(), engines)
        for done in underway:
            done.result(HEAL_TIMEOUT_S * 2)

    def _heal(self, cluster: Cluster, engines: Engines) -> float:
        """Wait until all are ready, and what each engine stores the next one finds; how long
        that took.
        """
        begin_s = time.monotonic()
        cluster.until_ready(HEAL_TIMEOUT_S)
        engines.tell_all("pause")
        probe = FIRST_PROBE
        for i, writer in enumerate(engines.all):
            reader = engines.all[(i + 1) % len(engines.all)]
            while True:
                probe += 1
                writer.tell("store", family=probe)
                found = [reader.tell("retrieve", family=probe)["num_tokens"] for _ in range(3)]
                if found[-1]:
                    break
                if time.monotonic() > begin_s + HEAL_TIMEOUT_S:
                    raise DemoError(
                        f"{HEAL_TIMEOUT_S:.0f} s after the last fault {reader.name} does not find"
                        f" what {writer.name} stores"
                    )
        return time.monotonic() - begin_s

    def _sum_up(self, cluster: Cluster, engines: Engines) -> None:
        outcome = self.outcome
        outcome.wrong += engines.faults
        windows = [window for engine in engines.all for window in engine.windows]
        if windows and outcome.begin_s:
            first_s, last_s = (
                min(window.at_s for window in windows),
                max(window.at_s for window in windows),
            )
            step_s = max(1.0, (last_s - first_s) / 200)
            for i in range(int((last_s - first_s) / step_s)):
                ratio = engines.hit_ratio(first_s + i * step_s, first_s + (i + 1) * step_s)
                if ratio is not None:
                    outcome.hits.append((first_s + (i + 0.5) * step_s - outcome.begin_s, ratio))
        outcome.num_requests = sum(engine.totals["requests"] for engine in engines.all)
        outcome.num_calls = sum(engine.totals["calls"] for engine in engines.all)
        outcome.longest_s = max(engine.longest_s for engine in engines.all)
        outcome.num_flips = sum(link.num_flips for link in cluster.links.all.values())
        outcome.num_cut = sum(link.num_cut for link in cluster.links.all.values())
        for engine in engines.all:
            for reason, num in engine.misses.items():
                outcome.misses[reason] = outcome.misses.get(reason, 0) + num


def inflict(cluster: Cluster, fault: Fault) -> None:
    """Do one fault and undo it; returns when its target is as it was, or started again."""
    links, name, lasts_s = cluster.links, fault.target, fault.lasts_s
    match fault.kind:
        case "kill":
            cluster.kill(name)
            time.sleep(lasts_s)
            cluster.start(name)
        case "stop":
            cluster.stop(name)
            time.sleep(lasts_s)
            cluster.resume(name)
        case "full":
            cluster.fill_disk(name, True)
            time.sleep(lasts_s)
            cluster.fill_disk(name, False)
        case "flush":
            cluster.flush_redis()
        case "cut":
            links.cut(name)
        case "delay":
            links.all[name].delay_s = fault.amount
            time.sleep(lasts_s)
            links.all[name].delay_s = 0.0
        case "freeze":
            links.freeze(name)
            time.sleep(lasts_s)
            links.thaw(name)
        case "corrupt":
            links.all[name].flip_share = fault.amount
            time.sleep(lasts_s)
            links.all[name].flip_share = 0.0


@contextlib.contextmanager
def _closing(engines: Engines) -> Iterator[Engines]:
    try:
        yield engines
    finally:
        engines.close()


def _sleep(seconds: float, engines: Engines) -> None:
    """As long, unless something has gone wrong already.

    Raises:
        DemoError: It has.
    """
    deadline = time.monotonic() + seconds
    while True:
        engines.check()
        if engines.faults:
            raise DemoError("the run ends here, since what must not be has been")
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(left_s, 0.5))


def _until_hits(
    engines: Engines, least_s: float, window_s: float, wanted: float
) -> tuple[float, float]:
    """Let engines work until that share of shared tokens is found, at least `least_s`; the share
    in the last `window_s`, and how long that took.
    """
    begin_s = time.monotonic()
    _sleep(least_s, engines)
    while True:
        now_s = time.monotonic()
        ratio = engines.hit_ratio(now_s - window_s, now_s) or 0.0
        if ratio >= wanted or now_s - begin_s > least_s * SLOW_MACHINE:
            return ratio, now_s - begin_s
        _sleep(window_s / 4, engines)
