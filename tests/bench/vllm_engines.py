"""Processes with vLLM engines, as the bench sees them."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.releases import NEWEST_VLLM
from tests.vllm.engines import engine_options, transfer_config
from tests.vllm.models import FIRST_WORD, VOCABULARY
from tests.vllm.processes import ROOT, EngineProcess, Owner

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
OMP_THREADS = 1
"""On two processors vLLM keeps one for its scheduler. With two threads every time is noise as
soon as anything else runs.
"""
FIRST_TOKEN_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Took:
    """What one token took.

    Attributes:
        seconds: From the request to its answer.
        cpu_seconds: Of all threads of the engine's process meanwhile.
        num_cached: Tokens of the prompt that were not computed, as vLLM counts them.
        token: The token.
        store_seconds: Of these the worker's side of the connector stored for so long, with vLLM
            waiting; 0 where nobody watches.
        store_cpu_seconds: CPU time of all threads meanwhile.
        scheduler_seconds: The same for the scheduler's side, whatever it did.
        scheduler_cpu_seconds: CPU time meanwhile.
    """

    seconds: float
    cpu_seconds: float
    num_cached: int
    token: int
    store_seconds: float = 0.0
    store_cpu_seconds: float = 0.0
    scheduler_seconds: float = 0.0
    scheduler_cpu_seconds: float = 0.0


class TimedEngine:
    """One engine in a process of its own.

    Args:
        owner: Owner of the process.
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
        extra = (
            None
            if connector is None
            else {f"lmcache.{option}": value for option, value in connector.items()}
        )
        transfer = {} if extra is None else {"kv_transfer_config": transfer_config(extra)}
        self._options = engine_options(
            model,
            dtype=dtype,
            max_model_len=MAX_MODEL_LEN,
            num_gpu_blocks_override=NUM_BLOCKS,
            **transfer,
        )
        self._process: EngineProcess = owner.engine(
            name, vllm_environment(), [str(PYTHON), "-m", "tests.bench.vllm_child"]
        )

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def open(self) -> None:
        """Make the engine."""
        self._process.open(self._options)

    def kill(self) -> None:
        """End it at once; by itself an engine takes seconds."""
        self._process.kill()

    def first_token(self, tokens: Sequence[int]) -> Took:
        """Answer with one token."""
        return Took(
            **self._process.call(
                FIRST_TOKEN_TIMEOUT_S, do="first_token", name="engine", tokens=list(tokens)
            )
        )

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._process.reset()

    def metrics(self) -> dict[str, float]:
        """vLLM's figures."""
        return self._process.metrics()

    def watch(self) -> None:
        """Take the connector's own time from now on."""
        self._process.call(10.0, do="watch", name="engine")

    def switch_stores(self, is_on: bool) -> None:
        """Whether what is computed from now on is stored."""
        self._process.call(10.0, do="switch_stores", name="engine", is_on=is_on)


def random_prompt(dice: random.Random, num_tokens: int) -> tuple[int, ...]:
    """A prompt that nobody has seen yet."""
    return tuple(dice.randrange(FIRST_WORD, VOCABULARY) for _ in range(num_tokens))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far, in the kernel and out of it, all threads; to the tick, which
    is 10 ms mostly.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def vllm_environment() -> dict[str, str]:
    """Return what gives a process vLLM and our sources, as `make test-vllm` has them."""
    sources = [
        HOME / NEWEST_VLLM,
        ROOT / "libs" / "lmcache_core" / "src",
        ROOT / "kernels" / "src",
        ROOT,
    ]
    return {"PYTHONPATH": os.pathsep.join(map(str, sources)), "OMP_NUM_THREADS": str(OMP_THREADS)}
