"""vLLM's interface: what is refused at the start, what is only logged, and what each side
answers to calls of the other.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.integrations.vllm.plan import ChunkRun, Load, StepPlan, WorkerReport
from lmcache_core.integrations.vllm.worker import RefusingWorker

from tests.fixtures.fake_vllm import NEW, OLD, imported_connector
from tests.fixtures.scripted_sidecar import scripted_sidecar
from tests.fixtures.sidecar import running_socket
from tests.fixtures.vllm_engine import FULL, STATE, Shape, running
from tests.fixtures.vllm_engine.memory import RankMemory
from tests.fixtures.vllm_engine.parts import output_of, request_of
from tests.fixtures.vllm_engine.shapes import kv_cache_config, vllm_config
from tests.fixtures.vllm_engine.worlds import beside, embedded, prompt

PLAIN = Shape()


def connector_of(
    module: ModuleType,
    model: Path,
    extra: dict[str, Any],
    role: str = "SCHEDULER",
    shape: Shape = PLAIN,
    **options: Any,
) -> Any:
    config = vllm_config(shape, model, extra, 0, **options)
    return module.LMCacheConnector(
        config, module.base.KVConnectorRole[role], kv_cache_config(shape)
    )


def test_it_is_found_by_the_packages_name(module: ModuleType) -> None:
    import lmcache_core.integrations.vllm as package

    assert package.LMCacheConnector is module.LMCacheConnector
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        _ = package.Other


@pytest.mark.parametrize(("release", "has_groups"), [(NEW, True), (OLD, False)])
def test_several_groups_are_taken_where_a_failed_load_of_theirs_can_be_told(
    release: str, has_groups: bool
) -> None:
    with imported_connector(release) as module:
        assert issubclass(module.LMCacheConnector, module.base.SupportsHMA) is has_groups


@pytest.mark.parametrize(
    ("extra", "shape", "error", "complaint"),
    [
        (
            embedded(chunk_size=10),
            PLAIN,
            ValueError,
            r"chunk_size=10 .*block size 4: set \"lmcache.chunk_size\" to 12",
        ),
        (embedded(load="never"), PLAIN, ConfigError, "load='never'"),
        ({}, PLAIN, ConfigError, "no place for KV"),
        (embedded(), Shape(num_ranks=2), ConfigError, "serves one worker, not 2: run a sidecar"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(
    module: ModuleType,
    model: Path,
    extra: dict[str, Any],
    shape: Shape,
    error: type[Exception],
    complaint: str,
) -> None:
    for role in ("SCHEDULER", "WORKER"):
        with pytest.raises(error, match=complaint):
            connector_of(module, model, extra, role, shape)


def test_recurrent_state_is_refused_where_vllm_does_not_say_where_it_is(
    module: ModuleType,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "SAYS_STATES", False)
    shape = Shape((FULL, STATE))
    config = vllm_config(shape, model, embedded(chunk_size=4), 0)
    connector = module.LMCacheConnector(
        config, module.base.KVConnectorRole.SCHEDULER, kv_cache_config(shape)
    )
    assert connector.get_num_new_matched_tokens(request_of(), 0) == (0, False)
    assert "vLLM before 0.32 does not say which blocks hold it" in caplog.text


def test_state_outside_of_blocks_is_refused(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = Shape((FULL, STATE))
    config = vllm_config(shape, model, embedded(chunk_size=4), 0)
    config.cache_config.use_replayssm = True
    module.LMCacheConnector(config, module.base.KVConnectorRole.SCHEDULER, kv_cache_config(shape))
    assert "use_replayssm: a part of the recurrent state" in caplog.text


@pytest.mark.parametrize("part", ["parallel_config", "cache_config"])
def test_a_configuration_of_another_shape_is_served_without(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """A newer vLLM may have it: its engine starts, and a worker refuses what is promised to it."""
    config = vllm_config(PLAIN, model, embedded(), 0)
    setattr(config, part, SimpleNamespace())
    roles = module.base.KVConnectorRole
    scheduler, worker = (
        module.LMCacheConnector(config, role, kv_cache_config(PLAIN)) for role in roles
    )
    assert scheduler.get_num_new_matched_tokens(request_of(), 0) == (0, False)
    assert scheduler.build_connector_meta(output_of()) == StepPlan()
    assert worker.build_connector_worker_meta().is_out
    assert "call failed, continuing without the cache: operation=start" in caplog.text


def test_a_model_that_cannot_be_cached_is_served_without(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every call answers as if there were no cache."""
    config, caches = vllm_config(PLAIN, model, embedded(), 0), kv_cache_config(PLAIN)
    caches.kv_cache_groups[0].kv_cache_spec = type("RSWASpec", (SimpleNamespace,), {})(block_size=4)
    for role in module.base.KVConnectorRole:
        connector = module.LMCacheConnector(config, role, caches)
        request = request_of()
        connector.on_new_request(request)
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        connector.update_state_after_alloc(request, SimpleNamespace(get_block_ids=lambda: ([],)), 0)
        assert connector.build_connector_meta(output_of()) == StepPlan()
        connector.register_kv_caches(RankMemory(PLAIN).by_name)
        connector.bind_connector_metadata(StepPlan())
        connector.start_load_kv(None)
        connector.wait_for_layer_load("layer")
        connector.save_kv_layer("layer", None, None)
        connector.wait_for_save()
        assert connector.get_transfer_results(set()).finished_recving == set()
        assert connector.get_finished(set()) == (None, None)
        assert connector.get_block_ids_with_load_errors() == set()
        report = connector.build_connector_worker_meta()
        assert report is None if role is module.base.KVConnectorRole.SCHEDULER else report.is_out
        connector.update_connector_output(
            SimpleNamespace(kv_connector_worker_meta=None, finished_recving=None)
        )
        assert connector.request_finished_all_groups(request, ([],)) == (False, None)
        assert list(connector.take_events()) == []
        assert connector.get_kv_connector_stats() is None
        assert connector.reset_cache()
        connector.shutdown()
    assert caplog.text.count("served without the cache") == 2


def test_a_worker_that_could_not_open_answers_for_loads(module: ModuleType, model: Path) -> None:
    """The scheduler's side has opened, and promises what other pods have stored: the request
    would wait for ever.
    """
    caches = kv_cache_config(PLAIN)
    (group,) = caches.kv_cache_groups
    spec, other = group.kv_cache_spec, type("RSWASpec", (SimpleNamespace,), {})(block_size=4)
    group.kv_cache_spec = SimpleNamespace(
        kv_cache_specs=dict(zip(group.layer_names, (spec, other), strict=True))
    )
    config = vllm_config(PLAIN, model, embedded(), 0)
    worker = module.LMCacheConnector(config, module.base.KVConnectorRole.WORKER, caches)
    worker.register_kv_caches(RankMemory(PLAIN).by_name)
    run = ChunkRun(0, 0, bytes(32), (5, 6))
    worker.bind_connector_metadata(StepPlan((Load("r", 0, 8, (run,)),)))
    worker.start_load_kv(None)
    worker.wait_for_save()
    results = worker.get_transfer_results(set())
    assert results.finished_recving == results.failed_recving == {"r"}
    assert worker.get_block_ids_with_load_errors() == set()
    report = worker.build_connector_worker_meta()
    assert (report.failed, report.is_out) == ({"r": 0}, True)
    assert worker.build_connector_worker_meta() == WorkerReport(is_out=True)
    worker.shutdown()


def test_a_worker_whose_memory_is_not_as_declared_answers_for_loads(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = connector_of(module, model, embedded(), "WORKER")
    worker.register_kv_caches({})
    assert "this worker neither loads nor stores" in caplog.text
    for _ in range(2):
        run = ChunkRun(0, 0, bytes(32), (5, 6))
        worker.bind_connector_metadata(StepPlan((Load("r", 0, 8, (run,)),)))
        worker.start_load_kv(None)
        worker.wait_for_save()
        assert worker.get_transfer_results(set()).finished_recving == {"r"}
        assert worker.get_block_ids_with_load_errors() == {5, 6}
        assert worker.build_connector_worker_meta().is_out, "it is said in every step"
    worker.shutdown()


def test_a_worker_whose_scales_vllm_would_overwrite_takes_no_part(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = vllm_config(PLAIN, model, embedded(), 0)
    tensors = RankMemory(PLAIN).by_name
    created = []

    def layer_of(impl: object) -> SimpleNamespace:
        return SimpleNamespace(
            kv_cache="memory",
            kv_cache_dtype="int8_per_token_head",
            impl=impl,
            get_attn_backend=lambda: SimpleNamespace,
        )

    can = SimpleNamespace(_ensure_scale_caches=created.append)
    for impls in ((can, can), (can, object())):
        context = dict(zip(tensors, map(layer_of, impls), strict=True))
        config.compilation_config = SimpleNamespace(static_forward_context=context)
        role = module.base.KVConnectorRole.WORKER
        worker = module.LMCacheConnector(config, role, kv_cache_config(PLAIN))
        worker.register_kv_caches(tensors)
        assert (worker._worker is worker._worker_side) is (impls == (can, can))
        worker.shutdown()
    assert created == ["memory"] * 3
    assert "kv_cache_dtype=int8_per_token_head: object keeps scales in its blocks" in caplog.text


def test_which_engines_tell_of_a_step_after_writing_to_its_blocks(
    module: ModuleType, model: Path
) -> None:
    def told_late(
        *sizes: int,
        runner: bool = True,
        zeroing: bool = False,
        unit: int | None = None,
        sleeps: bool = False,
    ) -> bool:
        specs = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=n)) for n in sizes]
        caches = SimpleNamespace(kv_cache_groups=specs, needs_kv_cache_zeroing=zeroing)
        cache_config = SimpleNamespace(prefix_match_unit=unit)
        config = SimpleNamespace(
            use_v2_model_runner=runner,
            cache_config=cache_config,
            model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        )
        return bool(module.overwrites_early(config, caches))

    assert not told_late(16)
    assert not told_late(16, 16)
    assert told_late(16, zeroing=True)
    assert told_late(16, 32)
    assert told_late(16, unit=4)
    assert not told_late(16, 32, zeroing=True, unit=4, runner=False)
    has_hook = hasattr(module.base.KVConnectorBase_V1, "unregister_kv_caches")
    assert told_late(16, sleeps=True) is not has_hook


def test_an_older_vllm_hears_of_the_blocks_of_such_a_worker(model: Path) -> None:
    worker = RefusingWorker(reports_blocks=True)
    worker.begin_loads(StepPlan((Load("r", 0, 8, (ChunkRun(0, 0, bytes(32), (0, 6)),), True),)))
    assert worker.take_received() == ({"r"}, {"r"})
    assert worker.take_bad_blocks() == {6}
    assert worker.take_bad_blocks() == set()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_half_a_role_is_refused(module: ModuleType, model: Path, role: str) -> None:
    """For a producer vLLM gives blocks away that a step underway still writes to: what is loaded
    into them would not last.
    """
    with pytest.raises(ConfigError, match=f'kv_role="{role}".* set kv_role to "kv_both"'):
        connector_of(module, model, embedded(), kv_role=role)


def test_stages_of_a_pipeline_have_layouts_of_their_own(
    module: ModuleType, model: Path, tmp_path: Path
) -> None:
    """They may have different numbers of layers, and a sidecar refuses two layouts under one
    name.
    """
    hellos = []
    for rank in range(4):
        config = vllm_config(
            Shape(num_ranks=2), model, beside(tmp_path / "s.sock"), rank, engine_id="e"
        )
        config.parallel_config.pipeline_parallel_size = 2
        worker = module.LMCacheConnector(
            config, module.base.KVConnectorRole.WORKER, kv_cache_config(PLAIN)
        )
        hellos.append(worker._open_store.store._link._hello)
        worker.shutdown()
    assert [hello.client for hello in hellos] == ["vllm/e/stage0"] * 2 + ["vllm/e/stage1"] * 2
    assert [hello.engine.rank for hello in hellos] == [0, 1, 2, 3]


def test_loads_and_stores_have_connections_of_their_own(
    module: ModuleType, model: Path, tmp_path: Path
) -> None:
    roles = module.base.KVConnectorRole
    with scripted_sidecar(tmp_path, lambda request: None) as sidecar:
        for role, expected in ((roles.WORKER, 2), (roles.SCHEDULER, 1)):
            before = sidecar.num_connections
            config = vllm_config(PLAIN, model, beside(sidecar.path), 0)
            connector = module.LMCacheConnector(config, role, kv_cache_config(PLAIN))
            assert sidecar.num_connections - before == expected
            connector.shutdown()


def test_layers_that_differ_are_one_layout_for_all_processes(
    module: ModuleType, model: Path, tmp_path: Path
) -> None:
    """vLLM tells its scheduler of the first layer alone, and a sidecar refuses a client that
    names another layout.
    """
    roles, told = module.base.KVConnectorRole, kv_cache_config(PLAIN)
    (group,) = told.kv_cache_groups
    spec = group.kv_cache_spec
    other = type(spec)(**(vars(spec) | {"num_kv_heads": 8}))
    caches = kv_cache_config(PLAIN)
    by_layer = dict(zip(group.layer_names, (spec, other), strict=True))
    caches.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(kv_cache_specs=by_layer)
    with running_socket(tmp_path) as sidecar:
        config = vllm_config(PLAIN, model, beside(sidecar.path, layout="tokens"), 0)
        worker = module.LMCacheConnector(config, roles.WORKER, caches)
        scheduler = module.LMCacheConnector(config, roles.SCHEDULER, told)
        assert worker._open_store.store._link.connection is not None
        assert scheduler._open_store.store._link.connection is not None
        worker.shutdown()
        scheduler.shutdown()


def test_blocks_are_of_a_gpus_generation(
    module: ModuleType, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts = []
    for capability in (None, (9, 0), (10, 0)):
        monkeypatch.setattr(
            module.current_platform, "get_device_capability", lambda told=capability: told
        )
        connector = connector_of(module, model, embedded(layout="blocks"), "WORKER")
        layouts.append(connector._worker_side._metadata.layout)
        connector.shutdown()
    assert len(set(layouts)) == 3


@pytest.mark.parametrize(("policy", "is_warned"), [("recompute", False), ("fail", True)])
def test_the_policy_that_ends_requests_is_warned_of(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture, policy: str, is_warned: bool
) -> None:
    connector_of(module, model, embedded(), policy=policy).shutdown()
    assert ("kv_load_failure_policy" in caplog.text) == is_warned


def test_a_cache_inside_vllm_that_the_worker_does_not_reach(
    module: ModuleType, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM with processes of their own: the worker comes first where both are in one."""
    connector_of(module, model, embedded(), engine_id="alone").shutdown()
    assert "runs in another process" in caplog.text
    caplog.clear()
    worker = connector_of(module, model, embedded(), "WORKER", engine_id="together")
    connector_of(module, model, embedded(), engine_id="together").shutdown()
    worker.shutdown()
    assert "another process" not in caplog.text


def test_losing_a_store_is_no_loss_of_a_request(module: ModuleType, model: Path) -> None:
    connector = connector_of(module, model, embedded())
    assert connector.requires_kv_delivery is False
    connector.shutdown()
    connector.shutdown()


@pytest.mark.parametrize("name", ["kv_cache_layout", "lmcache.kv_cache_layout"])
def test_a_layout_is_asked_for(module: ModuleType, model: Path, name: str) -> None:
    connector = module.LMCacheConnector
    assert connector.get_required_kvcache_layout(vllm_config(PLAIN, model, embedded(), 0)) is None
    assert (
        connector.get_required_kvcache_layout(vllm_config(PLAIN, model, {name: "BLHNC"}, 0))
        == "BLHNC"
    )


def test_a_step_without_metadata_stores_nothing(module: ModuleType, model: Path) -> None:
    """As 0.27 has it in steps without a forward pass."""
    worker = connector_of(module, model, embedded(), "WORKER")
    worker.register_kv_caches(RankMemory(PLAIN).by_name)
    worker.wait_for_save()
    worker.shutdown()


def test_figures_are_handed_over(module: ModuleType, model: Path) -> None:
    with running(module, model, embedded()) as engine:
        engine.ask(prompt(1, 43))
        engine.forget()
        worker = engine.workers[0].connector
        worker.get_kv_connector_stats()
        request = engine.add(prompt(1, 43))
        told: dict[str, int] = {}
        take = worker.get_kv_connector_stats

        def listen() -> Any:
            stats = take()
            told.update({} if stats is None else stats.reduce())
            return stats

        worker.get_kv_connector_stats = listen
        engine.run()
        assert engine.tally(request).num_loads == 1
    assert (told["retrieved_tokens"], told["retrieved_chunks"]) == (40, 5)
