"""Waits for first tokens, read from a vLLM's metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType

import httpx
import msgspec
import pytest
from lmcache_core.p2p import FirstTokens, ModelFigures, PeerFigures
from lmcache_core.storage.hot import LocalCPUBackend
from lmcache_core.storage.tiers import TierSet
from lmcache_core.telemetry import Counters
from lmcache_core.wire.json_http import JsonHttpClient
from lmcache_sidecar import metrics
from lmcache_sidecar.first_tokens import FirstTokenCounter, first_tokens
from lmcache_sidecar.heartbeat import heartbeat_figures

from tests.unit.sidecar.test_heartbeat import hot_with

LABELS = 'engine="{engine}",model_name="org/llama {{x}} 8b"'
# As vLLM 0.32.0 writes them
METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{{{labels},source="local_compute"}} {computed:.1f}
vllm:prompt_tokens_by_source_total{{{labels},source="local_cache_hit"}} {cached:.1f}
vllm:prompt_tokens_by_source_total{{{labels},source="external_kv_transfer"}} {loaded:.1f}
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{{labels},le="0.001"}} 0.0
vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} {requests:.1f}
vllm:time_to_first_token_seconds_count{{{labels}}} {requests:.1f}
vllm:time_to_first_token_seconds_sum{{{labels}}} {waited_s}
vllm:time_to_first_token_seconds_created{{{labels}}} 1.7956e+09
"""


class Vllm:
    """Answers `/metrics` with its counters."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = dict.fromkeys(
            ("computed", "cached", "loaded", "requests", "waited_s"), 0
        )
        self.status = 200
        self.leaves_out = "no such line"

    def served(self, requests: int, waited_s: float, **tokens: int) -> None:
        for name, count in ({"requests": requests, "waited_s": waited_s} | tokens).items():
            self.counts[name] += count

    def answer(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/metrics"
        text = METRICS.format(labels=LABELS.format(engine=0), **self.counts)
        idle = METRICS.format(labels=LABELS.format(engine=1), **dict.fromkeys(self.counts, 0))
        lines = (text + idle).splitlines(keepends=True)
        kept = "".join(line for line in lines if self.leaves_out not in line)
        return httpx.Response(self.status, text=kept)


@pytest.fixture
def vllm() -> Vllm:
    return Vllm()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
async def counter(vllm: Vllm, counters: Counters) -> AsyncIterator[FirstTokenCounter]:
    client = JsonHttpClient(
        "vllm", "http://vllm:8000", None, 1.0, transport=httpx.MockTransport(vllm.answer)
    )
    await client.open()
    yield FirstTokenCounter(client, counters)
    await client.close()


async def test_waits_count_by_where_most_of_the_prompts_kv_came_from(
    vllm: Vllm, counter: FirstTokenCounter, counters: Counters
) -> None:
    vllm.served(100, 900.0, computed=100_000)
    await counter.look()
    assert first_tokens(counters.snapshot()) == FirstTokens(), "what was before is not known"
    for requests, waited_s, tokens in (
        (2, 0.25, {"loaded": 8000, "computed": 2000}),
        (1, 3.5, {"loaded": 100, "computed": 3900}),
        (4, 2.0, {"loaded": 1000, "computed": 1000}),
        (1, 0.1, {"cached": 1000}),
        (0, 0.0, {}),
    ):
        vllm.served(requests, waited_s, **tokens)
        await counter.look()
    assert first_tokens(counters.snapshot()) == FirstTokens(2, 250, 1, 3500, 5, 2100)
    assert counter.model == "org/llama {x} 8b"


async def test_a_restart_of_vllm_is_a_new_beginning(
    vllm: Vllm, counter: FirstTokenCounter, counters: Counters
) -> None:
    vllm.served(10, 9.0, computed=9000)
    await counter.look()
    vllm.counts = dict.fromkeys(vllm.counts, 0)
    vllm.served(1, 30.0, computed=9500)
    await counter.look()
    vllm.served(1, 0.5, computed=500)
    await counter.look()
    assert first_tokens(counters.snapshot()) == FirstTokens(computed=1, computed_ms=500)


@pytest.mark.parametrize(
    "trouble", [{"status": 401}, {"status": 503}, {"leaves_out": "prompt_tokens_by_source"}]
)
async def test_without_the_metrics_nothing_is_counted_and_it_is_logged_once(
    trouble: Mapping[str, object],
    vllm: Vllm,
    counter: FirstTokenCounter,
    counters: Counters,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in trouble.items():
        setattr(vllm, name, value)
    with caplog.at_level("INFO", "lmcache_sidecar"):
        for _ in range(3):
            await counter.look()
    assert first_tokens(counters.snapshot()) == FirstTokens()
    [line] = caplog.messages
    assert line.startswith("vLLM's metrics")
    vllm.status, vllm.leaves_out = 200, "no such line"
    await counter.look()
    vllm.served(1, 0.5, loaded=500)
    await counter.look()
    assert first_tokens(counters.snapshot()) == FirstTokens(loaded=1, loaded_ms=500)


@pytest.mark.parametrize(
    ("described", "name"),
    [({"KV's name": 64.0}, "KV's name"), ({}, "vLLM's"), ({"a": 1.0, "b": 1.0}, "vLLM's")],
)
async def test_a_heartbeat_reports_waits_under_the_kvs_model(
    described: Mapping[str, float],
    name: str,
    vllm: Vllm,
    counter: FirstTokenCounter,
    counters: Counters,
) -> None:
    await counter.look()
    vllm.served(3, 0.75, loaded=500)
    await counter.look()
    hot: LocalCPUBackend = hot_with(0)
    told = heartbeat_figures(TierSet(hot=hot), counters, None, described, "vLLM's")
    waits = FirstTokens(loaded=3, loaded_ms=750)
    assert told.models == {name: ModelFigures(0, 0, described.get(name, 0), waits)}
    assert heartbeat_figures(TierSet(hot=hot), counters, None, described).models == {}


@pytest.mark.parametrize("counter_name", ["requests", "waited_s", "loaded"])
@pytest.mark.parametrize(
    "value", ["nan", "inf", "-inf", "-1", "1e300", "1e999", "9007199254740992", "9.3e18"]
)
async def test_counter_that_no_vllm_has_is_ignored(
    counter_name: str,
    value: str,
    vllm: Vllm,
    counter: FirstTokenCounter,
    counters: Counters,
) -> None:
    await counter.look()
    vllm.served(1, 0.5, loaded=500)
    await counter.look()
    before = dict(vllm.counts)
    vllm.counts[counter_name] = float(value)
    for _ in range(2):
        await counter.look()
    assert first_tokens(counters.snapshot()) == FirstTokens(loaded=1, loaded_ms=500)
    vllm.counts = before
    vllm.served(1, 0.5, loaded=500)
    await counter.look()
    assert first_tokens(counters.snapshot()) == FirstTokens(loaded=2, loaded_ms=1000)
    heartbeat_is_taken(counters, vllm_model="m")


@pytest.mark.parametrize("model", ["m", "", "m" * 1024])
@pytest.mark.parametrize("count", [1 << 53, 1 << 63, 10**300])
def test_heartbeat_is_one_that_the_broker_takes_whatever_was_counted(
    count: int, model: str
) -> None:
    counters = Counters()
    unlabelled = (
        metrics.REQUESTED_CHUNKS_TOTAL,
        metrics.STORED_CHUNKS_TOTAL,
        metrics.STORED_BYTES_TOTAL,
    )
    labelled = (
        *(metrics.LOADED_CHUNKS_TOTAL, metrics.LOADED_BYTES_TOTAL, metrics.MISSED_CHUNKS_TOTAL),
        *(metrics.SAVED_TOKENS_TOTAL, metrics.SAVED_PREFILL_MICROSECONDS_TOTAL),
    )
    for name in unlabelled:
        counters.add(name, count)
    for name in labelled:
        counters.add(name, count, model or "label")
    for source in metrics.PROMPT_SOURCES:
        counters.add(metrics.FIRST_TOKENS_TOTAL, count, source)
        counters.add(metrics.FIRST_WAIT_MICROSECONDS_TOTAL, count, source)
    heartbeat_is_taken(counters, count, {model: 64.0}, model)


def heartbeat_is_taken(
    counters: Counters,
    exclusive_bytes: int | None = None,
    chunk_tokens: Mapping[str, float] = MappingProxyType({}),
    vllm_model: str | None = None,
) -> None:
    figures = heartbeat_figures(
        TierSet(hot=hot_with(1)), counters, exclusive_bytes, chunk_tokens, vllm_model
    )
    assert msgspec.json.decode(msgspec.json.encode(figures), type=PeerFigures) == figures
