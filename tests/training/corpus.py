"""Collects the text that ships with Python and splits it into training and held-out documents.

Four kinds of document are read, all of them from the running interpreter's standard library:

* ``library``: the source files of importable modules;
* ``test``: the source files of the library's own tests (absent from some distributions, which only
  costs variety);
* ``topic``: the language reference as shipped in ``pydoc_data.topics``;
* ``reference``: docstrings, one document per module, followed by questions (see :mod:`.reference`).

The split is by document name alone: :func:`is_held_out` hashes the name, so that a file is on the
same side under every Python version. A module's reference document is on the side of its source
file.
"""

import ast
import hashlib
import inspect
import random
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

DocumentKind = Literal["library", "test", "topic", "reference"]

HELD_OUT_PERCENT: Final = 6
# Topics are few and long: a larger share is needed for a few whole chapters to stay unseen.
HELD_OUT_TOPIC_PERCENT: Final = 18
MAX_DOCUMENT_CHARS: Final = 400_000
MAX_SHARED_LINES_RATIO: Final = 0.2
MIN_DISTINCT_LINE_CHARS: Final = 40

_TEST_FOLDERS: Final = frozenset({"test", "tests", "idle_test", "testing"})
# Character-map tables and generated topics are data, not text to imitate; build settings name the
# machine's own folders.
_EXCLUDED_FOLDERS: Final = frozenset(
    {"site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__", "lib-dynload"}
)
_EXCLUDED_PREFIXES: Final = ("_sysconfigdata", "sitecustomize", "usercustomize", "config-")


@dataclass(frozen=True, slots=True)
class Document:
    """One text of the corpus.

    Attributes:
        name: Stable identity, for example ``"library:json/decoder.py"``; decides the side of the
            split.
        kind: Where the text comes from.
        text: The text itself, with ``\\n`` line ends.
    """

    name: str
    kind: DocumentKind
    text: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and held-out documents, each sorted by name."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]


def is_held_out(name: str) -> bool:
    """Tells whether the document of this name is kept out of training; depends on the name
    alone.
    """
    digest = hashlib.sha256(name.encode()).digest()
    percent = HELD_OUT_TOPIC_PERCENT if name.startswith("topic:") else HELD_OUT_PERCENT
    return int.from_bytes(digest[:8], "big") % 100 < percent


def collect_corpus(stdlib: Path | None = None) -> Corpus:
    """Reads and splits the whole corpus.

    Args:
        stdlib: Folder of the standard library; None means the running interpreter's.

    Returns:
        The split. Training documents that share much of their text with held-out ones have been
        dropped.
    """
    root = stdlib if stdlib is not None else Path(sysconfig.get_path("stdlib"))
    sources = list(iter_sources(root))
    held_out = [doc for doc in sources if is_held_out(doc.name)]
    training = _drop_near_copies((doc for doc in sources if not is_held_out(doc.name)), held_out)
    topics = list(iter_topics())
    held_out_topics = [doc for doc in topics if is_held_out(doc.name)]
    training_topics = _drop_shared_paragraphs(
        (doc for doc in topics if not is_held_out(doc.name)), held_out_topics
    )
    return Corpus(
        training=_sorted(training + training_topics + list(_references(training))),
        held_out=_sorted(held_out + held_out_topics + list(_references(held_out))),
    )


def iter_sources(root: Path) -> Iterator[Document]:
    """Yields every source file below a standard library folder, in path order, as ``library`` or
    ``test`` documents.
    """
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        folders = set(relative.parts[:-1])
        if folders & _EXCLUDED_FOLDERS or any(
            part.startswith(_EXCLUDED_PREFIXES) for part in relative.parts
        ):
            continue
        text = _read_text(path)
        if text is None:
            continue
        kind: DocumentKind = "test" if folders & _TEST_FOLDERS else "library"
        yield Document(name=f"{kind}:{relative.as_posix()}", kind=kind, text=text)


def iter_topics() -> Iterator[Document]:
    """Yields the language reference topics that the ``help`` command shows."""
    from pydoc_data.topics import topics

    for name, text in sorted(topics.items()):
        yield Document(name=f"topic:{name}", kind="topic", text=text.strip() + "\n")


def _read_text(path: Path) -> str | None:
    """Returns a file's text, or None where it is empty, oversized or deliberately not UTF-8."""
    raw = path.read_bytes()
    if not raw.strip() or len(raw) > MAX_DOCUMENT_CHARS:
        return None
    try:
        text = raw.decode("utf-8")
    except (
        UnicodeDecodeError
    ):  # Some of the library's tests are badly encoded on purpose: they are no text.
        return None
    return text.replace("\r\n", "\n")


def _references(sources: Iterable[Document]) -> Iterator[Document]:
    for source in sources:
        if source.kind != "library":
            continue
        path = source.name.removeprefix("library:")
        for index, text in enumerate(build_reference(path, source.text)):
            yield Document(name=f"reference:{path}#{index}", kind="reference", text=text)


def _drop_near_copies(training: Iterable[Document], held_out: Iterable[Document]) -> list[Document]:
    """Drops training sources of which more than a fifth of the long lines also stand in a
    held-out source.
    """
    known = {line for doc in held_out for line in _long_lines(doc.text)}
    kept = []
    for doc in training:
        lines = _long_lines(doc.text)
        shared = sum(line in known for line in lines)
        if shared <= MAX_SHARED_LINES_RATIO * len(lines):
            kept.append(doc)
    return kept


def _drop_shared_paragraphs(
    training: Iterable[Document], held_out: Iterable[Document]
) -> list[Document]:
    """Drops from training topics the paragraphs that held-out topics repeat: some topics contain
    others whole.
    """
    known = {_squeeze(paragraph) for doc in held_out for paragraph in _paragraphs(doc.text)}
    kept = []
    for doc in training:
        paragraphs = [
            p
            for p in _paragraphs(doc.text)
            if len(p) < MIN_DISTINCT_LINE_CHARS or _squeeze(p) not in known
        ]
        text = "\n\n".join(paragraphs)
        if text.strip():
            kept.append(Document(name=doc.name, kind=doc.kind, text=text))
    return kept


def _long_lines(text: str) -> list[str]:
    return [
        line.strip() for line in text.split("\n") if len(line.strip()) >= MIN_DISTINCT_LINE_CHARS
    ]


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text)


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _sorted(documents: list[Document]) -> tuple[Document, ...]:
    return tuple(sorted(documents, key=lambda doc: doc.name))


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
    rng = random.Random(path)
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
