"""Engines without sidecars as peers over lm+tls://, mutual: who is served, who is not, and files
that are replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.telemetry import RETRIEVED_TOKENS_TOTAL
from lmcache_demo.settings import quiet_environment

from tests.fixtures.embedded import PATIENT
from tests.fixtures.neighbourhood import Neighbourhood, eventually, get_json
from tests.fixtures.ports import free_port
from tests.fixtures.processes import Processes
from tests.fixtures.sidecar import engine_at
from tests.fixtures.tls import Authority, Pair, replace
from tests.fixtures.tls_engines import (
    NUM_TOKENS,
    TlsEngines,
    num_retrieved,
    retrieve,
    store,
    tls_engines,
    until_found,
)

PEER = "peers"


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Neighbourhood]:
    """Lookup and broker, shared by the tests: closed engines leave nothing there."""
    directory = tmp_path_factory.mktemp("town")
    with Processes(directory, quiet_environment()) as processes:
        yield Neighbourhood(processes, directory)


@pytest.fixture
def engines(town: Neighbourhood, tmp_path: Path) -> Iterator[TlsEngines]:
    with tls_engines(town, tmp_path) as started:
        yield started
    eventually(lambda: not announced(started))


@pytest.fixture
def with_sidecars(tmp_path: Path) -> Iterator[TlsEngines]:
    """In a town of their own, which ends with them."""
    with (
        Processes(tmp_path, quiet_environment()) as processes,
        tls_engines(Neighbourhood(processes, tmp_path), tmp_path) as started,
    ):
        yield started


def announced(engines: TlsEngines) -> list[str]:
    return [
        peer["distributed_url"]
        for peer in get_json(f"{engines.neighbourhood.broker_url}/v1/peers")["peers"]
    ]


def test_engine_and_sidecar_pull_from_one_another(with_sidecars: TlsEngines) -> None:
    engine, sidecar = with_sidecars.start(), with_sidecars.sidecar("s")
    store(engine)
    with engine_at(sidecar.socket, **PATIENT) as attached:
        until_found(attached)
        retrieve(attached)
        assert attached.counters.value(RETRIEVED_TOKENS_TOTAL, PEER) == NUM_TOKENS
    reader = with_sidecars.start()
    engine.close()
    eventually(lambda: len(announced(with_sidecars)) == 2)
    until_found(reader)
    retrieve(reader)
    assert reader.counters.value(RETRIEVED_TOKENS_TOTAL, PEER) == NUM_TOKENS, (
        "from the sidecar: the engine is closed"
    )


WHAT_TO_DO = {
    "trust in the peer": "certificate verify failed",
    "a certificate": "if it requires a certificate of its callers, set peer_tls_cert_file",
    "a certificate that the peer trusts": (
        "one of its authorities must have signed that in peer_tls_cert_file"
    ),
}


@pytest.mark.parametrize("lacks", list(WHAT_TO_DO))
def test_strangers_are_not_served_and_still_serve_themselves(
    engines: TlsEngines, lacks: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that encrypts nothing itself still reads from those that do, if they let it."""
    store(engines.start())
    if lacks == "trust in the peer":
        reader = engines.start(peer_tls_ca_file=str(engines.stranger.file))
    elif lacks == "a certificate":
        plain: dict[str, Any] = {
            "distributed_url": "lm://127.0.0.1:1",
            "peer_tls_client_ca_file": None,
        }
        reader = engines.start(**plain, peer_tls_cert_file=None, peer_tls_key_file=None)
    else:
        reader = engines.start(engines.pair(engines.stranger))
    until_found(reader)
    assert num_retrieved(reader) == 0
    assert caplog.text.count("pull failed: peer=") == 1, "it is logged once"
    assert WHAT_TO_DO[lacks] in caplog.text
    store(reader)
    retrieve(reader)


def test_lookup_and_broker_that_want_a_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    house = Authority(tmp_path, "services")
    pair, own = house.sign("services"), house.sign("engine")
    files = {"tls_cert_file": pair.cert, "tls_key_file": pair.key, "tls_client_ca_file": house.file}
    with (
        Processes(tmp_path, quiet_environment()) as processes,
        tls_engines(Neighbourhood(processes, tmp_path, files), tmp_path) as started,
    ):
        plain: dict[str, Any] = {
            "distributed_url": f"lm://127.0.0.1:{free_port()}",
            "peer_tls_client_ca_file": None,
        }
        started.start(None, house, **plain, peer_tls_cert_file=None, peer_tls_key_file=None)
        hint = "if it requires a certificate of its callers, set peer_tls_cert_file"
        eventually(
            lambda: all(
                re.search(f"{name} https://.*{hint}", caplog.text) for name in ("lookup", "broker")
            )
        )
        a, b = started.start(own, house), started.start(own, house)
        store(a)
        until_found(b)
        retrieve(b)
        assert b.counters.value(RETRIEVED_TOKENS_TOTAL, PEER) == NUM_TOKENS


def test_certificates_and_authorities_are_read_again(engines: TlsEngines) -> None:
    """The serving engine goes over to another authority while it runs; a reader that knows only
    that one is let in from then on.
    """
    pair = engines.pair()
    ca = engines.authority.file
    store(engines.start(pair))
    reader = engines.start(engines.pair(engines.stranger), engines.stranger)
    until_found(reader)
    assert num_retrieved(reader) == 0
    renew(pair, engines.pair(engines.stranger))
    replace(ca, engines.stranger.file.read_bytes())
    eventually(lambda: num_retrieved(reader) == NUM_TOKENS)


def renew(pair: Pair, other: Pair) -> None:
    replace(pair.cert, other.cert.read_bytes())
    replace(pair.key, other.key.read_bytes())
