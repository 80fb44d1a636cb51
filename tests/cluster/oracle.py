"""The rules for a run of traffic and a cache hit; each broken rule yields a sentence."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tests.cluster.ask import Answer

REPORT_PREFIX = "REPORT "
MIN_CALLS = 5
MAX_DEGRADED = 0.02
"""Share of calls that may be answered without the index at any time: a Redis on a busy node answers
some too late, and each costs a hit at most.
"""
CHUNK_TOKENS = 256
NEVER: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Report:
    """What `traffic.py` counted.

    Attributes:
        calls: How often each kind of call (put, get, lookup, broker, completion) had each outcome:
            ok, failed, wrong (other bytes, or another text), stale (a new prompt answered from the
            cache), missed (not found), refused (not kept), degraded.
        failures: The first failures, with the second at which they happened.
        disturbed_s: How long the longest disturbance of each kind of call lasted.
        acknowledged: Chunks that storage has confirmed.
        lost: Confirmed chunks that could not be read in the end.
        not_recovered: Kinds of call that did not succeed in the end.
    """

    calls: Mapping[str, Mapping[str, int]]
    failures: list[str] = field(default_factory=list)
    disturbed_s: Mapping[str, float] = field(default_factory=dict)
    acknowledged: int = 0
    lost: list[str] = field(default_factory=list)
    not_recovered: list[str] = field(default_factory=list)

    @classmethod
    def parse(cls, log: str) -> Report:
        """Parse the report in the traffic's output.

        Raises:
            ValueError: There is none, because the traffic was stopped before its end.
        """
        for line in reversed(log.splitlines()):
            if line.startswith(REPORT_PREFIX):
                plain: dict[str, Any] = json.loads(line.removeprefix(REPORT_PREFIX))
                return cls(**plain)
        raise ValueError(f"the traffic printed no report; its last lines:\n{log[-2000:]}")

    def problems(
        self,
        kinds: Collection[str],
        may_fail: Mapping[str, float] = NEVER,
        may_miss: Mapping[str, float] = NEVER,
    ) -> list[str]:
        """Return what is wrong, one sentence each.

        Args:
            kinds: Kinds of call that must have happened.
            may_fail: Kinds whose only server was unavailable for a while, so that their calls may
                fail, and for how many seconds.
            may_miss: Kinds whose calls may go without a result for a while, but not fail: not
                found, not kept, degraded; and for how many seconds.
        """
        limits = {**may_miss, **may_fail}
        found = []
        for kind in kinds:
            outcomes = self.calls.get(kind, {})
            num_ok = outcomes.get("ok", 0)
            if num_ok < MIN_CALLS:
                found.append(f"{kind}: {num_ok} calls succeeded, at least {MIN_CALLS} are needed")
            total = sum(outcomes.values())
            if outcomes.get("failed", 0) and kind not in may_fail:
                first = [text for text in self.failures if text.startswith(f"{kind} ")][:3]
                found.append(f"{kind}: {outcomes['failed']} of {total} calls failed: {first}")
            if kind not in may_fail and kind not in may_miss:
                found += [
                    f"{kind}: {outcomes[outcome]} of {total} calls {outcome}"
                    for outcome in ("missed", "refused")
                    if outcomes.get(outcome, 0)
                ]
                if (num_degraded := outcomes.get("degraded", 0)) > MAX_DEGRADED * total:
                    found.append(
                        f"{kind}: {num_degraded} of {total} calls degraded, at most"
                        f" {MAX_DEGRADED:.0%} may be"
                    )
            if (lasted_s := self.disturbed_s.get(kind, 0.0)) > limits.get(kind, math.inf):
                found.append(
                    f"{kind}: disturbed for {lasted_s:.0f} s, not at most {limits[kind]:g} s"
                )
            if outcomes.get("wrong", 0):
                found.append(f"{kind}: {outcomes['wrong']} calls returned something else")
            if outcomes.get("stale", 0):
                found.append(f"{kind}: {outcomes['stale']} new prompts were found in the cache")
        if self.lost:
            found.append(
                f"{len(self.lost)} of {self.acknowledged} acknowledged chunks are lost:"
                f" {self.lost[:5]}"
            )
        found += [f"{kind}: did not recover" for kind in self.not_recovered]
        return found


def hit_problems(first: Answer, second: Answer) -> list[str]:
    """Return why `second` is not a hit of what `first` computed, one sentence each.

    Both are answers to the same prompt, from two pods that had not seen it.
    """
    found = []
    if first.num_cached:
        found.append(
            f"the first pod found {first.num_cached} tokens of a prompt that was to be new"
        )
    # vLLM computes the last token itself, so the chunk that holds it is not loaded.
    wanted = (second.num_prompt - 1) // CHUNK_TOKENS * CHUNK_TOKENS
    if second.num_cached < wanted:
        found.append(f"the second pod reused {second.num_cached} tokens, not {wanted}")
    if first.text != second.text:
        found.append(f"the texts differ: {first.text!r} and {second.text!r}")
    return found
