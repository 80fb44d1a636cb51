"""YAML in which no name is written twice: PyYAML keeps the last and says nothing."""

from __future__ import annotations

from typing import Any

import yaml


class DuplicateNameError(yaml.MarkedYAMLError):
    """A mapping has a name twice.

    Attributes:
        name: The name.
        line: Where it stands the second time, from 1.
    """

    def __init__(self, name: str, mark: yaml.Mark) -> None:
        super().__init__(problem=f"the name {name!r} twice", problem_mark=mark)
        self.name = name
        self.line = mark.line + 1


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not where mappings are built: there, what `<<` has merged looks like a duplicate.
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
    """Return what a text says, of YAML's safe types.

    Raises:
        DuplicateNameError: A mapping in it has a name twice.
        yaml.YAMLError: It is no YAML.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
