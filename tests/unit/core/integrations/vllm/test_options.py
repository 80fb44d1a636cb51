"""Options: each error names the value and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.integrations.vllm.options import read_options

PLACE = {"max_local_cpu_size": 1.0}


@pytest.fixture(autouse=True)
def _no_options_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_CONFIG_FILE", raising=False)


@pytest.mark.parametrize("prefix", ["", "lmcache."])
def test_names_with_and_without_prefix(prefix: str) -> None:
    options = read_options(
        {
            prefix + "max_local_cpu_size": 2.0,
            prefix + "chunk_size": 64,
            prefix + "layout": "tokens",
        },
        "cpu",
    )
    assert (options.engine.max_local_cpu_size, options.engine.chunk_size, options.layout) == (
        2.0,
        64,
        "tokens",
    )


def test_what_is_meant_for_others_is_passed_over() -> None:
    assert (
        read_options(
            {**PLACE, "other_connector": 1, "path": "x", "block_size": 16, "connectors": []}, "cpu"
        ).engine.max_local_cpu_size
        == 1.0
    )


@pytest.mark.parametrize(("device", "layout"), [("cpu", "blocks"), ("cuda", "tokens")])
def test_defaults_are_those_of_the_device(device: str, layout: str) -> None:
    options = read_options(PLACE, device)
    assert options.layout == layout
    assert read_options({**PLACE, "layout": "auto"}, device) == options


@pytest.mark.parametrize(("load", "is_warned"), [("sync", True), ("async", False)])
def test_an_engine_with_the_former_option_load_still_starts(
    load: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_options({**PLACE, "lmcache.load": load}, "cpu") == read_options(PLACE, "cpu")
    warning = "lmcache.load=sync has no effect, all loads are asynchronous: leave the option out"
    assert (warning in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("extra", "complaint"),
    [
        ({"lmcache.chunk_sise": 64}, r"lmcache\.chunk_sise is no option.*chunk_size"),
        ({"lmcache.load": "later"}, r"lmcache\.load='later': must be async, or left out"),
        (
            {"lmcache.layout": "pages"},
            r"lmcache\.layout='pages': must be one of auto, blocks, tokens",
        ),
        ({"lmcache.chunk_size": 0}, "chunk_size=0"),
        ({"lmcache.revision": 7}, r"lmcache\.revision=7: must be text"),
        ({"lmcache.model_name": ""}, r"lmcache\.model_name='': must be text"),
        ({"lmcache.config_file": True}, r"lmcache\.config_file=True: must be text"),
        ({"lmcache.sidecar_socket": "/run/s.sock", "lmcache.salt": "x"}, "salt"),
        ({"chunksize": 64}, r"chunksize is no option; did you mean lmcache\.chunk_size\?"),
        (
            {"lmcache_chunk_size": 64},
            r"lmcache_chunk_size is no option; did you mean lmcache\.chunk_size\?",
        ),
        ({"LMCACHE_SIDECAR_SOCKET": "/s"}, r"did you mean lmcache\.sidecar_socket\?"),
        (
            {"lmcache-chunk-sise": 64},
            r"lmcache-chunk-sise is no option; did you mean lmcache\.chunk_size\?",
        ),
        ({"lmcache.sidecar_socket": "/" + 107 * "s"}, "an absolute path of at most 107 bytes"),
        (
            {"lmcache.sidecar_socket": "unix:///run/s.sock"},
            "an absolute path of at most 107 bytes, without a scheme",
        ),
        ({"lmcache.sidecar_socket": "s.sock"}, "an absolute path"),
        ({"lmcache.sidecar_socket": "/tmp"}, r"sidecar_socket='/tmp': is a directory"),
        (
            {"lmcache.sidecar_socket": "/s", "lmcache.local_disk": "file:///d/"},
            r"local_disk=.*, sidecar_socket='/s': the tiers are the sidecar's",
        ),
    ],
)
def test_errors(extra: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_options(PLACE | extra if "lmcache.sidecar_socket" not in extra else extra, "cpu")


def test_a_disk_may_be_a_plain_path() -> None:
    options = read_options(
        {
            "lmcache.max_local_cpu_size": 1.0,
            "lmcache.local_disk": "/kv",
            "lmcache.max_local_disk_size": 1,
        },
        "cpu",
    )
    assert options.engine.local_disk == "file:///kv"


def test_a_place_for_kv_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r'names no place for KV: set "lmcache\.sidecar_socket".*max_local_cpu_size',
    ):
        read_options({}, "cpu")
    monkeypatch.setenv("LMCACHE_SIDECAR_SOCKET", "/run/s.sock")
    assert read_options({}, "cpu").engine.sidecar_socket == "/run/s.sock"


def test_a_file_and_what_stands_over_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\nmax_local_cpu_size: 3\n")
    of_file = read_options(
        {"lmcache.config_file": str(file), "lmcache.chunk_size": 32}, "cpu"
    ).engine
    assert (of_file.chunk_size, of_file.max_local_cpu_size) == (32, 3)
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    assert read_options({}, "cpu").engine.chunk_size == 64


def test_short_chunks_are_never_stored() -> None:
    assert not read_options(
        {**PLACE, "lmcache.save_unfull_chunk": True}, "cpu"
    ).engine.save_unfull_chunk


def test_names_that_are_given() -> None:
    options = read_options(
        {**PLACE, "model_name": "m", "revision": "r", "kv_cache_layout": "HND"}, "cpu"
    )
    assert (options.model_name, options.revision, options.kv_cache_layout) == ("m", "r", "HND")


def test_blending_is_refused_not_ignored() -> None:
    with pytest.raises(
        ConfigError, match="enable_blending=True: vLLM lets a connector load prefixes only"
    ):
        read_options({**PLACE, "enable_blending": True}, "cpu")
