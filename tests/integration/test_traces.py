"""One retrieve is one trace through all services, and its request id is in all their logs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from lmcache_core.telemetry import tracing
from lmcache_core.telemetry.request_context import (
    MAX_REQUEST_ID_CHARS,
    Carried,
    carried,
    step,
    working_for,
)
from lmcache_core.telemetry.tracing import MAX_BATCH_SPANS, MAX_QUEUED_SPANS, open_tracer
from lmcache_core.token_database import ChunkedTokenDatabase

from tests.fixtures.kv import (
    CHUNK_SIZE,
    assert_equal_prefix,
    empty_kv,
    make_config,
    make_metadata,
    random_kv,
    tokens_of,
)
from tests.fixtures.otlp import PATIENCE_S, Collector, Seen, collector
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.sidecar import engine_at
from tests.fixtures.waiting import wait_until

NUM_TOKENS = 4 * CHUNK_SIZE
IN_STORAGE = {"tier memory get", "tier disk get"}
PATIENT = {"tier_timeout_s": 60.0, "prefill_tokens_per_s": 0.001}


@dataclass
class Site:
    services: Mapping[str, ServiceProcess]
    collector: Collector
    directory: Path

    def socket(self, name: str) -> Path:
        return self.directory / f"{name}.sock"

    def lines(self, name: str) -> list[dict[str, str]]:
        return [
            json.loads(line)
            for line in self.services[name].output.splitlines()
            if line.startswith("{")
        ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    services: dict[str, ServiceProcess] = {}
    with ExitStack() as exits:
        collecting = exits.enter_context(collector())

        def start(name: str, package: str, **options: str) -> ServiceProcess:
            prefix = f"LMCACHE_{package.removeprefix('lmcache_').upper()}_"
            common = {"port": "0", "instance_id": name, "log_format": "json", "log_level": "debug"}
            traced = {
                "otlp_endpoint": collecting.url,
                "trace_sample_ratio": "0",
            }  # only what others trace
            place = directory / name
            place.mkdir()
            environ = {
                f"{prefix}{option.upper()}": value
                for option, value in {**common, **traced, **options}.items()
            }
            services[name] = exits.enter_context(running_service(package, place, environ))
            return services[name]

        others = {
            "lookup_url": start("lookup", "lmcache_lookup").url,
            "broker_url": start("broker", "lmcache_broker").url,
        }
        for name in ("a", "b"):
            arena = {
                "arena_gb": "0.01",
                "arena_path": str(directory / f"arena-{name}"),
                "socket_path": str(directory / f"{name}.sock"),
            }
            start(name, "lmcache_sidecar", lm_port="0", **others, **arena)
        storage = start(
            "storage",
            "lmcache_storage",
            lm_port="0",
            memory_gb="0.03",
            disk_path=str(directory / "stored"),
            disk_gb="0.03",
        )
        arena = {
            "arena_gb": "0.01",
            "arena_path": str(directory / "arena-c"),
            "socket_path": str(directory / "c.sock"),
        }
        below = {
            "disk_path": str(directory / "disk-c"),
            "disk_gb": "0.03",
            "remote_url": f"lm://127.0.0.1:{storage.ports['lm_port']}",
        }
        start("c", "lmcache_sidecar", lm_port="0", **arena, **below)
        yield Site(services, collecting, directory)


def the_only(spans: list[Seen], name: str, service: str) -> Seen:
    (span,) = [span for span in spans if (span.name, span.service) == (name, service)]
    return span


def test_a_retrieve_from_a_peer_is_one_trace(site: Site) -> None:
    untraced = "/v1/stats"

    def num_known() -> int:
        answer = httpx.get(f"{site.services['lookup'].url}{untraced}", trust_env=False)
        return int(answer.raise_for_status().json()["num_chunks"])

    num_before = num_known()
    tokens, kv = tokens_of(NUM_TOKENS), random_kv(NUM_TOKENS)
    with engine_at(site.socket("a")) as engine:
        engine.store(tokens, kvcaches=kv)
    loaded = empty_kv(NUM_TOKENS)
    with engine_at(
        site.socket("b"), **PATIENT, otlp_endpoint=site.collector.url, trace_sample_ratio=1.0
    ) as engine:
        wait_until(lambda: num_known() >= num_before + NUM_TOKENS // CHUNK_SIZE)
        assert engine.retrieve(tokens, kvcaches=loaded).all()
    assert_equal_prefix(loaded, kv, NUM_TOKENS)

    spans = site.collector.until(
        lambda all_of_them: (
            any(span.name == "lm GET" for span in all_of_them) and has_root(all_of_them)
        )
    )
    pulled = next(span for span in spans if span.name == "lm GET")
    tiers = {"tier memory get", "tier peers get"}
    wanted = {
        "engine get",
        "sidecar LOAD",
        "POST /v1/lookup",
        "POST /v1/transfers",
        "lm GET",
        *tiers,
    }
    trace = site.collector.until(
        lambda all_of_them: wanted <= {span.name for span in of_trace(all_of_them, pulled.trace)}
    )
    trace = of_trace(trace, pulled.trace)
    root = the_only(trace, "engine get", "lmcache-engine")
    assert root.parent == b""
    asked = the_only(trace, "sidecar LOAD", "lmcache-sidecar")
    assert (asked.parent, asked.instance) == (root.span, "b")
    lookup, transfer = (
        the_only(trace, "POST /v1/lookup", "lmcache-lookup"),
        the_only(trace, "POST /v1/transfers", "lmcache-broker"),
    )
    (peers,) = [span for span in trace if span.name == "tier peers get"]
    assert peers.parent == asked.span
    assert {lookup.parent, transfer.parent, pulled.parent} == {peers.span}
    assert (pulled.service, pulled.instance) == ("lmcache-sidecar", "a")
    assert f"GET {untraced}" not in {span.name for span in site.collector.spans()}
    hot = {(span.instance, span.parent) for span in trace if span.name == "tier memory get"}
    assert {("b", asked.span), ("a", pulled.span)} <= hot

    answered = "request answered: request=POST /v1/transfers status=200"
    request_id = the_id_of(site, "broker", answered)
    for service in ("lookup", "a", "b"):
        assert request_id in ids_at(site, service), service


def test_a_retrieve_from_storage_has_spans_of_both_services_and_their_tiers(site: Site) -> None:
    tokens, kv, loaded = tokens_of(NUM_TOKENS, seed=7), random_kv(NUM_TOKENS), empty_kv(NUM_TOKENS)
    with engine_at(site.socket("c")) as engine:
        engine.store(tokens, kvcaches=kv)
    empty(site, "c", "/v1/admin/clear", {"tiers": ["memory", "disk"]})
    empty(site, "storage", "/v1/admin/evict", {"num_bytes": 1 << 30})
    traced = {**PATIENT, "otlp_endpoint": site.collector.url, "trace_sample_ratio": 1.0}
    with engine_at(site.socket("c"), **traced) as engine:
        assert engine.retrieve(tokens, kvcaches=loaded).all()
    assert_equal_prefix(loaded, kv, NUM_TOKENS)
    wanted = {("sidecar LOAD", "c"), ("tier storage get", "c"), ("lm GET", "storage")}
    wanted |= {(name, "storage") for name in IN_STORAGE}

    def found(spans: list[Seen]) -> list[Seen]:
        """Return the retrieve that has all these spans, once its root has come."""
        for root in (span for span in spans if span.name == "engine get"):
            trace = of_trace(spans, root.trace)
            if wanted <= {(span.name, span.instance) for span in trace}:
                return trace
        return []

    trace = found(site.collector.until(lambda spans: bool(found(spans))))
    asked = the_only(trace, "sidecar LOAD", "lmcache-sidecar")
    served = the_only(trace, "lm GET", "lmcache-storage")
    (remote,) = [span for span in trace if span.name == "tier storage get"]
    assert (remote.parent, served.parent) == (asked.span, remote.span)
    assert {span.name for span in trace if span.parent == served.span} >= IN_STORAGE
    assert the_id_of(site, "storage", "request answered: request=lm GET") in ids_at(site, "c")


def empty(site: Site, service: str, path: str, body: dict[str, object]) -> None:
    """Empty faster tiers of a service once slower ones have everything."""
    url = site.services[service].url

    def is_written() -> bool:
        lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
        pending = (line for line in lines if line.startswith("lmcache_tier_pending_bytes{"))
        return next(pending).endswith(" 0.0")

    wait_until(is_written)
    httpx.post(f"{url}{path}", json=body, trust_env=False).raise_for_status()


def the_id_of(site: Site, service: str, message: str) -> str:
    (request_id,) = {
        line["request_id"]
        for line in site.lines(service)
        if line.get("message", "").startswith(message)
    }
    return request_id


def ids_at(site: Site, service: str) -> set[str]:
    return {line["request_id"] for line in site.lines(service) if "request_id" in line}


def test_an_untraced_request_has_its_id_in_all_logs(site: Site) -> None:
    before = ids_at(site, "lookup")
    with engine_at(site.socket("b"), **PATIENT) as engine:
        assert not engine.retrieve(
            tokens_of(NUM_TOKENS, seed=99), kvcaches=empty_kv(NUM_TOKENS)
        ).any()
    wait_until(lambda: (ids_at(site, "lookup") - before) & ids_at(site, "b"))


def test_logs_hold_nothing_of_what_is_cached(site: Site) -> None:
    """At level debug: no token ids, no keys, no KV, no bodies."""
    tokens = tokens_of(NUM_TOKENS, seed=7)
    said = "".join(service.output for service in site.services.values())
    assert "request=POST /v1/lookup status=200" in said
    assert ", ".join(str(token) for token in tokens[:3].tolist()) not in said
    database = ChunkedTokenDatabase(make_config(), make_metadata())
    for _, _, key in database.process_tokens(tokens):
        assert key.chunk_hash not in said
        assert key.chunk_id().hex() not in said


def has_root(spans: list[Seen]) -> bool:
    pulled = next((span for span in spans if span.name == "lm GET"), None)
    return pulled is not None and any(
        span.name == "engine get" for span in of_trace(spans, pulled.trace)
    )


def of_trace(spans: list[Seen], trace: bytes) -> list[Seen]:
    return [span for span in spans if span.trace == trace]


def test_a_request_id_is_taken_returned_and_logged(site: Site) -> None:
    url = site.services["lookup"].url
    given = httpx.get(f"{url}/v1/nothing", headers={"x-request-id": "order-66"}, trust_env=False)
    assert (given.status_code, given.headers["x-request-id"], given.json()["request_id"]) == (
        404,
        "order-66",
        "order-66",
    )
    assert any(line.get("request_id") == "order-66" for line in site.lines("lookup"))
    for bad in ("with space", "a" * (MAX_REQUEST_ID_CHARS + 1), "<script>"):
        made = httpx.get(f"{url}/v1/nothing", headers={"x-request-id": bad}, trust_env=False)
        assert made.headers["x-request-id"] == made.json()["request_id"] != bad
        assert len(made.json()["request_id"]) == 32


def test_spans_for_an_unavailable_collector_are_dropped() -> None:
    tracer = open_tracer("http://127.0.0.1:9", "test", "0", 1.0)
    assert tracer is not None
    for _ in range(2 * MAX_QUEUED_SPANS):
        with working_for("work", None, tracer), step("part"):
            pass
    tracer.close()


def test_spans_wait_for_a_collector_that_hangs_up_to_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what makes them waits for nothing."""
    for name in ("SEND_TIMEOUT_S", "CLOSE_TIMEOUT_S"):
        monkeypatch.setattr(tracing, name, PATIENCE_S)
    with collector() as hanging:
        hanging.answers.clear()
        tracer = open_tracer(hanging.url, "test", "0", 1.0)
        assert tracer is not None
        for _ in range(4 * MAX_QUEUED_SPANS):
            with working_for("work", None, tracer):
                pass
        hanging.answers.set()
        tracer.close()
        num_sent = len(hanging.spans())
    assert MAX_QUEUED_SPANS <= num_sent <= MAX_QUEUED_SPANS + MAX_BATCH_SPANS


def test_work_is_carried_only_within() -> None:
    assert carried() is None
    with working_for("work", Carried("r-1", ""), None), step("part"):
        assert carried() == Carried("r-1", "")
    assert carried() is None
    assert Carried.checked("a b", "00-" + "0" * 32 + "-" + "1" * 16 + "-01") == Carried("", "")
