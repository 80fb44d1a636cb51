"""A vLLM that the connector does not fit starts and serves, without the cache, and its log says why
once.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lmcache_core.integrations.vllm.releases import LEAST, LEAST_WITH_TIERS, text_of, too_old

from tests.fixtures import fake_vllm

FAKE = Path(fake_vllm.__file__).parent / "vllm"
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
CONNECTOR = ("lmcache_core.integrations.vllm", "LMCacheConnector")
WITH_TIERS = ("lmcache_core.integrations.vllm_tier", "LMCacheOffloadingConnector")

ROLE = """
from abc import ABC, abstractmethod
from enum import Enum


class KVConnectorRole(Enum):
    SCHEDULER = 0
    WORKER = 1


class KVConnectorMetadata:
    pass
"""
TWO_ARGUMENTS = f"""{ROLE}
class KVConnectorBase_V1(ABC):
    def __init__(self, vllm_config, role):
        self._connector_metadata, self._vllm_config, self._role = None, vllm_config, role

    @property
    def role(self):
        return self._role

    def bind_connector_metadata(self, connector_metadata):
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self):
        self._connector_metadata = None

    def register_kv_caches(self, kv_caches):
        return

    @abstractmethod
    def start_load_kv(self, forward_context, **kwargs): ...

    @abstractmethod
    def wait_for_layer_load(self, layer_name): ...

    @abstractmethod
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    @abstractmethod
    def wait_for_save(self): ...

    def get_finished(self, finished_req_ids):
        return None, None

    @abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...

    @abstractmethod
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...

    @abstractmethod
    def build_connector_meta(self, scheduler_output): ...

    def request_finished(self, request, block_ids):
        return False, None
"""
"""As vLLM 0.9 to 0.11 have it."""
THREE_ARGUMENTS = (
    TWO_ARGUMENTS.replace("vllm_config, role):", "vllm_config, role, kv_cache_config):")
    + """
    @abstractmethod
    def renamed_since(self): ...


class SupportsHMA(ABC):
    @abstractmethod
    def request_finished_all_groups(self, request, block_ids): ...
"""
)
"""As 0.24 has it, but for an abstract method that no release has."""

SERVE = """
import importlib, json, logging, sys
from types import SimpleNamespace

handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
logging.getLogger("vllm").addHandler(handler)
logging.getLogger("vllm").setLevel(logging.INFO)
from vllm.distributed.kv_transfer.kv_connector.v1 import base

config = SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_producer=True))
answers = {}
for role in base.KVConnectorRole:
    made = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
    connector = made(config, role, *[None] * int(sys.argv[3]))
    assert isinstance(connector, base.KVConnectorBase_V1)
    connector.register_kv_caches({})
    matched = connector.get_num_new_matched_tokens(None, 0)
    connector.update_state_after_alloc(None, None, 0)
    metadata = connector.build_connector_meta(None)
    assert isinstance(metadata, base.KVConnectorMetadata)
    connector.bind_connector_metadata(metadata)
    connector.start_load_kv(None)
    connector.wait_for_layer_load("layer")
    connector.save_kv_layer("layer", None, None)
    connector.wait_for_save()
    connector.clear_connector_metadata()
    finished = connector.get_finished(set()), connector.request_finished(None, [])
    answers[role.name] = [matched, *finished]
    if hasattr(base, "SupportsHMA"):
        assert isinstance(connector, base.SupportsHMA)
        assert connector.request_finished_all_groups(None, ([],)) == (False, None)
print(json.dumps(answers))
"""
NOTHING = [[0, False], [None, None], [False, None]]


def minimal(folder: Path, version: str, base: str) -> Path:
    """A vLLM with nothing but the base class of connectors."""
    path = folder / "vllm" / BASE
    path.parent.mkdir(parents=True)
    path.write_text(base)
    for parent in path.relative_to(folder).parents[:-1]:
        (folder / parent / "__init__.py").write_text("")
    (folder / "vllm/__init__.py").write_text(f"__version__ = {version!r}\n")
    return folder


def changed(folder: Path, name: str, old: str, new: str) -> Path:
    """The vLLM that the connector's other tests use, with another text in one of its files."""
    shutil.copytree(FAKE, folder / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "vllm/__init__.py").write_text('__version__ = "0.99.0"\n')
    path = folder / "vllm" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return folder


def serve(
    vllm: Path, connector: tuple[str, str], num_more: int
) -> tuple[dict[str, Any], list[str]]:
    """What connectors of both roles answer in one process, and the lines of its log."""
    paths = [str(vllm), *(path for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, "-c", SERVE, *connector, str(num_more)],
        env={"PYTHONPATH": ":".join(paths)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *log, answers = done.stdout.splitlines()
    return json.loads(answers), log


@pytest.mark.parametrize("connector", [CONNECTOR, WITH_TIERS], ids=["lmcache", "offloading"])
@pytest.mark.parametrize(
    ("version", "base", "num_more"),
    [("0.11.0+cpu", TWO_ARGUMENTS, 0), ("0.24.0", THREE_ARGUMENTS, 1)],
)
def test_older_vllm_serves_without_the_cache(
    tmp_path: Path, connector: tuple[str, str], version: str, base: str, num_more: int
) -> None:
    answers, log = serve(minimal(tmp_path, version, base), connector, num_more)
    assert answers == {"SCHEDULER": NOTHING, "WORKER": NOTHING}
    least = text_of(LEAST if connector is CONNECTOR else LEAST_WITH_TIERS)
    release = version.partition("+")[0]
    assert log == [
        f"ERROR model served without the cache: reason=vLLM {release} is older than {least}"
    ]


@pytest.mark.parametrize("version", ["dev", "0.99.0"])
def test_vllm_in_which_the_connector_cannot_be_imported_serves_without_the_cache(
    tmp_path: Path, version: str
) -> None:
    answers, (line,) = serve(minimal(tmp_path, version, TWO_ARGUMENTS), CONNECTOR, 0)
    assert answers == {"SCHEDULER": NOTHING, "WORKER": NOTHING}
    assert line.startswith(
        "ERROR model served without the cache:"
        f" reason=LMCacheConnector does not fit vLLM {version}: "
    )
    assert "Error: " in line


NEW_STEP = """
    @abstractmethod
    def on_new_step(self): ...

    def on_new_request("""


@pytest.mark.parametrize(
    ("name", "old", "new", "num_more", "reason"),
    [
        (BASE, "\n    def on_new_request(", NEW_STEP, 1, "it lacks on_new_step"),
        (
            BASE,
            "kv_cache_config: Any) -> None",
            "kv_cache_config: Any, plan: Any) -> None",
            2,
            "missing a required argument: 'plan'",
        ),
        (
            BASE,
            "self, request: Any, num_computed_tokens: int\n",
            "self, request: Any, num_computed_tokens: int, step: int\n",
            1,
            "get_num_new_matched_tokens: too many positional arguments",
        ),
        (
            BASE,
            "finished_req_ids: set[str]) -> KV",
            "finished_req_ids: set[str], *, step: int) -> KV",
            1,
            "get_transfer_results: got an unexpected keyword argument 'step'",
        ),
        (
            "distributed/kv_transfer/__init__.py",
            "get_kv_transfer_group",
            "get_kv_group",
            1,
            "cannot import name 'get_kv_transfer_group'",
        ),
    ],
    ids=["abstract", "constructor", "argument", "keyword", "import"],
)
def test_newer_vllm_with_other_calls_serves_without_the_cache(
    tmp_path: Path, name: str, old: str, new: str, num_more: int, reason: str
) -> None:
    answers, (line,) = serve(changed(tmp_path, name, old, new), CONNECTOR, num_more)
    assert answers == {"SCHEDULER": NOTHING, "WORKER": NOTHING}
    assert "LMCacheConnector does not fit vLLM 0.99.0: " in line
    assert reason in line


@pytest.mark.parametrize(
    ("version", "sentence"),
    [
        ("0.27.0", "vLLM 0.27.0 is older than 0.27.1"),
        ("0.27.0rc2.dev3+g1a", "vLLM 0.27.0 is older than 0.27.1"),
        ("0.27", ""),
        ("0.27.1", ""),
        ("0.100.0", ""),
        ("0.1.dev12+g1a", ""),
        ("", ""),
    ],
)
def test_releases_are_compared_by_their_numbers(version: str, sentence: str) -> None:
    assert too_old(version, (0, 27, 1)) == sentence
