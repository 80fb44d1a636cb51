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
COMMON = [
    "port: -1",
    "port: x",
    "port: 1\nport: 2",
    "host: ''",
    "host: 0.0.0.0",
    "log_level: loud",
    "shutdown_grace_s: 1e9",
    "instance_id: a/b",
    "auth_tokens_file: /nowhere/tokens.yaml",
    "auth_tokens_file: /dev/null",
    "tls_cert_file: /nowhere/cert.pem",
    "tls_client_ca_file: /x",
    "rate_limit_per_tenant: .nan",
    "otlp_endpoint: ftp://h",
    "prot: 1",
    "- port",
    "a: [",
    "? [a]\n: b",
    "\x00",
    "port: !!python/object:os.system {}",
    "&a [*a]",
]
REDIS = [
    "redis_url: http://h",
    "redis_tls_ca_file: /x",
    "redis_tls_key_file: /x",
    "redis_sentinel_username: a",
]
TIERS = [
    "disk_path: /x",
    "disk_gb: 4Gi",
    "eviction_policy: random",
    "tenant: ../x",
    "tenant_quotas: {'../x': {memory_gb: 1}}",
    "tenant_quotas: 7",
    "tls_client_key_file: /x",
    "tier_timeout_s: 0",
    "port: 18999\nlm_port: 18999",
    "lookup_url: localhost:8081",
    "service_token_file: /nowhere/token",
]
OWN = {
    "lookup": [*REDIS, "min_ttl_ms: 99999999"],
    "broker": [
        *REDIS,
        "ticket_keys: 'a:!!!'",
        "ticket_keys_file: /nowhere/keys",
        "default_lease_ttl_ms: 3600000",
        "pod_deletion_cost: true",
    ],
    "storage": [
        *TIERS,
        "memory_gb: .nan",
        "lmcache_compat_port: 1",
        "advertise_url: 'lm://[::'",
        "replicas_url: 'lm://h:99999'",
        "s3_access_key_file: /x",
    ],
    "sidecar": [
        *TIERS,
        "arena_mode: '0999'",
        "remote_serde: zip",
        "remote_url: s3://b",
        "distributed_url: 'lm://h:x'",
        "salt_file: /dev/null",
        "ticket_keys_file: /nowhere/keys",
        "tls_ca_file: /dev/null",
    ],
    "webhook": ["sidecar_image: ''", "sidecar_template_file: /nowhere/t.yaml"],
}


def cases() -> Iterator[tuple[str, str]]:
    for service in MAINS:
        yield from ((service, text) for text in (*COMMON, *OWN[service]))


@pytest.mark.parametrize(("service", "text"), list(cases()), ids=ascii)
def test_a_bad_setting_is_refused_in_sentences(
    service: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvicorn's server stands for all that comes once settings, files and the address are taken."""
    for image in ("sidecar_image", "payload_image"):
        if image not in text:
            monkeypatch.setenv(f"LMCACHE_WEBHOOK_{image.upper()}", "i:1")
    if "port" not in text:
        monkeypatch.setenv(f"LMCACHE_{service.upper()}_PORT", "0")
    (tmp_path / "c.yaml").write_text(text)
    err = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [service, "--config", str(tmp_path / "c.yaml")]),
        mock.patch("uvicorn.Server.run"),
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
