"""The further store: a bucket of S3-compatible object storage after memory and disk (ADR 14). Off
unless `s3_bucket` is set.

`backend` is the tier over `objects`, records under their names; `client` sends signed requests
(`signature`, `credentials`) over `connections` with deadlines. Imported only if a bucket is
configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_storage.s3.backend import S3Backend
    from lmcache_storage.settings import S3Settings


def create_s3_backend(settings: S3Settings) -> S3Backend | None:
    """Create the tier in the settings, not opened; None if they name no bucket.

    Raises:
        ConfigError: A file cannot be read.
    """
    if settings.s3_bucket is None:
        return None
    from lmcache_storage.s3.backend import S3Backend
    from lmcache_storage.s3.objects import BucketObjects

    return S3Backend(BucketObjects(settings), settings.s3_timeout_s)
