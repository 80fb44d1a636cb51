"""A vLLM that the connector does not fit starts and serves, without the cache, and its log says why
once.
"""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmcache_core.integrations.vllm.releases import LEAST, LEAST_WITH_TIERS, text_of, too_old

from tests.fixtures import fake_vllm
from tests.fixtures.fake_vllm import vllm_in

FAKE = Path(fake_vllm.__file__).parent / "vllm"
BASE_MODULE = "distributed.kv_transfer.kv_connector.v1.base"
BASE = f"{BASE_MODULE.replace('.', '/')}.py"
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

NOTHING = [(0, False), (None, None), (False, None)]
"""What an engine is answered: no hit, no finished transfer, no blocks held."""


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


def serve(vllm: Path, connector: tuple[str, str], num_more: int) -> None:
    """Make both sides of a connector as this vLLM does, and call them: they find and do nothing.

    Args:
        vllm: The folder that has it.
        connector: Module and name.
        num_more: Number of arguments after configuration and role.
    """
    with vllm_in(vllm):
        base = importlib.import_module(f"vllm.{BASE_MODULE}")
        config = SimpleNamespace(kv_transfer_config=SimpleNamespace(is_kv_producer=True))
        for role in base.KVConnectorRole:
            made = getattr(importlib.import_module(connector[0]), connector[1])
            one = made(config, role, *[None] * num_more)
            assert isinstance(one, base.KVConnectorBase_V1)
            assert answers_of(one) == NOTHING
            if hasattr(base, "SupportsHMA"):
                assert isinstance(one, base.SupportsHMA)
                assert one.request_finished_all_groups(None, ([],)) == (False, None)


def answers_of(connector: Any) -> list[object]:
    """What a connector answers to a request without a hit, and to a step."""
    connector.register_kv_caches({})
    matched = connector.get_num_new_matched_tokens(None, 0)
    connector.update_state_after_alloc(None, None, 0)
    connector.bind_connector_metadata(connector.build_connector_meta(None))
    connector.start_load_kv(None)
    connector.wait_for_layer_load("layer")
    connector.save_kv_layer("layer", None, None)
    connector.wait_for_save()
    connector.clear_connector_metadata()
    return [matched, connector.get_finished(set()), connector.request_finished(None, [])]


@pytest.mark.parametrize("connector", [CONNECTOR, WITH_TIERS], ids=["lmcache", "offloading"])
@pytest.mark.parametrize(
    ("version", "base", "num_more"),
    [("0.11.0+cpu", TWO_ARGUMENTS, 0), ("0.24.0", THREE_ARGUMENTS, 1)],
)
def test_older_vllm_serves_without_the_cache(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    connector: tuple[str, str],
    version: str,
    base: str,
    num_more: int,
) -> None:
    serve(minimal(tmp_path, version, base), connector, num_more)
    least = text_of(LEAST if connector is CONNECTOR else LEAST_WITH_TIERS)
    release = version.partition("+")[0]
    assert caplog.messages == [
        f"model served without the cache: reason=vLLM {release} is older than {least}"
    ]


@pytest.mark.parametrize("version", ["dev", "0.99.0"])
def test_vllm_in_which_the_connector_cannot_be_imported_serves_without_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    serve(minimal(tmp_path, version, TWO_ARGUMENTS), CONNECTOR, 0)
    (line,) = caplog.messages
    assert line.startswith(
        f"model served without the cache: reason=LMCacheConnector does not fit vLLM {version}: "
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
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    old: str,
    new: str,
    num_more: int,
    reason: str,
) -> None:
    serve(changed(tmp_path, name, old, new), CONNECTOR, num_more)
    (line,) = caplog.messages
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
