"""The account of a job and the totals of a stack as text: tables for people, CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from spotkeeper.report.job.lines import (
    deadline_lines,
    headline,
    kept_lines,
    money_line,
    search_lines,
    shell_lines,
    undisturbed_line,
)
from spotkeeper.report.job.recovery import Recovery
from spotkeeper.report.job.view import JobView
from spotkeeper.report.money.account import Account, AttemptLine, Total, Totals
from spotkeeper.report.text.render import fitting
from spotkeeper.report.text.words import count, duration, gigabytes, usd

_MACHINES_SPARE = ("joined after", "asked for", "end", "start", "attempt", "$/h")
_RECOVERIES_SPARE = ("save", "start", "notice", "announced", "repeated", "gen", "nodes")
RECOVERY_WORDS = {"cause", "announced", "nodes", "replaced by"}  # columns of words; the others are numbers
_CONTROL = re.compile(r"[\x00-\x1f\x7f]+")
FORMULA = ("=", "+", "-", "@", "\uff1d", "\uff0b", "\uff0d", "\uff20")
_TOTALS_SPARE = ("machines", "egress", "on-demand", "lost hours")
_ELSEWHERE = "a wider terminal, --json and --csv show them"
_RECOVERIES_ELSEWHERE = "a wider terminal and --json show them"


def report(view: JobView, found: Account) -> RenderableType:
    parts: list[RenderableType] = [Text(headline(view), style="bold"), Text(money_line(view))]
    parts += [Text(line) for line in (*search_lines(view), *deadline_lines(view))]
    if view.money.saved_percent is not None:
        parts.append(Text(undisturbed_line(view), style="dim"))
    parts += [Text(line) for line in (goodput_line(found), *egress_lines(found))]
    parts.append(Text())
    if found.attempts:
        right = {"$/h", "paid", "cost"}
        parts += [fitting(map(machine_row, found.attempts), _MACHINES_SPARE, right, _ELSEWHERE), Text()]
    if found.lost:
        parts += [fitting(lost_rows(found), right={"node-hours", "cost", "share"}), Text()]
    if found.recoveries:
        rows = [recovery_row(one) for one in found.recoveries]
        right = set(rows[0]) - RECOVERY_WORDS
        parts.append(fitting(rows, _RECOVERIES_SPARE, right, _RECOVERIES_ELSEWHERE))
    else:
        parts.append(Text(quiet_line(found), style="dim"))
    parts += [Text(line) for line in (*shell_lines(view), *kept_lines(view))]
    return Group(*parts)


def goodput_line(found: Account) -> str:
    """The job's goodput: ``goodput 93.1 % of 12.40 node-hours; 30 steps were done twice; submitted by ada``."""
    share = "-" if found.goodput is None else f"{100 * found.goodput:.1f} %"
    again = f"; {count(found.steps_again, 'step')} done twice" if found.steps_again else ""
    return f"goodput {share} of {found.node_hours:.2f} node-hours{again}; submitted by {found.user}"


def egress_lines(found: Account) -> list[str]:
    """What went between regions: ``egress $1.20: 60.0 GB from us-central1 to us-east1 (checkpoint)``, a line a way."""
    sums: dict[tuple[str, str], tuple[float, float]] = {}
    for one in found.transfers:
        gb, cost = sums.get((one.way, one.what), (0.0, 0.0))
        sums[one.way, one.what] = gb + one.gb, cost + one.usd
    return [
        f"egress {usd(cost)}: {gigabytes(gb)} from {way.replace(' -> ', ' to ')} ({what})"
        for (way, what), (gb, cost) in sums.items()
    ]


def quiet_line(found: Account) -> str:
    """The line for a job without any recovery; it includes the number of machines that never joined."""
    never = count(found.never_joined, "machine")
    return "training was never interrupted" + (f"; {never} never joined" if found.never_joined else "")


def clock(at: float | None) -> str:
    """A moment in UTC, to the second; ``-`` for None."""
    return "-" if at is None else f"{datetime.fromtimestamp(at, timezone.utc):%m-%d %H:%M:%S}"


def machine_row(line: AttemptLine) -> dict[str, str]:
    return {
        "node": str(line.node),
        "attempt": str(line.attempt),
        "model": line.model.value,
        "zone": line.zone,
        "$/h": f"{line.price:.2f}",
        "start": clock(line.start),
        "end": clock(line.end) if line.end is not None else "runs",
        "paid": duration(line.hours * 3600.0),
        "cost": usd(line.usd),
        "joined after": "never" if line.joined is None else duration(line.joined - line.asked),
        "asked for": line.cause,
        "ended by": line.ended or "-",
    }


def lost_rows(found: Account) -> Iterable[dict[str, str]]:
    for line in found.lost:
        yield {
            "lost work": line.part.value,
            "cause": line.cause,
            "node-hours": f"{line.node_hours:.3f}",
            "cost": usd(line.usd),
            "share": f"{100 * line.node_hours / found.node_hours:.1f} %",
        }
    yield {
        "lost work": "all",
        "cause": "",
        "node-hours": f"{sum(line.node_hours for line in found.lost):.3f}",
        "cost": usd(sum(line.usd for line in found.lost)),
        "share": "-" if found.goodput is None else f"{100 * (1 - found.goodput):.1f} %",
    }


def recovery_row(one: Recovery) -> dict[str, str]:
    """Return a recovery's cells. Its end is the first step: "took" is "notice" and "stood still" together."""
    start_s = one.start_s or 0.0
    came = f"{one.replacement.value} in {one.zone}" if one.replacement else ""
    never = f"{len(one.never_joined)} never joined" if one.never_joined else ""
    return {
        "cause": one.cause,
        "announced": "yes" if one.announced else "no",
        "nodes": ", ".join(map(str, one.nodes)) or "-",
        "took": duration(one.seconds + start_s) if one.seconds is not None else "goes on",
        "notice": duration(one.notice_s),
        "save": duration(one.save_s if one.announced else None),
        "stood still": duration(one.stopped_s + start_s),
        "boot": duration(one.boot_s),
        "start": duration(one.start_s),
        "repeated": "-" if one.steps_again is None else str(one.steps_again),
        "replaced by": ", ".join(filter(None, (came, never))) or "-",
        "gen": str(one.gen),
    }


def summary(found: Totals) -> RenderableType:
    parts: list[RenderableType] = []
    for title, rows in (("job", found.jobs), ("submitted by", found.users), ("month", (*found.months, found.total))):
        cells = [_total(title, row, found.total.egress > 0) for row in rows]
        right = {name for cell in cells for name in cell} - {title}
        spare = tuple(name for name in _TOTALS_SPARE if cells and name in cells[-1])
        parts += [fitting(cells, spare, right, _ELSEWHERE), Text()]
    return Group(*parts[:-1])


def _total(title: str, row: Total, egress: bool) -> dict[str, str]:
    cells = {
        title: row.key,
        "jobs": str(row.jobs),
        "machines": str(row.machines),
        "node-hours": f"{row.node_hours:.2f}",
        "cost": usd(row.usd),
        "egress": usd(row.egress),
        "on-demand": usd(row.on_demand_only),
        "saved": usd(row.saved),
        "lost hours": f"{row.lost_hours:.2f}",
        "lost": usd(row.lost_usd),
    }
    if title == "job":  # a job's row needs no number of jobs
        del cells["jobs"]
    if not egress:
        del cells["egress"]
    return cells


def attempts_csv(found: Account) -> str:
    """The machines of an account as CSV, a line each: times as unix seconds, money as USD, unrounded."""
    rows = [{"job": found.job, "name": found.name, "user": found.user} | _plain(line) for line in found.attempts]
    return _csv(("job", "name", "user", *AttemptLine.__struct_fields__), rows)


def totals_csv(found: Totals) -> str:
    """The totals as CSV: a line for each job, user and month; the column ``by`` says which of the three."""
    by = (("job", found.jobs), ("user", found.users), ("month", found.months))
    rows = [{"by": word} | _plain(row) for word, of in by for row in of]
    return _csv(("by", *Total.__struct_fields__), rows)


def _plain(row: AttemptLine | Total) -> dict[str, object]:
    return {name: msgspec.to_builtins(getattr(row, name)) for name in row.__struct_fields__}


def _csv(columns: Sequence[str], rows: Iterable[dict[str, object]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: safe_cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue().rstrip("\n")


def safe_cell(value: object) -> object:
    """A cell's text on one line, quoted with ``'`` if a spreadsheet could take it for a formula.

    A formula can also begin with blanks or a full-width sign (OWASP, "CSV Injection").
    """
    if not isinstance(value, str):
        return value
    line = _CONTROL.sub(" ", value)
    return f"'{line}" if line.lstrip().startswith(FORMULA) else line
