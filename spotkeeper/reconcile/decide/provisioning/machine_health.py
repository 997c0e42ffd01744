"""Finds running machines that need a replacement: near their planned end, slow, or on a broken host.

Reads reports and notes the findings in the record; the package's docstring explains the three cases.
"""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.cloud import Vm
from spotkeeper.contract.facts import SIGN_WORDS, Kind, Sign, parse_sign
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Slot
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide.draft import HOUR_S, Draft
from spotkeeper.reconcile.decide.snapshot import admitted

PLANNED_END = "planned end"  # causes of attempts
STRAGGLER_SWAP = "swap of a straggler"
HOST = "host"
STRAGGLER = "straggler"  # a replacement reason
SPREAD = 0.1  # share of maxRunDuration over which the nodes' replacements are spread
MOST = 0.5  # share of maxRunDuration before which no machine is replaced

# -- planned ends


def note_end(draft: Draft, index: int) -> None:
    """Record a machine's planned end and its notice, each when it is due.

    The planned end is the one that the cloud has set. It is recorded when the machine's replacement must be requested.
    A notice is recorded when the machine's last save must begin.
    """
    cur = draft.nodes[index].cur
    if cur is None or not admitted(cur):
        return
    if cur.ends is not None:
        if cur.notice is None and draft.now >= urgent(draft, cur.ends):
            draft.put_slot(index, "cur", notice=cur.ends)
        return
    vm = draft.queries.vm(index, cur)
    if vm is None:
        return
    ends = vm.ends if vm.ends is not None and draft.now >= turn(draft, index, vm, vm.ends) else None
    over = _reservation_ends(draft, cur, vm)
    if over is not None and (ends is None or over < ends):
        ends = over
    if ends is None:
        return
    draft.put_slot(index, "cur", ends=ends)
    draft.put(index, refused=())  # a new need: offers refused earlier may be requested again
    why = "its reserved capacity ends, so it" if ends == over else "machine"
    detail = f"{why} ends in {max(0.0, ends - draft.now):.0f} s"
    draft.log(Event.ENDING, f"r{index}.a{cur.attempt}", node=index, slot=cur, cause=PLANNED_END, detail=detail)


def _reservation_ends(draft: Draft, slot: Slot, vm: Vm) -> float | None:
    """Return when the slot's reserved capacity ends, once its machine must be replaced for that; else None.

    All its machines end at that time, so they are replaced together, in one stop of the gang.
    """
    pool = draft.snapshot.stack.pool(slot.pool) if slot.reservation is not None else None
    found = pool.reservation(slot.zone, slot.reservation) if pool is not None else None
    if found is None or found.ends is None:
        return None
    lead = min(_lead_s(draft), MOST * max(0.0, found.ends - vm.created))
    return found.ends if draft.now >= found.ends - lead else None


def turn(draft: Draft, index: int, vm: Vm, ends: float) -> float:
    """Return when to request the replacement of a machine that the cloud ends at ``ends``; both virtual unix seconds.

    The time differs from node to node, so that not all replacements are requested together.
    """
    run = max(0.0, ends - vm.created)
    spread = SPREAD * run * (index + 1) / len(draft.nodes)
    return ends - min(_lead_s(draft) + spread, MOST * run)


def _lead_s(draft: Draft) -> float:
    """Return how long the replacement of a machine takes at most, seconds."""
    times = draft.times
    return draft.queries.boot_s + times.cold_s + draft.save_s() + times.stop_s + times.margin_s


def urgent(draft: Draft, ends: float) -> float:
    """Return the latest time to begin a save before a machine goes at ``ends``, virtual unix seconds."""
    return ends - draft.save_s() - draft.times.margin_s


def planned(slot: Slot) -> bool:
    """Whether a machine goes only because of its planned end. A notice before that end is a preemption."""
    return slot.ends is not None and slot.notice in (None, slot.ends)


def over(slot: Slot) -> bool:
    """Whether a machine has reached its planned end, so that its loss is not a preemption."""
    return slot.ends is not None and slot.notice == slot.ends


# -- stragglers


def swap_straggler(draft: Draft, *, calm: bool) -> None:
    """Request a replacement of the machine that lags most, and withdraw requests for machines that keep up again.

    ``calm``: whether no replacement or probe is in progress; if False, no new replacement is requested.
    """
    for index, node in enumerate(draft.nodes):
        asked = node.replace_reason == STRAGGLER and not draft.record.stop and node.cur is not None
        if asked and node.cur is not None and _caught_up(draft, index, node.cur):
            draft.put(index, replace_reason=None)
    spec, record = draft.snapshot.spec, draft.record
    if spec is None or spec.stragglers != "replace" or not calm or draft.snapshot.draining:
        return
    if record.stop or record.roll or record.pause or record.move or draft.now < record.gen_since + draft.times.settle_s:
        return
    lags = {index: slowness for index, slot in draft.members() if (slowness := lag(draft, index, slot))}
    recent = tuple(at for at in record.limits.swaps if draft.now - at < HOUR_S)
    if not lags or len(recent) >= draft.times.swaps_hour:
        return
    draft.set(limits=replace(record.limits, swaps=(*recent, draft.now)))
    draft.put(max(lags, key=lags.__getitem__), replace_reason=STRAGGLER, refused=())


def lag(draft: Draft, index: int, slot: Slot) -> int:
    """Return a machine's own step time in percent of the gang's median, as reported in this generation; 0: normal."""
    if slot.model is Model.STATIC:
        return 0
    gen = draft.record.gen
    said = [fact.value.partition("-") for fact in draft.queries.said(index, slot, Kind.LAGS, gen)]
    ended = {fact.value for fact in draft.queries.said(index, slot, Kind.KEEPS_UP, gen)}
    return max((int(percent) for which, _, percent in said if which not in ended), default=0)


def _caught_up(draft: Draft, index: int, slot: Slot) -> bool:
    """Whether the machine has reported the end of each of its lags. A new generation alone ends no lag."""
    said = {(fact.gen, fact.value.partition("-")[0]) for fact in draft.queries.said(index, slot, Kind.LAGS)}
    return said <= {(fact.gen, fact.value) for fact in draft.queries.said(index, slot, Kind.KEEPS_UP)}


# -- broken hosts


def host_faults(draft: Draft) -> dict[int, Sign]:
    """Return the members whose machine shows a sign of broken hardware, with that sign.

    After a loss all survivors print network errors. So these count only if just one of at least three members has them.
    """
    found: dict[int, Sign] = {}
    for index, slot in draft.members():
        facts = draft.queries.said(index, slot, Kind.HARDWARE_FAULT, draft.record.gen)
        if signs := [sign for fact in facts if (sign := parse_sign(fact.value))]:
            found[index] = signs[0]
    own: dict[int, Sign] = {index: sign for index, sign in found.items() if sign is not Sign.NETWORK}
    return own or (found if len(found) == 1 and len(draft.members()) > 2 else {})


def repeated_host_faults(draft: Draft) -> list[int]:
    """Return nodes whose dynamic machine shows a sign of broken hardware for the second time."""
    found, members = host_faults(draft), draft.members()
    return [n for n, slot in members if n in found and slot.hardware_faults and slot.model is not Model.STATIC]


def note_host_faults(draft: Draft) -> str:
    """Count this crash for each machine with a sign of broken hardware. Returns a text to add to the crash's reason."""
    found = host_faults(draft)
    for index, slot in draft.members():
        if index in found:
            draft.put_slot(index, "cur", hardware_faults=slot.hardware_faults + 1)
    return "".join(f"; {SIGN_WORDS[sign]} on the machine of node {index}" for index, sign in sorted(found.items()))
