"""Print the figures that say how large and how scattered the code is: `make stats`.

Code is counted in tokens, which neither a line's length nor a comment changes. How many each
package may have is written in `docs/adr/0023-a-budget-of-tokens.md`.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GENERATED = (ROOT / "docs" / "configuration.md", ROOT / "docs" / "api" / "README.md")
"""Pages that a command writes from the code."""
SMALL_MODULE_LINES = 60
SHORT_BODY_LINES = 3
WORD = re.compile(r"[^\s|`*#>-]\S*")
Function = ast.FunctionDef | ast.AsyncFunctionDef
BUDGET = ROOT / "docs" / "adr" / "0023-a-budget-of-tokens.md"
BUDGET_ROW = re.compile(r"^\| `(\w+)` \| ([\d,]+) \|", re.MULTILINE)
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
)


class Module:
    """A parsed source file.

    Attributes:
        path: The file.
        name: Dotted name.
        num_lines: All lines of the file.
        tree: Its syntax tree.
        code_lines: Numbers of the lines that hold code: not blank, no comment, no docstring.
        num_tokens: Tokens of that code; an f-string is one, as any other string is.
        num_words: Words of comments and docstrings.
    """

    def __init__(self, path: Path, root: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8")
        parts = path.relative_to(root).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)
        self.num_lines = text.count("\n")
        self.tree = ast.parse(text)
        documented = _docstring_lines(self.tree)
        self.code_lines = set[int]()
        self.num_tokens = 0
        self.num_words = 0
        for token in _tokens(text):
            if token.type == tokenize.COMMENT or token.start[0] in documented:
                self.num_words += len(token.string.split())
            elif token.type not in NOT_CODE:
                self.num_tokens += 1
                self.code_lines.update(range(token.start[0], token.end[0] + 1))

    def functions(self) -> Iterator[Function]:
        """Yield all functions and methods, nested ones too."""
        for node in ast.walk(self.tree):
            if isinstance(node, Function):
                yield node

    def body_lines(self, function: Function) -> int:
        """Return how many lines of code a function has below its signature."""
        first = function.body[0].lineno
        last = function.end_lineno or first
        return sum(1 for line in range(first, last + 1) if line in self.code_lines)

    def public_classes(self) -> Iterator[str]:
        """Yield the names of the public classes at the module's top level."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name

    def imported(self, known: dict[str, Module]) -> set[str]:
        """Return the names of the modules in `known` that this one imports, inside functions
        too.
        """
        found = set[str]()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inner & known.keys()
                if not inner <= known.keys():
                    found.add(node.module)
        return found & known.keys() - {self.name}


def _tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """Yield tokens. Python 3.12 and later split an f-string into tokens; it is one here."""
    start, end = (getattr(tokenize, name, -1) for name in ("FSTRING_START", "FSTRING_END"))
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == end:
            depth -= 1
        if depth == 0 and token.type != start:
            yield token
        if token.type == start:
            depth += 1


def _docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of all strings that stand alone: docstrings, and those of attributes."""
    lines = set[int]()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def product() -> dict[str, Module]:
    """Return the product's modules by name."""
    roots = [*ROOT.glob("libs/*/src"), ROOT / "kernels/src", *ROOT.glob("services/*/src")]
    modules = [Module(path, root) for root in roots for path in sorted(root.rglob("*.py"))]
    return {module.name: module for module in modules}


def sizes() -> dict[str, tuple[int, int]]:
    """Return tokens of code, and words of comments and docstrings, of each package and of each
    folder in it, by dotted name.
    """
    found = defaultdict[str, tuple[int, int]](lambda: (0, 0))
    for name, module in product().items():
        parts = (name if module.is_package else name.rpartition(".")[0]).split(".")
        for at in {parts[0], ".".join(parts[:2])}:
            tokens, words = found[at]
            found[at] = tokens + module.num_tokens, words + module.num_words
    return dict(sorted(found.items()))


def budget() -> dict[str, int]:
    """Return how many tokens each package may have."""
    rows = BUDGET_ROW.findall(BUDGET.read_text(encoding="utf-8"))
    return {name: int(tokens.replace(",", "")) for name, tokens in rows}


def figures() -> dict[str, str]:
    """Return each figure by its name."""
    modules = product()
    importers = defaultdict[str, set[str]](set)
    classes = defaultdict[str, set[str]](set)
    for module in modules.values():
        for name in module.imported(modules):
            importers[name].add(module.name)
        for name in module.public_classes():
            classes[name].add(module.name)
    lonely = [
        name
        for name, module in modules.items()
        if len(importers[name]) == 1 and module.num_lines < SMALL_MODULE_LINES
    ]
    bodies = [module.body_lines(one) for module in modules.values() for one in module.functions()]
    num_short = sum(lines <= SHORT_BODY_LINES for lines in bodies)
    tests = (ROOT / "tests").rglob("*.py")
    pages = [
        path
        for path in ROOT.rglob("*.md")
        if not any(part.startswith((".", "build")) for part in path.relative_to(ROOT).parts)
    ]
    total = sum(module.num_tokens for module in modules.values())
    return {
        "product: tokens": f"{total:,}",
        "product: lines": f"{sum(module.num_lines for module in modules.values()):,}",
        "product: lines of code": f"{sum(len(module.code_lines) for module in modules.values()):,}",
        "product: modules": f"{len(modules):,}",
        "product: modules with one importer, under 60 lines": f"{len(lonely)}",
        "product: functions": f"{len(bodies):,}",
        "product: functions of up to 3 lines": f"{num_short / len(bodies):.1%}",
        "product: public class names with two meanings": (
            f"{sum(len(at) > 1 for at in classes.values())}"
        ),
        "tests: lines": f"{sum(_num_lines(path) for path in tests):,}",
        "documents: words": f"{sum(_num_words(path) for path in pages):,}",
        "documents: words, without generated reference pages": (
            f"{sum(_num_words(path) for path in pages if path not in GENERATED):,}"
        ),
    }


def _num_lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _num_words(path: Path) -> int:
    return len(WORD.findall(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    limits = budget()
    print("   tokens     words  of comments and docstrings")
    for name, (tokens, words) in sizes().items():
        limit = f"  of {limits[name]:,}" if name in limits else ""
        print(f"{tokens:>9,} {words:>9,}  {'  ' * name.count('.')}{name}{limit}")
    print()
    for name, figure in figures().items():
        print(f"{figure:>9}  {name}")
