"""One retrieve is one trace, across engine, sidecar, lookup, broker and peer; its request id is in the log lines of all of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from lmcache_core.telemetry.request_context import MAX_REQUEST_ID_CHARS, Carried, carried, step, working_for
from lmcache_core.telemetry.tracing import CLOSE_TIMEOUT_S, MAX_QUEUED_SPANS, open_tracer

from tests.fixtures.kv import CHUNK_SIZE, assert_equal_prefix, empty_kv, random_kv, tokens_of
from tests.fixtures.otlp import Collector, Seen, collector
from tests.fixtures.service_process import ServiceProcess, running_service
from tests.fixtures.sidecar import engine_at

NUM_TOKENS = 4 * CHUNK_SIZE
PATIENCE_S = 15.0
PATIENT = {"tier_timeout_s": 10.0, "prefill_tokens_per_s": 0.001}


@dataclass
class Site:
    services: Mapping[str, ServiceProcess]
    collector: Collector
    directory: Path

    def socket(self, name: str) -> Path:
        return self.directory / f"{name}.sock"

    def lines(self, name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.services[name].output.splitlines() if line.startswith("{")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    directory = tmp_path_factory.mktemp("site")
    services: dict[str, ServiceProcess] = {}
    with ExitStack() as exits:
        collecting = exits.enter_context(collector())

        def start(name: str, package: str, **options: str) -> ServiceProcess:
            prefix = f"LMCACHE_{package.removeprefix('lmcache_').upper()}_"
            common = {"port": "0", "instance_id": name, "log_format": "json", "log_level": "debug"}
            traced = {"otlp_endpoint": collecting.url, "trace_sample_ratio": "0"}  # only what others trace
            place = directory / name
            place.mkdir()
            environ = {f"{prefix}{option.upper()}": value for option, value in {**common, **traced, **options}.items()}
            services[name] = exits.enter_context(running_service(package, place, environ))
            return services[name]

        others = {"lookup_url": start("lookup", "lmcache_lookup").url, "broker_url": start("broker", "lmcache_broker").url}
        for name in ("a", "b"):
            arena = {"arena_gb": "0.01", "arena_path": str(directory / f"arena-{name}"), "socket_path": str(directory / f"{name}.sock")}
            start(name, "lmcache_sidecar", lm_port="0", **others, **arena)
        yield Site(services, collecting, directory)


def the_only(spans: list[Seen], name: str, service: str) -> Seen:
    (span,) = [span for span in spans if (span.name, span.service) == (name, service)]
    return span


def test_a_retrieve_from_a_peer_is_one_trace(site: Site) -> None:
    tokens, kv = tokens_of(NUM_TOKENS), random_kv(NUM_TOKENS)
    with engine_at(site.socket("a")) as engine:
        engine.store(tokens, kvcaches=kv)
    deadline = time.monotonic() + PATIENCE_S
    loaded = empty_kv(NUM_TOKENS)
    with engine_at(site.socket("b"), **PATIENT, otlp_endpoint=site.collector.url, trace_sample_ratio=1.0) as engine:
        while not engine.retrieve(tokens, kvcaches=loaded).all():
            assert time.monotonic() < deadline, "the peer's chunks are not found"
            time.sleep(0.1)
    assert_equal_prefix(loaded, kv, NUM_TOKENS)

    spans = site.collector.until(lambda all_of_them: any(span.name == "lm GET" for span in all_of_them) and has_root(all_of_them))
    pulled = next(span for span in spans if span.name == "lm GET")
    wanted = {"engine get", "sidecar Pin", "POST /v1/lookup", "POST /v1/transfers", "lm GET"}
    trace = site.collector.until(lambda all_of_them: wanted <= {span.name for span in of_trace(all_of_them, pulled.trace)})
    trace = of_trace(trace, pulled.trace)
    root = the_only(trace, "engine get", "lmcache-engine")
    assert root.parent == b""
    asked = the_only(trace, "sidecar Pin", "lmcache-sidecar")
    assert (asked.parent, asked.instance) == (root.span, "b")
    lookup, transfer = the_only(trace, "POST /v1/lookup", "lmcache-lookup"), the_only(trace, "POST /v1/transfers", "lmcache-broker")
    assert {lookup.parent, transfer.parent, pulled.parent} == {asked.span}
    assert (pulled.service, pulled.instance) == ("lmcache-sidecar", "a")

    (request_id,) = {
        line["request_id"] for line in site.lines("broker") if line["message"].startswith("POST /v1/transfers is answered 200")
    }
    assert any(line.get("request_id") == request_id for line in site.lines("lookup"))


def has_root(spans: list[Seen]) -> bool:
    pulled = next((span for span in spans if span.name == "lm GET"), None)
    return pulled is not None and any(span.name == "engine get" for span in of_trace(spans, pulled.trace))


def of_trace(spans: list[Seen], trace: bytes) -> list[Seen]:
    return [span for span in spans if span.trace == trace]


def test_nothing_is_traced_that_nobody_traces(site: Site) -> None:
    assert httpx.get(f"{site.services['lookup'].url}/v1/instances", trust_env=False).status_code == 200
    time.sleep(1.5)
    assert "GET /v1/instances" not in {span.name for span in site.collector.spans()}


def test_a_request_id_is_taken_told_and_logged(site: Site) -> None:
    url = site.services["lookup"].url
    given = httpx.get(f"{url}/v1/nothing", headers={"x-request-id": "order-66"}, trust_env=False)
    assert (given.status_code, given.headers["x-request-id"], given.json()["request_id"]) == (404, "order-66", "order-66")
    assert any(line.get("request_id") == "order-66" for line in site.lines("lookup"))
    for bad in ("with space", "a" * (MAX_REQUEST_ID_CHARS + 1), "<script>"):
        made = httpx.get(f"{url}/v1/nothing", headers={"x-request-id": bad}, trust_env=False)
        assert made.headers["x-request-id"] == made.json()["request_id"] != bad
        assert len(made.json()["request_id"]) == 32


def test_a_collector_that_is_away_costs_nobody_a_wait() -> None:
    tracer = open_tracer("http://127.0.0.1:9", "test", "0", 1.0)
    assert tracer is not None
    begun = time.monotonic()
    for _ in range(2 * MAX_QUEUED_SPANS):
        with working_for("work", None, tracer), step("part"):
            pass
    assert time.monotonic() - begun < 10.0
    begun = time.monotonic()
    tracer.close()
    assert time.monotonic() - begun < CLOSE_TIMEOUT_S + 1.0


def test_without_an_endpoint_nothing_is_imported() -> None:
    assert open_tracer(None, "test", "0") is None
    code = "import sys, lmcache_core.engine, lmcache_core.sidecar, lmcache_core.telemetry.tracing; print('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout == "False\n"


def test_work_is_carried_only_within() -> None:
    assert carried() is None
    with working_for("work", Carried("r-1", ""), None), step("part"):
        assert carried() == Carried("r-1", "")
    assert carried() is None
    assert Carried.checked("a b", "00-" + "0" * 32 + "-" + "1" * 16 + "-01") == Carried("", "")
