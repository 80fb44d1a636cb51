"""Every service ends on a bad setting with code 2 and a sentence for each mistake, never with a
traceback.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
from lmcache_broker.__main__ import main as broker_main
from lmcache_lookup.__main__ import main as lookup_main
from lmcache_sidecar.__main__ import main as sidecar_main
from lmcache_storage.app import main as storage_main
from lmcache_webhook.__main__ import main as webhook_main

MAINS: dict[str, Callable[[], object]] = {
    "lookup": lookup_main,
    "broker": broker_main,
    "storage": storage_main,
    "sidecar": sidecar_main,
    "webhook": webhook_main,
}
COMMON = (
    "port: -1", "port: 65536", "port: x", "port: 1.5", "port: null", "port: [1]", "port: 1\nport: 2", "host: ''", "host: 7",  # noqa: E501
    "host: 0.0.0.0", "log_level: loud", "log_format: xml", "shutdown_grace_s: -1", "shutdown_grace_s: 1e9", "instance_id: ''",  # noqa: E501
    "instance_id: a/b", "instance_id: 'a\\nb'", "auth_tokens_file: /nowhere/tokens.yaml", "auth_tokens_file: /",  # noqa: E501
    "auth_tokens_file: /dev/null",
    "tls_cert_file: /nowhere/cert.pem", "tls_cert_file: /dev/null", "tls_key_file: /nowhere/key.pem", "tls_client_ca_file: /x",  # noqa: E501
    "allow_anonymous: perhaps", "allow_plaintext: {}", "rate_limit_per_tenant: 0", "rate_limit_per_tenant: .nan", "otlp_endpoint: h:4318",  # noqa: E501
    "otlp_endpoint: ftp://h", "trace_sample_ratio: 2", "trace_sample_ratio: .inf", "health_port: 65536", "health_host: ''", "prot: 1",  # noqa: E501
    "- port", "port", "a: [", "1: 2", "? [a]\n: b", "\x00", "port: !!python/object:os.system {}", "&a [*a]", "_env_file: x",  # noqa: E501
)  # fmt: skip
REDIS = (
    "redis_url: h:6379", "redis_url: http://h", "redis_url: 7", "redis_tls_ca_file: /x", "redis_tls_key_file: /x",  # noqa: E501
    "redis_sentinel_username: a", "redis_sentinel_password_file: /x",
)  # fmt: skip
TIERS = (
    "disk_path: /x", "disk_gb: 1", "disk_gb: -1", "disk_gb: 4Gi", "eviction_policy: random", "chunk_ttl_s: 0", "tenant: ../x",  # noqa: E501
    "tenant_quota_gb: 0", "tenant_quotas: {'../x': {memory_gb: 1}}", "tenant_quotas: {a: {memory: 1}}", "tenant_quotas: 7",  # noqa: E501
    "tls_client_key_file: /x", "tier_timeout_s: 0", "drain_timeout_s: -1", "lm_port: x", "lm_host: 0.0.0.0",  # noqa: E501
    "port: 18999\nlm_port: 18999", "lookup_url: localhost:8081",
)  # fmt: skip
OWN = {
    "lookup": (*REDIS, "redis_timeout_ms: 0", "min_ttl_ms: 99999999", "max_chunks: 0", "sweep_interval_s: 0"),  # noqa: E501
    "broker": (
        *REDIS, "ticket_keys: x", "ticket_keys: 'a:!!!'", "ticket_keys_file: /nowhere/keys", "ticket_ttl_ms: 1",  # noqa: E501
        "default_lease_ttl_ms: 3600000", "hot_chunk_copies: 0", "history_interval_s: .nan",
    ),
    "storage": (
        *TIERS, "memory_gb: 0", "memory_gb: .nan", "memory_gb: 4GiB", "max_record_mb: 0", "lmcache_compat_port: 1",  # noqa: E501
        "advertise_url: http://h", "advertise_url: 'lm://[::'", "replicas_url: http://h", "replicas_url: 'lm://h:99999'", "s3_endpoint: x",  # noqa: E501
        "s3_access_key_file: /x", "s3_bucket: ''", "service_token_file: /nowhere/token",
    ),
    "sidecar": (
        *TIERS, "arena_gb: 0", "arena_mode: 660", "arena_mode: '0999'", "arena_huge_pages: on", "remote_serde: zip",  # noqa: E501
        "remote_serde: lossless", "remote_url: s3://b",
        "disk_serde: lossless", "verify_hot: perhaps", "lookup_url: http://h:1", "distributed_url: http://h", "distributed_url: 'lm://h:x'",  # noqa: E501
        "service_token_file: /nowhere/token", "accept_handover: 7", "salt_file: /nowhere/salt", "salt_file: /dev/null",  # noqa: E501
        "ticket_keys_file: /nowhere/keys", "ticket_keys_file: /dev/null", "tls_client_cert_file: /nowhere/c", "tls_ca_file: /dev/null",  # noqa: E501
    ),
    "webhook": ("sidecar_image: ''", "payload_image: 7", "sidecar_template_file: /nowhere/t.yaml", "sidecar_template_file: /dev/full"),  # noqa: E501
}  # fmt: skip


def cases() -> Iterator[tuple[str, str]]:
    for service in MAINS:
        yield from ((service, text) for text in (*COMMON, *OWN[service]))


@pytest.mark.parametrize(("service", "text"), list(cases()), ids=ascii)
def test_a_bad_setting_is_refused_in_sentences(
    service: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a process each; `_serve` stands for all that comes once settings, files and the
    address have been taken.
    """
    (
        monkeypatch.setenv("LMCACHE_WEBHOOK_SIDECAR_IMAGE", "s:1")
        if "sidecar_image" not in text
        else None
    )
    (
        monkeypatch.setenv("LMCACHE_WEBHOOK_PAYLOAD_IMAGE", "p:1")
        if "payload_image" not in text
        else None
    )
    if "port" not in text:
        monkeypatch.setenv(f"LMCACHE_{service.upper()}_PORT", "0")
    (tmp_path / "c.yaml").write_text(text)
    err = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [service, "--config", str(tmp_path / "c.yaml")]),
        mock.patch("lmcache_servicekit.runner._serve", return_value=77),
        redirect_stdout(io.StringIO()),
        redirect_stderr(err),
    ):
        try:
            code = MAINS[service]()
        except SystemExit as exc:
            code = exc.code
    assert code == 2, err.getvalue()
    assert all(line.startswith(f"lmcache-{service}: ") for line in err.getvalue().splitlines())
    assert err.getvalue()
