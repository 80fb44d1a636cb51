"""A bucket behind the storage's disk: its settings, its secrets, the way to it; and that chunks
come to lie there.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

import pytest
from lmcache_core.keys import CacheEngineKey, ChunkKey
from lmcache_core.memory.buffer import BytesBufferMemoryObj
from lmcache_core.record import UNSEALED_DIGEST, Chunk, raw_header
from lmcache_core.security import TokenFile
from lmcache_core.storage.remote import create_remote_backend
from lmcache_storage.settings import S3Settings, StorageSettings

from tests.fixtures.s3_server import BUCKET, running_s3
from tests.fixtures.tls import Authority
from tests.fixtures.waiting import wait_until
from tests.helm.processes import Cluster
from tests.helm.test_settings import files_in, settings_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.helm.conftest import Chart, Manifest, Rendering

GIVEN: Manifest = {
    "bucket": "kv-cache",
    "prefix": "team/kv/",
    "endpointUrl": "https://minio.storage.svc:9000",
    "region": "eu-1",
    "pathStyle": False,
    "timeoutSeconds": 2.5,
    "existingSecret": "bucket-keys",
    "accessKeyKey": "rootUser",
    "secretKeyKey": "rootPassword",
    "existingCaSecret": "house-ca",
}
FILES = "/run/secrets/s3"


def storage_settings(rendering: Rendering, folder: Path) -> StorageSettings:
    settings, _ = settings_of(rendering, "storage", folder)
    assert isinstance(settings, StorageSettings)
    return settings


def ways_out(rendering: Rendering) -> set[int]:
    """The ports at which storage reaches whatever it likes."""
    rules = rendering.get("NetworkPolicy", "storage")["spec"]["egress"]
    return {port["port"] for rule in rules if "to" not in rule for port in rule["ports"]}


def test_each_option_of_the_bucket_has_a_value(chart: Chart, tmp_path: Path) -> None:
    settings = storage_settings(chart.render({"storage.s3": GIVEN}), tmp_path)
    options = {name: str(value) for name, value in settings if name.startswith("s3_")}
    assert options == {
        "s3_bucket": "kv-cache",
        "s3_prefix": "team/kv/",
        "s3_endpoint_url": "https://minio.storage.svc:9000",
        "s3_region": "eu-1",
        "s3_path_style": "False",
        "s3_timeout_s": "2.5",
        "s3_access_key_file": f"{FILES}/access-key",
        "s3_secret_key_file": f"{FILES}/secret-key",
        "s3_ca_file": f"{FILES}/ca.crt",
    }


def test_without_a_bucket_there_is_no_trace_of_one(chart: Chart, tmp_path: Path) -> None:
    rendering = chart.render()
    assert storage_settings(rendering, tmp_path).s3_bucket is None
    assert ways_out(rendering) == {53}
    assert "s3-files" not in rendering.text


def test_by_default_the_bucket_is_amazons_as_the_role_of_the_pods(
    chart: Chart, tmp_path: Path
) -> None:
    rendering = chart.render({"storage.s3.bucket": "kv-cache"})
    settings = storage_settings(rendering, tmp_path)
    for name, field in S3Settings.model_fields.items():
        assert (
            name == "s3_bucket"
            or not name.startswith("s3_")
            or getattr(settings, name) == field.default
        ), name
    assert "s3-files" not in rendering.text


def test_the_secrets_keys_become_the_files_that_are_looked_for(
    chart: Chart, tmp_path: Path
) -> None:
    rendering = chart.render({"storage.s3": GIVEN})
    _, container = settings_of(rendering, "storage", tmp_path)
    assert {path for path in files_in(rendering, container) if path.startswith(FILES)} == {
        f"{FILES}/{name}" for name in ("access-key", "secret-key", "ca.crt")
    }
    (volume,) = (
        one
        for one in rendering.get("StatefulSet", "storage")["spec"]["template"]["spec"]["volumes"]
        if one["name"] == "s3-files"
    )
    read = {
        item["key"]: source["secret"]["name"]
        for source in volume["projected"]["sources"]
        for item in source["secret"]["items"]
    }
    assert read == {"rootUser": "bucket-keys", "rootPassword": "bucket-keys", "ca.crt": "house-ca"}
    assert volume["projected"]["defaultMode"] == 0o444
    for other in ("lookup", "broker"):
        assert "bucket-keys" not in str(rendering.get("Deployment", other))


@pytest.mark.parametrize(
    ("url", "port"),
    [
        ("", 443),
        ("https://minio.storage.svc", 443),
        ("http://minio.storage.svc/", 80),
        ("http://minio.storage.svc:9000", 9000),
        ("https://[fd00::1]:9443/", 9443),
        ("https://[fd00::1]", 443),
    ],
)
def test_the_bucket_is_reached_at_the_port_of_its_url(chart: Chart, url: str, port: int) -> None:
    bucket = {"storage.s3.bucket": "kv-cache", "storage.s3.endpointUrl": url}
    assert ways_out(chart.render(bucket)) == {53, port}
    assert ways_out(chart.render(bucket | {"storage.s3.extraPorts": [80, port]})) == {53, 80, port}


def test_only_storage_goes_there(chart: Chart) -> None:
    with_bucket, without = (
        {
            one["metadata"]["name"]: one["spec"]
            for one in chart.render(values).of_kind("NetworkPolicy")
        }
        for values in ({"storage.s3": GIVEN}, {})
    )
    assert [name for name, spec in with_bucket.items() if spec != without[name]] == [
        "cache-lmcache-storage"
    ]


def test_chunks_come_to_lie_in_it(chart: Chart, tmp_path: Path) -> None:
    """A storage with the chart's settings and files, and a server behind a certificate of a
    house's own.
    """
    (tmp_path / "authority").mkdir()
    authority = Authority(tmp_path / "authority")
    cluster = Cluster(
        chart.render({"storage.s3": GIVEN | {"bucket": BUCKET, "pathStyle": True}}),
        tmp_path / "run",
    )
    files = tmp_path / "run/storage/run/secrets/s3"
    files.mkdir(parents=True)
    with running_s3(tmp_path, authority.sign("s3", "127.0.0.1")) as server:
        for name, source in (
            ("access-key", server.access_key_file),
            ("secret-key", server.secret_key_file),
            ("ca.crt", authority.file),
        ):
            (files / name).write_bytes(source.read_bytes())
        try:
            cluster.start(
                "storage",
                {
                    "LOOKUP_URL": "http://127.0.0.1:1",
                    "BROKER_URL": "http://127.0.0.1:1",
                    "S3_ENDPOINT_URL": server.url,
                },
            )
            token = TokenFile(
                tmp_path / "run/storage/run/secrets/lmcache/sidecar-token", "the token"
            )
            asyncio.run(store_a_chunk(f"lm://127.0.0.1:{cluster.lm_ports['storage']}", token))
            wait_until(server.names)
        finally:
            cluster.stop()
        (name,) = server.names()
        assert name.startswith("team/kv/default/")


async def store_a_chunk(url: str, token: TokenFile) -> None:
    key = CacheEngineKey("vllm", "tiny", 1, 0, "ab" * 32)
    header = raw_header(key, (4096,), "uint8", UNSEALED_DIGEST)
    chunk = Chunk.unsealed(
        ChunkKey.of("default", key), header, BytesBufferMemoryObj(os.urandom(4096)), "test"
    ).sealed()
    backend = create_remote_backend(url, token, 10.0, "test")
    await backend.open()
    try:
        assert await backend.batched_put([chunk]) == [True]
    finally:
        await backend.close()
