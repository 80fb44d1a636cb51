"""docs/operations.md has every setting of the sidecar, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from lmcache_sidecar.settings import SidecarSettings
from pydantic_core import PydanticUndefined

OPERATIONS = (Path(__file__).resolve().parents[3] / "docs" / "operations.md").read_text(
    encoding="utf-8"
)
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \|$", re.MULTILINE)
SECTION = OPERATIONS.partition("## Settings of the sidecar\n")[2].partition("\n## ")[0]
DEFAULTS = {name: default for name, default, _ in ROW.findall(SECTION)}


def test_the_table_has_every_setting_once_and_no_other() -> None:
    named = [name for name, _, _ in ROW.findall(SECTION)]
    assert sorted(named) == sorted(SidecarSettings.model_fields)


@pytest.mark.parametrize("name", SidecarSettings.model_fields)
def test_the_default_is_what_the_sidecar_takes(name: str) -> None:
    field = SidecarSettings.model_fields[name]
    if field.default is PydanticUndefined:
        assert DEFAULTS[name] not in ("", str(field.default)), (
            "worked out at the start, told in words"
        )
        return
    spelt = (
        {None: "none", "": "none", True: "true", False: "false"}
        if isinstance(field.default, bool | str | None)
        else {}
    )
    assert DEFAULTS[name] == spelt.get(field.default, str(field.default))
