"""Charts as SVG without scripts, for a file that opens anywhere: the timeline of machines, and lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from spotkeeper.contract.ledger import Event
from spotkeeper.contract.stack import Model
from spotkeeper.report.html.markup import Attribute, Markup, el, join
from spotkeeper.report.job.timeline import Bar, BarKind, Timeline
from spotkeeper.report.text.words import duration, usd

WIDTH = 1000.0  # of the drawing's own units; a page scales it
LEFT, RIGHT, LANE, TOP, FOOT = 70.0, 14.0, 34.0, 8.0, 24.0
HEIGHT = 240.0  # of lines
MODEL_COLOR = {Model.SPOT: "spot", Model.ON_DEMAND: "demand", Model.STATIC: "static", Model.RESERVED: "static"}
KIND_COLOR = {BarKind.NEVER: "bad", BarKind.SAVE: "save", BarKind.NOTICE: "notice", BarKind.LEAVE: "dim"}
BOOTS = (BarKind.BOOT, BarKind.NEVER)  # drawn hatched
KIND_WORD = {
    BarKind.BOOT: "boots",
    BarKind.NEVER: "boots, but never joins,",
    BarKind.READY: "ready",
    BarKind.TRAIN: "trains",
    BarKind.SAVE: "saves, waits for the next generation",
    BarKind.NOTICE: "trains with a preemption notice",
    BarKind.LEAVE: "is deleted",
    BarKind.REFUSED: "refused by the cloud",
}
KEYS = (
    *(("spot", "spot"), ("demand", "on-demand"), ("static", "static or reserved")),
    *(("save", "saves and waits"), ("notice", "notice")),
)
LOSS_UP = 8  # pixels above the middle of a lane: a replacement that is ready takes over in the same second
SIGNS = (
    "hatched: booting (red: never joined); pale: ready or leaving; ▲ notice, ✕ loss, ● takes over; "
    "dotted: a new generation"
)
_FADED = {BarKind.BOOT: 0.45, BarKind.NEVER: 0.45, BarKind.READY: 0.25, BarKind.LEAVE: 0.35}
_STEPS_S = (1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800, 2592000)
_LEAST, _MOST = 1e-300, 1e300  # values and spans beyond overflow; such values are not drawn
Series = Sequence[tuple[str, str, Sequence[tuple[float, float]]]]  # name, color's name, points


def bar_text(bar: Bar) -> str:
    said = f"node {bar.node}, attempt {bar.attempt}: {KIND_WORD[bar.kind]} for {duration(bar.end - bar.start)}"
    return f"{said}; {bar.model.value} in {bar.zone}, {usd(bar.price)}/h"


def key() -> Markup:
    """The key of the timeline."""
    boxes = (el("span", el("i", style=f"background:var(--{color})"), word, class_="nobreak") for color, word in KEYS)
    return el("div", join(boxes), el("span", SIGNS), class_="keys")


def timeline(view: Timeline) -> Markup:
    """Draw the machines of a job, one lane per node: bars show what a machine does, colors its price model."""
    lanes = {node: at for at, node in enumerate(view.nodes)}
    bottom = TOP + LANE * max(1, len(lanes))
    span = view.end - view.start

    def x(at: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (at - view.start) / span, 2)

    parts = [_ticks(span, lambda s: x(view.start + s), bottom)]
    parts += [_text(LEFT - 8, TOP + LANE * (at + 0.5) + 4, f"node {node}", "end") for node, at in lanes.items()]
    parts += [_bar(bar, TOP + LANE * lanes[bar.node], x(bar.start), x(bar.end)) for bar in view.bars]
    for at, number, cause in view.starts:
        title = el("title", f"generation {number}{f' ({cause})' if cause else ''}")
        line: dict[str, Attribute] = {"x1": x(at), "x2": x(at), "y1": TOP, "y2": bottom}
        parts.append(el("line", title, **line, stroke="var(--ink)", stroke_dasharray="2 3", opacity="0.6"))
    parts += [
        _mark(mark.event, x(mark.at), TOP + LANE * (lanes[mark.node] + 0.5), mark.text)
        for mark in view.marks
        if mark.node in lanes
    ]
    hatch = el("path", d="M0 0L0 6", stroke="var(--card)", stroke_width="3")
    frame: dict[str, Attribute] = {"width": 6, "height": 6, "patternUnits": "userSpaceOnUse"}
    defs = el("defs", el("pattern", hatch, id="hatch", **frame))
    return _drawing("Machines of the job over time", bottom + FOOT, [defs, *parts])


def _bar(bar: Bar, top: float, left: float, right: float) -> Markup:
    high = (LANE - 8) / (2 if bar.shared else 1)
    color = f"var(--{KIND_COLOR.get(bar.kind, MODEL_COLOR[bar.model])})"
    frame: dict[str, Attribute] = {
        "x": left,
        "y": round(top + 4 + bar.row * high, 2),
        "width": max(1.0, round(right - left, 2)),
        "height": round(high - 1, 2),
    }
    title = el("title", bar_text(bar))
    if bar.kind is BarKind.REFUSED:
        return el("rect", title, **frame, fill="none", stroke=color, stroke_dasharray="3 2")
    drawn = el("rect", title, **frame, fill=color, opacity=_FADED.get(bar.kind))
    return join([drawn, el("rect", **frame, fill="url(#hatch)")]) if bar.kind in BOOTS else drawn


def _mark(event: Event, x: float, y: float, text: str) -> Markup:
    title = el("title", f"{event.value}: {text}".rstrip(": "))
    look: dict[str, Attribute] = {"stroke": "var(--card)", "stroke_width": 1}
    if event is Event.NOTICE:
        return el("path", title, d=f"M{x - 6} {y + 5}L{x + 6} {y + 5}L{x} {y - 6}Z", fill="var(--notice)", **look)
    if event is Event.LOSS:
        y -= LOSS_UP
        cross = f"M{x - 5} {y - 5}L{x + 5} {y + 5}M{x + 5} {y - 5}L{x - 5} {y + 5}"
        return el("path", title, d=cross, stroke="var(--bad)", stroke_width=3, fill="none")
    return el("circle", title, cx=x, cy=y, r=5, fill="var(--good)", **look)


def _ticks(span: float, x: Callable[[float], float], bottom: float) -> Markup:
    """Lines at round times since the start, at most eleven."""
    step = next((step for step in _STEPS_S if span / step <= 10), span / 10)
    parts = []
    for at in range(int(span / step) + 1):
        place = x(at * step)
        parts.append(el("line", x1=place, x2=place, y1=TOP, y2=bottom, stroke="var(--line)"))
        parts.append(_text(place, bottom + 16, duration(at * step), "middle"))
    return join(parts)


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return el("text", words, x=round(x, 1), y=round(y, 1), text_anchor=anchor, fill="var(--dim)", font_size=12)


def _round_step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten: the distance at which a span has three to seven grid lines."""
    least = 10.0 ** math.floor(math.log10(span / 4))
    return next(step for step in (least, 2 * least, 5 * least, 10 * least) if span / step <= 6)


def _drawing(label: str, height: float, parts: Sequence[Markup]) -> Markup:
    frame: dict[str, Attribute] = {
        "viewBox": f"0 0 {WIDTH:.0f} {height:.0f}",
        "width": "100%",
        "role": "img",
        "aria_label": label,
    }
    return el("div", el("svg", *parts, **frame, style="min-width:640px;display:block"), class_="scroll", tabindex=0)


def lines(
    label: str,
    series: Series,
    *,
    unit: str = "",
    on_time: bool = False,
    marks: Sequence[float] = (),
    from_zero: bool = False,
) -> Markup:
    """Draw lines over steps, or over seconds since the start. ``marks``: dotted lines at these places of the x axis."""
    xs = [x for _, _, points in series for x, _ in points]
    ys = [y for _, _, points in series for _, y in points if abs(y) < _MOST]
    if len(xs) < 2 or not ys:
        return el("p", "Not enough points to draw.", class_="dim")
    low, high = (min(0.0, *ys) if from_zero else min(ys)), max(ys)
    step = _round_step(max(high - low, _LEAST) if high > low else max(abs(high), _LEAST) if high else 1.0)
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    high = high if high > low else low + step
    first = min(xs)
    last = max(*xs, first + 1e-9)
    bottom = HEIGHT - FOOT

    def x(at: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (at - first) / (last - first), 2)

    def y(at: float) -> float:
        return round(bottom - (bottom - TOP - 6) * (at - low) / (high - low), 2)

    parts = []
    if on_time:
        parts.append(_ticks(last - first, lambda s: x(first + s), bottom))
    else:
        parts += [
            _text(x(first), bottom + 16, f"{first:,.0f}", "start"),
            _text((LEFT + WIDTH - RIGHT) / 2, bottom + 16, "step", "middle"),
            _text(x(last), bottom + 16, f"{last:,.0f}", "end"),
        ]
    for part in range(round((high - low) / step) + 1):
        value = low + part * step
        parts.append(el("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y(value), y2=y(value), stroke="var(--line)"))
        parts.append(_text(LEFT - 8, y(value) + 4, f"{unit}{value:,.4g}", "end"))
    for at in marks:
        if first <= at <= last:
            frame: dict[str, Attribute] = {"x1": x(at), "x2": x(at), "y1": TOP, "y2": bottom}
            parts.append(el("line", **frame, stroke="var(--bad)", stroke_dasharray="2 3"))
    for number, (name, color, points) in enumerate(series):
        path = " ".join(f"{x(at)},{y(value)}" for at, value in points if abs(value) < _MOST)
        look: dict[str, Attribute] = {"fill": "none", "stroke": f"var(--{color})", "stroke_width": 2}
        dashed = "6 4" if number else None
        parts.append(el("polyline", el("title", name), points=path, stroke_dasharray=dashed, **look))
    named = (el("span", el("i", style=f"background:var(--{color})"), name) for name, color, _ in series)
    drawing = _drawing(label, HEIGHT, parts)
    return join([el("div", join(named), class_="keys"), drawing]) if len(series) > 1 else drawing
