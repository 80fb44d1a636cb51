"""The settings of this release of vLLM, beside what is known of them, and what names they give."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.vllm_declared import declared, recorded
from tests.vllm.engines import Ask, engine_options, release, running_engine
from tests.vllm.models import LLAMA, LORA
from tests.vllm.references import TOLERANCES, assert_same, distance, prompt
from tests.vllm.sidecars import Growth
from tests.vllm.worlds import World, fill, whole_chunks

LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 16,
        "long_factor": [4.0] * 16,
        "original_max_position_embeddings": 2048,
        "factor": 2.0,
    },
    "original_max_position_embeddings": 2048,
}


def sources() -> Path:
    import vllm

    return Path(vllm.__file__).parents[1]


@pytest.mark.smoke
def test_what_is_recorded_of_this_release_is_what_it_declares() -> None:
    found = declared(sources())
    assert found == recorded(".".join(map(str, release())))
    for name, fields in found.fields.items():
        kind = getattr(importlib.import_module("vllm.config"), name, None)
        if dataclasses.is_dataclass(kind):
            inherited = {field.name for field in dataclasses.fields(kind)} - set(fields)
            assert not inherited or kind.__mro__[1] is not object, f"{name}: {inherited}"


def imported_models(module: str, seen: set[str]) -> Iterator[str]:
    """A module of vLLM's models, and those that it imports."""
    if module in seen:
        return
    seen.add(module)
    file = sources() / Path(*module.split(".")).with_suffix(".py")
    if not file.is_file():
        return
    text = file.read_text()
    yield text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            near = module.rsplit(".", 1)[0] if node.level == 1 else ""
            name = ".".join(part for part in (near, node.module) if part)
            if name.startswith("vllm.model_executor.models.") and not name.endswith(
                (".utils", ".interfaces", ".interfaces_base", ".registry", ".adapters")
            ):
                yield from imported_models(name, seen)


@pytest.mark.smoke
def test_models_called_equal_at_any_length_do_not_read_the_length() -> None:
    from lmcache_core.integrations.vllm.kv_settings import SAME_AT_ANY_LENGTH
    from vllm.model_executor.models.registry import ModelRegistry

    num_known = 0
    for name in sorted(SAME_AT_ANY_LENGTH):
        model = ModelRegistry.models.get(name)
        if model is None:
            continue
        num_known += 1
        for text in imported_models(model.module_name, set()):
            for word in ("max_model_len", "try_get_generation_config"):
                readers = [line for line in text.splitlines() if word in line]
                assert [line for line in readers if "indexer" not in text] == [], (name, readers)
    assert num_known > 40


def identity_of_engine(world: World, **options: Any) -> str:
    """What names the KV of an engine with these options, but for its layout."""
    from lmcache_core.integrations.vllm.identity import revision_text
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(**engine_options(world.models / LLAMA, **options)).create_engine_config()
    return revision_text(config, None, {})


@pytest.mark.smoke
@pytest.mark.parametrize(
    "options",
    [
        {"max_model_len": 2048},
        {"gpu_memory_utilization": 0.5},
        {"max_num_seqs": 3, "max_num_batched_tokens": 4096},
        {"served_model_name": "other", "disable_log_stats": True},
        {"enable_prefix_caching": False},
        {"enable_lora": True, "max_lora_rank": 8},
        {"enforce_eager": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_engines_share_whatever_their_limits_are(world: World, options: dict[str, Any]) -> None:
    plain = identity_of_engine(world)
    assert identity_of_engine(world) == plain
    assert identity_of_engine(world, **options) == plain


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"hf_overrides": {"rope_theta": 5e5}},
        {"hf_overrides": LONGROPE},
        {"additional_config": {"scale": 2}},
        {"load_format": "dummy"},
        {"kv_cache_dtype_skip_layers": ["0"]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_engines_that_compute_other_kv_do_not_share(world: World, options: dict[str, Any]) -> None:
    assert identity_of_engine(world, **options) != identity_of_engine(world)


def test_longrope_is_named_by_the_longest_prompt(world: World) -> None:
    """One table of rotations is that of engines with short prompts, the other of those with long
    ones. Each engine has a process of its own: vLLM keeps the first table that a process asks for.
    """
    sidecar, ask = world.sidecar(), Ask(prompt(40, 1000))
    computed = []
    for length in (2048, 4096):
        engine = world.owner.engine(f"longest-{length}")
        engine.open(world.options(hf_overrides=LONGROPE, max_model_len=length))
        stored = Growth(sidecar)
        computed.append(engine.ask(ask))
        assert computed[-1].num_cached == 0, "the other engine's KV was taken"
        stored.reaches(whole_chunks(1000))
        engine.reset()
        assert_same(engine.ask(ask), computed[-1], TOLERANCES["float32"])
        engine.end()
    assert distance(*computed) > 0.01, "both tables give the same: the test tests nothing"


def test_an_adapter_is_named_by_the_modules_that_it_changes(world: World) -> None:
    sidecar, ask = world.sidecar(), Ask(prompt(41, 1000), adapter=str(world.models / LORA))
    for modules in (None, ["q_proj", "o_proj"]):
        options: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
        named = {} if modules is None else {"lora_target_modules": modules}
        with running_engine(world.options(**options, **named)) as engine:
            fill(engine, sidecar, ask)  # nothing was there
            answer = engine.ask(ask)
        world.references.check([answer], [ask], LLAMA, **named)
