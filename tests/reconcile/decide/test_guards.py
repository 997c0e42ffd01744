"""Guards one by one: a snapshot in which a decision is made, and changes of it each of which alone prevents it.

Both sides of each bound are here too: the last moment at which the decision is not made, and the first at which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as with_

import pytest
from msgspec.structs import replace

from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.cloud import Offer
from spotkeeper.contract.facts import SIGN_WORDS, Kind, Sign
from spotkeeper.contract.generation import Progress
from spotkeeper.contract.job import Checkpoint, Nodes
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.record import Limits, Node, Record, Roll
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.decide import Snapshot, Times, calls, decide
from spotkeeper.reconcile.decide.draft import Draft
from spotkeeper.reconcile.decide.gang import generation
from spotkeeper.reconcile.decide.provisioning import machine_health, offers, pending
from spotkeeper.reconcile.store.documents import OfferHistory
from tests.reconcile.decide.test_decide import NOW, fact, gang, member
from tests.reconcile.world import JOB, stack

Case = tuple[Record, Snapshot]
Change = Callable[[Record, Snapshot], Case]
TIMES = Times()
SAVED = Progress(3, 100, NOW, commit_gen=3, commit_step=90)


def calm(count: int, *said: object, **spec: object) -> Case:
    """A gang that has trained and saved for long, with these reports."""
    record, seen = gang(count, gen_since=NOW - 500)
    assert seen.spec is not None
    facts = (*seen.facts, *said)
    return record, with_(seen, spec=replace(seen.spec, **spec), facts=facts, progress=SAVED, grants_first=False)  # type: ignore[arg-type]


def reasons(record: Record, snapshot: Snapshot) -> list[str | None]:
    return [node.replace_reason for node in (decide(record, snapshot).record or record).nodes]


def on_record(**changes: object) -> Change:
    return lambda record, snapshot: (replace(record, **changes), snapshot)


def on_snapshot(**changes: object) -> Change:
    return lambda record, snapshot: (record, with_(snapshot, **changes))  # type: ignore[arg-type]


def on_spec(**changes: object) -> Change:
    return lambda record, snapshot: (record, with_(snapshot, spec=replace(snapshot.spec, **changes)))


def on_node(index: int, **changes: object) -> Change:
    def change(record: Record, snapshot: Snapshot) -> Case:
        nodes = list(record.nodes)
        nodes[index] = replace(nodes[index], **changes)
        return replace(record, nodes=tuple(nodes)), snapshot

    return change


def on_cur(index: int, **changes: object) -> Change:
    return lambda record, snapshot: on_node(index, cur=replace(record.nodes[index].cur, **changes))(record, snapshot)


def all_of(*changes: Change) -> Change:
    def change(record: Record, snapshot: Snapshot) -> Case:
        for one in changes:
            record, snapshot = one(record, snapshot)
        return record, snapshot

    return change


def changed(case: Case, *changes: Change) -> Draft:
    return Draft(*all_of(*changes)(*case))


# -- the slowest machine is replaced


def slow() -> Case:
    return calm(3, fact(0, Kind.LAGS, "0-140"), fact(2, Kind.LAGS, "0-190"), stragglers="replace")


def test_the_slowest_machine_is_replaced_and_the_swap_is_counted() -> None:
    record, snapshot = slow()
    record = on_node(2, refused=("an offer",))(record, snapshot)[0]
    record = replace(record, limits=Limits(swaps=(NOW - 3600, NOW - 3599)))
    found = decide(record, snapshot).record
    assert found is not None
    assert [node.replace_reason for node in found.nodes] == [None, None, machine_health.STRAGGLER]
    assert (found.nodes[2].refused, found.limits.swaps) == ((), (NOW - 3599, NOW))


@pytest.mark.parametrize(
    "change",
    [
        on_spec(stragglers="show"),
        on_snapshot(draining=True),
        on_snapshot(progress=None),
        on_record(stop=True, stop_since=NOW - 1, stop_deadline=NOW + 60),
        on_record(roll=Roll(ver=40, since=NOW - 1, cause="silence")),
        on_record(pause="limit"),
        on_record(gen_since=NOW - TIMES.settle_s + 1),
        on_record(limits=Limits(swaps=(NOW - 3599, NOW - 100))),
        on_node(1, replace_reason="user"),
        on_cur(1, ends=NOW + 1000),
        on_cur(2, model=Model.STATIC),
    ],
)
def test_each_of_these_alone_prevents_the_replacement_of_the_slowest(change: Change) -> None:
    assert machine_health.STRAGGLER in reasons(*slow())
    assert reasons(*change(*slow()))[2] is None


def test_a_generation_that_has_settled_for_exactly_the_time_may_lose_its_slowest() -> None:
    assert reasons(*on_record(gen_since=NOW - TIMES.settle_s)(*slow())) == [None, None, machine_health.STRAGGLER]


# -- back to spot after a fallback


def on_demand(**spec: object) -> Case:
    return on_cur(1, model=Model.ON_DEMAND)(*calm(2, **spec))


@pytest.mark.parametrize("policy", ["balanced", "spot", "shuffle"])
def test_after_a_fallback_spot_is_requested_again(policy: str) -> None:
    record, snapshot = on_demand(policy=policy)
    record = on_node(1, refused=("an offer",))(replace(record, fallback_until=NOW), snapshot)[0]
    found = decide(record, snapshot).record
    assert found is not None
    assert [(node.replace_reason, node.refused) for node in found.nodes] == [(None, ()), ("spot", ())]


@pytest.mark.parametrize(
    "change",
    [
        on_record(gen_since=NOW - TIMES.settle_s),
        on_snapshot(market=(OfferHistory("pool", "z-a", Model.SPOT, refused_at=NOW - TIMES.cold_s),)),
    ],
)
def test_at_these_bounds_spot_is_requested_again(change: Change) -> None:
    assert reasons(*change(*on_demand())) == [None, "spot"]


@pytest.mark.parametrize(
    "change",
    [
        on_spec(policy="on-demand"),
        on_snapshot(draining=True),
        on_snapshot(market=(OfferHistory("pool", "z-a", Model.SPOT, refused_at=NOW - TIMES.cold_s + 1),)),
        on_record(fallback_until=NOW + 1),
        on_record(gen_since=NOW - TIMES.settle_s + 1),
        on_record(stop=True, stop_since=NOW - 1, stop_deadline=NOW + 60),
        on_record(roll=Roll(ver=40, since=NOW - 1, cause="silence")),
        on_record(pause="limit"),
        on_node(0, replace_reason="user"),
        on_cur(1, model=Model.SPOT),
    ],
)
def test_each_of_these_alone_keeps_the_machine_on_demand(change: Change) -> None:
    assert reasons(*on_demand()) == [None, "spot"]
    assert reasons(*change(*on_demand()))[1] is None


# -- signs of broken hardware


@pytest.mark.parametrize(
    ("count", "signs", "blamed"),
    [
        (3, {1: "network"}, [1]),
        (2, {1: "network"}, []),  # of two, either may be the cause
        (3, {0: "network", 1: "network"}, []),
        (3, {0: "network", 1: "memory"}, [1]),  # the network error follows from it
        (2, {0: "memory", 1: "fault"}, [0, 1]),
        (3, {1: "no sign"}, []),
    ],
)
def test_who_is_blamed_for_signs_of_broken_hardware(count: int, signs: dict[int, str], blamed: list[int]) -> None:
    said = [fact(node, Kind.HARDWARE_FAULT, sign) for node, sign in signs.items()]
    assert sorted(machine_health.host_faults(Draft(*calm(count, *said)))) == blamed


def test_a_crash_counts_against_each_machine_with_a_sign_of_broken_hardware() -> None:
    case = calm(3, fact(2, Kind.HARDWARE_FAULT, "memory"), fact(0, Kind.HARDWARE_FAULT, "fault"))
    draft = Draft(*on_cur(2, hardware_faults=1)(*on_cur(1, hardware_faults=4)(*case)))
    assert machine_health.repeated_host_faults(draft) == [2]
    told = [f"; {SIGN_WORDS[sign]} on the machine of node {n}" for n, sign in ((0, Sign.FAULT), (2, Sign.MEMORY))]
    assert machine_health.note_host_faults(draft) == "".join(told)
    assert [slot.hardware_faults for _, slot in draft.members()] == [1, 4, 2]


@pytest.mark.parametrize(("kept", "lag"), [((), 150), (("0-0",), 150), (("1",), 140), (("1", "0"), 0)])
def test_a_lag_counts_until_its_own_end_is_reported(kept: tuple[str, ...], lag: int) -> None:
    said = [fact(0, Kind.LAGS, "0-140"), fact(0, Kind.LAGS, "1-150"), fact(0, Kind.LAGS, "2-300", gen=2)]
    said += [fact(0, Kind.KEEPS_UP, "1", gen=2)]  # what an earlier generation said of a lag ends none of this one
    draft = Draft(*calm(2, *said, *(fact(0, Kind.KEEPS_UP, which) for which in kept)))
    assert machine_health.lag(draft, 0, member(0)) == lag


# -- whether the caps have room


@pytest.mark.parametrize(
    ("attempt", "cap", "replaces", "fits"),
    [
        (1, 2, False, 0),  # both machines of the job count
        (1, 3, False, 1),
        (2, 2, False, 1),  # a grant beyond the highest attempt has no machine, so it is free
        (2, 2, True, 2),
        (1, 2, True, 2),
    ],
)
def test_room_counts_the_jobs_machines_and_no_grant_left_over(
    attempt: int, cap: int, replaces: bool, fits: int
) -> None:
    record, snapshot = calm(2)
    grants = (Grant(JOB, 0, 1, "slot:pool"), Grant(JOB, 1, attempt, "slot:pool"))
    draft = Draft(record, with_(snapshot, stack=stack(cap), allocation=Allocation(1, "", grants)))
    options = [Offer("pool", "z-a", Model.SPOT, 0.3)]
    found = [offers.fits(draft, count, options, replaces=replaces) for count in range(4)]
    assert found == [count <= fits for count in range(4)]


def test_room_counts_machines_of_nodes_that_the_job_no_longer_has_and_those_of_other_jobs() -> None:
    record, snapshot = calm(2)
    options = [Offer("pool", "z-a", Model.SPOT, 0.3)]
    for grant in (Grant(JOB, 2, 5, "slot:pool"), Grant("other234", 0, 9, "slot:pool")):
        asked = with_(snapshot, stack=stack(1), allocation=Allocation(1, "", (grant,)))
        assert not offers.fits(Draft(record, asked), 1, options)


# -- the pools of a gang's zone


@pytest.mark.parametrize(
    ("pools", "change", "out"),
    [
        (("pool",), on_record(), True),
        (("pool",), on_snapshot(spec=None), False),
        (("pool",), on_record(zone="z-b"), False),
        (("pool",), on_record(gen=0, nodes=(Node(),)), False),  # nothing binds it to its zone
        (("other",), on_record(), False),
        (("pool", "other"), on_record(), False),
        ((), on_record(), False),
        ((), on_record(zone="z-gone"), True),
    ],
)
def test_a_zone_counts_as_removed_if_no_pool_of_the_job_has_it(
    pools: tuple[str, ...], change: Change, out: bool
) -> None:
    (pool,) = stack().pools
    split = replace(stack(), pools=(replace(pool, zones=("z-b",)), replace(pool, name="other", zones=("z-a",))))
    record, snapshot = change(*on_snapshot(stack=split)(*calm(1, pools=pools)))
    assert offers.out_of_pools(Draft(record, snapshot)) is out


# -- whether only the caps keep a node from a machine

SPOT_REFUSED = {"refused": ("pool/z-b/on-demand", "pool/z-a/spot")}


@pytest.mark.parametrize(
    ("capped", "node", "caps"),
    [
        ({Model.ON_DEMAND}, {**SPOT_REFUSED, "refused_at": NOW - TIMES.cold_s + 1}, False),
        ({Model.ON_DEMAND}, {**SPOT_REFUSED, "refused_at": NOW - TIMES.cold_s}, True),
        ({Model.ON_DEMAND}, {"refused": ("pool/z-a/on-demand",), "refused_at": NOW}, True),
        ({Model.ON_DEMAND}, {"refused_at": NOW}, True),
        ({Model.ON_DEMAND, Model.SPOT}, {**SPOT_REFUSED, "refused_at": NOW}, True),
        ({Model.SPOT}, {**SPOT_REFUSED, "refused_at": NOW}, True),
        (set(), {**SPOT_REFUSED, "refused_at": NOW}, False),
    ],
)
def test_refused_spot_and_the_cap_of_on_demand_are_no_shortage_of_the_caps(
    capped: set[Model], node: dict[str, object], caps: bool
) -> None:
    draft = Draft(*on_node(1, cur=None, **node)(*calm(2)))
    assert pending.nothing(draft, 1, capped) is caps
    assert ("at their limits" in draft.record.reason) is caps
    assert ("the job's last machines to go" in draft.record.reason) is caps, "node 1's still counts"
    assert (draft.record.dry_since is None) is caps
    (entry,) = draft.entries
    assert (entry.id, entry.event, entry.node) == (f"refused.wait.v{draft.before.ver + 1}", Event.REFUSED, 1)
    assert (entry.cause, entry.detail) == ("wait", draft.record.reason)


@pytest.mark.parametrize(("since_s", "left"), [(TIMES.cold_s - 1, True), (TIMES.cold_s, False)])
def test_refused_offers_expire(since_s: float, left: bool) -> None:
    draft = Draft(*on_node(1, cur=None, **SPOT_REFUSED, refused_at=NOW - since_s)(*calm(2)))
    assert not pending.nothing(draft, 1, set())
    assert bool(draft.nodes[1].refused) is left


def test_a_job_that_waits_for_others_machines_says_so() -> None:
    record, seen = on_node(1, cur=None)(*calm(2))
    grants = tuple(grant for grant in seen.allocation.grants if grant.node != 1)
    draft = Draft(record, with_(seen, allocation=replace(seen.allocation, grants=grants)))
    assert pending.nothing(draft, 1, {Model.SPOT})
    assert "machines that other jobs give up" in draft.record.reason


# -- who has the newest commit when a generation begins


def reported(*commits: str, **changes: object) -> Case:
    """Both nodes have their disks, neither is known to have the newest commit, and they report these commits."""
    record, seen = calm(2, *(fact(node, Kind.CHECKPOINT, commit) for node, commit in enumerate(commits)))
    nodes = tuple(replace(node, cur=replace(node.cur, has_newest=False)) for node in record.nodes)
    return replace(record, nodes=nodes, stop=True, stop_since=NOW, **changes), with_(seen, progress=None)


@pytest.mark.parametrize(
    ("case", "fresh"),
    [
        (reported("2-90", "2-80"), {0}),
        (reported("2-80", "2-90"), {1}),
        (reported("2-90", "2-90"), {0, 1}),
        (reported("2-90"), set()),  # the other may have a newer one, so neither is known to have the newest
        (reported(), set()),
        (reported("3-90"), {0}),  # of the generation itself: whoever has it is sure
        (reported("2-90", gen=0), {0, 1}),
    ],
)
def test_unless_a_node_is_sure_every_node_must_have_reported_its_checkpoint(case: Case, fresh: set[int]) -> None:
    assert generation._fresh(Draft(*case), [0, 1]) == fresh


def test_a_node_without_its_disk_leaves_open_who_has_the_newest_commit() -> None:
    record, seen = reported("2-90", "2-80")
    listing = replace(seen.listing, disks=(seen.listing.disks[0], replace(seen.listing.disks[1], users=())))
    assert generation._fresh(Draft(record, with_(seen, listing=listing)), [0, 1]) == set()


# -- a generation without all of its disks


def old_disk(since: float, held: str = "3-90") -> Case:
    """Node 0 has its disk and this checkpoint; node 1's disk is still with a machine that was replaced long ago."""
    record, seen = calm(2, fact(0, Kind.CHECKPOINT, held))
    free = replace(seen.listing, disks=(seen.listing.disks[0], replace(seen.listing.disks[1], users=("old",))))
    nodes = tuple(replace(node, cur=replace(node.cur, since=since)) for node in record.nodes)
    return replace(record, nodes=nodes, stop=True, stop_since=since), with_(seen, listing=free)


@pytest.mark.parametrize(
    ("case", "enough"),
    [
        (old_disk(NOW - TIMES.disk_s), True),
        (old_disk(NOW - TIMES.disk_s + 1), False),
        (on_record(stop_since=NOW - TIMES.disk_s + 1)(*old_disk(NOW - 900)), False),
        (on_cur(1, since=NOW - TIMES.disk_s + 1)(*old_disk(NOW - 900)), False),
        (on_cur(0, since=NOW)(*old_disk(NOW - 900)), True),  # it has its disk, so it is not what the gang waits for
        (old_disk(NOW - 900, held="3-89"), False),
        (old_disk(NOW - 900, held=""), False),
        (on_snapshot(progress=None)(*old_disk(NOW - 900)), False),
        (on_record(given_up="3-90")(*old_disk(NOW - 900, held="3-89")), True),
        (on_record(given_up="3-90")(*old_disk(NOW - 900, held="")), True),
        (on_record(given_up="3-90")(*old_disk(NOW)), False),
    ],
)
def test_how_long_a_gang_waits_for_an_old_machine_to_release_a_disk(case: Case, enough: bool) -> None:
    draft = Draft(*case)
    cur = draft.nodes[0].cur
    assert cur is not None
    assert generation._will_do(draft, 0, cur) is enough


# -- an elastic job goes on without a node


def vacant(**record: object) -> Case:
    """An elastic job of two, where node 1 has no machine."""
    base = on_node(1, cur=None)(*calm(2, nodes=Nodes(1, 2)))
    return on_record(stop=True, stop_since=NOW - TIMES.shrink_s, **record)(*base)


@pytest.mark.parametrize(
    ("case", "smaller"),
    [
        (vacant(), True),
        (on_record(stop_since=NOW - TIMES.shrink_s + 1)(*vacant()), False),
        (vacant(created=NOW), True),  # it has trained: its submission does not matter
        (vacant(gen=0, created=NOW - TIMES.shrink_s), True),
        (vacant(gen=0, created=NOW - TIMES.shrink_s + 1), False),
        (on_spec(nodes=Nodes(2, 3))(*vacant()), False),
        (on_spec(checkpoint=Checkpoint(replicated=False))(*vacant()), False),
        (on_snapshot(spec=None)(*vacant()), False),
        (on_node(1, cur=member(1))(*vacant()), False),  # it has a machine, which may still become ready
    ],
)
def test_how_long_an_elastic_job_waits_for_a_missing_node(case: Case, smaller: bool) -> None:
    assert generation._smaller(Draft(*case), [0]) is smaller


# -- new disks, once a user gave up the newest commit


def lost_disks(**record: object) -> Case:
    """Both nodes have machines, other machines have both disks, and the user gave up the commit."""
    before, seen = old_disk(NOW - TIMES.disk_s)
    disks = tuple(replace(disk, users=("old",)) for disk in seen.listing.disks)
    changed = {"given_up": "3-90", **record}
    return replace(before, **changed), with_(seen, listing=replace(seen.listing, disks=disks))


def renewed(case: Case, ready: list[int]) -> list[int]:
    draft = Draft(*case)
    generation._renew(draft, ready)
    return [node.disk for node in draft.nodes]


def test_nodes_get_new_disks_when_other_machines_keep_all_of_the_old_ones() -> None:
    assert renewed(lost_disks(), [0, 1]) == [1, 1]


def test_a_job_with_a_scratch_folder_waits_for_every_disk_and_gives_a_stuck_one_up() -> None:
    case, scratch = old_disk(NOW - TIMES.disk_s), on_spec(scratch_gb=1)
    assert generation._disks(Draft(*case), [0, 1])
    assert not generation._disks(Draft(*scratch(*case)), [0, 1])
    assert renewed(scratch(*case), [0, 1]) == [0, 1], "node 0 has its disk, and the newest checkpoint on it"
    stale = on_cur(0, disk=False)(*old_disk(NOW - TIMES.disk_s, held="2-89"))
    for waits in (old_disk(NOW - TIMES.disk_s + 1), stale):
        assert renewed(scratch(*waits), [0, 1]) == [0, 0]
    sharded = on_spec(checkpoint=Checkpoint(replicated=False), scratch_gb=1)
    assert renewed(sharded(*case), [0, 1]) == [0, 0]


def attached(case: Case) -> Case:
    record, seen = case
    mine = replace(seen.listing.disks[0], users=(seen.listing.vms[0].name,))
    return record, with_(seen, listing=replace(seen.listing, disks=(mine, seen.listing.disks[1])))


def unused(case: Case) -> Case:
    record, seen = case
    free = replace(seen.listing.disks[0], users=())
    return record, with_(seen, listing=replace(seen.listing, disks=(free, seen.listing.disks[1])))


@pytest.mark.parametrize(
    ("case", "ready"),
    [
        (lost_disks(given_up=""), [0, 1]),
        (lost_disks(given_up="3-89"), [0, 1]),
        (lost_disks(), [0]),
        (lost_disks(stop_since=NOW - TIMES.disk_s + 1), [0, 1]),
        (on_cur(1, since=NOW - TIMES.disk_s + 1)(*lost_disks()), [0, 1]),
        (on_cur(0, machine="sk-t-fix-s0")(*lost_disks()), [0, 1]),
        (attached(lost_disks()), [0, 1]),
        (unused(lost_disks()), [0, 1]),
    ],
)
def test_each_of_these_alone_keeps_the_old_disks(case: Case, ready: list[int]) -> None:
    assert renewed(case, ready) == [0, 0]


def test_a_stop_moves_to_an_earlier_deadline_only() -> None:
    stops = Draft(*on_record(stop=True, stop_since=NOW, stop_deadline=NOW + 50)(*calm(2)))
    stops.halt(NOW + 90, "notice")
    assert stops.record.stop_deadline == NOW + 50
    stops.halt(NOW + 10, "notice")
    assert stops.record.stop_deadline == NOW + 10
    stops = Draft(*on_record(stop=True, stop_since=NOW, stop_deadline=None)(*calm(2)))
    stops.halt(NOW + 90, "notice")
    assert stops.record.stop_deadline == NOW + 90


@pytest.mark.parametrize(
    ("change", "more_gb"), [(on_spec(scratch_gb=50), 51), (on_spec(), 0), (on_snapshot(spec=None), 0)]
)
def test_a_disk_is_larger_by_its_scratch_folder(change: Change, more_gb: int) -> None:
    assert calls._more_gb(Draft(*change(*calm(1)))) == more_gb
