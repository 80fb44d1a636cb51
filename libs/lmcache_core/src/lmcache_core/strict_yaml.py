"""YAML without what PyYAML reads silently as something else: duplicate names, of which it keeps the
last, and numbers such as 0100 and 4:16; and untrusted YAML.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

MAX_NODES: Final = 1 << 20
"""Values in a document, those behind aliases counted at each alias: a short text could otherwise
name more than fits into memory.
"""
MAX_BRACKETS: Final = 64
"""Limit for untrusted text: PyYAML's scanner looks ahead, in time quadratic in the open
brackets.
"""


class DuplicateNameError(yaml.MarkedYAMLError):
    """A name occurs twice in a mapping.

    Attributes:
        name: The name.
        line: Line of the second occurrence, from 1.
    """

    def __init__(self, name: str, mark: yaml.Mark) -> None:
        super().__init__(problem=f"the name {name!r} twice", problem_mark=mark)
        self.name = name
        self.line = mark.line + 1


_INT: Final = "tag:yaml.org,2002:int"
_FLOAT: Final = "tag:yaml.org,2002:float"
_INT_TEXT = re.compile(r"[-+]?(?:0b[01_]+|0x[0-9A-Fa-f_]+|0|[1-9][0-9_]*)$")
_FLOAT_TEXT = re.compile(
    r"(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?"
    r"|\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)


class _Loader(yaml.SafeLoader):
    """Leaves 0100 and 4:16 texts, which YAML 1.1 reads as 64 and 256, and YAML 1.2 does not."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as in PyYAML
        first: [(tag, regexp) for tag, regexp in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Checked here and not where mappings are built: there, names merged by `<<` look like
        # duplicates.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name = (key.tag, key.value)
                if name in seen:
                    raise DuplicateNameError(key.value, key.start_mark)
                seen.add(name)
        return node


_Loader.add_implicit_resolver(_INT, _INT_TEXT, list("-+0123456789"))
_Loader.add_implicit_resolver(_FLOAT, _FLOAT_TEXT, list("-+0123456789."))


def load_yaml(text: bytes | str) -> Any:
    """Parse a text into YAML's safe types.

    Raises:
        DuplicateNameError: A mapping has a name twice.
        yaml.YAMLError: It is not YAML, a value does not fit its tag, or aliases name more than
            `MAX_NODES` values.
    """
    return _load(_Loader(text))


def load_yaml_documents(text: bytes | str) -> list[Any]:
    """Parse a text of any number of documents; see `load_yaml`."""
    loader = _Loader(text)
    try:
        found = []
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node said that there is one"
            found.append(_constructed(loader, node))
        return found
    finally:
        loader.dispose()


class _ForeignLoader(_Loader):
    """Refuses aliases, which make a short text large, and tags, whose constructors raise other
    errors than YAMLError.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) is not None:
            raise yaml.MarkedYAMLError(problem="an alias or a tag", problem_mark=event.start_mark)
        return super().compose_node(parent, index)


def load_foreign_yaml(text: str) -> Any:
    """Parse untrusted text. The caller bounds its length.

    Raises:
        yaml.YAMLError: It is not YAML, has an alias or a tag, or more than `MAX_BRACKETS` opening
            brackets.
        ValueError: A number or a date in it is impossible.
        RecursionError: It is nested too deeply.
    """
    if text.count("[") + text.count("{") > MAX_BRACKETS:
        raise yaml.YAMLError(f"more than {MAX_BRACKETS} opening brackets")
    return _load(_ForeignLoader(text))


def _load(loader: _Loader) -> Any:
    try:
        node = loader.get_single_node()
        return None if node is None else _constructed(loader, node)
    finally:
        loader.dispose()


def _constructed(loader: _Loader, node: yaml.Node) -> Any:
    if _count(node, {}) > MAX_NODES:
        raise yaml.MarkedYAMLError(problem="too many values", problem_mark=node.start_mark)
    try:
        return loader.construct_document(node)
    except (AttributeError, LookupError, TypeError, OverflowError):  # as of `!!timestamp x`
        raise yaml.MarkedYAMLError(
            problem="a value that its tag does not fit", problem_mark=node.start_mark
        ) from None


def _count(node: yaml.Node, counted: dict[int, int]) -> int:
    """Return how many values a node is, all aliases followed.

    Args:
        node: The node.
        counted: What is known, by the identity of nodes; 0: this call is in such a node.
    """
    known = counted.get(id(node))
    if known == 0:
        raise yaml.MarkedYAMLError(
            problem="an alias within its own value", problem_mark=node.start_mark
        )
    if known is None:
        counted[id(node)] = 0
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [each for pair in node.value for each in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        known = counted[id(node)] = 1 + sum(_count(each, counted) for each in children)
    return known
