"""The output of `trace`: each recovery as a waterfall, a bar for each part on a common axis of time."""

from __future__ import annotations

from collections.abc import Iterable

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from spotkeeper.report.job.trace import JobTrace, PartSpan, RecoveryPart, RecoveryTrace
from spotkeeper.report.text.words import count, duration, usd

_STYLE = {
    RecoveryPart.NOTICE: "yellow",
    RecoveryPart.SAVE: "cyan",
    RecoveryPart.STOP: "cyan",
    RecoveryPart.ORDER: "blue",
    RecoveryPart.BOOT: "blue",
    RecoveryPart.NEVER: "red",
    RecoveryPart.MOUNT: "magenta",
    RecoveryPart.RENDEZVOUS: "green",
    RecoveryPart.RESTORE: "green",
    RecoveryPart.FIRST: "green",
}


def waterfalls(trace: JobTrace, shown: Iterable[RecoveryTrace], now: float) -> RenderableType:
    """Return the chosen recoveries of a job, each as a table with bars."""
    total = len(trace.recoveries)
    parts: list[RenderableType] = [Text(f"{trace.name} ({trace.job}): {_recoveries(total)}", style="bold")]
    for one in shown:
        parts += [Text(), Text(heading(one, trace, now), style="bold"), _table(one, now), Text(slowest(one))]
    return Group(*parts)


def _recoveries(total: int) -> str:
    return f"{total} recoveries" if total != 1 else "1 recovery"


def heading(one: RecoveryTrace, trace: JobTrace, now: float) -> str:
    """``recovery 2, after 3h20m: loss (node 1), 1m40s without training, 12 steps repeated``."""
    nodes = f" ({'node' if len(one.nodes) == 1 else 'nodes'} {', '.join(map(str, one.nodes))})" if one.nodes else ""
    again = f", {count(one.steps_again, 'step')} repeated" if one.steps_again else ""
    running = ", still recovering" if one.end is None else ""
    idle = f"{duration(one.idle_s)} without training"
    return (
        f"recovery {one.number}, after {duration(one.began - trace.began)}: {one.cause}{nodes}, {idle}{again}{running}"
    )


def slowest(one: RecoveryTrace) -> str:
    """Return ``slowest part: boot of node 1, 58s of the 1m40s without training``."""
    if one.slowest is None:
        return "the times of the parts of this recovery are not recorded" if one.idle_s else "training has not stopped"
    took = f"{duration(one.slowest_s)} of the {duration(one.idle_s)} without training"
    if one.slowest.part is RecoveryPart.NEVER:
        about = one.slowest
        return f"slowest part: a machine for node {about.node} that never joined ({about.detail}), {took}"
    node = "" if one.slowest.node is None else f" of node {one.slowest.node}"
    return f"slowest part: {one.slowest.part.value}{node}, {took}"


def _table(one: RecoveryTrace, now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for title in ("part", "node", "after", "took"):
        table.add_column(title, justify="left" if title in ("part", "node") else "right", no_wrap=True)
    table.add_column("", ratio=1, min_width=10)
    table.add_column("", no_wrap=True, style="dim")
    ends = [now if span.end is None else span.end for span in one.spans]
    whole = max([*ends, one.began]) - one.began
    for span, end in zip(one.spans, ends, strict=True):
        took = duration(end - span.start) + ("" if span.end is not None else " so far")
        begin = span.start - one.began
        # An end beyond the width of a character, so that every part shows.
        bar = Bar(whole or 1.0, begin, max(end - one.began, begin + whole / 100.0), color=_STYLE[span.part])
        node = "" if span.node is None else str(span.node)
        table.add_row(span.part.value, node, duration(begin), took, bar, _about(span))
    return table


def _about(span: PartSpan) -> str:
    """``spot us-central1-a $2.54/h`` for a part that concerns a machine, ``1.2 GB`` for one that moves a checkpoint.

    Of a machine that never joined also how it ended.
    """
    price = "" if span.price is None else f"{usd(span.price)}/h"
    size = "" if not span.bytes else f"{span.bytes / 1e9:.3g} GB" if span.bytes >= 1e8 else f"{span.bytes / 1e6:.3g} MB"
    about = " ".join(filter(None, (span.model.value if span.model else "", span.zone, price, size)))
    return f"{about}: {span.detail}" if span.detail else about
