"""Settings come from one file, then from variables; a wrong one is refused with its name, its
value and the fix.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from lmcache_core.addresses import is_loopback
from lmcache_core.errors import ConfigError
from lmcache_servicekit.settings import is_unspecified, load_settings, render_settings

from tests.fixtures.sample_service import SampleSettings


def load(text: str | None = None, path: Path | None = None, **variables: str) -> SampleSettings:
    if text is not None:
        assert path is not None
        path.write_text(text)
    return load_settings(
        SampleSettings, path, {f"LMCACHE_SAMPLE_{name}": value for name, value in variables.items()}
    )


def refusal(text: str | None = None, path: Path | None = None, **variables: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, path, **variables)
    return str(caught.value)


def test_defaults_listen_on_loopback() -> None:
    settings = load()
    assert (settings.host, settings.port, settings.allow_anonymous) == ("127.0.0.1", 8099, False)


def test_variables_win_over_the_file_leaf_by_leaf(tmp_path: Path) -> None:
    settings = load(
        "port: 1\nlog_level: debug\nquota: {max_bytes: 1, tenants: [a]}\n",
        tmp_path / "c",
        PORT="2",
        QUOTA__MAX_BYTES="3",
    )
    assert (settings.port, settings.log_level) == (2, "debug")
    assert (settings.quota.max_bytes, settings.quota.tenants) == (3, ["a"])


def test_structured_variables_are_yaml() -> None:
    settings = load(
        QUOTA="{max_bytes: 5}",
        QUOTA__TENANTS="[x, y]",
        LABELS='{"a": "b"}',
        RATIO="0.5",
        ALLOW_ANONYMOUS="true",
    )
    assert (settings.quota.max_bytes, settings.quota.tenants) == (5, ["x", "y"])
    assert settings.labels == {"a": "b"}
    assert (settings.ratio, settings.allow_anonymous) == (0.5, True)
    for text in ("{", "{a: 2020-13-45}", "[" * 2000):
        assert "LMCACHE_SAMPLE_LABELS: its text is not YAML" in refusal(LABELS=text)
    assert "the name 'a' is there twice" in refusal(LABELS="{a: b, a: c}")


def test_empty_files_and_variables_and_other_prefixes_set_nothing(tmp_path: Path) -> None:
    assert load("# nothing\n", tmp_path / "c", PORT="", API_SECRET="") == load()
    others = {"LMCACHE_CHUNK_SIZE": "x", "LMCACHE_LOOKUP_PORTT": "1", "PATH": "/"}
    assert load_settings(SampleSettings, None, others) == load()


def test_the_config_variable_names_the_file_and_the_argument_wins(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("port: 1")
    (tmp_path / "b").write_text("port: 2")
    assert load(CONFIG=str(tmp_path / "a")).port == 1
    assert load(None, tmp_path / "b", CONFIG=str(tmp_path / "a")).port == 2


@pytest.mark.parametrize("name", ["PORTT", "port", "QUOTA__MAX_BITES", "QUOTA_MAX_BYTES"])
def test_a_misspelt_variable_is_refused_with_the_nearest_name(name: str) -> None:
    text = refusal(**{name: "7"})
    assert f"LMCACHE_SAMPLE_{name}='7' sets nothing; did you mean LMCACHE_SAMPLE_" in text


@pytest.mark.parametrize(
    ("name", "value"), [("API_SECRETT", "hunter2"), ("REDIS_UR", "redis://user:hunter2@host")]
)
def test_a_misspelt_secret_is_not_shown(name: str, value: str) -> None:
    text = refusal(**{name: value})
    assert name in text
    assert "hunter2" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PORT", "tcp://10.0.0.1:8099"),
        ("SERVICE_HOST", "10.0.0.1"),
        ("SERVICE_PORT_HTTP", "8099"),
        ("PORT_8099_TCP_PROTO", "tcp"),
        ("HEADLESS_SERVICE_HOST", "None"),
        ("HEADLESS_PORT_1_UDP_ADDR", "10.0.0.1"),
    ],
)
def test_variables_of_kubernetes_services_are_ignored(name: str, value: str) -> None:
    assert load(**{name: value}) == load()


def test_a_bad_value_is_named_with_its_source(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    text = refusal("port: 99999\nratio: -1\n", path, LOG_LEVEL="loud", QUOTA__MAX_BYTES="many")
    assert text.splitlines()[0].startswith(f"port=99999 ({path}): ")
    assert "log_level='loud' (LMCACHE_SAMPLE_LOG_LEVEL): must be 'debug', 'info'" in text
    assert "quota.max_bytes='many' (LMCACHE_SAMPLE_QUOTA__MAX_BYTES): must be a valid" in text
    assert "ratio=-1" in text
    kinds = refusal("ratio: 8Gi\nallow_anonymous: perhaps\n", path)
    assert "ratio='8Gi'" in kinds
    assert ": must be a number\n" in f"{kinds}\n"
    assert ": must be true or false" in kinds


def test_a_bad_secret_is_not_shown(tmp_path: Path) -> None:
    text = refusal("api_secret: [hunter2]", tmp_path / "c", INSTANCE_ID="../x")
    assert "api_secret" in text
    assert "hunter2" not in text
    assert "instance_id" in text


@pytest.mark.parametrize("name", ["prot", "_env_file"])
def test_an_unknown_name_in_the_file_is_refused(tmp_path: Path, name: str) -> None:
    text = refusal(f"{name}: 1", tmp_path / "c")
    assert f"{name}: unknown option in" in text
    assert name != "prot" or "did you mean 'port'?" in text


@pytest.mark.parametrize(
    ("text", "part"),
    [
        *(("port: [", "line 1"), ("1: 2", "name: value"), ("a: &a [*a", "YAML")),
        ("#" * (1 << 20) + "\n", "larger than"),
        # PyYAML takes the last.
        ("port: 1\nhost: h\nport: 2\n", "line 3: the name 'port' is there twice; keep one of"),
        (None, "create it or correct the path"),
    ],
    ids=lambda text: (text or "")[:20],
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str | None, part: str) -> None:
    assert part in refusal(text, tmp_path / "c")


@pytest.mark.parametrize("host", ["::", "example.org"])
def test_an_open_door_needs_a_decision(host: str, tmp_path: Path) -> None:
    assert "allow_anonymous=true" in refusal(HOST=host)
    assert load(HOST=host, ALLOW_ANONYMOUS="true").host == host
    tokens = {"HOST": host, "AUTH_TOKENS_FILE": str(tmp_path / "t")}
    assert "allow_plaintext=true" in refusal(**tokens)
    assert "allow_plaintext=true" in refusal(**tokens, ALLOW_ANONYMOUS="true")
    assert load(**tokens, ALLOW_PLAINTEXT="true").host == host
    assert load(**tokens, TLS_CERT_FILE=str(tmp_path / "c")).host == host


def test_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.8.8.8", "::1", "localhost"]))
    assert all(map(is_loopback, ["LOCALHOST", "localhost.", "127.1", "2130706433", "0x7f.1"]))
    assert all(map(is_loopback, ["127.0.0.1.", "::ffff:127.0.0.1", "::127.0.0.1"]))
    assert not any(map(is_loopback, ["localhost.example.org", "0", "", "10.0.0.7", "1.127"]))
    assert not is_loopback("me.localhost"), "a resolver may ask a server for it"
    assert all(map(is_unspecified, ["", "0.0.0.0", "::", "0", "0.0", "0x0"]))
    assert not any(map(is_unspecified, ["127.0.0.1", "0.0.0.1", "zero"]))


def test_printed_settings_are_masked_and_can_be_read_again(tmp_path: Path) -> None:
    settings = load(API_SECRET="hunter2", QUOTA__TENANTS="[a]")
    text = render_settings(settings)
    assert "hunter2" not in text
    assert yaml.safe_load(text)["quota"] == {"max_bytes": 10, "tenants": ["a"]}
    assert load(text, tmp_path / "c").quota == settings.quota


def test_direct_construction_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_SAMPLE_PORT", "1")
    assert SampleSettings().port == 8099
    assert load_settings(SampleSettings).port == 1
