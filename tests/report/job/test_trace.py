"""Traces of recoveries: which parts a ledger shows, how long each took, and which one was slowest."""

from __future__ import annotations

from msgspec.structs import replace

from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.stack import Model
from spotkeeper.report.job.trace import JobTrace, RecoveryPart, job_trace
from spotkeeper.report.text.waterfall import waterfalls
from tests.report.ledgers import SILENT, A, entry, generation, intent, lost, printed

# Node 0 is noticed at 500, its replacement boots beside it, all save and stop at 570, and train again at 610.
ANNOUNCED = (
    intent(0.0, 0, 1),
    entry(Event.ADMITTED, 60.0, 0, 1),
    generation(100.0, 1),
    entry(Event.NOTICE, 500.0, 0, 1),
    intent(502.0, 0, 2, price=0.5, cause="notice"),
    entry(Event.ADMITTED, 568.0, 0, 2, started=510.0),
    entry(Event.STOP, 570.0, cause="notice"),
    entry(Event.STOPPED, 575.0, 1, 1, gen=1),
    entry(Event.PROMOTED, 576.0, 0, 2),
    entry(Event.MOUNTED, 590.0, 0, 2),
    replace(generation(592.0, 2), save_s=3.0, again=0),
    replace(entry(Event.FIRST, 610.0, gen=2), restore_s=4.0, first_s=2.0, restored_bytes=10**9),
)


def parts(trace: JobTrace) -> list[tuple[str, float, float | None]]:
    (one,) = trace.recoveries
    return [(span.part.value, span.start, span.end) for span in one.spans]


def test_every_part_of_an_announced_recovery() -> None:
    trace = job_trace("abcdefgh", "first", ANNOUNCED, now=700.0, stack="prod")
    assert parts(trace) == [
        ("notice", 500.0, 570.0),
        ("order", 502.0, 510.0),
        ("boot", 510.0, 568.0),
        ("save", 570.0, 573.0),
        ("stop", 573.0, 575.0),
        ("mount", 575.0, 590.0),
        ("rendezvous", 592.0, 604.0),
        ("restore", 604.0, 608.0),
        ("first step", 608.0, 610.0),
    ]
    (one,) = trace.recoveries
    assert (one.number, one.began, one.end, one.idle_s) == (1, 500.0, 610.0, 40.0)
    boot, restore = one.spans[2], one.spans[7]
    assert (boot.machine, boot.zone, boot.model, boot.price) == ("sk-prod-abcdefgh-n0000-a2", A, Model.SPOT, 0.5)
    assert (restore.bytes, restore.machine) == (10**9, "")


def test_the_slowest_part_covers_most_of_the_time_without_training() -> None:
    """The boot took longest, but training went on meanwhile."""
    (one,) = job_trace("abcdefgh", "first", ANNOUNCED, now=700.0).recoveries
    assert one.slowest is not None
    assert (one.slowest.part, one.slowest_s) == (RecoveryPart.MOUNT, 15.0)
    (loss,) = job_trace("abcdefgh", "first", lost(1), now=700.0).recoveries
    assert loss.slowest is not None
    assert (loss.slowest.part, loss.slowest.node, loss.slowest_s) == (RecoveryPart.BOOT, 1, 40.0)


def test_measured_times_count_by_the_jobs_clock() -> None:
    """A generation's first step was measured in real seconds; the ledger's times are twice as fast here."""
    trace = job_trace("abcdefgh", "first", ANNOUNCED, now=700.0, scale=2.0)
    assert parts(trace)[-3:] == [("rendezvous", 592.0, 598.0), ("restore", 598.0, 606.0), ("first step", 606.0, 610.0)]
    fast = job_trace("abcdefgh", "first", ANNOUNCED, now=700.0, scale=100.0)
    assert parts(fast)[6:] == [("first step", 592.0, 610.0)], "no part begins before its generation"


def test_a_refused_request_belongs_to_the_order() -> None:
    refused = (intent(501.0, 1, 2), entry(Event.REFUSED, 503.0, 1, 2))
    came = (intent(600.0, 1, 3), entry(Event.ADMITTED, 660.0, 1, 3, started=610.0))
    loss = (entry(Event.LOSS, 500.0, 1, 1, cause="loss"), entry(Event.STOP, 500.0, cause="loss"))
    trace = job_trace("abcdefgh", "first", (generation(100.0, 1), *loss, *refused, *came, generation(670.0, 2)), 700.0)
    assert parts(trace) == [("order", 501.0, 610.0), ("boot", 610.0, 660.0)]
    earlier = (intent(50.0, 1, 7), entry(Event.REFUSED, 52.0, 1, 7), generation(100.0, 1))
    others = (intent(500.5, 2, 2), entry(Event.REFUSED, 502.0, 2, 2))
    unknown = (came[0], entry(Event.ADMITTED, 660.0, 1, 3))  # when the cloud created it
    story = (*earlier, *loss, others[0], refused[0], others[1], refused[1], *unknown, generation(670.0, 2))
    assert parts(job_trace("abcdefgh", "first", story, 700.0)) == [("order", 501.0, 600.0), ("boot", 600.0, 660.0)]


def test_a_running_recovery_has_open_parts() -> None:
    ledger = (*lost(1)[:3], intent(505.0, 1, 2))
    trace = job_trace("abcdefgh", "first", ledger, now=530.0)
    (one,) = trace.recoveries
    assert parts(trace) == [("boot", 505.0, None)]
    assert (one.end, one.idle_s, one.slowest_s) == (None, 30.0, 25.0)
    noticed = job_trace("abcdefgh", "first", ANNOUNCED[:5], now=530.0)
    assert parts(noticed) == [("notice", 500.0, None), ("boot", 502.0, None)]
    assert noticed.recoveries[0].slowest is None, "the job still trains"


def test_a_replacement_that_never_joined_is_a_part_and_not_hidden_behind_the_next_ones_boot() -> None:
    trace = job_trace("abcdefgh", "first", SILENT, now=1500.0, stack="prod")
    assert parts(trace) == [
        ("never joined", 501.0, 1400.0),
        ("order", 1400.0, 1410.0),
        ("boot", 1410.0, 1470.0),
    ]
    (one,) = trace.recoveries
    never = one.spans[0]
    assert one.slowest is never and one.slowest_s == 899.0
    assert (never.machine, never.zone, never.price, never.detail) == (
        "sk-prod-abcdefgh-n0001-a2",
        A,
        0.5,
        "no hello in time",
    )
    text = printed(waterfalls(trace, trace.recoveries, 1500.0))
    assert "slowest part: a machine for node 1 that never joined (no hello in time), 14m59s of the 16m15s" in text
    assert f"spot {A} $0.50/h: no hello in time" in text


def test_a_standby_machine_that_is_lost_before_it_takes_over_never_joined() -> None:
    ready = (intent(505.0, 1, 2, cause="notice"), entry(Event.ADMITTED, 545.0, 1, 2))
    gone = entry(Event.LOSS, 560.0, 1, 2, cause="noticed standby")
    noticed = (generation(100.0, 1), entry(Event.NOTICE, 500.0, 1, 1), *ready, gone)
    assert parts(job_trace("abcdefgh", "first", noticed, now=600.0)) == [
        ("notice", 500.0, None),
        ("never joined", 505.0, 560.0),
    ]
    earlier = (generation(100.0, 1), intent(110.0, 1, 2), entry(Event.LOSS, 300.0, 1, 2, cause="never joined"))
    assert parts(job_trace("abcdefgh", "first", (*earlier, *lost(1)[1:3]), now=600.0)) == [], "before the loss"
    swap = (intent(450.0, 1, 2, cause="swap to spot"), entry(Event.LOSS, 510.0, 1, 2, cause="never joined"))
    assert parts(job_trace("abcdefgh", "first", (*lost(1)[:3], *swap), now=600.0)) == [], "beside the recovery"


def test_later_and_withdrawn_notices_are_no_parts() -> None:
    noise = (
        entry(Event.NOTICE, 510.0, 2, 1),
        entry(Event.REPRIEVE, 520.0, 2, 1),
        entry(Event.NOTICE, 530.0, 0, 1),
        entry(Event.STOPPED, 540.0, 1, 1, gen=0),
        entry(Event.NOTICE, 580.0, 1, 1),
    )
    ledger = sorted((*ANNOUNCED, *noise), key=lambda each: each.at)
    noisy, quiet = (parts(job_trace("abcdefgh", "first", each, now=700.0)) for each in (ledger, ANNOUNCED))
    assert noisy == quiet


def altered(event: Event, **over: object) -> tuple[Entry, ...]:
    """``ANNOUNCED`` with other fields in its last entry of this kind."""
    (*_, last) = (each for each in ANNOUNCED if each.event is event)
    return tuple(replace(each, **over) if each is last else each for each in ANNOUNCED)


def test_no_part_ends_before_it_begins() -> None:
    def part(name: str, ledger: tuple[Entry, ...]) -> tuple[str, float, float | None]:
        return next(each for each in parts(job_trace("abcdefgh", "first", ledger, now=700.0)) if each[0] == name)

    saved = altered(Event.GENERATION, save_s=30.0)
    assert (part("save", saved), part("stop", saved)) == (("save", 570.0, 575.0), ("stop", 575.0, 575.0))
    assert part("mount", altered(Event.MOUNTED, at=560.0)) == ("mount", 560.0, 560.0)
    assert part("boot", altered(Event.ADMITTED, started=569.0)) == ("boot", 569.0, 569.0), "by another clock"
    unstopped = tuple(each for each in ANNOUNCED if each.event is not Event.STOPPED)
    assert part("mount", unstopped) == ("mount", 570.0, 590.0)


def test_an_unannounced_loss_saves_nothing() -> None:
    trace = job_trace("abcdefgh", "first", (*lost(1)[:-1], replace(generation(550.0, 2), save_s=3.0)), now=700.0)
    assert "save" not in [name for name, *_ in parts(trace)]


def test_a_static_machine_has_no_name_of_a_dynamic_one() -> None:
    ledger = (*lost(1)[:3], intent(505.0, 1, 2, model=Model.STATIC), *lost(1)[4:])
    (one,) = job_trace("abcdefgh", "first", ledger, now=700.0, stack="prod").recoveries
    assert [(span.model, span.machine) for span in one.spans] == [(Model.STATIC, "")]


def test_what_ended_before_the_stop_is_not_the_slowest_part() -> None:
    noticed = (generation(100.0, 1), entry(Event.NOTICE, 400.0, 0, 1), entry(Event.STOP, 500.0, cause="notice"))
    (one,) = job_trace("abcdefgh", "first", noticed, now=505.0).recoveries
    assert len(one.spans) == 1 and one.slowest is None


def test_the_waterfall_names_every_part_and_the_slowest() -> None:
    trace = job_trace("abcdefgh", "first", ANNOUNCED, now=700.0)
    text = printed(waterfalls(trace, trace.recoveries, 700.0))
    lines = text.splitlines()
    assert lines[0] == "first (abcdefgh): 1 recovery"
    assert "recovery 1, after 8m20s: notice (node 0), 40s without training" in text
    assert lines[-1].rstrip() == "slowest part: mount of node 0, 15s of the 40s without training"
    rows = {line.split()[0]: line for line in lines[4:-1]}
    assert "58s" in rows["boot"] and f"spot {A} $0.50/h" in rows["boot"] and "1 GB" in rows["restore"]
    assert rows["notice"].index("█") < rows["mount"].index("█") < rows["first"].index("█")
    assert all("█" in line or "▌" in line or "▐" in line for line in rows.values()), "every part shows"


def test_a_job_without_recoveries_has_an_empty_trace() -> None:
    ledger: tuple[Entry, ...] = (intent(0.0, 0, 1), generation(100.0, 1))
    trace = job_trace("abcdefgh", "first", ledger, now=200.0)
    assert (trace.recoveries, trace.began, trace.ended) == ((), 0.0, None)
    assert "0 recoveries" in printed(waterfalls(trace, trace.recoveries, 200.0))
