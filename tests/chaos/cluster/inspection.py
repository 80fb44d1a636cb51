"""What the services hold: memory, descriptors, what they have lent."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.cluster.cluster import Cluster
from tests.chaos.cluster.plan import BROKERS, SERVICES, SIDECARS

SETTLE_TIMEOUT_S = 20.0
MEMORY_SHARE, MEMORY_MB = 0.25, 24.0
"""What a process may hold beyond what it held after the warm-up: a share of that, and megabytes."""
MORE_FILES = 24
"""File descriptors that a process may hold beyond what it held after the warm-up: kept
connections come and go.
"""


@dataclass
class Usage:
    """What a process holds: private memory in MB, file descriptors."""

    memory_mb: float
    num_files: int


def usages(cluster: Cluster) -> dict[str, Usage]:
    """Return those of every service, without shared memory: arenas are files of a fixed size."""
    found = {}
    for name in SERVICES:
        directory = Path(f"/proc/{cluster.running[name].process.pid}")
        status = (directory / "status").read_text()
        num_kb = sum(
            int(number)
            for number in re.findall(r"^(?:RssAnon|RssFile):\s+(\d+)", status, re.MULTILINE)
        )
        found[name] = Usage(num_kb / 1024, sum(1 for _ in (directory / "fd").iterdir()))
    return found


def grown(before: dict[str, Usage], after: dict[str, Usage]) -> list[str]:
    """Return which services hold more than they may."""
    wrong = []
    for name, now in after.items():
        then = before[name]
        if now.memory_mb > then.memory_mb * (1 + MEMORY_SHARE) + MEMORY_MB:
            wrong.append(f"{name} has grown from {then.memory_mb:.0f} to {now.memory_mb:.0f} MB")
        if now.num_files > then.num_files + MORE_FILES:
            wrong.append(
                f"{name} has {now.num_files} file descriptors open, {then.num_files} before"
            )
    return wrong


def untidy(cluster: Cluster) -> list[str]:
    """Return what is lent, or unaccounted for, while no engine works."""
    wrong = []
    for name in SIDECARS:
        status, tiers = cluster.get(name, "/v1/status"), cluster.get(name, "/v1/tiers")
        if status is None or tiers is None:
            wrong.append(f"{name} does not answer")
            continue
        if not status["arena"]["is_recorded"]:
            wrong.append(f"{name} does not write down what is in its memory")
        hot = tiers["tiers"]["memory"]
        lent = {
            what: status[what]
            for what in ("reserved_bytes", "held_bytes", "pinned_bytes", "pending_bytes")
            if status[what]
        }
        if status["arena"]["lent_bytes"]:
            lent["lent_bytes"] = status["arena"]["lent_bytes"]
        if hot["arena_used_bytes"] != hot["used_bytes"]:
            lent["arena_used_bytes"] = (
                f"{hot['arena_used_bytes']}, its chunks are {hot['used_bytes']}"
            )
        if lent:
            wrong.append(f"{name} still holds for no client: {lent}")
    for name in BROKERS:
        pulls = re.search(
            r"^lmcache_broker_pulls_in_flight(?:\{.*\})? (\S+)",
            cluster.get(name, "/metrics") or "",
            re.MULTILINE,
        )
        if pulls is None or float(pulls[1]):
            wrong.append(f"{name} counts pulls in flight: {pulls and pulls[1]}")
    return wrong


def until_tidy(cluster: Cluster) -> list[str]:
    """Wait until nothing is lent, for `SETTLE_TIMEOUT_S` at most; return what still is then."""
    deadline = time.monotonic() + SETTLE_TIMEOUT_S
    while (wrong := untidy(cluster)) and time.monotonic() < deadline:
        time.sleep(0.3)
    return wrong
