"""Plots as SVG. The same figures give the same text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")
WIDTH, LEFT, RIGHT, TOP = 760, 64, 500, 44
MARGIN = 56
"""Below the plot, for its marks and its label."""
ROW_HEIGHT = 26
DARK = (
    "<style>@media (prefers-color-scheme: dark) { rect[fill=white] { fill: #161b22 }"
    " text { fill: #d0d7de } line[stroke='#ddd'] { stroke: #3d444d }"
    " line[stroke='#333'] { stroke: #9198a1 } }</style>"
)
"""For readers whose pages are dark."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        marks: Text by value.
        place: Where a value lies, from 0 at the one end of the axis to 1 at the other.
        dark: Marks whose lines are dark.
    """

    label: str
    marks: Mapping[float, str]
    place: Callable[[float], float]
    dark: Collection[float] = ()


class Chart:
    """Curves of several things and a legend.

    Args:
        height: Of the whole, pixels.
    """

    def __init__(self, title: str, height: int, x: Axis, y: Axis) -> None:
        self._x_axis, self._y_axis = x, y
        self._bottom = height - MARGIN
        self._num_curves = 0
        self._parts = [*_page(WIDTH, height), _words(LEFT, 24, title, size=14)]
        for value, text in x.marks.items():
            at = self._x(value)
            self._parts.append(_line(at, TOP, at, self._bottom))
            self._parts.append(_words(at, self._bottom + 18, text, anchor="middle"))
        for value, text in y.marks.items():
            at, colour = self._y(value), "#333" if value in y.dark else "#ddd"
            self._parts.append(_line(LEFT, at, RIGHT, at, colour))
            self._parts.append(_words(LEFT - 8, at + 4, text, anchor="end"))
        centre, middle = (LEFT + RIGHT) / 2, (TOP + self._bottom) / 2
        self._parts.append(_words(centre, self._bottom + 40, x.label, anchor="middle"))
        self._parts.append(
            f'<text x="18" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 18'
            f' {middle:.1f})">{escape(y.label)}</text>'
        )

    def add(
        self,
        name: str,
        *curves: Sequence[Point],
        dots: Sequence[Point] = (),
        bars: Sequence[tuple[float, float, float]] = (),
    ) -> None:
        """Draw curves of one thing, the first solid, others dashed.

        Args:
            bars: Intervals: x, and y from and to.

        Raises:
            ValueError: There are no more colours.
        """
        if self._num_curves == len(COLOURS):
            raise ValueError(f"more than {len(COLOURS)} curves: draw fewer")
        colour = COLOURS[self._num_curves]
        for number, curve in enumerate(curves):
            dash = ' stroke-dasharray="5 4"' if number else ""
            points = " ".join(f"{self._x(x):.1f},{self._y(y):.1f}" for x, y in curve)
            self._parts.append(
                f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dash}'
                f' points="{points}"/>'
            )
        for x, low, high in bars:
            self._parts.append(_line(self._x(x), self._y(low), self._x(x), self._y(high), colour))
        self._parts += [_dot(self._x(x), self._y(y), colour) for x, y in dots]
        at = TOP + 12 + 22 * self._num_curves
        self._parts.append(
            f'<line x1="{RIGHT + 14}" x2="{RIGHT + 38}" y1="{at - 4}" y2="{at - 4}"'
            f' stroke="{colour}" stroke-width="3"/>'
        )
        self._parts.append(_words(RIGHT + 44, at, name))
        self._num_curves += 1

    def svg(self, *notes: str) -> str:
        """Return the document, with lines of explanation."""
        first = self._bottom - 18 * len(notes) + 10
        explained = [
            _words(RIGHT + 14, first + 18 * number, note, fill="#555")
            for number, note in enumerate(notes)
        ]
        return "\n".join([*self._parts, *explained, "</svg>", ""])

    def _x(self, value: float) -> float:
        return LEFT + (RIGHT - LEFT) * self._x_axis.place(value)

    def _y(self, value: float) -> float:
        return self._bottom - (self._bottom - TOP) * min(max(self._y_axis.place(value), 0.0), 1.0)


def by_row(
    title: str,
    note: str,
    x: Axis,
    spans: tuple[int, int, int],
    rows: Mapping[str, Mapping[str, float]],
    figure: Callable[[float], str] | None = None,
) -> str:
    """Draw a row for each thing, narrow enough to be read on a phone.

    Args:
        note: Below the title.
        spans: Where the plot begins and ends, right of the names, and where the picture ends.
        rows: Figures by series, of the same ones in all rows. One series is drawn as bars, several
            as dots.
        figure: Text at the right end of a bar's row.

    Returns:
        The document.
    """
    series = list(dict.fromkeys(name for row in rows.values() for name in row))
    left, right, width = spans
    top = 82 if len(series) > 1 else 62
    bottom = top + ROW_HEIGHT * len(rows)
    parts = [*_page(width, bottom + (MARGIN if x.label else 12)), _words(12, 24, title, size=15)]
    parts.append(_words(12, 44, note, fill="#555"))
    for number, name in enumerate(series if len(series) > 1 else ()):
        at = 16 + 110 * number
        parts += [_dot(at, 62, COLOURS[number]), _words(at + 10, 66, name)]

    def place(value: float) -> float:
        return left + (right - left) * x.place(value)

    for value, text in x.marks.items():
        parts.append(_line(place(value), top, place(value), bottom))
        parts.append(_words(place(value), bottom + 18, text, anchor="middle"))
    if x.label:
        parts.append(_words((left + right) / 2, bottom + 40, x.label, anchor="middle"))
    for number, (name, figures) in enumerate(rows.items()):
        middle = top + ROW_HEIGHT * (number + 0.5)
        parts.append(_words(left - 8, middle + 4, name, anchor="end"))
        if len(series) == 1:
            [value] = figures.values()
            parts.append(
                f'<rect x="{left:.1f}" y="{middle - 8:.1f}" width="{place(value) - left:.1f}"'
                f' height="16" fill="{COLOURS[0]}"/>'
            )
            if figure:
                parts.append(_words(width - 12, middle + 4, figure(value), anchor="end"))
            continue
        ends = [place(value) for value in figures.values()]
        parts.append(_line(min(ends), middle, max(ends), middle))
        parts += [_dot(place(figures[each]), middle, COLOURS[i]) for i, each in enumerate(series)]
    return "\n".join([*parts, "</svg>", ""])


def _page(width: int, height: int) -> list[str]:
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
        f' width="{width}" font-family="sans-serif" font-size="12">',
        DARK,
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]


def _dot(x: float, y: float, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#ddd") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def _words(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, fill: str = "#222"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        f' fill="{fill}">{escape(text)}</text>'
    )
