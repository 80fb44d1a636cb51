"""A ticket lets one requester of one tenant pull from one instance, until it expires.

`v1.<base64url payload>.<base64url HMAC-SHA256>`, unpadded; the payload is the MessagePack array
`[key id, instance, requester, tenant, expiry in Unix milliseconds]`. The broker signs, the serving
peer checks with the key that it shares with the broker. The code is taken over
`"lmcache/ticket/1\\0" || payload text`, so that a key used elsewhere by mistake does not sign
tickets.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from lmcache_core.errors import AuthenticationError, ConfigError
from lmcache_core.names import validate_instance_id, validate_tenant
from lmcache_core.security.ticket_keys import MAX_TICKET_KEYS, TicketKeys, check_key, current_keys

MAX_TICKET_CHARS: Final = 4096
DEFAULT_SKEW_MS: Final = 2_000

_VERSION: Final = "v1"
_DOMAIN: Final = b"lmcache/ticket/1\0"


def unix_ms() -> int:
    """Wall-clock time in milliseconds since 1970: broker and peer do not share a monotonic
    clock.
    """
    return time.time_ns() // 1_000_000


class Ticket(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """The content of a ticket.

    Attributes:
        key_id: Id of the shared key that signed it.
        instance: The serving peer.
        requester: The instance that may pull.
        tenant: The only tenant that it may pull from.
        expires_unix_ms: Invalid from this moment on, except for the verifier's skew allowance.
    """

    key_id: str
    instance: str
    requester: str
    tenant: str
    expires_unix_ms: int


_DECODER: Final = msgspec.msgpack.Decoder(Ticket)


class TicketSigner:
    """Signs tickets with the first of the shared keys.

    Raises:
        ConfigError: A key is out of bounds.
    """

    def __init__(self, keys: TicketKeys) -> None:
        _check_keys(current_keys(keys))
        self._keys = keys

    def sign(self, *, instance: str, requester: str, tenant: str, expires_unix_ms: int) -> str:
        """Return the text of a new ticket, at most 4096 characters.

        Raises:
            ValueError: A name is malformed or the expiry is not positive.
        """
        if expires_unix_ms <= 0:
            raise ValueError("a ticket expires at a positive Unix time")
        key_id, secret = next(iter(current_keys(self._keys).items()))
        ticket = Ticket(
            key_id,
            validate_instance_id(instance),
            validate_instance_id(requester),
            validate_tenant(tenant),
            expires_unix_ms,
        )
        payload = base64.urlsafe_b64encode(msgspec.msgpack.encode(ticket)).rstrip(b"=")
        text = f"{_VERSION}.{payload.decode()}.{_code(secret, payload)}"
        assert len(text) <= MAX_TICKET_CHARS
        return text


class TicketVerifier:
    """Checks tickets presented to one instance.

    Args:
        keys: See `TicketKeys`; several while keys rotate.
        instance_id: The instance that checks; a ticket for another one is refused.
        clock: Unix time in milliseconds.
        skew_ms: How long after its expiry a ticket is still accepted, for clocks that differ.

    Raises:
        ConfigError: A key is out of bounds.
    """

    def __init__(
        self,
        keys: TicketKeys,
        instance_id: str,
        clock: Callable[[], int] = unix_ms,
        *,
        skew_ms: int = DEFAULT_SKEW_MS,
    ) -> None:
        _check_keys(current_keys(keys))
        self._keys = keys
        self._instance_id = validate_instance_id(instance_id)
        self._clock = clock
        self._skew_ms = skew_ms

    def verify(self, text: str) -> Ticket:
        """Check form, code, instance and expiry, in this order.

        The caller must still compare `tenant` and `requester` with what it knows about its
        connection.

        Args:
            text: Untrusted until this returns.

        Raises:
            AuthenticationError: The ticket is malformed, forged, for another instance or expired.
        """
        try:
            version, payload, code = text[: MAX_TICKET_CHARS + 1].encode("ascii").split(b".")
            if version != _VERSION.encode() or len(text) > MAX_TICKET_CHARS:
                raise ValueError("another version, or too long")
            padded = payload + b"=" * (-len(payload) % 4)
            ticket = _DECODER.decode(base64.b64decode(padded, altchars=b"-_", validate=True))
        except (ValueError, msgspec.DecodeError):
            raise AuthenticationError("the ticket is malformed") from None
        secret = current_keys(self._keys).get(ticket.key_id)
        if secret is None:
            raise AuthenticationError("the ticket's key is unknown")
        # Compared as text: a second encoding of the same code (unused bits of the last character)
        # is refused, too.
        if not hmac.compare_digest(_code(secret, payload).encode(), code):
            raise AuthenticationError("the ticket's code is wrong")
        if ticket.instance != self._instance_id:
            raise AuthenticationError("the ticket is for another instance")
        if self._clock() >= ticket.expires_unix_ms + self._skew_ms:
            raise AuthenticationError("the ticket has expired")
        return ticket


def _check_keys(keys: Mapping[str, bytes]) -> None:
    if not 1 <= len(keys) <= MAX_TICKET_KEYS:
        raise ConfigError(f"ticket keys: {len(keys)} given; give 1 to {MAX_TICKET_KEYS}")
    for key_id, secret in keys.items():
        check_key(key_id, secret, "ticket keys")


def _code(secret: bytes, payload: bytes) -> str:
    code = hmac.new(secret, _DOMAIN + payload, hashlib.sha256).digest()
    return base64.urlsafe_b64encode(code).rstrip(b"=").decode()
