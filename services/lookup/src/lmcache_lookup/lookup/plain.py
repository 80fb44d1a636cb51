"""A lookup's answer as JSON: each chunk with its own list of holders, as people read it; each
list is encoded once.
"""

from __future__ import annotations

import msgspec
from lmcache_core.lookup.runs import PackedLookupAnswer


class _Encoded(msgspec.Struct):
    """`LookupAnswer` whose lists of holders are encoded already."""

    num_prefix: int
    holders: list[msgspec.Raw]
    degraded: bool


def plain_json(answer: PackedLookupAnswer) -> bytes:
    """The JSON of a `LookupAnswer`."""
    holders: list[msgspec.Raw] = []
    for run in answer.runs:
        holders += [msgspec.Raw(msgspec.json.encode(run.unpack()))] * run.num_chunks
    return msgspec.json.encode(_Encoded(answer.num_prefix, holders, answer.degraded))
