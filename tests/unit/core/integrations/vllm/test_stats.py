"""Figures for vLLM's log line and its Prometheus endpoint."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from lmcache_core.telemetry import (
    FAILED_CALLS_TOTAL,
    RETRIEVED_TOKENS_TOTAL,
    STORED_BYTES_TOTAL,
    TIER_CALLS_TOTAL,
)
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tests.fixtures.vllm_engine import Shape
from tests.fixtures.vllm_engine.shapes import kv_cache_config, vllm_config
from tests.fixtures.vllm_engine.worlds import embedded


def test_growth_is_told_once(module: ModuleType, model: Path) -> None:
    config, caches = vllm_config(Shape(), model, embedded(), 0), kv_cache_config(Shape())
    connector = module.LMCacheConnector(config, module.base.KVConnectorRole.SCHEDULER, caches)
    counters, take = connector._counters, connector.get_kv_connector_stats
    assert take() is None
    counters.add(RETRIEVED_TOKENS_TOTAL, 40, "memory")
    counters.add(RETRIEVED_TOKENS_TOTAL, 8, "disk")
    counters.add(TIER_CALLS_TOTAL, 1, "memory")
    assert take().data == {RETRIEVED_TOKENS_TOTAL: 48}
    assert take() is None
    counters.add(STORED_BYTES_TOTAL, 5)
    assert take().data == {STORED_BYTES_TOTAL: 5}
    connector.shutdown()


def test_figures_of_workers_become_one(module: ModuleType) -> None:
    whole = module.LMCacheStats(data={"a": 1, "b": 2}).aggregate(
        module.LMCacheStats(data={"b": 3, "c": 4})
    )
    assert whole.data == {"a": 1, "b": 5, "c": 4}
    assert not whole.is_empty()
    whole.reset()
    assert whole.is_empty()
    assert module.LMCacheStats(data={"a": 0}).is_empty()


def test_the_log_line(module: ModuleType) -> None:
    assert module.LMCacheStats(
        data={RETRIEVED_TOKENS_TOTAL: 48, FAILED_CALLS_TOTAL: 0}
    ).reduce() == {"retrieved_tokens": 48}


def test_stats_are_made_again_from_what_travelled(module: ModuleType) -> None:
    assert module.LMCacheConnector.build_kv_connector_stats({"a": 1}).data == {"a": 1}
    assert module.LMCacheConnector.build_kv_connector_stats().is_empty()


def kinds_of(registry: CollectorRegistry) -> dict[Any, Any]:
    """vLLM's makers of metrics, in a registry of the test's own."""

    def make(kind: Any) -> Any:
        return lambda **options: kind(registry=registry, **options)

    return {kind: make(kind) for kind in (Counter, Gauge, Histogram)}


def test_prometheus(module: ModuleType) -> None:
    registry = CollectorRegistry()
    kinds = kinds_of(registry)
    labels = {0: ["model", "0"], 1: ["model", "1"]}
    metrics = module.LMCacheConnector.build_prom_metrics(
        SimpleNamespace(), kinds, ["model_name", "engine"], labels
    )
    metrics.observe({RETRIEVED_TOKENS_TOTAL: 40, "something new": 1}, engine_idx=1)
    metrics.observe({RETRIEVED_TOKENS_TOTAL: 8}, engine_idx=1)
    name = "vllm:" + RETRIEVED_TOKENS_TOTAL
    assert registry.get_sample_value(name, {"model_name": "model", "engine": "1"}) == 48
    assert registry.get_sample_value(name, {"model_name": "model", "engine": "0"}) == 0


def test_the_class_is_known_by_name_where_figures_are_read(module: ModuleType) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for _ in range(2):
        kinds = kinds_of(CollectorRegistry())
        module.LMCacheConnector.build_prom_metrics(
            SimpleNamespace(), kinds, ["model_name"], {0: ["model"]}
        )
        assert (
            KVConnectorFactory.get_connector_class_by_name("LMCacheConnector")
            is module.LMCacheConnector
        )


def test_figures_read_as_a_dictionary(module: ModuleType) -> None:
    assert module.LMCacheStats(data={"a": 1})["data"] == {"a": 1}
