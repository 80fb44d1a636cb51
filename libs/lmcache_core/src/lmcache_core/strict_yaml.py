"""YAML without duplicate names, of which PyYAML silently keeps the last; and untrusted YAML."""

from __future__ import annotations

from typing import Any, Final

import yaml

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


class _Loader(yaml.SafeLoader):
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


def load_yaml(text: bytes | str) -> Any:
    """Parse a text into YAML's safe types.

    Raises:
        DuplicateNameError: A mapping has a name twice.
        yaml.YAMLError: It is not YAML.
    """
    return _load(_Loader(text))


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
        return loader.get_single_data()
    finally:
        loader.dispose()
