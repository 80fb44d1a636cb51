"""Latent KV (MLA), sliding windows beside full attention, and KV of several workers."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.vllm.groups import cache_groups

from tests.vllm.engines import CHUNK_SIZE, Ask, release, running_engine
from tests.vllm.models import LLAMA, LOCAL, MLA, SHARED, SLIDING
from tests.vllm.references import assert_same, prompt
from tests.vllm.sidecars import Growth, await_calm, eventually
from tests.vllm.worlds import BACK_S, World, fill, is_found, whole_chunks

ABSTRACT = ("KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs")
"""Bases of others, and a collection of specs of several layers."""
TP_TOLERANCE = 1e-4
"""Two workers add their halves in another order than one."""


@pytest.mark.since("0.30")
@pytest.mark.smoke
def test_latent_kv(world: World) -> None:
    sidecar = world.sidecar()
    ask, branch = Ask(prompt(10, 700)), Ask(prompt(10, 600) + prompt(11, 200))
    with running_engine(world.options(MLA)) as engine:
        fill(engine, sidecar, ask)
        hit, branched = engine.ask(ask), engine.ask(branch)
        assert [hit.num_cached, branched.num_cached] == [2 * CHUNK_SIZE, 2 * CHUNK_SIZE]
    world.references.check([hit, branched], [ask, branch], MLA)


@pytest.mark.parametrize("length", [300, pytest.param(1000, marks=pytest.mark.smoke), 2300])
def test_sliding_windows_beside_full_attention(world: World, length: int) -> None:
    """Windows of 256 tokens: two groups of blocks slide, the third has all. They are always
    loaded asynchronously.
    """
    sidecar = world.sidecar()
    ask = Ask(prompt(12, length))
    branch = Ask(prompt(12, length - 40) + prompt(13, 300))
    with running_engine(world.options(SLIDING, max_num_batched_tokens=512)) as engine:
        num_groups = len(engine.scheduler.kv_cache_config.kv_cache_groups)
        assert num_groups == (3 if release() >= (0, 30) else 1), (
            "older releases accept no report of a failed load by group"
        )
        cold = engine.ask(ask)
        await_calm(sidecar)
        engine.reset()
        hit = engine.ask(ask)
        assert hit.num_cached == whole_chunks(length) * CHUNK_SIZE
        engine.reset()
        branched = engine.ask(branch)
        assert branched.num_cached == whole_chunks(length - 40) * CHUNK_SIZE
        engine.reset()
        both = engine.generate([branch, ask])
        assert all(answer.num_cached >= whole_chunks(length - 40) * CHUNK_SIZE for answer in both)
    world.references.check([cold, hit, branched, *both], [ask, ask, branch, branch, ask], SLIDING)


@pytest.mark.parametrize("length", [pytest.param(1000, marks=pytest.mark.smoke), 1500])
def test_local_attention_beside_full_attention(world: World, length: int) -> None:
    """In sections of 512 tokens; some prefixes end with one, and need nothing of it."""
    sidecar = world.sidecar()
    ask = Ask(prompt(16, length))
    branch = Ask(prompt(16, max(260, length - 400)) + prompt(17, 300))
    with running_engine(world.options(LOCAL, max_num_batched_tokens=512)) as engine:
        num_groups = len(engine.scheduler.kv_cache_config.kv_cache_groups)
        assert num_groups == (2 if release() >= (0, 30) else 1), (
            "older releases accept no report of a failed load by group"
        )
        cold = engine.ask(ask)
        await_calm(sidecar)
        engine.reset()
        hit, branched = engine.ask(ask), engine.ask(branch)
        assert hit.num_cached == whole_chunks(length) * CHUNK_SIZE
        assert branched.num_cached >= whole_chunks(max(260, length - 400)) * CHUNK_SIZE
        engine.reset()
        both = engine.generate([branch, ask])
        assert both[1].num_cached >= whole_chunks(length) * CHUNK_SIZE
    world.references.check([cold, hit, branched, *both], [ask, ask, branch, branch, ask], LOCAL)


@pytest.mark.since("0.30")
@pytest.mark.smoke
def test_layers_that_use_the_kv_of_others(world: World) -> None:
    """Only half of the layers have KV: one of a window, and one of all tokens."""
    sidecar = world.sidecar()
    ask, branch = Ask(prompt(18, 1000)), Ask(prompt(18, 600) + prompt(19, 300))
    with running_engine(world.options(SHARED)) as engine:
        fill(engine, sidecar, ask)
        hit, branched = engine.ask(ask), engine.ask(branch)
        assert hit.num_cached == whole_chunks(1000) * CHUNK_SIZE
        assert branched.num_cached == whole_chunks(600) * CHUNK_SIZE
    world.references.check([hit, branched], [ask, branch], SHARED)


def test_two_workers(world: World) -> None:
    """Each has half of the heads; a chunk is there when both have stored theirs."""
    sidecar = world.sidecar()
    ask, branch = Ask(prompt(14, 1000)), Ask(prompt(14, 700) + prompt(15, 100))
    both = world.owner.engine(
        "tp2", {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    )
    both.open(world.options(tensor_parallel_size=2))
    stored = Growth(sidecar)
    cold = both.ask(ask)
    assert cold.num_cached == 0
    stored.reaches(2 * whole_chunks(1000))
    assert {client["rank"] for client in sidecar.get("/v1/clients")["clients"]} >= {0, 1}
    both.reset()
    hit = both.ask(ask)
    assert hit.num_cached == 3 * CHUNK_SIZE
    both.reset()
    answers = both.generate([branch, ask])
    assert [answer.num_cached for answer in answers] == [2 * CHUNK_SIZE, 3 * CHUNK_SIZE]
    sidecar.kill()
    both.reset()
    alone = both.ask(ask)
    sidecar.start()
    eventually(lambda: is_found(both, ask), "both workers find the sidecar again", BACK_S)
    for answer, expected in zip(
        [cold, hit, *answers, alone],
        world.references.answers([ask, ask, branch, ask, ask], LLAMA),
        strict=True,
    ):
        assert_same(answer, expected, TP_TOLERANCE)


@pytest.mark.smoke
def test_every_kind_is_cached_or_refused_with_a_reason() -> None:
    """Of this release's kinds, these are cached; the sentence for the others names the kind."""
    from vllm.v1 import kv_cache_interface

    refusals: dict[str, str] = {}
    for name, kind in inspect.getmembers(kv_cache_interface, inspect.isclass):
        if not issubclass(kind, kv_cache_interface.KVCacheSpec) or name in ABSTRACT:
            continue
        spec = kind.__new__(kind)
        facts = {
            "block_size": 16,
            "sliding_window": 256,
            "attention_chunk_size": 256,
            "mamba_cache_mode": "align",
        }
        for field, value in facts.items():
            object.__setattr__(spec, field, value)
        group = SimpleNamespace(kv_cache_spec=spec, layer_names=("layer",))
        refusals[name] = ""
        try:
            cache_groups(SimpleNamespace(kv_cache_groups=[group]))
        except LayoutError as exc:
            refusals[name] = str(exc)
    cached = {name for name, reason in refusals.items() if not reason}
    assert cached == {
        "ChunkedLocalAttentionSpec",
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "MambaSpec",
        "SlidingWindowMLASpec",
        "SlidingWindowSpec",
    }
    assert all(f"is of {name}: only" in refusals[name] for name in refusals.keys() - cached)
