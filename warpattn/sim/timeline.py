"""Pictures of a run: what every role and engine did when, in cycles of the cost model.

attend_0     ███ work ░ wait ███████
copies       ▒▒▒▒    ▒▒▒▒
tensor core     ▓▓▓▓▓▓▓   ▓▓▓▓▓▓
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .cost import Event
from .errors import SimulationError

_COLOURS = {"work": "#4c78a8", "wait": "#d8d8d8", "TMA load": "#72b7b2", "TMA store": "#eeca3b", "wgmma": "#e45756"}
_LEFT, _ROW, _WIDTH = 130, 26, 1000
_TICKS = 8


def timeline_svg(events: Sequence[Event], program: str) -> str:
    """An SVG of one program: a row per role and engine, idle time grey; the text of a bar shows on hovering."""
    mine = [event for event in events if event.program == program]
    if not mine:
        raise SimulationError(f"the run has no program {program}")
    lanes = list(dict.fromkeys(event.lane for event in sorted(mine, key=_order)))
    end = max(event.end for event in mine)
    scale = _WIDTH / end
    height = _ROW * (len(lanes) + 2) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 20}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for row, lane in enumerate(lanes):
        parts.append(f'<text x="8" y="{_ROW * row + 26}">{escape(lane)}</text>')
        parts += [_bar(event, row, scale) for event in mine if event.lane == lane]
    for i in range(_TICKS + 1):
        x = _LEFT + _WIDTH * i / _TICKS
        y = _ROW * len(lanes) + 30
        parts.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{end * i / _TICKS:.0f}</text>')
    parts.append(_legend({event.kind for event in mine}, _ROW * (len(lanes) + 1) + 24))
    return "\n".join([*parts, "</svg>", ""])


def _order(event: Event) -> tuple[bool, str]:
    """Roles first, engines after them."""
    return event.kind not in ("work", "wait"), event.lane


def _bar(event: Event, row: int, scale: float) -> str:
    x, width = _LEFT + event.start * scale, max(0.3, (event.end - event.start) * scale)
    title = f"{event.name}: {event.start:.0f} to {event.end:.0f}"
    return (
        f'<rect x="{x:.1f}" y="{_ROW * row + 12}" width="{width:.1f}" height="{_ROW - 8}" '
        f'fill="{_COLOURS.get(event.kind, "#b279a2")}"><title>{escape(title)}</title></rect>'
    )


def _legend(kinds: set[str], y: int) -> str:
    parts, x = [], _LEFT
    for kind in [name for name in _COLOURS if name in kinds]:
        parts.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{_COLOURS[kind]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y}">{escape(kind)}</text>')
        x += 110
    parts.append(f'<text x="{x}" y="{y}" fill="#666">cycles of an uncalibrated model</text>')
    return "\n".join(parts)


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """The trace format of Chrome and Perfetto: a process per program, a thread per lane, microseconds for cycles."""
    programs = {name: i for i, name in enumerate(dict.fromkeys(event.program for event in events))}
    lanes = {key: i for i, key in enumerate(dict.fromkeys((event.program, event.lane) for event in events))}
    records: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": i, "args": {"name": f"program {name}"}}
        for name, i in programs.items()
    ]
    for (program, lane), i in lanes.items():
        records.append({"ph": "M", "name": "thread_name", "pid": programs[program], "tid": i, "args": {"name": lane}})
    for event in events:
        place = {"pid": programs[event.program], "tid": lanes[event.program, event.lane]}
        span = {"ts": event.start, "dur": event.end - event.start}
        records.append({"ph": "X", "name": event.name, "cat": event.kind, **place, **span})
    return {"traceEvents": records, "displayTimeUnit": "ns"}
