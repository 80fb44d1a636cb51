"""A real vLLM with our connector, with vLLM's own OffloadingConnector and with none: how long the
first token takes, cold and out of each cache, and what steps cost other requests during a store.
KV that was loaded is compared with what was computed, byte by byte.
"""

from __future__ import annotations

import importlib.util
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu.copies import require_pinned
from tests.gpu.facts import SHARED_MEMORY
from tests.gpu.pytests import ROOT, run_pytest
from tests.gpu.report import Report, WrongBytes

NONE, OFFLOADING = "no connector", "vLLM's OffloadingConnector"
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
OURS = "ours"
KINDS: dict[str, dict[str, str]] = {
    NONE: {},
    OURS: {},
    OFFLOADING: {},
    f"{OURS}, model runner V1": {RUNNER: "0"},
    f"{OURS}, model runner V2": {RUNNER: "1"},
}
"""vLLM's environment, by name."""
DRY_KINDS = tuple(KINDS)[:3]
LAYOUTS_SINCE = (0, 32)
"""First release that the tests of layouts know."""
CHUNK_SIZE = 256
OPEN_S, ANSWER_S = 240.0, 120.0
MODEL = "gpu"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "rope_theta": 10000.0,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
}
"""The shape of Llama-3.2-1B: 32 KiB of KV a token."""
DRY_CONFIG = CONFIG | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        num_chunks: Of a long prompt.
        rounds: Of first tokens.
        num_decodes: Requests that decode while long prompts come.
        num_new: Tokens of each.
        num_long: Long prompts among them.
        every: Steps between two of these.
        cpu_bytes: Host memory of a connector.
        options: Of the engine.
        environment: Of its process.
    """

    num_chunks: int
    rounds: int
    num_decodes: int
    num_new: int
    num_long: int
    every: int
    cpu_bytes: int
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_stored(self) -> int:
        """Tokens of a long prompt that are in whole chunks; one more is always computed."""
        return self.num_chunks * CHUNK_SIZE


SIZES = Sizes(
    *(32, 5, 16, 300, 10, 25, 8 << 30),
    {
        "dtype": "bfloat16",
        "block_size": 16,
        "max_model_len": 8448,
        "enforce_eager": False,
        "gpu_memory_utilization": 0.6,
    },
    {"TORCHDYNAMO_DISABLE": "0"},
)
DRY_SIZES = Sizes(
    *(4, 1, 2, 24, 2, 8, 64 << 20),
    {"dtype": "float32", "max_model_len": 2048, "num_gpu_blocks_override": 61},
)


def run(report: Report) -> None:
    """Measure every kind of engine, each in a process of its own."""
    if importlib.util.find_spec("vllm") is None:
        report.note("left out", text="vLLM is not installed for this Python")
        return
    from tests.vllm.engines import release, set_environment
    from tests.vllm.models import make_model
    from tests.vllm.processes import Owner

    set_environment()
    report.note("vLLM", text=".".join(map(str, release())))
    sizes = DRY_SIZES if report.is_dry else SIZES
    with (
        tempfile.TemporaryDirectory(prefix="lmcache-gpu-") as place,
        tempfile.TemporaryDirectory(prefix="lmcache-gpu-", dir=SHARED_MEMORY) as shared,
    ):
        model = Path(place) / MODEL
        make_model(model, DRY_CONFIG if report.is_dry else CONFIG, seed=0)
        for kind in DRY_KINDS if report.is_dry else KINDS:
            directory = Path(place) / kind.replace(" ", "-")
            directory.mkdir()
            with Owner(directory) as owner:
                measure(report, kind, owner, model, Path(shared), sizes)
    if release() >= LAYOUTS_SINCE:
        _layouts(report)


def _layouts(report: Report) -> None:
    """Check the layouts of vLLM's backends, here also of those that a CPU cannot import."""
    tests = ROOT / "tests/vllm"
    few = ["-k", "windows"] if report.is_dry else []
    done = run_pytest(tests / "pytest.ini", tests / "test_layouts.py", "-q", "-rs", *few)
    if done.returncode:
        raise RuntimeError(f"layouts: {(done.stdout + done.stderr)[-4000:]}")
    report.note("layouts", text=done.stdout.strip()[-4000:])


def measure(report: Report, kind: str, owner: Any, model: Path, shared: Path, sizes: Sizes) -> None:
    """Open one engine, and measure all of it.

    Args:
        report: Where its figures go.
        kind: Which of `KINDS`.
        owner: Owner of the processes.
        model: Directory of the model.
        shared: Where arenas are.
        sizes: How much is measured.
    """
    from tests.vllm.engines import engine_options
    from tests.vllm.sidecars import Growth, sidecar

    is_ours, environment = kind.startswith(OURS), KINDS[kind]
    arena = {"arena_gb": sizes.cpu_bytes / (1 << 30), "arena_path": shared / owner.directory.name}
    service = sidecar(owner, **arena) if is_ours else None
    transfer = _transfer(kind, owner, sizes, report)
    options = engine_options(model, **sizes.options, **transfer)
    command = [sys.executable, "-m", "tests.gpu.vllm_child"]
    engine = owner.engine("engine", {**sizes.environment, **environment}, command)
    engine.open(options, timeout_s=OPEN_S)
    dice, ms = random.Random(0), dict[str, list[float]]()

    def ask(what: str, tokens: Sequence[int]) -> dict[str, Any]:
        asked = {"name": "engine", "tokens": tokens, "num_stored": sizes.num_stored}
        answer: dict[str, Any] = engine.call(ANSWER_S, do="prefill", **asked)
        ms.setdefault(what, []).append(answer["seconds"] * 1e3)
        return answer

    for number in range(sizes.rounds + 1):
        tokens = _prompt(dice, sizes.num_stored + 1)
        growth = Growth(service) if service is not None else None
        cold = ask("cold", tokens)
        if growth is not None:
            growth.reaches(sizes.num_chunks)
        _serve(engine, [_request(dice, 0, CHUNK_SIZE // 2, 8)])  # stores may begin a step later
        prefix = ask("prefix cache", tokens)
        engine.reset()
        again = ask("after its reset", tokens)
        if is_ours and again["num_cached"] < sizes.num_stored:
            raise AssertionError(f"{kind}: {again['num_cached']} tokens were loaded")
        if again["kv"] != cold["kv"] or (is_ours and not again["kv"]):
            raise WrongBytes(f"{kind}: other KV was loaded than was computed")
        if is_ours and not report.is_dry:
            require_pinned(again["are_pinned"])
        if number == 0:  # the first round compiles
            ms.clear()
        report.note(
            f"{kind}: round {number}",
            cached=[one["num_cached"] for one in (cold, prefix, again)],
            are_tokens_equal=prefix["tokens"] == again["tokens"],
            checked_bytes=bool(again["kv"]),
        )
    medians = {what: statistics.median(each) for what, each in ms.items()}
    medians |= _beside(engine, dice, sizes)
    report.note(kind, ms={what: round(each, 3) for what, each in medians.items()})
    engine.kill()


def _beside(engine: Any, dice: random.Random, sizes: Sizes) -> dict[str, float]:
    """Let long prompts come, and be stored, while others decode; ms."""
    short = [_request(dice, 0, CHUNK_SIZE // 4, sizes.num_new) for _ in range(sizes.num_decodes)]
    long = [
        _request(dice, (1 + number) * sizes.every, sizes.num_stored + 1, 1)
        for number in range(sizes.num_long)
    ]
    alone, served = (_serve(engine, requests) for requests in (short, [*short, *long]))
    steps, first = served["steps"], served["first"][len(short) :]
    return {
        "step of decodes": statistics.median(alone["steps"]) * 1e3,
        "all steps": sum(steps) * 1e3,
        "step p50": statistics.median(steps) * 1e3,
        "step p99": statistics.quantiles(steps, n=100)[98] * 1e3,
        "first token of long prompts": statistics.median(first) * 1e3,
    }


def _serve(engine: Any, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    answer: dict[str, Any] = engine.call(ANSWER_S, do="serve", name="engine", requests=requests)
    return answer


def _request(dice: random.Random, step: int, num_tokens: int, num_new: int) -> dict[str, Any]:
    return {"step": step, "tokens": _prompt(dice, num_tokens), "num_new": num_new}


def _prompt(dice: random.Random, num_tokens: int) -> list[int]:
    from tests.vllm.models import FIRST_WORD, VOCABULARY

    return [dice.randrange(FIRST_WORD, VOCABULARY) for _ in range(num_tokens)]


def _transfer(kind: str, owner: Any, sizes: Sizes, report: Report) -> dict[str, Any]:
    """Options of an engine for its connector."""
    from tests.vllm.engines import transfer_config
    from tests.vllm.sidecars import socket_of

    if kind.startswith(OURS):
        own = {"sidecar_socket": str(socket_of(owner)), "chunk_size": CHUNK_SIZE}
        # Hits, however quickly so small a model computes.
        own |= {"prefill_tokens_per_s": 100.0}
        extra = {f"lmcache.{name}": value for name, value in own.items()}
        return {"kv_transfer_config": transfer_config(extra)}
    if kind == NONE:
        return {}
    extra = {"cpu_bytes_to_use": sizes.cpu_bytes}
    if report.is_dry:  # vLLM's own copies need CUDA
        extra |= {"spec_name": "HostTieringSpec", "secondary_tiers": []}
        extra |= {"spec_module_path": "tests.vllm.host_offloading"}
    return {
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    }
