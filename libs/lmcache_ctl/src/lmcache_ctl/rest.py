"""What services answer over REST."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import httpx
import msgspec
from lmcache_core.security import TlsFiles, client_context
from lmcache_core.wire.bearer import context_for

from lmcache_ctl.errors import CtlError

TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 64 << 20
MAX_ERRORS_TOLD = 4


class RestService:
    """Asks one service.

    Args:
        name: What it is, for people.
        url: Its REST address.
        token_file: Holds the token to show; None for none.
        tls: `CA[,CERT[,KEY]]`, PEM files: whom to trust, and what to show; None: whom this machine trusts.

    Raises:
        ConfigError: One of them cannot be read or does not fit.
    """

    def __init__(self, name: str, url: str, token_file: Path | None, tls: str | None = None) -> None:
        self._name = name
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._context = tls_context(url, tls)

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer's JSON.

        Raises:
            CtlError: It does not answer, refuses, or answers something else; the text is the service's own where it gives one.
        """
        headers = self._headers()
        try:
            with httpx.Client(timeout=TIMEOUT_S, headers=headers, verify=self._context, trust_env=False) as client:
                status, data = self._read(client, method, path, body)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise CtlError(
                f"no answer from {self._url}: {str(exc) or type(exc).__name__}; is a {self._name} listening there (--url)?"
            ) from exc
        try:
            answer: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise CtlError(f"{self._url}{path} answered {status}; is that the REST port of a {self._name}?") from exc
        if status >= httpx.codes.BAD_REQUEST:
            raise CtlError(f"{self._url}{path} answered {status}: {_told(answer)}")
        return answer

    def _headers(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self._token_file.read_text(encoding='utf-8').strip()}"}
        except (OSError, UnicodeDecodeError) as exc:
            raise CtlError(f"cannot read the token file {self._token_file}: {exc}") from exc

    def _read(self, client: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
        data = bytearray()
        with client.stream(method, self._url + path, json=body) as response:
            for piece in response.iter_bytes():
                data += piece
                if len(data) > MAX_ANSWER_BYTES:
                    raise CtlError(f"{self._url}{path} answered more than {MAX_ANSWER_BYTES} bytes")
            return response.status_code, bytes(data)


def tls_context(url: str, tls: str | None) -> ssl.SSLContext:
    """What a service at that URL is verified with; `tls` as for `RestService`, whose errors it raises."""
    if tls is None:
        return context_for(url, None)
    ca, cert, key = (*(Path(name) if name else None for name in tls.split(",", 2)), None, None)[:3]
    return context_for(url, client_context(TlsFiles(cert, key, ca)))


def _told(problem: dict[str, Any]) -> str:
    """What a problem says: of a question that is not valid, what is wrong where."""
    errors = problem.get("errors")
    wrong = (
        [f"{error.get('at')}: {error.get('message')}" for error in errors if isinstance(error, dict)] if isinstance(errors, list) else []
    )
    return "; ".join(wrong[:MAX_ERRORS_TOLD]) or str(problem.get("detail") or problem.get("title"))
