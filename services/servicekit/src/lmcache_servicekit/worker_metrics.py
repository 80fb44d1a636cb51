"""The metrics of all workers of a port, whichever of them is asked: each sample has the label
`worker`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from lmcache_servicekit.workers import WorkerSeat

logger = logging.getLogger(__name__)

WORKER_UP: Final = "lmcache_worker_up"
LABEL_WORKER: Final = "worker"
SIBLING_TIMEOUT_S: Final = 1.0
MAX_SIBLING_BYTES: Final = 16 << 20


class WorkerMetrics:
    """Hands a worker's metrics to its siblings, and asks them for theirs.

    Args:
        registry: The worker's own metrics.
        seat: Which worker it is, and where the others are.
    """

    def __init__(self, registry: CollectorRegistry, seat: WorkerSeat) -> None:
        self._registry = registry
        self._seat = seat
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Answer siblings."""
        self._server = await asyncio.start_server(
            self._answer, sock=self._seat.listeners[self._seat.number].dup()
        )

    async def close(self) -> None:
        """Answer no more."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    async def gather(self) -> bytes:
        """The metrics of all workers, in Prometheus' text format; one that does not answer in
        time is shown as not up.
        """
        numbers = range(len(self._seat.listeners))
        texts = await asyncio.gather(*(self._text_of(number) for number in numbers))
        merged = CollectorRegistry()
        merged.register(
            _Merged({str(number): text for number, text in zip(numbers, texts, strict=True)})
        )
        return generate_latest(merged)

    async def _text_of(self, number: int) -> str | None:
        if number == self._seat.number:
            return generate_latest(self._registry).decode()
        try:
            async with asyncio.timeout(SIBLING_TIMEOUT_S):
                return await _ask(self._seat.listeners[number].getsockname()[:2])
        except (OSError, TimeoutError, ValueError) as exc:
            logger.warning("worker %d does not tell its metrics: %s", number, type(exc).__name__)
            return None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer every connection with what `/metrics` shows to any caller."""
        try:
            async with asyncio.timeout(SIBLING_TIMEOUT_S):
                writer.write(generate_latest(self._registry))
                await writer.drain()
        except (OSError, TimeoutError) as exc:
            logger.debug("metrics not told: %s", type(exc).__name__)
        finally:
            writer.close()


async def _ask(address: Sequence[object]) -> str:
    reader, writer = await asyncio.open_connection(*address)  # type: ignore[arg-type]
    try:
        data = bytearray()
        while piece := await reader.read(1 << 16):
            data += piece
            if len(data) > MAX_SIBLING_BYTES:
                raise ValueError(f"more than {MAX_SIBLING_BYTES} bytes of metrics")
        return data.decode()
    finally:
        writer.close()


class _Merged(Collector):
    def __init__(self, texts: Mapping[str, str | None]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily(
            WORKER_UP, "Whether a worker of this port tells its metrics.", labels=[LABEL_WORKER]
        )
        for worker, text in self._texts.items():
            up.add_metric([worker], text is not None)
        yield up
        yield from self._families()

    def _families(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for worker, text in self._texts.items():
            for family in text_string_to_metric_families(text or ""):
                merged = found.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, LABEL_WORKER: worker})
                    for sample in family.samples
                ]
        yield from found.values()
