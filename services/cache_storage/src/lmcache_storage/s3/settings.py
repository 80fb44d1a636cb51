"""Options of the further store."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from lmcache_node.settings import NodeSettings
from pydantic import Field, field_validator, model_validator

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PREFIX = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)*")
MAX_PREFIX_CHARS = 256


class S3Settings(NodeSettings):
    """Options of a bucket of S3-compatible object storage, behind memory and disk.

    Attributes:
        s3_bucket: The bucket, which must exist; unset: there is none, and nothing below may be
            other than its default.
        s3_prefix: What the names of all objects begin with. Servers that are one tier share bucket
            and prefix.
        s3_endpoint_url: `https://host:port` of a server other than Amazon's; `http://` sends chunks
            unencrypted.
        s3_region: Region that requests are signed for.
        s3_path_style: Name the bucket in the path of URLs; without it, in their host (Amazon's
            way).
        s3_ca_file: Authorities (PEM) that are trusted besides those that this machine trusts. Read
            at the start.
        s3_access_key_file: Holds the id of the access key. Read again when it changes, as the next.
            Both or none: without them, credentials come from the variables `AWS_…` of the
            environment, a web identity, the container's or the machine's role.
        s3_secret_key_file: Holds the secret of that key.
        s3_timeout_s: Longest time for one request to the bucket, seconds. Reads have no longer than
            `tier_timeout_s` either.
    """

    s3_bucket: str | None = None
    s3_prefix: str = Field(default="lmcache/", max_length=MAX_PREFIX_CHARS)
    s3_endpoint_url: str | None = None
    s3_region: str = Field(
        default="us-east-1", min_length=1, max_length=63, pattern=r"^[A-Za-z0-9-]+$"
    )
    s3_path_style: bool = True
    s3_ca_file: Path | None = None
    s3_access_key_file: Path | None = None
    s3_secret_key_file: Path | None = None
    s3_timeout_s: float = Field(default=10.0, gt=0, le=600)

    @field_validator("s3_bucket")
    @classmethod
    def _check_bucket(cls, value: str | None) -> str | None:
        if value is not None and not _BUCKET.fullmatch(value):
            raise ValueError("must be the name of a bucket: letters, digits, '.', '_' and '-'")
        return value

    @field_validator("s3_prefix")
    @classmethod
    def _check_prefix(cls, value: str) -> str:
        if not _PREFIX.fullmatch(value):
            raise ValueError(
                "must be empty, or names of letters, digits, '.', '_' and '-' that each end with"
                " '/', such as 'team/kv/'"
            )
        return value

    @field_validator("s3_endpoint_url")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None:
            parts = urlsplit(value)
            if (
                parts.scheme not in ("http", "https")
                or not parts.hostname
                or parts.query
                or parts.fragment
                or parts.path.strip("/")
            ):
                raise ValueError(
                    "must be http://host:port or https://host:port and nothing behind it"
                )
            if parts.username is not None or parts.password is not None:
                raise ValueError(
                    "must hold no credentials: set s3_access_key_file and s3_secret_key_file"
                )
        return value

    @model_validator(mode="after")
    def _check_s3(self) -> S3Settings:
        if self.s3_bucket is None:
            fields = type(self).model_fields.items()
            alone = sorted(
                name
                for name, field in fields
                if name.startswith("s3_") and getattr(self, name) != field.default
            )
            if alone:
                raise ValueError(
                    f"{alone[0]} is set, but s3_bucket is not: set it, or leave"
                    f" {', '.join(alone)} out"
                )
        if (self.s3_access_key_file is None) != (self.s3_secret_key_file is None):
            raise ValueError(
                "s3_access_key_file and s3_secret_key_file go together: set both or none"
            )
        return self
