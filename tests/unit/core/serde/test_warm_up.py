"""Warming up compiles everything that codecs run, so that no request does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmcache_core
import numba
import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.serde import CODEC_NAMES, create_codec, warm_up
from lmcache_core.serde.machine_code import load_loops
from numba.core import compiler

from tests.suites.codec_payloads import (
    CASES,
    decode_between_guards,
    header_of,
    kv_payload,
    specs_of,
)

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


def test_the_command_says_where_and_how_long(
    capsys: pytest.CaptureFixture[str], loops: list[Any]
) -> None:
    assert warm_up.main([]) == 0
    printed = capsys.readouterr()
    assert f"{loops[0].stats.cache_path}\n" in printed.out
    assert " read, in " in printed.out
    assert printed.err == ""


@pytest.mark.usefixtures("loops")
def test_code_that_cannot_be_kept_is_an_error_of_the_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_loops().choose, "is_kept", False)
    assert warm_up.main([]) == 1
    assert "choose could not be kept" in capsys.readouterr().err


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
