"""What most tests begin with: a sidecar, and engine options that point at it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vllm.engines import CHUNK_SIZE, Ask, Engine, engine_options, transfer_config
from tests.vllm.models import LLAMA
from tests.vllm.processes import EngineProcess, Owner, Service
from tests.vllm.references import References
from tests.vllm.sidecars import Growth, eventually, sidecar, socket_of

BOUND_S = 12.0
"""No request of a test may last longer, whatever happens to the cache. Most take a tenth of a
second; two waits on a sidecar that hangs are four seconds, and the machine is busy.
"""

BACK_S = 40.0
"""So long may an engine not notice that its sidecar is back: it has made callers wait, and is
avoided for a multiple of that.
"""

PREFILL_TOKENS_PER_S = 100.0
"""So slow an engine waits for hits. A tiny model soon computes faster than a sidecar answers on a
busy machine, and rightly does not wait.
"""


@dataclass
class World:
    """One test's processes and models.

    Attributes:
        owner: Owner of the processes.
        models: Directory of the models.
        references: Answers without a cache.
    """

    owner: Owner
    models: Path
    references: References

    def sidecar(self, name: str = "sidecar", **settings: Any) -> Service:
        """A running sidecar."""
        return sidecar(self.owner, name, **settings)

    def speculative(self, drafts: Mapping[str, Any]) -> dict[str, Any]:
        """vLLM's `speculative_config`; a draft model is given by its name."""
        config = {"num_speculative_tokens": 3} | dict(drafts)
        if "model" in config:
            config["model"] = str(self.models / config["model"])
        return config

    def options(
        self, model: str = LLAMA, at: str = "sidecar", policy: str = "recompute", **options: Any
    ) -> dict[str, Any]:
        """Options of an engine.

        Args:
            model: Which model.
            at: Which sidecar, running or not.
            policy: `kv_load_failure_policy`.
            **options: The connector's if they begin with `lmcache_`, else the engine's.
        """
        connector = {
            name.removeprefix("lmcache_"): value
            for name, value in options.items()
            if name.startswith("lmcache_")
        }
        others = {name: value for name, value in options.items() if not name.startswith("lmcache_")}
        extra = {
            "sidecar_socket": str(socket_of(self.owner, at)),
            "chunk_size": CHUNK_SIZE,
            "prefill_tokens_per_s": PREFILL_TOKENS_PER_S,
        } | connector
        named = {f"lmcache.{name}": value for name, value in extra.items()}
        return engine_options(
            self.models / model, kv_transfer_config=transfer_config(named, policy), **others
        )


def with_second_connector(options: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The same engine, with our connector as the first child of vLLM's `MultiConnector`, and
    another one, by its `--kv-transfer-config`, as the second.
    """
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [options["kv_transfer_config"], other]},
    }
    return options | {"kv_transfer_config": multi}


def with_example_connector(options: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The same engine, with vLLM's `ExampleConnector` as the second child."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(directory / "example")},
    }
    return with_second_connector(options, example)


def whole_chunks(*lengths: int) -> int:
    """How many whole chunks prompts of these lengths have."""
    return sum(length // CHUNK_SIZE for length in lengths)


def fill(engine: Engine, service: Service, ask: Ask) -> None:
    """Have a prompt computed and stored, and forgotten by vLLM itself; none of its chunks may be
    there yet.

    Args:
        engine: Who computes it.
        service: The sidecar that gets it.
        ask: The prompt.
    """
    stored = Growth(service)
    assert engine.ask(ask).num_cached == 0
    stored.reaches(whole_chunks(len(ask.tokens)))
    engine.reset()


def is_found(engine: Engine | EngineProcess, ask: Ask) -> bool:
    """Whether all chunks of a prompt are found; it is computed, and stored, if they are not."""
    engine.reset()
    return engine.ask(ask).num_cached >= whole_chunks(len(ask.tokens)) * CHUNK_SIZE


def await_found(engine: Engine, ask: Ask, timeout_s: float = BACK_S) -> None:
    """Ask until all chunks of a prompt are found, then let vLLM forget it again."""
    eventually(
        lambda: is_found(engine, ask), "the engine does not find what it has stored", timeout_s
    )
    engine.reset()
