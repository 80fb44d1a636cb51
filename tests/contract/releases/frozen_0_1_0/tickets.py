"""Tickets as release 0.1.0 signs and checks them, from docs/protocols.md. Frozen: see README.md.

`tickets.py client sign KEY_ID SECRET INSTANCE REQUESTER TENANT EXPIRES_MS` tells a ticket, `tickets.py client check SECRET TICKET` what one
says. Secrets are hexadecimal.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import sys

import msgspec


def text_of(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def code_of(secret: str, payload: str) -> str:
    return text_of(hmac.new(bytes.fromhex(secret), b"lmcache/ticket/1\0" + payload.encode(), hashlib.sha256).digest())


def sign(key_id: str, secret: str, instance: str, requester: str, tenant: str, expires_ms: str) -> str:
    payload = text_of(msgspec.msgpack.encode([key_id, instance, requester, tenant, int(expires_ms)]))
    return f"v1.{payload}.{code_of(secret, payload)}"


def check(secret: str, ticket: str) -> list[object]:
    version, payload, code = ticket.split(".")
    assert version == "v1"
    assert hmac.compare_digest(code, code_of(secret, payload)), "another key has signed it"
    said = msgspec.msgpack.decode(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    assert len(said) == 5, f"it says what release 0.1.0 does not know: {said}"
    return list(said)


if __name__ == "__main__":
    _, role, call, *arguments = sys.argv
    assert role == "client"
    print(json.dumps({"sign": sign, "check": check}[call](*arguments)))
