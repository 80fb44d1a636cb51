"""The section `vllm` of docs/benchmarks.md: how long vLLM's first token takes with KV from each
place, and what storing costs a cold request.

In each round: a pair of cold requests, one of them stored, and then the same prompt from each
place. Every answer is checked.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.engines import SHARED_MEMORY
from tests.bench.measure import OtherLoad, Run, median_ratio, processor_seconds
from tests.bench.report import MACHINE, Findings, Section
from tests.releases import NEWEST_VLLM
from tests.vllm import models
from tests.vllm.engines import engine_options, transfer_config
from tests.vllm.models import FIRST_WORD, VOCABULARY
from tests.vllm.processes import ROOT, EngineProcess, Owner, Service
from tests.vllm.sidecars import eventually, neighbourhood, num_chunks, sidecar, socket_of, storage

HOME = ROOT / ".vllm"
PYTHON = HOME / "venv" / "bin" / "python"
CHUNK_SIZE = 256
NUM_TOKENS = 4097
"""Whole chunks and one token, which is always left to compute."""
MAX_MODEL_LEN = 4224
NUM_BLOCKS = 80
"""Of 128 tokens: two prompts and a half. With more, rounds would be over before each block has
been written once, which takes longer.
"""
BLOCK_TOKENS = 128
"""vLLM's prefix cache has no shorter prompts."""
OMP_THREADS = 1
"""On two processors vLLM keeps one for its scheduler. With two threads every time is noise as
soon as anything else runs.
"""
FIRST_TOKEN_TIMEOUT_S = 120.0
STARTS_AT_ONCE = 2

ARENA_GB, PEER_ARENA_GB, DISK_GB, STORAGE_GB = 0.75, 0.25, 4.0, 2.0
EVERYTHING_BYTES = 1 << 40
SETTLE_TIMEOUT_S = 30.0
WRITE_S = 0.4
"""Most writes to slower tiers are over by then. As long a wait follows a request that stores
nothing, so that the sidecar's processor times can be compared.
"""

ROUNDS, SHORT_ROUNDS = 15, 40
WARM_UP_TOKENS = 1025
SHORT_TOKENS = (100, 1000, 1025)
"""Prompts that are too short to hide what the connector costs."""
COLD, STORED = "cold", "cold, stored"
PREFIX = "vLLM's own prefix cache"
PREFIX_CONNECTED = f"{PREFIX}, with the connector"
MEMORY, DISK = "memory of the sidecar", "disk of the sidecar"
PEER, STORAGE = "sidecar of another pod", "storage service"
SHORT_COLD, SHORT_AGAIN = "short cold", "short again"
PLAIN, CONNECTED = "plain vLLM", "with the connector"
SOURCE = "vllm:prompt_tokens_cached_by_source{{source={}}}"

GOAL_MEMORY, GOAL_STORE = 1.5, 0.03
GOAL_SHORT_COLD, GOAL_SHORT_AGAIN = 1.03, 1.3
NOTES = {
    COLD: "nothing loaded or stored",
    PREFIX: "without our connector",
    PREFIX_CONNECTED: "asked, nothing to do",
    MEMORY: f"goal: {GOAL_MEMORY:g} times vLLM's prefix cache",
    DISK: "files in the page cache",
    PEER: "lm:// over loopback",
    STORAGE: "lm:// over loopback",
}
"""By row of the table of first tokens."""

MODEL = "small"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
}
"""110 million parameters with random weights."""


class VLLMMissingError(Exception):
    """There is no vLLM to measure."""


def check_vllm() -> None:
    """Check that there is a vLLM to measure.

    Raises:
        VLLMMissingError: There is none.
    """
    if not (PYTHON.exists() and (HOME / NEWEST_VLLM / ".ready").exists()):
        raise VLLMMissingError(
            f"vLLM {NEWEST_VLLM} is not installed in {HOME}: "
            f"`make .vllm/{NEWEST_VLLM}/.ready` installs it"
        )


def measure(run: Run) -> Findings:
    """Measure everything; takes about six minutes.

    Raises:
        VLLMMissingError: vLLM is not installed.
    """
    check_vllm()
    model = run("vLLM: model", made_model)
    with ExitStack() as stack:
        places = run(
            "vLLM: services and engines", lambda: stack.enter_context(running_places(model))
        )
        rounds = Rounds(places)
        run("vLLM: every way once", rounds.warm_up)
        with OtherLoad() as others:
            for number in range(ROUNDS):
                run(f"vLLM: round {number + 1} of {ROUNDS}", lambda: rounds.round(number))  # noqa: B023 (run at once)
            for number in range(SHORT_ROUNDS):
                name = f"vLLM: short prompts, {number + 1} of {SHORT_ROUNDS}"
                run(name, lambda: rounds.short_round(number))  # noqa: B023
    sections = [
        first_tokens(rounds.took),
        overhead(rounds.took, rounds.sidecar_cpu),
        short_prompts(rounds.short),
    ]
    machine = (
        f"{MACHINE} vLLM {NEWEST_VLLM} on the CPU, bf16, {OMP_THREADS} OpenMP thread."
        f" Medians of {ROUNDS} rounds."
    )
    return Findings(sections, [others.remark], machine)


# --- Tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Took:
    """What one token took.

    Attributes:
        seconds: From the request to its answer.
        cpu_seconds: Of all threads of the engine's process meanwhile.
        num_cached: Tokens of the prompt that were not computed, as vLLM counts them.
        token: The token.
        store_seconds: Of these the worker's side of the connector stored for so long, with vLLM
            waiting; 0 without `TimedEngine.watch`.
        store_cpu_seconds: CPU time of all threads meanwhile.
    """

    seconds: float
    cpu_seconds: float
    num_cached: int
    token: int
    store_seconds: float = 0.0
    store_cpu_seconds: float = 0.0


def first_tokens(took: Mapping[str, Sequence[Took]]) -> Section:
    """Return the table of first tokens. Ratios are medians over the rounds, in each of which all
    was measured in turn.
    """
    seconds = {row: [each.seconds for each in took[row]] for row in NOTES}
    rows = [
        (
            row,
            f"{statistics.median(mine) * 1e3:.1f}",
            f"{median_ratio(seconds[COLD], mine):.0f}",
            f"{median_ratio(mine, seconds[PREFIX]):.2f}",
            NOTES[row],
        )
        for row, mine in seconds.items()
    ]
    headings = ("KV from", "ms", "times faster than cold", "times vLLM's prefix cache", "note")
    return Section(f"vLLM: first token of a prompt of {NUM_TOKENS:,} tokens", headings, rows)


def overhead(
    took: Mapping[str, Sequence[Took]], sidecar_cpu: Mapping[str, Sequence[float]]
) -> Section:
    """Return the table of what storing costs."""
    cold, stored = took[COLD], took[STORED]
    cold_s = statistics.median(each.seconds for each in cold)
    cold_cpu_s = statistics.median(each.cpu_seconds for each in cold)
    added_s = statistics.median(
        one.seconds - other.seconds for one, other in zip(stored, cold, strict=True)
    )
    waits_s = statistics.median(each.store_seconds for each in stored)
    store_cpu_s = statistics.median(each.store_cpu_seconds for each in stored)
    # To the tick of 10 ms, so means.
    store_cpu_s += statistics.mean(sidecar_cpu[STORED]) - statistics.mean(sidecar_cpu[COLD])
    goal = f"goal: {GOAL_STORE:.0%}"
    figures = (
        ("cold request, not stored", cold_s, cold_s, "wall clock"),
        ("storing adds", added_s, cold_s, f"{goal}; median over the pairs"),
        ("vLLM waits to store", waits_s, cold_s, goal),
        ("CPU time of a store: total", store_cpu_s, cold_cpu_s, goal),
    )
    rows = [
        (name, f"{seconds * 1e3:.1f}", f"{seconds / of_s:.2%}", note)
        for name, seconds, of_s, note in figures
    ]
    title = f"vLLM: what storing costs a cold request of {NUM_TOKENS:,} tokens, {len(cold)} pairs"
    return Section(f"{title} in turn", ("what", "ms", "share of cold", "note"), rows)


def short_prompts(took: Mapping[tuple[str, str, int], Sequence[Took]]) -> Section:
    """Return the table of short prompts, cold and from vLLM's own prefix cache."""
    rows = []
    for num_tokens in SHORT_TOKENS:
        row = [f"{num_tokens:,}"]
        for kind in (SHORT_COLD, SHORT_AGAIN):
            plain, connected = (
                [each.seconds for each in took.get((kind, name, num_tokens), ())]
                for name in (PLAIN, CONNECTED)
            )
            if plain:
                row += [f"{statistics.median(one) * 1e3:.1f}" for one in (plain, connected)]
                row.append(f"{median_ratio(connected, plain):.2f}")
            else:
                row += ["", "", ""]
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
    return Section(f"vLLM: short prompts, {SHORT_ROUNDS} pairs in turn", headings, rows)


# --- Engines and services -------------------------------------------------------------------------


class TimedEngine:
    """One engine in a process of its own.

    Args:
        owner: Of the process.
        name: For its log.
        model: Directory of the model.
        connector: Options of the connector, without their prefix; None: no connector.
        dtype: Of its weights and KV.
    """

    def __init__(
        self,
        owner: Owner,
        name: str,
        model: Path,
        connector: Mapping[str, Any] | None = None,
        dtype: str = "bfloat16",
    ) -> None:
        transfer = {}
        if connector is not None:
            extra = {f"lmcache.{option}": value for option, value in connector.items()}
            transfer = {"kv_transfer_config": transfer_config(extra)}
        self._options = engine_options(
            model,
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            num_gpu_blocks_override=NUM_BLOCKS,
            **transfer,
        )
        command = [str(PYTHON), "-m", "tests.bench.vllm_child"]
        self._process: EngineProcess = owner.engine(name, vllm_environment(), command)

    def open(self) -> None:
        """Make the engine."""
        self._process.open(self._options)

    def kill(self) -> None:
        """End it at once; by itself an engine takes seconds."""
        self._process.kill()

    def first_token(self, tokens: Sequence[int]) -> Took:
        """Answer with one token."""
        asked = {"do": "first_token", "name": "engine", "tokens": list(tokens)}
        return Took(**self._process.call(FIRST_TOKEN_TIMEOUT_S, **asked))

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._process.reset()

    def num_from(self, source: str) -> float:
        """Return how many tokens of prompts vLLM says to have had from a source so far."""
        return self._process.metrics().get(SOURCE.format(source), 0.0)

    def watch(self) -> None:
        """Take the time of the connector's stores from now on."""
        self._process.call(10.0, do="watch", name="engine")

    def switch_stores(self, is_on: bool) -> None:
        """Choose whether what is computed from now on is stored."""
        self._process.call(10.0, do="switch_stores", name="engine", is_on=is_on)


@dataclass(frozen=True)
class Places:
    """What runs.

    Attributes:
        pod: The sidecar of the engine that computes; it has memory, a disk, peers and storage.
        peer: A sidecar with memory of its own, and peers.
        far: A sidecar with memory of its own, and that storage.
        plain: An engine without a connector.
        connected: An engine at `pod`.
        at_peer: An engine at `peer`.
        at_far: An engine at `far`.
    """

    pod: Service
    peer: Service
    far: Service
    plain: TimedEngine
    connected: TimedEngine
    at_peer: TimedEngine
    at_far: TimedEngine


@contextmanager
def running_places(model: Path) -> Iterator[Places]:
    """Run everything; nothing of it is left afterwards."""
    with _owner() as (owner, arenas):
        keeper = storage(owner, memory_gb=STORAGE_GB)
        kept = {"remote_url": f"lm://127.0.0.1:{keeper.ports['lm_port']}"}
        known = neighbourhood(owner)
        disk = {"disk_path": owner.directory / "disk", "disk_gb": DISK_GB}
        pod = _sidecar(owner, "pod", arenas, arena_gb=ARENA_GB, **disk, **kept, **known)
        peer = _sidecar(owner, "peer", arenas, **known)
        far = _sidecar(owner, "far", arenas, **kept)
        eventually(
            lambda: all(service.get("/v1/status")["registered"] for service in (pod, peer)),
            "the sidecars are not registered",
        )
        engines = [
            TimedEngine(owner, "plain", model),
            *(
                TimedEngine(owner, f"at-{service.name}", model, _at(owner, service))
                for service in (pod, peer, far)
            ),
        ]
        with _opened(engines):
            places = Places(pod, peer, far, *engines)
            places.connected.watch()
            yield places


@contextmanager
def running_pair(model: Path) -> Iterator[dict[str, TimedEngine]]:
    """Run an engine without a connector and one at a sidecar, by name."""
    with _owner() as (owner, arenas):
        pod = _sidecar(owner, "pod", arenas, arena_gb=ARENA_GB)
        pair = {
            PLAIN: TimedEngine(owner, "plain", model),
            CONNECTED: TimedEngine(owner, "connected", model, _at(owner, pod)),
        }
        with _opened(list(pair.values())):
            yield pair


@contextmanager
def _owner() -> Iterator[tuple[Owner, Path]]:
    """Yield an owner of processes, and a folder for arenas: a pod's volume is in memory too."""
    in_memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-bench-") as scratch,
        tempfile.TemporaryDirectory(prefix="lmcache-bench-", dir=in_memory) as arenas,
        Owner(Path(scratch)) as owner,
    ):
        yield owner, Path(arenas)


@contextmanager
def _opened(engines: Sequence[TimedEngine]) -> Iterator[None]:
    with ThreadPoolExecutor(STARTS_AT_ONCE) as pool:
        list(pool.map(TimedEngine.open, engines))
    try:
        yield
    finally:
        for engine in engines:
            engine.kill()


def _sidecar(owner: Owner, name: str, arenas: Path, **settings: Any) -> Service:
    arena = arenas / name
    arena.mkdir()
    return sidecar(owner, name, **{"arena_gb": PEER_ARENA_GB, "arena_path": arena} | settings)


def _at(owner: Owner, service: Service) -> dict[str, Any]:
    socket = str(socket_of(owner, service.name))
    return {"sidecar_socket": socket, "chunk_size": CHUNK_SIZE}


def vllm_environment() -> dict[str, str]:
    """Return what gives a process vLLM and our sources, as `make test-vllm` has them."""
    core, kernels = ROOT / "libs" / "lmcache_core" / "src", ROOT / "kernels" / "src"
    sources = map(str, (HOME / NEWEST_VLLM, core, kernels, ROOT))
    return {"PYTHONPATH": os.pathsep.join(sources), "OMP_NUM_THREADS": str(OMP_THREADS)}


def made_model() -> Path:
    """Return the model's directory, made if this version of it has not been made yet."""
    sources = (Path(__file__), Path(models.__file__))
    made = models.made_once(
        HOME,
        "bench-model",
        sources,
        lambda directory: models.make_model(directory / MODEL, CONFIG, seed=0),
    )
    return made / MODEL


# --- Rounds ---------------------------------------------------------------------------------------


def random_prompt(dice: random.Random, num_tokens: int) -> tuple[int, ...]:
    """Return a prompt that is in no cache."""
    return tuple(dice.randrange(FIRST_WORD, VOCABULARY) for _ in range(num_tokens))


def short_round(
    engines: Mapping[str, TimedEngine], dice: random.Random, number: int, sizes: Sequence[int]
) -> Iterator[tuple[tuple[str, str, int], Took]]:
    """Ask vLLM and vLLM with the connector, which stores, for new prompts, and for the same ones
    again: vLLM's own prefix cache has them then.

    Args:
        engines: By name.
        dice: Makes the prompts.
        number: Of the round; every other one has another order.
        sizes: Tokens of each prompt.
    """
    order = list(engines.items())[:: 1 if number % 2 else -1]
    for num_tokens in sizes:
        prompt = random_prompt(dice, num_tokens)
        kinds = (SHORT_COLD, SHORT_AGAIN) if num_tokens > BLOCK_TOKENS else (SHORT_COLD,)
        for kind in kinds:
            for name, engine in order:
                took = engine.first_token(prompt)
                if (took.num_cached > 0) != (kind == SHORT_AGAIN):
                    raise AssertionError(f"{kind}, {name}: {took.num_cached} cached tokens")
                yield (kind, name, num_tokens), took


class Rounds:
    """Runs the rounds, and keeps what was measured.

    Attributes:
        took: Of each row what each round took.
        short: The same of short prompts, by `SHORT_COLD` or `SHORT_AGAIN`, engine and tokens.
        sidecar_cpu: The sidecar's processor time for each cold request and the writes after it, by
            row, seconds.
    """

    def __init__(self, places: Places) -> None:
        self.took: dict[str, list[Took]] = defaultdict(list)
        self.sidecar_cpu: dict[str, list[float]] = defaultdict(list)
        self.short: dict[tuple[str, str, int], list[Took]] = defaultdict(list)
        self._places = places
        self._dice = random.Random()  # no prompt may have been seen by an earlier run either
        self._kept: tuple[int, ...] = ()

    def warm_up(self) -> None:
        """Take every way once, with short prompts; then compute one of full length for vLLM's own
        prefix cache, which is asked for the same one in each round.
        """
        for num_tokens in (WARM_UP_TOKENS, NUM_TOKENS):
            self._kept = random_prompt(self._dice, num_tokens)
            _check(self._places.plain.first_token(self._kept), 0, "a new prompt")
            if num_tokens == WARM_UP_TOKENS:
                self.round(0, num_tokens)
        self.took.clear()
        self.sidecar_cpu.clear()

    def short_round(self, number: int) -> None:
        """Run one round of short prompts."""
        engines = {PLAIN: self._places.plain, CONNECTED: self._places.connected}
        for what, took in short_round(engines, self._dice, number, SHORT_TOKENS):
            self.short[what].append(took)

    def round(self, number: int, num_tokens: int = NUM_TOKENS) -> None:
        """Run one round."""
        places = self._places
        cold = {row: random_prompt(self._dice, num_tokens) for row in (COLD, STORED)}
        for row in (COLD, STORED) if number % 2 else (STORED, COLD):
            self._cold(row, cold[row])
        stored = cold[STORED]
        self._hit(PREFIX, places.plain, self._kept, "device")
        self._hit(PREFIX_CONNECTED, places.connected, stored, "device")
        self._hit(MEMORY, places.connected, stored, "host", places.pod)
        for service in (places.pod, places.peer, places.far):
            service.post("/v1/admin/evict", {"num_bytes": EVERYTHING_BYTES})
            if num_chunks(service) != 0:
                raise AssertionError(f"the memory of {service.name} still has chunks")
        self._hit(DISK, places.connected, stored, "disk", places.pod, is_lifted=True)
        self._hit(PEER, places.at_peer, stored, "p2p", places.peer, is_lifted=True)
        other = "external_unspecified"
        self._hit(STORAGE, places.at_far, stored, other, places.far, is_lifted=True)

    def _cold(self, row: str, prompt: tuple[int, ...]) -> None:
        """Ask for a new prompt; with the processor time that the sidecar spends on it, until all is
        written.
        """
        pod, connected = self._places.pod, self._places.connected
        connected.switch_stores(row == STORED)
        before, before_s = num_chunks(pod), processor_seconds(pod.pid)
        took = connected.first_token(prompt)
        time.sleep(WRITE_S)
        self.sidecar_cpu[row].append(processor_seconds(pod.pid) - before_s)
        _check(took, 0, row)
        eventually(
            lambda: pod.get("/v1/status")["settled"],
            "the sidecar does not settle",
            SETTLE_TIMEOUT_S,
        )
        connected.switch_stores(True)
        num_stored = num_chunks(pod) - before
        if row == STORED and num_stored != len(prompt) // CHUNK_SIZE:
            raise AssertionError(f"{num_stored} chunks of {len(prompt)} tokens were stored")
        self.took[row].append(took)

    def _hit(
        self,
        row: str,
        engine: TimedEngine,
        prompt: tuple[int, ...],
        source: str,
        service: Service | None = None,
        is_lifted: bool = False,
    ) -> None:
        """Ask for a prompt whose KV is at one place.

        Args:
            source: Where vLLM must say that the KV came from, as the sidecar reports it.
            service: Whose memory is checked.
            is_lifted: Whether the chunks are not in that memory before, and are afterwards.
        """
        if source != "device":
            engine.forget()
        said = engine.num_from(source)
        held = 0 if service is None else num_chunks(service)
        took = engine.first_token(prompt)
        _check(took, len(prompt) - 1, row)
        said = engine.num_from(source) - said
        if said != len(prompt) - 1:
            raise AssertionError(f"{row}: of {len(prompt)} tokens {said:.0f} came from {source!r}")
        if service is not None and (num_chunks(service) - held > 0) != is_lifted:
            raise AssertionError(
                f"{row}: {service.name} held {held} chunks before and holds"
                f" {num_chunks(service)} now"
            )
        self.took[row].append(took)


def _check(took: Took, num_cached: int, row: str) -> None:
    if took.num_cached != num_cached:
        raise AssertionError(
            f"{row}: vLLM counts {took.num_cached} cached tokens, not {num_cached}"
        )
