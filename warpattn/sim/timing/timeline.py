"""Draws a run: what every role and engine did when, in cycles of the cost model.

attend_0     ███ work ░ wait ███████        a row per role: its work and waits
tensor core     ▓▓▓▓▓▓▓   ▓▓▓▓▓▓            a row per engine, in the colour of the role that it serves
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from ..errors import SimulationError
from .replay import Span, Timing

# Groups of operations by parts of their names; the first match counts.
_GROUPS = (
    ("products", ("warp_group_dot", "tc_gen5", "dot", "mfma"), "#c44e52"),
    ("special functions", ("exp", "log", "sqrt", "rcp", "tanh", "divf", "sin", "cos"), "#8172b3"),
    ("memory", ("local_", "load", "store", "copy", "convert_layout", "atomic", "tmem", "buffer"), "#ccb974"),
    ("synchronisation", ("barrier", "bar.", "fence", "commit", "wait", "mbarrier", ".reg .pred e"), "#dd8452"),
    ("arithmetic", ("",), "#4c72b0"),
)
_WAIT = ("waits", "url(#waits)")
_ROLES = ("#4c72b0", "#55a868", "#dd8452", "#8172b3", "#937860", "#da8bc3", "#64b5cd", "#8c8c8c")
_LEFT, _ROW, _BAR, _WIDTH, _TOP = 120, 32, 22, 1080, 44
_MOST = 16_000  # cycles shown if no end is given
_LETTER = 6.6  # pixels of a letter in a bar
_LEAST = 0.005  # share of the window from which an engine has a row
_NAMES = 4  # operations that a bar names
_THIN = 3.0  # pixels below which a bar joins the one before it
_HIDDEN = {"issue"}  # engines that say little in a picture


class Window(NamedTuple):
    """The cycles that a picture shows; without an end at most `_MOST`."""

    start: float = 0.0
    end: float | None = None

    def bounds(self, cycles: float) -> tuple[float, float]:
        """Return the first and last cycle for a run of `cycles`."""
        last = min(cycles, self.start + _MOST) if self.end is None else self.end
        if not 0 <= self.start < min(last, cycles):
            raise SimulationError(f"cycles {self.start:.0f} to {last:.0f} are none of the run's 0 to {cycles:.0f}")
        return self.start, min(last, cycles)


def timeline_svg(timing: Timing, program: tuple[int, int, int], window: Window) -> str:
    """Draw one program as SVG: a row per role and engine; a bar's label is in it or appears on hovering."""
    suffix = f" of program {program}" if any(" of program " in role for role in timing.roles) else ""
    if not suffix and program != (0, 0, 0):
        raise SimulationError(f"the run has no program {program}")
    roles = [role for role in timing.roles if role.removesuffix(suffix) + suffix == role and _in_program(role, suffix)]
    if not roles:
        raise SimulationError(f"the run has no program {program}")
    engines = [name for name in timing.engines if _in_program(name, suffix)]
    low, high = window.bounds(timing.cycles)
    named = [name for name in engines if name.removesuffix(suffix) not in _HIDDEN]
    shown = [name for name in named if _share(timing.of(name), low, high) >= _LEAST]
    scale = _WIDTH / (high - low)
    colours = {role: _ROLES[i % len(_ROLES)] for i, role in enumerate(roles)}
    lanes = [*roles, *shown]
    rows = {lane: _TOP + _ROW * i + (14 if i >= len(roles) else 0) for i, lane in enumerate(lanes)}
    bars: list[str] = []
    for lane, y in rows.items():
        spans = [span for span in timing.of(lane) if span.end > low and span.start < high]
        bars.append(_name(lane.removesuffix(suffix), y, _share(spans, low, high)))
        place = f'transform="translate(0 {y})" stroke-width="{_BAR}"'
        bars.append(f'<g {place} font-size="12" text-anchor="middle">')
        labels = ['<g pointer-events="none">']
        for span in _joined(spans, _THIN / scale):
            fill = colours.get(span.who, "#8c8c8c") if span.kind == "busy" else _group(span)[1]
            x, end = _LEFT + max(0.0, (span.start - low) * scale), _LEFT + min(_WIDTH, (span.end - low) * scale)
            bars.append(_bar(span, fill, x, end))
            labels += _label(span, x, end)
        bars += [*labels, "</g></g>"]
    bottom = _TOP + _ROW * len(lanes) + 14
    title = f"{timing.chip}{suffix}: cycles {low:.0f} to {high:.0f} of {timing.cycles:.0f}, by a model"
    parts = [*_frame(bottom + 44, title), *_grid(low, high, bottom), *bars]
    return "\n".join([*parts, *_legend(bottom + 30, colours, suffix), "</svg>", ""])


def _share(spans: Iterable[Span], low: float, high: float) -> float:
    """Return the part of the window with work."""
    return sum(max(0.0, min(s.end, high) - max(s.start, low)) for s in spans if s.kind != "wait") / (high - low)


def _in_program(lane: str, suffix: str) -> bool:
    return lane.endswith(suffix) if suffix else " of program " not in lane


def _frame(height: float, title: str) -> list[str]:
    wide = _LEFT + _WIDTH + 20
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" viewBox="0 0 {wide} {height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="13">',
        '<defs><pattern id="waits" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="5" height="5" fill="#f4f4f4"/><rect width="1" height="5" fill="#c9c9c9"/></pattern></defs>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="20" font-size="14" fill="#333">{escape(title)}</text>',
    ]


def _grid(low: float, high: float, bottom: float) -> list[str]:
    """Draw lines at round numbers of cycles."""
    raw = (high - low) / 8
    magnitude = 10 ** (len(str(max(1, int(raw)))) - 1)
    step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
    parts = []
    for tick in range(int(-(-low // step)) * step, int(high) + 1, step):
        x = _LEFT + (tick - low) * _WIDTH / (high - low)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{bottom}" stroke="#e4e4e4"/>')
        parts.append(f'<text x="{x:.1f}" y="{_TOP - 10}" fill="#777" font-size="12" text-anchor="middle">{tick}</text>')
    return parts


def _name(lane: str, y: float, fraction: float) -> str:
    label = f'<text x="{_LEFT - 8}" y="{y + 10}" text-anchor="end">{escape(lane)}</text>'
    place = f'x="{_LEFT - 8}" y="{y + 22}" fill="#777" font-size="11" text-anchor="end"'
    return f"{label}<text {place}>{fraction:.0%}</text>"


def _bar(span: Span, fill: str, x: float, end: float) -> str:
    where = " from ".join(f"{frame.file.rsplit('/', 1)[-1]}:{frame.line}" for frame in span.frames[:2])
    verb = "waits: " if span.kind == "wait" else ""
    text = f"{verb}{span.name}{' for ' + span.who if span.who else ''} at {where or 'no line'}, "
    text += f"{span.start:.0f} to {span.end:.0f}"
    line = f"M{x:.1f} {_BAR // 2}h{max(0.4, end - x):.1f}"
    return f'<path d="{line}" stroke="{fill}"><title>{escape(text)}</title></path>'


def _label(span: Span, x: float, end: float) -> list[str]:
    """Draw what fits into a bar; hovering finds the bar behind it."""
    label, ink = _fitting(span, max(0.4, end - x)), "#555" if span.kind == "wait" else "white"
    return [f'<text x="{(x + end) / 2:.1f}" y="15" fill="{ink}">{escape(label)}</text>'] if label else []


def _fitting(span: Span, width: float) -> str:
    """Return the longest label that fits a bar."""
    line = f"{span.frames[0].file.rsplit('/', 1)[-1]}:{span.frames[0].line}" if span.frames else ""
    labels = [f"{span.name} {line}".strip(), line, line.partition(":")[2]]
    return next((label for label in labels if label and len(label) * _LETTER + 4 < width), "")


def _group(span: Span) -> tuple[str, str]:
    if span.kind == "wait":
        return _WAIT
    return next((name, colour) for name, parts, colour in _GROUPS if any(part in span.name for part in parts))


def _joined(spans: Iterable[Span], gap: float) -> list[Span]:
    """Join spans that are too thin to see, and those of one source line, with the preceding one of the same kind."""
    kept: list[Span] = []
    for span in spans:
        last = kept[-1] if kept else None
        near = last is not None and span.start - last.end < gap and last.kind == span.kind and last.who == span.who
        if last is not None and near and (span.end - span.start < gap or _same(last, span)):
            name = f"{last.name}, {span.name}" if _adds_name(last, span) else last.name
            kept[-1] = last._replace(end=max(last.end, span.end), name=name)
        else:
            kept.append(span)
    return kept


def _same(a: Span, b: Span) -> bool:
    """Whether two spans of a kind are of one line, and of one colour."""
    one_colour = a.kind == "busy" or (a.kind == "work" and _group(a) == _group(b))
    return one_colour and a.frames[:1] == b.frames[:1]


def _adds_name(a: Span, b: Span) -> bool:
    """Whether a bar names the operation of a span that joins it: those of its line, the first few."""
    names = a.name.split(", ")
    return a.kind == "work" and _same(a, b) and b.name not in names and len(names) < _NAMES


def _legend(y: float, colours: dict[str, str], suffix: str) -> list[str]:
    parts, x = [], float(_LEFT)
    groups = [(name, colour) for name, _, colour in _GROUPS]
    for name, colour in [("roles:", ""), *groups, _WAIT, ("engines work for:", ""), *colours.items()]:
        name = name.removesuffix(suffix) if suffix else name
        if colour:
            parts.append(f'<rect x="{x:.0f}" y="{y - 9:.0f}" width="10" height="10" fill="{colour}"/>')
            x += 14
        parts.append(f'<text x="{x:.0f}" y="{y:.0f}" fill="#555" font-size="12">{escape(name)}</text>')
        x += len(name) * _LETTER + 14
    return parts


def chrome_trace(timing: Timing) -> dict[str, Any]:
    """Make a trace for Chrome and Perfetto: a process per program, a thread per lane, microseconds for cycles."""
    lanes = [*timing.roles, *timing.engines]
    programs = {name: i for i, name in enumerate(dict.fromkeys(_program(lane) for lane in lanes))}
    threads = {lane: i for i, lane in enumerate(lanes)}
    records: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": i, "args": {"name": name}} for name, i in programs.items()
    ]
    for lane, i in threads.items():
        name, place = lane.partition(" of program ")[0], {"pid": programs[_program(lane)], "tid": i}
        records.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
        records.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": i}})
    for span in timing.spans:
        place = {"pid": programs[_program(span.lane)], "tid": threads[span.lane]}
        name = f"wait: {span.name}" if span.kind == "wait" else span.name
        records.append({
            "ph": "X", "name": name, "cat": span.kind, **place, "ts": span.start, "dur": span.end - span.start,
            "args": {"lines": _lines(span.frames)} | ({"for": span.who} if span.who else {}),
        })  # fmt: skip
    return {"traceEvents": records, "displayTimeUnit": "ns"}


def _program(lane: str) -> str:
    return lane[lane.index("program ") :] if " of program " in lane else "program (0, 0, 0)"


def _lines(frames: Sequence[Any]) -> list[str]:
    return [str(frame) for frame in frames]
