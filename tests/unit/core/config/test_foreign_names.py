"""LMCache's other names."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from itertools import pairwise

import pytest
from lmcache_core.config import OPTIONS, LMCacheEngineConfig
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


def from_yaml(tmp_path, text):
    path = tmp_path / "lmcache.yaml"
    path.write_text(text, encoding="utf-8")
    return LMCacheEngineConfig.from_file(str(path))


def from_json(tmp_path, **values):
    return from_yaml(tmp_path, json.dumps(values))


def defaults(**options):
    return LMCacheEngineConfig.from_defaults(**({"remote_url": None} | options))


def test_a_file_from_before_local_cpu(tmp_path):
    assert from_yaml(tmp_path, BEFORE_LOCAL_CPU) == defaults(
        max_local_cpu_size=20, remote_url="redis://localhost:65432", save_decode_cache=True
    )


def test_a_present_file(tmp_path):
    assert from_yaml(tmp_path, PRESENT) == defaults(
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
        ({"local_disk": "file:///d/"}, {"local_disk": "file:///d/", "max_local_disk_size": 5}),
        ({"cache_policy": "lru"}, {"eviction_policy": "lru"}),
        ({"cache_policy": "S3FIFO"}, {"eviction_policy": "s3fifo"}),
        ({"cache_policy": None}, {}),
        ({"save_unfull_chunk": True}, {}),
        ({"max_local_disk_size": 5}, {"max_local_disk_size": 5}),
        ({"pipelined_backend": True}, {}),
        ({"pre_caching_hash_algorithm": "builtin"}, {}),
        ({"blocking_timeout_secs": None}, {}),
        ({"extra_config": None, "storage_plugins": [], "reserve_local_cpu_size": 0.0}, {}),
    ],
    ids=str,
)
def test_what_means_the_same_is_accepted(tmp_path, values, meant):
    assert from_json(tmp_path, **values) == defaults(**meant)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"local_device": "cuda"}, "local_device='cuda': chunks are kept in host memory"),
        (
            {"cache_policy": "LFU"},
            "cache_policy='LFU': set eviction_policy to adaptive, s3fifo or lru",
        ),
        ({"use_layerwise": True}, "use_layerwise=True: .*set it to false"),
        ({"py_enable_gc": False}, "py_enable_gc=False: .*set it to true"),
        ({"enable_controller": True}, "enable_controller=True: .*lookup service and the broker"),
        ({"enable_pd": True}, "enable_pd=True: .*not in this release"),
        ({"pd_role": "sender", "enable_pd": True}, "pd_role='sender': it belongs to enable_pd"),
        (
            {"enable_p2p": True, "p2p_host": "localhost"},
            "p2p_host='localhost': leave it out; peers are found by lookup_url and broker_url",
        ),
        (
            {"enable_blending": True, "blend_special_str": " # # "},
            "blend_special_str=' # # ': leave it out; .*CachedCausalLM",
        ),
        (
            {"enable_blending": True, "blend_separator": "[SEP]"},
            r"leave it out; .* token ids, CachedCausalLM\(model, engine, separator\)$",
        ),
        (
            {"enable_blending": True, "blend_recompute_ratios": [0.15]},
            "leave it out; set blend_recompute_ratio, one number",
        ),
        (
            {"enable_blending": True, "blend_check_layers": 1},
            "leave it out; .* follows from blend_policy: 1 for deviation",
        ),
        (
            {"enable_blending": True, "blend_thresholds": [0.1]},
            "leave it out; a share of the tokens .*, not what is above a bound",
        ),
        (
            {"enable_blending": True, "blend_add_special_in_precomp": False},
            "leave it out; documents are encoded by the caller",
        ),
        (
            {"enable_p2p": True},
            (
                "enable_p2p=True, lookup_url=None, broker_url=None, distributed_url=None: peers are"
                " found by lookup and broker"
            ),
        ),
        ({"numa_mode": "auto"}, "numa_mode='auto': bind the process"),
        ({"gds_path": "/mnt/gds"}, "gds_path='/mnt/gds': .*use local_disk"),
        ({"priority_limit": 0}, "priority_limit=0: every request"),
        ({"save_unfull_chunk": "some"}, "save_unfull_chunk='some': must be true or false"),
        ({"pre_caching_hash_algorithm": "xxhash"}, "always named by SHA-256"),
        ({"min_retrieve_tokens": 256}, "prefill_tokens_per_s"),
        ({"min_retrieve_tokens": False}, "min_retrieve_tokens=False: "),
        ({"lookup_timeout_ms": True}, "lookup_timeout_ms=True: set tier_timeout_s"),
        ({"extra_config": {"redis_password": "s3cret"}}, "extra_config={redis_password}: "),
        (
            {"audit_actual_remote_url": "redis://u:s3cret@h"},
            "audit_actual_remote_url='redis://…@h': ",
        ),
        (
            {"cache_policy": "LRU", "eviction_policy": "s3fifo"},
            "cache_policy='LRU' means eviction_policy='lru', but that is set too",
        ),
        ({"max_local_cache_size": 4, "max_local_cpu_size": 5}, "keep one of them"),
        ({"remote_serde": "kivi"}, "remote_serde='kivi': must be one of naive, "),
        (
            {"remote_url": "mooncakestore://h:1"},
            "remote_url='mooncakestore://h:1': must be a URL with one of the schemes lm, ",
        ),
        (
            {"remote_url": "http://h:8080"},
            r"remote_url='http://h:8080': .* or none; write lm://host:port of the same service",
        ),
        (
            {"remote_url": "https://u:s3cret@h"},
            r"remote_url='https://…@h': .* or none; write lm\+tls://host:port of the same service",
        ),
        ({"remote_url": "s3://bucket"}, r"or none; a bucket is cache_storage's: set storage.s3"),
        ({"remote_url": "resp://h:1"}, "or none; write redis://user:password@host:port"),
        ({"remote_url": "fs://h:0/d"}, "or none; write file:///dir"),
        ({"remote_url": "u:s3cret@h"}, "remote_url='…@h'"),
        ({"remote_url": "h:1?token=s3cret"}, r"remote_url='h:1\?…'"),
        ({"extra_config": '{"password": "s3cret"}'}, "extra_config=…: "),
        ({"extra_config": [{"password": "s3cret"}]}, "extra_config=…: "),
        ({"storage_plugins": [{"password": "s3cret"}]}, r"storage_plugins=\[\{password\}\]: "),
        ({"max_local_cache_size": "20"}, "max_local_cpu_size='20': must be a number"),
        ({"local_disk": "/a,/b"}, "^local_disk='/a,/b': must be a directory"),
    ],
    ids=str,
)
def test_what_asks_for_more_is_refused_with_the_way_out(tmp_path, values, said):
    with pytest.raises(ConfigError, match=said) as caught:
        from_json(tmp_path, **values)
    assert "s3cret" not in str(caught.value)


def test_all_that_is_refused_is_told_at_once(tmp_path):
    asked = {
        "enable_async_loading": True,
        "use_layerwise": True,
        "extra_config": {"a": 1},
        "chunk_sise": 4,
        "chunk_size": 0,
    }
    with pytest.raises(ConfigError) as caught:
        from_json(tmp_path, **asked)
    lines = str(caught.value).splitlines()
    assert len(lines) == len(asked)
    assert all(any(name in line for line in lines) for name in asked)
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_defaults(chunk_size=0, verify_hot="perhaps")
    assert len(str(caught.value).splitlines()) == 2


def test_a_file_is_tried_by_a_command(tmp_path):
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
def test_no_name_is_silently_taken_for_anything(tmp_path, name):
    """A value that no release of LMCache gives a harmless meaning is refused, unless its feature
    is off.
    """
    known = FOREIGN_NAMES[name]
    values = {name: {"surely": "wrong"}}
    if known.part_of:
        assert from_json(tmp_path, **values) == defaults()
        values[known.part_of] = True
    with pytest.raises(ConfigError):
        from_json(tmp_path, **values)


def test_null_asks_for_nothing_under_any_name(tmp_path):
    assert (
        from_json(
            tmp_path, **dict.fromkeys(set(FOREIGN_NAMES) - {"local_device", "max_local_cache_size"})
        )
        == defaults()
    )


def test_null_asks_for_nothing_beside_blending_too(tmp_path):
    names = [name for name, known in FOREIGN_NAMES.items() if known.part_of == "enable_blending"]
    assert len(names) == 6
    assert from_json(tmp_path, enable_blending=True, **dict.fromkeys(names)) == defaults(
        enable_blending=True
    )


def test_who_is_told_to_leave_out_a_switch_too_could_not_have_it(tmp_path):
    """Else it could stay, and only the name beside it would have to go."""
    for name, known in FOREIGN_NAMES.items():
        if "leave both out" in known.instead:
            assert known.part_of not in OPTIONS, name
            with pytest.raises(ConfigError):
                from_json(tmp_path, **{known.part_of: True})


def test_no_name_is_also_ours():
    assert not set(FOREIGN_NAMES) & set(OPTIONS)


@pytest.mark.parametrize(
    ("environ", "meant"),
    [
        ({"LMCACHE_CACHE_POLICY": "LRU"}, {"eviction_policy": "lru"}),
        ({"LMCACHE_SAVE_UNFULL_CHUNK": "False"}, {"save_unfull_chunk": False}),
        ({"LMCACHE_MAX_LOCAL_CACHE_SIZE": "2.5"}, {"max_local_cpu_size": 2.5}),
        (
            {
                "LMCACHE_EXTRA_CONFIG": "{}",
                "LMCACHE_NUMA_MODE": "null",
                "LMCACHE_USE_LAYERWISE": "False",
            },
            {},
        ),
        (
            {
                "LMCACHE_LMCACHE_INSTANCE_ID": "instance-1",
                "LMCACHE_PD_PEER_INIT_PORT": "[8100, 8200]",
            },
            {},
        ),
        (
            {"LMCACHE_LOCAL_DISK": "/d/", "LMCACHE_MAX_LOCAL_DISK_SIZE": "1"},
            {"local_disk": "file:///d/", "max_local_disk_size": 1},
        ),
        ({"LMCACHE_LMCACHE_INSTANCE_ID": "{not yaml"}, {}),
    ],
    ids=str,
)
def test_the_names_work_as_variables(environ, meant):
    assert LMCacheEngineConfig.from_env(environ) == defaults(**meant)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("LMCACHE_ENABLE_PD", "true"),
        ("LMCACHE_EXTRA_CONFIG", '{"a": 1}'),
        ("LMCACHE_CACHE_POLICY", "LFU"),
        ("LMCACHE_NUMA_MODE", "{auto"),
    ],
)
def test_variables_that_ask_for_more_are_refused(variable, text):
    with pytest.raises(
        ConfigError, match=f"environment: {variable.removeprefix('LMCACHE_').lower()}="
    ):
        LMCacheEngineConfig.from_env({variable: text})


def test_a_long_variable_is_refused_before_it_is_read():
    longest = "x" * MAX_FOREIGN_CHARS
    assert LMCacheEngineConfig.from_env({"LMCACHE_PD_ROLE": longest}) == defaults()
    with pytest.raises(
        ConfigError,
        match="LMCACHE_PD_ROLE has 1025 characters: must have at most 1024; leave it out",
    ):
        LMCacheEngineConfig.from_env({"LMCACHE_PD_ROLE": longest + "x"})


ALIASES = (
    "[&a [x,x,x,x,x,x,x,x]"
    + "".join(f",&{b} [{','.join([f'*{a}'] * 8)}]" for a, b in pairwise("abcdefghijkl"))
    + "]"
)


@pytest.mark.parametrize(
    "text",
    [
        ALIASES,
        "!!int ''",
        "!!bool x",
        "!!timestamp x",
        "!!float ''",
        "[" * 1000,
        "- " * 500,
        "? " * 500,
        "0x" + "f" * 1000,
        "<<",
    ],
)
def test_a_hostile_variable_is_text(text):
    assert LMCacheEngineConfig.from_env({"LMCACHE_PD_ROLE": text}) == defaults()
    with cpu_bound(2), pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_env({"LMCACHE_EXTRA_CONFIG": text})
    assert len(str(caught.value)) < 500


def test_a_directory_becomes_one_that_the_disk_tier_reads_back(tmp_path):
    from urllib.parse import unquote, urlsplit

    for path in ("/d/", "/with space/", "/per%cent/", "/ha#sh/", "/qu?estion/", "/ünï/"):
        url = from_json(tmp_path, local_disk=path).local_disk
        assert unquote(urlsplit(url).path) == path
        assert (
            dataclasses.replace(defaults(max_local_disk_size=1), local_disk=url).local_disk == url
        )
