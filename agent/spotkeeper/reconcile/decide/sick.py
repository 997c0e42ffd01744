"""Broken hosts: a crash with a sign of broken hardware on one machine; the second one there replaces the machine.

The first costs what any crash costs, for nobody knows yet. The second on the same machine is the machine's doing:
restarting on it cannot help, so it is given up like one that is lost, and the crash budget is not touched. A new
machine begins with a clean slate, and its first crash counts again, so a script that brings such errors about ends
by its budget all the same.
"""

from __future__ import annotations

from spotkeeper.reconcile.decide import slots
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.spec.facts import Kind
from spotkeeper.spec.model import Model
from spotkeeper.spec.sick import WORDS, Sign, parse

CAUSE = "host"


def blamed(draft: Draft) -> dict[int, Sign]:
    """Members whose machine shows a sign that is its own; what survivors print as well counts for one alone."""
    gen = draft.record.gen
    found: dict[int, Sign] = {}
    for index, slot in draft.members():
        signs = [sign for fact in draft.view.said(index, slot, Kind.SICK, gen) if (sign := parse(fact.value))]
        if signs:
            found[index] = signs[0]
    own: dict[int, Sign] = {index: sign for index, sign in found.items() if sign is not Sign.NETWORK}
    return own or (found if len(found) == 1 and len(draft.members()) > 2 else {})


def give_up(draft: Draft) -> bool:
    """Replace the machines of which this is the second such crash, instead of calling it one; whether any was."""
    again = [
        index
        for index in blamed(draft)
        if (cur := draft.ranks[index].cur) is not None and cur.sick and cur.model is not Model.STATIC
    ]
    for index in again:
        slots.lose(draft, index, CAUSE)
    return bool(again)


def note(draft: Draft) -> str:
    """Count a crash on the machines that it speaks of; what to add to its words."""
    found = blamed(draft)
    for index in found:
        cur = draft.ranks[index].cur
        draft.put_slot(index, "cur", sick=1 + (cur.sick if cur is not None else 0))
    return "".join(f"; {WORDS[sign]} on the machine of rank {index}" for index, sign in sorted(found.items()))
