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

from_env = LMCacheEngineConfig.from_env
DEFAULTS = LMCacheEngineConfig.from_defaults(remote_url=None)


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("chunk_size", "128", 128),
        ("max_local_cpu_size", "0.25", 0.25),
        ("save_decode_cache", " 1 ", True),
        ("error_handling", "True", True),
        ("save_unfull_chunk", " FALSE ", False),
        ("chunk_ttl_s", "3600", 3600.0),
        ("prefill_tokens_per_s", "", None),
        ("remote_url", "lm://cache:1", "lm://cache:1"),
        ("lookup_url", "http://lookup:8081", "http://lookup:8081"),
        ("remote_url", "NULL", None),
        ("remote_serde", "none", None),
        ("tier_timeout_s", "1e-1", 0.1),
        ("salt", "none", "none"),
    ],
)
def test_variable_sets_its_option_and_no_other(option, text, value):
    config = from_env(
        {f"LMCACHE_{option.upper()}": text, "PATH": "/bin", "lmcache_chunk_size": "1"}
    )
    assert config == dataclasses.replace(DEFAULTS, **{option: value})


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("chunk_size", "many"),
        ("chunk_size", ""),
        ("local_cpu", "yes"),
        ("max_local_cpu_size", "5GB"),
        ("max_local_cpu_size", "nan"),
    ],
)
def test_unreadable_variable_is_refused_by_name(option, text):
    with pytest.raises(ConfigError, match=rf"LMCACHE_{option.upper()}=|^{option}="):
        from_env({f"LMCACHE_{option.upper()}": text})


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
        ("LMCACHE_VLLM_QWEN_PORT_53_UDP_ADDR", "10.0.0.1"),
        ("LMCACHE_VLLM_QWEN_PORT_9_SCTP", "sctp://10.0.0.1:9"),
        ("LMCACHE_LOOKUP_LISTEN", "127.0.0.1"),
        ("LMCACHE_STORAGE_ANYTHING", "1"),
        ("LMCACHE_USE_EXPERIMENTAL", "True"),
    ],
)
def test_variables_of_kubernetes_and_of_services_are_no_options(name, value):
    assert from_env({name: value}) == DEFAULTS


@pytest.mark.parametrize("name", ["LMCACHE_PORT", "LMCACHE_SERVICE_HOSTS", "LMCACHE_"])
def test_other_variables_with_our_prefix_are_refused(name):
    with pytest.raises(ConfigError, match=name):
        from_env({name: "80"})


def test_file_sets_the_options_that_it_names(from_yaml):
    config = from_yaml(
        "chunk_size: 128\nlocal_disk: file:///cache/\nremote_url: null\nsave_decode_cache: yes\n"
    )
    assert config == dataclasses.replace(
        DEFAULTS,
        chunk_size=128,
        local_disk="file:///cache/",
        max_local_disk_size=5.0,
        save_decode_cache=True,
    )


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", 'remote_url: ""\nlocal_disk: ""\nlookup_url: null\n']
)
def test_nothing_in_a_file_is_the_default_without_a_remote_tier(from_yaml, text):
    assert from_yaml(text) == from_env({}) == DEFAULTS


@pytest.mark.parametrize("number", ["0100", "-010", "4:16", "4:16.5"])
def test_number_that_yaml_versions_read_differently_is_refused(from_yaml, number):
    """YAML 1.1 has octal numbers without a letter, and numbers of base 60."""
    with pytest.raises(ConfigError, match=f"chunk_size='{number}': must be a whole number"):
        from_yaml(f"chunk_size: {number}\n")
    with pytest.raises(ConfigError, match=f"max_local_cpu_size='{number}': must be a number"):
        from_yaml(f"max_local_cpu_size: {number}\n")
    assert from_yaml(f"salt: {number}\n").salt == number


@pytest.mark.parametrize("text", ["chunk_size: 1\nchunk_size: 2\n", "{salt: s3cret, salt: s3cret}"])
def test_duplicate_name_is_refused(from_yaml, text):
    error = r"lmcache.yaml, line \d: the name '\w+' is there twice; keep one of them"
    with pytest.raises(ConfigError, match=error) as caught:
        from_yaml(text)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("salt: s3cret: x", "line 2, column 13: is not valid YAML"),
        ("salt: *s3cret", "line 2, column 7: is not valid YAML"),
        ("salt: !s3cret x", "line 2, column 7: is not valid YAML"),
        ("? " * 5000, "is nested too deeply"),
    ],
)
def test_unreadable_file_is_located_and_not_shown(from_yaml, text, said):
    with pytest.raises(ConfigError, match=rf"lmcache\.yaml.*{said}") as caught:
        from_yaml(f"chunk_size: 1\n{text}\n")
    assert "s3cret" not in "".join(traceback.format_exception(caught.value)[-1:])
    assert caught.value.__suppress_context__, "a traceback would quote the file"


@pytest.mark.parametrize(
    "text",
    [
        "#" * (MAX_FILE_BYTES + 1),
        "- chunk_size",
        "!!python/object/apply:os.getcwd []",
        "1: 2",
        "local_cpu: 'false'",
    ],
    ids=["too long", "list", "object", "name", "value"],
)
def test_file_that_is_no_mapping_of_options_is_refused(from_yaml, text):
    with pytest.raises(ConfigError):
        from_yaml(text)


def test_unreadable_file_is_named(tmp_path):
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path, binary):
        with pytest.raises(ConfigError, match=path.name):
            LMCacheEngineConfig.from_file(str(path))


def test_variables_win_over_the_file_of_the_environment(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "chunk_size: 32\nlocal_disk: file:///cache/\nmax_local_cache_size: 7\nremote_url: lm://file"
    )
    environ = {
        "LMCACHE_CONFIG_FILE": str(path),
        "LMCACHE_REMOTE_URL": "lm://variable",
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "3",
    }
    config = from_env(environ)
    assert (config.chunk_size, config.remote_url) == (32, "lm://variable")
    assert config.max_local_cpu_size == 3
    assert (config.local_disk, config.max_local_disk_size) == ("file:///cache/", 5)
    assert from_env(environ | {"LMCACHE_LOCAL_DISK": ""}).local_disk is None
    assert from_env({"LMCACHE_CONFIG_FILE": ""}) == DEFAULTS


@given(st.text(max_size=20), st.text(max_size=20))
def test_no_variable_raises_more_than_a_config_error(name, text):
    try:
        from_env({f"LMCACHE_{name}": text})
    except ConfigError:
        return


NESTED = ", ".join(f"&a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" if i else "&a0 [x]" for i in range(9))


@pytest.mark.parametrize(
    "value",
    ["!!timestamp x", "!!int ''", "&a [*a]", "{<<: 3}", "0x" + "f" * 6000, f"[{NESTED}]"],
    ids=lambda value: value[:20],
)
@pytest.mark.parametrize("name", ["chunk_size", "cache_policy"])
def test_value_of_any_form_is_refused_in_short(from_yaml, name, value):
    with pytest.raises(ConfigError) as caught:
        from_yaml(f"{name}: {value}")
    assert len(str(caught.value)) < 600


def test_unreadable_variable_shows_no_password():
    with pytest.raises(ConfigError) as caught:
        from_env({"LMCACHE_CHUNK_SIZE": "ftp://user:s3cret@host"})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "number", "value"),
    [
        ("chunk_size", "1_000", 1000),
        ("chunk_size", "0x1F", 31),
        ("chunk_size", "0b11", 3),
        ("max_local_cpu_size", ".5", 0.5),
        ("max_local_cpu_size", "0.0_5e+1", 0.5),
        ("max_local_cpu_size", "5.e-1", 0.5),
    ],
)
def test_other_spellings_of_numbers_are_read(from_yaml, option, number, value):
    assert getattr(from_yaml(f"{option}: {number}\n"), option) == value
