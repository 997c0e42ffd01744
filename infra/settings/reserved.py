"""Rules on a pool's reserved capacity (`pools[].reservations`); ``checks`` describes their form.

Spotkeeper buys no reservation: a buyer pays for it at once. So the stack file names reservations that exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime

from infra.settings.model import Settings
from infra.settings.pool import Pool, Reservation, moment
from spotkeeper.contract.parse.problem import Problem, join, nearest, problem

MOST_AWS = 30  # IAM allows 10,240 characters for all policies of a role
_GCP = re.compile(r"(projects/[^/\s]+/reservations/)?[a-z]([-a-z0-9]{0,61}[a-z0-9])?\Z")
_GCP_NAME = (
    "want a reservation's name (a letter, then letters, digits and -, at most 63, all lower case), or "
    "projects/<project>/reservations/<name>"
)
_AWS = re.compile(r"cr-[0-9a-f]{8,17}\Z")
_A_TIME = "want a time with its zone, such as 2026-12-01T11:30:00Z"


def pool_reservations(pool: Pool, s: Settings) -> Iterator[Problem]:
    if pool.kind == "static" and pool.reservations:
        message = (
            "only spot pools have this key: static machines are on-demand, and use open reservations by themselves"
        )
        yield Problem("reservations", message)
        return
    if pool.reservations and s.cloud == "aws" and sum(len(other.reservations) for other in s.pools) > MOST_AWS:
        yield Problem("reservations", f"the policy of the function's role has room for {MOST_AWS}, in all pools")
    for index, one in enumerate(pool.reservations):
        for found in (*_of(one, pool, s), *_times(one)):
            yield Problem(f"{join('reservations', index)}.{found.path}", found.message, found.value, found.hint)


def over(s: Settings, now: datetime) -> Iterator[str]:
    """Yield a caution for each reservation that has ended: the file is valid, but no job uses this reservation."""
    for position, pool in enumerate(s.pools):
        for index, one in enumerate(pool.reservations):
            if (ends := moment(one.ends)) is not None and ends <= now:
                path = f"{join(f'pools[{position}].reservations', index)}.ends"
                yield f"{path}: {one.name} ended at {one.ends}, so no job uses it: correct the time or remove it"


def _of(one: Reservation, pool: Pool, s: Settings) -> Iterator[Problem]:
    if s.cloud == "gcp" and not _GCP.match(one.name):
        yield problem("name", _GCP_NAME, one.name)
    elif s.cloud == "aws" and not _AWS.match(one.name):
        yield problem("name", "want the id of a capacity reservation, such as cr-0123456789abcdef0", one.name)
    elif [(each.name, each.zone) for other in s.pools for each in other.reservations].count((one.name, one.zone)) > 1:
        yield problem("name", "is named twice: give its machines to one pool", one.name)
    if one.zone not in pool.zones:
        yield problem("zone", "is not a zone of this pool", one.zone, nearest(one.zone, pool.zones))
    if one.count > pool.size:
        yield problem("count", f"is above the pool's size ({pool.size}), which reserved machines count in", one.count)
    if one.block and s.cloud == "gcp":
        yield Problem("block", "only aws has this key: leave it out")
    elif one.block and not one.ends:
        yield Problem("ends", "missing: EC2 ends the machines of a capacity block, so jobs must move before")


def _times(one: Reservation) -> Iterator[Problem]:
    wrong = [name for name in ("starts", "ends") if getattr(one, name) and moment(getattr(one, name)) is None]
    for name in wrong:
        yield problem(name, _A_TIME, getattr(one, name))
    starts, ends = moment(one.starts), moment(one.ends)
    if starts is not None and ends is not None and ends <= starts:
        yield problem("ends", f"is not after its start ({one.starts})", one.ends)
