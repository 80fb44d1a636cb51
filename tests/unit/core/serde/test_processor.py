"""Machine code for a common kind of processor, named by a mark next to it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import lmcache_core
import pytest
from lmcache_core.serde import machine_code as processor
from lmcache_core.serde import warm_up

TIMEOUT_S = 300.0
"""Only a hang takes so long: a busy machine compiles for minutes."""

# What the codec that a service opens is compiled for; llvmlite says what this machine has, so it
# may be made to say less.
OPENED = """
from llvmlite import binding
{lacking}
{before}
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


def opened(package: Path, lacking: str = "", before: str = "", **env: str) -> tuple[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", OPENED.format(lacking=lacking, before=before)],
        env={"PYTHONPATH": str(package.parent), **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
    )
    kind, num_features = done.stdout.split()
    return kind, int(num_features)


def test_without_a_mark_it_is_this_machine_s_own(package: Path) -> None:
    kind, num_features = opened(package)
    assert kind not in (processor.GENERIC, processor.AVX2)
    assert num_features > 0


def test_a_mark_is_followed_where_the_machine_has_what_it_names(package: Path) -> None:
    mark(package, processor.GENERIC)
    assert opened(package) == (processor.GENERIC, 0)
    assert opened(package, lacking=NO_AVX2) == (processor.GENERIC, 0)
    assert opened(package, before="import numba")[1] > 0, "numba has chosen already"
    assert opened(package, NUMBA_CPU_NAME="core2")[0] == "core2", "chosen by hand"


def test_a_better_kind_is_used_only_on_a_processor_that_has_its_features(package: Path) -> None:
    mark(package, processor.AVX2)
    has_it = processor.has_processor(processor.AVX2)
    assert (opened(package) == (processor.AVX2, 0)) == has_it
    assert opened(package, lacking=NO_AVX2)[0] != processor.AVX2, (
        "it would end with an illegal instruction"
    )


def test_an_unknown_mark_is_ignored(package: Path) -> None:
    mark(package, "z80")
    assert opened(package)[1] > 0


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


def test_a_mark_that_cannot_be_kept_is_an_error_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(processor, "MARK", tmp_path / "file" / "mark")
    assert warm_up.main(["--portable"]) == 1
    assert "the kind of processor cannot be kept" in capsys.readouterr().err
