"""The keys shared by broker and peers, in their text form: `id:base64`, the first one signs.

To rotate: append the new key everywhere, then move it to the front at the broker, then remove the
old one everywhere. No restart is needed.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from lmcache_core.errors import ConfigError
from lmcache_core.security.watched_files import Reloaded, read_bounded

MAX_TICKET_KEYS: Final = 16
MIN_SECRET_BYTES: Final = 16
MAX_SECRET_BYTES: Final = 256
MAX_KEY_FILE_BYTES: Final = 16 * 1024

_KEY_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")


class TicketKeyFile(Reloaded[dict[str, bytes]]):
    """Key id to secret, with the current content of a file, the signing key first.

    Raises:
        ConfigError: It cannot be read or an entry is wrong. Shows no secret.
    """

    def __init__(self, path: Path, option: str = "") -> None:
        super().__init__(partial(read_ticket_keys, path, option), [path], "ticket keys")
        self._path = path

    def __repr__(self) -> str:
        return f"TicketKeyFile({str(self._path)!r})"


TicketKeys = Mapping[str, bytes] | TicketKeyFile
"""Key id to secret, 16 to 256 bytes each, the signing key first: fixed keys, or those of a file."""


def current_keys(keys: TicketKeys) -> Mapping[str, bytes]:
    """Return the keys that are currently valid."""
    return keys.current() if isinstance(keys, TicketKeyFile) else keys


def parse_ticket_keys(entries: Iterable[str], source: str = "ticket_keys") -> dict[str, bytes]:
    """Parse `id:base64` entries, in order.

    Args:
        entries: Standard or URL-safe base64, padded or not.
        source: Name of the source in errors.

    Raises:
        ConfigError: An entry is wrong, an id appears twice, or there are none or too many. Shows no
            secret.
    """
    keys: dict[str, bytes] = {}
    for index, entry in enumerate(entries):
        where = f"{source}[{index}]"
        if index >= MAX_TICKET_KEYS:
            raise ConfigError(
                f"{source}: more than {MAX_TICKET_KEYS} keys; drop those that no longer sign"
            )
        key_id, separator, encoded = entry.strip().partition(":")
        if not separator:
            raise ConfigError(
                f"{where}: not of the form id:base64; make one with `echo k1:$(openssl rand -base64"
                " 32)`"
            )
        secret = _decode(encoded, where)
        check_key(key_id, secret, where)
        if key_id in keys:
            raise ConfigError(f"{where}: the id {key_id!r} appears twice; give each key its own")
        keys[key_id] = secret
    if not keys:
        raise ConfigError(f"{source}: no key; add one of the form id:base64")
    return keys


def read_ticket_keys(path: str | Path, option: str = "") -> dict[str, bytes]:
    """Read a key file: one `id:base64` per line; empty lines and lines that start with `#` are
    skipped.

    Args:
        option: Name of the option that names it, for errors.

    Raises:
        ConfigError: The file cannot be read or an entry is wrong. Shows no secret.
    """
    source = f"{option}={path}" if option else f"ticket key file {path}"
    data = read_bounded(Path(path), source, MAX_KEY_FILE_BYTES, "drop keys that no longer sign")
    try:
        text = data.decode("ascii")
    except UnicodeDecodeError:
        raise ConfigError(f"{source}: not ASCII; write one id:base64 a line") from None
    lines = (line.strip() for line in text.splitlines())
    return parse_ticket_keys((line for line in lines if line and not line.startswith("#")), source)


def check_key(key_id: str, secret: bytes, where: str) -> None:
    """Check the bounds of one key.

    Raises:
        ConfigError: The id is malformed, or the secret is too short or too long.
    """
    if _KEY_ID.fullmatch(key_id) is None:
        raise ConfigError(f"{where}: a key's id matches {_KEY_ID.pattern}; rename it")
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        limits = f"{MIN_SECRET_BYTES} to {MAX_SECRET_BYTES}"
        raise ConfigError(
            f"{where}: the secret of {key_id!r} has {len(secret)} bytes; give it {limits} random"
            " ones"
        )


def _decode(encoded: str, where: str) -> bytes:
    text = encoded.strip().rstrip("=").replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError(
            f"{where}: the secret is not base64; make one with `openssl rand -base64 32`"
        ) from None
