"""Settings that are refused, those that follow from others, and the default directory in a place
where other users can write.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.errors import ConfigError
from lmcache_servicekit.settings import load_settings
from lmcache_sidecar import settings
from lmcache_sidecar.settings import SidecarSettings, make_private

BOTH = {"lookup_url": "http://lookup:8081", "broker_url": "https://broker:8082"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lm_port": 8083}, "lm_port=8083 is the value of port too"),
        (BOTH | {"broker_url": "https://broker:8082/?token=x"}, "(?s)broker_url.*http://host:port"),
        ({"remote_url": "redis-sentinel://h:0"}, "(?s)remote_url.*a port in 1 … 65535"),
        ({"otlp_endpoint": "http://h:99999"}, "(?s)otlp_endpoint.*Port out of range"),
        ({"remote_url": "http://storage:8080"}, "(?s)remote_url.*write lm://host:port of the same"),
        ({"disk_path": "/x"}, "disk_gb is not set: set both or none"),
        ({"lookup_url": "http://localhost:1"}, "go together"),
        ({"lm_host": "10.0.0.1"}, "allow_anonymous"),
        (
            {"lm_host": "10.0.0.1", "ticket_keys_file": "/k"},
            "lm_host='10.0.0.1'.*allow_plaintext=true",
        ),
        ({"tls_cert_file": "/c", "distributed_url": "lm://pod:65433"}, r"write lm\+tls://"),
        ({"distributed_url": "http://x"}, "lm://host:port"),
        ({"arena_mode": "0888"}, "octal"),
        ({"arena_mode": 0o660}, "in quotes"),
        ({"disk_serde": "cachegn"}, "did you mean 'cachegen'"),
        ({"remote_serde": "lossless"}, "set remote_url"),
        ({"ticket_keys_file": "/y", "accept_handover": True}, "set auth_tokens_file too"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SidecarSettings(**options)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"auth_tokens_file": "/x", "lm_host": "10.0.0.1", "allow_plaintext": True}, True),
        ({"ticket_keys_file": "/y"}, False),
        ({"lm_host": "10.0.0.1", "allow_anonymous": True, "accept_handover": True}, True),
        ({"auth_tokens_file": "/x", "accept_handover": False}, False),
    ],
)
def test_chunks_of_peers_are_accepted_by_default_if_peers_authenticate(
    options: dict[str, Any], expected: bool
) -> None:
    assert SidecarSettings(**options).accept_handover is expected


def test_a_wrong_option_is_one_line_although_a_default_follows_from_it() -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(SidecarSettings, environ={"LMCACHE_SIDECAR_LM_PORT": "x"})
    assert str(caught.value).splitlines() == [str(caught.value)]
    assert "LMCACHE_SIDECAR_LM_PORT" in str(caught.value)


@pytest.mark.parametrize("password", ["hun/ter2", "hun'ter2", "hun@ter2"])
def test_refused_url_is_shown_without_its_password(password: str) -> None:
    with pytest.raises(ConfigError, match=r"://\*+@redis:6379") as caught:
        load_settings(
            SidecarSettings,
            None,
            {"LMCACHE_SIDECAR_REMOTE_URL": f"reddis://user:{password}@redis:6379/0"},
        )
    assert "ter2" not in str(caught.value)


def test_directory_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "run")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    make_private(tmp_path / "run")


@pytest.mark.parametrize("kind", ["0750", "0701", "link", "file", "no parent"])
def test_path_that_is_no_directory_of_this_user_alone_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        path.write_text("")
    elif kind == "no parent":
        path = tmp_path / "absent" / "run"
    else:
        path.mkdir()
        path.chmod(int(kind, 8))
    with pytest.raises(ConfigError, match="socket_path and arena_path"):
        make_private(path)


def test_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_private(tmp_path / "run")
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to this user"):
        make_private(tmp_path / "run")


@pytest.mark.parametrize("has_memory", [True, False])
def test_default_arena_is_in_shared_memory_if_there_is_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    monkeypatch.setattr(settings, "SHARED_MEMORY", tmp_path if has_memory else tmp_path / "absent")
    arena = settings.default_arena_directory()
    assert arena.is_relative_to(tmp_path if has_memory else settings.default_run_directory())
    assert settings.SidecarSettings(port=0).arena_path == arena


def test_missing_temporary_directory_does_not_prevent_other_paths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_place() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", no_place)
    assert settings.default_run_directory() == Path(settings.TEMPORARY) / f"lmcache-{os.getuid()}"
    assert settings.default_arena_directory().is_absolute()
