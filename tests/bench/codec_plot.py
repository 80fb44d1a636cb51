"""The plot of the break-even, as SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tests.bench.codec_break_even import break_even, gain
from tests.bench.codec_speed import SpeedRow
from tests.bench.svg import line, opening, words

WIDTH, HEIGHT = 760, 440
LEFT, RIGHT, TOP, BOTTOM = 64, 500, 44, 384
LINKS_GBIT = (0.1, 1.0, 10.0, 100.0)
GAINS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
NUM_POINTS = 96
GBIT_OF_GB = 8


def draw(rows: Sequence[SpeedRow], title: str) -> str:
    """Gain over raw bytes against the link's bandwidth, both logarithmic: in a pipeline solid, one
    after the other dashed.

    Args:
        rows: What was measured; six at most.
        title: Above the plot.

    Returns:
        The document. The same rows give the same text.

    Raises:
        ValueError: More rows than colours.
    """
    if len(rows) > len(COLOURS):
        raise ValueError(f"{len(rows)} curves for {len(COLOURS)} colours: draw fewer")
    parts = [
        *opening(WIDTH, HEIGHT),
        words(LEFT, 24, title, size=14),
        *_axes(),
    ]
    for index, (row, colour) in enumerate(zip(rows, COLOURS, strict=False)):
        for is_pipelined, dash in ((True, ""), (False, ' stroke-dasharray="5 4"')):
            points = _curve(
                lambda link, row=row, mode=is_pipelined: gain(row, link / GBIT_OF_GB, mode)
            )  # type: ignore[misc]
            parts.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dash}'
                f' points="{points}"/>'
            )
        crossings = [
            bandwidth * GBIT_OF_GB
            for bandwidth in (break_even(row).load, break_even(row).load_pipelined)
        ]
        shown = [link for link in crossings if LINKS_GBIT[0] < link < LINKS_GBIT[-1]]
        parts += [
            f'<circle cx="{_x(link):.1f}" cy="{_y(1.0):.1f}" r="4" fill="{colour}"/>'
            for link in shown
        ]
        y = TOP + 12 + 22 * index
        parts.append(
            f'<line x1="{RIGHT + 14}" x2="{RIGHT + 38}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}"'
            ' stroke-width="3"/>'
        )
        parts.append(words(RIGHT + 44, y, f"{row.name}: {row.ratio:.2f} times smaller"))
    notes = (
        "solid: decoded while the next crosses",
        "dashed: one after the other",
        "dots: as fast as raw bytes",
    )
    parts += [
        words(RIGHT + 14, BOTTOM - 44 + 18 * index, note, fill="#555")
        for index, note in enumerate(notes)
    ]
    return "\n".join([*parts, "</svg>", ""])


def _axes() -> list[str]:
    parts = []
    for link in LINKS_GBIT:
        parts.append(line(_x(link), TOP, _x(link), BOTTOM))
        parts.append(words(_x(link), BOTTOM + 18, f"{link:g}", anchor="middle"))
    for value in GAINS:
        parts.append(line(LEFT, _y(value), RIGHT, _y(value), "#333" if value == 1 else "#ddd"))
        parts.append(words(LEFT - 8, _y(value) + 4, f"{value:g}", anchor="end"))
    parts.append(
        words((LEFT + RIGHT) / 2, BOTTOM + 40, "bandwidth of the link, Gbit/s", anchor="middle")
    )
    middle = (TOP + BOTTOM) / 2
    parts.append(
        f'<text x="18" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 18'
        f' {middle:.1f})">times faster than raw bytes</text>'
    )
    return parts


def _curve(at: Callable[[float], float]) -> str:
    low, high = LINKS_GBIT[0], LINKS_GBIT[-1]
    links = [low * (high / low) ** (index / (NUM_POINTS - 1)) for index in range(NUM_POINTS)]
    return " ".join(f"{_x(link):.1f},{_y(at(link)):.1f}" for link in links if at(link) >= GAINS[0])


def _x(link_gbit: float) -> float:
    return LEFT + (RIGHT - LEFT) * math.log(link_gbit / LINKS_GBIT[0]) / math.log(
        LINKS_GBIT[-1] / LINKS_GBIT[0]
    )


def _y(value: float) -> float:
    bounded = min(max(value, GAINS[0]), GAINS[-1])
    return BOTTOM - (BOTTOM - TOP) * math.log(bounded / GAINS[0]) / math.log(GAINS[-1] / GAINS[0])
