"""The audit log: one JSON line for each admin action, done or refused, on a separate logger.

The layer that checks the role decides what is written, so that no route can forget it. Chunks that
servers hand over by lm:// are summarised in lines, too. Of a request's body only the fields in
`AUDITED_FIELDS` are written: no chunk hashes, token ids or secrets.
"""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request
from lmcache_core.security import Principal
from lmcache_core.wire.served import HandoverNote, NoteHandovers
from starlette.types import Scope

AUDIT_LOGGER: Final = "lmcache.audit"
MAX_AUDITED_BODY_BYTES: Final = 64 << 10
MAX_AUDITED_CHARS: Final = 256
AUDITED_FIELDS: Final = frozenset(
    {"tenant", "all_tenants", "num_bytes", "tiers", "ttl_s", "level", "logger"}
)

_SCOPE_KEY: Final = "lmcache.audit"
_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})

logger = logging.getLogger(AUDIT_LOGGER)


@dataclass(slots=True)
class AuditEntry:
    """An admin action underway.

    Attributes:
        action: Method and path.
        client: Address of the caller.
        principal: The caller; None if unknown.
        details: The audited fields of the body.
    """

    action: str
    client: str
    principal: Principal | None = None
    details: dict[str, Any] | None = None


def begin_audit(request: Request) -> AuditEntry | None:
    """Start auditing a request; return None if it only reads."""
    if request.method in _READING:
        return None
    client = "unknown" if request.client is None else request.client.host
    entry = AuditEntry(f"{request.method} {request.url.path}"[:MAX_AUDITED_CHARS], client)
    request.scope[_SCOPE_KEY] = entry
    return entry


async def note_body(request: Request, entry: AuditEntry) -> None:
    """Record the audited fields of a JSON body, unless it is too long."""
    body = await request.body()
    if not body or len(body) > MAX_AUDITED_BODY_BYTES:
        return
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):  # the route refuses the body as invalid
        return
    if isinstance(values, dict):
        entry.details = {
            name: value
            if isinstance(value, bool | int | float | None)
            else str(value)[:MAX_AUDITED_CHARS]
            for name, value in values.items()
            if name in AUDITED_FIELDS
        }


def end_audit(scope: Scope, service: str, instance: str, status: int) -> None:
    """Write the line of a request that has been answered or has failed, if it is an admin action.

    Args:
        instance: Name of this process among its peers.
    """
    entry = scope.get(_SCOPE_KEY)
    if isinstance(entry, AuditEntry):
        result = "done" if status < 400 else "refused" if status < 500 else "failed"
        _write(service, instance, entry, status, result)


def handover_audit(service: str, instance: str) -> NoteHandovers:
    """Return the function that writes the lines of handovers from other servers by lm://, which
    have no status.

    Args:
        instance: Name of this process among its peers.
    """

    def write(note: HandoverNote) -> None:
        details = {
            name: getattr(note, name)
            for name in ("tenants", "num_chunks", "num_bytes", "num_refused")
        }
        principal = note.caller if isinstance(note.caller, Principal) else None
        entry = AuditEntry("lm:// HANDOVER", note.client, principal, details)
        _write(service, instance, entry, None, "done" if note.num_chunks else "refused")

    return write


def _write(service: str, instance: str, entry: AuditEntry, status: int | None, result: str) -> None:
    principal = entry.principal
    line = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time())),
        "service": service,
        "instance": instance,
        "who": None if principal is None else principal.name,
        "tenant": None if principal is None else principal.tenant,
        "role": None if principal is None else principal.role,
        "client": entry.client,
        "what": entry.action,
        "details": entry.details or {},
        "status": status,
        "result": result,
    }
    logger.info("%s", json.dumps(line))
