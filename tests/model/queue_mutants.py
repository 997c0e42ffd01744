"""Every rule of the queue, taken away in turn: its tests must notice.

``python -m tests.model.queue_mutants NUMBER`` runs ``tests/reconcile/decide/queue`` with one mutant, in a process
of its own, and fails if they pass.
"""

from __future__ import annotations

import sys

import pytest

from tests.model.mutate import CALM, Mutant, Patch, infect

TESTS = "tests/reconcile/decide/queue"


def _in(module: str, name: str, old: str, new: str) -> Mutant:
    return Mutant(name, (Patch(f"spotkeeper.reconcile.decide.queue.{module}", old, new),), CALM)


MUTANTS = (
    _in("order", "classes do not count", "for line in sorted(lines, reverse=True):", "for line in sorted(lines):"),
    _in(
        "order",
        "waiting raises no class",
        "claim.priority + int(waited // DAY_S)",
        "claim.priority + int(waited // 9e9)",
    ),
    _in("order", "the class is not kept", "now - claim.reserved_at < KEPT_CLASS_S else 0.0", "False else 0.0"),
    _in("order", "use does not count", "return self.spent[team] / self.share[team], first", "return 0.0, first"),
    _in(
        "scheduler",
        "a start is not charged",
        "        self.room.place(claim, count)\n        self.charge(claim, count)\n",
        "        self.room.place(claim, count)\n",
    ),
    _in(
        "scheduler",
        "jobs that would lose work run in the gap",
        "return claim.stop is not Stop.NEVER and reclaim",
        "return reclaim",
    ),
    _in(
        "scheduler",
        "jobs without recalls left run in the gap",
        "is not Stop.NEVER and reclaim.recalls_left(claim, self.now)",
        "is not Stop.NEVER",
    ),
    _in(
        "scheduler",
        "the gap is not taken back",
        "                found[each.job] = each, False\n",
        "                pass\n",
    ),
    _in(
        "scheduler",
        "the gap stays with its head",
        '                self._set(replace(self.running[filler.job], gap=""))\n',
        "                pass\n",
    ),
    _in(
        "scheduler",
        "latecomers delay the head",
        "            return None\n        taken.room.place(head, head.min)\n        return taken.room\n",
        "            return None\n        return None\n",
    ),
    _in(
        "order",
        "jobs that would lose work borrow",
        "        if claim.stop is not Stop.NEVER:\n            return False\n",
        "        return False\n",
    ),
    _in(
        "order",
        "machines come back before they are gone",
        "bool(claim.whom) and self.granted[claim.job] > claim.reserved",
        "False",
    ),
    _in("scheduler", "a lower class does not give way", "if theirs < mine or (fair", "if (fair"),
    _in(
        "scheduler",
        "a team may not take from a team beyond its share",
        "            fair = theirs == mine and",
        "            fair = False and",
    ),
    _in("scheduler", "a team takes from one that used less", " and after <= self.spent[team] / self.share[team]", ""),
    _in("scheduler", "two jobs take turns", " if not fair or not self.barred(claim, each)", ""),
    _in(
        "scheduler",
        "a recalled job forgets by whom",
        "(*old.barred, claim.job)[-BARRED:] if same",
        "old.barred if same",
    ),
    _in(
        "scheduler",
        "a spent month stops nothing",
        "            if claim.team in self.over:\n",
        "            if False:\n",
    ),
    _in("scheduler", "elastic jobs do not grow", "        if not self.heads:\n            self._grow()\n", ""),
    _in("reclaim", "no protection after a start", " + PROTECTED_S", ""),
    _in("reclaim", "no protection without a commit", " + EARLY_S", ""),
    _in("reclaim", "any number of recalls an hour", '(HOURLY, HOUR_S, "hour"), ', ""),
    _in("reclaim", "any number of recalls a day", ', (DAILY, DAY_S, "day"))', ",)"),
    _in("reclaim", "jobs that would lose work are taken from", "victim.stop is Stop.NEVER:", "False:"),
    _in("reclaim", "jobs that end soon are taken from", "victim.ends - now < ENDING_S:", "False:"),
    _in("reclaim", "reservations never lapse", "return claim.dry_since is not None and", "return False and"),
    _in("reclaim", "needless victims are taken", "    taken.give_back()\n", ""),
    _in("reclaim", "machines are taken in vain", "    if not taken.fits:\n        return None\n", ""),
    _in("reclaim", "earlier recalls do not count", "(1 + sum(now - at < DAY_S for at in victim.recalls))", "1"),
    _in("reclaim", "a team loses more than its excess", "if victim.fair and before <= 1e-6:", "if False:"),
    _in("takeover", "machines are taken over at once", "< SHORT_S:", "< 0:"),
    _in("takeover", "machines are taken over again and again", " or now - claim.took < AGAIN_S:", ":"),
    _in("takeover", "machines of another zone are taken over", "    return all(found) and", "    return"),
    _in("scheduler", "freed machines go to anybody", "and not self.taker(claim) and", "and"),
    _in(
        "scheduler", "rivals go on looking", "(*taken.victims.values(), *self._rivals(claim))", "taken.victims.values()"
    ),
    _in("room", "no limit of the team's machines", "+ count > team.max_machines:", "< 0:"),
    _in("room", "no limit of the team's money", "> most + EPSILON:", "> 9e9:"),
    _in("room", "reserved machines cost money twice", 'self._usd[""] = -sum(', 'self._usd[""] = -0 * sum('),
    _in("room", "reserved machines are paid for at all times", "if one.usable(now)", "if one"),
    _in(
        "order",
        "reserved capacity begins at once",
        "stack, self.over, now)\n        self.spent",
        "stack, self.over)\n        self.spent",
    ),
    _in("scheduler", "jobs keep what limits allow no more", "        self._over_limits()\n", ""),
    _in("use", "use does not decay", "_RATE = log(2) / HALF_LIFE_S", "_RATE = 1e-12"),
    _in(
        "use",
        "entitlements ignore classes",
        "for priority in sorted(wanted, reverse=True):",
        "for priority in sorted(wanted):",
    ),
)


def killed(number: int) -> bool:
    """Whether the tests notice; the process is the mutant's from now on."""
    infect(MUTANTS[number])
    return pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", TESTS]) == 1


if __name__ == "__main__":
    sys.exit(not killed(int(sys.argv[1])))
