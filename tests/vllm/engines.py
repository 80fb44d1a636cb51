"""vLLM engines in this process: made, asked, and looked into."""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.vllm import state_kernels
from tests.vllm.pictures import picture

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What makes vLLM quick to start, quiet and offline. With more threads a busy machine of two
processors makes every step last at random; with dynamo the first request for logprobs compiles for
half a minute.
"""

BLOCK_SIZE = 128
"""The CPU backend's own."""
MLA_BLOCK_SIZE = 16
"""The only one that vLLM has for latent KV on every CPU."""
CHUNK_SIZE = 256
NUM_LOGPROBS = 5
MAX_MODEL_LEN = 4096

Extra = Mapping[str, Any]


@dataclass(frozen=True)
class Ask:
    """One request: greedy, and as long as it says.

    Attributes:
        tokens: Its prompt.
        num_new: Tokens to generate.
        salt: vLLM's `cache_salt`, or "".
        adapter: Directory of a LoRA adapter, or "".
        transfer: The request's `kv_transfer_params`, if any.
        pictures: Seeds of the pictures that the placeholders among its tokens stand for.
        prompt_logprobs: How many logprobs of each token of the prompt it asks for; 0: none.
        embedded_by: Directory of a model whose embeddings of the tokens are sent instead of these.
    """

    tokens: tuple[int, ...]
    num_new: int = 12
    salt: str = ""
    adapter: str = ""
    transfer: dict[str, Any] | None = None
    pictures: tuple[int, ...] = ()
    prompt_logprobs: int = 0
    embedded_by: str = ""


@dataclass(frozen=True)
class Answer:
    """What came of it.

    Attributes:
        tokens: Generated.
        logprobs: For each of them the likeliest tokens' logprobs, by token id.
        num_cached: Tokens of the prompt that vLLM did not compute, as it counts them.
        finish_reason: vLLM's.
        took_s: From the first of the requests asked together to the last answer.
        prompt_logprobs: As `logprobs`, for the tokens of the prompt but the first, where they were
            asked for.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]
    num_cached: int
    finish_reason: str
    took_s: float = 0.0
    prompt_logprobs: tuple[dict[int, float], ...] = ()


def release(version: str | None = None) -> tuple[int, ...]:
    """The numbers of a release of vLLM, by default of the one that runs here."""
    for name in ("vllm-cpu", "vllm") if version is None else ():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = version or importlib.metadata.version(name)
    assert version is not None, "vLLM is not installed"
    return tuple(int(part) for part in version.partition("+")[0].split(".")[:3])


def from_plain(plain: Mapping[str, Any]) -> Answer:
    """An answer out of `asdict`, where JSON has made token ids texts."""
    of_answer, of_prompt = (
        tuple({int(token): value for token, value in of_token.items()} for of_token in plain[name])
        for name in ("logprobs", "prompt_logprobs")
    )
    return Answer(
        *(tuple(plain["tokens"]), of_answer, plain["num_cached"], plain["finish_reason"]),
        *(plain["took_s"], of_prompt),
    )


def engine_options(model: Path, **options: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for a tiny model, as JSON can say them; `options` come on top."""
    common: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "block_size": MLA_BLOCK_SIZE if model.name == "mla" else BLOCK_SIZE,
        "enforce_eager": True,
        "disable_log_stats": False,
        "seed": 0,
    }
    if model.name == "mla":
        # The other one, which processors with AMX get, takes no float32.
        common["attention_config"] = {"backend": "CPU_MLA"}
    return common | options


def transfer_config(connector: Extra, policy: str = "recompute") -> dict[str, Any]:
    """vLLM's `--kv-transfer-config` for our connector.

    Args:
        connector: Its `kv_connector_extra_config`.
        policy: `kv_load_failure_policy`.
    """
    return {
        "kv_connector": "LMCacheConnector",
        "kv_connector_module_path": "lmcache_core.integrations.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": dict(connector),
    }


class Engine:
    """An engine in this process, which must have no other one with a connector at the time.

    Args:
        options: See `engine_options`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        from vllm import LLM

        if options.get("speculative_config") and release() >= (0, 32):
            state_kernels.register()
        self.llm = LLM(**options)
        self._num_adapters = 0
        self._adapters: dict[str, int] = {}

    def generate(self, asks: Sequence[Ask]) -> list[Answer]:
        """Answer all of them, scheduled together."""
        from vllm import SamplingParams

        prompts = [_prompt(ask) for ask in asks]
        sampling = [
            SamplingParams(
                temperature=0.0,
                max_tokens=ask.num_new,
                ignore_eos=True,
                logprobs=NUM_LOGPROBS,
                prompt_logprobs=ask.prompt_logprobs or None,
                detokenize=False,
                extra_args=None if ask.transfer is None else {"kv_transfer_params": ask.transfer},
            )
            for ask in asks
        ]
        adapters = [self._adapter(ask.adapter) for ask in asks]
        begin = time.monotonic()
        outputs = self.llm.generate(
            prompts, sampling, use_tqdm=False, lora_request=adapters if any(adapters) else None
        )
        took_s = time.monotonic() - begin
        return [_answer(output, took_s) for output in outputs]

    def ask(self, ask: Ask) -> Answer:
        """Answer one."""
        (answer,) = self.generate([ask])
        return answer

    def reset(self, *, reset_connector: bool = False) -> None:
        """Let vLLM forget its prefix cache; its connector as well, or nothing."""
        deadline = time.monotonic() + 20.0
        # Refused while a connector still reads blocks.
        while not self.llm.reset_prefix_cache(reset_connector=reset_connector):
            assert time.monotonic() < deadline, "vLLM's blocks are not given back"
            self.llm.llm_engine.step()
            time.sleep(0.01)

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    @property
    def connector(self) -> Any:
        """The connector at the scheduler."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The connector at the worker."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    def metrics(self) -> dict[str, float]:
        """vLLM's counters, gauges, and counts and sums of histograms, summed over their labels; the
        first two once more for each set of labels but the engine's and the model's.
        """
        figures: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            for part in ("count", "sum"):
                name, more = f"{metric.name}_{part}", getattr(metric, part, 0.0)
                figures[name] = figures.get(name, 0.0) + more
            value = getattr(metric, "value", None)
            if value is None:
                continue
            labels = {
                name: text
                for name, text in metric.labels.items()
                if name not in ("engine", "model_name")
            }
            figures[metric.name] = figures.get(metric.name, 0.0) + value
            if labels:
                figures[
                    metric.name
                    + "{"
                    + ",".join(f"{name}={text}" for name, text in sorted(labels.items()))
                    + "}"
                ] = value
        return figures

    def close(self) -> None:
        """End it."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def _adapter(self, directory: str) -> Any:
        from vllm.lora.request import LoRARequest

        if not directory:
            return None
        number = self._adapters.setdefault(directory, len(self._adapters) + 1)
        return LoRARequest(Path(directory).name, number, directory)


def _prompt(ask: Ask) -> dict[str, Any]:
    """vLLM's prompt."""
    parts: dict[str, Any] = {"prompt_token_ids": list(ask.tokens)}
    if ask.embedded_by:
        from safetensors.torch import load_file

        table = load_file(Path(ask.embedded_by, "model.safetensors"))["model.embed_tokens.weight"]
        parts = {"prompt_embeds": table[list(ask.tokens)]}
    if ask.salt:
        parts["cache_salt"] = ask.salt
    if ask.pictures:
        parts["multi_modal_data"] = {"image": [picture(seed) for seed in ask.pictures]}
    return parts


def _answer(output: Any, took_s: float) -> Answer:
    (completion,) = output.outputs
    of_answer, of_prompt = (
        _logprobs(completion.logprobs),
        _logprobs((output.prompt_logprobs or ())[1:]),
    )
    return Answer(
        *(tuple(completion.token_ids), of_answer, output.num_cached_tokens or 0),
        *(str(completion.finish_reason), took_s, of_prompt),
    )


def _logprobs(of_tokens: Any) -> tuple[dict[int, float], ...]:
    """vLLM's logprobs as plain numbers."""
    return tuple(
        {int(token): float(about.logprob) for token, about in of_token.items()}
        for of_token in of_tokens or ()
    )


@contextlib.contextmanager
def running_engine(options: Mapping[str, Any]) -> Iterator[Engine]:
    """An engine that is gone afterwards."""
    engine = Engine(options)
    try:
        yield engine
    finally:
        engine.close()


def plain(answer: Answer) -> dict[str, Any]:
    """What `from_plain` reads again."""
    return asdict(answer)


def set_environment() -> None:
    """Set `ENVIRONMENT`, before torch or vLLM is imported."""
    for name in [name for name in os.environ if name.startswith("LMCACHE_")]:
        del os.environ[name]
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def be_unhurried() -> None:
    """Let engines of this process wait for a thread that holds a connection and is not scheduled,
    as on a busy machine: they would rightly compute.
    """
    from lmcache_core.sidecar import connection

    connection.SEND_TIMEOUT_S = 0.25
