"""Keys of the bucket: from two files, or found as Amazon's own clients find them."""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from html import unescape
from pathlib import Path
from typing import Final
from urllib.parse import urlencode, urlsplit

import msgspec
from lmcache_core.errors import UnavailableError
from lmcache_core.security import TokenFile

from lmcache_storage.s3.connections import FAILURES, ConnectionPool, Origin, why
from lmcache_storage.s3.signature import Credentials

REFRESH_S: Final = 300.0
"""A session's key is replaced this long before it ends."""
MAX_ANSWER_BYTES: Final = 64 << 10
SESSION_NAME: Final = "lmcache-storage"
CONTAINER_HOST: Final = "169.254.170.2"
MACHINE_URL: Final = "http://169.254.169.254"
MACHINE_TOKEN_S: Final = 600
_KEY_PART: Final = re.compile(
    r"<(AccessKeyId|SecretAccessKey|SessionToken|Expiration)>([^<]{1,8192})<"
)
_ROLE: Final = re.compile(r"[A-Za-z0-9_+=,.@-]{1,256}")
_MACHINE_ROLES: Final = "/latest/meta-data/iam/security-credentials/"


class _SessionKey(msgspec.Struct, rename="pascal"):
    """A session's key, as containers and machines answer it."""

    access_key_id: str
    secret_access_key: str
    token: str
    expiration: str


class KeyFiles:
    """The current key of two files.

    Args:
        access_key: File of its id; re-read when it changes.
        secret_key: File of its secret; re-read when it changes.
    """

    def __init__(self, access_key: TokenFile, secret_key: TokenFile) -> None:
        self._access_key = access_key
        self._secret_key = secret_key

    def find(self, limit_s: float) -> Credentials:
        """Return the key."""
        return Credentials(self._access_key.text, self._secret_key.text)


class KeyChain:
    """The first key of: `AWS_ACCESS_KEY_ID` and its companions, a web identity, the role of the
    container, the role of the machine. Thread-safe. A session's key is kept until shortly before it
    ends.

    Args:
        environ: Variables of this process.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        region: str,
        tls: ssl.SSLContext,
        environ: Mapping[str, str],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._region = region
        self._tls = tls
        self._environ = environ
        self._clock = clock
        self._lock = threading.Lock()
        self._held: Credentials | None = None

    def find(self, limit_s: float) -> Credentials:
        """Return the current key, within `limit_s` seconds.

        Raises:
            UnavailableError: There is none, or its source does not answer.
        """
        ends_at = time.monotonic() + limit_s
        if not self._lock.acquire(timeout=max(0.0, limit_s)):
            raise UnavailableError("credentials: no answer in time")
        try:
            held = self._held
            if held is None or self._is_past(held, REFRESH_S):
                try:
                    held = self._held = self._ask(ends_at)
                except UnavailableError:
                    if held is None or self._is_past(held, 0):
                        raise
            return held
        finally:
            self._lock.release()

    def _is_past(self, held: Credentials, early_s: float) -> bool:
        return held.expires_at is not None and held.expires_at - early_s <= self._clock()

    def _ask(self, ends_at: float) -> Credentials:
        environ = self._environ

        def fetch(method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
            return _fetch(method, url, headers, body, self._tls, ends_at)

        access_key, secret_key = (
            environ.get(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY")
        )
        if access_key and secret_key:
            return Credentials(access_key, secret_key, environ.get("AWS_SESSION_TOKEN") or None)
        if environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") and environ.get("AWS_ROLE_ARN"):
            return self._of_web_identity(fetch)
        url = environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
        if relative := environ.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
            url = f"http://{CONTAINER_HOST}{relative}"
        if url:
            token = environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN")
            if file := environ.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
                token = _text_of(file)
            return _session_key(
                fetch("GET", url, {} if token is None else {"authorization": token}), url
            )
        return _of_machine(
            environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", MACHINE_URL).rstrip("/"), fetch
        )

    def _of_web_identity(self, fetch: Callable[..., bytes]) -> Credentials:
        environ = self._environ
        url = environ.get("AWS_ENDPOINT_URL_STS") or f"https://sts.{self._region}.amazonaws.com"
        form = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": environ["AWS_ROLE_ARN"],
            "RoleSessionName": environ.get("AWS_ROLE_SESSION_NAME") or SESSION_NAME,
            "WebIdentityToken": _text_of(environ["AWS_WEB_IDENTITY_TOKEN_FILE"]),
        }
        answer = fetch(
            "POST",
            url.rstrip("/") + "/",
            {"content-type": "application/x-www-form-urlencoded"},
            urlencode(form).encode(),
        ).decode(errors="replace")
        found = {match[1]: match[2] for match in _KEY_PART.finditer(answer)}
        try:
            return Credentials(
                found["AccessKeyId"],
                unescape(found["SecretAccessKey"]),
                unescape(found["SessionToken"]),
                _seconds(found["Expiration"]),
            )
        except (KeyError, ValueError):
            raise UnavailableError(f"credentials: {url} answered without a key") from None


def _of_machine(url: str, fetch: Callable[..., bytes]) -> Credentials:
    asked_for = {"x-aws-ec2-metadata-token-ttl-seconds": str(MACHINE_TOKEN_S)}
    try:
        token = fetch("PUT", f"{url}/latest/api/token", asked_for).decode("ascii", "replace")
    except UnavailableError as exc:
        raise UnavailableError(
            f"credentials: none found; set s3_access_key_file and s3_secret_key_file ({exc})"
        ) from exc
    shown = {"x-aws-ec2-metadata-token": token}
    roles = fetch("GET", url + _MACHINE_ROLES, shown).decode("ascii", "replace").split()
    if not roles or not _ROLE.fullmatch(roles[0]):
        raise UnavailableError("credentials: none found, the machine has no role")
    where = f"{url}{_MACHINE_ROLES}{roles[0]}"
    return _session_key(fetch("GET", where, shown), where)


def _session_key(answer: bytes, url: str) -> Credentials:
    try:
        key = msgspec.json.decode(answer, type=_SessionKey)
        ends_at = _seconds(key.expiration)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        raise UnavailableError(f"credentials: {url} answered without a key") from None
    return Credentials(key.access_key_id, key.secret_access_key, key.token, ends_at)


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise UnavailableError(f"credentials: {path!r} cannot be read: {why(exc)}") from exc


def _fetch(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes,
    tls: ssl.SSLContext,
    ends_at: float,
) -> bytes:
    """Return the body of an answer.

    Raises:
        UnavailableError: No success in time, or an answer of more than `MAX_ANSWER_BYTES`.
    """
    parts = urlsplit(url)
    where = f"credentials: {parts.scheme}://{parts.netloc}"
    try:
        origin = Origin(parts.hostname or "", parts.port, tls if parts.scheme == "https" else None)
        pool = ConnectionPool(origin)
        all_headers = {"host": origin.host_header, **headers}
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        try:
            sent = [body] if body else []
            with pool.request(method, target, all_headers, sent, ends_at) as answer:
                data = answer.read(MAX_ANSWER_BYTES)
                if answer.status != 200:
                    raise UnavailableError(f"{where}: status {answer.status}")
                return data
        finally:
            pool.close()
    except (*FAILURES, ValueError) as exc:
        raise UnavailableError(f"{where}: {why(exc)}") from exc
