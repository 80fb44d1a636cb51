"""Liveness and readiness: `/healthz` reports that the process is alive, `/readyz` queries every
registered dependency.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from lmcache_core.errors import LMCacheError

from lmcache_servicekit.bodies import ApiModel

logger = logging.getLogger(__name__)

MAX_CHECKS: Final = 64

Probe = Callable[[], Awaitable[str]]
"""Returns a few words about the dependency; raises if it is not usable."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One dependency.

    Attributes:
        name: Key in the answer.
        probe: Queries the dependency; cancelled at its time limit.
        required: Whether the service cannot work without it. A failed optional check only marks the
            answer `degraded`.
        where: Name and host of the dependency for a timeout; never credentials.
    """

    name: str
    probe: Probe
    timeout_s: float = 1.0
    required: bool = True
    where: str | None = None


class CheckReport(ApiModel):
    """The result of one check."""

    ok: bool
    """Whether the dependency answered in time."""
    detail: str
    """A few words from the dependency, or why it failed; never credentials."""
    latency_ms: float
    """How long the check took, in milliseconds."""


class HealthReport(ApiModel):
    """The results of all checks."""

    status: Literal["ok", "degraded", "unready"]
    """`ok`; `degraded`: only optional dependencies failed; `unready`: a required one did."""
    checks: dict[str, CheckReport]
    """The result of each check, by the name of the dependency."""


@dataclass(slots=True)
class HealthRegistry:
    """The checks of one service; added by a lifespan as it opens what they probe."""

    _checks: dict[str, HealthCheck] = field(default_factory=dict)
    _failing: set[str] = field(default_factory=set)

    def add(
        self,
        name: str,
        probe: Probe,
        *,
        timeout_s: float = 1.0,
        required: bool = True,
        where: str | None = None,
    ) -> None:
        """Register a dependency, replacing one with the same name."""
        assert name in self._checks or len(self._checks) < MAX_CHECKS, "too many health checks"
        self._checks[name] = HealthCheck(name, probe, timeout_s, required, where)

    async def run(self) -> HealthReport:
        """Query all dependencies concurrently; takes as long as the slowest of them or its time
        limit.
        """
        checks = list(self._checks.values())
        reports = await asyncio.gather(*(_run_check(check) for check in checks))
        for check, report in zip(checks, reports, strict=True):
            self._log_change(check, report)
        failed = [check for check, report in zip(checks, reports, strict=True) if not report.ok]
        status: Literal["ok", "degraded", "unready"] = "ok"
        if failed:
            status = "unready" if any(check.required for check in failed) else "degraded"
        return HealthReport(
            status=status,
            checks={check.name: report for check, report in zip(checks, reports, strict=True)},
        )

    def _log_change(self, check: HealthCheck, report: CheckReport) -> None:
        if report.ok and check.name in self._failing:
            self._failing.discard(check.name)
            logger.info(
                "dependency available again: check=%s detail=%s",
                check.name,
                check.where or report.detail,
            )
        elif not report.ok and check.name not in self._failing:
            self._failing.add(check.name)
            logger.warning("dependency unavailable: check=%s error=%s", check.name, report.detail)


async def _run_check(check: HealthCheck) -> CheckReport:
    async def probe_in_time() -> str:
        async with asyncio.timeout(check.timeout_s):
            return await check.probe()

    started = time.perf_counter()
    [outcome] = await asyncio.gather(probe_in_time(), return_exceptions=True)
    latency_ms = round((time.perf_counter() - started) * 1000, 3)
    if isinstance(outcome, str):
        return CheckReport(ok=True, detail=outcome, latency_ms=latency_ms)
    return CheckReport(ok=False, detail=_describe(outcome, check), latency_ms=latency_ms)


def _describe(error: BaseException, check: HealthCheck) -> str:
    """Return an error's text for display: our own texts are safe, a library's may contain an
    address with credentials.
    """
    if isinstance(error, LMCacheError):
        return str(error)
    text = (
        f"no answer within {check.timeout_s:g} s"
        if isinstance(error, TimeoutError)
        else type(error).__name__
    )
    return f"{check.where}: {text}" if check.where else text
