"""Bundled packages are found where they are missing, and only there."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from lmcache_core.integrations import vllm

SOURCES = Path(vllm.__file__).parents[3]
TAG = f"cp{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
PACKAGES = Path(sysconfig.get_paths()["purelib"])
ASK = """
import sys, pathlib
sys.path.append({sources!r})
from lmcache_core.integrations.vllm import append_missing
changed = append_missing(pathlib.Path({folder!r})), append_missing(pathlib.Path({folder!r}))
import msgspec, xxhash, lmcache_core.record
print(*changed, pathlib.Path(msgspec.__file__).parent.parent, pathlib.Path(xxhash.__file__).parent.parent)
"""  # noqa: E501


def pack(folder: Path, *names: str) -> Path:
    """The packages of this Python, as a payload has them."""
    place = folder / TAG
    place.mkdir(parents=True)
    for name in names:
        (place / name).symlink_to(PACKAGES / name)
    return place


def ask(folder: Path, *more: Path) -> list[str]:
    """What an interpreter says that has these folders, and no site-packages."""
    code = "".join(f"import sys; sys.path.append({str(one)!r})\n" for one in more) + ASK.format(
        sources=str(SOURCES), folder=str(folder)
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.split()


def test_missing_packages_are_found(tmp_path: Path) -> None:
    place = pack(tmp_path, "msgspec", "xxhash")
    assert ask(tmp_path) == ["True", "False", str(place), str(place)]


def test_installed_packages_win(tmp_path: Path) -> None:
    place = pack(tmp_path / "bundled", "msgspec", "xxhash")
    theirs = pack(tmp_path / "theirs", "msgspec")
    assert ask(tmp_path / "bundled", theirs) == ["True", "False", str(theirs), str(place)]


def test_installed_distribution_bundles_nothing() -> None:
    before = list(sys.path)
    assert not vllm.append_missing()
    assert sys.path == before
    assert not vllm.BUNDLED.exists()


def test_connector_looks_for_packages_before_it_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def append() -> bool:
        raise LookupError

    monkeypatch.setattr(vllm, "append_missing", append)
    with pytest.raises(LookupError):
        _ = vllm.LMCacheConnector
