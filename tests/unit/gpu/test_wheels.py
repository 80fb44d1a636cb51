"""What travels to a machine without a package index is enough."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

from tests.gpu import wheels
from tests.gpu.__main__ import PARTS

PARTS_WITHOUT_VLLM = [f"tests.gpu.{part}" for part in PARTS if part != "vllm"]
IMPORTED = ["tests.gpu.__main__", *PARTS_WITHOUT_VLLM, "tests.fixtures.sidecar"]
IMPORTED += ["lmcache_sidecar.__main__", "lmcache_sidecar.app", "lmcache_demo"]
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


def absent_modules() -> str:
    """The modules installed here that do not travel, by commas."""
    there = with_needs((*wheels.CARRIED, *wheels.PRESENT))
    modules = importlib.metadata.packages_distributions()
    return ",".join(
        module
        for module, names in modules.items()
        if not module.startswith("lmcache") and not {normal(name) for name in names} & there
    )


def test_what_travels_is_all_that_the_parts_need(tmp_path: Path) -> None:
    """With the path that the command prints."""
    _, path, run = wheels.usage(tmp_path).splitlines()
    assert run == "python3 -m tests.gpu"
    folders = [str(wheels.ROOT / folder) for folder in path.partition("=")[2].split(":")]
    command = [sys.executable, "-c", SCRIPT, absent_modules(), ",".join(IMPORTED)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run(command, cwd=wheels.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
