"""The storage's own errors, and how they look from outside.

LMCacheError
|-- DrainingError     this instance is about to leave: it takes no new chunks
`-- SlowClientError   the rest of a body did not arrive in time
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from lmcache_core.errors import LMCacheError
from lmcache_servicekit.problems import ProblemType


class DrainingError(LMCacheError):
    """This instance is about to leave: it takes no new chunks. Reads go on."""


class SlowClientError(LMCacheError):
    """The rest of a body did not arrive in time, or its client went away."""


PROBLEMS: Final[Mapping[type[Exception], ProblemType]] = MappingProxyType(
    {
        DrainingError: ProblemType("draining", 503, "This instance takes no new chunks", headers={"Retry-After": "30"}),
        SlowClientError: ProblemType("slow-client", 408, "The body did not arrive in time"),
    }
)
