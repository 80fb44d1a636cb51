"""The hit ratio over time, and the faults, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from tests.chaos.cluster.plan import KINDS, Fault

WIDTH = 900
LEFT, RIGHT, TOP, BOTTOM = 90, 880, 44, 260
ROW_TOP, ROW_HEIGHT = 284, 18
COLOURS = ("#d55e00", "#e69f00", "#cc79a7", "#000000", "#0072b2", "#56b4e9", "#009e73", "#999933")
MIN_MARK = 2.0
"""Pixels of a fault that lasts no time."""
STEPS_S = (1, 2, 5, 10, 20, 60, 120, 300)
MAX_STEPS = 12


def draw(hits: Sequence[tuple[float, float]], plan: Sequence[Fault], title: str) -> str:
    """The ratio as a line; below it a row for each kind of fault with a bar for each fault.

    Args:
        hits: `(second, ratio)`, in order of time; seconds are those of the plan.
        plan: What was done.
        title: Above the plot.

    Returns:
        The document. The same arguments give the same text.

    Raises:
        ValueError: Fewer than two hits.
    """
    if len(hits) < 2:
        raise ValueError(f"{len(hits)} points make no line: two at least")
    first_s, last_s = hits[0][0], hits[-1][0]

    def x(second: float) -> float:
        return LEFT + (RIGHT - LEFT) * (min(max(second, first_s), last_s) - first_s) / (
            last_s - first_s
        )

    height = ROW_TOP + ROW_HEIGHT * len(KINDS) + 44
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        _text(LEFT, 24, title, size=14),
    ]
    for ratio in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<line x1="{LEFT}" x2="{RIGHT}" y1="{_y(ratio):.1f}" y2="{_y(ratio):.1f}"'
            ' stroke="#ddd"/>'
        )
        parts.append(_text(LEFT - 8, _y(ratio) + 4, f"{ratio:g}", anchor="end"))
    step_s = next((step for step in STEPS_S if (last_s - first_s) / step <= MAX_STEPS), STEPS_S[-1])
    for number in range(int(first_s // step_s) + 1, int(last_s // step_s) + 1):
        at = x(number * step_s)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{height - 44}" stroke="#eee"/>'
        )
        parts.append(_text(at, height - 26, f"{number * step_s}", anchor="middle"))
    parts.append(
        _text(
            (LEFT + RIGHT) / 2,
            height - 8,
            "seconds from the first fault's beginning",
            anchor="middle",
        )
    )
    points = " ".join(f"{x(second):.1f},{_y(ratio):.1f}" for second, ratio in hits)
    parts.append(f'<polyline fill="none" stroke="#222" stroke-width="1.5" points="{points}"/>')
    for row, (kind, colour) in enumerate(zip(KINDS, COLOURS, strict=True)):
        y = ROW_TOP + ROW_HEIGHT * row
        parts.append(_text(LEFT - 8, y + 11, kind, anchor="end"))
        for fault in plan:
            if fault.kind == kind:
                at = x(fault.at_s)
                width = max(x(fault.at_s + fault.lasts_s) - at, MIN_MARK)
                parts.append(
                    f'<rect x="{at:.1f}" y="{y}" width="{width:.1f}" height="{ROW_HEIGHT - 5}"'
                    f' fill="{colour}" fill-opacity="0.6"/>'
                )
    return "\n".join([*parts, "</svg>", ""])


def _y(ratio: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * ratio


def _text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        f' fill="#222">{escape(words)}</text>'
    )
