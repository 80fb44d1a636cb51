"""Machine code: kept next to the source, read where nothing can be written, never stale, never
compiled for types that no signature names.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmcache_core.serde import machine_code
from lmcache_core.serde.machine_code import compiled
from numba.core import caching

SOURCE = (
    "def add(numbers, amount):\n    for i in range(numbers.size):\n        numbers[i] += amount\n"
)
SIGNATURE = "void(int64[::1], int64)"


def load(path: Path) -> Callable[..., Any]:
    """The function of a module in that file, compiled as another process would have it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return compiled(module.add, [SIGNATURE])


def added(loop: Callable[..., Any], amount: int) -> list[int]:
    numbers = np.arange(3)
    loop(numbers, amount)
    return numbers.tolist()


def hits_and_misses(loop: Any) -> tuple[int, int]:
    return sum(loop.stats.cache_hits.values()), sum(loop.stats.cache_misses.values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    source = tmp_path / "adding.py"
    source.write_text(SOURCE)
    return source


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


@pytest.fixture
def read_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes everything that numba writes with fail from now on."""

    def become() -> None:
        monkeypatch.setattr(caching.tempfile, "TemporaryFile", refuse)
        monkeypatch.setattr(caching.os, "makedirs", refuse)
        monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", refuse)

    return become


def test_code_is_compiled_once_and_read_from_then_on(path: Path) -> None:
    first: Any = load(path)
    assert hits_and_misses(first) == (0, 1)
    assert first.is_kept
    assert list((path.parent / "__pycache__").glob("*.nbi"))
    second = load(path)
    assert hits_and_misses(second) == (1, 0)
    assert added(first, 5) == added(second, 5) == [5, 6, 7]


def test_code_is_compiled_and_not_kept_on_a_read_only_file_system(
    path: Path, read_only: Callable[[], None]
) -> None:
    read_only()
    loop: Any = load(path)
    assert hits_and_misses(loop) == (0, 1)
    assert not loop.is_kept
    assert not list(path.parent.rglob("*.nb*"))
    assert added(loop, 1) == [1, 2, 3]


def test_code_of_another_source_is_not_used(path: Path) -> None:
    load(path)
    # Of another length: Python takes the bytecode of a source of the same second and length.
    path.write_text(SOURCE.replace("+= amount", "-= 1 * amount"))
    loop = load(path)
    assert hits_and_misses(loop) == (0, 1)
    assert added(loop, 1) == [-1, 0, 1]


def test_code_with_numbers_of_other_tables_is_not_used(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loops' own modules do not change with the numbers that they import, and the numbers
    are part of the code.
    """
    package = tmp_path / "package"
    package.mkdir()
    (package / "tables.py").write_text("PRECISION_BITS = 12\n")
    (package / "machine_code.py").write_text("")
    monkeypatch.setattr(machine_code, "__file__", str(package / "machine_code.py"))
    load(path)
    assert hits_and_misses(load(path)) == (1, 0)
    (package / "tables.py").write_text("PRECISION_BITS = 13\n")
    assert hits_and_misses(load(path)) == (0, 1)


def test_other_types_are_refused_and_not_compiled_for(path: Path) -> None:
    loop: Any = load(path)
    for arguments in (
        (np.arange(3, dtype=np.int32), 1),
        (np.arange(6)[::2], 1),
        (np.arange(3.0), 1),
        ([1, 2], 1),
    ):
        with pytest.raises(TypeError):
            loop(*arguments)
    assert len(loop.signatures) == 1


def test_code_divides_as_ieee_754_says_and_releases_the_gil(path: Path) -> None:
    path.write_text("def add(numbers, amount):\n    numbers[0] = amount // 1\n")
    loop: Any = load(path)
    assert loop.targetoptions["nogil"] is True
    assert loop.targetoptions["fastmath"] is False
    assert loop.targetoptions["error_model"] == "numpy"


def test_numba_that_may_not_compile_is_refused_with_the_fix() -> None:
    program = (
        "from lmcache_core.errors import ConfigError\n"
        "from lmcache_core.storage.codecs import create_codecs\n"
        "import asyncio\n"
        "try:\n"
        "    asyncio.run(create_codecs({'remote_serde': 'cachegen'}).open())\n"
        "except ConfigError as exc:\n"
        "    print(exc)\n"
    )
    environ = os.environ | {"NUMBA_DISABLE_JIT": "1"}
    child = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert child.stdout.startswith("remote_serde='cachegen': NUMBA_DISABLE_JIT is set"), child
