"""The product reaches clocks, threads, sockets and files as attributes of their modules, where the
simulation replaces them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REPLACED = {
    "os": {
        "close", "fdatasync", "fstat", "fsync", "ftruncate", "getloadavg", "getpid", "open",
        "pread", "preadv", "pwrite", "pwritev", "replace", "stat", "statvfs", "unlink", "urandom",
        "write", "writev",
    },
    "queue": {"Queue", "SimpleQueue"},
    "random": {"random", "choice", "randint", "uniform", "shuffle", "sample"},
    "select": {"poll", "epoll", "select"},
    "signal": {"signal", "raise_signal"},
    "socket": {"socket", "getaddrinfo", "create_connection", "gethostname"},
    "threading": {
        "Condition", "Event", "Lock", "RLock", "Semaphore", "Thread", "Timer", "get_ident", "local",
    },
    "time": {
        "monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "sleep",
        "thread_time", "time", "time_ns",
    },
}  # fmt: skip
PRESENT = {
    "time.asctime": 1, "time.clock_gettime": 9, "time.ctime": 1, "time.gmtime": 1,
    "time.localtime": 1, "time.strftime": 2,
}  # fmt: skip
"""Functions that take the present time if they are given fewer arguments."""


def imported_names(path: Path) -> Iterator[str]:
    """Yield what a module imports by name and the simulation would not replace there."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in REPLACED:
            for alias in node.names:
                if alias.name in REPLACED[node.module]:
                    yield f"{path}:{node.lineno}: {node.module}.{alias.name}"


def hidden_clocks(path: Path) -> Iterator[str]:
    """Yield the calls that read a clock which the simulation does not replace."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_present = name in PRESENT and len(node.args) < PRESENT[name]
            if is_present or name.endswith((".utcnow", "date.today", "datetime.now")):
                yield f"{path}:{node.lineno}: {name}"


def test_an_import_by_name_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("import os\nfrom time import monotonic\nfrom os import PathLike\n")
    assert list(imported_names(module)) == [f"{module}:2: time.monotonic"]


def test_nothing_replaced_is_imported_by_its_name() -> None:
    sources = [*ROOT.glob("libs/*/src/**/*.py"), *ROOT.glob("services/*/src/**/*.py")]
    assert len(sources) > 300
    assert [name for path in sources for name in imported_names(path)] == []


def test_a_hidden_clock_is_found(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "import time\ntime.gmtime(time.time())\ntime.gmtime()\ntime.strftime('%Y')\n"
        "datetime.now()\n"
    )
    found = [line.rpartition(":")[0].rpartition(":")[2] for line in hidden_clocks(module)]
    assert found == ["3", "4", "5"]


def test_no_clock_is_read_elsewhere() -> None:
    sources = [*ROOT.glob("libs/*/src/**/*.py"), *ROOT.glob("services/*/src/**/*.py")]
    assert [call for path in sources for call in hidden_clocks(path)] == []
