"""What packages say they need is what they import, and what messages and pages say to install
can be installed.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.extras import EXTRAS, install_line
from packaging.requirements import Requirement

from tests.fixtures.ctl import no_cluster as no_cluster

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
    "lmcache-core": {"sglang", "vllm", "prometheus-client", "typing-extensions"},
    "lmcache-ctl": {"lmcache-servicekit"},
}
EXTRA = re.compile(r"\./((?:libs|services)/\w+)\[([a-z0-9,_]+)\]")
ON_AN_INDEX = re.compile(r"\blmcache-[a-z]+\[|pip install (?:-\S+ )*'?lmcache[-_\[ ]")
"""A name that pip would look up there, where ours are not, and where anyone can take one."""
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
    named = {
        (folder, extra)
        for path in TEXTS
        for folder, listed in EXTRA.findall(path.read_text(encoding="utf-8"))
        for extra in listed.split(",")
    }
    named |= {("libs/lmcache_core", extra) for extra in EXTRAS.values()}
    assert len(named) > 6
    for folder, extra in named:
        assert extra in project_of(ROOT / folder / "pyproject.toml")["optional-dependencies"]


def test_no_text_names_a_package_of_ours_on_an_index() -> None:
    assert {path for path in TEXTS if ON_AN_INDEX.search(path.read_text(encoding="utf-8"))} == set()


@pytest.mark.parametrize(
    ("extra", "folders"),
    [
        *((extra, ()) for extra in sorted(set(EXTRAS.values()))),
        ("redis", ("libs/lmcache_core", "libs/lmcache_ctl")),
    ],
)
def test_an_extra_is_installed_from_a_checkout_alone(extra: str, folders: tuple[str, ...]) -> None:
    """All packages of ours that it brings are in the command, the one with the extra last."""
    command = install_line(extra, *folders)
    said = re.fullmatch(r"pip install (.*) in a checkout", command)
    assert said is not None, command
    *before, last = shlex.split(said[1])
    folder, _, named = last.partition("[")
    assert named == f"{extra}]"
    ours = {project_of(ROOT / each / "pyproject.toml")["name"] for each in [*before, folder]}
    project = project_of(ROOT / folder / "pyproject.toml")
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    seen: set[str] = set()
    manifests = {project_of(path)["name"]: project_of(path) for path in MANIFESTS}
    while wanted:
        requirement = Requirement(wanted.pop())
        if requirement.name in manifests and str(requirement) not in seen:
            seen.add(str(requirement))
            assert requirement.name in ours, requirement
            of = manifests[requirement.name]
            wanted += of["dependencies"]
            for each in requirement.extras:
                wanted += of["optional-dependencies"][each]


BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {modules!r}.split():
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def without(modules: str, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program where these cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED.format(modules=modules) + program],
        capture_output=True,
        text=True,
        check=False,
    )


TRYING = """
for statement in {statements!r}:
    try:
        exec(statement)
    except BaseException as exc:
        print(exc)
"""
CODEC = "from lmcache_core.serde import create_codec as f; f('cachegen').open()"
TRACER = "from lmcache_core.telemetry import tracing; tracing.open_tracer('http://h', 's', 'i')"
REDIS = "from lmcache_core.storage.remote import create_remote_backend as f; f('{}://h:1')"
WITHOUT: dict[str, dict[str, str]] = {
    "torch": {
        "import lmcache_core.engine": "torch",
        "from lmcache_core import LMCacheEngine": "torch",
        "from lmcache_core.memory import HostMemoryAllocator": "torch",
        "from lmcache_core.serde import TorchSerializer": "torch",
        "from lmcache_core.blend import CacheBlendImpl": "torch",
        "import lmcache_core.gpu_connectors": "torch",
        "import lmcache_core; lmcache_core.open": "transformers",
    },
    "numpy torch": {"from lmcache_core.token_database import ChunkedTokenDatabase": "torch"},
    "lmcache_kernels": {
        "from lmcache_core.gpu_connectors import VLLMPagedMemGPUConnector": "kernels"
    },
    "transformers": {"import lmcache_core; lmcache_core.open": "transformers"},
    "torch transformers": {"import lmcache_core.integrations.transformers": "transformers"},
    "numba": {CODEC: "codec"},
    "opentelemetry": {TRACER: "traces"},
    "redis": {REDIS.format(name): "redis" for name in ("redis", "rediss", "redis-sentinel")},
}
"""By packages that are missing, what is tried and the extra that brings them."""


@pytest.mark.parametrize("missing", WITHOUT)
def test_a_missing_package_is_one_sentence_with_the_command(missing: str) -> None:
    tried = WITHOUT[missing]
    found = without(missing, TRYING.format(statements=list(tried))).stdout.splitlines()
    for line, (statement, extra) in zip(found, tried.items(), strict=True):
        assert repr(missing.split()[0]) in line or missing in line, statement
        assert f": {install_line(extra)}" in line, statement


MAX_CTL_BYTES = 60_000_000
HEAVY = "numpy numba llvmlite torch transformers tokenizers safetensors"


def closure_of(requirements: list[str]) -> set[str]:
    """The distributions that these bring, as they are installed here."""
    found: set[str] = set()
    wanted = [(Requirement(one), {""}) for one in requirements]
    while wanted:
        requirement, extras = wanted.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": one}) for one in extras):
            continue
        if requirement.name not in found:
            found.add(requirement.name)
            more = {"", *requirement.extras}
            wanted += [(Requirement(one), more) for one in requires(requirement.name) or []]
    return {name_of(name) for name in found}


def test_the_command_line_brings_kubernetes_and_nothing_that_computes() -> None:
    base = closure_of(project_of(ROOT / "libs/lmcache_ctl/pyproject.toml")["dependencies"])
    assert {"kubernetes", "rich", "httpx"} <= base
    assert not base & set(HEAVY.split())


def test_the_command_line_is_small_and_a_plugin_of_kubectl() -> None:
    """Without bytecode, as `pip install --no-compile` leaves it out."""
    project = project_of(ROOT / "libs/lmcache_ctl/pyproject.toml")
    files = [
        Path(str(path.locate()))
        for name in closure_of(project["dependencies"])
        for path in distribution(name).files or []
        if path.suffix != ".pyc"
    ]
    # Installed editable here, so their own files are counted where they lie.
    for name in ("lmcache_core", "lmcache_ctl"):
        files += (ROOT / "libs" / name / "src").rglob("*.py")
    assert sum(file.stat().st_size for file in files if file.is_file()) < MAX_CTL_BYTES
    assert project["scripts"]["kubectl-lmcache"] == project["scripts"]["lmcachectl"]


def test_the_command_line_needs_nothing_that_computes() -> None:
    program = "from lmcache_ctl.cli import main; main({words!r})"
    tried = [program.format(words=[word]) for word in ("status", "version", "doctor")]
    done = without(HEAVY, TRYING.format(statements=tried))
    assert "Traceback" not in done.stderr
    assert "install" not in done.stdout + done.stderr


def test_the_vllm_connector_does_not_import_numba() -> None:
    """vLLM 0.32 cannot start a second engine in a process that has imported it."""
    code = (
        "import sys; import lmcache_core.serde.device, lmcache_core.engine.transfer;"
        " sys.exit('numba' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
