"""A change of a stack as its reviewers read it: what happens to resources, to data, and to the bill. Pure.

``Review`` is what `spotkeeper review --json` prints, ``markdown`` the comment on a pull request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import accumulate, takewhile

from msgspec import Struct

from spotkeeper.report.cost import MONTH_H, PoolCost, Range, StackCost
from spotkeeper.report.markdown import LONGEST_BLOCK, block, code, table
from spotkeeper.report.preview import Change, Foreseen, Op

LABEL = "allow-data-loss"
OFF = "`infra/policy/config.json`"
REASONS = 8  # of one resource
COMMENT_BYTES = 60_000  # GitHub takes 65,536 characters of a comment, and whoever posts it adds a line of their own
WHOLE_BYTES = 1_000_000  # and a MiB of a job's summary
SHARE = 6  # no part but the list of changes takes more than this part of the room
_MARK = {Op.CREATE: "+", Op.UPDATE: "~", Op.REPLACE: "+-", Op.DELETE: "-", Op.KEEP: "kept"}
_DONE = {
    Op.CREATE: "created", Op.UPDATE: "updated", Op.REPLACE: "replaced", Op.DELETE: "deleted",
    Op.KEEP: "left in the cloud",
}  # fmt: skip
_WORST_FIRST = (Op.DELETE, Op.REPLACE, Op.KEEP, Op.UPDATE, Op.CREATE)


class Verdict(str, Enum):
    """What the guard says.

    ===========  ===================================================  =========
    verdict      when                                                 exit code
    ===========  ===================================================  =========
    ``clear``    no data would be lost                                0
    ``agreed``   data would be lost, and somebody said that it may    0
    ``refused``  data would be lost                                   4
    ``broken``   a rule that no stack may break would be broken       4
    ``failed``   the preview itself failed: nothing is known          1
    ===========  ===================================================  =========
    """

    CLEAR = "clear"
    AGREED = "agreed"
    REFUSED = "refused"
    BROKEN = "broken"
    FAILED = "failed"


class Broken(Struct, frozen=True):
    """What a rule of ``infra/policy`` finds. ``stops``: else it is advice."""

    rule: str
    type: str
    name: str
    message: str
    stops: bool


class Review(Struct, frozen=True):
    """``cost``: unless the stack file is wrong. ``before``: of the branch that this is compared with, where known."""

    stack: str
    verdict: Verdict
    foreseen: Foreseen
    cost: StackCost | None
    before: StackCost | None = None
    broken: tuple[Broken, ...] = ()


def judge(foreseen: Foreseen, agreed: bool, broken: Sequence[Broken] = ()) -> Verdict:
    """The guard. A preview that failed is never clear: it may have stopped before it came to the data."""
    if foreseen.errors:
        return Verdict.FAILED
    if foreseen.lost() and not agreed:
        return Verdict.REFUSED
    if any(one.stops for one in broken):
        return Verdict.BROKEN
    return Verdict.AGREED if foreseen.lost() else Verdict.CLEAR


# --- as Markdown ----------------------------------------------------------------------------


def marker(stack: str) -> str:
    """Begins a comment, so that the next one finds and replaces it. ``stack`` has a name's characters only."""
    return f"<!-- spotkeeper-review {stack} -->"


def markdown(review: Review, jobs: Sequence[str] = (), room: int = WHOLE_BYTES) -> str:
    """The comment: what the guard found and what it costs, then what changes, as far as it fits.

    Args:
        jobs: what the stack's own jobs will cost, each as Markdown.
        room: bytes. One comment has the reviews of several stacks, each with its share of :data:`COMMENT_BYTES`.
    """
    parts = [marker(review.stack), f"### Stack {code(review.stack)}: {_totals(review.foreseen)}"]
    cost = _cost(review.cost, review.before) if review.cost else ()
    of_jobs = ("\n#### Its jobs\n", *jobs) if jobs else ()
    for part in (_verdict(review, room), _rules(review.broken), cost, of_jobs):
        parts += _cut(part, room // SHARE)
    parts += _cut(_changes(review.foreseen), room - _bytes(parts))
    return "\n".join(parts) + "\n"


def _cut(lines: Iterable[str], room: int) -> list[str]:
    """As many as fit into so many bytes. How many do not is said, and where they are."""
    every = list(lines)
    if _bytes(every) <= room:
        return every
    room -= _bytes([_left(len(every))])
    ends = accumulate(_bytes([line]) for line in every)
    kept = sum(1 for _ in takewhile(lambda end: end <= room, ends))
    return [*every[:kept], _left(len(every) - kept)]


def _left(count: int) -> str:
    return (
        f"\n**{count:,} more line{'s' * (count != 1)} left out here:** the summary of this stack's job has all of them."
    )


def _bytes(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def _totals(foreseen: Foreseen) -> str:
    if foreseen.errors:
        return "the preview failed"
    counts = Counter(change.op for change in foreseen.changes)
    words = [f"{counts[op]} {_DONE[op]}" for op in _WORST_FIRST if counts[op]]
    return ", ".join(words) or "nothing changes"


def _verdict(review: Review, room: int) -> Iterator[str]:
    foreseen = review.foreseen
    if review.verdict is Verdict.FAILED:
        yield "\n**Nothing below is complete: the engine gave up.**\n"
        yield block("\n\n".join(foreseen.errors), min(LONGEST_BLOCK, room // SHARE // 4))  # a character has 4 bytes
        return
    if not foreseen.lost():
        return
    if review.verdict is Verdict.REFUSED:
        yield f"\n**Refused: data would be lost.** If that is meant, a maintainer sets the label `{LABEL}`.\n"
    else:
        yield f"\n**Data will be lost, and the label `{LABEL}` says that it may.**\n"
    for change in foreseen.lost():
        yield f"- {code(change.name)} would be {_DONE[change.op]}: {change.data}{_because(change)}"


def _rules(broken: Sequence[Broken]) -> Iterator[str]:
    for stops, said in (
        (True, f"**Refused: it breaks rules that no stack may break.** One that is not yours is turned off in {OFF}."),
        (False, "Advice of the rules:"),
    ):
        found = [one for one in broken if one.stops is stops]
        if found:
            yield f"\n{said}\n"
        for one in found:
            yield f"- {code(one.rule)}: {code(_kind(one.type))} {code(one.name)}: {code(one.message)}"


def _because(change: Change) -> str:
    return f" ({code(', '.join(change.why))})" if change.why else ""


def _changes(foreseen: Foreseen) -> Iterator[str]:
    if not foreseen.changes:
        return
    ordered = sorted(foreseen.changes, key=lambda c: (not c.data, not c.warning, _WORST_FIRST.index(c.op), c.name))
    rows = [[_MARK[c.op], code(_kind(c.type)), code(c.name), _reasons(c)] for c in ordered]
    yield "\n#### What changes\n"
    yield from table(["", "type", "name", "what differs"], rows)


def _kind(type_: str) -> str:
    """``gcp:compute/disk:Disk`` as ``compute.Disk``."""
    module, _, name = type_.rpartition(":")
    return f"{module.partition(':')[2].partition('/')[0]}.{name}" if ":" in module else type_


def _reasons(change: Change) -> str:
    why = [code(reason) for reason in change.why[:REASONS]]
    if len(change.why) > REASONS:
        why.append(f"{len(change.why) - REASONS} more")
    said = [part for part in (", ".join(why), f"**{change.warning}**" if change.warning else "") if part]
    return "; ".join(said)


# --- what it costs --------------------------------------------------------------------------


def _cost(cost: StackCost, before: StackCost | None) -> Iterator[str]:
    earlier = {pool.name: pool for pool in before.pools} if before else {}
    yield "\n#### What it costs\n"
    yield from _bounds(cost, before)
    head = ["pool", "machines", "spot, $/h each", "on-demand, $/h each", "a month at full size"]
    rows = [_pool(pool, earlier.get(pool.name), before is not None) for pool in cost.pools]
    gone = [name for name in earlier if name not in {pool.name for pool in cost.pools}]
    rows += [[f"{code(name)} (taken out)", "0", "", "", "$0"] for name in gone]
    yield ""
    yield from table(head, rows, right=(2, 3, 4))


def _pool(pool: PoolCost, earlier: PoolCost | None, compared: bool) -> list[str]:
    new = " (new)" if compared and earlier is None else ""
    month = _dollars(pool.month)
    if earlier is not None and _dollars(earlier.month) != month:
        month = f"{month}, was {_dollars(earlier.month)}"
    return [
        f"{code(pool.name)}{new} {code(pool.machine_type)}",
        _machines(pool) + (f", was {_machines(earlier)}" if earlier and _machines(earlier) != _machines(pool) else ""),
        "" if pool.static else _dollars(pool.spot, hourly=True),
        _dollars(pool.on_demand, hourly=True) if pool.on_demand_machines else "none is bought",
        month,
    ]


def _machines(pool: PoolCost) -> str:
    if pool.static:
        return f"{pool.machines}, day and night"
    return f"at most {pool.machines}, {pool.on_demand_machines} of them on-demand"


def _bounds(cost: StackCost, before: StackCost | None) -> Iterator[str]:
    def line(what: str, now: str, was: str | None) -> str:
        return f"- {what}: {now}{f', was {was}' if was is not None and was != now else ''}"

    always, month = _dollars(cost.always), _dollars(cost.month)
    yield line("Jobs or not, a month", always, _dollars(before.always) if before else None)
    yield line("Everything at full size, a month", month, _dollars(before.month) if before else None)
    yield line("Dynamic machines at once, at most", str(cost.machines), str(before.machines) if before else None)
    if cost.usd_per_hour is not None:
        yield f"- Dynamic machines together, at most: ${cost.usd_per_hour:,.2f} an hour (`limits.usd_per_hour`)"
    elif before is not None and before.usd_per_hour is not None:
        yield f"- **The cap of ${before.usd_per_hour:,.2f} an hour (`limits.usd_per_hour`) is taken away**"
    unknown = sorted({thing for pool in cost.pools for thing in pool.unknown})
    if unknown:
        yield f"- No price is known of {', '.join(map(code, unknown))}: say it with `prices:` in the pool"
    yield (
        f"\nList prices, from the cheapest zone with all on spot to the dearest with as many on-demand as may be; "
        f"{MONTH_H:.0f} hours, disks included, the function and what jobs store or send not."
    )


def _dollars(amount: Range | None, hourly: bool = False) -> str:
    if amount is None:
        return "unknown"
    least, most = (f"{value:,.3f}" if hourly else f"{value:,.0f}" for value in (amount.least, amount.most))
    return f"${least}" if least == most else f"${least} to ${most}"
