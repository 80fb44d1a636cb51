"""The connector in a real vLLM. Run by `make test-vllm`, never by `make test`."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.engines import be_unhurried, release, set_environment

set_environment()  # before anything imports torch, which reads it once
be_unhurried()

from tests.vllm.models import made_models  # noqa: E402
from tests.vllm.processes import ROOT, Owner  # noqa: E402
from tests.vllm.references import References  # noqa: E402
from tests.vllm.worlds import World  # noqa: E402


def pytest_report_header() -> str:
    """Which releases meet here."""
    versions = [
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "transformers", "msgspec", "xxhash")
    ]
    vllm = ".".join(map(str, release()))
    return f"python {sys.version.split()[0]}, vllm {vllm}, " + ", ".join(versions)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this release of vLLM cannot do."""
    beyond = [
        item
        for item in items
        if any(release(marker.args[0]) > release() for marker in item.iter_markers("since"))
    ]
    if beyond:
        config.hook.pytest_deselected(items=beyond)
        items[:] = [item for item in items if item not in beyond]


def pytest_collection_finish() -> None:
    """Refuse test modules that import numba: in a process with it vLLM starts one engine only."""
    if "llvmlite" in sys.modules:
        raise pytest.UsageError("a test module imports numba: leave that to another process")


@pytest.fixture(scope="session")
def models() -> Path:
    """The directory of the tiny models."""
    return made_models(ROOT / ".vllm")


@pytest.fixture(scope="session")
def references(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    """Answers without any cache."""
    with Owner(tmp_path_factory.mktemp("references")) as owner:
        yield References(owner, models)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[Owner]:
    """Of the processes of one test."""
    with Owner(tmp_path) as owner:
        yield owner


@pytest.fixture
def world(owner: Owner, models: Path, references: References) -> World:
    """What a test begins with."""
    return World(owner, models, references)
