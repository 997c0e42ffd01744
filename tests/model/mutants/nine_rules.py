"""The nine rules of the protocol, each taken away; `docs/protocol.md` has their names in its table."""

from __future__ import annotations

from tests.model.mutate import (
    CALM,
    DECIDE,
    KILL,
    NOTICE,
    SUPERFLUOUS,
    Mutant,
    Patch,
    beside,
    calls,
    in_,
    world,
)

RULES = (
    Mutant("rule 1: no compare-and-swap", (), world("a slow round", rounds=2, zones=("a",), cas=False), "S"),
    Mutant(
        "rule 2: an admission does not say whom",
        in_("provisioning.slots", "uid=vm.uid, boot=fact.boot, address", "uid=None, boot=None, address"),
        CALM,
        "",
    ),
    Mutant(
        "rule 3: lists before it reads the record",
        beside(
            "reconcile.controller.steps",
            "READS = (ReadStep.RECORD, ReadStep.FACTS, ReadStep.ALLOCATION, ReadStep.LISTING)",
            "READS = (ReadStep.LISTING, ReadStep.RECORD, ReadStep.FACTS, ReadStep.ALLOCATION)",
        ),
        world("a slow round", rounds=2, zones=("a",)),
        "S4",
    ),
    Mutant(
        "rule 4: collects every attempt but its own, also newer ones",
        calls(SUPERFLUOUS, "    return attempt != 0\n"),
        world("a notice, a slow round", "noticed", rounds=2, zones=("a",), split=True),
        "S3",
    ),
    Mutant(
        "rule 5: deletes before it supersedes",
        calls(
            "            return vm.zone != slot.zone or (",
            "            return slot.notice is not None or vm.zone != slot.zone or (",
        ),
        NOTICE,
        "S3",
    ),
    Mutant(
        "rule 6: any machine of the right name is ours",
        (
            Patch(
                DECIDE + "snapshot",
                "            if vm.zone == slot.zone and slot.uid in (None, vm.uid):",
                "            if vm.zone == slot.zone:",
            ),
            Patch(
                DECIDE + "calls",
                "vm.zone != slot.zone or (slot.uid is not None and vm.uid != slot.uid)",
                "vm.zone != slot.zone",
            ),
        ),
        world("a twin of a machine that was taken", "killed forgotten", rounds=2, zones=("a",)),
        "L",
    ),
    Mutant(
        "rule 7: an intent never dies",
        in_("provisioning.slots", "    elif why := queries.stillborn(index, slot):\n", "    elif why := '':\n"),
        KILL,
        "L1",
    ),
    Mutant(
        "rule 8: a retry picks its zone anew",
        calls(
            "slot.attempt, slot.pool, slot.zone, slot.model,",
            "slot.attempt, slot.pool, max(draft.queries.answered), slot.model,",
        ),
        CALM,
        "S10",
    ),
    Mutant(
        "rule 9: takes the disk from a machine that has not let go",
        calls("        if any(fact.value == str(node.disk) for fact in freed):\n", "        if True:\n"),
        world("a roll call that nobody answers", "SILENT ROLL"),
        "S2",
    ),
)
