"""Thread-safe counters with at most one label, gauges, and single measurements for histograms."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from lmcache_core.forks import enter_children

MAX_OBSERVED: Final = 1024
"""Measurements of one name that are kept until they are taken: the newest."""


class Counters:
    """A set of counters of one component, whose values only grow, and what it has measured."""

    def __init__(self) -> None:
        self._values: Counter[tuple[str, str]] = Counter()
        self._observed: dict[str, deque[float]] = {}
        self._gauges: dict[str, Callable[[], int]] = {}
        self.enter_child()
        enter_children(self)

    def enter_child(self) -> None:
        """Count with a new lock."""
        self._lock = threading.Lock()

    def add(self, name: str, amount: int = 1, label: str = "") -> None:
        """Increase a counter.

        Args:
            name: One of `telemetry.names`.
            amount: Increment, 0 or more.
            label: Value of the counter's label (tier or reason), "" for none.
        """
        assert amount >= 0, f"{name} cannot decrease by {-amount}"
        with self._lock:
            self._values[name, label] += amount

    def watch(self, name: str, gauge: Callable[[], int]) -> None:
        """Have `value` answer with a gauge's present value."""
        self._gauges[name] = gauge

    def observe(self, name: str, value: float) -> None:
        """Note a measurement, in the unit that its name ends with."""
        with self._lock:
            self._observed.setdefault(name, deque(maxlen=MAX_OBSERVED)).append(value)

    def take_observed(self) -> dict[str, list[float]]:
        """Return the measurements since the last call, by name."""
        with self._lock:
            observed, self._observed = self._observed, {}
        return {name: list(values) for name, values in observed.items()}

    def value(self, name: str, label: str | None = None) -> int:
        """Return the counter's value with that label, or summed over all labels; or the gauge's."""
        if name in self._gauges:
            return self._gauges[name]()
        with self._lock:
            if label is not None:
                return self._values[name, label]
            return sum(value for (counter, _), value in self._values.items() if counter == name)

    def snapshot(self) -> dict[tuple[str, str], int]:
        """Return all values, by (name, label)."""
        with self._lock:
            return dict(self._values)
