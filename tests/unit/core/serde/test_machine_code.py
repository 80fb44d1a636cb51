"""Machine code of codecs: kept next to the source, for a common kind of processor, never stale, and
compiled before any request; and the threads that run it.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lmcache_core
import numba
import numpy as np
import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.serde import CODEC_NAMES, create_codec, machine_code, warm_up
from lmcache_core.serde import machine_code as processor
from lmcache_core.serde.machine_code import compiled, load_loops, side_by_side
from numba.core import caching, compiler

from tests.suites.codec_payloads import (
    CASES,
    decode_between_guards,
    header_of,
    kv_payload,
    specs_of,
)

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


def test_code_is_compiled_once_and_read_from_then_on(path: Path) -> None:
    first: Any = load(path)
    options = {"nogil": True, "fastmath": False, "error_model": "numpy"}
    assert first.targetoptions.items() >= options.items(), "IEEE 754, without the GIL"
    assert hits_and_misses(first) == (0, 1)
    assert first.is_kept
    assert list((path.parent / "__pycache__").glob("*.nbi"))
    second = load(path)
    assert hits_and_misses(second) == (1, 0)
    assert added(first, 5) == added(second, 5) == [5, 6, 7]


def test_code_is_compiled_and_not_kept_on_a_read_only_file_system(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caching.tempfile, "TemporaryFile", refuse)
    monkeypatch.setattr(caching.os, "makedirs", refuse)
    monkeypatch.setattr(caching.IndexDataCacheFile, "_open_for_write", refuse)
    loop: Any = load(path)
    assert hits_and_misses(loop) == (0, 1)
    assert not loop.is_kept
    assert not list(path.parent.rglob("*.nb*"))
    assert added(loop, 1) == [1, 2, 3]


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


TIMEOUT_S = 300.0
"""Only a hang takes so long: a busy machine compiles for minutes."""


# What the codec that a service opens is compiled for; llvmlite says what this machine has, so it
# may be made to say less.
OPENED = """
from llvmlite import binding
{lacking}
from lmcache_core.serde import create_codec
create_codec("cachegen")
from numba.core.registry import cpu_target
_, kind, features = cpu_target.target_context.codegen().magic_tuple()
print(kind, len(features))
"""
NO_AVX2 = (
    "has = binding.get_host_cpu_features(); has['avx2'] = False; binding.get_host_cpu_features ="
    " lambda: has"
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the core without machine code."""
    source = Path(lmcache_core.__file__).parent
    return shutil.copytree(
        source, tmp_path / source.name, ignore=shutil.ignore_patterns("__pycache__")
    )


def mark(package: Path, kind: str) -> None:
    place = package / processor.MARK.relative_to(Path(lmcache_core.__file__).parent)
    place.parent.mkdir()
    place.write_text(kind, encoding="ascii")


def opened(package: Path, lacking: str = "", **env: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", OPENED.format(lacking=lacking)],
        env={"PYTHONPATH": str(package.parent), **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    kind, num_features = done.stdout.split()
    return kind, int(num_features)


def test_a_mark_is_followed_where_the_machine_has_what_it_names(package: Path) -> None:
    mark(package, processor.GENERIC)
    assert opened(package) == (processor.GENERIC, 0)
    assert opened(package, NUMBA_CPU_NAME="core2")[0] == "core2", "chosen by hand"


def test_a_better_kind_is_used_only_on_a_processor_that_has_its_features(package: Path) -> None:
    mark(package, processor.AVX2)
    has_it = processor.has_processor(processor.AVX2)
    assert (opened(package) == (processor.AVX2, 0)) == has_it
    assert opened(package, lacking=NO_AVX2)[0] != processor.AVX2, (
        "it would end with an illegal instruction"
    )


def test_the_best_kind_that_the_machine_has_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "MARK", tmp_path / "new" / "mark")
    kind = processor.mark_common_processor()
    assert kind == (
        processor.AVX2 if processor.has_processor(processor.AVX2) else processor.GENERIC
    )
    assert (tmp_path / "new" / "mark").read_text(encoding="ascii") == kind
    monkeypatch.setattr(processor.platform, "machine", lambda: "aarch64")
    assert processor.mark_common_processor() == processor.GENERIC


WITHOUT_WRITING = """
import builtins, errno, os, sys, tempfile
def refuse(*a, **k):
    raise OSError(errno.EROFS, "Read-only file system")
really_open = builtins.open
def only_read(file, mode="r", *a, **k):
    return refuse() if set(mode) & set("wax+") else really_open(file, mode, *a, **k)
builtins.open, os.makedirs, os.mkdir, os.replace, tempfile.TemporaryFile = only_read, refuse, refuse, refuse, refuse
sys.dont_write_bytecode = True
from lmcache_core.serde import warm_up
print(warm_up.__file__)
found = warm_up.warm_up()
print(found.num_compiled, found.num_read, *found.not_kept)
assert "torch" not in sys.modules
"""  # noqa: E501


@pytest.fixture(scope="module")
def loops() -> list[Any]:
    """All machine code; compiled now if it was not before."""
    return [*vars(load_loops()).values()]


@pytest.fixture
def no_compiler(loops: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled on a request")

    for name in ("compile_extra", "compile_internal", "compile_ir"):
        monkeypatch.setattr(compiler, name, refuse)
    with pytest.raises(AssertionError, match="on a request"):
        numba.njit(lambda number: number + 1)(1)


def test_all_machine_code_is_compiled_or_read(loops: list[Any]) -> None:
    found = warm_up.warm_up()
    assert (
        found.num_compiled + found.num_read
        == sum(len(loop.signatures) for loop in loops)
        >= len(loops)
        == 9
    )
    assert {folder.name for folder in found.folders} == {"__pycache__"}
    assert {folder.parent.name for folder in found.folders} == {"serde"}


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_no_request_compiles(name: str) -> None:
    codec = create_codec(name, threads=2)
    assert codec is not None
    codec.open()
    for tensors in CASES.values():
        specs = specs_of(*tensors)
        found = codec.encode(specs, memoryview(kv_payload(specs, 0)))
        if found is not None:
            decode_between_guards(codec, header_of(found), found.payload)
            decode_between_guards(codec, header_of(found), memoryview(bytearray(found.payload)))
    codec.close()


@pytest.mark.usefixtures("loops")
def test_a_package_that_cannot_be_written_is_read(tmp_path: Path) -> None:
    """Warmed up, taken elsewhere as from one stage of an image to the next, on a file system
    that lets nothing be written.
    """
    package = Path(lmcache_core.__file__).parent
    shutil.copytree(package, tmp_path / package.name, copy_function=shutil.copyfile)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_WRITING],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    file, counts = done.stdout.splitlines()
    assert file.startswith(str(tmp_path))
    num_compiled, num_read, *not_kept = counts.split()
    assert (num_compiled, not_kept) == ("0", [])
    assert int(num_read) == warm_up.warm_up().num_compiled + warm_up.warm_up().num_read


@pytest.mark.usefixtures("loops")
def test_code_that_cannot_be_kept_is_an_error_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_loops().choose, "is_kept", False)
    assert warm_up.main([]) == 1
    assert "choose could not be kept" in capsys.readouterr().err


PATIENCE_S = 60.0


def test_a_failure_waits_for_the_other_threads() -> None:
    """A caller who learns that a payload is damaged gives its memory back, and it becomes another
    chunk's: nothing may write to it any more.
    """
    gate, has_failed = threading.Event(), threading.Event()
    ended: list[int] = []
    raised: list[BaseException] = []

    def work(part: int) -> None:
        if part == 0:
            has_failed.set()
            raise ArithmeticError("the first")
        assert gate.wait(PATIENCE_S)
        ended.append(part)

    def call() -> None:
        try:
            side_by_side(pool, work, range(3))
        except ArithmeticError as exc:
            raised.append(exc)

    with ThreadPoolExecutor(3) as pool:
        calling = threading.Thread(target=call)
        calling.start()
        assert has_failed.wait(PATIENCE_S)
        calling.join(0.1)
        assert calling.is_alive(), "the others still work"
        gate.set()
        calling.join(PATIENCE_S)
    assert sorted(ended) == [1, 2]
    assert [str(one) for one in raised] == ["the first"]


def test_results_come_in_order_and_a_closed_pool_is_an_error() -> None:
    with ThreadPoolExecutor(3) as pool:
        assert side_by_side(pool, lambda part: 2 * part, range(50)) == list(range(0, 100, 2))
    with pytest.raises(RuntimeError):
        side_by_side(pool, lambda part: part, range(3))


def test_a_mark_that_cannot_be_kept_is_an_error_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(processor, "MARK", tmp_path / "file" / "mark")
    assert warm_up.main(["--portable"]) == 1
    assert "the kind of processor cannot be kept" in capsys.readouterr().err


def test_without_numba_the_command_names_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ConfigError(
            "this serde needs the package 'numba'; pip install './libs/lmcache_core[codec]'"
        )

    monkeypatch.setattr(warm_up, "load_loops", missing)
    assert warm_up.main([]) == 2
    assert "./libs/lmcache_core[codec]" in capsys.readouterr().err


def test_code_of_another_source_is_not_used(path: Path) -> None:
    load(path)
    # Of another length: Python takes the bytecode of a source of the same second and length.
    path.write_text(SOURCE.replace("+= amount", "-= 1 * amount"))
    loop = load(path)
    assert hits_and_misses(loop) == (0, 1)
    assert added(loop, 1) == [-1, 0, 1]
