"""What packages say they need is what they import, and what messages and pages say to install
can be installed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import lmcache_core
import pytest

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS = sorted(
    [
        ROOT / "kernels/pyproject.toml",
        *ROOT.glob("libs/*/pyproject.toml"),
        *ROOT.glob("services/*/pyproject.toml"),
    ]
)
# Imported only where they are there anyway: by vLLM's process, by a type checker, and where the
# doctor reads another package's settings.
GIVEN = {
    "lmcache-core": {"vllm", "prometheus-client", "typing-extensions"},
    "lmcache-ctl": {"lmcache-servicekit"},
}
EXTRA = re.compile(r"\b(lmcache-[a-z]+)\[([a-z0-9,_]+)\]")
TEXTS = [
    ROOT / "README.md",
    *(
        path
        for top in ("docs", "libs", "services", "kernels")
        for suffix in ("md", "py")
        for path in (ROOT / top).rglob(f"*.{suffix}")
    ),
]


def project_of(manifest: Path) -> Any:
    return tomllib.loads(manifest.read_text(encoding="utf-8"))["project"]


def name_of(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement)[0]).lower()


class AtRunTime(ast.NodeTransformer):
    """Drop what only type checkers import."""

    def visit_If(self, node: ast.If) -> Any:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return [self.visit(each) for each in node.orelse]
        return self.generic_visit(node)


def imported_by(source: Path) -> set[str]:
    found: set[str] = set()
    for path in source.rglob("*.py"):
        tree = AtRunTime().visit(ast.parse(path.read_text(encoding="utf-8")))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.parent.name)
def test_what_is_imported_is_declared(manifest: Path) -> None:
    """A dependency of a dependency may go with its next release."""
    project = project_of(manifest)
    required = [
        *project["dependencies"],
        *(one for extra in project.get("optional-dependencies", {}).values() for one in extra),
    ]
    declared = (
        {name_of(one) for one in required} | {project["name"]} | GIVEN.get(project["name"], set())
    )
    distributions = packages_distributions()
    missing = {
        module
        for module in imported_by(manifest.parent / "src")
        if not {name_of(one) for one in distributions.get(module, [module])} & declared
    }
    assert missing == set()


def test_every_extra_that_is_named_exists() -> None:
    extras = {
        project["name"]: set(project.get("optional-dependencies", {}))
        for project in map(project_of, MANIFESTS)
    }
    named = {
        (package, extra)
        for path in TEXTS
        for package, listed in EXTRA.findall(path.read_text(encoding="utf-8"))
        for extra in listed.split(",")
    }
    assert len(named) > 5
    assert {(package, extra) for package, extra in named if extra not in extras[package]} == set()


def without(modules: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program where these cannot be imported."""
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({modules!r}.split()))\n"
    return subprocess.run(
        [sys.executable, "-c", blocked + program], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis-sentinel"])
def test_a_remote_url_names_the_extra_that_it_needs(scheme: str) -> None:
    program = (
        "from lmcache_core.storage.remote import create_remote_backend as"
        f" make\nmake('{scheme}://h:1')"
    )
    assert (
        without("redis", program)
        .stderr.rstrip()
        .endswith("needs the package 'redis'; install lmcache-core[redis]")
    )


@pytest.mark.parametrize(
    ("module", "missing", "extra"),
    [
        ("lmcache_core.engine", "torch", "torch"),
        ("lmcache_core.gpu_connectors", "torch", "torch"),
        ("lmcache_core.integrations.transformers", "transformers", "transformers"),
        ("lmcache_core.integrations.transformers", "torch transformers", "transformers"),
    ],
)
def test_a_package_that_needs_an_extra_names_it(module: str, missing: str, extra: str) -> None:
    told = without(missing, f"import {module}").stderr.splitlines()[-1]
    assert told.startswith("ModuleNotFoundError: ")
    assert told.endswith(f"install lmcache-core[{extra}]")


def test_the_version_is_that_of_the_package() -> None:
    assert (
        lmcache_core.__version__ == project_of(ROOT / "libs/lmcache_core/pyproject.toml")["version"]
    )


HEAVY = "numpy numba llvmlite torch transformers tokenizers safetensors"


def test_the_command_line_needs_no_codec_but_for_codecs() -> None:
    program = (
        "import sys\nfrom lmcache_ctl.cli import main\nsys.argv = ['lmcachectl', {words}]\nmain()"
    )
    done = without(HEAVY, program.format(words="'codec', 'measure', '--tokens', '1'"))
    assert (done.returncode, done.stderr) == (
        2,
        "lmcachectl: this needs the package 'numpy': install lmcache-ctl[codec]\n",
    )
    done = without(
        HEAVY, program.format(words="'certify', 'blend', '--model', '/nowhere', '--separator', 'x'")
    )
    assert (done.returncode, "lmcache-ctl[model]" in done.stderr) == (2, True)
    for words in (
        "'status'",
        "'version'",
        "'bench', 'lm://127.0.0.1:9', '--seconds', '1'",
        "'codec', 'stats'",
        "'doctor'",
    ):
        done = without(HEAVY, program.format(words=words))
        assert "Traceback" not in done.stderr
        assert "install" not in done.stderr, words
