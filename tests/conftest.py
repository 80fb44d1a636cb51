"""What holds for every test process: how many there are, their threads, their signals, the patience
of Hypothesis; and tests without PyTorch.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.steady_time import SteadyLoop
from tests.fixtures.virtual_time import CLOCK, VirtualLoop
from tests.progress import Progress

MAX_PROCESSES = 4
TESTS = Path(__file__).parent
LONG = (
    "chaos",
    "contract/rest/test_openapi_documents.py",
    "fuzz",
    "helm",
    "integration/ctl/test_documented.py",
    "integration/demo",
    "integration/test_tutorial.py",
    "integration/transformers/test_every_kind.py",
    "property/test_engine_linearisable.py",
    "property/test_engine_model.py",
    "unit/blend/test_certify.py",
    "unit/demo/test_model.py",
    "unit/gpu/test_removed_order.py",
    "unit/kernels",
)
"""Sweeps and soaks, more than half of the time of all tests: `make test` leaves them out, `make
test LONG=1` and CI run them.
"""
LONG_PLACES = tuple(str(TESTS / place) for place in LONG)

# Processes share the cores already: threads that wait for each other at every operator only take
# them from the others. Before torch is imported, and for all processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A background job, nohup and some CI runners start programs with SIGINT ignored, and their children
# inherit that. Tests that interrupt a child need the default, whatever started the tests.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine stops for longer than Hypothesis lets an example, or its generation, take; and each
# run has the same examples (others: `--hypothesis-profile=default`). vLLM's environment has no
# Hypothesis.
with contextlib.suppress(ModuleNotFoundError):
    import hypothesis

    hypothesis.settings.register_profile(
        "patient",
        deadline=None,
        derandomize=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
    hypothesis.settings.load_profile("patient")


@pytest.hookimpl(optionalhook=True)  # vLLM's environment has no such plugin
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are processors: tests of processes and sockets wait for each other
    more than they compute.
    """
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)) + 1)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Report progress by file, unless each test is asked for (`-v`)."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and config.option.verbose <= 0 and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(reporter))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Leave what is collected out of garbage collections: it stays to the end."""
    gc.disable()
    yield
    gc.enable()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before `-m` is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is long. Begin with the files whose tests may take longest, so that none of them is
    the last one.
    """
    limits_s = defaultdict[Path, float](float)
    for item in items:
        if str(item.path).startswith(LONG_PLACES) or item.get_closest_marker("realtime"):
            item.add_marker(pytest.mark.long)
        mark = item.get_closest_marker("timeout")
        limits_s[item.path] = max(limits_s[item.path], mark.args[0] if mark else 0.0)
    items.sort(key=lambda item: -limits_s[item.path])


def has_virtual_time(item: pytest.Item) -> bool:
    """Return whether a test is marked `virtual_time`, and not `realtime` within such a module."""
    marks = {mark.name for mark in item.iter_markers()}
    return "virtual_time" in marks and "realtime" not in marks


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], Any]]:
    """Run tests that are marked `virtual_time` on a loop whose time is virtual, and others on one
    whose time is steady, but for those marked `realtime`.
    """
    if has_virtual_time(item):
        return {"asyncio": VirtualLoop}
    is_real = item.get_closest_marker("realtime") is not None
    return {"asyncio": asyncio.new_event_loop if is_real else SteadyLoop}


@pytest.fixture(autouse=True)
def _virtual_monotonic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if has_virtual_time(request.node):
        monkeypatch.setattr(time, "monotonic", CLOCK)


# The services and tools run without PyTorch, and so do their tests. Where it is not installed, a
# test that imports it, or a package that is there only together with it, is skipped and says so.
TORCH_PACKAGES = {
    "torch",
    "torchac",
    "triton",
    "transformers",
    "safetensors",
    "tokenizers",
    "lmcache_demo",
}
HAS_TORCH = importlib.util.find_spec("torch") is not None


def missing_torch_package(error: BaseException | None) -> str | None:
    """Return the name of the package whose absence caused `error`, if it is one of
    `TORCH_PACKAGES`.
    """
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name is not None:
            package = error.name.partition(".")[0]
            return package if package in TORCH_PACKAGES else None
        error = error.__cause__ or error.__context__
    return None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what `-m` leaves out before it is imported, and a folder whose conftest needs one
    of the packages: its tests all do.
    """
    if config.option.markexpr == "not long" and str(collection_path).startswith(LONG_PLACES):
        return True
    if HAS_TORCH or not (collection_path / "conftest.py").is_file() or collection_path == TESTS:
        return None
    try:
        importlib.import_module(
            ".".join(("tests", *collection_path.relative_to(TESTS).parts, "conftest"))
        )
    except ModuleNotFoundError as exc:
        if missing_torch_package(exc) is None:
            raise
        return True
    return None


class _ModuleWithoutTorch(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        try:
            return super().collect()
        except self.CollectError as exc:
            if (package := missing_torch_package(exc)) is None:
                raise
            pytest.skip(f"needs {package}", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return None if HAS_TORCH else _ModuleWithoutTorch.from_parent(parent, path=module_path)


def _skipped_without_torch() -> Iterator[None]:
    try:
        yield
    except Exception as exc:
        if HAS_TORCH or (package := missing_torch_package(exc)) is None:
            raise
        pytest.skip(f"needs {package}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    yield from _skipped_without_torch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    yield from _skipped_without_torch()
