"""What calls over REST have in common: whom to trust, and what a refusal says."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any, Final

from lmcache_core.errors import ConfigError
from lmcache_core.security import TlsFiles, client_context

from lmcache_ctl.errors import UsageError

MAX_ERRORS_TOLD: Final = 4
MAX_TLS_FILES: Final = 3


def tls_context(tls: str | None) -> ssl.SSLContext:
    """What `CA[,CERT[,KEY]]` says (PEM files: whom to trust, and what to show); None: whom this
    machine trusts.

    Raises:
        UsageError: More than three names, or one cannot be read, or they do not fit.
    """
    if tls is None:
        return client_context()
    return client_context(tls_files(tls))


def tls_files(tls: str) -> TlsFiles:
    """The files that `CA[,CERT[,KEY]]` names; errors as above."""
    names = tls.split(",")
    if len(names) > MAX_TLS_FILES:
        raise UsageError(f"tls={tls!r} names {len(names)} files: write CA[,CERT[,KEY]]")
    ca, cert, key = (*(Path(name) if name else None for name in names), None, None)[:MAX_TLS_FILES]
    if cert is None and key is not None:
        raise UsageError(f"tls={tls!r} names a key and no certificate: write CA,CERT,KEY")
    files = TlsFiles(cert, key, ca)
    try:
        client_context(files)
    except ConfigError as exc:
        raise UsageError(f"tls={tls!r}: {exc}") from exc
    return files


def problem_text(problem: dict[str, Any]) -> str:
    """What a problem (RFC 9457) says: of a question that is not valid, what is wrong where."""
    errors = problem.get("errors")
    wrong = (
        [f"{one.get('at')}: {one.get('message')}" for one in errors if isinstance(one, dict)]
        if isinstance(errors, list)
        else []
    )
    return "; ".join(wrong[:MAX_ERRORS_TOLD]) or str(
        problem.get("detail") or problem.get("title") or ""
    )
