"""The default directory, in a place where other users can write."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest
from lmcache_core.errors import ConfigError
from lmcache_sidecar import settings
from lmcache_sidecar.settings import make_private


def test_directory_is_for_this_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "run")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    make_private(tmp_path / "run")


@pytest.mark.parametrize("mode", [0o750, 0o701])
def test_directory_that_others_may_enter_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    with pytest.raises(ConfigError, match="socket_path and arena_path"):
        make_private(tmp_path / "run")


@pytest.mark.parametrize("kind", ["link", "file", "no parent"])
def test_path_that_is_no_directory_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    if kind == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        path.write_text("")
    else:
        path = tmp_path / "absent" / "run"
    with pytest.raises(ConfigError):
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
