from __future__ import annotations

import pytest
from lmcache_core.errors import ConfigError
from lmcache_servicekit.settings import load_settings
from lmcache_sidecar.settings import SidecarSettings

BOTH = {"LOOKUP_URL": "http://lookup:8081", "BROKER_URL": "https://broker:8082"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"PORT": "1234", "LM_PORT": "1234"}, "lm_port=1234 is the value of port too"),
        ({"LM_PORT": "8083"}, "lm_port=8083 is the value of port too"),
        (BOTH | {"LOOKUP_URL": "lookup:8081"}, "lookup_url=.*http://host:port"),
        (BOTH | {"BROKER_URL": "https://broker:8082/?token=x"}, "broker_url=.*http://host:port"),
        ({"REMOTE_URL": "s3://bucket"}, "remote_url=.*scheme must be one of"),
        ({"REMOTE_URL": "lm://storage:65432/path"}, "remote_url=.*lm://host:port"),
    ],
)
def test_what_could_not_start_is_told_by_its_option(options: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_settings(
            SidecarSettings,
            None,
            {f"LMCACHE_SIDECAR_{name}": value for name, value in options.items()},
        )


def test_what_can_start_is_taken() -> None:
    environ = BOTH | {"REMOTE_URL": "redis://user:secret@redis:6379/0"}
    load_settings(
        SidecarSettings, None, {f"LMCACHE_SIDECAR_{name}": value for name, value in environ.items()}
    )


@pytest.mark.parametrize("password", ["hunter2", "hun/ter2", "hun'ter2", "hun@ter2"])
def test_a_url_that_is_refused_is_shown_without_its_password(password: str) -> None:
    with pytest.raises(ConfigError, match=r"://\*+@redis:6379") as caught:
        load_settings(
            SidecarSettings,
            None,
            {"LMCACHE_SIDECAR_REMOTE_URL": f"reddis://user:{password}@redis:6379/0"},
        )
    assert "ter2" not in str(caught.value)
