"""What sentinels are told where they answer only those they know: a name, and a password from a
file.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from lmcache_core.errors import ConfigError
from redis.credentials import CredentialProvider

from lmcache_servicekit.redis_settings import RedisSettings
from lmcache_servicekit.secret_file import read_secret_file


class SentinelLogin(CredentialProvider):
    """Reads the file for each new connection; one that cannot be read leaves the last password in
    force.

    Args:
        password_file: Holds the password.
        username: Who asks; None for the default user.

    Raises:
        ConfigError: The file cannot be read or is empty.
    """

    def __init__(self, password_file: Path, username: str | None = None) -> None:
        self._password_file = password_file
        self._username = username
        self._password = self._read()

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """What `AUTH` is sent with."""
        # In the middle of a rotation the sentinels say whether the last one still counts.
        with contextlib.suppress(ConfigError):
            self._password = self._read()
        return (self._password,) if self._username is None else (self._username, self._password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """See `get_credentials`."""
        return await asyncio.to_thread(self.get_credentials)

    def _read(self) -> str:
        password = read_secret_file(self._password_file, "redis_sentinel_password_file")
        assert password is not None
        return password


def sentinel_login(settings: RedisSettings) -> SentinelLogin | None:
    """What the settings say; None where sentinels want no password. Reads the file.

    Raises:
        ConfigError: The file cannot be read or is empty.
    """
    password_file = settings.redis_sentinel_password_file
    return (
        None
        if password_file is None
        else SentinelLogin(password_file, settings.redis_sentinel_username)
    )
