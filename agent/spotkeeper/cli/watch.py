"""``watch``: a live view on a terminal; lines, one per event, anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spotkeeper.cli.errors import Exit
from spotkeeper.cli.output import console, emit_line, note
from spotkeeper.report.view import JobView
from spotkeeper.spec.record import Outcome

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

EVERY_S = 1.0  # real
EVENTS = 8


def watch(look: Callable[[], JobView], as_json: bool, wait: Callable[[float], None] = time.sleep) -> Exit:
    """Show the job until its outcome is known or it holds for a failure; Ctrl-C leaves it running.

    Returns:
        OK where it succeeded, FAILED where it failed, holds because it failed, or was cancelled.
    """
    plain = as_json or not sys.stdout.isatty()
    try:
        view = _lines(look, as_json, wait) if plain else _live(look, wait)
    except KeyboardInterrupt:
        note("the job goes on without anybody who watches; spotkeeper watch follows it again")
        raise
    return Exit.OK if view.outcome is Outcome.SUCCEEDED else Exit.FAILED


def _live(look: Callable[[], JobView], wait: Callable[[float], None]) -> JobView:
    """On a screen of its own: what a resize, a key or a long view does to it never comes into the scrollback.

    The last view does, once, whether the job's end or a Ctrl-C came first.
    """
    from rich.live import Live

    from spotkeeper.report.render import crash_log, live

    out = console()
    view = look()
    try:
        if not view.stands():
            with Live(Fitted(view), console=out, auto_refresh=False, screen=True) as screen:
                while not view.stands():
                    wait(EVERY_S)
                    view = look()
                    screen.update(Fitted(view), refresh=True)
    finally:
        out.print(live(view))
    if view.crash_log:
        out.print(crash_log(view), crop=False)
    return view


@dataclass(frozen=True)
class Fitted:
    """The live view with as many of its last events as the screen has lines for; ``live`` takes the others."""

    view: JobView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from spotkeeper.report.render import live

        own = options.reset_height()  # a panel grows to whatever height it is told
        for rows in range(EVENTS, 0, -1):
            lines = console.render_lines(live(self.view, rows), own)
            if len(lines) <= options.max_height or rows == 1:
                yield from console.render(live(self.view, rows), own)
                return


def _lines(look: Callable[[], JobView], as_json: bool, wait: Callable[[float], None]) -> JobView:
    from spotkeeper.report.lines import event_line, headline, hold_lines, kept_lines, money_line

    told: set[str] = set()
    while True:
        view = look()
        for line in view.events:
            if line.id not in told:
                told.add(line.id)
                emit_line(line) if as_json else print(event_line(line), flush=True)
        if view.stands():
            break
        wait(EVERY_S)
    if as_json:
        emit_line(view)
        return view
    print(
        "\n".join([headline(view), money_line(view), *view.crash_log, *hold_lines(view), *kept_lines(view)]), flush=True
    )
    return view
