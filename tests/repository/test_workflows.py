"""GitHub's workflows and the commit hooks run commands that exist, and CI leaves out nothing of
`.ci/run`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmcache_core import __version__

from tests.cluster.kind import NAMESPACE
from tests.cluster.names import RELEASE
from tests.fixtures import dockerfile

ROOT = Path(__file__).resolve().parents[2]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
RUN = ROOT / ".ci/run"
RULES = {".venv/.tools"}
VARIABLES = set(re.findall(r"^([A-Z_]+) [?:]=", MAKEFILE, re.MULTILINE))
RELEASED = ROOT / ".github/workflows/release.yml"
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def jobs(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"])


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job["steps"]


def commands(path: Path) -> str:
    return "\n".join(re.sub(r"\$\{\{.*?\}\}", "", step.get("run", "")) for step in steps(path))


def made(text: str) -> set[str]:
    """Return the targets of every call of make, and check its variables."""
    found = set()
    for line in re.findall(r"(?:^|&& |; |{ |\|\| |  )make ([^|;&\n]+)", text, re.MULTILINE):
        for word in line.split():
            name, is_variable, _ = word.partition("=")
            if is_variable:
                assert name in VARIABLES, f"make {word}"
            elif not word.startswith("-"):
                found.add(word)
    return found


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_runs_exists(path: Path) -> None:
    text = commands(path)
    targets = made(text)
    assert targets - TARGETS - RULES == set()
    for module in re.findall(r"python -m (tests[\w.]*)", text):
        assert importlib.util.find_spec(module) is not None, module
    for file in re.findall(r"(?<![\w/.-])((?:helm|docker|tests|docs)/[\w./-]+)", text):
        assert (ROOT / file).exists(), file


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_do_little_and_ends(path: Path) -> None:
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}
    for name, job in jobs(path).items():
        assert job["timeout-minutes"] <= 180, name
    for step in steps(path):
        action = step.get("uses", "")
        assert not action or re.search(r"@[0-9a-f]{40}$", action), f"{action}: pin its commit"
        if action.startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_ci_runs_what_is_run_before_a_merge() -> None:
    """`pythons` is left out: GitHub runs every test on each of them."""
    [listed] = re.findall(r'^JOBS="(.+)"$', RUN.read_text(encoding="utf-8"), re.MULTILINE)
    called = re.findall(r"\.ci/run (.+)", commands(ROOT / ".github/workflows/ci.yml"))
    assert sorted(" ".join(called).split()) == sorted(set(listed.split()) - {"pythons"})


def test_what_ci_makes_exists() -> None:
    text = re.sub(r"make -j\d", "make", RUN.read_text(encoding="utf-8"))
    assert {"lint", "test", "test-vllm-releases", "environments"} <= made(text)
    assert made(text) - TARGETS - RULES == set()


def test_e2e_runs_one_release_at_a_time() -> None:
    text = commands(ROOT / ".github/workflows/e2e.yml")
    removal = (
        f"helm uninstall {RELEASE} --namespace {NAMESPACE}\nkubectl delete namespace {NAMESPACE}"
    )
    assert text.index("make kind-up") < text.index(removal) < text.index("make test-cluster")


def test_base_images_get_their_digests() -> None:
    """A tag may name another image tomorrow. Renovate finds it in a Dockerfile's FROM, and in the
    chart as repository and tag; in the chart an operator's `digest` wins over both.
    """
    renovate = json.loads((ROOT / ".github/renovate.json").read_text(encoding="utf-8"))
    assert {"matchDatasources": ["docker"], "pinDigests": True} in renovate["packageRules"]
    for path in (ROOT / "docker").glob("*.Dockerfile"):
        bases = {stage.base for stage in dockerfile.parse(path)}
        [base] = bases
        assert re.fullmatch(r"[\w./-]+:[\w.-]+(@sha256:[0-9a-f]{64})?", base), path.name
    values = yaml.safe_load((ROOT / "helm/lmcache/values.yaml").read_text(encoding="utf-8"))
    images = list(images_in(values))
    assert len(images) == 10
    assert all({"repository", "tag", "digest"} <= one.keys() for one in images)


def images_in(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, one in values.items():
        if isinstance(one, dict):
            if re.search("[iI]mage$", name):
                yield one
            yield from images_in(one)


def test_ci_runs_on_every_python_that_is_promised() -> None:
    promised = re.search(
        r"must run on ([\d., and]+\d)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    )
    assert promised is not None
    matrix = jobs(ROOT / ".github/workflows/ci.yml")["test"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r"3\.\d+", promised[1])


def test_hooks_run_what_can_be_made() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for repo in config["repos"] for hook in repo["hooks"]]
    assert made("\n".join(entries)) <= TARGETS
    assert len(entries) == len({hook["id"] for repo in config["repos"] for hook in repo["hooks"]})


def test_the_release_publishes_every_package_and_image() -> None:
    manifests = [
        path.relative_to(ROOT).as_posix()
        for pattern in ("libs/*", "services/*", "kernels")
        for path in ROOT.glob(f"{pattern}/pyproject.toml")
    ]
    [listed] = re.findall(r"^MANIFESTS := (.*)$", MAKEFILE, re.MULTILINE)
    patterns = re.findall(r"[\w/*]+/pyproject\.toml", listed)
    assert sorted(manifests) == sorted(
        path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)
    )
    assert {"wheels"} <= made(commands(RELEASED))


def run_step(path: Path, name: str, folder: Path, **variables: str) -> int:
    """Run the script of a step in a folder, as GitHub does; return its exit code."""
    [script] = (step["run"] for step in steps(path) if step.get("name", "") == name)
    environ = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        **variables,
    }
    command = ["bash", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=folder, env=environ, timeout=60, check=False).returncode


@pytest.mark.parametrize(
    ("version", "changelog", "is_accepted"),
    [
        (__version__, f"## [Unreleased]\n\n## [{__version__}] - 2026-01-01\n\nThe first.\n", True),
        (__version__, f"## [{__version__}] - 2026-01-01\n\n## [0.0.1]\n\nText.\n", False),
        (__version__, "## [Unreleased]\n\nText.\n", False),
        ("9.9.9", "## [9.9.9]\n\nText.\n", False),
    ],
    ids=["right", "empty", "none", "version"],
)
def test_a_release_begins_with_its_version_and_its_notes(
    tmp_path: Path, version: str, changelog: str, is_accepted: bool
) -> None:
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    name = "The tag is the version of everything, and the changelog has its section"
    assert (run_step(RELEASED, name, tmp_path, VERSION=f"v{version}") == 0) == is_accepted
    if is_accepted:
        assert (tmp_path / "notes.md").read_text().strip() == "The first."


@pytest.mark.parametrize(("job", "build"), [("wheels", "make wheels"), ("chart", "helm package")])
def test_what_is_published_names_this_repository(job: str, build: str) -> None:
    text = "\n".join(step.get("run", "") for step in jobs(RELEASED)[job]["steps"])
    written = text.index('-m tests.version "$GITHUB_SERVER_URL/$GITHUB_REPOSITORY"')
    assert written < text.index(build)


@pytest.mark.parametrize(("tag", "is_early"), [("v1.0.0", False), ("v1.0.0-rc1", True)])
def test_a_release_candidate_is_marked(tmp_path: Path, tag: str, is_early: bool) -> None:
    for name in ("sbom", "wheels", "notes"):
        (tmp_path / "artifacts" / name).mkdir(parents=True)
    gh = tmp_path / "gh"
    gh.write_text('#!/bin/sh\necho "$@" > called\n')
    gh.chmod(0o755)
    name = "The changelog's section, the packages and the lists of contents"
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    assert run_step(RELEASED, name, tmp_path, VERSION=tag, PATH=path) == 0
    called = (tmp_path / "called").read_text().split()
    assert called[:3] == ["release", "create", tag]
    assert ("--prerelease" in called) == is_early


def test_the_published_chart_takes_the_published_images(tmp_path: Path) -> None:
    values = tmp_path / "helm/lmcache/values.yaml"
    values.parent.mkdir(parents=True)
    before = (ROOT / "helm/lmcache/values.yaml").read_text(encoding="utf-8")
    values.write_text(before)
    name = "The published chart takes the published images"
    assert run_step(RELEASED, name, tmp_path, GITHUB_REPOSITORY="Some/Name") == 0
    wanted = yaml.safe_load(before)
    wanted["images"]["registry"] = "ghcr.io/some/name"
    assert yaml.safe_load(values.read_text(encoding="utf-8")) == wanted
