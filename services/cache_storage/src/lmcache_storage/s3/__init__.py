"""The further store: a bucket of S3-compatible object storage after memory and disk (ADR 14). Off
unless `s3_bucket` is set.

`objects` talks to the bucket, `backend` is the tier. The client library is imported only if a
bucket is configured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from lmcache_core.errors import ConfigError
from lmcache_core.extras import install_line

if TYPE_CHECKING:
    from lmcache_storage.s3.backend import S3Backend
    from lmcache_storage.settings import S3Settings

FOLDERS: Final = (
    *("libs/lmcache_core", "services/servicekit", "services/node", "services/cache_storage"),
)
"""Where this package is in a checkout, after what it needs."""


def create_s3_backend(settings: S3Settings) -> S3Backend | None:
    """Create the tier in the settings, not opened; None if they name no bucket.

    Raises:
        ConfigError: The client library is not installed, or a file cannot be read.
    """
    if settings.s3_bucket is None:
        return None
    try:
        from lmcache_storage.s3.backend import S3Backend
        from lmcache_storage.s3.objects import BucketObjects
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"s3_bucket={settings.s3_bucket!r} needs the package {exc.name!r}:"
            f" {install_line('s3', *FOLDERS)}, or leave s3_bucket out"
        ) from exc
    return S3Backend(BucketObjects(settings), settings.s3_timeout_s)
