"""Measure how many random faults the tests notice: `make mutants`.

Each mutant is a copy of the repository in which one expression or statement of the product is
changed. The tests that execute the changed line run against it, the quickest first; a mutant that
they all accept has survived. The same seed gives the same mutants of the same code.

Which test executes which line is measured once, by the tests of the default run. This and each
verdict are kept in `.mutants` while the code stays as it is: a run that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import local

from coverage import CoverageData

from tests.stats import Module, product

ROOT = Path(__file__).resolve().parents[1]
PARTS = {
    "core": "lmcache_core",
    "storage": "lmcache_core.storage",
    "wire": "lmcache_core.wire",
    "node": ("lmcache_node", "lmcache_sidecar", "lmcache_storage"),
}
COPIED = ("libs", "services", "kernels", "tests", "docs", "helm", "docker")
KEPT = ROOT / ".mutants"
MAX_TESTS = 400
MAX_TESTS_S = 40.0
"""The tests of a mutant take at most so long together where nothing is changed."""
MAX_TEST_FILES = 10
MAX_DISTANCE = 3
"""Imports between a test file and the changed module, for lines that run at an import."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
UNSEEN_CALLS = ("logger", "warnings", "super")
"""Nothing that a user relies on is lost with such a call, or too much."""


@dataclass(frozen=True)
class Mutant:
    """One change of one module.

    Attributes:
        module: Dotted name.
        line: Where it begins.
        end: Its last line.
        change: What was done, for people.
        source: The module's text with the change.
    """

    module: str
    line: int
    end: int
    change: str
    source: str


class Points(ast.NodeVisitor):
    """Collect the nodes of a module that a mutant may change."""

    def __init__(self) -> None:
        self.found: list[ast.AST] = []

    def generic_visit(self, node: ast.AST) -> None:
        if _is_changeable(node):
            self.found.append(node)
        for name, value in ast.iter_fields(node):
            # An annotation, a decorator or a base class is no behaviour.
            if name in {"annotation", "returns", "decorator_list", "bases", "type_params"}:
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    self.visit(child)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.unparse(node.test):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """The message of an error is no behaviour; that it is raised is its condition's."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Only a programmer's error breaks it."""


def _is_changeable(node: ast.AST) -> bool:
    match node:
        case ast.Compare(ops=[op]):
            return type(op) in SWAPS
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op):
            return type(op) in SWAPS
        case ast.UnaryOp(op=ast.Not()):
            return True
        case ast.Constant(value=bool()):
            return True
        case ast.Constant(value=int() as value):
            return 0 <= value < 1 << 20
        case (
            ast.Expr(value=ast.Call(func=func))
            | ast.Expr(value=ast.Await(value=ast.Call(func=func)))
        ):
            return not ast.unparse(func).startswith(UNSEEN_CALLS)
        case ast.Return(value=ast.expr() as value):
            return not isinstance(value, ast.Constant | ast.Tuple | ast.List)
    return False


def _change(node: ast.AST) -> str:
    """Change a node in place; return what was done."""
    before = ast.unparse(node).split("\n")[0]
    match node:
        case ast.Compare():
            node.ops[0] = SWAPS[type(node.ops[0])]()  # type: ignore[call-overload]
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
            node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        case ast.UnaryOp():
            node.op = ast.UAdd()
            node.operand = ast.Call(ast.Name("bool"), [node.operand], [])
        case ast.Constant(value=bool() as value):
            node.value = not value
        case ast.Constant(value=int() as value):
            node.value = value + 1
        case ast.Expr():
            node.value = ast.Constant(None)
        case ast.Return():
            node.value = ast.Constant(None)
    return f"{before} -> {ast.unparse(ast.fix_missing_locations(node))}"


def draw(modules: dict[str, Module], count: int, rng: random.Random) -> Iterator[Mutant]:
    """Yield random mutants; a line of code is as likely to be hit as any other."""
    points = {}
    for name, module in modules.items():
        visitor = Points()
        visitor.visit(module.tree)
        points[name] = len(visitor.found)
    names = [name for name, number in points.items() for _ in range(number)]
    for name in rng.sample(names, min(count, len(names))):
        tree = copy.deepcopy(modules[name].tree)
        visitor = Points()
        visitor.visit(tree)
        node = rng.choice(visitor.found)
        line, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        change = _change(node)
        yield Mutant(name, line, end, change, ast.unparse(ast.fix_missing_locations(tree)))


def nearest_tests(module: str, modules: dict[str, Module]) -> list[str]:
    """Return the test files that import a module, directly ones first."""
    imports = {name: one.imported(modules) for name, one in modules.items()}
    tests = {
        str(path.relative_to(ROOT)): Module(path, ROOT).imported(modules)
        for folder in ("unit", "contract", "property", "integration")
        for path in sorted((ROOT / "tests" / folder).rglob("test_*.py"))
    }
    found: list[str] = []
    reached = {module}
    for _ in range(MAX_DISTANCE):
        near = [path for path, used in tests.items() if used & reached and path not in found]
        # Among equally near files, those whose path has words of the module's name tell most.
        words = set(re.split(r"\W|_", module))
        found += sorted(near, key=lambda path: -len(words & set(re.split(r"\W|_", path))))
        reached |= {name for name, used in imports.items() if used & reached}
    return found[:MAX_TEST_FILES]


class Executed:
    """Which test executes which line, and how long each takes."""

    def __init__(self, folder: Path) -> None:
        self.verdicts = folder / "verdicts"
        self._data = CoverageData(str(folder / "coverage"))
        self._data.read()
        self._seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())
        self._by_file: dict[str, dict[int, list[str]]] = {}

    def tests_of(self, file: Path, line: int, end: int) -> list[str]:
        """Return the tests that execute one of these lines, the quickest first, as far as they take
        no longer than `MAX_TESTS_S`.
        """
        name = str(file)
        if name not in self._by_file:
            self._by_file[name] = self._data.contexts_by_lineno(name)
        by_line = self._by_file[name]
        found = {test for one in range(line, end + 1) for test in by_line.get(one, ())}
        left_s, chosen = MAX_TESTS_S, list[str]()
        for test in sorted(found - {""}, key=lambda test: (self._seconds.get(test, 0.0), test)):
            left_s -= self._seconds.get(test, 0.0)
            if (left_s < 0 and chosen) or len(chosen) == MAX_TESTS:
                break
            chosen.append(test)
        return chosen


def executed() -> Executed:
    """Return what the tests execute, as the code is now; measure it unless that was done before."""
    digest = hashlib.sha256()
    for folder in COPIED:
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    folder = KEPT / digest.hexdigest()[:16]
    if not (folder / "seconds.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        print(f"Measuring which test executes which line: {folder}", flush=True)
        command = [sys.executable, "-m", "pytest", "-n", "auto", "--dist", "loadfile"]
        command += ["-m", "not long", "-p", "tests.mutants_map"]
        environment = os.environ | {"MUTANTS_MAP": str(folder)}
        subprocess.run(command, cwd=ROOT, env=environment, check=False)
        data, seconds = CoverageData(str(folder / "coverage")), dict[str, float]()
        for part in sorted(folder.glob("coverage.*")):
            more = CoverageData(str(part))
            more.read()
            data.update(more)
        data.write()
        for file in sorted(folder.glob("seconds-*.json")):
            seconds |= json.loads(file.read_text())
        (folder / "seconds.json").write_text(json.dumps(seconds))
    return Executed(folder)


class Workplace(local):
    """A copy of the repository for each thread."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="mutants-"))
        for folder in COPIED:
            ignored = shutil.ignore_patterns("__pycache__", ".*")
            shutil.copytree(ROOT / folder, self.path / folder, ignore=ignored)
        for name in ("pyproject.toml", "Makefile", "README.md", "constraints.txt"):
            shutil.copy(ROOT / name, self.path / name)

    def run(self, mutant: Mutant, file: Path, tests: list[str], timeout_s: float) -> str:
        """Return the test that killed a mutant, or an empty string."""
        target = self.path / file
        original = target.read_text(encoding="utf-8")

        def first_failure(source: str, tests: list[str]) -> str:
            target.write_text(source, encoding="utf-8")
            try:
                return self._first_failure(tests, timeout_s)
            finally:
                target.write_text(original, encoding="utf-8")

        while tests and (killer := first_failure(mutant.source, tests)):
            # A test counts that fails with the mutant each time, and passes without it.
            if "::" not in killer or (
                first_failure(mutant.source, [killer]) and not first_failure(original, [killer])
            ):
                return killer
            tests = [one for one in tests if one != killer and not killer.startswith(f"{one}::")]
        return ""

    def _first_failure(self, tests: list[str], timeout_s: float) -> str:
        sources = [self.path / "kernels/src", self.path]
        sources += [
            one for where in ("libs", "services") for one in self.path.glob(f"{where}/*/src")
        ]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, sources)),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider"]
        command += tests
        try:
            done = subprocess.run(
                command,
                cwd=self.path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired:
            return "the time limit"
        if done.returncode == 0:
            return ""
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if not failed:
            return f"exit status {done.returncode}"
        return failed[0].split(" ", 1)[1].split(" - ")[0]


def main() -> None:
    """Draw mutants, run the tests against each, print what survived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--timeout-s", type=float, default=240.0, help="for the tests of one mutant"
    )
    parser.add_argument("--part", action="append", choices=PARTS, help="default: all of them")
    options = parser.parse_args()
    prefixes = tuple(
        prefix
        for part in options.part or PARTS
        for prefix in ((PARTS[part],) if isinstance(PARTS[part], str) else PARTS[part])
    )
    modules = product()
    chosen = {
        name: module
        for name, module in modules.items()
        if name.startswith(prefixes) and ".documented" not in name
    }
    mutants = list(draw(chosen, options.count, random.Random(options.seed)))
    known = executed()
    known.verdicts.mkdir(exist_ok=True)
    workplace = Workplace()
    begin = time.monotonic()

    def judge(mutant: Mutant) -> str:
        verdict = known.verdicts / hashlib.sha256(repr(mutant).encode()).hexdigest()[:16]
        if not verdict.exists():
            path = modules[mutant.module].path
            tests = known.tests_of(path, mutant.line, mutant.end)
            tests = tests or nearest_tests(mutant.module, modules)
            killer = workplace.run(mutant, path.relative_to(ROOT), tests, options.timeout_s)
            verdict.write_text(killer)
        return verdict.read_text()

    survivors, layers = 0, Counter[str]()
    with ThreadPoolExecutor(options.jobs) as pool:
        for number, (mutant, killer) in enumerate(
            zip(mutants, pool.map(judge, mutants), strict=True), 1
        ):
            survivors += not killer
            layers[killer.split("/")[1] if "/" in killer else killer] += 1
            print(
                f"{number}/{len(mutants)} {time.monotonic() - begin:.0f} s"
                f" {mutant.module}:{mutant.line} {mutant.change!r}: {killer or 'SURVIVED'}",
                flush=True,
            )
    del layers[""]
    print("killed by tests of: " + ", ".join(f"{one} {n}" for one, n in layers.most_common()))
    killed = len(mutants) - survivors
    print(f"killed={killed} of={len(mutants)} rate={killed / len(mutants):.1%} seed={options.seed}")


if __name__ == "__main__":
    main()
