"""Other steps of the protocol, each removed or inverted."""

from __future__ import annotations

from tests.model.mutate import (
    CALM,
    CANCEL,
    DECIDE,
    KILL,
    MOVE,
    MOVE_NO_ROOM,
    NOTICE,
    OVER,
    SWAP,
    TWO_FINISH,
    TWO_JOBS,
    TWO_RANKS,
    TWO_STATIC,
    Mutant,
    Patch,
    beside,
    calls,
    in_,
    world,
)
from tests.model.worlds import (
    BLANK_NODE,
    DEAR,
    DEAR_ABROAD,
    LEFT_NODE,
    LONGEST,
    MOVE_ABROAD,
    MOVE_BUCKET,
    MOVE_UNSTORED,
    NODE_NOTICE,
    RECALL,
    RECALL_ENDS,
    RUNG,
    SEEK,
    SLOW_BOOT,
    WIPED,
    WIPED_LATER,
)

STEPS = (
    Mutant(
        "done before everything is gone",
        in_(
            "gang.requests",
            "    if queries.vms or disks or queries.snapshots or slots or _claims(draft) or "
            "rungs.unreported(draft):\n        return\n",
            "",
        ),
        CANCEL,
        "L2",
    ),
    Mutant(
        "done though a zone did not answer",
        in_("gang.requests", "or not queries.complete or draft.snapshot.blind:", "or draft.snapshot.blind:"),
        world("a job is cancelled, a zone does not answer", "blind", "cancel"),
        "L2",
    ),
    Mutant(
        "a slot is given back though a zone did not answer",
        in_("provisioning.reservations", OVER, "    return not draft.queries.vms.get((grant.node, grant.attempt))\n"),
        world("a machine is taken, a zone does not answer", "killed blind"),
        "S8",
    ),
    Mutant(
        "a machine's end is not seen",
        in_(
            "snapshot",
            "        if vm is None or vm.status in BROKEN:\n            return True\n",
            "        if vm is None:\n            return False\n",
        ),
        KILL,
        "L",
    ),
    Mutant(
        "a disk that nobody holds is left over",
        calls(
            "    if number in (node.disk, node.copy):\n",
            "    if node.cur is not None:\n        return True\n    if number in (node.disk, node.copy):\n",
        ),
        KILL,
        "S7",
    ),
    Mutant(
        "a generation without its disks",
        in_(
            "gang.generation",
            "    if len(attached) == len(ready):\n        return True\n",
            "    if ready:\n        return True\n",
        ),
        CALM,
        "",
    ),
    Mutant(
        "nobody waits for the save",
        in_(
            "draft",
            "        return all(self.queries.ended(index, slot, record.gen) for index, slot in self.members())\n",
            "        return True\n",
        ),
        SWAP,
        "S4",
    ),
    Mutant(
        "leaves the zone before the save",
        in_(
            "gang.zone_move",
            "is not SlotState.MEMBER or draft.halted()):\n",
            "is not SlotState.MEMBER or draft.record.stop):\n",
        ),
        MOVE,
        "S4",
    ),
    Mutant(
        "a probe takes over",
        (
            *in_(
                "provisioning.replacement",
                "(node.replace_reason is not None or goes(cur))",
                "(node.replace_reason is not None or node.probing or goes(cur))",
            ),
            *in_("gang.zone_probe", "    if not probing:\n", "    if probing or not probing:\n"),
        ),
        DEAR,
        "",
    ),
    Mutant(
        "a probe is never given back",
        in_("gang.zone_probe", "    if not probing:\n", "    if probing or not probing:\n"),
        DEAR,
        "",
    ),
    Mutant(
        "a backup takes the node of a machine that is up",
        in_(
            "provisioning.replacement",
            "    if cur is None or following is None or cur.state is not SlotState.INTENT:\n",
            "    if cur is None or following is None:\n",
        ),
        SLOW_BOOT,
        "S4",
    ),
    Mutant(
        "a backup is kept when the slow machine is up",
        in_(
            "provisioning.replacement",
            "node.probing or backed(node) or",
            'node.probing or getattr(node.next, "cause", "") == "backup" or',
        ),
        SLOW_BOOT,
        "L",
    ),
    Mutant(
        "a refused copy ends no move",
        in_("gang.zone_move", "or _refused(draft) or _silent(draft)", "or _silent(draft)"),
        MOVE_ABROAD,
        "L",
    ),
    Mutant(
        "a lost region ends no move",
        in_("gang.zone_move", "or _refused(draft) or _silent(draft)", "or _refused(draft)"),
        MOVE_ABROAD,
        "L",
    ),
    Mutant(
        "arrives without the copies",
        in_(
            "gang.zone_move",
            "    if all(copied(draft, index, node) for index, node in enumerate(draft.nodes)):\n",
            "    if all(node.copy is not None for node in draft.nodes):\n",
        ),
        MOVE_ABROAD,
        "",
    ),
    Mutant(
        "a copy in the bucket that cannot be had ends no move",
        in_("gang.zone_move", "why := bucket_move.failed(draft) or ", "why := "),
        MOVE_BUCKET,
        "",
    ),
    Mutant(
        "waits for the copy in the bucket for ever",
        in_("gang.bucket_move", "draft.now >= move.since + UPLOAD_S:", "draft.now < move.since:"),
        MOVE_UNSTORED,
        "L1",
    ),
    Mutant(
        "goes back to blank disks",
        in_("gang.bucket_move", "            disk=old.disk,\n", ""),
        MOVE_BUCKET,
        "",
    ),
    Mutant(
        "arrives though a zone did not answer",
        in_(
            "gang.zone_move",
            "    return move is not None and {move.zone, draft.record.zone} <= draft.queries.answered\n",
            "    return move is not None\n",
        ),
        world("a zone move, a zone does not answer", "blind", "move"),
        "",
    ),
    Mutant(
        "a requested move does not wait for machines there",
        in_(
            "gang.zone_probe",
            "            _probe(draft, options, every)\n        return\n",
            '            zone_move.begin(draft, options[0].zone, "asked")\n        return\n',
        ),
        MOVE,
        "S4",
    ),
    Mutant(
        "a requested move begins with machines that have not said hello",
        in_(
            "gang.zone_probe",
            "    elif all(slot.state is not SlotState.INTENT for slot in slots):\n",
            "    elif slots:\n",
        ),
        MOVE,
        "S4",
    ),
    Mutant(
        "a requested move without room for two machines neither begins nor ends",
        (
            *in_("gang.zone_probe", '        zone_move.begin(draft, full, "asked")\n', "        return\n"),
            *in_("gang.zone_probe", "    if draft.now < asked.since + ASKED_S:\n", "    if asked.since < ASKED_S:\n"),
        ),
        MOVE_NO_ROOM,
        "L5",
    ),
    Mutant(
        "a gang that has lost all machines gives back those that boot abroad",
        in_("gang.zone_probe", "not (lost or wanted or (asked", "not (wanted or (asked"),
        SEEK,
        "L",
    ),
    Mutant(
        "a move forgets the machines that stand by",
        in_("gang.zone_move", "replace(node, next=node.next if taken else None,", "replace(node, next=None,"),
        DEAR,
        "S4",
    ),
    Mutant(
        "egress counts for nothing in what a move is worth",
        in_("job.progress", "MoveCost(copy_s, egress.usd(draft, zone))", "MoveCost(copy_s, 0.0)"),
        DEAR_ABROAD,
        "S8",
    ),
    Mutant(
        "a request is taken in again and again",
        in_("gang.requests", "        if request.id in done:\n            continue\n", ""),
        SWAP,
        "",
    ),
    Mutant(
        "a stop is never over",
        in_("gang.generation", "        stop=False,\n", ""),
        NOTICE,
        "L",
    ),
    Mutant(
        "a loss is not followed by a new machine",
        in_("provisioning.slots", "        draft.vacate(index, cause)\n", "        pass\n"),
        KILL,
        "L",
    ),
    Mutant(
        "success by one member's word",
        in_("gang.exits", "and all(codes.get(index) == 0 for", "and any(codes.get(index) == 0 for"),
        TWO_FINISH,
        "S6",
    ),
    Mutant(
        "no cap",
        beside(
            "contract.allocation",
            "        return in_pool < pool.max_machines and",
            "        return",
        ),
        RECALL,
        "S8",
    ),
    Mutant(
        "a job keeps the machines that were reserved for another",
        in_("queue.claim", "    if written is not None and written.waiting:\n", "    if False:\n"),
        RECALL,
        "L1",
    ),
    Mutant(
        "a job whose machines were taken never comes back",
        in_("queue.claim", "    if waits and written is not None and written.reserved and", "    if False and"),
        RECALL_ENDS,
        "L5",
    ),
    Mutant(
        "a static machine may be granted twice",
        beside(
            "contract.allocation",
            "            return not taken\n",
            "            return True\n",
        ),
        TWO_STATIC,
        "S8",
    ),
    Mutant(
        "an idle static machine is taken, whatever it holds",
        in_("checkpoint.location", "    if commit is None or machine == node.machine:\n", "    if True:\n"),
        BLANK_NODE,
        "L",
    ),
    Mutant(
        "an idle static machine follows a machine that may still save",
        in_(
            "checkpoint.location",
            "    if not may_take(draft, index, machine):\n",
            "    if may_take(draft, index, machine):\n        return True\n    if True:\n",
        ),
        NODE_NOTICE,
        "S7",
    ),
    Mutant(
        "a gang begins from whatever checkpoint is there",
        (
            Patch(
                DECIDE + "checkpoint.location", "    if commit is None or machine == node.machine:\n", "    if True:\n"
            ),
            Patch(
                DECIDE + "checkpoint.location",
                "    return not given_up(draft) and lacks(draft, ready)\n",
                "    if True:\n        return False\n",
            ),
        ),
        LEFT_NODE,
        "S7",
    ),
    Mutant(
        "a machine whose longest run ends is given up before its successor stands by",
        in_(
            "provisioning.machine_health",
            '    draft.put_slot(index, "cur", ends=ends)\n',
            "    draft.put(index, cur=None)\n",
        ),
        LONGEST,
        "S4",
    ),
    Mutant(
        "a blank disk is gone on with, whatever the bucket has",
        in_("gang.generation", "    if mirrors.awaited(draft, ready):\n        return\n", ""),
        WIPED,
        "",
    ),
    Mutant(
        "any copy passes for the newest checkpoint",
        in_(
            "checkpoint.location",
            "bool(copies) and (parse_commit(copies[0].commit) or (0, 0)) >= commit",
            "bool(copies)",
        ),
        WIPED_LATER,
        "L",
    ),
    Mutant(
        "an older copy is fetched over what a disk has",
        (
            Patch(
                DECIDE + "checkpoint.mirrors",
                "location.lacks(draft, ready) and (told is None or told < commit)",
                "told != commit",
            ),
            Patch(
                DECIDE + "checkpoint.mirrors", "    wanted = location.covered(draft) or", "    wanted = bool(copies) or"
            ),
        ),
        WIPED_LATER,
        "L",
    ),
    Mutant(
        "a trial's new disk takes the place of the old one, whatever the bucket has",
        in_("gang.rungs", "if covered and not record.keep_disks else", "if not record.keep_disks else"),
        RUNG,
        "L",
    ),
    Mutant(
        "a trial that continues stops at the same rung again",
        in_("gang.rungs", "draft.set(trial=replace(trial, rung=_next(draft, of, trial.rung + 1)))", "pass"),
        RUNG,
        "L",
    ),
    Mutant(
        "a trial that waits at its rung never hears of the decision",
        (
            Patch(DECIDE + "gang.rungs", "return sweep.decided(state.told(new), trial.of)", "return state.told(new)"),
            Patch(DECIDE + "gang.rungs", "made = sweep.decided(state, trial.of)", "made = state"),
        ),
        RUNG,
        "L",
    ),
    Mutant("grants without compare-and-swap", (), TWO_JOBS._replace(name="two jobs, a slow round", cas=False), "S"),
    Mutant(
        "a generation of those that happen to be there",
        in_(
            "gang.generation",
            "if not ready or not (len(ready) == draft.size() or _smaller(draft, ready)):",
            "if not ready:",
        ),
        TWO_RANKS,
        "",
    ),
)
