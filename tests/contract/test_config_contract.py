"""The documented configuration API, literally: names, order, defaults. And the list of options,
which only grows on purpose.
"""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from lmcache_core.config import (
    OPTIONS,
    LMCacheEngineConfig,
)

FROM_DEFAULTS = [
    ("chunk_size", 256),
    ("local_cpu", True),
    ("max_local_cpu_size", 5.0),
    ("local_disk", None),
    ("max_local_disk_size", 0),
    ("remote_url", "lm://localhost:65432"),
    ("remote_serde", "naive"),
    ("save_decode_cache", False),
    ("enable_blending", False),
    ("blend_recompute_ratio", 0.15),
    ("blend_min_tokens", 256),
    ("enable_p2p", False),
    ("lookup_url", None),
    ("distributed_url", None),
    ("error_handling", False),
]
FROM_LEGACY = [
    ("chunk_size", 256),
    ("backend", "cpu"),
    ("remote_url", "lm://localhost:65432"),
    ("remote_serde", "naive"),
    ("save_decode_cache", False),
    ("enable_blending", False),
    ("blend_recompute_ratio", 0.15),
    ("blend_min_tokens", 256),
    ("max_local_disk_size", 0.0),
    ("enable_p2p", False),
    ("lookup_url", None),
    ("distributed_url", None),
    ("error_handling", False),
]
OURS = [
    ("broker_url", None),
    ("peer_token_file", None),
    ("peer_ticket_keys_file", None),
    ("peer_tls_cert_file", None),
    ("peer_tls_key_file", None),
    ("peer_tls_ca_file", None),
    ("peer_tls_client_ca_file", None),
    ("peer_tls_name", None),
    ("peer_allow_plaintext", False),
    ("blend_policy", "deviation"),
    ("blend_certificates", None),
    ("sidecar_socket", None),
    ("verify_hot", "always"),
    ("tier_timeout_s", 2.0),
    ("salt", ""),
    ("eviction_policy", "adaptive"),
    ("chunk_ttl_s", None),
    ("prefill_tokens_per_s", None),
    ("close_drain_s", 5.0),
    ("disk_fsync", False),
    ("remote_token_file", None),
    ("save_unfull_chunk", True),
    ("local_disk_serde", "naive"),
    ("remote_tls_ca_file", None),
    ("remote_tls_cert_file", None),
    ("remote_tls_key_file", None),
    ("otlp_endpoint", None),
    ("trace_sample_ratio", 0.01),
]
# A value of each documented option that differs from its default and from all others, where it can.
PLACED: dict[str, Any] = {
    "chunk_size": 64,
    "local_cpu": False,
    "max_local_cpu_size": 1.5,
    "local_disk": "file:///d/",
    "max_local_disk_size": 2.5,
    "remote_url": "lm://h:1",
    "remote_serde": None,
    "save_decode_cache": True,
    "enable_blending": False,
    "blend_recompute_ratio": 0.5,
    "blend_min_tokens": 9,
    "enable_p2p": False,
    "lookup_url": "http://l:1",
    "distributed_url": "lm://d:1",
    "error_handling": True,
}


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize(
    ("function", "documented"),
    [
        (LMCacheEngineConfig.from_defaults, FROM_DEFAULTS),
        (LMCacheEngineConfig.from_legacy, FROM_LEGACY),
    ],
)
def test_the_documented_parameters_and_defaults(
    function: Callable[..., Any], documented: list[tuple[str, Any]]
) -> None:
    *named, further = parameters_of(function)
    assert [(p.name, p.default, type(p.default)) for p in named] == [
        (name, default, type(default)) for name, default in documented
    ]
    assert {p.kind for p in named} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert further.kind is inspect.Parameter.VAR_KEYWORD


def test_what_from_defaults_makes() -> None:
    assert dataclasses.asdict(LMCacheEngineConfig.from_defaults()) == dict(FROM_DEFAULTS + OURS)


def test_what_from_legacy_makes() -> None:
    assert LMCacheEngineConfig.from_legacy() == LMCacheEngineConfig.from_defaults(remote_url=None)
    made = dataclasses.asdict(LMCacheEngineConfig.from_legacy(backend="remote"))
    assert made == dict(FROM_DEFAULTS + OURS) | {"local_cpu": False}


def test_the_constructor_takes_the_documented_fifteen_by_place() -> None:
    config = LMCacheEngineConfig(*PLACED.values())
    assert list(PLACED) == [name for name, _ in FROM_DEFAULTS]
    assert {name: getattr(config, name) for name in PLACED} == PLACED
    assert config == LMCacheEngineConfig.from_defaults(*PLACED.values())
    with pytest.raises(TypeError):
        LMCacheEngineConfig(*list(PLACED.values())[:14])
    with pytest.raises(TypeError):
        LMCacheEngineConfig(*PLACED.values(), None)  # type: ignore[misc]


def test_from_legacy_takes_the_documented_thirteen_by_place() -> None:
    values = PLACED | {"backend": "local_disk_remote"}
    config = LMCacheEngineConfig.from_legacy(*(values[name] for name, _ in FROM_LEGACY))
    for name, _ in FROM_LEGACY:
        if name != "backend":
            assert getattr(config, name) == PLACED[name], name


def test_the_list_of_options() -> None:
    assert [(option.name, option.default) for option in OPTIONS.values()] == FROM_DEFAULTS + OURS
    assert [option.name for option in OPTIONS.values() if option.documented] == [
        name for name, _ in FROM_DEFAULTS
    ]
    assert [field.name for field in dataclasses.fields(LMCacheEngineConfig)] == list(OPTIONS)


def test_configuring_imports_no_torch() -> None:
    code = (
        "import sys, lmcache_core.config as c; c.LMCacheEngineConfig.from_env({}); sys.exit('torch'"
        " in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
