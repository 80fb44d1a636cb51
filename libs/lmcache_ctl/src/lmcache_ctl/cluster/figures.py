"""Prometheus figures of a service."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from lmcache_ctl.errors import CtlError

BUILD_INFO = "lmcache_build_info"


class Figures:
    """The samples of one `/metrics`.

    Args:
        samples: By name, the labels and the value of each.
    """

    def __init__(self, samples: Mapping[str, list[tuple[Mapping[str, str], float]]]) -> None:
        self._samples = samples

    @classmethod
    def read(cls, text: str) -> Figures:
        """Read Prometheus' text format.

        Raises:
            CtlError: It is none.
        """
        samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        except ValueError as exc:
            raise CtlError(f"its /metrics is not in Prometheus' text format: {exc}") from exc
        return cls(samples)

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of that name with these labels; 0 without any."""
        return sum(
            value for found, value in self._samples.get(name, ()) if labels.items() <= found.items()
        )

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of a label."""
        sums: dict[str, float] = {}
        for found, value in self._samples.get(name, ()):
            sums[found.get(label, "")] = sums.get(found.get(label, ""), 0.0) + value
        return sums

    @property
    def build(self) -> tuple[str, str]:
        """Which service this is, and its version; both "" where it does not say."""
        for labels, _ in self._samples.get(BUILD_INFO, ()):
            return labels.get("service", ""), labels.get("version", "")
        return "", ""
