"""Options of the bucket, and names of objects in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_core.errors import ConfigError
from lmcache_storage.s3 import create_s3_backend
from lmcache_storage.s3.objects import is_record, object_name, tenant_name
from lmcache_storage.settings import StorageSettings
from pydantic import ValidationError

from tests.fixtures.storage_app import serving
from tests.suites.chunks import make_key


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"s3_bucket": "a/b"}, "name of a bucket"),
        ({"s3_bucket": "kv", "s3_prefix": "a/../"}, "each end with '/'"),
        ({"s3_bucket": "kv", "s3_endpoint_url": "http://minio:9000/kv"}, "nothing behind it"),
        ({"s3_bucket": "kv", "s3_endpoint_url": "http://user:hush@minio:9000"}, "no credentials"),
        ({"s3_bucket": "kv", "s3_access_key_file": "/key"}, "go together"),
        ({"s3_prefix": "kv/"}, "s3_bucket is not"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError, match=what) as refused:
        StorageSettings(**options)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("option", ["s3_ca_file", "s3_access_key_file"])
def test_missing_file_is_named(tmp_path: Path, option: str) -> None:
    present = tmp_path / "present"
    present.write_text("something")
    files = {"s3_access_key_file": present, "s3_secret_key_file": present} | {
        option: tmp_path / "absent"
    }
    with pytest.raises(ConfigError, match=f"{option}=.*absent"):
        create_s3_backend(StorageSettings(s3_bucket="kv", **files))


async def test_unavailable_bucket_degrades_the_service(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("key-of-tests")
    keys = {"s3_access_key_file": tmp_path / "key", "s3_secret_key_file": tmp_path / "key"}
    async with serving(s3_bucket="kv", s3_endpoint_url="http://127.0.0.1:1", **keys) as (client, _):
        answer = await client.get("/readyz")
        assert answer.status_code == 200
        assert "key-of-tests" not in answer.text
        assert (answer.json()["status"], answer.json()["checks"]["s3"]["ok"]) == ("degraded", False)


ODD = ["..", ".", ".a", "a/b", "a b", "a%2Fb", "a=2Fb", "a~b", "ä", "a\nb", "=2E", "A", "a"]


def test_tenants_have_different_plain_names() -> None:
    names = [tenant_name(tenant) for tenant in ODD]
    assert len(set(names)) == len(names)
    for name in names:
        assert name.isascii()
        assert not set(name) & set("/%~ \n\\")
        assert not name.startswith(".")


@pytest.mark.parametrize("tenant", ODD)
@pytest.mark.parametrize("prefix", ["", "a/b.c/"])
def test_names_of_records_are_recognised(tenant: str, prefix: str) -> None:
    name = object_name(prefix, make_key("a", tenant=tenant))
    assert is_record(name, prefix, tenant)
    assert is_record(name, prefix, None)
    assert not is_record(name, prefix, tenant + "x")
    assert not is_record(name, "z" + prefix, None)


@pytest.mark.parametrize(
    "name",
    [
        "lmcache/a/readme",
        "lmcache/a/00/x.kvr",
        f"lmcache/a/0/{'0' * 64}.kvr",
        f"lmcache/00/{'0' * 64}.kvr",
    ],
)
def test_other_names_are_no_records(name: str) -> None:
    assert not is_record(name, "lmcache/", None)
