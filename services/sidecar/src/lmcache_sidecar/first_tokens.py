"""How long requests wait for their first token, by the metrics of the pod's own vLLM."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from lmcache_core.errors import UnavailableError
from lmcache_core.p2p import FirstTokens
from lmcache_core.p2p.messages import MAX_COUNT, MAX_LABEL_CHARS, bounded_count
from lmcache_core.telemetry import Counters
from lmcache_core.telemetry.sparse_log import SparseLog
from lmcache_core.wire.json_http import JsonHttpClient

from lmcache_sidecar import metrics

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 5.0
TIMEOUT_S: Final = 2.0
LOG_INTERVAL_S: Final = 600.0
SHARE: Final = 0.8
"""Share of an interval's prompt tokens that must come from one source for its requests to count as
that source's.
"""
LOADED, COMPUTED, MIXED = metrics.PROMPT_SOURCES
_SAMPLE = re.compile(
    rb"^vllm:(time_to_first_token_seconds_sum|time_to_first_token_seconds_count"
    rb"|prompt_tokens_by_source_total)\{(.*)\} (\S+)$",
    re.MULTILINE,
)
_SOURCE = re.compile(rb'\bsource="(\w+)"')
_MODEL = re.compile(rb'\bmodel_name="([^"\\]+)"')


@dataclass(frozen=True, slots=True)
class Reading:
    """vLLM's counters since its start, summed over its engines.

    Attributes:
        num_requests: Requests that have got their first token.
        waited_s: Their waits, summed.
        tokens: Their prompts' tokens, by vLLM's name of where the KV came from. vLLM counts them
            together with the wait.
        model: vLLM's name of its model, "" if it is unusable as a name.
    """

    num_requests: float
    waited_s: float
    tokens: Mapping[str, float]
    model: str

    @classmethod
    def parse(cls, text: bytes) -> Reading | None:
        """Return the counters in vLLM's `/metrics`; None if one of them is missing.

        Raises:
            ValueError: A value is no number that a counter can have.
        """
        found: dict[bytes, float] = {}
        tokens: dict[str, float] = {}
        model = ""
        for name, labels, value in _SAMPLE.findall(text):
            source = _SOURCE.search(labels)
            if source is not None:
                tokens[source[1].decode()] = tokens.get(source[1].decode(), 0.0) + _count(value)
            else:
                found[name] = found.get(name, 0.0) + _count(value)
            named = _MODEL.search(labels)
            if named is not None:
                model = named[1].decode("utf-8", "replace")
        if len(found) != 2 or not tokens:
            return None
        return cls(
            found[b"time_to_first_token_seconds_count"],
            found[b"time_to_first_token_seconds_sum"],
            tokens,
            model if len(model) <= MAX_LABEL_CHARS else "",
        )

    def source_since(self, before: Reading) -> Literal["loaded", "computed", "mixed"]:
        """Return where the KV of the prompts since an earlier reading came from."""
        grown = {name: count - before.tokens.get(name, 0) for name, count in self.tokens.items()}
        needed = SHARE * sum(grown.values())
        if needed > 0 and grown.get("external_kv_transfer", 0) >= needed:
            return "loaded"
        return "computed" if needed > 0 and grown.get("local_compute", 0) >= needed else "mixed"

    def fell(self, before: Reading) -> bool:
        """Return whether a counter is lower than before: vLLM has restarted."""
        return (
            self.num_requests < before.num_requests
            or self.waited_s < before.waited_s
            or any(self.tokens.get(name, 0) < count for name, count in before.tokens.items())
        )


def _count(text: bytes) -> float:
    """Return the value of a counter.

    Raises:
        ValueError: It is not one: it must be a number from 0 to `MAX_COUNT`.
    """
    value = float(text)
    if not 0 <= value <= MAX_COUNT:  # nor is NaN
        raise ValueError(f"a counter of {value:g}: must be from 0 to {MAX_COUNT}")
    return value


class FirstTokenCounter:
    """Counts waits for first tokens. What vLLM counted before the first look is left out.

    Args:
        vllm: The pod's vLLM; opened and closed by its owner.
        counters: Counts waits by where KV came from.

    Attributes:
        model: vLLM's name of its model, "" while unknown.
    """

    def __init__(self, vllm: JsonHttpClient, counters: Counters) -> None:
        self._vllm = vllm
        self._counters = counters
        self._last: Reading | None = None
        self._log = SparseLog(logger, LOG_INTERVAL_S)
        self.model = ""

    async def look(self) -> None:
        """Read vLLM's metrics. Call it repeatedly; a vLLM that does not answer is logged."""
        try:
            reply = await self._vllm.exchange("GET", "/metrics", None, {"accept": "text/plain"})
            if not reply.is_success:
                raise self._vllm.refused(reply)
            reading = Reading.parse(reply.data)
        except (UnavailableError, ValueError) as exc:
            self._log.log(logging.INFO, "vLLM's metrics cannot be read: error=%s", exc)
            return
        if reading is None:
            self._log.log(logging.INFO, "vLLM's metrics do not tell waits by source of tokens")
            return
        before, self._last, self.model = self._last, reading, reading.model
        if before is None or reading.fell(before):
            return
        num_requests = round(reading.num_requests - before.num_requests)
        waited_us = round(1e6 * (reading.waited_s - before.waited_s))
        if num_requests:
            source = reading.source_since(before)
            self._counters.add(metrics.FIRST_TOKENS_TOTAL, num_requests, source)
            self._counters.add(metrics.FIRST_WAIT_MICROSECONDS_TOTAL, waited_us, source)


def first_tokens(values: Mapping[tuple[str, str], int]) -> FirstTokens:
    """Return the waits in a snapshot of counters, as heartbeats report them."""

    def count(source: str) -> int:
        return bounded_count(values.get((metrics.FIRST_TOKENS_TOTAL, source), 0))

    def wait_ms(source: str) -> int:
        return bounded_count(values.get((metrics.FIRST_WAIT_MICROSECONDS_TOTAL, source), 0) // 1000)

    return FirstTokens(
        count(LOADED),
        wait_ms(LOADED),
        count(COMPUTED),
        wait_ms(COMPUTED),
        count(MIXED),
        wait_ms(MIXED),
    )
