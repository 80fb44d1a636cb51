"""The bearer token that a client shows, from a file that may be replaced while it runs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from lmcache_core.errors import ConfigError
from lmcache_core.security.watched_files import WatchedFiles

logger = logging.getLogger(__name__)

MAX_TOKEN_FILE_BYTES: Final = 4096


class TokenFile:
    """A token and where it comes from. A file that goes bad leaves the last good token in force,
    and is reported once per change.

    Args:
        path: Holds the token and nothing else but white space around it.
        option: Name of the option, for errors.

    Raises:
        ConfigError: The file cannot be read or holds no token. Shows none of it.
    """

    def __init__(self, path: Path, option: str) -> None:
        self._path = path
        self._option = option
        self._watch = WatchedFiles([path])
        self._text = self._read()

    @property
    def text(self) -> str:
        """The token as the file has it now; looks at the file now and then."""
        if self._watch.have_changed():
            try:
                self._text = self._read()
            except ConfigError as exc:
                logger.warning("%s; the token read before is shown on", exc)
            else:
                logger.info("%s has been replaced: showing the new token", self._option)
        return self._text

    def __repr__(self) -> str:
        return f"TokenFile({str(self._path)!r})"

    def _read(self) -> str:
        where = f"{self._option}={str(self._path)!r}"
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_TOKEN_FILE_BYTES + 1)
        except OSError as exc:
            raise ConfigError(
                f"{where} cannot be read: {exc.strerror or exc}; create it or correct the path"
            ) from exc
        if len(data) > MAX_TOKEN_FILE_BYTES:
            raise ConfigError(
                f"{where} has more than {MAX_TOKEN_FILE_BYTES} bytes: write the token and nothing"
                " around it"
            )
        text = data.decode("latin-1").strip()
        if not text:
            raise ConfigError(f"{where} is empty: write the token into it")
        if not (text.isascii() and text.isprintable() and " " not in text):
            raise ConfigError(
                f"{where} holds something else than visible ASCII characters: write the token and"
                " nothing around it"
            )
        return text


ShownToken = str | TokenFile | None
"""What a client shows: a token that stays, one from a file, or none."""


def token_text(token: ShownToken) -> str | None:
    """The token to show now."""
    return token.text if isinstance(token, TokenFile) else token
