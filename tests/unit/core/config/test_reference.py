"""The engine's part of docs/configuration.md."""

from __future__ import annotations

import subprocess
import sys

import yaml
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.foreign_names import FOREIGN_NAMES
from lmcache_core.config.reference import reference


def test_the_command_prints_it():
    command = [sys.executable, "-m", "lmcache_core.config.reference"]
    made = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout.decode()
    assert made == reference()


def test_every_name_of_lmcache_is_in_it():
    text = reference()
    assert not [name for name in FOREIGN_NAMES if f"`{name}`" not in text]


def test_its_examples_are_right(tmp_path):
    path = tmp_path / "c.yaml"
    for example in reference().split("```yaml\n")[1:]:
        text = example.partition("```")[0]
        assert yaml.safe_load(text)
        path.write_text(text)
        LMCacheEngineConfig.from_file(str(path))
    variables = reference().split("\n```\nLMCACHE_", 1)[1].partition("```")[0]
    environ = dict(line.split("=", 1) for line in f"LMCACHE_{variables}".splitlines())
    assert (
        LMCacheEngineConfig.from_env(environ).sidecar_socket == "/run/lmcache/socket/sidecar.sock"
    )
