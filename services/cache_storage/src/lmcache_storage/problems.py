"""The storage's own errors, and their HTTP form.

LMCacheError
|-- DrainingError        this instance is shutting down and accepts no new chunks
|-- RecordTooLargeError  a record's head declares more than the limit
`-- SlowClientError      the rest of a body did not arrive in time
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from lmcache_core.errors import LMCacheError
from lmcache_servicekit.problems import ProblemType


class DrainingError(LMCacheError):
    """This instance is shutting down and accepts no new chunks. Reads continue."""


class RecordTooLargeError(LMCacheError):
    """The head of a record declares more than the limit."""


class SlowClientError(LMCacheError):
    """The rest of a body did not arrive in time, or its client disconnected."""


PROBLEMS: Final[Mapping[type[Exception], ProblemType]] = MappingProxyType(
    {
        DrainingError: ProblemType(
            "draining", 503, "This instance accepts no new chunks", headers={"Retry-After": "30"}
        ),
        RecordTooLargeError: ProblemType("too-large", 413, "Content Too Large"),
        SlowClientError: ProblemType("slow-client", 408, "The body did not arrive in time"),
    }
)
