"""The default rendering as a text that can be compared: objects and fields in a fixed order,
nothing that differs each time.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from tests.helm.conftest import Manifest, Rendering

SNAPSHOT = Path(__file__).parent / "snapshots" / "default.yaml"
WIDTH = 140


class Dumper(yaml.SafeDumper):
    """Texts of several lines stay readable."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    )


Dumper.add_representer(str, _represent_text)


def snapshot_of(rendering: Rendering) -> str:
    """The snapshot of a rendering. What is generated each time is left out."""
    ordered = sorted(rendering.manifests, key=lambda one: (one["kind"], one["metadata"]["name"]))
    return yaml.dump_all(
        [_steady(one) for one in ordered],
        Dumper=Dumper,
        sort_keys=True,
        width=WIDTH,
        allow_unicode=True,
    )


def _steady(manifest: Manifest) -> Manifest:
    if manifest["kind"] == "Secret":
        return manifest | {"data": dict.fromkeys(manifest["data"], "(generated)")}
    if manifest["kind"] == "ConfigMap" and "release_test.py" in manifest["data"]:
        return manifest | {"data": {"release_test.py": "(files/release_test.py)"}}
    return manifest
