"""How often things happen in a run: short runs are busy, long ones are mostly quiet."""

from __future__ import annotations

from dataclasses import dataclass

SLOW_FROM_S = 1800.0
"""Runs of at least this length are slow."""


@dataclass(frozen=True)
class Pace:
    """Mean or fixed times between events of a kind; a run draws one of several.

    Attributes:
        engine_s: Between two requests of an engine.
        operator_s: Between two calls of the operator.
        check_s: Between two checks of the invariants.
        fault_factor: Times which faults are rarer than in a busy run.
        fault_length: Times which faults last longer than in a busy run.
        calm_s: After the last fault, everything works again within this time.
        repeat_s: Shortest interval of services' periodic work: otherwise most events of an idle
            cluster would be checks that find no change.
        sweep_s: The same for a sweep of the index, which takes many steps.
        look_s: The same for `look`: storages move chunks only after several looks at the same
            servers.
        measure_s: The same for the measurement of what only one sidecar holds, which asks lookup
            about many chunks.
        lease_s: Leases of instances and peers.
        has_routers: Whether engines tell routers what is cached, which takes a look at the sidecar
            five times a second.
    """

    engine_s: tuple[float, ...]
    operator_s: tuple[float, ...]
    check_s: float
    fault_factor: float
    fault_length: float
    calm_s: float
    repeat_s: float
    sweep_s: float
    look_s: float
    measure_s: float
    lease_s: float
    has_routers: bool


BUSY = Pace(
    engine_s=(0.3, 1.0, 3.0),
    operator_s=(2.0, 10.0),
    check_s=10.0,
    fault_factor=1.0,
    fault_length=1.0,
    calm_s=60.0,
    repeat_s=5.0,
    sweep_s=5.0,
    look_s=1.0,
    measure_s=5.0,
    lease_s=15.0,
    has_routers=True,
)
SLOW = Pace(
    engine_s=(300.0, 900.0),
    operator_s=(300.0, 900.0),
    check_s=900.0,
    fault_factor=100.0,
    fault_length=20.0,
    calm_s=1500.0,
    repeat_s=200.0,
    sweep_s=20.0,
    look_s=200.0,
    measure_s=900.0,
    lease_s=900.0,
    has_routers=False,
)


def pace_of(work_s: float) -> Pace:
    """Return the pace of a run with this much virtual time under faults."""
    return SLOW if work_s >= SLOW_FROM_S else BUSY
