"""What is expected of a GPU until it is measured there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lmcache_core.serde.chunk_codec import Profile

INTRODUCTION = (
    "Estimates, not measured: an H100 on PCIe 5 (55 GB/s) and a prompt of 8,192 tokens, unless a"
    " row says otherwise."
)
HEAD = "| what | estimate | arithmetic |"


@dataclass(frozen=True)
class Estimate:
    """One row.

    Attributes:
        what: What is estimated.
        value: How much.
        arithmetic: Why.
        measured_by: How the names of the lines begin that replace it; "": nothing measures it.
    """

    what: str
    value: str
    arithmetic: str
    measured_by: str = ""


LLAMA, CACHEGEN = "Llama-3.1-8B", f"GPU: cachegen {Profile.STANDARD}"
ESTIMATES = (
    Estimate(
        f"load, {LLAMA}, pageable",
        "89 to 215 ms",
        "1.07 GB at 5 to 12 GB/s",
        f"{LLAMA}: load, pageable arena",
    ),
    Estimate(
        f"load, {LLAMA}, pinned",
        "22 to 25 ms",
        "1.07 GB / 55, scatters behind copies",
        f"{LLAMA}: load, pinned arena",
    ),
    Estimate(
        f"load, {LLAMA}, pinned, A100 on PCIe 4", "46 ms", "1.07 GB / 25 + 32 scatters of 0.1 ms"
    ),
    Estimate(
        f"load, {LLAMA}, pinned, GB200 on C2C",
        "5 ms",
        "1.07 GB / 300 to 370 + 32 scatters of 0.05 ms",
    ),
    Estimate(
        f"load, {LLAMA}, `cachegen` in shared memory",
        "10 to 15 ms",
        "4.1 times fewer bytes; 32 decodes of 0.15 to 0.3 ms, and as long to launch each",
    ),
    Estimate(
        "load, 70B at tensor parallelism 8, a rank, pinned",
        "8 ms",
        "0.34 GB / 55 + 32 scatters of 0.05 ms",
        "Llama-3.1-70B, one rank of 8: load, pinned arena",
    ),
    Estimate(
        "load, DeepSeek-V3, a rank, pinned",
        "15 to 20 ms",
        "0.58 GB / 30 to 40 + 32 scatters of 0.05 ms: eight ranks share two sockets' memory",
        "DeepSeek-V3, latent: load, pinned arena",
    ),
    Estimate(f"recompute, {LLAMA}", "218 ms", "37,500 tokens/s, at 600 TFLOP/s a GPU"),
    Estimate("recompute, 70B on 8 GPUs", "239 ms", "34,300 tokens/s, at 600 TFLOP/s a GPU"),
    Estimate("recompute, DeepSeek-V3 on 8 GPUs", "126 ms", "64,900 tokens/s, 37B active"),
    Estimate(
        "a hit's first token, beyond its load",
        "2 steps",
        "starts after step N, vLLM is told after N + 1, it is in N + 2",
        "ours",
    ),
    Estimate(
        "a store's time in the step",
        "near 0 on the host; 1 to 2 ms of GPU time in parallel",
        "other threads launch; 32 gathers of 25 to 35 µs",
        f"{LLAMA}: matrix products during stores",
    ),
    Estimate(
        "gather or scatter, a chunk of 32 MiB",
        "30 to 75 µs",
        "64 MiB moved at 2 to 3 TB/s (limit 3.35: 20 µs), 10 to 40 µs to launch",
        "GPU: paged gather",
    ),
    Estimate(
        "decode kernel, 1 chunk a launch",
        "115 to 205 GB/s",
        "34 MB in 1,024 steps of 280 to 500 cycles at 1.755 GHz, one warp a scheduler",
        f"{CACHEGEN}: decode, 1 chunks a launch",
    ),
    Estimate(
        "decode kernel, 2 chunks or more a launch",
        "250 to 300 GB/s",
        "at most twice that, and 430: 138 instructions a step, on 528 schedulers",
        f"{CACHEGEN}: decode, 2 chunks a launch",
    ),
    Estimate(
        "digest, a chunk of 32 MiB, one core",
        "2 ms",
        "34 MB / 15 from memory; 26 GB/s from a cache",
    ),
    Estimate(
        f"load, {LLAMA}, `verify_hot: always`",
        "65 to 75 ms",
        "one thread digests 1.07 GB at 14 to 16 GB/s",
    ),
    Estimate(
        "register an arena of 100 GB",
        "10 s",
        "0.1 s a GB, pages of 4 KiB",
        "pin 8192 MiB of shared memory",
    ),
)


def table_of(measured: Iterable[str]) -> str:
    """Return the table of what is not among the names of measured lines."""
    names = list(measured)
    left = [
        one
        for one in ESTIMATES
        if not (one.measured_by and any(name.startswith(one.measured_by) for name in names))
    ]
    rows = [f"| {one.what} | {one.value} | {one.arithmetic} |" for one in left]
    return "\n".join([HEAD, "|---|---:|---|", *rows])
