"""LMCache's other names."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.foreign_names import FOREIGN_NAMES
from lmcache_core.config.sources import MAX_FOREIGN_CHARS
from lmcache_core.errors import ConfigError

from tests.fixtures.time_bound import cpu_bound

# Files as LMCache's users have them.
BEFORE_LOCAL_CPU = """
chunk_size: 256
local_device: "cpu"
max_local_cache_size: 20
remote_url: "redis://localhost:65432"
remote_serde: "naive"
pipelined_backend: False
save_decode_cache: True
enable_blending: False
blend_recompute_ratio: 0.15
blend_separator: "[BLEND_SEP]"
blend_add_special_in_precomp: false
"""
PRESENT = """
chunk_size: 256
local_cpu: True
max_local_cpu_size: 20
local_disk: "/var/my cache/"
max_local_disk_size: 10
save_unfull_chunk: false
cache_policy: "LRU"
pre_caching_hash_algorithm: sha256_cbor
blocking_timeout_secs: 10
use_layerwise: false
numa_mode: null
extra_config: {}
priority_limit: null
gds_path: null
enable_lazy_memory_allocator: false
lazy_memory_initial_ratio: 0.2
lmcache_instance_id: "instance-1"
enable_controller: False
controller_pull_url: "localhost:8300"
enable_p2p: False
p2p_host: "localhost"
transfer_channel: "nixl"
py_enable_gc: true
"""
BLENDING = {"enable_blending": True}
SECRET = {"password": "s3cret"}


@pytest.fixture
def from_json(from_yaml):
    return lambda **values: from_yaml(json.dumps(values))


def defaults(**options):
    return LMCacheEngineConfig.from_defaults(**({"remote_url": None} | options))


def test_a_file_from_before_local_cpu(from_yaml):
    assert from_yaml(BEFORE_LOCAL_CPU) == defaults(
        max_local_cpu_size=20, remote_url="redis://localhost:65432", save_decode_cache=True
    )


def test_a_present_file(from_yaml):
    assert from_yaml(PRESENT) == defaults(
        max_local_cpu_size=20,
        local_disk="file:///var/my%20cache/",
        max_local_disk_size=10,
        eviction_policy="lru",
        tier_timeout_s=10,
        save_unfull_chunk=False,
    )


@pytest.mark.parametrize(
    ("values", "meant"),
    [
        (
            {"local_device": "file:///d/"},
            {"local_cpu": False, "local_disk": "file:///d/", "max_local_disk_size": 5},
        ),
        (
            {"local_device": "file:///d/", "max_local_cache_size": 9},
            {"local_cpu": False, "local_disk": "file:///d/", "max_local_disk_size": 9},
        ),
        (
            {"local_device": None, "remote_url": "lm://h"},
            {"local_cpu": False, "remote_url": "lm://h"},
        ),
        ({"local_device": "cpu", "local_cpu": True}, {}),
        ({"local_disk": "/d/"}, {"local_disk": "file:///d/", "max_local_disk_size": 5}),
        ({"cache_policy": "S3FIFO"}, {"eviction_policy": "s3fifo"}),
        ({"pipelined_backend": True}, {}),
        ({"pre_caching_hash_algorithm": "builtin"}, {}),
        ({"extra_config": None, "storage_plugins": [], "reserve_local_cpu_size": 0.0}, {}),
    ],
    ids=str,
)
def test_value_that_means_the_same_is_accepted(from_json, values, meant):
    assert from_json(**values) == defaults(**meant)


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        ({"local_device": "cuda"}, "local_device='cuda': chunks are kept in host memory"),
        ({"cache_policy": "LFU"}, "set eviction_policy to adaptive, s3fifo or lru"),
        ({"use_layerwise": True}, "use_layerwise=True: .*set it to false"),
        ({"py_enable_gc": False}, "py_enable_gc=False: .*set it to true"),
        ({"pd_role": "sender", "enable_pd": True}, "pd_role='sender': it belongs to enable_pd"),
        ({"enable_p2p": True, "p2p_host": "h"}, "leave it out; peers are found by lookup_url"),
        (BLENDING | {"blend_separator": "[SEP]"}, r"CachedCausalLM\(model, engine, separator\)$"),
        (BLENDING | {"blend_check_layers": 1}, "blend_check_layers=1: leave it out; "),
        ({"enable_p2p": True}, "lookup_url=None, broker_url=None, distributed_url=None: "),
        ({"save_unfull_chunk": "some"}, "save_unfull_chunk='some': must be true or false"),
        ({"pre_caching_hash_algorithm": "xxhash"}, "always named by SHA-256"),
        ({"min_retrieve_tokens": False}, "min_retrieve_tokens=False: "),
        ({"extra_config": SECRET}, "extra_config={password}: "),
        ({"extra_config": json.dumps(SECRET)}, "extra_config=…: "),
        ({"extra_config": [SECRET]}, "extra_config=…: "),
        ({"storage_plugins": [SECRET]}, r"storage_plugins=\[\{password\}\]: "),
        (
            {"audit_actual_remote_url": "redis://u:s3cret@h"},
            "audit_actual_remote_url='redis://…@h': ",
        ),
        (
            {"cache_policy": "LRU", "eviction_policy": "s3fifo"},
            "cache_policy='LRU' means eviction_policy='lru', but that is set too",
        ),
        ({"max_local_cache_size": 4, "max_local_cpu_size": 5}, "keep one of them"),
        ({"max_local_cache_size": "20"}, "max_local_cpu_size='20': must be a number"),
        ({"remote_url": "mooncakestore://h:1"}, "must be a URL with one of the schemes lm, "),
        (
            {"remote_url": "https://u:s3cret@h"},
            r"remote_url='https://…@h': .* or none; write lm\+tls://host:port of the same service",
        ),
        ({"remote_url": "s3://bucket"}, r"or none; a bucket is cache_storage's: set storage.s3"),
        ({"remote_url": "u:s3cret@h"}, "remote_url='…@h'"),
        ({"remote_url": "h:1?token=s3cret"}, r"remote_url='h:1\?…'"),
        ({"local_disk": "/a,/b"}, "^local_disk='/a,/b': must be a directory"),
    ],
    ids=str,
)
def test_value_that_asks_for_more_is_refused_with_advice(from_json, values, advice):
    with pytest.raises(ConfigError, match=advice) as caught:
        from_json(**values)
    assert "s3cret" not in str(caught.value)


def test_all_refusals_are_reported_at_once(from_json):
    asked = {
        "enable_async_loading": True,
        "extra_config": {"a": 1},
        "chunk_sise": 4,
        "chunk_size": 0,
    }
    with pytest.raises(ConfigError) as caught:
        from_json(**asked)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(asked)
    assert all(any(name in line for line in lines) for name in asked)
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_defaults(chunk_size=0, verify_hot="perhaps")
    assert len(str(caught.value).splitlines()) == 2


def test_a_command_tries_a_file(tmp_path):
    (tmp_path / "good.yaml").write_text("local_device: cpu\nchunk_size: 128\n")
    (tmp_path / "bad.yaml").write_text(
        "use_layerwise: true\nenable_pd: true\nextra_config: {a: 1}\n"
    )
    good, bad, none = (
        subprocess.run(
            [sys.executable, "-m", "lmcache_core.config", *names],
            capture_output=True,
            text=True,
            check=False,
        )
        for names in ([tmp_path / "good.yaml"], [tmp_path / "bad.yaml"], [])
    )
    assert good.returncode == 0
    assert "chunk_size: 128\n" in good.stdout
    assert bad.returncode == 2
    assert len(bad.stderr.splitlines()) == 3
    assert "Traceback" not in bad.stderr
    assert (bad.stdout, none.returncode) == ("", 2)


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_no_name_is_silently_taken_for_anything(from_json, name):
    """A value that no release of LMCache gives a harmless meaning is refused, unless its feature
    is off.
    """
    known = FOREIGN_NAMES[name]
    values = {name: {"surely": "wrong"}}
    if known.part_of:
        assert from_json(**values) == defaults()
        values[known.part_of] = True
    with pytest.raises(ConfigError):
        from_json(**values)


def test_null_asks_for_nothing(from_json):
    names = set(FOREIGN_NAMES) - {"local_device", "max_local_cache_size"}
    assert from_json(**dict.fromkeys(names)) == defaults()
    of_blending = [
        name for name, known in FOREIGN_NAMES.items() if known.part_of == "enable_blending"
    ]
    assert of_blending
    assert from_json(**BLENDING, **dict.fromkeys(of_blending)) == defaults(**BLENDING)


@pytest.mark.parametrize(
    ("environ", "meant"),
    [
        ({"LMCACHE_CACHE_POLICY": "LRU"}, {"eviction_policy": "lru"}),
        ({"LMCACHE_MAX_LOCAL_CACHE_SIZE": "2.5"}, {"max_local_cpu_size": 2.5}),
        ({"LMCACHE_EXTRA_CONFIG": "{}", "LMCACHE_NUMA_MODE": "null"}, {}),
        ({"LMCACHE_PD_PEER_INIT_PORT": "[8100, 8200]"}, {}),
        ({"LMCACHE_LMCACHE_INSTANCE_ID": "{not yaml"}, {}),
    ],
    ids=str,
)
def test_names_work_as_variables(environ, meant):
    assert LMCacheEngineConfig.from_env(environ) == defaults(**meant)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("LMCACHE_ENABLE_PD", "true"),
        ("LMCACHE_EXTRA_CONFIG", '{"a": 1}'),
        ("LMCACHE_NUMA_MODE", "{auto"),
    ],
)
def test_variable_that_asks_for_more_is_refused(variable, text):
    name = variable.removeprefix("LMCACHE_").lower()
    with pytest.raises(ConfigError, match=f"environment: {name}="):
        LMCacheEngineConfig.from_env({variable: text})


ALIASES = (
    "[&a [x,x,x,x,x,x,x,x]"
    + "".join(f",&{b} [{','.join([f'*{a}'] * 8)}]" for a, b in pairwise("abcdefghijkl"))
    + "]"
)


@pytest.mark.parametrize(
    "text", [ALIASES, "!!int ''", "!!timestamp x", "[" * 1000, "? " * 500, "0x" + "f" * 1000, "<<"]
)
def test_hostile_variable_is_text(text):
    assert LMCacheEngineConfig.from_env({"LMCACHE_PD_ROLE": text}) == defaults()
    with cpu_bound(2), pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_env({"LMCACHE_EXTRA_CONFIG": text})
    assert len(str(caught.value)) < 500


def test_long_variable_is_refused_before_it_is_read():
    longest = "x" * MAX_FOREIGN_CHARS
    assert LMCacheEngineConfig.from_env({"LMCACHE_PD_ROLE": longest}) == defaults()
    with pytest.raises(ConfigError, match=r"LMCACHE_PD_ROLE has 1025 characters: .* 1024"):
        LMCacheEngineConfig.from_env({"LMCACHE_PD_ROLE": longest + "x"})
