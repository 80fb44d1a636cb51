"""The part of the bench about vLLM: how long the first token takes with KV from each place, and
what storing costs a cold request.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench import vllm_rounds as rounds
from tests.bench.codec_neighbours import PROC_STAT, busy_ticks
from tests.bench.report import Section
from tests.bench.vllm_engines import (
    HOME,
    NUM_TOKENS,
    OMP_THREADS,
    PYTHON,
    Took,
    cpu_seconds,
)
from tests.bench.vllm_model import made_model
from tests.bench.vllm_places import running_places
from tests.releases import NEWEST_VLLM

GOAL_MEMORY = 1.5
GOAL_STORE = 0.03
GOAL_SHORT_COLD, GOAL_SHORT_AGAIN = 1.03, 1.3
Run = Callable[[str, Callable[[], Any]], Any]

FIRST_TOKEN_ROWS = {
    rounds.COLD: ("cold", "nothing loaded or stored"),
    rounds.PREFIX: ("vLLM's own prefix cache", "without our connector"),
    rounds.PREFIX_BESIDE_US: (
        "vLLM's own prefix cache, with the connector",
        "asked, nothing to do",
    ),
    rounds.MEMORY: (
        "memory of the sidecar",
        f"goal: {GOAL_MEMORY:g} times vLLM's prefix cache",
    ),
    rounds.EMBEDDED: ("memory inside vLLM", "no sidecar"),
    rounds.ON_DISK: ("disk of the sidecar", "files in the page cache"),
    rounds.PEER: (
        "sidecar of another pod",
        "lm:// over loopback",
    ),
    rounds.STORAGE: ("storage service", "lm:// over loopback"),
}


class VLLMMissingError(Exception):
    """There is no vLLM to measure."""


@dataclass(frozen=True)
class VLLMPart:
    """What was measured.

    Attributes:
        sections: Its tables.
        remark: What else the machine did.
    """

    sections: Sequence[Section]
    remark: str


def measure(run: Run) -> VLLMPart:
    """Measure everything; takes about six minutes.

    Args:
        run: Given a name and work, says the name, does the work, and returns what it returns.

    Raises:
        VLLMMissingError: vLLM is not installed.
    """
    if not (PYTHON.exists() and (HOME / NEWEST_VLLM / ".ready").exists()):
        raise VLLMMissingError(
            f"vLLM {NEWEST_VLLM} is not installed in {HOME}: "
            f"`make .vllm/{NEWEST_VLLM}/.ready` installs it"
        )
    model = run("vLLM: model", lambda: made_model(HOME))
    with ExitStack() as stack:
        places = run(
            "vLLM: services and engines", lambda: stack.enter_context(running_places(model))
        )
        measured = rounds.Rounds(places)
        run("vLLM: every way once", measured.warm_up)
        others_s, begin = _others_seconds(), time.perf_counter()
        for number in range(rounds.ROUNDS):
            run(f"vLLM: round {number + 1} of {rounds.ROUNDS}", lambda: measured.round(number))  # noqa: B023 (run at once)
        for number in range(rounds.SHORT_ROUNDS):
            run(
                f"vLLM: short prompts, {number + 1} of {rounds.SHORT_ROUNDS}",
                lambda: measured.short_round(number),  # noqa: B023 (run at once)
            )
        cores = max(0.0, _others_seconds() - others_s) / (time.perf_counter() - begin)
    remark = (
        f"While this was measured, other processes kept {cores:.2f} of {os.cpu_count()} cores busy."
    )
    sections = (
        first_tokens(measured.took),
        overhead(measured.took, measured.sidecar_cpu),
        short_prompts(measured.short),
    )
    return VLLMPart(sections, remark)


def first_tokens(took: Mapping[str, Sequence[Took]]) -> Section:
    """The table of first tokens. Ratios are medians over the rounds, in each of which all was
    measured in turn.
    """
    rows = []
    for row, (name, note) in FIRST_TOKEN_ROWS.items():
        seconds = [each.seconds for each in took[row]]
        spread = f"{min(seconds) * 1e3:.1f} … {max(seconds) * 1e3:.1f}"
        faster, longer = (
            _ratio(took[rounds.COLD], took[row]),
            _ratio(took[row], took[rounds.PREFIX]),
        )
        rows.append(
            (
                name,
                f"{statistics.median(seconds) * 1e3:.1f}",
                spread,
                f"{faster:.0f}",
                f"{longer:.2f}",
                note,
            )
        )
    headings = (
        "KV from",
        "ms",
        "fastest … slowest",
        "times faster than cold",
        "times vLLM's prefix cache",
        "note",
    )
    return Section(f"vLLM: first token of a prompt of {NUM_TOKENS:,} tokens", headings, rows)


def overhead(
    took: Mapping[str, Sequence[Took]], sidecar_cpu: Mapping[str, Sequence[float]]
) -> Section:
    """The table of what storing costs."""
    cold, stored = took[rounds.COLD], took[rounds.STORED]
    cold_s = statistics.median(each.seconds for each in cold)
    cold_cpu_s = statistics.median(each.cpu_seconds for each in cold)
    sidecar_s = statistics.mean(sidecar_cpu[rounds.STORED]) - statistics.mean(
        sidecar_cpu[rounds.COLD]
    )
    store_cpu_s = statistics.median(each.store_cpu_seconds for each in stored)
    longer_s, longer_cpu_s = (
        statistics.median(_differences(stored, cold, name)) for name in ("seconds", "cpu_seconds")
    )
    store_s, scheduler_s = (
        statistics.median(getattr(each, f"{side}_seconds") for each in stored)
        for side in ("store", "scheduler")
    )
    goal = f"goal: {GOAL_STORE:.0%}"
    figures = (
        ("cold request, not stored", cold_s, cold_s, "wall clock"),
        (
            "storing adds",
            longer_s,
            cold_s,
            f"{goal}; median over the pairs",
        ),
        ("vLLM waits to store", store_s, cold_s, goal),
        (
            "vLLM waits in the scheduler",
            scheduler_s,
            cold_s,
            "asks for KV, names what is stored",
        ),
        ("CPU time of a cold request", cold_cpu_s, cold_cpu_s, "of vLLM, all threads"),
        (
            "storing adds to it",
            longer_cpu_s,
            cold_cpu_s,
            "median over the pairs",
        ),
        ("CPU time of a store: vLLM", store_cpu_s, cold_cpu_s, "copy and digest"),
        (
            "CPU time of a store: sidecar",
            sidecar_s,
            cold_cpu_s,
            "mean, background writes included",
        ),
        ("CPU time of a store: total", store_cpu_s + sidecar_s, cold_cpu_s, goal),
    )
    rows = [
        (name, f"{seconds * 1e3:.1f}", f"{seconds / of_s:.2%}", note)
        for name, seconds, of_s, note in figures
    ]
    title = (
        f"vLLM: what storing costs a cold request of {NUM_TOKENS:,} tokens, {len(cold)} pairs in"
        " turn"
    )
    return Section(title, ("what", "ms", "share of cold", "note"), rows)


def short_prompts(took: Mapping[tuple[str, str, int], Sequence[Took]]) -> Section:
    """The table of short prompts, cold and from vLLM's own prefix cache."""
    rows = []
    for num_tokens in rounds.SHORT_TOKENS:
        row = [f"{num_tokens:,}"]
        for kind in (rounds.SHORT_COLD, rounds.SHORT_AGAIN):
            if (kind, rounds.PLAIN, num_tokens) not in took:
                row += ["", "", ""]
                continue
            plain, connected = (
                took[kind, name, num_tokens] for name in (rounds.PLAIN, rounds.CONNECTED)
            )
            medians = (
                statistics.median(each.seconds for each in one) for one in (plain, connected)
            )
            row += [f"{seconds * 1e3:.1f}" for seconds in medians]
            row.append(f"{_ratio(connected, plain):.2f}")
        rows.append(tuple(row))
    headings = (
        "tokens",
        "cold, plain vLLM, ms",
        "with stores, ms",
        f"ratio, goal {GOAL_SHORT_COLD:g}",
        "vLLM's prefix cache, plain, ms",
        "with the connector, ms",
        f"ratio, goal {GOAL_SHORT_AGAIN:g}",
    )
    title = f"vLLM: short prompts, {rounds.SHORT_ROUNDS} pairs in turn"
    return Section(title, headings, rows)


def described(machine: str) -> str:
    """The section's first paragraph."""
    threads = f"{OMP_THREADS} OpenMP thread{'s' if OMP_THREADS > 1 else ''}"
    return (
        f"Machine: {machine}. vLLM {NEWEST_VLLM} on the CPU, bf16, {threads}. Medians of"
        f" {rounds.ROUNDS} rounds."
    )


def _ratio(mine: Sequence[Took], others: Sequence[Took]) -> float:
    return statistics.median(
        one.seconds / other.seconds for one, other in zip(mine, others, strict=True)
    )


def _differences(mine: Sequence[Took], others: Sequence[Took], name: str) -> list[float]:
    return [
        getattr(one, name) - getattr(other, name) for one, other in zip(mine, others, strict=True)
    ]


def _others_seconds() -> float:
    """Processor time that everybody else has had so far, all cores."""
    children = " ".join(
        path.read_text() for path in Path("/proc/self/task").glob("*/children")
    ).split()
    own = time.process_time() + sum(cpu_seconds(int(pid)) for pid in children)
    return busy_ticks(PROC_STAT.read_text()) / os.sysconf("SC_CLK_TCK") - own
