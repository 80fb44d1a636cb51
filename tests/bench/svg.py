"""Lines and words of the plots, as SVG."""

from __future__ import annotations

from xml.sax.saxutils import escape


def line(x1: float, y1: float, x2: float, y2: float, colour: str = "#ddd") -> str:
    """A straight line; pixels."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def words(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, fill: str = "#222"
) -> str:
    """A line of text; pixels."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
        f' fill="{fill}">{escape(text)}</text>'
    )


def opening(width: int, height: int) -> list[str]:
    """The head of a document, and a white ground."""
    return [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
