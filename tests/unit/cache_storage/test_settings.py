"""Settings of the storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from lmcache_core.errors import ConfigError
from lmcache_core.storage.eviction import POLICIES, TenantQuotas, TierLimits
from lmcache_servicekit.settings import load_settings
from lmcache_storage.settings import StorageSettings


def load(**environ: str) -> StorageSettings:
    return load_settings(
        StorageSettings,
        environ={f"LMCACHE_STORAGE_{name}": value for name, value in environ.items()},
    )


COMPAT = {"LMCACHE_COMPAT_PORT": "65431", "LMCACHE_COMPAT_TENANT": "team-a"}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"TLS_KEY_FILE": "/key"}, "tls_cert_file is not"),
        ({"TLS_CERT_FILE": "/cert", "ADVERTISE_URL": "lm://storage:65432"}, r"write lm\+tls://"),
        (
            {"LM_HOST": "::", "ALLOW_ANONYMOUS": "true", "BROKER_URL": "http://broker:8082"},
            "advertise_url",
        ),
        ({"ADVERTISE_URL": "lm://[::]:65432"}, "unspecified"),
        ({"LMCACHE_COMPAT_PORT": "65431"}, "set lmcache_compat_tenant"),
        ({"LMCACHE_COMPAT_DIALECT": "v0.4"}, "lmcache_compat_dialect='v0.4'.*'v0.2' or 'v0.3\\+'"),
        (
            {**COMPAT, "LMCACHE_COMPAT_HOST": "0.0.0.0", "AUTH_TOKENS_FILE": "/t.yaml"},
            "lmcache_compat_host='0.0.0.0'.*allow_anonymous",
        ),
        ({"EVICTION_POLICY": "mru"}, "eviction_policy='mru'.*'adaptive', 's3fifo' or 'lru'"),
        ({"TENANT_DISK_QUOTA_GB": "5"}, "there is no disk"),
        ({"TENANT_QUOTAS": "{team-a: {memory_gb: 0}}"}, "tenant_quotas.team-a.memory_gb"),
        ({"TENANT_QUOTAS": "{../other: {memory_gb: 1}}"}, "tenant_quotas"),
        ({**COMPAT, "LM_PORT": "65431"}, "lmcache_compat_port=65431 .*lm_port"),
        ({"HEALTH_PORT": "8080", "HEALTH_HOST": "0.0.0.0"}, "health_port=8080"),
        ({"LOOKUP_URL": "localhost:8081"}, "lookup_url=.*http://host:port"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(**options)


def test_sizes_are_binary() -> None:
    settings = load(MEMORY_GB="0.5", DISK_PATH="/data", DISK_GB="2", MAX_RECORD_MB="3")
    assert (settings.memory_bytes, settings.disk_bytes) == (1 << 29, 2 << 30)
    assert settings.max_record_bytes == 3 << 20
    assert settings.disk_path == Path("/data")


def test_limits_name_what_each_tier_does_not_keep() -> None:
    assert load().memory_limits == load(DISK_PATH="/data", DISK_GB="9").disk_limits == TierLimits()
    settings = load(
        DISK_PATH="/data",
        DISK_GB="9",
        CHUNK_TTL_S="60",
        TENANT_QUOTA_GB="0.5",
        TENANT_DISK_QUOTA_GB="2",
        TENANT_QUOTAS="{team-a: {memory_gb: 1}, team-b: {disk_gb: 4}}",
    )
    assert settings.memory_limits == TierLimits(60, TenantQuotas(1 << 29, {"team-a": 1 << 30}))
    assert settings.disk_limits == TierLimits(60, TenantQuotas(2 << 30, {"team-b": 4 << 30}))
    assert load(TENANT_QUOTAS="{team-a: {memory_gb: 1}}").memory_limits.quotas == TenantQuotas(
        None, {"team-a": 1 << 30}
    )


def test_every_eviction_policy_can_be_chosen() -> None:
    annotation = StorageSettings.model_fields["eviction_policy"].annotation
    assert set(get_args(annotation)) == set(POLICIES)


def test_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        load(LOOKUP_URL="http://me:hunter2@lookup:8081")
    assert "lookup_url=" in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "options", [{"port": 0, "lm_port": 0}, {"port": 1234, "lm_port": 1234, "lm_host": "127.0.0.2"}]
)
def test_free_ports_and_other_addresses_may_be_the_same(options: dict[str, Any]) -> None:
    StorageSettings(**options)
