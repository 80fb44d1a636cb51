"""Without a sidecar, beside one that comes later, inside vLLM, and beside another connector."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.errors import ConfigError

from tests.vllm.engines import (
    CHUNK_SIZE,
    Ask,
    engine_options,
    release,
    running_engine,
    transfer_config,
)
from tests.vllm.models import LLAMA
from tests.vllm.processes import vllm_environment
from tests.vllm.references import prompt
from tests.vllm.sidecars import Growth, num_chunks
from tests.vllm.worlds import BOUND_S, World, await_found, fill, with_example_connector


@pytest.mark.smoke
def test_vllm_starts_without_a_sidecar_and_joins_it_later(world: World) -> None:
    first, second = Ask(prompt(240, 1000)), Ask(prompt(241, 1000))
    with running_engine(world.options()) as engine:
        alone = [engine.ask(first), *engine.generate([first, second])]
        assert max(answer.took_s for answer in alone) < BOUND_S
        engine.reset()
        sidecar = world.sidecar()
        await_found(engine, first)
        assert num_chunks(sidecar) >= 3
        engine.reset()
        hit = engine.ask(first)
        assert hit.num_cached == 3 * CHUNK_SIZE
        assert not engine.worker_connector._has_neighbours(), "only a GPU would show it"
    world.references.check([*alone, hit], [first, first, second, first], LLAMA)


@pytest.mark.smoke
def test_a_cache_inside_vllm(world: World) -> None:
    """No sidecar at all: the same connector with memory, disk and all of its own."""
    ask = Ask(prompt(242, 1000))
    extra = {
        "lmcache.max_local_cpu_size": 0.25,
        "lmcache.chunk_size": CHUNK_SIZE,
        "lmcache.remote_url": None,
    }
    extra |= {
        "lmcache.local_disk": f"file://{world.owner.directory}/disk/",
        "lmcache.max_local_disk_size": 0.5,
    }
    options = engine_options(world.models / LLAMA, kv_transfer_config=transfer_config(extra))
    with running_engine(options) as engine:
        cold = engine.ask(ask)
        await_found(engine, ask)
        hit = engine.ask(ask)
    with running_engine(options) as engine:
        from_disk = engine.ask(ask)
        assert from_disk.num_cached == 3 * CHUNK_SIZE, "from the disk, by the next engine"
    world.references.check([cold, hit, from_disk], [ask] * 3, LLAMA)


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"chunk_size": 200}, "chunk_size=200"),
        ({"chunk_sise": 256}, "chunk_sise is no option; did you mean 'chunk_size'"),
        ({"load": "asink"}, "load='asink'"),
        ({"tier_timeout_s": "soon"}, "tier_timeout_s='soon'"),
    ],
)
def test_a_wrong_option_stops_the_start_with_a_sentence(
    world: World, wrong: dict[str, Any], complaint: str
) -> None:
    options = world.options(**{f"lmcache_{name}": value for name, value in wrong.items()})
    with pytest.raises(Exception, match="") as caught, running_engine(options):
        pytest.fail("it has started")
    assert complaint in str(caught.value)
    if "chunk_size" in wrong:
        assert "128" in str(caught.value), "the block size, of which it must be a multiple"


IMPORTS = """
    import builtins, json, sys

    sys.path.append(sys.argv[3])
    from tests.vllm.engines import Ask, Engine, set_environment
    set_environment()

    imported = set()
    original = builtins.__import__

    def watched(name, globals=None, locals=None, fromlist=(), level=0):
        importer = (globals or {}).get("__name__", "")
        if level == 0 and importer.startswith("lmcache_"):
            imported.add((importer, name.split(".")[0]))
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = watched
    engine = Engine(json.loads(sys.argv[1]))
    ask = Ask(tuple(json.loads(sys.argv[2])))
    cold = engine.ask(ask)
    engine.reset()
    hit = engine.ask(ask)
    engine.close()
    ours = sorted({name.split(".")[0] for name in sys.modules if name.startswith("lmcache")})
    print("RESULT", json.dumps({"imported": sorted(imported), "ours": ours, "cached": hit.num_cached}))
"""  # noqa: E501
ALLOWED = {"torch", "numpy", "msgspec", "xxhash", "lmcache_core", "lmcache_kernels"}
BESIDE_VLLM = {"vllm", "prometheus_client"}
"""What vLLM itself brings, for the files that speak its language."""


def test_only_what_vllm_has_is_imported(world: World) -> None:
    """In another project's image nothing may be needed, or be shadowed, that is not there."""
    world.sidecar()
    ask = Ask(prompt(243, 600))
    root = str(Path(__file__).resolve().parents[2])
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(IMPORTS),
        json.dumps(world.options()),
        json.dumps(ask.tokens),
        root,
    ]
    ran = subprocess.run(
        command, env=vllm_environment(), capture_output=True, text=True, timeout=120, check=False
    )
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("RESULT ")] or [
        ran.stderr[-5000:]
    ]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["cached"] == 2 * CHUNK_SIZE
    assert set(result["ours"]) <= {"lmcache_core", "lmcache_kernels"}
    strange = [
        (importer, name)
        for importer, name in result["imported"]
        if name not in ALLOWED | set(sys.stdlib_module_names)
        and not (importer.startswith("lmcache_core.integrations.vllm.") and name in BESIDE_VLLM)
    ]
    assert not strange


def is_ours(connector: object) -> bool:
    return type(connector).__name__ == "LMCacheConnector"


def test_beside_another_connector(world: World) -> None:
    """As a child of vLLM's MultiConnector: what the first child has not, the second one gives."""
    sidecar = world.sidecar()
    ask, other = Ask(prompt(244, 1000)), Ask(prompt(245, 700))
    with running_engine(with_example_connector(world.options(), world.owner.directory)) as engine:
        fill(engine, sidecar, ask)
        hit = engine.ask(ask)
        assert hit.num_cached == 3 * CHUNK_SIZE
        engine.reset()
        stored = Growth(sidecar)
        both = engine.generate([other, ask])
        assert both[1].num_cached == 3 * CHUNK_SIZE
        stored.reaches(2)
        children = engine.worker_connector._connectors
        assert [child._has_neighbours() for child in children if is_ours(child)] == [True]
    world.references.check([hit, *both], [ask, other, ask], LLAMA)


@pytest.mark.smoke
def test_a_release_without_such_tiers_says_which_has_them() -> None:
    from lmcache_core.integrations import vllm_tier

    if release() >= release("0.31"):
        assert vllm_tier.LMCacheTier.__name__ == "LMCacheTier"
    else:
        with pytest.raises(ConfigError, match=r"use vLLM 0\.31 or later.*LMCacheConnector"):
            _ = vllm_tier.LMCacheTier
