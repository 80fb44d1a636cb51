"""Which services are meant."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from lmcache_ctl.errors import UsageError
from lmcache_ctl.evict import parse_size
from lmcache_ctl.options import CtlSettings
from lmcache_ctl.services import Kind, services_of
from lmcache_ctl.targets import parse_target


def test_without_any_url_this_machine_is_asked() -> None:
    assert {service.url for service in services_of(CtlSettings())} == {
        f"http://127.0.0.1:{port}" for port in (8080, 8081, 8082, 8083)
    }
    [only] = services_of(CtlSettings(storage_urls=["http://127.0.0.1:1/"]))
    assert (only.kind, only.name, only.url) == (Kind.STORAGE, "127.0.0.1:1", "http://127.0.0.1:1")


def test_a_name_stands_for_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET, 0, 0, "", (f"10.0.0.{number}", 0)) for number in (2, 1, 2)]
    found.append((socket.AF_INET6, 0, 0, "", ("fd00::1", 0, 0, 0)))  # type: ignore[arg-type]

    def resolve(*_: Any, **__: Any) -> list[Any]:
        return found

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    first, second = services_of(CtlSettings(storage_urls=["https://storage.example:8080"]))
    assert (first.url, second.url) == ("https://10.0.0.1:8080", "https://10.0.0.2:8080")
    assert (first.host, first.tls_name) == ("storage.example:8080", "storage.example")
    found[:] = [
        (socket.AF_INET, 0, 0, "", ("127.0.0.1", 0)),
        (socket.AF_INET6, 0, 0, "", ("::1", 0)),
    ]
    [one] = services_of(CtlSettings(storage_urls=["http://localhost:1"]))
    assert (one.url, one.host) == ("http://localhost:1", None), (
        "one machine by both families is one"
    )


@pytest.mark.parametrize(
    "url", ["http://:1", "http://h:port", "http://user:password@h:1", "https://h:99999"]
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        services_of(CtlSettings(lookup_urls=[url]))
    assert "password" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "lookup", "sidecar/", "sidecars", "/a"])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(UsageError, match="write sidecar or storage"):
        parse_target(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("5B", 5), ("1.5KiB", 1536), ("512MiB", 512 << 20), (" 2 GiB ", 2 << 30)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1MB", "x", "1e3", "0.1B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize(
    ("from_environment", "said"),
    [
        (set(), "--lookup-url"),
        ({"lookup_urls"}, "LMCACHE_CTL_LOOKUP_URLS, which --lookup-url overrides"),
    ],
)
def test_an_address_shows_where_it_is_from(from_environment: set[str], said: str) -> None:
    settings = CtlSettings(lookup_urls=["http://h:1"], from_environment=frozenset(from_environment))
    [service] = services_of(settings)
    assert service.origin == f"; its address is from {said}"
