"""The sidecar as a secondary tier behind vLLM's own offloading: its real manager and host memory,
and whole engines without a GPU.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import resource
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_core.engine.transfer import KVTransfer
from lmcache_core.errors import ConfigError

from tests.vllm.engines import BLOCK_SIZE, Ask, engine_options, release, running_engine
from tests.vllm.models import EAGLE, GATED_DELTA, LLAMA, LOCAL, MAMBA2, MLA, MTP, SHARED, SLIDING
from tests.vllm.processes import Service
from tests.vllm.references import prompt
from tests.vllm.sidecars import await_calm, eventually, socket_of
from tests.vllm.tiering import CHUNK_BYTES, JOB_BOUND_S, NUM_ROWS, Offloading
from tests.vllm.worlds import World

pytestmark = pytest.mark.since("0.31")

NUM_JOBS = int(os.environ.get("LMC_TIER_JOBS", "400"))
"""Jobs of the run with faults."""


@contextlib.contextmanager
def offloading(world: World, **options: Any) -> Iterator[Offloading]:
    one = Offloading(socket_of(world.owner), **options)
    try:
        yield one
    finally:
        one.close()


def test_chunks_of_one_engine_are_loaded_by_another(world: World) -> None:
    """Also if its workers are as many again: the bytes of a chunk are the same."""
    world.sidecar()
    numbers = list(range(20))
    with offloading(world) as first:
        first.store(numbers)
        first.await_jobs()
    with offloading(world, world_size=2, tp_size=2) as second:
        assert second.load([*numbers, 99]) == [True] * 20 + [False]
    with offloading(world, identity="other weights") as third:
        assert not any(third.load(numbers))


def test_each_call_may_come_from_another_thread(world: World) -> None:
    """In vLLM 0.33 a thread of its own calls every tier where one of them serves peers."""
    world.sidecar()
    with offloading(world) as one:

        def in_thread(call: Any, *args: Any) -> Any:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(call, *args).result(JOB_BOUND_S)

        in_thread(one.store, list(range(20)))
        in_thread(one.await_jobs)
    with offloading(world) as other:
        assert in_thread(other.load, [*range(20), 99]) == [True] * 20 + [False]
        (tier,) = other.manager.secondary_tiers
        assert tuple(tier.config_info()) == tier.config_info_keys({})


@pytest.mark.since("0.33")
@pytest.mark.smoke
def test_vllm_asks_only_in_its_steps(world: World) -> None:
    """Nothing that ends between them matters before the next one, and a thread that asks 1,000
    times a second takes 3 % of a processor.
    """
    with offloading(world) as one:
        one.store([1])
        one.await_jobs()
        assert "vllm_offload_tier_poll" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.since("0.32")
def test_vllm_learns_what_the_sidecar_gains_and_loses(world: World) -> None:
    """Whether it is in the sidecar's memory or on its disk, it is in storage for vLLM."""
    from vllm.v1.kv_offload.base import Medium

    sidecar = world.sidecar(disk_path=world.owner.directory / "disk", disk_gb=1)
    with offloading(world, kv_events=True) as one:
        there: set[bytes] = set()

        def holds(number: int) -> bool:
            for event in one.take_events():
                if event.medium is not Medium.STORAGE:
                    continue
                assert (event.ownership, event.locality) == (None, None), "or routers ignore it"
                assert there.isdisjoint(event.keys) != event.removed
                there.symmetric_difference_update(event.keys)
            return len(there) == number

        one.store(list(range(20)))
        one.await_jobs()
        eventually(lambda: holds(20), "what was stored is told")
        sidecar.post("/v1/admin/evict", {"num_bytes": 1 << 30})
        sidecar.post("/v1/admin/clear", {"tiers": ["disk"]})
        eventually(lambda: holds(0), "what is gone is taken back")
        one.store(list(range(20, 30)))
        one.await_jobs()
        eventually(lambda: holds(10), "what was stored is told")
        one.reset_cache()
        eventually(lambda: holds(0), "it will not be found again")


def test_caches_that_were_reset_share_nothing_any_more(world: World) -> None:
    """vLLM resets its caches when weights change, and does not say why."""
    world.sidecar()
    with offloading(world) as engine, offloading(world) as other:
        engine.store([1, 2])
        engine.await_jobs()
        engine.reset_cache()
        assert not any(engine.load([1, 2]))
        engine.store([3])
        engine.await_jobs()
        assert other.load([1, 2, 3]) == [True, True, False]


def test_a_job_that_does_not_end_is_given_up(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has failed, and neither touches vLLM's memory nor stores anything afterwards."""
    from lmcache_core.integrations.vllm import tier as module

    world.sidecar()
    monkeypatch.setattr(module, "DRAIN_S", 0.01)
    with offloading(world) as engine:
        engine.store([1])
        engine.await_jobs()
        may_go_on, have_begun = threading.Event(), queue.SimpleQueue[str]()

        def hung(begin: Any, kind: str) -> Any:
            def call(*args: Any) -> Any:
                have_begun.put(kind)
                assert may_go_on.wait(JOB_BOUND_S)
                return begin(*args)

            return call

        monkeypatch.setattr(KVTransfer, "store", hung(KVTransfer.store, "store"))
        engine.store([2, 3])
        engine.step()
        assert have_begun.get(timeout=JOB_BOUND_S) == "store"
        engine.reset_cache()
        engine.rows[:] = 7
        may_go_on.set()
        engine.store([4])
        engine.await_jobs()
        assert engine.load([1, 2, 3, 4]) == [False, False, False, True]


def test_stores_never_keep_all_of_the_host_memory(world: World) -> None:
    sidecar = world.sidecar()
    with offloading(world) as engine:
        engine.store([1])
        engine.await_jobs()
        sidecar.freeze()
        try:
            for first in range(2, 2 + NUM_ROWS, 8):
                engine.store(range(first, first + 8))
                engine.step()
            engine.store([0])
            assert engine.load([0]) == [True], "there is room for what comes next"
        finally:
            sidecar.thaw()
        engine.await_jobs()


@pytest.mark.smoke
def test_without_a_sidecar_nothing_is_found_and_nothing_waits(world: World) -> None:
    with offloading(world) as engine:
        engine.store([1, 2, 3])
        engine.await_jobs()
        assert engine.load([1, 2, 3]) == [True] * 3, "in vLLM's own memory"
        began = time.monotonic()
        assert not any(engine.load(range(100, 120)))
        assert time.monotonic() - began < JOB_BOUND_S / 4
        world.sidecar()

        def is_back() -> bool:
            engine.store([number := 1000 + engine._num_requests])
            engine.await_jobs()
            with offloading(world) as other:
                return other.load([number]) == [True]

        eventually(is_back, "the sidecar is found")


def _flip(arena: Path, dice: random.Random, share: float) -> None:
    """Damage that share of an arena's pages."""
    file = arena / "kv.arena"
    with file.open("r+b") as memory:
        for at in range(0, file.stat().st_size, 4096):
            memory.seek(at)
            if dice.random() < share and any(head := memory.read(8)):
                memory.seek(at)
                memory.write(bytes(byte ^ 0x40 for byte in head))


@pytest.mark.smoke
def test_a_damaged_chunk_is_not_loaded(world: World) -> None:
    arena = world.owner.directory / "arena"
    world.sidecar(arena_path=arena)
    with offloading(world) as one, offloading(world) as other:
        one.store(range(8))
        one.await_jobs()
        _flip(arena, random.Random(0), 1.0)
        assert not any(other.load(range(8)))

    def is_mended() -> bool:
        """Each look finds one more damaged chunk, which is then computed and stored."""
        with offloading(world) as engine:
            if all(engine.load(range(8))):
                return True
            engine.store(range(8))
            engine.await_jobs()
            return False

    eventually(is_mended, "damaged chunks are replaced")


def _hurt(sidecar: Service, directory: Path, dice: random.Random) -> None:
    """Do something to the sidecar, and undo what lasts."""
    chunks = [path for path in (directory / "disk").rglob("*") if path.is_file()]
    match dice.choice(("kill", "freeze", "flip", "truncate", "swap", "no_space", "nothing")):
        case "kill":
            sidecar.kill()
            sidecar.start()
        case "freeze":
            sidecar.freeze()
            time.sleep(dice.uniform(0.0, 3.0))
            sidecar.thaw()
        case "flip":
            _flip(directory / "arena", dice, 0.1)
        case "truncate" if chunks:
            with contextlib.suppress(FileNotFoundError):  # evicted just now
                os.truncate(dice.choice(chunks), dice.randrange(CHUNK_BYTES))
        case "swap" if len(chunks) > 1:
            one, other = dice.sample(chunks, 2)
            with contextlib.suppress(FileNotFoundError):
                content = one.read_bytes(), other.read_bytes()
                other.write_bytes(content[0])
                one.write_bytes(content[1])
        case "no_space":  # files end early, as on a disk that is full
            resource.prlimit(sidecar.pid, resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            threading.Timer(dice.uniform(0.0, 2.0), _allow_files, [sidecar.pid]).start()


def _allow_files(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        unlimited = resource.RLIM_INFINITY
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (unlimited, unlimited))


def test_many_jobs_with_faults(world: World) -> None:
    """Nothing wrong, nothing hung, nothing lost track of: SIGKILL, SIGSTOP, damaged memory, files
    that are cut or exchanged, no space for files, and an arena and a disk that are too small.
    """
    directory = world.owner.directory
    sidecar = world.sidecar(
        arena_path=directory / "arena", arena_gb=0.006, disk_path=directory / "disk", disk_gb=0.01
    )
    dice = random.Random(1)
    num_found, num_jobs = 0, 0
    with offloading(world, num_rows=48) as one, offloading(world, num_rows=48) as other:
        while num_jobs < NUM_JOBS:
            first = dice.randrange(400)
            numbers = range(first, first + dice.randint(1, 10))
            engine = dice.choice((one, other))
            if dice.random() < 0.5:
                engine.store(numbers)
            else:
                num_found += sum(engine.load(numbers))
            num_jobs += 1
            if dice.random() < max(20 / NUM_JOBS, 1 / 400):
                _hurt(sidecar, directory, dice)
        one.await_jobs()
        other.await_jobs()
        assert num_found > NUM_JOBS / 10

        def is_well() -> bool:
            numbers = [dice.randrange(1 << 40) for _ in range(4)]
            one.store(numbers)
            one.await_jobs()
            return all(other.load(numbers))

        eventually(is_well, "chunks are found again", 60.0)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        pytest.param(LLAMA, "float32", marks=pytest.mark.smoke),
        (SLIDING, "float32"),
        (MLA, "float32"),
        (LOCAL, "float32"),
        (SHARED, "float32"),
        pytest.param(GATED_DELTA, "bfloat16", marks=pytest.mark.smoke),
        pytest.param(MAMBA2, "float32", marks=pytest.mark.since("0.32")),
    ],
)
def test_an_engine_loads_what_another_has_computed(world: World, model: str, dtype: str) -> None:
    """vLLM's real scheduler, and tokens; `host_offloading.py` says what is not real."""
    sidecar = world.sidecar()
    ask, branch = Ask(prompt(70, 1000)), Ask(prompt(70, 600) + prompt(71, 300))
    # Of Mamba-2, vLLM 0.32 saves no state inside of a step on a CPU
    step = 256 if model == MAMBA2 else 512
    options = _options(world, model, dtype=dtype, max_num_batched_tokens=step)
    with running_engine(options) as first:
        cold = first.ask(ask)
        await_calm(sidecar)
    with running_engine(options) as second:
        hit, branched = second.ask(ask), second.ask(branch)
        # vLLM's choice for some models, which depends on the processor
        block_size = second.llm.llm_engine.vllm_config.cache_config.block_size
    assert cold.num_cached == 0
    assert hit.num_cached == 1000 // block_size * block_size
    if model in (LLAMA, MLA):  # vLLM offloads neither what lies before a window nor every state
        assert branched.num_cached == 600 // block_size * block_size
    world.references.check([cold, hit, branched], [ask, ask, branch], model, dtype)


@pytest.mark.parametrize(
    ("model", "drafts"),
    [
        pytest.param(LLAMA, {"method": "eagle", "model": EAGLE}, marks=pytest.mark.smoke),
        (MTP, {"method": "mtp"}),
    ],
    ids=["eagle", "mtp"],
)
def test_hits_with_drafts(world: World, model: str, drafts: dict[str, Any]) -> None:
    sidecar = world.sidecar()
    ask = Ask(prompt(72, 300) * 3, num_new=40)
    answers = []
    for name in ("first", "second"):
        engine = world.owner.engine(name)
        engine.open(_options(world, model, speculative_config=world.speculative(drafts)))
        answers.append(engine.ask(ask))
        assert engine.metrics()["vllm:spec_decode_num_draft_tokens"] > 0
        await_calm(sidecar)
        engine.end()
    # Since 0.33 a hit ends a block earlier: the draft's KV in the last one depends on what follows
    num_blocks = 900 // BLOCK_SIZE - (release() >= (0, 33))
    assert [answer.num_cached for answer in answers] == [0, num_blocks * BLOCK_SIZE]
    world.references.check(answers, [ask, ask], model)


def _options(world: World, model: str, **options: Any) -> dict[str, Any]:
    return engine_options(
        world.models / model,
        enable_prefix_caching=True,
        kv_transfer_config=_transfer(str(socket_of(world.owner))),
        **options,
    )


def _transfer(socket: str) -> dict[str, Any]:
    tier = {
        "type": "LMCacheTier",
        "module_path": "lmcache_core.integrations.vllm_tier",
        "sidecar_socket": socket,
    }
    return {
        "kv_connector": "LMCacheOffloadingConnector",
        "kv_connector_module_path": "lmcache_core.integrations.vllm_tier",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.vllm.host_offloading",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [tier],
        },
    }


def _config(world: World, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    model = options.pop("model", LLAMA)
    arguments = engine_options(
        world.models / model, kv_transfer_config=_transfer("/run/s"), **options
    )
    return EngineArgs(**arguments).create_engine_config()


@pytest.mark.smoke
def test_an_engine_s_identity(world: World) -> None:
    # No public door: of what is stored under an identity nothing shows which it was.
    from lmcache_core.integrations.vllm.tier import _identity

    kv = SimpleNamespace(kv_cache_groups=[], kv_cache_layout="LBHNC")
    plain = _identity(_config(world), kv, {})
    assert plain == _identity(_config(world), kv, {})
    others = [
        _identity(_config(world, model=SLIDING), kv, {}),
        _identity(_config(world, dtype="bfloat16"), kv, {}),
        _identity(_config(world, prefix_caching_hash_algo="sha256_cbor"), kv, {}),
    ]
    assert len({plain, *others}) == 4
    assert None not in others
    assert _identity(_config(world, enable_lora=True, max_lora_rank=8), kv, {}) is None
    named = {"identity": "x"}
    adapted = _identity(_config(world, enable_lora=True, max_lora_rank=8), kv, named)
    some = _config(world, enable_lora=True, max_lora_rank=8, lora_target_modules=["q_proj"])
    assert len({adapted, _identity(some, kv, named), _identity(_config(world), kv, named)}) == 3
    rotated = _config(world, hf_overrides={"rope_theta": 5e5})
    assert _identity(rotated, kv, named) != _identity(_config(world), kv, named)


@pytest.mark.smoke
def test_refused_settings(world: World) -> None:
    from lmcache_core.integrations.vllm_tier import LMCacheOffloadingConnector

    config = _config(world)
    config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"] = []
    with pytest.raises(ConfigError, match=r"secondary_tiers.*LMCacheTier"):
        LMCacheOffloadingConnector(config, None, None)
    with pytest.raises(ConfigError, match="LMCacheOffloadingConnector"):
        Offloading(socket_of(world.owner), identity="")
