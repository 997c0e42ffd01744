"""The planned end of a machine: the cloud itself ends it after its longest run (Compute Engine's maxRunDuration).

That end is known from the first day. It is noted in the record while there is time to boot a successor beside the
machine (``Slot.ends``), and becomes a notice like any other when nobody came until the last save. Machines of a
gang start together and would end together, so each rank has its turn within a tenth of that run, by its number.
It is no preemption, and says nothing of the market. EC2 has no such limit, and a static node none either.
"""

from __future__ import annotations

from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.seen import admitted
from spotkeeper.spec.cloud import Vm
from spotkeeper.spec.ledger import Event
from spotkeeper.spec.record import Slot

CAUSE = "max run"
SPREAD = 0.1  # of a run: the turns of a gang's ranks lie within it
MOST = 0.5  # of a run: no machine is replaced before


def note(draft: Draft, index: int) -> None:
    """Write the end of this rank's machine into the record when its turn has come, and the notice when time is up."""
    cur = draft.ranks[index].cur
    if cur is None or not admitted(cur):
        return
    if cur.ends is None:
        _note(draft, index, cur)
    elif cur.notice is None and draft.now >= urgent(draft, cur.ends):
        draft.put_slot(index, "cur", notice=cur.ends)


def _note(draft: Draft, index: int, cur: Slot) -> None:
    vm = draft.view.vm(index, cur)
    if vm is None or vm.ends is None or draft.now < turn(draft, index, vm, vm.ends):
        return
    draft.put_slot(index, "cur", ends=vm.ends)
    draft.put(index, refused=())  # a new need: offers refused before may be asked again
    detail = f"{max(0.0, vm.ends - draft.now):.0f} s ahead"
    draft.log(Event.ENDING, f"r{index}.a{cur.attempt}", rank=index, slot=cur, cause=CAUSE, detail=detail)


def turn(draft: Draft, index: int, vm: Vm, ends: float) -> float:
    """When this rank's successor is asked for, virtual unix seconds.

    Early enough for a boot that comes to nothing, an offer that is refused, and a save; and each rank apart.
    """
    times, run = draft.times, max(0.0, ends - vm.created)
    boot = draft.view.boot_s + times.cold_s + draft.save_s() + times.stop_s + times.margin_s
    spread = SPREAD * run * (index + 1) / len(draft.ranks)
    return ends - min(boot + spread, MOST * run)


def urgent(draft: Draft, ends: float) -> float:
    """When a gang must save at the latest for a machine that goes then."""
    return ends - draft.save_s() - draft.times.margin_s


def planned(slot: Slot) -> bool:
    """Whether its longest run is all that ends it. An earlier notice is a preemption, whatever was planned."""
    return slot.ends is not None and slot.notice in (None, slot.ends)


def over(slot: Slot) -> bool:
    """Whether its time is up: what befalls it now is that end."""
    return slot.ends is not None and slot.notice == slot.ends
