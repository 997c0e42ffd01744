"""The review of a change to a stack: what happens to resources, to data, and to the bill. Pure.

``Review`` is what `spotkeeper review --json` prints; ``markdown`` makes the comment on a pull request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate, takewhile

from msgspec import Struct

from spotkeeper.contract.stack import TeamState
from spotkeeper.report.money.cost import MONTH_H, PoolCost, Range, StackCost
from spotkeeper.report.review.preview import Change, Op, Preview
from spotkeeper.report.text.words import LONGEST_BLOCK, block, code, markdown_table

LABEL = "allow-data-loss"
OFF = "`infra/policy/config.json`"
REASONS = 8  # most reasons shown for one resource
COMMENT_BYTES = 60_000  # GitHub accepts 65,536 characters in a comment, and the poster adds a line
WHOLE_BYTES = 1_000_000  # GitHub accepts a MiB in a job's summary
SHARE = 6  # each part except the list of changes takes at most this fraction of the space
_MARK = {Op.CREATE: "+", Op.UPDATE: "~", Op.REPLACE: "+-", Op.DELETE: "-", Op.KEEP: "kept"}
_DONE = {
    Op.CREATE: "created", Op.UPDATE: "updated", Op.REPLACE: "replaced", Op.DELETE: "deleted",
    Op.KEEP: "left in the cloud",
}  # fmt: skip
_WORST_FIRST = (Op.DELETE, Op.REPLACE, Op.KEEP, Op.UPDATE, Op.CREATE)


class Verdict(str, Enum):
    """The verdict of the guard, which protects data and enforces rules.

    ===========  ===================================================  =========
    verdict      when                                                 exit code
    ===========  ===================================================  =========
    ``clear``    no data would be lost                                0
    ``agreed``   data would be lost, and a person accepted the loss   0
    ``refused``  data would be lost                                   4
    ``broken``   a mandatory rule would be broken                     4
    ``failed``   the preview itself failed, so nothing is known       1
    ===========  ===================================================  =========
    """

    CLEAR = "clear"
    AGREED = "agreed"
    REFUSED = "refused"
    BROKEN = "broken"
    FAILED = "failed"


class Broken(Struct, frozen=True):
    """A resource that breaks a rule of ``infra/policy``. ``stops``: the rule is mandatory; else it is advice."""

    rule: str
    type: str
    name: str
    message: str
    stops: bool


class Review(Struct, frozen=True):
    """The review of one stack.

    ``cost`` is None if the stack file is invalid. ``before``: the cost on the base branch, if known.
    """

    stack: str
    verdict: Verdict
    preview: Preview
    cost: StackCost | None
    before: StackCost | None = None
    broken: tuple[Broken, ...] = ()


def judge(preview: Preview, agreed: bool, broken: Sequence[Broken] = ()) -> Verdict:
    """Decide the verdict.

    A failed preview is never ``clear``: perhaps Pulumi stopped before it compared the resources that hold data.
    """
    if preview.errors:
        return Verdict.FAILED
    if preview.lost() and not agreed:
        return Verdict.REFUSED
    if any(one.stops for one in broken):
        return Verdict.BROKEN
    return Verdict.AGREED if preview.lost() else Verdict.CLEAR


# --- as Markdown ----------------------------------------------------------------------------


def marker(stack: str) -> str:
    """The first line of a comment, by which the next review finds and replaces the comment. ``stack``: a valid name."""
    return f"<!-- spotkeeper-review {stack} -->"


def markdown(review: Review, jobs: Sequence[str] = (), limit: int = WHOLE_BYTES) -> str:
    """Return a stack's part of the comment on a pull request, as Markdown.

    It has the verdict, broken rules, the cost, the forecasts of jobs, and as many changes as fit.

    Args:
        jobs: the forecasts of the stack's own jobs, each as Markdown.
        limit: the most bytes of this part; all stacks together have :data:`COMMENT_BYTES`.
    """
    parts = [marker(review.stack), f"### Stack {code(review.stack)}: {_totals(review.preview)}"]
    cost = _cost(review.cost, review.before) if review.cost else ()
    of_jobs = ("\n#### Its jobs\n", *jobs) if jobs else ()
    for part in (_verdict(review, limit), _rules(review.broken), cost, of_jobs):
        parts += _cut(part, limit // SHARE)
    parts += _cut(_changes(review.preview), limit - _bytes(parts))
    return "\n".join(parts) + "\n"


def _cut(lines: Iterable[str], limit: int) -> list[str]:
    """Keep as many lines as fit into ``limit`` bytes, and append a line that counts the others."""
    every = list(lines)
    if _bytes(every) <= limit:
        return every
    limit -= _bytes([_left(len(every))])
    ends = accumulate(_bytes([line]) for line in every)
    kept = sum(1 for _ in takewhile(lambda end: end <= limit, ends))
    return [*every[:kept], _left(len(every) - kept)]


def _left(count: int) -> str:
    lines = f"{count:,} more line{'s' * (count != 1)}"
    return f"\n**{lines} left out here:** the summary of this stack's CI job has all of them."


def _bytes(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _totals(preview: Preview) -> str:
    if preview.errors:
        return "the preview failed"
    counts = Counter(change.op for change in preview.changes)
    words = [f"{counts[op]} {_DONE[op]}" for op in _WORST_FIRST if counts[op]]
    return ", ".join(words) or "nothing changes"


def _verdict(review: Review, limit: int) -> Iterator[str]:
    preview = review.preview
    if review.verdict is Verdict.FAILED:
        yield "\n**Incomplete: the engine stopped with an error.**\n"
        yield block("\n\n".join(preview.errors), min(LONGEST_BLOCK, limit // SHARE // 4))  # a character has 4 bytes
        return
    if not preview.lost():
        return
    if review.verdict is Verdict.REFUSED:
        yield f"\n**Refused: data would be lost.** If that is intended, a maintainer sets the label `{LABEL}`.\n"
    else:
        yield f"\n**Data will be lost; the label `{LABEL}` accepts that.**\n"
    for change in preview.lost():
        because = f" ({code(', '.join(change.why))})" if change.why else ""
        yield f"- {code(change.name)} would be {_DONE[change.op]}: {change.data}{because}"


def _rules(broken: Sequence[Broken]) -> Iterator[str]:
    for stops, said in (
        (True, f"**Refused: mandatory rules are broken.** To turn a rule off, edit {OFF}."),
        (False, "Advice:"),
    ):
        found = [one for one in broken if one.stops is stops]
        if found:
            yield f"\n{said}\n"
        for one in found:
            yield f"- {code(one.rule)}: {code(_kind(one.type))} {code(one.name)}: {code(one.message)}"


def _changes(preview: Preview) -> Iterator[str]:
    if not preview.changes:
        return
    ordered = sorted(preview.changes, key=lambda c: (not c.data, not c.warning, _WORST_FIRST.index(c.op), c.name))
    rows = [[_MARK[c.op], code(_kind(c.type)), code(c.name), _reasons(c)] for c in ordered]
    yield "\n#### Changes\n"
    yield from markdown_table(["", "type", "name", "differences"], rows)


def _kind(type_: str) -> str:
    """Shorten a resource type: ``gcp:compute/disk:Disk`` becomes ``compute.Disk``."""
    module, _, name = type_.rpartition(":")
    return f"{module.partition(':')[2].partition('/')[0]}.{name}" if ":" in module else type_


def _reasons(change: Change) -> str:
    why = [code(reason) for reason in change.why[:REASONS]]
    if len(change.why) > REASONS:
        why.append(f"{len(change.why) - REASONS} more")
    said = [part for part in (", ".join(why), f"**{change.warning}**" if change.warning else "") if part]
    return "; ".join(said)


# --- cost -----------------------------------------------------------------------------------


def _cost(cost: StackCost, before: StackCost | None) -> Iterator[str]:
    earlier = {pool.name: pool for pool in before.pools} if before else {}
    yield "\n#### Cost\n"
    yield from _bounds(cost, before)
    head = ["pool", "machines", "spot, $/h each", "on-demand, $/h each", "$/month at full size"]
    rows = [_pool(pool, earlier.get(pool.name), before is not None) for pool in cost.pools]
    gone = [name for name in earlier if name not in {pool.name for pool in cost.pools}]
    rows += [[f"{code(name)} (removed)", "0", "", "", "$0.00"] for name in gone]
    yield ""
    yield from markdown_table(head, rows, right=(2, 3, 4))


def _pool(pool: PoolCost, earlier: PoolCost | None, compared: bool) -> list[str]:
    new = " (new)" if compared and earlier is None else ""
    month = _dollars(pool.month)
    if earlier is not None and _dollars(earlier.month) != month:
        month = f"{month}, was {_dollars(earlier.month)}"
    return [
        f"{code(pool.name)}{new} {code(pool.machine_type)}",
        _machines(pool) + (f", was {_machines(earlier)}" if earlier and _machines(earlier) != _machines(pool) else ""),
        "" if pool.static else _dollars(pool.spot),
        _dollars(pool.on_demand) if pool.on_demand_machines else "not used",
        month,
    ]


def _machines(pool: PoolCost) -> str:
    if pool.static:
        return f"{pool.machines}, around the clock"
    return f"at most {pool.machines}, {pool.on_demand_machines} of them on-demand"


def _bounds(cost: StackCost, before: StackCost | None) -> Iterator[str]:
    def line(what: str, now: str, was: str | None) -> str:
        return f"- {what}: {now}{f', was {was}' if was is not None and was != now else ''}"

    always, month = _dollars(cost.always), _dollars(cost.month)
    yield line("Idle (static machines), per month", always, _dollars(before.always) if before else None)
    yield line("Everything at full size, per month", month, _dollars(before.month) if before else None)
    yield line("Most dynamic machines at once", str(cost.machines), str(before.machines) if before else None)
    if cost.usd_per_hour is not None:
        yield f"- Most that all dynamic machines may cost: ${cost.usd_per_hour:,.2f} an hour (`limits.usd_per_hour`)"
    elif before is not None and before.usd_per_hour is not None:
        yield f"- **The limit of ${before.usd_per_hour:,.2f} an hour (`limits.usd_per_hour`) is removed**"
    yield from _teams(cost, before)
    unknown = sorted({thing for pool in cost.pools for thing in pool.unknown})
    if unknown:
        yield f"- Unknown prices: {', '.join(map(code, unknown))}; set `prices:` in the pool"
    yield (
        f"\nList prices, disks included, for a month of {MONTH_H:.0f} hours. Lowest: all machines on spot in the "
        "cheapest zone; highest: as many on-demand as allowed, in the most expensive zone. Not included: the function, "
        "storage, and traffic of jobs."
    )


def _teams(cost: StackCost, before: StackCost | None) -> Iterator[str]:
    earlier = {team.name: team for team in before.teams} if before else {}
    for team in cost.teams:
        was = earlier.get(team.name)
        said = f", was {_team(was)}" if was is not None and _team(was) != _team(team) else ""
        new = " (new)" if before is not None and was is None else ""
        yield f"- Team {code(team.name)}{new}: {_team(team)}{said}"
    for name in earlier.keys() - {team.name for team in cost.teams}:
        yield f"- **Team {code(name)} is removed**"


def _team(team: TeamState) -> str:
    limits = (
        f"share {team.share:g}",
        f"at most {team.max_machines} machines" if team.max_machines is not None else "",
        f"${team.max_usd_hour:,.2f} an hour" if team.max_usd_hour is not None else "",
        f"${team.max_usd_month:,.2f} a month" if team.max_usd_month is not None else "",
        f"{len(team.members)} member{'s' * (len(team.members) != 1)}",
        f"`priority: high` for {len(team.high)}" if team.high is not None else "",
    )
    return ", ".join(part for part in limits if part)


def _dollars(amount: Range | None) -> str:
    if amount is None:
        return "unknown"
    least, most = (f"{value:,.2f}" for value in (amount.least, amount.most))
    return f"${least}" if least == most else f"${least} to ${most}"
