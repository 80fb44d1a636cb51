"""Engines that start again and again with drawn settings over one store: none finds KV that it
would not compute itself, and those that differ only in what cannot change KV share.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_core.integrations import weights
from lmcache_core.integrations.file_digests import file_digests
from lmcache_core.integrations.vllm.groups import cache_groups
from lmcache_core.integrations.vllm.identity import identity_of
from lmcache_core.integrations.vllm.kv_settings import VLLM_SETTINGS
from lmcache_core.integrations.vllm.options import read_options
from lmcache_core.integrations.vllm.requests import RequestNamer

from tests.fixtures.vllm_engine import FULL, MLA, Shape, window
from tests.fixtures.vllm_engine.shapes import kv_cache_config, settings, vllm_config
from tests.fixtures.vllm_engine.worlds import embedded, make_adapter, make_model
from tests.releases import NEWEST_VLLM
from tests.simulation.many import fresh_seeds

ORIGINAL_LENGTH = 4096
TUNED_FROM = 32768
LENGTHS = (2048, 4096, 8192, 32768, 65536)
ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL_LENGTH},
)


@dataclass(frozen=True)
class Drawn:
    """The settings of one start that decide the bytes of the KV, in this test's model of an
    engine; all others must not matter.
    """

    weights: int = 0
    architecture: str = "LlamaForCausalLM"
    rope: int = 0
    length: int = 4096
    tuning: bool | None = None
    dtype: str = "float32"
    quantization: str | None = None
    ignored_layers: tuple[str, ...] = ()
    skipped_layers: tuple[str, ...] = ()
    kv_dtype: str = "auto"
    shape: int = 0
    ranks: int = 1
    adapter: int | None = None
    adapted_modules: tuple[str, ...] | None = None
    plugin: str | None = None
    activations: str | None = None
    salt: str = ""

    def kv(self) -> str:
        """What the engine computes for some fixed tokens: the regimes, not the settings."""
        kind = ROPES[self.rope].get("rope_type")
        is_long = kind == "longrope" and self.length > ORIGINAL_LENGTH
        is_tuned = self.architecture == "Llama4ForCausalLM" and (
            self.length > TUNED_FROM if self.tuning is None else self.tuning
        )
        modules = None if self.adapter is None else self.adapted_modules
        same = replace(self, length=0, tuning=None, adapted_modules=modules)
        return repr((same, is_long, is_tuned))


CHOICES: Mapping[str, tuple[Any, ...]] = {
    "weights": (0, 1, 2),
    "architecture": ("LlamaForCausalLM", "Llama4ForCausalLM", "OfAPluginForCausalLM"),
    "rope": (0, 1, 2),
    "length": LENGTHS,
    "tuning": (None, True, False),
    "dtype": ("float32", "bfloat16"),
    "quantization": (None, "fp8"),
    "ignored_layers": ((), ("lm_head",)),
    "skipped_layers": ((), ("0",)),
    "kv_dtype": ("auto", "fp8"),
    "shape": (0, 1, 2),
    "ranks": (1, 2),
    "adapter": (None, 0, 1),
    "adapted_modules": (None, ("q_proj",), ("q_proj", "v_proj")),
    "plugin": (None, "a", "b"),
    "activations": (None, "int8"),
    "salt": ("", "theirs"),
}
SHAPES: tuple[Callable[[int], Shape], ...] = (
    lambda ranks: Shape((FULL,), num_ranks=ranks),
    lambda ranks: Shape((MLA,), num_ranks=ranks, replicas=ranks),
    lambda ranks: Shape((FULL, window(6)), num_ranks=ranks),
)


class Starts:
    """Names what drawn engines compute.

    Args:
        directory: For models and adapters.
    """

    def __init__(self, directory: Path) -> None:
        self._models = [make_model(directory / str(i), f"weights {i}", "model") for i in range(3)]
        self._adapters = [make_adapter(directory / f"adapter{i}", f"lora {i}") for i in range(2)]

    def name(self, drawn: Drawn, dice: random.Random) -> bytes:
        """Start an engine with these settings, whatever else is set, and name a prompt's KV."""
        shape = SHAPES[drawn.shape](drawn.ranks)
        options = embedded()
        config = vllm_config(shape, self._models[drawn.weights], options, 0)
        model = config.model_config
        model.hf_config = SimpleNamespace(
            architectures=[drawn.architecture], rope_parameters=copy.deepcopy(ROPES[drawn.rope])
        )
        model.max_model_len, model.dtype = drawn.length, drawn.dtype
        if drawn.tuning is not None:
            model.override_generation_config = {"attn_temperature_tuning": drawn.tuning}
        model.quantization = drawn.quantization
        model.quantization_config = {"ignore": list(drawn.ignored_layers)}
        config.cache_config.cache_dtype = drawn.kv_dtype
        config.cache_config.kv_cache_dtype_skip_layers = list(drawn.skipped_layers)
        config.lora_config = settings("LoRAConfig", target_modules=drawn.adapted_modules)
        config.additional_config = {} if drawn.plugin is None else {"plugin": drawn.plugin}
        _set_what_must_not_matter(config, dice)
        caches = kv_cache_config(shape)
        variables = {"VLLM_PORT": str(dice.randrange(9)), "VLLM_LOGGING_LEVEL": "DEBUG"}
        if drawn.activations is not None:
            variables["VLLM_MARLIN_INPUT_DTYPE"] = drawn.activations
        read = read_options(options, "cpu")
        groups = cache_groups(caches)
        namer = RequestNamer(identity_of(config, caches, groups, read, NEWEST_VLLM, variables), 4)
        namer.use_salt(drawn.salt)
        lora = None
        if drawn.adapter is not None:
            path = str(self._adapters[drawn.adapter])
            lora = SimpleNamespace(lora_int_id=1, lora_name="a", lora_path=path)
        root = namer.root_of(SimpleNamespace(lora_request=lora, cache_salt=None))
        assert root is not None
        return root


KEPT = {
    "ModelConfig": frozenset(
        {"hf_config", "max_model_len", "model", "override_generation_config", "revision", "seed"}
    )
    | {"generation_config", "model_weights", "multimodal_config", "hf_config_path"},
    "ParallelConfig": frozenset({"tensor_parallel_size", "pipeline_parallel_size", "nnodes"})
    | {"decode_context_parallel_size", "prefill_context_parallel_size", "rank", "world_size"},
    "SchedulerConfig": frozenset({"async_scheduling"}),
}
"""Listed settings that are named elsewhere, or that this test itself draws."""


def _set_what_must_not_matter(config: Any, dice: random.Random) -> None:
    for part in vars(config).values():
        owner = type(part).__name__
        listed = sorted(VLLM_SETTINGS.fields.get(owner, frozenset()) - KEPT.get(owner, frozenset()))
        for name in dice.sample(listed, min(3, len(listed))):
            setattr(part, name, dice.choice([1, "x", [2], {"a": 3}]))


def restart(directory: Path, seed: int, count: int) -> tuple[int, int]:
    """Start engines; return how many found KV, and how many of those had other settings than the
    engine that stored it.
    """
    dice, starts = random.Random(seed), Starts(directory)
    stored: dict[bytes, tuple[str, Drawn]] = {}
    drawn, num_found, num_shared = Drawn(), 0, 0
    for _ in range(count):
        for name in dice.sample(sorted(CHOICES), dice.randrange(4)):
            drawn = replace(drawn, **{name: dice.choice(CHOICES[name])})
        kv = hashlib.sha256(drawn.kv().encode()).hexdigest()
        name = starts.name(drawn, dice)
        found = stored.setdefault(name, (kv, drawn))
        assert found[0] == kv, f"{drawn} finds the KV of {found[1]}"
        num_found += found[1] is not drawn
        num_shared += found[1] != drawn
    return num_found, num_shared


@pytest.fixture(autouse=True)
def _read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of models and adapters stay as they are: each is read once."""
    digests = functools.cache(file_digests)
    monkeypatch.setattr(weights, "file_digests", lambda files, _=None: digests(tuple(files)))


def test_no_restarted_engine_finds_kv_that_it_would_not_compute(tmp_path: Path) -> None:
    num_found, num_shared = restart(tmp_path, 1, 1500)
    assert num_found > 100, "hardly anything is shared: the test tests nothing"
    assert num_shared > 5


@pytest.mark.long
@pytest.mark.timeout(900)  # among the first: no other file takes as long
@pytest.mark.parametrize("number", range(4))
def test_twenty_thousand_restarts(tmp_path: Path, number: int) -> None:
    """Others for each state of the product."""
    num_found, num_shared = restart(tmp_path, fresh_seeds(4)[number], 5000)
    assert num_found > 500
    assert num_shared > 50
