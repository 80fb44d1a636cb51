"""Which format a lookup service is spoken to in: MessagePack, or JSON where the service is one
version older.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

from lmcache_core.lookup.requests import JSON, MSGPACK
from lmcache_core.wire.json_http import JsonHttpClient, Reply

T = TypeVar("T")

JSON_ONLY_S: Final = 60.0
"""After a service has not taken MessagePack, so long nothing else than JSON is sent: it may be
replaced by a newer one at any time.
"""

_DOES_NOT_TAKE_IT: Final = (400, 415, 422)
"""Status of a service that cannot read a body. It may also mean that the question is wrong: then
it is refused as JSON too.
"""

_TAKES_BOTH: Final = {"accept": f"{MSGPACK}, {JSON};q=0.5"}


class FormatChooser:
    """Sends questions in the best format that the service takes.

    Args:
        http: How the service is reached.
        clock: Seconds, monotonic.
    """

    def __init__(self, http: JsonHttpClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._http = http
        self._clock = clock
        self._json_until = float("-inf")

    async def ask(
        self,
        method: str,
        path: str,
        packed: msgspec.Struct,
        plain: Callable[[], msgspec.Struct],
        *,
        timeout_s: float | None = None,
    ) -> Reply:
        """Ask, a second time as JSON if the service cannot read MessagePack.

        Args:
            method: HTTP method.
            path: Below the base URL.
            packed: The body for MessagePack.
            plain: Makes the body for JSON.
            timeout_s: Limit on both attempts together, instead of the client's.

        Returns:
            An answer of success.

        Raises:
            UnavailableError: No answer in time, or a refusal.
        """
        begin = self._clock()
        limit_s = self._http.timeout_s if timeout_s is None else timeout_s
        if begin >= self._json_until:
            headers = {"content-type": MSGPACK, **_TAKES_BOTH}
            reply = await self._http.exchange(
                method, path, msgspec.msgpack.encode(packed), headers, timeout_s=limit_s
            )
            if reply.is_success:
                return reply
            if reply.status not in _DOES_NOT_TAKE_IT:
                raise self._http.refused(reply)
        body = msgspec.json.encode(plain())
        left_s = max(limit_s - (self._clock() - begin), 0.0)
        reply = await self._http.exchange(
            method, path, body, {"content-type": JSON, **_TAKES_BOTH}, timeout_s=left_s
        )
        if not reply.is_success:
            raise self._http.refused(reply)
        # Only now it is the format that it did not take, and not the question.
        if begin >= self._json_until:
            self._json_until = self._clock() + JSON_ONLY_S
        return reply

    def decode(self, reply: Reply, kind: type[T]) -> T:
        """Read an answer in the format that it has, checking every bound that `kind` states.

        Raises:
            UnavailableError: It is not a `kind`.
        """
        if not is_packed(reply):
            return self._http.decode(reply.data, kind)
        try:
            return msgspec.msgpack.decode(reply.data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise self._http.unusable(str(exc)) from exc


def is_packed(reply: Reply) -> bool:
    """Whether an answer is MessagePack."""
    return reply.content_type.partition(";")[0].strip().lower() == MSGPACK
