"""No test of the default run depends on how fast the machine is.

A test waits for what happens (`tests/fixtures/waiting.py`), has its time pass in
`tests/fixtures/virtual_time.py`, or is marked `realtime`: it then runs in LONG, alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOMS = ("unit", "contract", "property", "integration", "suites", "fixtures")
REASON = "# real time: "
"""Begins the reason of a line outside tests that may wait or read a clock."""
CLOCKS = {f"time.{name}" for name in ("monotonic", "perf_counter", "time")}
FREE = {"fixtures/waiting.py", "fixtures/virtual_time.py", "fixtures/steady_time.py"}


def _is_exempt(node: ast.AST) -> bool:
    """Return whether a test, a class or a module is marked."""
    if isinstance(node, ast.Module):
        marks: list[ast.AST] = [
            one.value
            for one in node.body
            if isinstance(one, ast.Assign) and ast.unparse(one.targets[0]) == "pytestmark"
        ]
    else:
        marks = list(getattr(node, "decorator_list", ()))
    text = " ".join(map(ast.unparse, marks))
    return "mark.realtime" in text or "mark.virtual_time" in text


def _depends_on_time(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    if name in ("time.sleep", "asyncio.sleep"):
        return [ast.unparse(one) for one in node.args] not in (["0"], ["0.0"])
    return name in CLOCKS


def offences(path: Path) -> Iterator[str]:
    """Yield the lines of a file that wait for a while, or read a clock, without being marked."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()

    def walk(node: ast.AST) -> Iterator[str]:
        if _is_exempt(node):
            return
        if _depends_on_time(node) and REASON not in lines[node.lineno - 1]:
            yield f"{path.name}:{node.lineno}: {lines[node.lineno - 1].strip()}"
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    yield from walk(ast.parse(text))


def places() -> list[str]:
    found = (path.relative_to(TESTS) for room in ROOMS for path in (TESTS / room).rglob("*.py"))
    return sorted(str(path) for path in found if str(path) not in FREE)


@pytest.mark.parametrize("place", places())
def test_a_file_neither_waits_for_a_while_nor_reads_a_clock(place: str) -> None:
    assert list(offences(TESTS / place)) == []


def test_offences_are_found(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        "import asyncio, time\n"
        "async def test_a():\n"
        "    await asyncio.sleep(0)\n"
        "    await asyncio.sleep(0.1)\n"
        "    began = time.monotonic()\n"
        "@pytest.mark.realtime\n"
        "def test_b():\n"
        "    time.sleep(1)\n"
    )
    assert list(offences(file)) == [
        "test_it.py:4: await asyncio.sleep(0.1)",
        "test_it.py:5: began = time.monotonic()",
    ]
