from __future__ import annotations

import dataclasses
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.config import LEGACY_BACKENDS, REMOTE_SCHEMES, REMOTE_SERDES, LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache_core.errors import ConfigError

DOCUMENTED = {
    "chunk_size": 256,
    "local_cpu": True,
    "max_local_cpu_size": 5.0,
    "local_disk": None,
    "max_local_disk_size": 0,
    "remote_url": "lm://localhost:65432",
    "remote_serde": "naive",
    "save_decode_cache": False,
    "enable_blending": False,
    "blend_recompute_ratio": 0.15,
    "blend_min_tokens": 256,
    "enable_p2p": False,
    "lookup_url": None,
    "distributed_url": None,
    "error_handling": False,
}
OPTIONS = [f.name for f in dataclasses.fields(LMCacheEngineConfig)]


def from_yaml(tmp_path, text):
    path = tmp_path / "lmcache.yaml"
    path.write_text(text, encoding="utf-8")
    return LMCacheEngineConfig.from_file(str(path))


def test_the_defaults_are_the_documented_ones():
    config = dataclasses.asdict(LMCacheEngineConfig.from_defaults())
    assert {name: config[name] for name in DOCUMENTED} == DOCUMENTED
    assert list(inspect.signature(LMCacheEngineConfig.from_defaults).parameters)[:15] == list(DOCUMENTED)
    assert OPTIONS[:15] == list(DOCUMENTED)


def test_the_list_of_options_is_this_one():
    assert OPTIONS[15:] == ["sidecar_socket", "verify_hot", "tier_timeout_s", "salt"]


def test_options_change_the_defaults_by_name_and_by_place():
    config = LMCacheEngineConfig.from_defaults(128, False, remote_url=None, verify_hot="never", tier_timeout_s=0.5)
    assert (config.chunk_size, config.local_cpu, config.remote_url, config.verify_hot, config.tier_timeout_s) == (
        128,
        False,
        None,
        "never",
        0.5,
    )


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LMCacheEngineConfig.from_defaults().chunk_size = 1


def test_the_salt_is_not_shown():
    assert "pepper" not in repr(LMCacheEngineConfig.from_defaults(salt="pepper"))


@pytest.mark.parametrize(("wrong", "right"), [("chunk_sizes", "chunk_size"), ("local_cpus", "local_cpu"), ("remote_uri", "remote_url")])
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


IMPOSSIBLE = [
    *(("chunk_size", v) for v in (0, -1, 65537, 256.0, "256", True, None)),
    *(("max_local_cpu_size", v) for v in (-1, float("nan"), float("inf"), "5", True)),
    *(("max_local_disk_size", v) for v in (-0.1, "5")),
    *(("local_disk", v) for v in ("/var/cache", "file://cache", "s3://bucket/", 5)),
    *(("remote_url", v) for v in ("localhost:65432", "ftp://host", "", 5, "lm://[::1")),
    *(("remote_serde", v) for v in ("pickle", "", 1)),
    *(("blend_recompute_ratio", v) for v in (-0.1, 1.1, "0.15")),
    *(("blend_min_tokens", v) for v in (-1, 2.5)),
    *(("verify_hot", v) for v in ("sometimes", True, None)),
    *(("tier_timeout_s", v) for v in (0, -1, 3601, "2")),
    *((name, v) for name in ("local_cpu", "save_decode_cache", "enable_p2p", "error_handling") for v in ("false", 0, None)),
    *((name, v) for name in ("lookup_url", "distributed_url", "sidecar_socket") for v in (5, False)),
    *(("salt", v) for v in (None, 12345)),
]


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE, ids=str)
def test_an_impossible_value_is_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"^{name}="):
        LMCacheEngineConfig.from_defaults(**{name: value})


@pytest.mark.parametrize(
    "values",
    [
        {"chunk_size": 1},
        {"chunk_size": 65536},
        {"max_local_cpu_size": 0},
        {"local_disk": "file:///cache/", "max_local_disk_size": 0.5},
        {"remote_serde": None},
        {"blend_recompute_ratio": 0},
        *({"remote_url": f"{scheme}://host:1"} for scheme in REMOTE_SCHEMES),
        *({"remote_serde": serde} for serde in REMOTE_SERDES),
    ],
    ids=str,
)
def test_the_ends_of_the_ranges_are_possible(values):
    config = LMCacheEngineConfig.from_defaults(**values)
    assert {name: getattr(config, name) for name in values} == values


def test_a_disk_without_room_is_a_contradiction():
    with pytest.raises(ConfigError, match="max_local_disk_size"):
        LMCacheEngineConfig.from_defaults(local_disk="file:///cache/")


def test_blending_is_refused_not_ignored():
    with pytest.raises(ConfigError, match="blending"):
        LMCacheEngineConfig.from_defaults(enable_blending=True)


@pytest.mark.parametrize(("name", "value"), [("remote_url", "rediss-typo://user:s3cret@host/"), ("salt", 53537)])
def test_an_error_shows_neither_password_nor_salt(name, value):
    with pytest.raises(ConfigError) as caught:
        LMCacheEngineConfig.from_defaults(**{name: value})
    assert "s3cret" not in str(caught.value)
    assert "53537" not in str(caught.value)


def test_an_empty_environment_gives_the_defaults_without_a_remote_tier():
    assert LMCacheEngineConfig.from_env({}) == LMCacheEngineConfig.from_defaults(remote_url=None)


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("chunk_size", "128", 128),
        ("max_local_cpu_size", "0.25", 0.25),
        ("max_local_disk_size", "7", 7.0),
        ("local_cpu", "false", False),
        ("local_cpu", " 0 ", False),
        ("enable_p2p", "True", True),
        ("error_handling", "1", True),
        ("remote_url", "lm://cache:1", "lm://cache:1"),
        ("remote_url", "none", None),
        ("remote_url", "", None),
        ("lookup_url", "NULL", None),
        ("remote_serde", "cachegen", "cachegen"),
        ("verify_hot", "sampled", "sampled"),
        ("tier_timeout_s", "1e-1", 0.1),
        ("salt", "none", "none"),
    ],
)
def test_a_variable_sets_its_option_and_no_other(option, text, value):
    config = LMCacheEngineConfig.from_env({f"LMCACHE_{option.upper()}": text, "PATH": "/bin", "lmcache_chunk_size": "1"})
    assert config == dataclasses.replace(LMCacheEngineConfig.from_defaults(remote_url=None), **{option: value})


def test_the_environment_is_the_processes_own_by_default(monkeypatch):
    monkeypatch.setenv("LMCACHE_CHUNK_SIZE", "64")
    assert LMCacheEngineConfig.from_env().chunk_size == 64


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("chunk_size", "many"),
        ("chunk_size", ""),
        ("chunk_size", "256.0"),
        ("local_cpu", "yes"),
        ("local_cpu", ""),
        ("max_local_cpu_size", "5GB"),
    ],
)
def test_a_variable_that_cannot_be_read_is_refused_by_name(option, text):
    with pytest.raises(ConfigError, match=f"LMCACHE_{option.upper()}"):
        LMCacheEngineConfig.from_env({f"LMCACHE_{option.upper()}": text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LMCACHE_SERVICE_HOST", "10.0.0.1"),
        ("LMCACHE_SERVICE_PORT", "80"),
        ("LMCACHE_SERVICE_PORT_HTTP", "80"),
        ("LMCACHE_PORT", "tcp://10.0.0.1:80"),
        ("LMCACHE_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ("LMCACHE_PORT_80_TCP_PROTO", "tcp"),
        ("LMCACHE_PORT_80_TCP_PORT", "80"),
        ("LMCACHE_PORT_80_TCP_ADDR", "10.0.0.1"),
        ("LMCACHE_VLLM_QWEN_SERVICE_PORT_HTTP_METRICS", "8000"),
        ("LMCACHE_VLLM_QWEN_PORT_53_UDP_ADDR", "10.0.0.1"),
        ("LMCACHE_VLLM_QWEN_PORT_9_SCTP", "sctp://10.0.0.1:9"),
        ("LMCACHE_LOOKUP_LISTEN", "127.0.0.1"),
        ("LMCACHE_STORAGE_ANYTHING", "1"),
        ("LMCACHE_SIDECAR_ARENA_GB", "4"),
        ("LMCACHE_USE_EXPERIMENTAL", "True"),
        ("LMCACHE_LOG_LEVEL", "DEBUG"),
        ("LMCACHE_TRACK_USAGE", "false"),
    ],
)
def test_variables_of_kubernetes_and_of_the_services_are_no_options(name, value):
    assert LMCacheEngineConfig.from_env({name: value}) == LMCacheEngineConfig.from_env({})


def test_a_lookup_url_is_an_option_although_the_lookup_service_owns_the_prefix():
    assert LMCacheEngineConfig.from_env({"LMCACHE_LOOKUP_URL": "http://lookup:8081"}).lookup_url == "http://lookup:8081"


@pytest.mark.parametrize("name", ["LMCACHE_PORT", "LMCACHE_HOST", "LMCACHE_SERVICE_HOSTS", "LMCACHE_"])
def test_other_variables_with_our_prefix_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        LMCacheEngineConfig.from_env({name: "80"})


def test_a_file_sets_what_it_names(tmp_path):
    config = from_yaml(tmp_path, "chunk_size: 128\nlocal_disk: file:///cache/\nremote_url: null\nremote_serde: safetensor\n")
    wanted = LMCacheEngineConfig.from_defaults(
        chunk_size=128, local_disk="file:///cache/", max_local_disk_size=5.0, remote_url=None, remote_serde="safetensor"
    )
    assert config == wanted


def test_an_empty_file_gives_the_defaults_without_a_remote_tier(tmp_path):
    assert from_yaml(tmp_path, "") == from_yaml(tmp_path, "# nothing\n") == LMCacheEngineConfig.from_defaults(remote_url=None)


def test_a_size_in_the_file_wins_over_the_default_of_disks(tmp_path):
    assert from_yaml(tmp_path, "local_disk: file:///cache/\nmax_local_disk_size: 0.5\n").max_local_disk_size == 0.5


@pytest.mark.parametrize(
    "text", ["- chunk_size", "chunk_size", "chunk_size: [", "!!python/object/apply:os.getcwd []", "1: 2", "local_cpu: 'false'"]
)
def test_a_file_that_is_no_mapping_of_options_is_refused(tmp_path, text):
    with pytest.raises(ConfigError):
        from_yaml(tmp_path, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path, binary):
        with pytest.raises(ConfigError, match=path.name):
            LMCacheEngineConfig.from_file(str(path))


def test_the_environment_can_name_a_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("chunk_size: 32")
    assert LMCacheEngineConfig.from_env({"LMCACHE_CONFIG_FILE": str(path)}).chunk_size == 32


@pytest.mark.parametrize(
    ("backend", "cpu", "disk", "remote"),
    [
        ("cpu", True, False, False),
        ("local_disk", False, True, False),
        ("local_cpu_disk", True, True, False),
        ("remote", False, False, True),
        ("local_cpu_remote", True, False, True),
        ("local_disk_remote", False, True, True),
        ("local_cpu_disk_remote", True, True, True),
    ],
)
def test_the_names_of_backends_mean_these_tiers(backend, cpu, disk, remote):
    config = LMCacheEngineConfig.from_legacy(backend=backend, remote_url="redis://r:1", chunk_size=64)
    assert config.local_cpu is cpu
    assert (config.local_disk is not None, config.max_local_disk_size) == (disk, 5.0 if disk else 0.0)
    assert config.remote_url == ("redis://r:1" if remote else None)
    assert config.chunk_size == 64
    assert backend in LEGACY_BACKENDS


def test_legacy_takes_its_documented_arguments_in_their_order():
    config = LMCacheEngineConfig.from_legacy(64, "local_cpu_disk_remote", "lm://h:1", "fast", True, False, 0.5, 9, 2.5)
    assert (config.chunk_size, config.remote_url, config.remote_serde, config.save_decode_cache) == (64, "lm://h:1", "fast", True)
    assert (config.blend_recompute_ratio, config.blend_min_tokens, config.max_local_disk_size) == (0.5, 9, 2.5)


@pytest.mark.parametrize("options", [{"backend": "gpu"}, {"backend": ""}, {"local_cpu": False}, {"local_disk": "file:///x/"}])
def test_legacy_refuses_what_it_cannot_do(options):
    with pytest.raises(ConfigError):
        LMCacheEngineConfig.from_legacy(**options)


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_variable_makes_more_than_a_config_error(name, text):
    try:
        LMCacheEngineConfig.from_env({f"LMCACHE_{name}": text})
    except ConfigError:
        return


def test_metadata_describe_the_kv():
    metadata = LMCacheEngineMetadata("m", 1, 0, "vllm", "bfloat16", (4, 2, 256, 8, 64))
    assert metadata.kv_dtype_name == "bfloat16"
    assert metadata.layout_fingerprint() == "KV_BLOB/1;layers=4;sides=2;heads=8;head_size=64;"
    assert (metadata.revision, metadata.adapter, metadata.layout) == ("", "", "")


def test_a_torch_dtype_and_its_name_are_the_same():
    torch = pytest.importorskip("torch")
    assert LMCacheEngineMetadata("m", 1, 0, "vllm", torch.float16, (1, 2, 3, 4, 5)).kv_dtype_name == "float16"
