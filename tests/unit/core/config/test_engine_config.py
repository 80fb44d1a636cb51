"""Allowed values, options that contradict each other, and KV that metadata cannot describe."""

from __future__ import annotations

import dataclasses
import os
from urllib.parse import quote

import pytest
from lmcache_core.config import (
    DISK_SERDES,
    EVICTION_POLICIES,
    OPTIONS,
    REMOTE_SCHEMES,
    REMOTE_SERDES,
    VERIFY_HOT_MODES,
    LMCacheEngineConfig,
    LMCacheEngineMetadata,
    LMCacheMemPoolMetadata,
)
from lmcache_core.config.metadata import KV_DTYPES
from lmcache_core.config.options import directory_of_url
from lmcache_core.errors import ConfigError
from lmcache_core.memory.dtypes import DTYPE_ITEMSIZE
from lmcache_core.serde import CODEC_NAMES, SERDE_NAMES

from_defaults = LMCacheEngineConfig.from_defaults


def test_misspelt_option_is_refused_with_a_suggestion(from_yaml):
    for build in (
        lambda: from_defaults(chunk_sizes="s3cret"),
        lambda: LMCacheEngineConfig.from_legacy(chunk_sizes="s3cret"),
        lambda: LMCacheEngineConfig.from_env({"LMCACHE_CHUNK_SIZES": "s3cret"}),
        lambda: from_yaml("chunk_sizes: s3cret"),
    ):
        with pytest.raises(ConfigError, match="did you mean 'chunk_size'") as caught:
            build()
        assert "s3cret" not in str(caught.value)


PEERS = {
    "enable_p2p": True,
    "lookup_url": "http://l:8081",
    "broker_url": "http://b:8082",
    "distributed_url": "lm://127.0.0.1:65433",
}
OPEN = {"distributed_url": "lm://10.0.0.1:65433", "peer_ticket_keys_file": "/keys"}
SECURE = {"distributed_url": "lm+tls://10.0.0.1:65433", "peer_tls_cert_file": "/cert"}
SWITCHES = [name for name, option in OPTIONS.items() if option.kind is bool]
TEXTS = [
    name
    for name, option in OPTIONS.items()
    if option.kind is str and option.optional and not option.choices and "disk" not in name
]
DISKS = ["var/cache", "file://cache", "file:///", "file:///a?b", "file:///a,/b", "s3://b/", 5]
REMOTES = [
    *("host:65432", "ftp://host", "lm://[::1", "lm://", "lm://host:0", "lm://host:port"),
    *("lm://user@:1", "redis-sentinel://one:26379,two:port/service"),
    *("redis-sentinel://one:26379,:26379/service", "file://host/dir"),
]
IMPOSSIBLE = [
    *(("chunk_size", v) for v in (0, 65537, 256.0, "256", True, None)),
    *(("max_local_cpu_size", v) for v in (-1, float("nan"), float("inf"), "5", True)),
    ("max_local_disk_size", -0.1),
    *(("local_disk", v) for v in DISKS),
    *(("remote_url", v) for v in REMOTES),
    *(("remote_serde", v) for v in ("pickle", "", 1, "cachegen:", "Naive")),
    *(("local_disk_serde", v) for v in ("pickle", None, "torch")),
    *(("blend_recompute_ratio", v) for v in (-0.1, 1.1)),
    ("blend_min_tokens", -1),
    ("verify_hot", "sometimes"),
    ("eviction_policy", "LRU"),
    *(("tier_timeout_s", v) for v in (0, 3601)),
    *(("chunk_ttl_s", v) for v in (0, float("inf"))),
    ("prefill_tokens_per_s", 0),
    *(("close_drain_s", v) for v in (-1, 3601, None)),
    ("blend_policy", "best"),
    *(("trace_sample_ratio", v) for v in (-0.1, 1.1)),
    *((name, v) for name in SWITCHES for v in ("false", 0)),
    *((name, v) for name in TEXTS for v in (5, " ")),
    ("salt", None),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE, ids=str)
def test_impossible_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}=.*: must be "):
        from_defaults(**{name: value})


def test_every_option_refuses_something():
    assert {name for name, _ in IMPOSSIBLE} == set(OPTIONS)


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("remote_serde", "cachegn:high", "cachegen:high"),
        ("local_disk_serde", "losless", "lossless"),
    ],
)
def test_misspelt_choice_is_refused_with_a_suggestion(name, wrong, right):
    with pytest.raises(ConfigError, match=f"^{name}='{wrong}': .*; did you mean '{right}'"):
        from_defaults(**{name: wrong})


def test_choices_are_the_existing_codecs():
    assert set(REMOTE_SERDES) == set(SERDE_NAMES)
    assert set(DISK_SERDES) == {"naive", *CODEC_NAMES}


@pytest.mark.parametrize(
    "values",
    [
        {"chunk_size": 1},
        {"chunk_size": 65536},
        {"local_disk": "file:///cache/", "max_local_disk_size": 0.5, "disk_fsync": True},
        {"remote_serde": None},
        {"remote_serde": "cachegen", "remote_url": None},
        *({"remote_serde": serde} for serde in REMOTE_SERDES),
        *(
            {"local_disk_serde": serde, "local_disk": "file:///d/", "max_local_disk_size": 1}
            for serde in DISK_SERDES
        ),
        {"blend_recompute_ratio": 0},
        {"blend_recompute_ratio": 1},
        {"close_drain_s": 0},
        {"chunk_ttl_s": 0.001},
        {"remote_url": "lm+tls://cache.example", "remote_token_file": "/etc/token"},
        {"remote_url": "file:///mnt/shared"},
        {"remote_url": "redis-sentinel://user:p%40ss@one:26379,two/service"},
        {"remote_url": "lm://[::1]:65432"},
        {"remote_url": "rediss://:p%40ss@[2001:db8::1]:6379/0"},
        {"remote_url": None, "remote_token_file": "/etc/token"},
        {"enable_p2p": False, "lookup_url": "localhost:6379", "distributed_url": "localhost:8200"},
        PEERS,
        PEERS | {"distributed_url": "lm://[::1]:65433"},
        PEERS | OPEN | {"peer_allow_plaintext": True, "peer_token_file": "/token"},
        PEERS | {"distributed_url": "lm+tls://127.0.0.1:65433", "peer_tls_cert_file": "/pair"},
        PEERS | {"peer_tls_ca_file": "/ca", "peer_tls_name": "pod.example"},
        {"distributed_url": "lm://10.0.0.1:65433", "peer_tls_cert_file": "/pair"},
        PEERS | OPEN | SECURE | {"peer_tls_key_file": "/key", "peer_tls_client_ca_file": "/ca"},
        {"local_disk": None, "max_local_disk_size": 5.0},
        {"sidecar_socket": "/s", "max_local_cpu_size": 20, "lookup_url": "localhost:6379"},
        {"sidecar_socket": "/s", "max_local_cpu_size": 0},
        *({"remote_url": f"{scheme}://host:1"} for scheme in REMOTE_SCHEMES if scheme != "file"),
        *({"verify_hot": mode} for mode in VERIFY_HOT_MODES),
        *({"eviction_policy": policy} for policy in EVICTION_POLICIES),
    ],
    ids=str,
)
def test_possible_values_are_accepted(values):
    config = from_defaults(**values)
    assert {name: getattr(config, name) for name in values} == values


CONTRADICTORY = [
    *(
        ({**PEERS, name: None}, "set all three")
        for name in ("lookup_url", "broker_url", "distributed_url")
    ),
    *(
        (PEERS | {"distributed_url": url}, "or lm://host:port")
        for url in ("localhost:8200", "lm://h", "https://h:1", "lm://u:p@h:1")
    ),
    (PEERS | {"distributed_url": "lm://pod:65433"}, "set peer_ticket_keys_file"),
    (PEERS | SECURE, "set peer_ticket_keys_file"),
    (PEERS | OPEN, "set peer_tls_cert_file, or set peer_allow_plaintext"),
    (PEERS | OPEN | {"distributed_url": "lm://localhost.example:1"}, "could be read on their way"),
    (PEERS | {"distributed_url": "lm+tls://127.0.0.1:1"}, "set peer_tls_cert_file"),
    (
        PEERS | OPEN | {"peer_tls_cert_file": "/cert", "peer_allow_plaintext": True},
        "write a distributed_url with lm.tls",
    ),
    (PEERS | {"peer_tls_client_ca_file": "/ca"}, "write a distributed_url with lm.tls"),
    (PEERS | {"peer_tls_key_file": "/key"}, "set peer_tls_cert_file or leave peer_tls_key_file"),
    ({"local_disk": "file:///cache/"}, "set max_local_disk_size"),
    ({"max_local_cpu_size": 0}, "give it some GB"),
    ({"max_local_cpu_size": 0, "local_cpu": False}, "give it some GB"),
    ({"local_cpu": False, "remote_url": None}, "one of local_disk, remote_url"),
    ({"disk_fsync": True}, "set local_disk or leave disk_fsync out"),
    ({"local_disk_serde": "lossless"}, "set local_disk or leave local_disk_serde out"),
    ({"remote_url": "redis://host", "remote_token_file": "/t"}, "leave remote_token_file out"),
    ({"remote_url": "lm://host", "remote_tls_ca_file": "/ca"}, "nothing there is encrypted"),
    ({"remote_url": None, "remote_tls_cert_file": "/c"}, "nothing there is encrypted"),
    ({"remote_url": "lm+tls://host", "remote_tls_key_file": "/k"}, "a key without its certificate"),
]
BESIDE_SIDECAR = {
    "local_cpu": False,
    "local_disk": "file:///cache/",
    "max_local_disk_size": 5.0,
    "remote_url": "lm://elsewhere",
    "verify_hot": "never",
    "salt": "s3cret",
    "eviction_policy": "lru",
    "chunk_ttl_s": 60,
    "disk_fsync": True,
    "remote_token_file": "/t",
    "remote_tls_ca_file": "/ca",
    "remote_tls_cert_file": "/cert",
    "remote_tls_key_file": "/key",
    "remote_serde": "cachegen",
    "enable_p2p": True,
    "broker_url": "http://b:8082",
    "peer_token_file": "/t",
    "peer_ticket_keys_file": "/k",
    "peer_tls_cert_file": "/c",
    "peer_tls_key_file": "/k",
    "peer_tls_ca_file": "/ca",
    "peer_tls_client_ca_file": "/ca",
    "peer_tls_name": "pod.example",
    "peer_allow_plaintext": True,
    "local_disk_serde": "cachegen",
}


@pytest.mark.parametrize(("values", "fix"), CONTRADICTORY, ids=str)
def test_contradiction_is_refused_with_the_fix(values, fix):
    with pytest.raises(ConfigError, match=fix) as caught:
        from_defaults(**values)
    shown = str(caught.value).partition(": ")[0]
    assert any(shown.startswith(f"{name}={value!r}") for name, value in values.items())


@pytest.mark.parametrize("name", BESIDE_SIDECAR)
def test_option_that_the_sidecar_decides_is_refused_with_its_setting(name):
    fix = OPTIONS[name].beside_sidecar
    disk = {"max_local_disk_size": 1} if name == "local_disk" else {}
    with pytest.raises(ConfigError, match=f"^{name}=.*sidecar_socket='/s'.*{fix}") as caught:
        from_defaults(sidecar_socket="/s", **{name: BESIDE_SIDECAR[name]}, **disk)
    assert "s3cret" not in str(caught.value)
    from_defaults(sidecar_socket="/s", **{name: OPTIONS[name].default})


def test_sidecar_has_the_settings_that_errors_name():
    from lmcache_sidecar.settings import SidecarSettings

    advice = {name: option.beside_sidecar for name, option in OPTIONS.items()}
    named = {word for text in advice.values() for word in text.replace(",", " ").split()}
    assert {word for word in named if "_" in word} <= set(SidecarSettings.model_fields)
    assert set(BESIDE_SIDECAR) == {name for name, text in advice.items() if text}
    assert [advice[name].split()[-1] for name in ("local_disk", "salt")] == ["disk_gb", "salt_file"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_url", "redis://user:s3cret?@host:6379/1"),
        ("remote_url", "rediss-typo://user:s3c/s3cret@host/"),
        ("remote_url", "rediss-typo://user:s3c@s3cret@host/"),
        ("remote_url", "typo://host/?password=s3cret"),
        ("remote_url", "user:s3cret@host"),
        ("remote_url", "redis//user:s3cret@host"),
        ("lookup_url", ["http://user:s3cret@one", "http://user:s3cret@two"]),
        ("local_disk", {"file": "s3cret"}),
        ("salt", b"s3cret"),
    ],
    ids=str,
)
def test_error_shows_neither_password_nor_salt(name, value):
    with pytest.raises(ConfigError) as caught:
        from_defaults(**{name: value})
    assert "s3cret" not in str(caught.value)


def test_config_shows_neither_password_nor_salt():
    text = repr(
        from_defaults(
            remote_url="redis://user:s3c%3Fret@host:6379/1?password=s3cret",
            salt="s3cret",
            chunk_size=64,
        )
    )
    assert "s3c" not in text
    assert "remote_url='redis://…@host:6379/1?…'" in text
    assert "salt=…" in text
    assert "chunk_size=64" in text
    assert "salt=''" in repr(from_defaults())


def test_config_is_checked_whenever_it_is_made_and_cannot_be_changed():
    config = from_defaults()
    with pytest.raises(ConfigError, match="chunk_size=0"):
        dataclasses.replace(config, chunk_size=0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.chunk_size = 1


@pytest.mark.parametrize("path", ["/var/cache/kv/", "/odd #?name", "/per%cent/ünï"])
def test_disk_may_be_a_plain_path(path):
    config = from_defaults(local_disk=path, max_local_disk_size=1)
    assert config.local_disk == "file://" + quote(path)
    assert directory_of_url(config.local_disk) == path
    assert dataclasses.replace(config, local_disk=config.local_disk) == config


def test_disk_may_be_a_path_that_is_not_utf8():
    """File names are bytes; Python shows those that are no text as surrogates."""
    path = os.fsdecode(b"/mnt/kv\xff")
    config = LMCacheEngineConfig.from_env(
        {"LMCACHE_LOCAL_DISK": path, "LMCACHE_MAX_LOCAL_DISK_SIZE": "1"}
    )
    assert config.local_disk == "file:///mnt/kv%FF"
    assert directory_of_url(config.local_disk) == directory_of_url(f"file://{path}") == path


def test_salt_that_cannot_be_hashed_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="salt=…: must be text in UTF-8"):
        LMCacheEngineConfig.from_env({"LMCACHE_SALT": os.fsdecode(b"s3cret\xff")})


@pytest.mark.parametrize("value", ["/mnt/\ud800", "file:///mnt/\ud800"])
@pytest.mark.parametrize("name", ["local_disk", "remote_url"])
def test_path_that_no_file_can_have_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name}=.*must be"):
        from_defaults(**{name: value}, max_local_disk_size=1)


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("file:///a,b", "%3F, %23, %2C"),
        ("file://host/a", "the absolute path of a directory"),
        ("redis://host:1/abc", "the number of a database"),
        ("rediss://host/1/2", "the number of a database"),
    ],
)
def test_refused_remote_url_names_the_rule_of_its_scheme(url, rule):
    with pytest.raises(ConfigError, match=f"remote_url=.*{rule}"):
        from_defaults(remote_url=url)


SHAPE = (4, 2, 256, 8, 64)
POSSIBLE = {
    "model_name": "m",
    "world_size": 2,
    "worker_id": 1,
    "fmt": "vllm",
    "kv_dtype": "float16",
    "kv_shape": SHAPE,
}


def test_torch_dtype_and_its_name_are_the_same():
    import torch

    for dtype in (torch.float16, "float16"):
        metadata = LMCacheEngineMetadata("m", 1, 0, "vllm", dtype, SHAPE)
        assert metadata.kv_dtype_name == "float16"
        assert LMCacheMemPoolMetadata(SHAPE, dtype, 0.5).kv_dtype_name == "float16"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        *(({"world_size": n}, "^world_size=.*from 1") for n in (0, 1.0, True)),
        *(({"worker_id": n}, "^worker_id=.* 0 … 1, as world_size says") for n in (-1, 2, "0")),
        ({"world_size": 1}, "^worker_id=1: .* 0 … 0, as world_size says"),
        *(({"kv_dtype": n}, "^kv_dtype=.*one of float64, float32") for n in ("half", None)),
        *(({"kv_shape": shape}, "^kv_shape=.*five whole numbers") for shape in ((), (*SHAPE, 1))),
        *(
            ({"kv_shape": (*SHAPE[:at], 0, *SHAPE[at + 1 :])}, "^kv_shape=.*from 1")
            for at in range(5)
        ),
        ({"kv_shape": (4, 3, 256, 8, 64)}, "sides is 2 for keys and values"),
        ({"kv_shape": (4, 2, 256.0, 8, 64)}, "^kv_shape="),
    ],
    ids=str,
)
def test_impossible_kv_is_refused_with_the_fix(fields, error):
    with pytest.raises(ConfigError, match=error):
        LMCacheEngineMetadata(**(POSSIBLE | fields))


@pytest.mark.parametrize(
    "fields", [{"worker_id": 0}, {"kv_shape": (61, 1, 256, 1, 576)}, {"kv_dtype": "torch.bfloat16"}]
)
def test_possible_kv_is_accepted(fields):
    metadata = LMCacheEngineMetadata(**(POSSIBLE | fields))
    assert {name: getattr(metadata, name) for name in fields} == fields


def test_size_of_every_dtype_is_known():
    assert tuple(DTYPE_ITEMSIZE) == KV_DTYPES
