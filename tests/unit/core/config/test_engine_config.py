"""Values, and what cannot be had together."""

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
)
from lmcache_core.config.options import directory_of_url
from lmcache_core.errors import ConfigError
from lmcache_core.serde import CODEC_NAMES, SERDE_NAMES


def from_yaml(tmp_path, text):
    path = tmp_path / "lmcache.yaml"
    path.write_text(text, encoding="utf-8")
    return LMCacheEngineConfig.from_file(str(path))


def test_options_change_the_defaults_by_name_and_by_place():
    config = LMCacheEngineConfig.from_defaults(
        128, False, remote_url="lm://h", verify_hot="never", tier_timeout_s=0.5
    )
    assert (
        config.chunk_size,
        config.local_cpu,
        config.remote_url,
        config.verify_hot,
        config.tier_timeout_s,
    ) == (128, False, "lm://h", "never", 0.5)


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LMCacheEngineConfig.from_defaults().chunk_size = 1


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("chunk_sizes", "chunk_size"), ("local_cpus", "local_cpu"), ("remote_uri", "remote_url")],
)
def test_a_misspelt_option_is_refused_with_a_suggestion(tmp_path, wrong, right):
    for build in (
        lambda: LMCacheEngineConfig.from_defaults(**{wrong: "s3cret"}),
        lambda: LMCacheEngineConfig.from_legacy(**{wrong: "s3cret"}),
        lambda: LMCacheEngineConfig.from_env({f"LMCACHE_{wrong.upper()}": "s3cret"}),
        lambda: from_yaml(tmp_path, f"{wrong}: s3cret"),
    ):
        with pytest.raises(ConfigError, match=f"did you mean '{right}'") as caught:
            build()
        assert "s3cret" not in str(caught.value)


def test_an_option_like_none_of_ours_is_refused_with_the_list():
    with pytest.raises(ConfigError, match="known: chunk_size"):
        LMCacheEngineConfig.from_defaults(zzz=1)


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
IMPOSSIBLE = [
    *(("chunk_size", v) for v in (0, -1, 65537, 256.0, "256", True, None)),
    *(("max_local_cpu_size", v) for v in (-1, float("nan"), float("inf"), "5", True)),
    *(("max_local_disk_size", v) for v in (-0.1, "5", float("-inf"))),
    *(
        ("local_disk", v)
        for v in [
            "var/cache",
            "file://cache",
            "file:///",
            "file:////",
            "file:///a?b",
            "file:///a,/b",
            "s3://b/",
        ]
    ),
    ("local_disk", 5),
    *(
        ("remote_url", f"lm://{v}")
        for v in ["host:0", "host:65536", "host:port", "host:-1", ":1", "user@:1"]
    ),
    *(
        ("remote_url", f"redis-sentinel://{v}/service")
        for v in ("one:26379,two:port", "one:26379,:26379", "one:99999,two")
    ),
    *(
        ("remote_url", v)
        for v in [
            "host:65432",
            "ftp://host",
            "lm://[::1",
            "lm://",
            "redis://user@",
            "file://host/dir",
        ]
    ),
    *(("remote_url", v) for v in ("", 5)),
    *(("remote_serde", v) for v in ("pickle", "", 1, "cachegen:", "Naive", "kivi")),
    *(("local_disk_serde", v) for v in ("pickle", "", 1, None, "torch", "safetensor", "fast")),
    *(("blend_recompute_ratio", v) for v in (-0.1, 1.1, "0.15", float("nan"))),
    *(("blend_min_tokens", v) for v in (-1, 2.5)),
    *(("verify_hot", v) for v in ("sometimes", True, None)),
    *(("eviction_policy", v) for v in ("LRU", "lfu", "", None)),
    *(("tier_timeout_s", v) for v in (0, -1, 3601, "2", float("nan"))),
    *(("chunk_ttl_s", v) for v in (0, -1, float("inf"), "60", True)),
    *(("prefill_tokens_per_s", v) for v in (0, -1, float("inf"), "fast")),
    *(("close_drain_s", v) for v in (-1, 3601, None, float("nan"))),
    *(("blend_policy", v) for v in ("best", None, 1)),
    *(("trace_sample_ratio", v) for v in (-0.1, 1.1, "half", None)),
    *((name, v) for name in SWITCHES for v in ("false", 0, None)),
    *((name, v) for name in TEXTS for v in (5, False, "", " ")),
    *(("salt", v) for v in (None, 12345)),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE, ids=str)
def test_an_impossible_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}=.*: must be "):
        LMCacheEngineConfig.from_defaults(**{name: value})


@pytest.mark.parametrize(
    ("name", "wrong", "right"),
    [
        ("remote_serde", "cachegn:high", "cachegen:high"),
        ("local_disk_serde", "losless", "lossless"),
    ],
)
def test_a_misspelt_choice_is_refused_with_a_suggestion(name, wrong, right):
    with pytest.raises(
        ConfigError, match=f"^{name}='{wrong}': must be one of .*; did you mean '{right}'"
    ):
        LMCacheEngineConfig.from_defaults(**{name: wrong})


def test_the_choices_are_the_codecs_that_there_are():
    assert set(REMOTE_SERDES) == set(SERDE_NAMES)
    assert set(DISK_SERDES) == {"naive", *CODEC_NAMES}


def test_every_option_refuses_something():
    assert {name for name, _ in IMPOSSIBLE} == set(OPTIONS)


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
        {"prefill_tokens_per_s": 12_000},
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
        PEERS | OPEN | SECURE | {"peer_tls_key_file": "/key", "peer_tls_client_ca_file": "/ca"},
        {"distributed_url": "lm://10.0.0.1:65433", "peer_tls_cert_file": "/pair"},
        {"local_disk": None, "max_local_disk_size": 5.0},
        {
            "sidecar_socket": "/s",
            "max_local_cpu_size": 20,
            "lookup_url": "localhost:6379",
            "save_unfull_chunk": False,
        },
        {"sidecar_socket": "/s", "max_local_cpu_size": 0},
        *({"remote_url": f"{scheme}://host:1"} for scheme in REMOTE_SCHEMES if scheme != "file"),
        *({"verify_hot": mode} for mode in VERIFY_HOT_MODES),
        *({"eviction_policy": policy} for policy in EVICTION_POLICIES),
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_possible(values):
    config = LMCacheEngineConfig.from_defaults(**values)
    assert {name: getattr(config, name) for name in values} == values


CONTRADICTORY = [
    *(
        ({**PEERS, name: None}, "set all three")
        for name in ("lookup_url", "broker_url", "distributed_url")
    ),
    *(
        (PEERS | {"distributed_url": url}, "or lm://host:port")
        for url in ("localhost:8200", "lm://h", "lm+tls://h", "https://h:1", "lm://u:p@h:1")
    ),
    *(
        (PEERS | {"distributed_url": url}, "set peer_ticket_keys_file")
        for url in ("lm://10.0.0.1:65433", "lm://pod:65433")
    ),
    (PEERS | SECURE, "set peer_ticket_keys_file"),
    (PEERS | OPEN, "set peer_tls_cert_file, or set peer_allow_plaintext"),
    (PEERS | OPEN | {"distributed_url": "lm://localhost.example:1"}, "could be read on their way"),
    (
        PEERS | {"distributed_url": "lm+tls://127.0.0.1:1"},
        "needs a certificate; set peer_tls_cert_file",
    ),
    (
        PEERS | OPEN | {"peer_tls_cert_file": "/cert", "peer_allow_plaintext": True},
        "write a distributed_url with lm.tls",
    ),
    (PEERS | {"peer_tls_client_ca_file": "/ca"}, "write a distributed_url with lm.tls"),
    (
        PEERS | {"peer_tls_key_file": "/key"},
        "set peer_tls_cert_file or leave peer_tls_key_file out",
    ),
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
    "local_cpu": (False, "keeps chunks in its memory"),
    "local_disk": ("file:///cache/", "disk_path"),
    "max_local_disk_size": (5.0, "disk_gb"),
    "remote_url": ("lm://elsewhere", "remote_url"),
    "verify_hot": ("never", "verify_hot"),
    "salt": ("s3cret", "salt_file"),
    "eviction_policy": ("lru", "leave it out"),
    "chunk_ttl_s": (60, "leave it out"),
    "disk_fsync": (True, "disk_fsync"),
    "remote_token_file": ("/t", "service_token_file"),
    "remote_tls_ca_file": ("/ca", "tls_ca_file"),
    "remote_tls_cert_file": ("/cert", "tls_client_cert_file"),
    "remote_tls_key_file": ("/key", "tls_client_key_file"),
    "remote_serde": ("cachegen", "remote_serde"),
    "enable_p2p": (True, "broker_url"),
    "broker_url": ("http://b:8082", "broker_url"),
    "peer_token_file": ("/t", "service_token_file"),
    "peer_ticket_keys_file": ("/k", "ticket_keys_file"),
    "peer_tls_cert_file": ("/c", "tls_cert_file and tls_client_cert_file"),
    "peer_tls_key_file": ("/k", "tls_key_file and tls_client_key_file"),
    "peer_tls_ca_file": ("/ca", "tls_ca_file"),
    "peer_tls_client_ca_file": ("/ca", "tls_client_ca_file"),
    "peer_tls_name": ("pod.example", "tls_peer_name"),
    "peer_allow_plaintext": (True, "allow_plaintext"),
    "local_disk_serde": ("cachegen", "disk_serde"),
}


@pytest.mark.parametrize(("values", "fix"), CONTRADICTORY, ids=str)
def test_a_contradiction_is_refused_with_the_fix(values, fix):
    with pytest.raises(ConfigError, match=fix) as caught:
        LMCacheEngineConfig.from_defaults(**values)
    shown = str(caught.value).partition(": ")[0]
    assert any(shown.startswith(f"{name}={value!r}") for name, value in values.items())


@pytest.mark.parametrize("name", BESIDE_SIDECAR)
def test_what_the_sidecar_decides_is_not_set_beside_it(name):
    value, fix = BESIDE_SIDECAR[name]
    beside = {"max_local_disk_size": 1} if name == "local_disk" else {}
    with pytest.raises(ConfigError, match=f"^{name}=.*sidecar_socket='/s'.*{fix}") as caught:
        LMCacheEngineConfig.from_defaults(sidecar_socket="/s", **{name: value}, **beside)
    assert "s3cret" not in str(caught.value)
    LMCacheEngineConfig.from_defaults(sidecar_socket="/s", **{name: OPTIONS[name].default})


def test_the_sidecar_has_the_settings_that_errors_name():
    from lmcache_sidecar.settings import SidecarSettings

    settings = SidecarSettings.model_fields
    said = " ".join(option.beside_sidecar for option in OPTIONS.values())
    named = [word for word in said.replace(",", " ").split() if "_" in word]
    assert named
    assert set(named) <= set(settings)
    assert set(BESIDE_SIDECAR) == {
        name for name, option in OPTIONS.items() if option.beside_sidecar
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_url", "redis://user:s3cret?@host:6379/1"),
        ("remote_url", "rediss-typo://user:s3cret@host/"),
        ("remote_url", "rediss-typo://user:s3c/s3cret@host/"),
        ("remote_url", "rediss-typo://user:s3c@s3cret@host/"),
        ("remote_url", "typo://host/?password=s3cret"),
        ("remote_url", "user:s3cret@host"),
        ("remote_url", "redis//user:s3cret@host"),
        ("lookup_url", ["http://user:s3cret@one", "http://user:s3cret@two"]),
        ("local_disk", {"file": "s3cret"}),
        ("salt", ["s3cret"]),
        ("salt", b"s3cret"),
    ],
    ids=str,
)
def test_an_error_shows_neither_password_nor_salt(name, value):
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_defaults(**{name: value})
    assert "s3cret" not in str(caught.value)


def test_a_config_shows_neither_password_nor_salt():
    config = LMCacheEngineConfig.from_defaults(
        remote_url="redis://user:s3c%3Fret@host:6379/1?password=s3cret",
        salt="s3cret",
        chunk_size=64,
    )
    for text in (repr(config), str(config), f"{config}"):
        assert "s3c" not in text
        assert "remote_url='redis://…@host:6379/1?…'" in text
        assert "salt=…" in text
        assert "chunk_size=64" in text
    assert "salt=''" in repr(LMCacheEngineConfig.from_defaults())


def test_a_long_value_is_cut():
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_defaults(eviction_policy="x" * 10_000)
    assert len(str(caught.value)) < 400


def test_a_copy_with_a_change_is_checked_too():
    with pytest.raises(ConfigError, match="chunk_size=0"):
        dataclasses.replace(LMCacheEngineConfig.from_defaults(), chunk_size=0)


@pytest.mark.parametrize("path", ["/var/cache/kv", "/var/cache/kv/", "/odd #?name"])
def test_a_disk_may_be_a_plain_path(path):
    config = LMCacheEngineConfig.from_defaults(local_disk=path, max_local_disk_size=1)
    assert config == LMCacheEngineConfig.from_defaults(
        local_disk="file://" + quote(path), max_local_disk_size=1
    )


def test_a_disk_may_be_a_path_that_is_not_utf8():
    """File names are bytes; Python shows those that are no text as surrogates."""
    path = os.fsdecode(b"/mnt/kv\xff")
    config = LMCacheEngineConfig.from_env(
        {"LMCACHE_LOCAL_DISK": path, "LMCACHE_MAX_LOCAL_DISK_SIZE": "1"}
    )
    assert config.local_disk == "file:///mnt/kv%FF"
    assert directory_of_url(config.local_disk) == directory_of_url(f"file://{path}") == path


@pytest.mark.parametrize("value", ["/mnt/\ud800", "file:///mnt/\ud800"])
@pytest.mark.parametrize("name", ["local_disk", "remote_url"])
def test_a_path_that_no_file_can_have_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name}=.*must be"):
        LMCacheEngineConfig.from_defaults(**{name: value}, max_local_disk_size=1)


def test_a_salt_that_cannot_be_hashed_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="salt=…: must be text in UTF-8"):
        LMCacheEngineConfig.from_env({"LMCACHE_SALT": os.fsdecode(b"s3cret\xff")})


def test_a_disk_beside_a_sidecar_is_refused_at_once_for_the_right_reason():
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_defaults(sidecar_socket="/s", local_disk="/kv")
    assert "the tiers are the sidecar's; set the sidecar's disk_path and disk_gb" in str(
        caught.value
    )
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_defaults(
            sidecar_socket="/s", local_disk="/kv", max_local_disk_size=1, remote_url="lm://h:1"
        )
    assert all(
        name in str(caught.value) for name in ("local_disk=", "max_local_disk_size=", "remote_url=")
    )


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("file:///a#b", "%3F, %23, %2C"),
        ("file:///a?b", "%3F, %23, %2C"),
        ("file:///a,b", "%3F, %23, %2C"),
        ("file://host/a", "the absolute path of a directory"),
        ("file://a/b", "the absolute path of a directory"),
        ("redis://host:1/abc", "the number of a database"),
        ("rediss://host/1/2", "the number of a database"),
    ],
)
def test_a_remote_url_that_is_refused_names_the_rule_of_its_scheme(url: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=f"remote_url=.*{rule}"):
        LMCacheEngineConfig.from_defaults(remote_url=url)
