"""vLLM's interface: what is refused at the start, what is only logged, and what each side
answers to calls of the other.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lmcache_core.integrations.vllm.plan import ChunkRun, Load, StepPlan, WorkerReport
from lmcache_core.integrations.vllm.worker import RefusingWorker
from lmcache_core.wire import messages as m

from tests.fixtures.scripted_sidecar import ScriptedSidecar, scripted_sidecar
from tests.fixtures.vllm_engine import FULL, STATE, Shape
from tests.fixtures.vllm_engine.memory import RankMemory
from tests.fixtures.vllm_engine.parts import output_of, request_of
from tests.fixtures.vllm_engine.shapes import kv_cache_config, vllm_config
from tests.fixtures.vllm_engine.worlds import embedded, with_sidecar

PLAIN = Shape()


def connector_of(
    module: ModuleType,
    model: Path,
    extra: dict[str, Any],
    role: str = "SCHEDULER",
    shape: Shape = PLAIN,
    caches: Any = None,
    **options: Any,
) -> Any:
    """A connector; options of vLLM's configuration may be functions that change it."""
    changes = [options.pop(name) for name in list(options) if callable(options[name])]
    config = vllm_config(shape, model, extra, options.pop("rank", 0), **options)
    for change in changes:
        change(config)
    return module.LMCacheConnector(
        config, module.base.KVConnectorRole[role], caches or kv_cache_config(shape)
    )


def caches_of(*specs: Any) -> Any:
    """vLLM's configuration of two layers with these specs."""
    caches = kv_cache_config(PLAIN)
    (group,) = caches.kv_cache_groups
    by_layer = dict(zip(group.layer_names, specs, strict=True))
    group.kv_cache_spec = SimpleNamespace(kv_cache_specs=by_layer)
    return caches


def known_spec(**changes: Any) -> Any:
    spec = kv_cache_config(PLAIN).kv_cache_groups[0].kv_cache_spec
    return type(spec)(**(vars(spec) | changes))


UNKNOWN_SPEC = type("RSWASpec", (SimpleNamespace,), {})(block_size=4)
LOAD = StepPlan((Load("r", 0, 8, (ChunkRun(0, 0, bytes(32), (5, 6)),)),))


def step(worker: Any, plan: StepPlan) -> Any:
    """One step of a worker; the results of its transfers."""
    worker.bind_connector_metadata(plan)
    worker.start_load_kv(None)
    worker.wait_for_save()
    return worker.get_transfer_results(set())


@pytest.mark.parametrize(
    ("extra", "options", "error"),
    [
        (embedded(chunk_size=10), {}, r"chunk_size=10 .*set \"lmcache.chunk_size\" to 12"),
        (embedded(load="never"), {}, "load='never'"),
        ({}, {}, "no place for KV"),
        (embedded(), {"shape": Shape(num_ranks=2)}, "serves one worker, not 2: run a sidecar"),
    ],
)
@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_impossible_configuration_is_refused_at_the_start(
    module: ModuleType,
    model: Path,
    role: str,
    extra: dict[str, Any],
    options: dict[str, Any],
    error: str,
) -> None:
    with pytest.raises(ValueError, match=error):
        connector_of(module, model, extra, role, **options)


@pytest.mark.parametrize(
    ("says_states", "replays", "reason"),
    [
        (False, False, "vLLM before 0.32 does not say which blocks hold it"),
        (True, True, "use_replayssm: a part of the recurrent state"),
    ],
)
def test_recurrent_state_outside_of_known_blocks_is_not_cached(
    module: ModuleType,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    says_states: bool,
    replays: bool,
    reason: str,
) -> None:
    def change(config: Any) -> None:
        config.cache_config.use_replayssm = replays

    monkeypatch.setattr(module, "SAYS_STATES", says_states)
    shape = Shape((FULL, STATE))
    connector = connector_of(module, model, embedded(chunk_size=4), shape=shape, change=change)
    assert connector.get_num_new_matched_tokens(request_of(), 0) == (0, False)
    assert reason in caplog.text


@pytest.mark.parametrize("part", ["parallel_config", "cache_config"])
def test_unknown_configuration_is_served_without_the_cache(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """Of a newer vLLM: its engine starts, and a worker refuses what is promised to it."""

    def change(config: Any) -> None:
        setattr(config, part, SimpleNamespace())

    scheduler, worker = (
        connector_of(module, model, embedded(), role, change=change)
        for role in ("SCHEDULER", "WORKER")
    )
    assert scheduler.get_num_new_matched_tokens(request_of(), 0) == (0, False)
    assert scheduler.build_connector_meta(output_of()) == StepPlan()
    assert worker.build_connector_worker_meta().is_out
    assert "call failed, continuing without the cache: operation=start" in caplog.text


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
def test_every_call_answers_where_a_model_cannot_be_cached(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture, role: str
) -> None:
    caches = caches_of(UNKNOWN_SPEC, UNKNOWN_SPEC)
    connector = connector_of(module, model, embedded(), role, caches=caches)
    request = request_of()
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
    connector.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([],)), 0)
    assert connector.build_connector_meta(output_of()) == StepPlan()
    connector.register_kv_caches(RankMemory(PLAIN).by_name)
    assert step(connector, StepPlan()).finished_recving == set()
    connector.wait_for_layer_load("layer")
    connector.save_kv_layer("layer", None, None)
    assert connector.get_finished(set()) == (None, None)
    assert connector.get_block_ids_with_load_errors() == set()
    report = connector.build_connector_worker_meta()
    assert report is None if role == "SCHEDULER" else report.is_out
    connector.update_connector_output(
        SimpleNamespace(kv_connector_worker_meta=None, finished_recving=None)
    )
    assert connector.request_finished_all_groups(request, ([],)) == (False, None)
    assert list(connector.take_events()) == []
    assert connector.get_kv_connector_stats() is None
    assert connector.reset_cache()
    connector.shutdown()
    assert caplog.text.count("served without the cache") == 1


def test_worker_that_could_not_open_answers_for_loads(module: ModuleType, model: Path) -> None:
    """The scheduler's side has opened, and promises what other pods have stored: the request would
    wait forever.
    """
    caches = caches_of(known_spec(), UNKNOWN_SPEC)
    worker = connector_of(module, model, embedded(), "WORKER", caches=caches)
    worker.register_kv_caches(RankMemory(PLAIN).by_name)
    results = step(worker, LOAD)
    assert results.finished_recving == results.failed_recving == {"r"}
    assert worker.get_block_ids_with_load_errors() == set()
    report = worker.build_connector_worker_meta()
    assert (report.failed, report.is_out) == ({"r": 0}, True)
    assert worker.build_connector_worker_meta() == WorkerReport(is_out=True)
    worker.shutdown()


def test_worker_whose_memory_is_not_as_declared_answers_for_loads(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = connector_of(module, model, embedded(), "WORKER")
    worker.register_kv_caches({})
    assert "this worker neither loads nor stores" in caplog.text
    for _ in range(2):
        assert step(worker, LOAD).finished_recving == {"r"}
        assert worker.get_block_ids_with_load_errors() == {5, 6}
        assert worker.build_connector_worker_meta().is_out, "in every step"
    worker.shutdown()


@pytest.mark.parametrize("can_all", [True, False])
def test_worker_whose_scales_vllm_would_overwrite_takes_no_part(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture, can_all: bool
) -> None:
    tensors, created = RankMemory(PLAIN).by_name, list[str]()
    able = SimpleNamespace(_ensure_scale_caches=created.append)

    def layer_of(impl: object) -> SimpleNamespace:
        return SimpleNamespace(
            kv_cache="memory",
            kv_cache_dtype="int8_per_token_head",
            impl=impl,
            get_attn_backend=lambda: SimpleNamespace,
        )

    def change(config: Any) -> None:
        layers = map(layer_of, (able, able if can_all else object()))
        context = dict(zip(tensors, layers, strict=True))
        config.compilation_config = SimpleNamespace(static_forward_context=context)

    worker = connector_of(module, model, embedded(), "WORKER", change=change)
    worker.register_kv_caches(tensors)
    report = worker.build_connector_worker_meta()
    assert report.is_out is not can_all
    worker.shutdown()
    assert created == ["memory"] * (2 if can_all else 1)
    reason = "kv_cache_dtype=int8_per_token_head: object keeps scales in its blocks"
    assert (reason in caplog.text) is not can_all


@pytest.mark.parametrize(
    ("sizes", "facts", "is_early"),
    [
        ([16, 16], {}, False),
        ([16], {"zeroing": True}, True),
        ([16, 32], {}, True),
        ([16], {"unit": 4}, True),
        ([16, 32], {"zeroing": True, "unit": 4, "runner": False}, False),
    ],
)
def test_engines_that_write_to_blocks_before_a_step_is_announced(
    module: ModuleType, sizes: list[int], facts: dict[str, Any], is_early: bool
) -> None:
    config = SimpleNamespace(
        use_v2_model_runner=facts.get("runner", True),
        cache_config=SimpleNamespace(prefix_match_unit=facts.get("unit")),
        model_config=SimpleNamespace(enable_sleep_mode=False),
    )
    specs = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=size)) for size in sizes]
    zeroing = facts.get("zeroing", False)
    caches = SimpleNamespace(kv_cache_groups=specs, needs_kv_cache_zeroing=zeroing)
    assert module.overwrites_early(config, caches) is is_early
    config.model_config.enable_sleep_mode = True
    has_hook = hasattr(module.base.KVConnectorBase_V1, "unregister_kv_caches")
    assert module.overwrites_early(config, caches) is (is_early or not has_hook)


def describing(request: m.Message) -> m.Message | None:
    """The answers to a client that starts."""
    return m.Ok() if isinstance(request, m.Describe) else None


def hellos_of(sidecar: ScriptedSidecar) -> list[m.Hello]:
    return [said for said in sidecar.requests if isinstance(said, m.Hello)]


def test_stages_of_a_pipeline_have_their_own_layouts(
    module: ModuleType, model: Path, tmp_path: Path
) -> None:
    """They may have different numbers of layers, and a sidecar refuses two layouts under one
    name.
    """

    def change(config: Any) -> None:
        config.parallel_config.pipeline_parallel_size = 2

    with scripted_sidecar(tmp_path, describing) as sidecar:
        for rank in range(4):
            worker = connector_of(
                module,
                model,
                with_sidecar(sidecar.path),
                "WORKER",
                Shape(num_ranks=2),
                kv_cache_config(PLAIN),
                rank=rank,
                engine_id="e",
                change=change,
            )
            worker.shutdown()
        said = {(hello.client, hello.engine.rank) for hello in hellos_of(sidecar) if hello.engine}
    stages = ["vllm/e/stage0"] * 2 + ["vllm/e/stage1"] * 2
    assert said == set(zip(stages, range(4), strict=True))


def test_loads_and_stores_have_their_own_connections(
    module: ModuleType, model: Path, tmp_path: Path
) -> None:
    with scripted_sidecar(tmp_path, describing) as sidecar:
        for role, expected in (("WORKER", 2), ("SCHEDULER", 1)):
            before = sidecar.num_connections
            connector = connector_of(module, model, with_sidecar(sidecar.path), role)
            assert sidecar.num_connections - before == expected
            connector.shutdown()


def test_layers_that_differ_are_one_layout_for_all_processes(
    module: ModuleType, model: Path, tmp_path: Path
) -> None:
    """vLLM's scheduler knows only the first layer, and a sidecar refuses a client that names
    another layout.
    """
    caches = caches_of(known_spec(), known_spec(num_kv_heads=8))
    with scripted_sidecar(tmp_path, describing) as sidecar:
        extra = with_sidecar(sidecar.path, layout="tokens")
        connector_of(module, model, extra, "WORKER", caches=caches).shutdown()
        connector_of(module, model, extra).shutdown()
        layouts = {hello.engine.layout for hello in hellos_of(sidecar) if hello.engine}
    assert len(layouts) == 1


def test_generation_of_the_gpu_counts_for_chunks_of_blocks(
    module: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with scripted_sidecar(tmp_path, describing) as sidecar:
        extra = with_sidecar(sidecar.path, layout="blocks")
        for capability in (None, (9, 0), (10, 0)):
            platform = module.current_platform
            monkeypatch.setattr(platform, "get_device_capability", lambda found=capability: found)
            connector_of(module, model, extra, "WORKER").shutdown()
        layouts = {hello.engine.layout for hello in hellos_of(sidecar) if hello.engine}
    assert len(layouts) == 3


@pytest.mark.parametrize(("policy", "is_logged"), [("recompute", False), ("fail", True)])
def test_policy_that_ends_requests_is_logged(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture, policy: str, is_logged: bool
) -> None:
    connector_of(module, model, embedded(), policy=policy).shutdown()
    assert ("kv_load_failure_policy" in caplog.text) == is_logged


def test_cache_inside_vllm_that_the_worker_does_not_reach_is_logged(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker comes first where both are in one process."""
    connector_of(module, model, embedded(), engine_id="alone").shutdown()
    assert "runs in another process" in caplog.text
    caplog.clear()
    worker = connector_of(module, model, embedded(), "WORKER", engine_id="together")
    scheduler = connector_of(module, model, embedded(), engine_id="together")
    assert "another process" not in caplog.text
    assert scheduler.requires_kv_delivery is False
    for connector in (scheduler, scheduler, worker):
        connector.shutdown()


@pytest.mark.parametrize("name", ["kv_cache_layout", "lmcache.kv_cache_layout"])
def test_layout_is_asked_for(module: ModuleType, model: Path, name: str) -> None:
    asked_for = module.LMCacheConnector.get_required_kvcache_layout
    assert asked_for(vllm_config(PLAIN, model, embedded(), 0)) is None
    assert asked_for(vllm_config(PLAIN, model, {name: "BLHNC"}, 0)) == "BLHNC"


def test_step_without_metadata_stores_nothing(module: ModuleType, model: Path) -> None:
    """As 0.27 has it in steps without a forward pass."""
    worker = connector_of(module, model, embedded(), "WORKER")
    worker.register_kv_caches(RankMemory(PLAIN).by_name)
    worker.wait_for_save()
    worker.shutdown()


def test_refusing_worker_names_bad_blocks_once() -> None:
    worker = RefusingWorker(reports_blocks=True)
    worker.begin_loads(StepPlan((Load("r", 0, 8, (ChunkRun(0, 0, bytes(32), (0, 6)),), True),)))
    assert worker.take_received() == ({"r"}, {"r"})
    assert worker.take_bad_blocks() == {6}
    assert worker.take_bad_blocks() == set()
