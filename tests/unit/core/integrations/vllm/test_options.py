"""Options of the connector, each error with the value and the fix, and the store that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_core.engine.stores import SidecarClient
from lmcache_core.errors import ConfigError
from lmcache_core.integrations.vllm.options import ConnectorOptions, read_options
from lmcache_core.integrations.vllm.stores import OpenStore, open_store
from lmcache_core.keys import CacheEngineKey
from lmcache_core.record.chunk_store import NotLent
from lmcache_core.telemetry import Counters

from tests.fixtures.vllm_engine.parts import METADATA, options_of

SIDECAR = "lmcache.sidecar_socket"


@pytest.fixture(autouse=True)
def _no_options_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)


def read(extra: dict[str, Any] | None = None, device: str = "cpu") -> ConnectorOptions:
    """Options with a place for KV."""
    return read_options({"max_local_cpu_size": 1.0} | (extra or {}), device)


@pytest.mark.parametrize("prefix", ["", "lmcache."])
def test_prefix_of_a_name_may_be_left_out(prefix: str) -> None:
    given = {"chunk_size": 64, "layout": "tokens", "model_name": "m", "revision": "r"}
    options = read({prefix + name: value for name, value in given.items()})
    assert (options.engine.chunk_size, options.layout) == (64, "tokens")
    assert (options.model_name, options.revision) == ("m", "r")


def test_routers_are_told_nothing_unless_asked_for() -> None:
    assert not read_options({SIDECAR: "/s"}, "cpu").kv_events
    assert not read({"lmcache.kv_events": False}).kv_events
    assert read_options({SIDECAR: "/s", "lmcache.kv_events": True}, "cpu").kv_events


def test_options_of_others_are_ignored() -> None:
    others = {"other_connector": 1, "path": "x", "block_size": 16, "connectors": []}
    assert read(others) == read()


@pytest.mark.parametrize(("device", "layout"), [("cpu", "blocks"), ("cuda", "tokens")])
def test_default_layout_is_that_of_the_device(device: str, layout: str) -> None:
    assert read(device=device).layout == layout
    assert read({"layout": "auto"}, device) == read(device=device)


@pytest.mark.parametrize(("load", "is_warned"), [("sync", True), ("async", False)])
def test_former_option_load_is_accepted(
    load: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert read({"lmcache.load": load}) == read()
    warning = "lmcache.load=sync has no effect, all loads are asynchronous: leave the option out"
    assert (warning in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"lmcache.chunk_sise": 64}, r"lmcache\.chunk_sise is no option.*chunk_size"),
        ({"lmcache.load": "later"}, r"lmcache\.load='later': must be async, or left out"),
        ({"lmcache.layout": "pages"}, "must be one of auto, blocks, tokens"),
        ({"lmcache.chunk_size": 0}, "chunk_size=0"),
        ({"lmcache.revision": 7}, r"lmcache\.revision=7: must be text"),
        ({"lmcache.model_name": ""}, r"lmcache\.model_name='': must be text"),
        ({"lmcache.config_file": True}, r"lmcache\.config_file=True: must be text"),
        ({"chunksize": 64}, r"chunksize is no option; did you mean lmcache\.chunk_size\?"),
        ({"LMCACHE_SIDECAR_SOCKET": "/s"}, r"did you mean lmcache\.sidecar_socket\?"),
        ({"lmcache-chunk-sise": 64}, r"did you mean lmcache\.chunk_size\?"),
        ({"enable_blending": True}, "vLLM lets a connector load prefixes only"),
        ({SIDECAR: "/s", "lmcache.salt": "x"}, "salt"),
        ({SIDECAR: "/" + 107 * "s"}, "an absolute path of at most 107 bytes"),
        ({SIDECAR: "unix:///run/s.sock"}, "an absolute path .* without a scheme"),
        ({SIDECAR: "s.sock"}, "an absolute path"),
        ({SIDECAR: "/tmp"}, r"sidecar_socket='/tmp': is a directory"),
        ({SIDECAR: "/s", "lmcache.local_disk": "file:///d/"}, "the tiers are the sidecar's"),
        ({SIDECAR: "/s", "lmcache.kv_events": "on"}, r"lmcache\.kv_events='on': must be true or f"),
        ({"lmcache.kv_events": True}, r"kv_events=true: only a sidecar .* set lmcache\.sidecar_so"),
    ],
)
def test_wrong_option_is_refused_with_the_fix(extra: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        read_options(extra, "cpu") if SIDECAR in extra else read(extra)


def test_disk_may_be_a_plain_path() -> None:
    options = read({"lmcache.local_disk": "/kv", "lmcache.max_local_disk_size": 1})
    assert options.engine.local_disk == "file:///kv"


def test_place_for_kv_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fix = r'names no place for KV: set "lmcache\.sidecar_socket".*max_local_cpu_size'
    with pytest.raises(ConfigError, match=fix):
        read_options({}, "cpu")
    monkeypatch.setenv("LMCACHE_SIDECAR_SOCKET", "/run/s.sock")
    assert read_options({}, "cpu").engine.sidecar_socket == "/run/s.sock"


def test_options_win_over_those_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\nmax_local_cpu_size: 3\n")
    extra = {"lmcache.config_file": str(file), "lmcache.chunk_size": 32}
    engine = read_options(extra, "cpu").engine
    assert (engine.chunk_size, engine.max_local_cpu_size) == (32, 3)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    assert read_options({}, "cpu").engine.chunk_size == 64


def test_short_chunks_are_never_stored() -> None:
    assert not read({"lmcache.save_unfull_chunk": True}).engine.save_unfull_chunk


KEY = CacheEngineKey("vllm", "m", 1, 0, "00" * 32)


def opened(engine_id: str, salts: list[str] | None = None, **options: Any) -> OpenStore:
    on_salt = (lambda salt: None) if salts is None else salts.append
    engine = options_of(**options).engine
    return open_store(SidecarClient(engine_id), engine, METADATA, Counters(), on_salt)


def has_room(store: OpenStore) -> bool:
    (memory,) = store.store.reserve([KEY], [(8,)], "uint8")
    if isinstance(memory, NotLent):
        return False
    store.store.abort([memory])
    return True


def test_sides_of_an_engine_share_tiers_inside_vllm() -> None:
    salts: list[str] = []
    worker, scheduler, other = (opened(name, salts, salt="s") for name in ("one", "one", "another"))
    assert worker.store is scheduler.store is not other.store
    assert salts == ["s"] * 3
    assert (worker.is_alone, scheduler.is_alone, other.is_alone) == (True, False, True)
    worker.close()
    worker.close()
    assert has_room(scheduler), "one of two has closed it"
    scheduler.close()
    other.close()
    assert not has_room(scheduler)
    again = opened("one")
    assert again.store is not scheduler.store
    again.close()


def test_connectors_of_one_engine_with_other_options_have_other_tiers() -> None:
    """As children of a `MultiConnector` have."""
    small, large = opened("one"), opened("one", max_local_cpu_size=0.004)
    assert small.store is not large.store
    small.close()
    assert has_room(large)
    large.close()
