"""Options of the bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_core.errors import ConfigError
from lmcache_storage.s3 import create_s3_backend
from lmcache_storage.settings import StorageSettings
from pydantic import ValidationError

from tests.fixtures.storage_app import serving


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
