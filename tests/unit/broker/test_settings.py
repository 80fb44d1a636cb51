import base64
from pathlib import Path

import pytest
from lmcache_broker.app import create_app
from lmcache_broker.settings import BrokerSettings, load_ticket_keys
from lmcache_core.errors import ConfigError
from lmcache_core.security.ticket_keys import current_keys
from lmcache_servicekit.settings import load_settings, render_settings

SECRET = base64.b64encode(b"s" * 32).decode()
OTHER = base64.b64encode(b"o" * 32).decode()


def load(**environ: str) -> BrokerSettings:
    return load_settings(
        BrokerSettings, environ={f"LMCACHE_BROKER_{name}": value for name, value in environ.items()}
    )


def test_keys_from_a_variable_keep_their_order_and_are_masked() -> None:
    settings = load(TICKET_KEYS=f"k2:{SECRET},k1:{OTHER}")
    assert load_ticket_keys(settings) == {"k2": b"s" * 32, "k1": b"o" * 32}
    assert list(load_ticket_keys(settings)) == ["k2", "k1"]
    assert SECRET not in render_settings(settings)
    assert SECRET not in repr(settings)


def test_keys_are_read_from_a_file_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "ticket-keys"
    path.write_text(f"k1:{SECRET}\n")
    keys = load_ticket_keys(load(TICKET_KEYS_FILE=str(path)))
    assert current_keys(keys) == {"k1": b"s" * 32}
    path.write_text("k1\n")
    with pytest.raises(ConfigError, match="id:base64"):
        create_app(load(TICKET_KEYS_FILE=str(path)))


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"TICKET_KEYS": f"k1:{SECRET}", "TICKET_KEYS_FILE": "x"}, "set one of them"),
        ({"TICKET_KEYS": SECRET}, "id:base64"),
        ({"TICKET_KEYS": f"k1:{SECRET[:8]}"}, "has 6 bytes"),
        (
            {"HOST": "10.0.0.1", "AUTH_TOKENS_FILE": "x", "TLS_CERT_FILE": "x"},
            "neither ticket_keys nor ticket_keys_file",
        ),
        ({"DEFAULT_LEASE_TTL_MS": "70000"}, "above max_lease_ttl_ms"),
    ],
)
def test_bad_settings_are_refused_without_showing_secrets(
    environ: dict[str, str], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        load(**environ)
    assert SECRET[:8] not in str(error.value)


def test_discovery_needs_what_it_follows() -> None:
    with pytest.raises(ConfigError, match="kubernetes_service is not set"):
        load(DISCOVERY="kubernetes")
    with pytest.raises(ConfigError, match="set discovery=static"):
        load(STATIC_PEERS='[{"id": "a", "distributed_url": "lm://a:1"}]')
    with pytest.raises(ConfigError, match="lm://host:port"):
        load(DISCOVERY="static", STATIC_PEERS='[{"id": "a", "distributed_url": "http://a"}]')
    assert (
        load(DISCOVERY="static", STATIC_PEERS='[{"id": "a", "distributed_url": "lm://a:1"}]')
        .static_peers[0]
        .id
        == "a"
    )
