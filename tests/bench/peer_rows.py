"""The rows of `peers` that are not of bytes at a place: chunks, short prompts, vLLM, CacheGen."""

from __future__ import annotations

import random
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from lmcache_demo.model import MODEL_DIR

from tests.bench import scale, vllm_rounds
from tests.bench.codec_model import Reader
from tests.bench.codec_neighbours import other_load
from tests.bench.measure import GB
from tests.bench.peer_child import PROMPTS_AT_ONCE, SMALL, Shape
from tests.bench.peer_engines import children
from tests.bench.peer_places import LMCACHE_PYTHON
from tests.bench.peer_reading import Row, Run
from tests.bench.vllm_engines import HOME, Took
from tests.bench.vllm_model import made_model
from tests.bench.vllm_places import running_pair
from tests.training.corpus import collect_corpus
from tests.training.evaluate import MEASURED_KINDS

NUM_PROCESSES = 16
CODEC_CALLS = 10
PLAIN_VLLM = "plain vLLM"
VLLM_SIZES = (*vllm_rounds.SHORT_TOKENS, 4097)
VLLM_ROUNDS = 2
"""Rounds of vLLM to one of the others."""
LONG_ROUNDS = 0, 1
"""Of four rounds, those with the longest prompt: one in each order of the engines. What the first
one is asked again finds the processor's caches filled by the other.
"""


def chunks(run: Run, directory: Path, rounds: int) -> list[Row]:
    """What a chunk of 1 KiB in memory costs, in prompts of 16."""
    cores = other_load()
    num_chunks = PROMPTS_AT_ONCE * SMALL.num_tokens // SMALL.chunk_size
    room = {"max_local_cpu_size": 1.25}
    engines = {
        "ours": ("ours", "Hot", room | {"remote_url": None}, SMALL),
        "peer": ("lmcache", "LocalCPUBackend", room | {"local_cpu": True}, SMALL),
    }
    seconds = run(
        "chunks of 1 KiB", lambda: _asked(engines, directory, ("stores", "retrieves"), rounds)
    )
    return [
        Row(
            f"fixed cost of a chunk: {call[:-1]}",
            "µs",
            *(each / num_chunks * 1e6 for each in seconds[call]),
            cores=cores,
        )
        for call in seconds
    ]


def prompts(run: Run, directory: Path, rounds: int) -> list[Row]:
    """99th percentiles of prompts of one chunk, from many processes at one sidecar."""
    cores = other_load()
    ours, bare = (
        run(name, lambda: scale.prompt_seconds(directory, NUM_PROCESSES, is_bare))  # noqa: B023 (run at once)
        for name, is_bare in (("short prompts", False), ("short prompts, bare", True))
    )
    return [
        Row(
            f"{scale.NUM_TOKENS}-token prompts, sidecar, {NUM_PROCESSES} processes: {call} p99",
            "ms",
            None,
            scale.percentile(ours[call], 99) * 1e3,
            scale.percentile(bare[call], 99) * 1e3,
            note="bare requests and copies",
            cores=cores,
        )
        for call in ("store", "retrieve")
    ]


def vllm(run: Run, directory: Path, rounds: int) -> list[Row]:
    """The first token of a real vLLM with our connector, against plain vLLM."""
    cores = other_load()
    model = run("vLLM: model", lambda: made_model(HOME))
    took: dict[tuple[str, str, int], list[Took]] = defaultdict(list)
    dice = random.Random()  # no prompt may have been seen by an earlier run either

    def measured() -> None:
        with running_pair(model) as (plain, connected):
            engines = {vllm_rounds.PLAIN: plain, vllm_rounds.CONNECTED: connected}
            for number in range(-1, VLLM_ROUNDS * rounds):
                is_long = number < 0 or number % 4 in LONG_ROUNDS
                sizes = VLLM_SIZES if is_long else VLLM_SIZES[:-1]
                for what, each in vllm_rounds.short_round(engines, dice, number, sizes):
                    took[what] += [each] if number >= 0 else []

    run("vLLM: first tokens", measured)
    shown = {
        "hit by its own prefix cache": (vllm_rounds.SHORT_AGAIN, (1025, 4097)),
        "cold prompt, stores on": (vllm_rounds.SHORT_COLD, (100, 1000)),
    }
    return [
        Row(
            f"vLLM, {label}, {num_tokens:,} tokens",
            "ms",
            None,
            _median_ms(took[kind, vllm_rounds.CONNECTED, num_tokens]),
            _median_ms(took[kind, vllm_rounds.PLAIN, num_tokens]),
            note=PLAIN_VLLM,
            cores=cores,
        )
        for label, (kind, sizes) in shown.items()
        for num_tokens in sizes
    ]


def codec(run: Run, directory: Path, rounds: int) -> list[Row]:
    """CacheGen on a chunk of the demo's model."""
    cores = other_load()
    chunk = run("CacheGen: a chunk of the demo's model", _chunk)
    file = directory / "chunk.pt"
    torch.save(chunk, file)
    options = {"model": str(MODEL_DIR), "chunk": str(file), "calls": CODEC_CALLS}
    engines = {
        "ours": ("ours-codec", "", options, SMALL),
        "peer": ("lmcache-codec", "", options, SMALL),
    }
    seconds = run("CacheGen", lambda: _asked(engines, directory, ("encode", "decode"), rounds))
    return [
        Row(
            f"CacheGen, chunk of {chunk.nbytes / 1e6:.2f} MB: {call}",
            "GB/s of a core",
            *(chunk.nbytes / each / GB for each in seconds[call]),
            cores=cores,
        )
        for call in seconds
    ]


PARTS: dict[str, Callable[[Run, Path, int], list[Row]]] = {
    "chunks": chunks,
    "prompts": prompts,
    "vllm": vllm,
    "codec": codec,
}


def not_measured(directory: Path) -> str:
    """Say in a sentence what of vLLM does not run here, in its words."""
    tier = {"type": "fs", "root_dir": str(directory / "vllm-files")}
    engines = {"refusing": ("vllm-fs", "", {"tier": tier}, Shape(256))}
    with children(engines, directory) as started:
        refusal = started["refusing"].answer("refusal", 0)["refusal"]
    if not refusal:
        return "vLLM's copies between KV blocks and host memory run here, and are not measured."
    return f'vLLM\'s copies between KV blocks and host memory are not measured: "{refusal}".'


def lmcache_version() -> str:
    """Return the release that is installed."""
    asked = "import importlib.metadata as m; print(m.version('lmcache'))"
    done = subprocess.run([LMCACHE_PYTHON, "-c", asked], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _asked(
    engines: dict[str, tuple[object, ...]], directory: Path, calls: tuple[str, ...], rounds: int
) -> dict[str, tuple[float, float]]:
    """Return the median seconds of each call: the peer's and ours."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    with children(engines, directory) as started:
        for call in calls:
            for turn in range(1 + rounds):  # the first does not count
                for name, child in list(started.items())[:: 1 if turn % 2 else -1]:
                    taken = child.ask(call, turn)
                    seconds[call, name] += [taken] if turn else []
    return {
        call: (statistics.median(seconds[call, "peer"]), statistics.median(seconds[call, "ours"]))
        for call in calls
    }


def _chunk() -> torch.Tensor:
    found = [doc for doc in collect_corpus().held_out if doc.kind in MEASURED_KINDS]
    longest = max(found, key=lambda doc: len(doc.text))
    with ThreadPoolExecutor(1) as pool:
        return Reader.shipped().windows(pool, [longest]).chunks(0)[0].contiguous()


def _median_ms(took: list[Took]) -> float:
    return statistics.median(each.seconds for each in took) * 1e3
