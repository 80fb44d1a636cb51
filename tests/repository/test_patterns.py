"""No regular expression of the project takes long, whatever it is given.

Every pattern is made once, at the top of its module, where this test finds it, and is tried with
long texts of the forms that make patterns backtrack: some beginning, one or two pieces repeated, an
end that does not match. A new pattern is tried without a change here.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.time_bound import cpu_bound

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = sorted(
    path
    for folder in ("libs", "services", "kernels")
    for path in (REPOSITORY / folder).glob("**/src/**/*.py")
)
LENGTH = 20_000
HANG_S = 4.0
"""A pattern that is quadratic in the length takes longer; a linear one takes milliseconds for
each text.
"""
CHARS = "aA0_-./@:, \t\n`'\"\\=+%[{($"
TRIED_BY_HAND = {"lmcache_servicekit/bodies.py": "at most five characters"}
"""Calls of `re` that compile where they are used."""


def name_of(path: Path) -> str:
    return str(path).rpartition("/src/")[2]


def calls_of_re(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "re"
        ):
            yield node


def compiled() -> Iterator[tuple[str, str, bool]]:
    """Module and name of each pattern, and whether it is looked for at every place of a text."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if "re.compile" not in text:
            continue
        for node in ast.parse(text).body:
            targets = (
                [node.target]
                if isinstance(node, ast.AnnAssign)
                else node.targets
                if isinstance(node, ast.Assign)
                else []
            )
            if (
                targets
                and isinstance(node.value, ast.Call)
                and ast.unparse(node.value.func) == "re.compile"
            ):  # type: ignore[attr-defined]
                name = ast.unparse(targets[0])
                module = (
                    name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")
                )
                yield (
                    module,
                    name,
                    re.search(rf"\b{name}\.(search|sub|subn|split|findall|finditer)\(", text)
                    is not None,
                )


def try_it(pattern: re.Pattern[str] | re.Pattern[bytes], is_searched: bool, seconds: float) -> None:
    """Try a pattern with everything that may make it slow."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode()
    words = re.findall(r"[A-Za-z_]{3,}|://|[ _.]-", source)
    pieces = [*CHARS, *dict.fromkeys(words), *(f"_{word}" for word in dict.fromkeys(words))]
    heads = ["", *dict.fromkeys(words), "a", "/", "1", "://", "lm://"]
    with cpu_bound(seconds):
        for head, middle, end in itertools.product(
            heads, [*pieces, "a.", "_a", "a/", "- ", "1."], ["!"]
        ):
            text = head + middle * (LENGTH // len(middle)) + end
            value = text if isinstance(pattern.pattern, str) else text.encode()
            for function in (
                pattern.match,
                pattern.fullmatch,
                *([pattern.search] if is_searched else []),
            ):
                function(value)  # type: ignore[arg-type]


PATTERNS = sorted(compiled())


@pytest.mark.parametrize(
    ("module", "name", "is_searched"),
    PATTERNS,
    ids=[f"{module}.{name}" for module, name, _ in PATTERNS],
)
def test_a_pattern_takes_little_time_whatever_it_is_given(
    module: str, name: str, is_searched: bool
) -> None:
    pattern = getattr(importlib.import_module(module), name)
    assert isinstance(pattern, re.Pattern)
    try_it(pattern, is_searched, HANG_S)


@pytest.mark.parametrize(
    "slow",
    [
        r"(?:.*/)?[\w.-]*vllm[\w.-]*(?:[:@].*)?",
        r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP))$",
        r"(a|a)*b",
        r"(\w+\s*)*$",
    ],
)
def test_what_is_slow_is_seen(slow: str) -> None:
    with pytest.raises(AssertionError, match="without an end"):
        try_it(re.compile(slow), True, 0.2)


def test_every_pattern_is_where_it_is_found() -> None:
    """Also those of pydantic are linear by themselves, unless it is set to use Python's engine."""
    found = {(module, name) for module, name, _ in PATTERNS}
    num_compiled = 0
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert "python-re" not in text, path
        for call in calls_of_re(ast.parse(text)) if "re." in text else ():
            assert isinstance(call.func, ast.Attribute)
            if call.func.attr == "compile":
                num_compiled += 1
            elif call.func.attr not in ("escape", "error"):
                assert name_of(path) in TRIED_BY_HAND, (
                    f"{path}: compile it once, at the top of the module"
                )
    assert num_compiled == len(found), (
        "a pattern is compiled elsewhere than at the top of its module"
    )
