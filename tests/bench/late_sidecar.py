"""`python -m tests.bench.late_sidecar`: the first token of cold prompts at a sidecar that answers
late, as a multiple of plain vLLM's.

Takes about two minutes; prints the table of docs/benchmarks.md ("A sidecar that answers late").
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
from pathlib import Path

from tests.bench.vllm import CHUNK_SIZE, HOME, TimedEngine, random_prompt
from tests.fixtures.late_socket import LateSocket, late_socket
from tests.vllm.models import LLAMA, made_models
from tests.vllm.processes import Owner
from tests.vllm.sidecars import sidecar, socket_of

LATE_S = (0.0, 0.01, 0.05, 0.19)
PAIRS = {100: 40, 300: 30, 1000: 20}
"""Pairs of each length of a prompt; a model of this size has noise of its own."""
DTYPE = "float32"
"""What a CPU computes fastest: so that little hides what the connector takes."""
WARM_UPS = 3


def main() -> None:
    """Measure and print."""
    begin = os.getloadavg()[0]
    print(f"| delay, ms | {' | '.join(f'{num_tokens:,} tokens' for num_tokens in PAIRS)} |")
    print(f"|---|{'---:|' * len(PAIRS)}")
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-late-") as scratch,
        Owner(Path(scratch)) as owner,
    ):
        sidecar(owner)
        with late_socket(Path(scratch) / "late.sock", socket_of(owner)) as relay:
            model = made_models(HOME) / LLAMA
            options = {"sidecar_socket": str(relay.path), "chunk_size": CHUNK_SIZE}
            plain = TimedEngine(owner, "plain", model, dtype=DTYPE)
            ours = TimedEngine(owner, "ours", model, options, DTYPE)
            for engine in (plain, ours):
                engine.open()
            _measure(plain, ours, relay)
    print(
        f"\nLoad of the machine: {begin:.1f} before, {os.getloadavg()[0]:.1f} after;"
        f" {os.cpu_count()} cores."
    )


def _measure(plain: TimedEngine, ours: TimedEngine, relay: LateSocket) -> None:
    dice = random.Random()

    def ratio(num_tokens: int, is_swapped: bool = False) -> float:
        """Ask both engines for prompts that are in no cache."""
        seconds = {}
        for engine in (ours, plain) if is_swapped else (plain, ours):
            took = engine.first_token(random_prompt(dice, num_tokens))
            assert took.num_cached == 0
            seconds[engine] = took.seconds
        return seconds[ours] / seconds[plain]

    for num_tokens in PAIRS:
        for _ in range(WARM_UPS):
            ratio(num_tokens)
    for late_s in LATE_S:
        relay.late_s = late_s
        ratio(max(PAIRS))  # the first request finds out that the sidecar is late
        medians = [
            statistics.median(ratio(num_tokens, bool(number % 2)) for number in range(num_pairs))
            for num_tokens, num_pairs in PAIRS.items()
        ]
        cells = " | ".join(f"{median:.2f}" for median in medians)
        print(f"| {late_s * 1e3:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
