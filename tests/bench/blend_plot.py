"""The plot of quality against the share computed anew, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tests.bench.blend_quality import Arm, ArmQuality
from tests.bench.svg import line, opening, words

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 520, 44, 364
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
RATIO_MARKS = (0.0, 0.05, 0.10, 0.15, 0.25, 0.50, 1.0)
CLOSED_MARKS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


def draw(rows: Mapping[Arm, ArmQuality], policies: Sequence[str], title: str) -> str:
    """Share of the gap that is closed against the share of tokens computed anew (root scale), with
    95 % intervals.

    Args:
        rows: What was measured.
        policies: Which to draw, four at most; each begins at naive reuse.
        title: Above the plot.

    Returns:
        The document. The same rows give the same text.

    Raises:
        ValueError: More policies than colours.
    """
    if len(policies) > len(COLOURS):
        raise ValueError(f"{len(policies)} curves for {len(COLOURS)} colours: draw fewer")
    parts = [
        *opening(WIDTH, HEIGHT),
        words(LEFT, 24, title, size=14),
        *_axes(),
    ]
    for index, (policy, colour) in enumerate(zip(policies, COLOURS, strict=False)):
        curve = sorted(
            (row for arm, row in rows.items() if arm.policy == policy),
            key=lambda row: row.arm.ratio,
        )
        points = [(0.0, 0.0), *((row.arm.ratio, row.closed.value) for row in curve)]
        drawn = " ".join(f"{_x(ratio):.1f},{_y(closed):.1f}" for ratio, closed in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{drawn}"/>')
        for row in curve:
            x, half = _x(row.arm.ratio), row.closed.half_width
            parts.append(
                line(x, _y(row.closed.value - half), x, _y(row.closed.value + half), colour)
            )
            parts.append(
                f'<circle cx="{x:.1f}" cy="{_y(row.closed.value):.1f}" r="3" fill="{colour}"/>'
            )
        y = TOP + 12 + 22 * index
        parts.append(
            f'<line x1="{RIGHT + 14}" x2="{RIGHT + 38}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}"'
            ' stroke-width="3"/>'
        )
        parts.append(words(RIGHT + 44, y, policy))
    notes = ("0: as much as naive reuse loses", "1: as full recompute", "bars: 95 % intervals")
    parts += [
        words(RIGHT + 14, BOTTOM - 44 + 18 * index, note, fill="#555")
        for index, note in enumerate(notes)
    ]
    return "\n".join([*parts, "</svg>", ""])


def _axes() -> list[str]:
    parts = []
    for ratio in RATIO_MARKS:
        parts.append(line(_x(ratio), TOP, _x(ratio), BOTTOM))
        parts.append(words(_x(ratio), BOTTOM + 18, f"{ratio:.0%}", anchor="middle"))
    for closed in CLOSED_MARKS:
        parts.append(
            line(LEFT, _y(closed), RIGHT, _y(closed), "#333" if closed in (0.0, 1.0) else "#ddd")
        )
        parts.append(words(LEFT - 8, _y(closed) + 4, f"{closed:g}", anchor="end"))
    parts.append(
        words(
            (LEFT + RIGHT) / 2,
            BOTTOM + 40,
            "share of the reused tokens that is recomputed",
            anchor="middle",
        )
    )
    middle = (TOP + BOTTOM) / 2
    parts.append(
        f'<text x="18" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 18'
        f' {middle:.1f})">share of the gap closed</text>'
    )
    return parts


def _x(ratio: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.sqrt(ratio)


def _y(closed: float) -> float:
    low, high = -0.05, 1.1
    return BOTTOM - (BOTTOM - TOP) * (min(max(closed, low), high) - low) / (high - low)
