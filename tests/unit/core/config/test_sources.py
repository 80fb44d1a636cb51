"""The environment and YAML files."""

from __future__ import annotations

import dataclasses
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmcache_core.config import LMCacheEngineConfig
from lmcache_core.config.sources import MAX_FILE_BYTES
from lmcache_core.errors import ConfigError


def from_yaml(tmp_path, text):
    path = tmp_path / "lmcache.yaml"
    path.write_text(text, encoding="utf-8")
    return LMCacheEngineConfig.from_file(str(path))


def test_an_empty_environment_gives_the_defaults_without_a_remote_tier():
    assert LMCacheEngineConfig.from_env({}) == LMCacheEngineConfig.from_defaults(remote_url=None)


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("chunk_size", "128", 128),
        ("max_local_cpu_size", "0.25", 0.25),
        ("max_local_disk_size", "7", 7.0),
        ("error_handling", "True", True),
        ("save_decode_cache", " 1 ", True),
        ("save_decode_cache", "True", True),
        ("chunk_ttl_s", "3600", 3600.0),
        ("chunk_ttl_s", "none", None),
        ("prefill_tokens_per_s", "", None),
        ("error_handling", "true", True),
        ("eviction_policy", "lru", "lru"),
        ("remote_token_file", "/etc/token", "/etc/token"),
        ("error_handling", "1", True),
        ("remote_url", "lm://cache:1", "lm://cache:1"),
        ("remote_url", "none", None),
        ("remote_url", "", None),
        ("lookup_url", "NULL", None),
        ("remote_serde", "none", None),
        ("verify_hot", "sampled", "sampled"),
        ("tier_timeout_s", "1e-1", 0.1),
        ("salt", "none", "none"),
    ],
)
def test_a_variable_sets_its_option_and_no_other(option, text, value):
    config = LMCacheEngineConfig.from_env(
        {f"LMCACHE_{option.upper()}": text, "PATH": "/bin", "lmcache_chunk_size": "1"}
    )
    assert config == dataclasses.replace(
        LMCacheEngineConfig.from_defaults(remote_url=None), **{option: value}
    )


@pytest.mark.parametrize("text", ["false", "0", "FALSE", " 0 "])
def test_a_variable_switches_off(text):
    assert not LMCacheEngineConfig.from_env(
        {"LMCACHE_LOCAL_CPU": text, "LMCACHE_REMOTE_URL": "lm://h"}
    ).local_cpu


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
        ("max_local_cpu_size", "nan"),
        ("tier_timeout_s", ""),
    ],
)
def test_a_variable_that_cannot_be_read_is_refused_by_name(option, text):
    with pytest.raises(ConfigError, match=rf"LMCACHE_{option.upper()}=|^{option}="):
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
        ("LMCACHE_LOOKUP_PORT", "tcp://10.0.0.1:8081"),
        ("LMCACHE_LOOKUP_LISTEN", "127.0.0.1"),
        ("LMCACHE_LOOKUP_TIMEOUT_MS", "5"),
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
    assert (
        LMCacheEngineConfig.from_env({"LMCACHE_LOOKUP_URL": "http://lookup:8081"}).lookup_url
        == "http://lookup:8081"
    )


@pytest.mark.parametrize(
    "name", ["LMCACHE_PORT", "LMCACHE_HOST", "LMCACHE_SERVICE_HOSTS", "LMCACHE_"]
)
def test_other_variables_with_our_prefix_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        LMCacheEngineConfig.from_env({name: "80"})


def test_a_file_sets_what_it_names(tmp_path):
    config = from_yaml(
        tmp_path,
        "chunk_size: 128\nlocal_disk: file:///cache/\nremote_url: null\nsave_decode_cache: yes\n",
    )
    wanted = LMCacheEngineConfig.from_defaults(
        chunk_size=128,
        local_disk="file:///cache/",
        max_local_disk_size=5.0,
        remote_url=None,
        save_decode_cache=True,
    )
    assert config == wanted


def test_an_empty_file_gives_the_defaults_without_a_remote_tier(tmp_path):
    assert (
        from_yaml(tmp_path, "")
        == from_yaml(tmp_path, "# nothing\n")
        == LMCacheEngineConfig.from_defaults(remote_url=None)
    )


def test_a_size_in_the_file_wins_over_the_default_of_disks(tmp_path):
    assert (
        from_yaml(
            tmp_path, "local_disk: file:///cache/\nmax_local_disk_size: 0.5\n"
        ).max_local_disk_size
        == 0.5
    )


def test_nothing_is_none_in_a_file(tmp_path):
    config = from_yaml(tmp_path, 'remote_url: ""\nlocal_disk: ""\nlookup_url: null\n')
    assert config == LMCacheEngineConfig.from_env({})


@pytest.mark.parametrize("number", ["0100", "-010", "4:16", "1:30:00", "4:16.5"])
def test_a_number_that_yaml_versions_read_as_different_ones_is_refused(tmp_path, number):
    """YAML 1.1 has octal numbers without a letter, and numbers of base 60."""
    with pytest.raises(ConfigError, match=f"chunk_size='{number}': must be a whole number"):
        from_yaml(tmp_path, f"chunk_size: {number}\n")
    with pytest.raises(ConfigError, match=f"max_local_cpu_size='{number}': must be a number"):
        from_yaml(tmp_path, f"max_local_cpu_size: {number}\n")
    assert from_yaml(tmp_path, f"salt: {number}\n").salt == number


@pytest.mark.parametrize(
    ("number", "value"),
    [("100", 100), ("+100", 100), ("1_000", 1000), ("0x1F", 31), ("0b11", 3)],
)
def test_other_spellings_of_numbers_are_read(tmp_path, number, value):
    assert from_yaml(tmp_path, f"chunk_size: {number}\n").chunk_size == value


@pytest.mark.parametrize("number", ["0.5", ".5", "+0.5", "0.0_5e+1", "5.e-1"])
def test_spellings_of_fractions_are_read(tmp_path, number):
    config = from_yaml(tmp_path, f"max_local_cpu_size: {number}\n")
    assert config.max_local_cpu_size == 0.5


@pytest.mark.parametrize("text", ["chunk_size: 1\nchunk_size: 2\n", "{salt: s3cret, salt: s3cret}"])
def test_a_name_twice_is_refused(tmp_path, text):
    with pytest.raises(
        ConfigError, match=r"lmcache.yaml, line \d: the name '\w+' is there twice; keep one of them"
    ) as caught:
        from_yaml(tmp_path, text)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "salt: *s3cret",
        "salt: 's3cret",
        "salt: !s3cret x",
        "salt: s3cret: x",
        "salt: [s3cret",
        "? " * 5000,
    ],
)
def test_an_unreadable_file_shows_nothing_of_its_contents(tmp_path, text):
    with pytest.raises(ConfigError, match=r"lmcache\.yaml.*is not valid YAML") as caught:
        from_yaml(tmp_path, f"chunk_size: 1\n{text}\n")
    shown = "".join(traceback.format_exception(caught.value)[-1:])
    assert "s3cret" not in shown
    assert caught.value.__suppress_context__, "a traceback would quote the file"


def test_the_place_of_a_mistake_is_named(tmp_path):
    with pytest.raises(ConfigError, match="line 2, column 11"):
        from_yaml(tmp_path, "chunk_size: 1\nsalt: text: more\n")


def test_a_file_has_a_bound(tmp_path):
    with pytest.raises(ConfigError, match="right file"):
        from_yaml(tmp_path, "#" * (MAX_FILE_BYTES + 1))


@pytest.mark.parametrize(
    "text",
    [
        "- chunk_size",
        "chunk_size",
        "chunk_size: [",
        "!!python/object/apply:os.getcwd []",
        "1: 2",
        "local_cpu: 'false'",
    ],
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


def test_a_file_of_the_environment_is_overridden_by_its_variables(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "chunk_size: 32\nlocal_disk: file:///cache/\nmax_local_cache_size: 7\nremote_url: lm://file"
    )
    environ = {
        "LMCACHE_CONFIG_FILE": str(path),
        "LMCACHE_REMOTE_URL": "lm://variable",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "3",
    }
    config = LMCacheEngineConfig.from_env(environ)
    assert (config.chunk_size, config.remote_url, config.max_local_cpu_size) == (
        32,
        "lm://variable",
        3,
    )
    assert (config.local_disk, config.max_local_disk_size) == ("file:///cache/", 5)
    assert LMCacheEngineConfig.from_env(environ | {"LMCACHE_LOCAL_DISK": ""}).local_disk is None
    assert LMCacheEngineConfig.from_env(
        {"LMCACHE_CONFIG_FILE": ""}
    ) == LMCacheEngineConfig.from_env({})


def test_a_mistake_in_the_file_of_the_environment_names_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("chunk_sizes: 32")
    with pytest.raises(
        ConfigError, match=r"c\.yaml: unknown option 'chunk_sizes'; did you mean 'chunk_size'"
    ):
        LMCacheEngineConfig.from_env({"LMCACHE_CONFIG_FILE": str(path)})


def test_a_disk_from_a_variable_needs_its_size():
    with pytest.raises(ConfigError, match="max_local_disk_size"):
        LMCacheEngineConfig.from_env({"LMCACHE_LOCAL_DISK": "file:///cache/"})


@pytest.mark.parametrize("text", ["redis://user:s3cret@", "ftp://user:s3cret@host"])
def test_a_variable_shows_no_password(text):
    for name in ("REMOTE_URL", "CHUNK_SIZE"):
        with pytest.raises(ConfigError) as caught:
            LMCacheEngineConfig.from_env({f"LMCACHE_{name}": text})
        assert "s3cret" not in str(caught.value)


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_variable_makes_more_than_a_config_error(name, text):
    try:
        LMCacheEngineConfig.from_env({f"LMCACHE_{name}": text})
    except ConfigError:
        return


@pytest.mark.parametrize(
    "value",
    [
        "!!timestamp x",
        "!!bool x",
        "!!int ''",
        "&a [*a]",
        "{<<: 3}",
        "0x" + "f" * 6000,
        "["
        + ", ".join(
            f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" if i else "&a0 [x]" for i in range(9)
        )
        + "]",
    ],
    ids=lambda value: value[:20],
)
@pytest.mark.parametrize("name", ["chunk_size", "cache_policy", "pre_caching_hash_algorithm"])
def test_a_value_of_any_form_is_refused_in_short(tmp_path, name, value):
    with pytest.raises(ConfigError) as caught:
        from_yaml(tmp_path, f"{name}: {value}")
    assert len(str(caught.value)) < 600
