"""Callers: the tenant and role of each bearer token, and the rate of a caller's requests. The token
file:

```yaml
tokens:
  - {name: vllm-prod, tenant: prod, role: client, token_sha256: 2f1a…}
  - {name: operator, tenant: prod, role: admin, token: at least sixteen characters}
```
Only digests are kept in memory. A token is high-entropy random text, so one SHA-256 is enough: key
stretching would add nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, Literal

import msgspec
import yaml

from lmcache_core.errors import AuthenticationError, ConfigError
from lmcache_core.names import validate_tenant
from lmcache_core.security.watched_files import Reloaded, read_bounded
from lmcache_core.strict_yaml import DuplicateNameError, load_yaml

Role = Literal["client", "storage", "admin"]

MAX_TOKEN_FILE_BYTES: Final = 1 << 20
MAX_TOKENS: Final = 1024
MIN_TOKEN_CHARS: Final = 16
MAX_TOKEN_CHARS: Final = 512

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,127}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller.

    Attributes:
        tenant: The tenant of everything that it stores and reads.
        role: `client` stores and reads. `storage`, for storage servers, also speaks for other
            tenants' chunks: see `speaks_for_all_tenants`. `admin` may also clear, evict and drain.
        name: For logs; unique in its token file. Never a secret.
    """

    tenant: str
    role: Role
    name: str


def speaks_for_all_tenants(role: str) -> bool:
    """Return whether a caller with that role may hold, hand over and report the chunks of every
    tenant.
    """
    return role in ("storage", "admin")


SHARED_OWNER: Final = "*"
"""Owner of what serves every tenant: leases and registrations of the roles that speak for all
tenants. No tenant can have this name.
"""


def owner_of(principal: Principal) -> str:
    """Return the owner of the leases and registrations that a caller takes, so that no tenant can
    take, replace or end those of another one, or of a server of all tenants.
    """
    return SHARED_OWNER if speaks_for_all_tenants(principal.role) else principal.tenant


_ANONYMOUS: Final = Principal("default", "admin", "anonymous")


class _TokenEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    tenant: str
    role: Role
    token_sha256: str | None = None
    token: str | None = None


class _TokenFile(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    tokens: list[_TokenEntry]


@dataclass(frozen=True, slots=True)
class _Credential:
    digest: bytes = field(repr=False)
    principal: Principal


class TokenTable:
    """Maps a bearer token to its principal. Build it with `from_file` or `anonymous`.

    Safe to share between threads: a reload swaps one immutable tuple.
    """

    def __init__(self, file: Reloaded[tuple[_Credential, ...]] | None, source: str = "") -> None:
        self._file = file
        self._source = source
        self._credentials = () if file is None else file.current()

    @classmethod
    def from_file(cls, path: str | Path, option: str = "") -> TokenTable:
        """Read a token file.

        Args:
            option: Name of the option that names it, for errors.

        Raises:
            ConfigError: It cannot be read, or an entry is wrong. The text names file, entry and
                fix, and shows no secret.
        """
        source = Path(path)
        read = partial(_read, source, option)
        return cls(Reloaded(read, [source], "tokens", interval_s=0.0), str(source))

    @classmethod
    def anonymous(cls) -> TokenTable:
        """Return a table that accepts any token or none, for `Principal("default", "admin",
        "anonymous")`.
        """
        return cls(None)

    @property
    def is_anonymous(self) -> bool:
        """Whether every caller is admitted."""
        return self._file is None

    def authenticate(self, token: str | None) -> Principal:
        """Return the owner of a token. The time depends on the number of entries, not on which one
        matches.

        Raises:
            AuthenticationError: The token is missing or unknown.
        """
        if self._file is None:
            return _ANONYMOUS
        if not token:
            raise AuthenticationError("a bearer token is required")
        if len(token) > MAX_TOKEN_CHARS:
            raise AuthenticationError("the token is unknown")
        digest = _digest(token)
        found: Principal | None = None
        for credential in self._credentials:
            if hmac.compare_digest(credential.digest, digest):
                found = credential.principal
        if found is None:
            raise AuthenticationError("the token is unknown")
        return found

    def reload_if_changed(self) -> None:
        """Re-read the file if it has changed; see `Reloaded`. Does file I/O."""
        if self._file is not None:
            self._credentials = self._file.current()

    def __repr__(self) -> str:
        if self.is_anonymous:
            return "TokenTable(anonymous)"
        return f"TokenTable({self._source!r}, num_tokens={len(self._credentials)})"


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def _read(path: Path, option: str) -> tuple[_Credential, ...]:
    """Return the entries of a token file. Errors are raised `from None`: the parsers' own messages
    quote the file, and with it tokens.
    """
    where = f"{option}={path}" if option else f"token file {path}"
    data = read_bounded(path, where, MAX_TOKEN_FILE_BYTES, "remove tokens that are not used")
    try:
        raw = load_yaml(data)
    except DuplicateNameError as exc:
        raise ConfigError(f"{where}: line {exc.line} has a name twice; keep one of them") from None
    except yaml.MarkedYAMLError as exc:
        line = exc.problem_mark.line + 1 if exc.problem_mark is not None else 1
        raise ConfigError(f"{where}: line {line} is not YAML; correct it") from None
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: impossible dates and numbers
        raise ConfigError(f"{where}: not YAML; correct it") from None
    try:
        entries = msgspec.convert(raw, _TokenFile).tokens
    except msgspec.ValidationError as exc:
        raise ConfigError(
            f"{where}: {exc}; an entry is {{name, tenant, role, token_sha256 | token}}"
        ) from None
    if not 1 <= len(entries) <= MAX_TOKENS:
        raise ConfigError(f"{where}: tokens has {len(entries)} entries; list 1 to {MAX_TOKENS}")
    credentials = tuple(
        _credential(entry, f"{where}: tokens[{index}]") for index, entry in enumerate(entries)
    )
    if len({credential.principal.name for credential in credentials}) != len(credentials):
        raise ConfigError(f"{where}: two entries share a name; give each its own")
    if len({credential.digest for credential in credentials}) != len(credentials):
        raise ConfigError(f"{where}: two entries share a token; give each its own")
    return credentials


def _credential(entry: _TokenEntry, where: str) -> _Credential:
    if _NAME.fullmatch(entry.name) is None:
        raise ConfigError(f"{where}: name must match {_NAME.pattern}; rename it")
    where = f"{where} ({entry.name})"
    try:
        tenant = validate_tenant(entry.tenant)
    except ValueError as exc:
        raise ConfigError(f"{where}: tenant {entry.tenant[:80]!r}: {exc}; rename it") from None
    if (entry.token is None) == (entry.token_sha256 is None):
        raise ConfigError(f"{where}: give exactly one of token and token_sha256")
    if entry.token_sha256 is not None:
        if _DIGEST.fullmatch(entry.token_sha256) is None:
            raise ConfigError(
                f"{where}: token_sha256 is not 64 hex digits; write the output of `sha256sum` over"
                " the token without a newline"
            )
        digest = bytes.fromhex(entry.token_sha256)
    else:
        token = entry.token or ""
        if (
            not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS
            or not token.isascii()
            or not token.isprintable()
            or " " in token
        ):
            limits = f"{MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS}"
            raise ConfigError(
                f"{where}: token must be {limits} visible ASCII characters; make one with `openssl"
                " rand -hex 32`"
            )
        digest = _digest(token)
    return _Credential(digest, Principal(tenant, entry.role, entry.name))


MAX_BUCKETS: Final = 4096


class RateLimiter:
    """One bucket per caller, which holds one second's requests, at least one, and refills evenly.

    Beyond `MAX_BUCKETS` callers the one that was idle longest is forgotten, and gets a full bucket
    if it returns. For one thread.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        assert per_second > 0
        self._per_second = per_second
        self._capacity = max(per_second, 1.0)
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, caller: str) -> float:
        """Take one request from the caller's bucket.

        Returns:
            0 if the request may be served; otherwise nothing was taken, and one may be in this many
                seconds.
        """
        now = self._clock()
        level, at = self._buckets.pop(caller, (self._capacity, now))
        level = min(self._capacity, level + (now - at) * self._per_second)
        is_served = level >= 1.0
        self._buckets[caller] = (level - is_served, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return 0.0 if is_served else (1.0 - level) / self._per_second
