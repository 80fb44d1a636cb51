"""What an SGLang engine's KV is named by, and which engines are refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lmcache_core.config import LMCacheEngineMetadata
from lmcache_core.errors import LayoutError
from lmcache_core.integrations.sglang.identity import Ranks, identity_of
from lmcache_core.integrations.sglang.pools import Pool, pool_of
from lmcache_core.integrations.sglang.server_settings import (
    SETTINGS_WITHOUT_KV,
    server_fingerprint,
)
from lmcache_core.token_database import identity_root

from tests.fixtures.vllm_engine.worlds import make_adapter, make_model

PAGE = 16
RECORDED = Path(__file__).parents[4] / "fixtures" / "sglang_declared.json"


class Order(Enum):
    """As SGLang's `KVBufferLayout`."""

    NHD = "nhd"
    HND = "hnd"


class MHATokenToKVPool:
    """As SGLang's, as far as it is read."""

    def __init__(self, heads: int = 2, size: int = 8, **more: Any) -> None:
        sides = [torch.zeros(3 * PAGE + 5, heads, size) for _ in range(4)]
        self.info = SimpleNamespace(
            buffers=SimpleNamespace(k=sides[:2], v=sides[2:], layout=Order.NHD),
            head_num=heads,
            head_dim=size,
            v_head_dim=size,
            **{"dtype": torch.float32, "scales": None} | more,
        )

    def get_device_pool_infos(self) -> tuple[Any, ...]:
        return (SimpleNamespace(buffer_info=self.info),)


class MLATokenToKVPool(MHATokenToKVPool):
    """The same for latents."""

    def __init__(self, **more: Any) -> None:
        latents = [torch.zeros(3 * PAGE, 1, 24) for _ in range(3)]
        self.info = SimpleNamespace(
            buffers=latents, **{"dtype": torch.float32, "scales": None, "packed_fp8": False} | more
        )


class SWAKVPool(MHATokenToKVPool):
    """One of another kind."""


@dataclass
class Given:
    """An engine."""

    settings: dict[str, Any]
    pool: Pool
    ranks: Ranks = field(default_factory=Ranks)
    variables: tuple[tuple[str, str], ...] = ()
    release: str = "0.5.23"

    def identity(self, **options: Any) -> LMCacheEngineMetadata:
        config = SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: {"rope_theta": 1e4}),
            is_multimodal=False,
            dtype=torch.float32,
        )
        for name in ("is_multimodal", "dtype"):
            if name in options:
                setattr(config, name, options.pop(name))
        return identity_of(
            *(self.settings, config, self.pool, self.ranks, dict(self.variables), self.release),
            options,
        )

    def root(self, **options: Any) -> bytes:
        return identity_root(self.identity(**options))


@pytest.fixture
def given(tmp_path: Path) -> Given:
    recorded = json.loads(RECORDED.read_text())
    settings = recorded | {
        "model_path": str(make_model(tmp_path / "a", "weights", "model")),
        "page_size": PAGE,
    }
    return Given(settings, pool_of(MHATokenToKVPool(), PAGE))


def test_the_same_model_at_another_path_is_the_same(given: Given, tmp_path: Path) -> None:
    before = given.root()
    given.settings["model_path"] = str(make_model(tmp_path / "b", "weights", "model"))
    given.variables = (("SGLANG_RUN_ID", "1"),)
    assert given.root() == before


def test_whatever_may_change_the_kv_changes_the_name(given: Given, tmp_path: Path) -> None:
    roots = {given.root()}

    def differs() -> bool:
        num_before = len(roots)
        roots.add(given.root())
        return len(roots) > num_before

    given.ranks = Ranks(0, 2)
    assert differs()
    given.release = "0.5.24"
    assert differs()
    given.variables = (("SGLANG_ANYTHING", "1"),)
    assert differs()
    given.pool = pool_of(MHATokenToKVPool(heads=4), PAGE)
    assert differs()
    given.settings["page_size"] = 32
    assert differs()
    given.settings["model_path"] = str(make_model(tmp_path / "c", "other weights", "model"))
    assert differs()
    adapter = make_adapter(tmp_path / "d", "adapter")
    given.settings["lora_paths"] = [{"lora_name": "a", "lora_path": str(adapter)}]
    assert differs()
    given.settings["lora_paths"][0]["lora_path"] = str(make_adapter(tmp_path / "e", "other"))
    assert differs()
    given.settings["quantization_param_path"] = str(tmp_path / "scales")
    (tmp_path / "scales").write_text("1")
    assert differs()
    (tmp_path / "scales").write_text("2")
    assert differs()
    assert given.root(model_name="other") not in roots
    assert given.root(revision="named") not in roots
    assert given.root(dtype=torch.bfloat16) not in roots


def test_listed_settings_change_no_name_and_all_others_do(given: Given) -> None:
    listed = set(" ".join(SETTINGS_WITHOUT_KV.values()).split())
    assert listed <= set(given.settings), "of a release that does not know them"
    for name in given.settings:
        changed = given.settings | {name: "another"}
        is_same = server_fingerprint(changed) == server_fingerprint(given.settings)
        assert is_same == (name in listed), name
    assert server_fingerprint(given.settings | {"of_a_later_release": 1}) != server_fingerprint(
        given.settings
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("nnodes", 2), ("pp_size", 2), ("attn_cp_size", 2), ("dcp_size", 2)),
        *(("disaggregation_mode", "prefill"), ("speculative_algorithm", "EAGLE")),
        *(("custom_weight_loader", ["x"]), ("enable_unified_memory", True)),
        *(("load_format", "dummy"), ("model_path", "org/unknown")),
        ("lora_paths", [{"lora_name": "a", "lora_path": "/nowhere"}]),
    ],
)
def test_engines_whose_kv_cannot_be_named_are_refused(given: Given, name: str, value: Any) -> None:
    given.settings[name] = value
    word = value[0]["lora_name"] if name == "lora_paths" else str(value)
    with pytest.raises(LayoutError, match=word):
        given.identity()


def test_models_that_take_pictures_are_refused(given: Given) -> None:
    with pytest.raises(LayoutError, match="pictures"):
        given.identity(is_multimodal=True)


def test_latents_are_the_same_on_every_rank(given: Given) -> None:
    given.pool, given.ranks = pool_of(MLATokenToKVPool(), PAGE), Ranks(1, 2)
    found = given.identity()
    assert (found.world_size, found.worker_id, found.kv_shape) == (1, 0, (3, 1, PAGE, 1, 24))


def test_each_page_is_a_view_of_the_pool() -> None:
    kvcache = MHATokenToKVPool()
    pool = pool_of(kvcache, PAGE)
    kvcache.info.buffers.v[1][PAGE + 3, 1, 2] = 7.0
    assert pool.kvcaches[1][1].shape == (3, PAGE, 2, 8)
    assert pool.kvcaches[1][1][1, 3, 1, 2] == 7.0
    assert not pool.is_latent


@pytest.mark.parametrize(
    ("kvcache", "word"),
    [
        (SWAKVPool(), "SWAKVPool"),
        (MHATokenToKVPool(scales=object()), "scales"),
        (MLATokenToKVPool(packed_fp8=True), "scales"),
    ],
)
def test_pools_with_more_than_keys_and_values_are_refused(kvcache: Any, word: str) -> None:
    with pytest.raises(LayoutError, match=word):
        pool_of(kvcache, PAGE)


@pytest.mark.parametrize(
    ("field", "value", "word"), [("v_head_dim", 4, "of V 4"), ("buffers", None, "hnd")]
)
def test_pools_in_another_order_are_refused(field: str, value: Any, word: str) -> None:
    kvcache = MHATokenToKVPool()
    if field == "buffers":
        kvcache.info.buffers.layout = Order.HND
    else:
        setattr(kvcache.info, field, value)
    with pytest.raises(LayoutError, match=word):
        pool_of(kvcache, PAGE)
