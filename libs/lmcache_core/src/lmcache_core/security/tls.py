"""TLS from files: new connections use the current content of the files."""

from __future__ import annotations

import base64
import datetime
import logging
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_core._typing import override
from lmcache_core.errors import ConfigError
from lmcache_core.security.handshakes import CountedObject
from lmcache_core.security.watched_files import Reloaded

logger = logging.getLogger(__name__)

_PEM = re.compile(r"-----BEGIN (?:X509 |TRUSTED )?CERTIFICATE-----(.*?)-----END ", re.DOTALL)
"""The labels that OpenSSL accepts for a server's certificate."""
_TIME = rb"(?:\x17\x0d|\x18\x0f)(\d{12,14})Z"
_VALIDITY = re.compile(rb"\x30[\x1e\x20\x22]" + _TIME + _TIME)
"""Two times, each a UTCTime until 2049 and a GeneralizedTime from 2050 on: RFC 5280, section
4.1.2.5.
"""


_KINDS = ("certificate", "key", "certificates of authorities")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of one side.

    Attributes:
        cert_file: Its certificate, followed by the intermediate ones.
        key_file: The certificate's key, without a passphrase; None if it is in the same file.
        ca_file: Authorities that must have signed the other side's certificate. None: a server
            requests no certificate, a client trusts the system's authorities.
        options: Names of the options that name these files, for errors.
    """

    cert_file: Path | None = None
    key_file: Path | None = None
    ca_file: Path | None = None
    options: tuple[str, str, str] | None = None

    @classmethod
    def of(cls, settings: object, *options: str) -> TlsFiles:
        """Return the files that options name.

        Args:
            settings: Has these options; values are paths, text or None.
            options: Names of the options for certificate, key and authorities.
        """
        values = (getattr(settings, name) for name in options)
        cert, key, ca = (None if value is None else Path(value) for value in values)
        return cls(cert, key, ca, (options[0], options[1], options[2]))

    def named(self, index: int) -> str:
        """Return a file with the name of its option: 0 the certificate, 1 its key, 2 the
        authorities.
        """
        path = (self.cert_file, self.key_file, self.ca_file)[index]
        return (
            f"{_KINDS[index]} {path}" if self.options is None else f"{self.options[index]}={path}"
        )

    @property
    def paths(self) -> list[Path]:
        """The paths that are set."""
        return [path for path in (self.cert_file, self.key_file, self.ca_file) if path is not None]


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS settings of a client of lm+tls://.

    Attributes:
        context: Trusted authorities and the client's certificate.
        name: Name in the servers' certificates; None: the host of the connection.
        only_encrypted: Whether servers named by others, such as peers, get tokens only over
            encrypted connections.
    """

    context: ssl.SSLContext
    name: str | None = None
    only_encrypted: bool = False


class ReloadingContext(ssl.SSLContext):
    """Delegates each new connection to a context with the current content of the files, as far as
    it is valid; existing connections keep theirs.

    Files are checked when a connection begins, at most once a second. Settings of this object
    itself affect no connection: it trusts no authority and has no certificate, so that bypassing
    its methods allows no connection.

    Attributes:
        if_silent: See `why_silent`.
    """

    _contexts: Reloaded[ssl.SSLContext]
    if_silent: str

    def __new__(cls, build: Callable[[], ssl.SSLContext], files: TlsFiles) -> ReloadingContext:
        """Create a context for `server_context` and `client_context`."""
        context = super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)
        context._contexts = Reloaded(build, files.paths, "certificates")
        context.if_silent = ""
        return context

    @override
    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        return self._contexts.current().wrap_bio(*args, **kwargs)

    @override
    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        return self._contexts.current().wrap_socket(*args, **kwargs)


def server_context(files: TlsFiles) -> ReloadingContext:
    """Return the context of a server: TLS 1.3, without session tickets, since a client that resumes
    a session does not show its certificate again.

    Args:
        files: Files with a `cert_file`. With a `ca_file` clients must show a certificate.

    Raises:
        ConfigError: A file cannot be read or does not match. The text names options and files, and
            no content.
    """
    assert files.cert_file is not None, "a server needs a certificate"

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.sslobject_class = CountedObject
        _load_identity(context, files)
        if files.ca_file is not None:
            _load_trusted(context, files)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    return ReloadingContext(build, files)


def client_context(files: TlsFiles | None = None) -> ReloadingContext:
    """Return the context of a client. The server's certificate, and the name in it, are always
    checked.

    Args:
        files: Trusted authorities, and the certificate for servers that request one.

    Raises:
        ConfigError: A file cannot be read or does not match. The text names options and files, and
            no content.
    """
    wanted = files or TlsFiles()

    def build() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if wanted.ca_file is None:
            context.load_default_certs()
        else:
            _load_trusted(context, wanted)
        if wanted.cert_file is not None:
            _load_identity(context, wanted)
        return context

    context = ReloadingContext(build, wanted)
    if wanted.options is not None and wanted.cert_file is None:
        context.if_silent = (
            f"; if it requires a certificate of its callers, set {wanted.options[0]}"
        )
    elif wanted.options is not None:
        context.if_silent = (
            "; if it requires a certificate of its callers, one of its authorities must have signed"
            f" that in {wanted.options[0]}"
        )
    return context


def why_silent(context: ssl.SSLContext | None) -> str:
    """Return the end of an error about a server that completed the handshake and then closed the
    connection without a word.

    That is all a client sees if its certificate is missing or not trusted: under TLS 1.3 its
    handshake has finished by then, and event loops drop the alert that would say so.

    Args:
        context: Context of the connection; None if it was not encrypted.
    """
    return context.if_silent if isinstance(context, ReloadingContext) else ""


def no_context() -> ssl.SSLContext:
    """Return a context that trusts no authority, for URLs without TLS where a library needs one."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def certificate_validity(path: Path) -> tuple[float, float]:
    """Return the Unix times at which the first certificate of a PEM file begins to be valid, and
    at which it expires.

    Raises:
        ConfigError: The file cannot be read or contains no certificate.
    """
    try:
        pem = _PEM.search(path.read_text(encoding="latin-1"))
        times = None if pem is None else _VALIDITY.search(base64.b64decode(pem[1]))
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"certificate {path}: {_reason(exc)}; it must hold a certificate in PEM"
        ) from exc
    if times is None:
        raise ConfigError(f"certificate {path}: not PEM; it must hold a certificate in PEM")
    return _unix_s(times[1].decode()), _unix_s(times[2].decode())


def validity_problem(begins_s: float, ends_s: float) -> str:
    """Return why peers that verify a certificate refuse it now, "" if its time is no reason.

    Args:
        begins_s: When it begins to be valid, Unix time.
        ends_s: When it expires.
    """
    now_s = time.time()
    if now_s < begins_s:
        return f"is not valid before {_day_of(begins_s)}"
    return f"ended on {_day_of(ends_s)}" if now_s > ends_s else ""


def _unix_s(text: str) -> float:
    """Return a time of a certificate as Unix time."""
    if len(text) == 12:  # RFC 5280: 50 to 99 are of the last century
        text = ("19" if text >= "50" else "20") + text
    return datetime.datetime.strptime(text + "+0000", "%Y%m%d%H%M%S%z").timestamp()


def _day_of(unix_s: float) -> str:
    return f"{datetime.datetime.fromtimestamp(unix_s, datetime.UTC):%Y-%m-%d}"


def _load_identity(context: ssl.SSLContext, files: TlsFiles) -> None:
    assert files.cert_file is not None
    key = files.cert_file if files.key_file is None else files.key_file
    try:
        context.load_cert_chain(files.cert_file, key, password=_refuse_passphrase)
    except (OSError, ValueError) as exc:
        names, rule = files.named(0), "it must hold a certificate and its key in PEM"
        if files.key_file is not None:
            names, rule = f"{names} with {files.named(1)}", "both must be PEM and belong together"
        raise ConfigError(f"{names}: {_reason(exc)}; {rule}") from exc
    # not fatal: it may be replaced at any time, and some callers need none
    if problem := validity_problem(*certificate_validity(files.cert_file)):
        logger.warning(
            "peers that verify this certificate refuse it: file=%s reason=%s",
            files.cert_file,
            problem,
        )


def _load_trusted(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_verify_locations(files.ca_file)
    except (OSError, ValueError) as exc:
        raise ConfigError(
            f"{files.named(2)}: {_reason(exc)}; it must hold at least one certificate in PEM"
        ) from exc


def _refuse_passphrase() -> str:
    """Raise an error; otherwise OpenSSL would prompt on the terminal, and wait."""
    raise ValueError("the key has a passphrase")


def _reason(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError):
        return (exc.reason or "not PEM").lower().replace("_", " ")
    return (exc.strerror or str(exc)) if isinstance(exc, OSError) else str(exc)
