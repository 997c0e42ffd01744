"""Every rule and step of the protocol, removed or inverted in turn; the search must find what breaks.

A mutant is a small text patch of shipped code. Its old text must occur exactly once, so a mutant cannot
silently stop being one when the code changes. It is loaded in a process of its own, by an import hook; no file
is touched. ``story`` is the world that kills it, ``breaks`` how the verdict begins.

Not counted, because they are equivalent:

* deletion by name instead of by unique id: a stale call could hit a namesake, but names carry the attempt, and
  a namesake of a superseded attempt is superfluous itself;
* no idempotency key's death by itself: the boot deadline gives the attempt up later (both together: a mutant);
* an attach, or a deletion of a disk, without asking whether it is held: the cloud refuses it, the attachment is
  the mutex;
* deletion before superseding by itself: what may be deleted is known from the record that was read;
* a roll call that supersedes in an unanswered zone: the machine was listed when it was admitted (an option).
"""

from __future__ import annotations

from tests.model.mutants.broke import BROKE
from tests.model.mutants.nine_rules import RULES
from tests.model.mutants.steps import STEPS
from tests.model.mutate import CALM, CANCEL, KILL, MOVE, NOTICE, SWAP
from tests.model.worlds import SLOW_BOOT

MUTANTS = (*BROKE, *RULES, *STEPS)
# One of every kind, for `make test`.
SLICE = tuple(m for m in MUTANTS if m.story in (CALM, KILL, SWAP, CANCEL, MOVE, NOTICE, SLOW_BOOT))


def verdict(number: int, found: dict[str, object]) -> bool:
    """Whether the search broke the mutant, and in the way that its row says."""
    why = str(found["why"]).removeprefix("while all is calm: ")
    return bool(why) and why.startswith(MUTANTS[number].breaks)
