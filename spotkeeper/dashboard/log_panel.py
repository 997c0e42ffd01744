"""The logs on a job's page: filtered by node, generation, time and words, and extended as new lines arrive."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field

from nicegui import run, ui

from spotkeeper.client.log_lines import NodeLines, in_order, shown
from spotkeeper.contract.record import Record
from spotkeeper.dashboard.feed import JobFeed
from spotkeeper.dashboard.frame import html, put
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.report.html.markup import el, join
from spotkeeper.report.text.words import count

LINES = 3000  # the newest lines that are shown
READ_S = 120.0  # real; a longer read is ended, so that no job keeps the server busy
EVERY = "all"
SINCE = {"10 minutes": 600.0, "1 hour": 3600.0, "1 day": 86400.0, EVERY: None}  # real seconds
_COLOR = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")


@dataclass(frozen=True)
class Chosen:
    """Which lines are shown. ``words``: lower case; a line must contain them."""

    node: object = EVERY
    gen: object = EVERY
    since: str = "1 hour"
    words: str = ""


@dataclass
class Tail:
    """The newest lines that match a :class:`Chosen`; each read appends new lines. ``found``: the matches so far."""

    logs: list[NodeLines]
    words: str
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=LINES))
    found: int = 0

    @classmethod
    def of(cls, feed: JobFeed, record: Record, chosen: Chosen) -> Tail:
        nodes = range(max(1, len(record.nodes))) if chosen.node == EVERY else [int(str(chosen.node))]
        gen = None if chosen.gen == EVERY else int(str(chosen.gen))
        span = SINCE.get(chosen.since)
        begins = 0 if span is None else round((time.time() - span) * 1000)
        return cls([NodeLines(feed.store, record.job, node, gen, begins) for node in nodes], chosen.words)

    def read(self, feed: JobFeed) -> str:
        """Append the new lines that match; return what went wrong, or "". Blocks."""
        try:
            ends = time.monotonic() + READ_S
            for log in self.logs:
                log.ends = ends
            for line in in_order(self.logs):
                text = _COLOR.sub("", shown(line, feed.target.clock)).replace(
                    "\r", " "
                )  # a browser makes it a new line
                if self.words in text.lower():
                    self.found += 1
                    self.lines.append(text)
        except StoreError as error:
            return str(error)
        if any(log.stopped for log in self.logs):
            return f"more than {READ_S:.0f} s of reading: the rest is not shown; choose a node or a shorter time"
        return ""

    def gens(self) -> list[int]:
        return sorted({chunk[0] for log in self.logs for chunk in log.chunks()})


class LogPanel:
    """Shows the newest lines of a job's logs; with the switch "Follow", scrolls to the last line after each read."""

    def __init__(self, feed: JobFeed) -> None:
        self._feed, self._record, self._tail = feed, None, None  # type: JobFeed, Record | None, Tail | None
        self._chosen = Chosen()
        self._busy = False

    def build(self) -> None:
        look = "dense outlined options-dense"
        with ui.row().classes("items-center q-mb-sm"):
            self._nodes = ui.select([EVERY], label="Node", value=EVERY, on_change=self._other).props(look)
            self._gens = ui.select([EVERY], label="Generation", value=EVERY, on_change=self._other).props(look)
            self._since = ui.select(list(SINCE), label="Last", value="1 hour", on_change=self._other).props(look)
            for choice in (self._nodes, self._gens, self._since):
                choice.style("min-width:130px")  # "Generation" in full
            self._words = ui.input("Search", on_change=self._other).props("dense outlined clearable debounce=400")
            self._follow = ui.switch("Follow", value=True)
            self._said = html(classes="dim small").props("role=status")
        self._lines = html("", "pre", "log").props('tabindex=0 aria-label="Log"')

    async def _other(self) -> None:
        if self._record is not None:
            await self.read(self._record)

    async def read(self, record: Record) -> None:
        """Show new lines. While an earlier read still runs, do nothing."""
        self._record = record
        nodes = [EVERY, *range(max(1, len(record.nodes)))]
        if self._nodes.options != nodes:
            self._nodes.set_options(nodes)
        words = str(self._words.value or "")[:200].lower()
        chosen = Chosen(self._nodes.value, self._gens.value, str(self._since.value), words)
        if self._busy:
            return
        self._busy = True
        try:
            if self._tail is None or chosen != self._chosen:
                self._tail, self._chosen = Tail.of(self._feed, record, chosen), chosen
                put(self._said, el("span", "reading ..."))
            tail = self._tail
            wrong = await run.io_bound(tail.read, self._feed) or ""
            gens = [EVERY, *(await run.io_bound(tail.gens) or ())]
        finally:
            self._busy = False
        if self._gens.options != gens and self._gens.value in gens:
            self._gens.set_options(gens)
        more = f", the last {LINES:,} are shown" if tail.found > LINES else ""
        put(self._said, el("span", wrong or (count(tail.found, "line") + more if tail.found else "no lines")))
        put(self._lines, join((_marked(line, words) for line in tail.lines), "\n"))
        if self._follow.value:
            code = f"const e = document.getElementById('{self._lines.html_id}'); if (e) e.scrollTop = e.scrollHeight"
            ui.run_javascript(code)


def _marked(line: str, words: str) -> str:
    if not words:
        return line
    out: list[str] = []
    low, at = line.lower(), 0
    while len(low) == len(line) and (found := low.find(words, at)) >= 0:
        out += [line[at:found], el("mark", line[found : found + len(words)])]
        at = found + len(words)
    return join([*out, line[at:]])
