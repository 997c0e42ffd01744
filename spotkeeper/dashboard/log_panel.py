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
from spotkeeper.report.html.markup import Markup, el, escape, join
from spotkeeper.report.text.words import count

LINES = 3000  # the newest lines that are shown, and at most
SHOWN_CHARS = 1_000_000  # of markup: a browser and the server hold them for each open page
LINE_CHARS = 2000  # of a line that are shown: a job can print lines of 128 KB
_BLOCK_LINES, _BLOCK_CHARS = 100, 32_000  # of lines that are sent together
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


@dataclass(eq=False)
class Block:
    """Lines that the browser gets as one element. ``size``: characters of markup."""

    lines: list[Markup] = field(default_factory=list)
    size: int = 0

    def full(self) -> bool:
        return len(self.lines) >= _BLOCK_LINES or self.size >= _BLOCK_CHARS


@dataclass(eq=False)
class Tail:
    """The newest lines that match a :class:`Chosen`, as markup; each read appends new lines, each escaped once.

    ``found``: the matches so far; ``shown`` and ``size``: lines and characters of ``blocks``.
    """

    logs: list[NodeLines]
    words: str
    name: str  # the job's
    blocks: deque[Block] = field(default_factory=deque)
    found: int = 0
    shown: int = 0
    size: int = 0

    @classmethod
    def of(cls, feed: JobFeed, record: Record, chosen: Chosen) -> Tail:
        nodes = range(max(1, len(record.nodes))) if chosen.node == EVERY else [int(str(chosen.node))]
        gen = None if chosen.gen == EVERY else int(str(chosen.gen))
        span = SINCE.get(chosen.since)
        begins = 0 if span is None else round((time.time() - span) * 1000)
        logs = [NodeLines(feed.store, record.job, node, gen, begins) for node in nodes]
        return cls(logs, chosen.words, record.name)

    def read(self, feed: JobFeed) -> str:
        """Append the new lines that match; return what went wrong, or "". Blocks."""
        for log in self.logs:
            log.ends = time.monotonic() + READ_S
        try:
            with feed.stoppable(self._stop):
                for line in in_order(self.logs):
                    self.add(shown(line, feed.target.clock))
        except StoreError as error:
            return str(error)
        if any(log.stopped for log in self.logs):
            return f"more than {READ_S:.0f} s of reading: the rest is not shown; choose a node or a shorter time"
        return ""

    def _stop(self) -> None:
        for log in self.logs:
            log.ends = 0.0

    def add(self, line: str) -> None:
        """Append a line if it matches. The oldest blocks go once the others have enough."""
        text = _COLOR.sub("", line) if "\x1b" in line else line
        text = text.replace("\r", " ")  # a browser makes it a new line
        if self.words and self.words not in text.lower():
            return
        self.found += 1
        markup = _marked(text[:LINE_CHARS], self.words)
        if len(text) > LINE_CHARS:
            rest = f" ... {len(text) - LINE_CHARS:,} more characters: spotkeeper logs {self.name}"
            markup = join([markup, el("span", rest, class_="dim")])
        if not self.blocks or self.blocks[-1].full():
            self.blocks.append(Block())
        block = self.blocks[-1]
        block.lines.append(markup)
        block.size += len(markup)
        self.shown, self.size = self.shown + 1, self.size + len(markup)
        while len(self.blocks) > 1 and (self.shown > LINES or self.size > SHOWN_CHARS):
            oldest = self.blocks.popleft()
            self.shown, self.size = self.shown - len(oldest.lines), self.size - oldest.size

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
        self._lines = ui.element("pre").classes("log").props('tabindex=0 aria-label="Log"')
        self._sent: dict[Block, tuple[int, ui.html]] = {}  # lines that the browser has of each block, and their element

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
        more = f", the last {tail.shown:,} are shown" if tail.found > tail.shown else ""
        none = (
            "no lines"
            if chosen.since == EVERY
            else f"no lines in the last {chosen.since.removeprefix('1 ')}; older ones: Last, {EVERY}"
        )
        put(self._said, el("span", wrong or (count(tail.found, "line") + more if tail.found else none)))
        if self._send(tail) and self._follow.value:
            code = f"const e = document.getElementById('{self._lines.html_id}'); if (e) e.scrollTop = e.scrollHeight"
            ui.run_javascript(code)

    def _send(self, tail: Tail) -> bool:
        """Send the blocks that have changed, and delete those that are gone. Returns whether there were any."""
        gone = [block for block in self._sent if block not in tail.blocks]
        for block in gone:
            self._sent.pop(block)[1].delete()
        new = [block for block in tail.blocks if block not in self._sent or self._sent[block][0] < len(block.lines)]
        for block in new:
            if block not in self._sent:
                with self._lines:
                    self._sent[block] = 0, html("", "span")
            element = self._sent[block][1]
            put(element, "\n".join(block.lines) + "\n")
            self._sent[block] = len(block.lines), element
        return bool(new or gone)


def _marked(line: str, words: str) -> Markup:
    if not words:
        return escape(line)
    out: list[str] = []
    low, at = line.lower(), 0
    while len(low) == len(line) and (found := low.find(words, at)) >= 0:
        out += [line[at:found], el("mark", line[found : found + len(words)])]
        at = found + len(words)
    return join([*out, line[at:]])
