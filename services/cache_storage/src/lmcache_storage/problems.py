"""The storage's own errors, and how they look from outside.

LMCacheError
|-- DrainingError        this instance is about to leave: it takes no new chunks
|-- RecordTooLargeError  a record's head declares more than a record may have here
`-- SlowClientError      the rest of a body did not arrive in time
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from lmcache_core.errors import LMCacheError
from lmcache_servicekit.problems import ProblemType


class DrainingError(LMCacheError):
    """This instance is about to leave: it takes no new chunks. Reads go on."""


class RecordTooLargeError(LMCacheError):
    """The head of a record declares more than a record may have here."""


class SlowClientError(LMCacheError):
    """The rest of a body did not arrive in time, or its client went away."""


PROBLEMS: Final[Mapping[type[Exception], ProblemType]] = MappingProxyType(
    {
        DrainingError: ProblemType(
            "draining", 503, "This instance takes no new chunks", headers={"Retry-After": "30"}
        ),
        RecordTooLargeError: ProblemType("too-large", 413, "Content Too Large"),
        SlowClientError: ProblemType("slow-client", 408, "The body did not arrive in time"),
    }
)
