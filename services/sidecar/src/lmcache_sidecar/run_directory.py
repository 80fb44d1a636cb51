"""The default directory for socket and arena, whose path anybody can guess."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lmcache_core.errors import ConfigError


def make_private(directory: Path) -> None:
    """Make a directory that this user alone may enter, or make sure that it is one.

    In a shared temporary directory another user may have made it first: whoever owns it could put a
    socket or memory of his own there.

    Raises:
        ConfigError: It cannot be made, is a link, belongs to somebody else, or others may enter it.
    """
    fix = "set socket_path and arena_path to a directory of your own"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
    except OSError as exc:
        raise ConfigError(f"{directory}: {exc.strerror}; {fix}") from exc
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.getuid()
        or stat.S_IMODE(status.st_mode) & 0o077
    ):
        raise ConfigError(
            f"{directory} is not a directory that belongs to this user and that nobody else may"
            f" enter; {fix}"
        )
