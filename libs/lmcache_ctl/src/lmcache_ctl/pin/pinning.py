"""Pins chunks at several services."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from lmcache_ctl.cluster.asking import Asker, Caller
from lmcache_ctl.cluster.services import Kind, Service
from lmcache_ctl.cluster.targets import Outcome, Target, named
from lmcache_ctl.errors import CtlError


class PinJob(msgspec.Struct, frozen=True):
    """What is to be done.

    Attributes:
        target: Where.
        chunks: Hashes, or keys at cache_storage; none, and no token ids: only list.
        token_ids: Of a prompt, in the place of chunks.
        ttl_s: For how long, seconds; 0: let go.
    """

    target: Target
    chunks: list[str]
    token_ids: list[int] | None
    ttl_s: float


async def run_pin_job(asker: Asker, services: Sequence[Service], job: PinJob) -> list[Outcome]:
    """What came of it, at each service that is meant.

    Raises:
        CtlError: The target means none of them.
    """
    chosen = await named(asker, services, [job.target])
    done = await asker.each(chosen, lambda caller: _at(caller, job))
    return [
        (
            Outcome(service.kind, service.name, problem=str(one))
            if isinstance(one, CtlError)
            else Outcome(service.kind, service.name, one)
        )
        for service, one in zip(chosen, done, strict=True)
    ]


async def _at(caller: Caller, job: PinJob) -> dict[str, Any]:
    base, field = (
        ("/v1/admin", "keys") if caller.service.kind is Kind.STORAGE else ("/v1", "chunk_hashes")
    )
    chunks = job.chunks
    if job.token_ids is not None:
        told = await caller.ask("POST", "/v1/explain", {"token_ids": job.token_ids})
        whole = (
            chunk
            for one in told["explanations"]
            for chunk in one["chunks"]
            if chunk["end"] - chunk["start"] == one["chunk_size"]
        )
        chunks = list(dict.fromkeys(chunk["chunk_hash"] for chunk in whole))
        if not chunks:
            raise CtlError("the prompt fills no chunk: there is nothing to pin")
    answer: dict[str, Any]
    if not chunks:
        answer = await caller.ask("GET", f"{base}/pins")
    elif job.ttl_s:
        answer = await caller.ask("POST", f"{base}/pin", {field: chunks, "ttl_s": job.ttl_s})
    else:
        answer = await caller.ask("POST", f"{base}/unpin", {field: chunks})
    return answer


def pinned_nowhere(found: Sequence[Outcome]) -> bool:
    """Whether chunks were to be pinned, and there is one that no service keeps."""
    missing = [
        {str(one.get("key") or one.get("chunk_hash")) for one in outcome.result["not_pinned"]}
        for outcome in found
        if "not_pinned" in outcome.result
    ]
    return bool(missing) and bool(set.intersection(*missing))
