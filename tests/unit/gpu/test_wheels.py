"""What travels to a machine without a package index is enough, and can be downloaded."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.gpu import wheels
from tests.gpu.__main__ import PARTS
from tests.vllm import processes

PARTS_WITHOUT_VLLM = [f"tests.gpu.{part}" for part in PARTS if part != "vllm"]
IMPORTED = ["tests.gpu.__main__", *PARTS_WITHOUT_VLLM, "tests.fixtures.sidecar"]
IMPORTED += ["lmcache_sidecar.__main__", "lmcache_sidecar.app"]
SCRIPT = """
import importlib, importlib.abc, sys
absent, imported = (names.split(",") for names in sys.argv[1:])

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
for name in imported:
    importlib.import_module(name)
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def with_needs(names: tuple[str, ...]) -> set[str]:
    """These distributions, and what they need."""
    found, left = set[str](), list(names)
    while left:
        name = normal(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        left += [
            need.name
            for need in map(Requirement, needs)
            if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
    return found


def absent_modules(carried: tuple[str, ...]) -> str:
    there = with_needs((*carried, *wheels.PRESENT))
    modules = importlib.metadata.packages_distributions()
    return ",".join(
        module
        for module, names in modules.items()
        if not module.startswith("lmcache") and not {normal(name) for name in names} & there
    )


def test_the_parts_need_nothing_else() -> None:
    command = [sys.executable, "-c", SCRIPT, absent_modules(wheels.CARRIED), ",".join(IMPORTED)]
    done = subprocess.run(command, cwd=wheels.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["msgspec", "uvicorn"])
def test_what_is_not_carried_is_missed(name: str) -> None:
    carried = tuple(other for other in wheels.CARRIED if other != name)
    command = [sys.executable, "-c", SCRIPT, absent_modules(carried), ",".join(IMPORTED)]
    done = subprocess.run(command, cwd=wheels.ROOT, capture_output=True, text=True)
    assert f"No module named '{name}" in done.stderr


def test_the_command_is_for_another_python(tmp_path: Path) -> None:
    command = wheels.command(tmp_path, "3.12")
    assert command[1:4] == ["-m", "pip", "download"]
    assert "--only-binary=:all:" in command
    assert command[command.index("--python-version") + 1] == "3.12"
    assert command[-len(wheels.CARRIED) :] == list(wheels.CARRIED)


def test_what_is_printed_makes_the_parts_importable(tmp_path: Path) -> None:
    _, path, run = wheels.usage(tmp_path).splitlines()
    folders = path.partition("=")[2].split(":")
    here = Path(wheels.ROOT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(str(here / folder) for folder in folders)}
    script = "import lmcache_core, lmcache_kernels, lmcache_sidecar, lmcache_demo, tests.gpu as m"
    script += f"; assert lmcache_core.__file__.startswith({str(here)!r}), lmcache_core.__file__"
    subprocess.run([sys.executable, "-c", script], cwd=here, env=env, check=True)
    assert run == "python3 -m tests.gpu"


def test_services_beside_vllm_find_what_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/tmp/site")
    monkeypatch.setattr(processes, "OUR_PYTHON", Path("/usr/bin/python3"))
    assert processes.our_environment()["PYTHONPATH"].endswith(f"{os.pathsep}/tmp/site")
    monkeypatch.setattr(processes, "OUR_PYTHON", processes.INSTALLED)
    assert "/tmp/site" not in processes.our_environment()["PYTHONPATH"]
