"""The few shapes of which the drawn figures consist, as text."""

from __future__ import annotations

from html import escape

BLUE, DARK, RED, GREY, PALE = "#3d6fb4", "#1c2f4d", "#d1495b", "#8a8f98", "#f4f4f4"
GREEN, ORANGE = "#4f9d69", "#e0a030"


def box(x: float, y: float, wide: float, tall: float, fill: str = PALE, stroke: str = "none") -> str:
    """A rectangle."""
    edge = "" if stroke == "none" else f' stroke="{stroke}"'
    return f'<rect x="{x:g}" y="{y:g}" width="{wide:g}" height="{tall:g}" fill="{fill}"{edge} rx="2"/>'


def dot(x: float, y: float, fill: str, radius: float = 5) -> str:
    """A filled circle around (x, y)."""
    return f'<circle cx="{x:.1f}" cy="{y:g}" r="{radius:g}" fill="{fill}"/>'


def words(x: float, y: float, text: str, size: int = 13, fill: str = DARK, anchor: str = "start") -> str:
    """A line of text; `y` is its base line."""
    side = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}"{side}>{escape(text)}</text>'


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A line with a head at its end."""
    ends = f'x1="{x:g}" y1="{y:g}" x2="{to_x:g}" y2="{to_y:g}"'
    return f'<line {ends} stroke="{GREY}" stroke-width="1.5" marker-end="url(#head)"/>'


def picture(wide: float, tall: float, parts: list[str]) -> str:
    """A whole file, on white so that it can be read in a dark page."""
    head = '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    head = f'<defs>{head}<path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker></defs>'
    body = "\n".join([head, box(0, 0, wide, tall, "white"), *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {tall:g}" width="{wide:g}" '
        f'font-family="sans-serif">\n{body}\n</svg>\n'
    )
