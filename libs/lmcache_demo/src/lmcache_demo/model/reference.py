"""Turns a module's docstrings into reference documents that end in questions about them.

A reference document lists entries, ``name: summary`` and the rest of the docstring, and closes with
questions whose answers stand word for word in the entries above. The answers can only be known from
the document, so a model trained on such text has to read its context; that is what makes damage to
a KV cache visible in its answers.
"""

import ast
import inspect
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

MIN_ENTRIES: Final = 3
MAX_QUESTIONS: Final = 12
# The longest piece is about 3,500 tokens, so that document and questions fit into one long training
# sequence.
PIECE_CHARS: Final = (1_500, 3_000, 6_000, 11_000)
HEADING: Final = "Reference of {module}"


@dataclass(frozen=True, slots=True)
class Entry:
    """The documentation of one definition.

    Attributes:
        name: Dotted name below the module, for example ``JSONDecoder.decode``.
        summary: The docstring's first paragraph on one line.
        details: What follows the first paragraph; may be empty.
    """

    name: str
    summary: str
    details: str

    def render(self) -> str:
        """Returns the entry as it stands in a reference document."""
        head = f"{self.name}: {self.summary}"
        return f"{head}\n\n{self.details}" if self.details else head


def render_question(name: str) -> str:
    """Returns the prompt that asks for an entry's summary; the answer repeats the name, then
    copies the summary.
    """
    return f"Question: What is {name}?\nAnswer: {name}:"


def build_reference(path: str, source: str) -> Iterator[str]:
    """Yields the reference documents of one module, the same ones at every call.

    Args:
        path: Path of the module below the standard library, for example ``json/decoder.py``.
        source: The module's source text.

    Yields:
        Documents of at least three entries each; none where the module documents less than that.
    """
    entries = extract_entries(source)
    rng = random.Random(path)  # noqa: S311 - a repeatable choice of pieces and questions
    module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    start = 0
    while len(entries) - start >= MIN_ENTRIES:
        stop, size, limit = start, 0, rng.choice(PIECE_CHARS)
        while stop < len(entries) and (size < limit or stop - start < MIN_ENTRIES):
            size += len(entries[stop].render())
            stop += 1
        yield _render_piece(module, entries[start:stop], rng)
        start = stop


def extract_entries(source: str) -> list[Entry]:
    """Returns the documented definitions of a source text in their order; none where it is not
    valid Python.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (
        SyntaxError,
        ValueError,
    ):  # Syntax fixtures of the library's tools are text, but no modules.
        return []
    entries: list[Entry] = []
    _visit(tree, "", entries)
    return entries


def _visit(node: ast.AST, prefix: str, entries: list[Entry]) -> None:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        name = f"{prefix}{child.name}"
        docstring = ast.get_docstring(child, clean=True)
        if docstring and docstring.strip():
            summary, _, details = inspect.cleandoc(docstring).partition("\n\n")
            entries.append(Entry(name, " ".join(summary.split()), details.strip("\n")))
        _visit(child, f"{name}.", entries)


def _render_piece(module: str, entries: list[Entry], rng: random.Random) -> str:
    blocks = [HEADING.format(module=module), *(entry.render() for entry in entries)]
    asked = rng.sample(entries, min(MAX_QUESTIONS, max(2, len(entries) // 2), len(entries)))
    blocks += [f"{render_question(entry.name)} {entry.summary}" for entry in asked]
    return "\n\n".join(blocks) + "\n"
