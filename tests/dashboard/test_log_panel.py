"""The logs of a job's page, without a browser: what a job prints must not slow the dashboard."""

from __future__ import annotations

import unicodedata

import pytest

from spotkeeper.client.target import Target
from spotkeeper.clock import Clock
from spotkeeper.dashboard.feed import JobFeed
from spotkeeper.dashboard.log_panel import LINE_CHARS, LINES, SHOWN_CHARS, Tail
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.html import markup


def text(tail: Tail) -> str:
    return "\n".join(line for block in tail.blocks for line in block.lines)


def test_long_lines_cost_no_more_than_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    escaped: list[int] = []
    plain = markup.plain
    monkeypatch.setattr(markup, "plain", lambda line: escaped.append(len(line)) or plain(line))
    tail, long = Tail([], "", "gpt"), "<" * (64 << 10)
    for number in range(3000):
        tail.add(f"{number} {long}")
    assert tail.found == 3000 and 0 < tail.shown < 3000
    assert tail.size <= SHOWN_CHARS and len(text(tail)) <= 1.01 * SHOWN_CHARS
    assert max(escaped) <= LINE_CHARS and sum(size > 1000 for size in escaped) == 3000, "each line once, its begin"
    assert "2999 &lt;" in text(tail) and "63,541 more characters: spotkeeper logs gpt" in text(tail)


def test_the_newest_lines_are_shown() -> None:
    tail = Tail([], "", "gpt")
    for number in range(LINES + 150):
        tail.add(f"line {number}")
    assert LINES - 100 < tail.shown <= LINES and tail.found == LINES + 150
    assert text(tail).split("\n") == [f"line {number}" for number in range(LINES + 150 - tail.shown, LINES + 150)]


def test_a_word_behind_the_cut_is_found() -> None:
    tail = Tail([], "needle", "gpt")
    tail.add("x" * 5000 + "Needle")
    tail.add("x" * 5000)
    assert tail.found == 1


def test_the_end_of_the_server_stops_a_read(bucket: tuple[Store, dict[str, str]]) -> None:
    """Python waits for its threads at its end: a read of two minutes would keep the process for as long."""
    feed = JobFeed(Target("prod", bucket[1]["SPOTKEEPER_BUCKET"], Clock(0.0, 0.0, 1.0)))
    stopped: list[str] = []
    with feed.stoppable(lambda: stopped.append("during")):
        feed.end()
    with feed.stoppable(lambda: stopped.append("after")):
        pass
    feed.end()
    assert stopped == ["during", "after"]


def test_text_without_control_characters_is_unchanged() -> None:
    for code in range(0x3000):
        gone = unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs") and chr(code) not in "\n\t"
        assert markup.plain(chr(code)) == ("" if gone else chr(code))
