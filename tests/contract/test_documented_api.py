"""Every documented name is importable where the documentation says, with the documented parameters
in the documented order.

The table `golden/documented_api.json` is the documentation's: it grows with it and is never changed
to fit the code. `null` for parameters means that only the name is documented; `**` stands for
further keyword arguments.
"""

from __future__ import annotations

import importlib
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

TABLE: dict[str, dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parent / "golden" / "documented_api.json").read_text()
)
NAMES = [(module, name) for module, names in TABLE.items() for name in names]


def parameters(function: Any, is_bound: bool) -> tuple[list[str], list[str]]:
    """Names in order, and those of them that have no default."""
    found = list(inspect.signature(function).parameters.values())
    if is_bound and found and found[0].name in ("self", "cls"):
        del found[0]
    names = ["**" if p.kind is p.VAR_KEYWORD else p.name for p in found]
    required = [
        p.name
        for p in found
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    return names, required


def assert_takes(function: Any, documented: list[str] | None, is_bound: bool) -> None:
    assert callable(function)
    if documented is not None:
        names, required = parameters(function, is_bound)
        assert [name for name in names if name in documented] == documented, (
            "documented parameters, in their order"
        )
        assert set(required) <= set(documented), "what is ours has a default"
        assert names[: len([n for n in documented if n != "**"])] == [
            n for n in documented if n != "**"
        ], "they can be given by position"


@pytest.mark.parametrize(
    ("module", "name"),
    NAMES,
    ids=[f"{module.removeprefix('lmcache_core.')}.{name}" for module, name in NAMES],
)
def test_as_documented(module: str, name: str) -> None:
    spec = TABLE[module][name]
    found = getattr(importlib.import_module(module), name)
    if "function" in spec:
        assert_takes(found, spec["function"], is_bound=False)
        return
    assert inspect.isclass(found)
    for member, value in spec.get("enum", {}).items():
        assert found[member].value == value
    for attribute, value in spec.get("attrs", {}).items():
        assert getattr(found, attribute) == value
    if "base" in spec:
        assert spec["base"] in [base.__name__ for base in found.__mro__[1:]]
    if "init" in spec:
        assert_takes(found, spec["init"], is_bound=False)
    for method, documented in spec.get("methods", {}).items():
        assert_takes(getattr(found, method), documented, is_bound=True)
    for method, documented in spec.get("classmethods", {}).items():
        assert isinstance(inspect.getattr_static(found, method), (classmethod, staticmethod))
        assert_takes(getattr(found, method), documented, is_bound=True)
    for attribute in spec.get("properties", []):
        assert hasattr(found, attribute)


def test_the_table_is_whole() -> None:
    assert {module: len(names) for module, names in TABLE.items()} == {
        "lmcache_core.engine": 2,
        "lmcache_core.config": 3,
        "lmcache_core.keys": 1,
        "lmcache_core.gpu_connectors": 4,
        "lmcache_core.memory": 19,
        "lmcache_core.token_database": 3,
        "lmcache_core.storage": 3,
        "lmcache_core.serde": 12,
        "lmcache_core.serde.cachegen": 17,
    }
