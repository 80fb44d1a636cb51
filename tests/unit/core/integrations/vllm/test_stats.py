"""Figures for vLLM's log line and its Prometheus endpoint, and log lines among vLLM's."""

from __future__ import annotations

import importlib
import io
import logging
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from lmcache_core.integrations.vllm.logs import log_as
from lmcache_core.record import StagedFrom
from lmcache_core.telemetry import (
    FAILED_CALLS_TOTAL,
    PINNED_BYTES,
    RETRIEVED_TOKENS_TOTAL,
    STORE_SECONDS,
)
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.fixtures.fake_vllm import NEW, OLD, imported_connector
from tests.fixtures.vllm_engine import running
from tests.fixtures.vllm_engine.worlds import embedded, prompt

NAME = "lmcache_core.integrations.vllm.stats"


def test_growth_is_reported_once(module: ModuleType, model: Path) -> None:
    with running(module, model, embedded()) as engine:
        engine.ask(prompt(1, 43))
        engine.forget()
        worker, figures = engine.workers[0].connector, dict[str, float]()
        take = worker.get_kv_connector_stats
        take()
        request = engine.add(prompt(1, 43))

        def noted() -> Any:
            stats = take()
            figures.update({} if stats is None else stats.reduce())
            return stats

        worker.get_kv_connector_stats = noted
        engine.run()
        assert engine.tally(request).num_loads == 1
        engine.settle()
        take()
        assert take() is None
    assert (figures["retrieved_tokens"], figures["retrieved_chunks"]) == (40, 5)
    assert figures["mean_load_bytes"] == figures["retrieved_bytes"]
    assert figures["mean_load_seconds"] > 0


def test_what_is_pinned_is_reported_when_it_changes(module: ModuleType, model: Path) -> None:
    with running(module, model, embedded()) as engine:
        worker, pinned = engine.workers[0].connector, [0]
        worker._counters.watch(PINNED_BYTES, lambda: pinned[-1])
        reported = []
        for num_bytes in (300, 300, 200):
            pinned.append(num_bytes)
            stats = worker.get_kv_connector_stats()
            reported.append(None if stats is None else stats.data)
        assert reported == [{PINNED_BYTES: 300}, None, {PINNED_BYTES: -100}]


def test_figures_of_workers_are_added(module: ModuleType) -> None:
    stats = module.LMCacheStats
    whole = stats(data={"a": 1, "b": 2}).aggregate(stats(data={"b": 3, "c": 4}))
    assert whole.data == whole["data"] == {"a": 1, "b": 5, "c": 4}
    assert not whole.is_empty()
    whole.reset()
    assert whole.is_empty()
    assert stats(data={"a": 0}).is_empty()
    several = stats(data={STORE_SECONDS: [0.5]}).aggregate(stats(data={STORE_SECONDS: [1.0, 3.0]}))
    assert several.data == {STORE_SECONDS: [0.5, 1.0, 3.0]}
    assert several.reduce() == {"mean_store_seconds": 1.5}
    named = stats(data={RETRIEVED_TOKENS_TOTAL: 48, FAILED_CALLS_TOTAL: 0})
    assert named.reduce() == {"retrieved_tokens": 48}


def kinds_of(registry: CollectorRegistry) -> dict[Any, Any]:
    """vLLM's makers of metrics, in a registry of the test's own."""

    def make(kind: Any) -> Any:
        return lambda **options: kind(registry=registry, **options)

    return {kind: make(kind) for kind in (Counter, Gauge, Histogram)}


def test_prometheus(module: ModuleType) -> None:
    registry = CollectorRegistry()
    labels = {0: ["model", "0"], 1: ["model", "1"]}
    metrics = module.LMCacheConnector.build_prom_metrics(
        SimpleNamespace(), kinds_of(registry), ["model_name", "engine"], labels
    )
    metrics.observe({RETRIEVED_TOKENS_TOTAL: 40, "something new": 1}, engine_idx=1)
    metrics.observe({RETRIEVED_TOKENS_TOTAL: 8}, engine_idx=1)
    metrics.observe({STORE_SECONDS: [0.002, 0.2]}, engine_idx=1)
    name = "vllm:" + RETRIEVED_TOKENS_TOTAL
    first, second = ({"model_name": "model", "engine": engine} for engine in "01")
    assert [registry.get_sample_value(name, labels) for labels in (first, second)] == [0, 48]
    for change in (300, 0, -100):
        metrics.observe({PINNED_BYTES: change}, engine_idx=1)
    name = "vllm:" + PINNED_BYTES
    assert registry.get_sample_value(name, second) == 200, "a gauge: it also falls"
    name = "vllm:" + STORE_SECONDS
    assert registry.get_sample_value(f"{name}_sum", second) == pytest.approx(0.202)
    assert registry.get_sample_value(f"{name}_bucket", second | {"le": "0.003"}) == 1
    assert registry.get_sample_value(f"{name}_count", first) == 0


def test_class_is_known_by_name_where_figures_are_read(module: ModuleType) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for _ in range(2):
        kinds = kinds_of(CollectorRegistry())
        module.LMCacheConnector.build_prom_metrics(
            SimpleNamespace(), kinds, ["model_name"], {0: ["model"]}
        )
        found = KVConnectorFactory.get_connector_class_by_name("LMCacheConnector")
        assert found is module.LMCacheConnector


def test_sources_of_hits_have_vllms_names() -> None:
    origins = {
        StagedFrom.HOT: 8,
        StagedFrom.DISK: 16,
        StagedFrom.PEER: 24,
        StagedFrom.REMOTE: 32,
        StagedFrom.OTHER: 40,
        255: 1,  # of a later sidecar; it must not end the engine
    }
    with imported_connector(NEW):
        stats = importlib.import_module(NAME)
        assert stats.HIT_SOURCE.value == "host"
        named = {source.value: count for source, count in stats.hit_sources(origins).items()}
        assert named == {"host": 8, "disk": 16, "p2p": 24, "external_unspecified": 73}
        assert stats.hit_sources({}) == {}
    with imported_connector(OLD):
        assert importlib.import_module(NAME).HIT_SOURCE is None, "vLLM before 0.32 has none"


def logger_of(
    manager: logging.Manager,
    name: str,
    stream: io.StringIO | None = None,
    level: int = logging.NOTSET,
) -> logging.Logger:
    logger = manager.getLogger(name)
    logger.setLevel(level)
    if stream is not None:
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
        logger.addHandler(handler)
    return logger


@pytest.fixture
def manager() -> logging.Manager:
    """Loggers apart from those of this process."""
    return logging.Manager(logging.RootLogger(logging.WARNING))


@pytest.mark.parametrize(
    ("level", "seen"), [(logging.INFO, "INFO ours.sidecar connected\n"), (logging.WARNING, "")]
)
def test_lines_go_where_those_of_vllm_go(manager: logging.Manager, level: int, seen: str) -> None:
    stream = io.StringIO()
    theirs, ours = logger_of(manager, "theirs", stream, level), logger_of(manager, "ours")
    for _ in range(2):  # scheduler and worker in one process
        log_as(theirs, ours)
    manager.getLogger("ours.sidecar").info("connected")
    manager.getLogger("ours.sidecar").debug("and so on")
    assert stream.getvalue() == seen


@pytest.mark.parametrize("configured", ["ours", "root"])
def test_own_configuration_of_logs_stays(manager: logging.Manager, configured: str) -> None:
    theirs = logger_of(manager, "theirs", io.StringIO(), logging.INFO)
    ours = logger_of(manager, "ours", io.StringIO() if configured == "ours" else None)
    if configured == "root":
        manager.root.addHandler(logging.StreamHandler(io.StringIO()))
    before = list(ours.handlers)
    log_as(theirs, ours)
    assert (ours.handlers, ours.level) == (before, logging.NOTSET)


def test_figures_are_rebuilt_from_what_travelled(module: ModuleType) -> None:
    assert module.LMCacheConnector.build_kv_connector_stats({"a": 1}).data == {"a": 1}
    assert module.LMCacheConnector.build_kv_connector_stats().is_empty()
