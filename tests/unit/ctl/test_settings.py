"""Where settings come from, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from lmcache_ctl.errors import UsageError
from lmcache_ctl.settings import CtlSettings, load_settings


def test_options_win_over_variables_and_those_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ctl.yaml"
    file.write_text(
        "lookup_urls: [http://file:1]\nbroker_urls: [http://file:2]\nstorage_urls:"
        " [http://file:3]\ntimeout_s: 1\n"
    )
    environ = {
        "LMCACHE_CTL_CONFIG": str(file),
        "LMCACHE_CTL_BROKER_URLS": "http://a:1, https://b:2",
        "LMCACHE_CTL_STORAGE_URLS": "http://v:3",
    }
    found = load_settings(
        {"storage_urls": ["http://option:3"], "lookup_urls": [], "timeout_s": None}, environ=environ
    )
    assert found.lookup_urls == ("http://file:1",)
    assert found.broker_urls == ("http://a:1", "https://b:2")
    assert found.storage_urls == ("http://option:3",)
    assert found.timeout_s == 1
    assert load_settings(
        {}, tmp_path / "ctl.yaml", {"LMCACHE_CTL_CONFIG": "/nowhere"}
    ).lookup_urls == ("http://file:1",)
    assert (
        load_settings(environ={"LMCACHE_LOOKUP_PORT": "1", "LMCACHE_CTL_TOKEN_FILE": ""})
        == CtlSettings()
    )


@pytest.mark.parametrize(
    ("given", "environ", "told"),
    [
        ({"timeout_s": -1}, {}, r"timeout_s=-1 \(the options\)"),
        ({}, {"LMCACHE_CTL_TIMEOUT_S": "soon"}, r"timeout_s='soon' \(the environment\)"),
        (
            {},
            {"LMCACHE_CTL_TIMEOUT": "1"},
            "LMCACHE_CTL_TIMEOUT sets nothing; did you mean 'LMCACHE_CTL_TIMEOUT_S'",
        ),
        ({}, {"LMCACHE_CTL_SIDECAR_URLS": "h:1"}, "an address begins with http://"),
        ({"lookup_urls": ["http://h"] * 1025}, {}, "lookup_urls="),
    ],
)
def test_what_is_wrong_is_named_with_where_it_is_from(
    given: dict[str, Any], environ: dict[str, str], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        load_settings(given, environ=environ)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            b"loockup_urls: [http://h:1]",
            "loockup_urls is not an option; did you mean 'lookup_urls'",
        ),
        (b"- a", "one `name: value` a line"),
        (b"a: [", "is not YAML"),
        (
            b"tls: a\nnamespace: b\ntls: c",
            "line 3: the name 'tls' is there twice; keep one of them",
        ),
        (b"\xff\xfe\x00", "is not YAML"),
        (b"token_file: 7", r"token_file=7 \(.*ctl.yaml\): it must be the path of a file"),
        (b"#" * (1 << 20) + b"#", "it is not a settings file"),
    ],
)
def test_a_file_that_is_none(content: bytes, told: str, tmp_path: Path) -> None:
    (tmp_path / "ctl.yaml").write_bytes(content)
    with pytest.raises(UsageError, match=told):
        load_settings({}, tmp_path / "ctl.yaml", {})


@pytest.mark.parametrize("text", ["s3cret-0123456789\n", " s3cret-0123456789\r\n"])
def test_a_token_from_a_file_ends_in_a_newline(text: str, tmp_path: Path) -> None:
    assert load_settings(environ={"LMCACHE_CTL_TOKEN": text}).token == "s3cret-0123456789"
    (tmp_path / "ctl.yaml").write_text("token: |\n  s3cret-0123456789\n")
    assert load_settings({}, tmp_path / "ctl.yaml", {}).token == "s3cret-0123456789"


@pytest.mark.parametrize("text", ["s3cret\n0123456789", "s3cret 0123456789", "\n", "s3crët"])
def test_a_token_that_no_header_can_carry_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(UsageError, match="must be visible ASCII characters") as refused:
        load_settings(environ={"LMCACHE_CTL_TOKEN": text})
    assert "s3cr" not in str(refused.value)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"token": "s3cret-0123456789\n"}, CtlSettings)


def test_no_test_asks_a_cluster_of_whoever_runs_it() -> None:
    assert not load_settings().asks_cluster
