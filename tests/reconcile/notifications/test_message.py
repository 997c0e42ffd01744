"""Which ledger entries become notifications, for whom, and what they say."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.notification import USUAL_EVENTS, Notification, NotifyEvent
from spotkeeper.contract.record import NO_SPOT_YET, Hold, Outcome, Phase, Record
from spotkeeper.reconcile.notifications import message
from spotkeeper.reconcile.notifications.message import LONGEST, channels_for, first_checkpoint, notifications
from tests.reconcile.notifications.samples import AT, JOB, SLACK, STACK, entry, notification, record

DAY_S = 86_400.0


def one(event: Event, of: Record, **more: Any) -> Notification:
    (found,) = notifications([entry(event, **more)], of, STACK)
    return found


class TestEvents:
    def test_the_first_generation_is_the_start(self) -> None:
        found = one(Event.GENERATION, record(), gen=1)
        assert found.events == (NotifyEvent.STARTED,)
        assert found.text == "trains, on 2 spot machines and 1 on-demand machine in us-central1-a."
        assert found.todo == "To follow it: spotkeeper watch digits"
        assert (found.job, found.name, found.stack, found.at) == (JOB, "digits", STACK.stack, AT)
        assert (found.spent_usd, found.usd_per_hour) == (12.3456, 3.21)

    def test_only_a_generation_after_a_hold_is_a_resumption(self) -> None:
        assert notifications([entry(Event.GENERATION, gen=4)], record(), STACK) == ()
        found = one(Event.GENERATION, record(), gen=4, holds=2, step=120)
        assert found.events == (NotifyEvent.RESUMED,)
        assert found.text.startswith("trains again from step 120, on 2 spot machines")

    def test_a_hold_before_the_first_generation_leaves_a_start(self) -> None:
        assert one(Event.GENERATION, record(), gen=1, holds=2).events == (NotifyEvent.STARTED,)

    def test_a_fallback(self) -> None:
        found = one(Event.FALLBACK, record(), cause="too many losses", detail="4 losses in 9 min, spot again at 10:00")
        assert found.events == (NotifyEvent.ON_DEMAND,)
        assert "buys on-demand machines for a limited time (too many losses): 4 losses in 9 min" in found.text

    @pytest.mark.parametrize("cause", [NO_SPOT_YET, f"{NO_SPOT_YET}: too many losses"])
    def test_a_fallback_that_continues_was_announced(self, cause: str) -> None:
        assert notifications([entry(Event.FALLBACK, cause=cause, detail="spot again")], record(), STACK) == ()

    def test_a_pause_is_a_hold(self) -> None:
        held = record(phase=Phase.HOLD, hold=Hold.PAUSE, hold_count=1, reason="paused by kim")
        found = one(Event.HOLD, held, cause="pause", detail="paused by kim")
        assert found.events == (NotifyEvent.HOLD,)
        assert found.text == "is on hold: paused by kim. It has no machines; the disks with its checkpoints are billed."
        assert found.todo == "To continue: spotkeeper resume digits. To end it: spotkeeper cancel digits"

    def test_a_failure_is_a_hold_too(self) -> None:
        held = record(phase=Phase.HOLD, hold=Hold.FAILURE, hold_count=1, hold_ends=AT + 14 * DAY_S)
        found = one(Event.HOLD, held, cause="failure", detail="exit code 93")
        assert found.events == (NotifyEvent.FAILED, NotifyEvent.HOLD)
        assert found.text.startswith("failed and is on hold: exit code 93.")
        assert found.text.endswith("Without a resume it ends at 2026-12-08 09:14 UTC.")
        assert "spotkeeper logs digits, correct the code, then: spotkeeper resume digits JOB.YAML" in found.todo

    def test_spent_money_is_a_hold_too(self) -> None:
        held = record(phase=Phase.HOLD, hold=Hold.SPEND, hold_count=1)
        found = one(Event.HOLD, held, cause="spend", detail="max_usd: $40.00 is spent")
        assert found.events == (NotifyEvent.OVER_BUDGET, NotifyEvent.HOLD)
        assert "(it may then spend the same amount again)" in found.todo

    def test_the_end_of_the_wait_for_spot_names_what_buys_other_machines(self) -> None:
        held = record(phase=Phase.HOLD, hold=Hold.MAX_WAIT, hold_count=2)
        found = one(Event.HOLD, held, cause="max_wait", detail="waiting for capacity in z-a")
        assert found.events == (NotifyEvent.HOLD,)
        assert "(it then waits that long again; a job file with `policy: balanced` lets it buy" in found.todo

    @pytest.mark.parametrize("why", [Hold.CLOUD, Hold.CAPACITY])
    def test_a_job_that_retries_by_itself_is_announced_once(self, why: Hold) -> None:
        held = record(phase=Phase.HOLD, hold=why, hold_count=1, hold_until=AT + 600)
        assert "It retries by itself at 09:24 UTC." in one(Event.HOLD, held, cause=why.value, detail="x").text
        again = replace(held, hold_count=2)
        assert notifications([entry(Event.HOLD, cause=why.value)], again, STACK) == ()
        waits = replace(again, hold_until=None)  # nothing retries any more: a person must act
        assert one(Event.HOLD, waits, cause=why.value).events == (NotifyEvent.HOLD,)

    def test_a_hold_of_the_queue_needs_no_person(self) -> None:
        held = record(phase=Phase.HOLD, hold=Hold.QUEUE)
        assert notifications([entry(Event.HOLD, cause="queue", detail="its machines go to job x")], held, STACK) == ()

    def test_a_lost_checkpoint_names_the_command_that_continues_without_it(self) -> None:
        plain = record(phase=Phase.HOLD, hold=Hold.CLOUD, hold_count=1)
        held = replace(plain, reason=f"no machine has it: {plain.go_back()}")
        assert "spotkeeper resume digits --go-back" in one(Event.HOLD, held, cause="cloud", detail="x").todo

    @pytest.mark.parametrize(
        ("outcome", "event", "text"),
        [
            (Outcome.SUCCEEDED, NotifyEvent.FINISHED, "succeeded."),
            (Outcome.CANCELLED, NotifyEvent.FINISHED, "was cancelled by kim."),
            (Outcome.FAILED, NotifyEvent.FAILED, "failed: cancelled by kim."),
        ],
    )
    def test_ends(self, outcome: Outcome, event: NotifyEvent, text: str) -> None:
        found = one(Event.END, record(phase=Phase.END, outcome=outcome), cause=outcome.value, detail="cancelled by kim")
        assert (found.events, found.text) == ((event,), text)
        kept = one(Event.END, record(keep_disks=True), cause=outcome.value, detail="cancelled by kim")
        assert kept.text.endswith("Its disks are kept and billed until you delete them.")

    def test_the_first_checkpoint(self) -> None:
        found = first_checkpoint(entry(Event.CHECKPOINT, "first", step=40), record(), STACK)
        assert found.events == (NotifyEvent.FIRST_CHECKPOINT,)
        assert found.id == f"{JOB}.checkpoint.first"
        assert "at step 40" in found.text

    def test_the_cost_counts_up_to_the_event(self) -> None:
        plain = record()
        before = replace(plain, limits=replace(plain.limits, spent=10.0, usd_hour=6.0, spent_at=AT - 1800))
        assert first_checkpoint(entry(Event.CHECKPOINT, "first", step=40), before, STACK).spent_usd == 13.0

    def test_all_other_events_are_nothing_to_announce(self) -> None:
        told = {Event.GENERATION, Event.FALLBACK, Event.HOLD, Event.END}
        others = [entry(event) for event in Event if event not in told]
        assert notifications(others, record(), STACK) == ()

    def test_the_id_is_that_of_the_ledger_entry(self) -> None:
        found = one(Event.HOLD, record(hold=Hold.PAUSE), cause="pause")
        assert found.id == f"{JOB}.hold.v3"
        assert one(Event.HOLD, record(hold=Hold.PAUSE), cause="pause") == found


class TestChannels:
    def test_channels_get_their_usual_events(self) -> None:
        for event in NotifyEvent:
            wanted = (SLACK.name,) if event in USUAL_EVENTS else ()
            assert channels_for(notification(1, event), STACK, None) == wanted

    def test_a_job_file_replaces_the_events_of_the_channels_that_it_names(self) -> None:
        spec = JobSpec("digits", ("train.py",), notify={"quiet": (NotifyEvent.STARTED,), "ml-team": ()})
        assert channels_for(notification(1, NotifyEvent.STARTED), STACK, spec) == ("quiet",)
        assert channels_for(notification(1, NotifyEvent.FAILED), STACK, spec) == ()

    def test_a_job_file_names_no_channel_into_being(self) -> None:
        spec = JobSpec("digits", ("train.py",), notify={"https://evil.test": tuple(NotifyEvent)})
        assert channels_for(notification(1, NotifyEvent.STARTED), STACK, spec) == ()

    def test_one_of_several_events_suffices_and_gives_one_message(self) -> None:
        both = notification(1, NotifyEvent.OVER_BUDGET, NotifyEvent.HOLD)
        spec = JobSpec("digits", ("train.py",), notify={"ml-team": (NotifyEvent.HOLD, NotifyEvent.OVER_BUDGET)})
        assert channels_for(both, STACK, spec) == ("ml-team",)


class TestTexts:
    def test_reasons_from_users_are_one_short_line_without_controls_and_secrets(self) -> None:
        said = "a\nb\x1b[31m\u202ec ghp_0123456789abcdef " + "x" * 5000
        found = one(Event.HOLD, record(hold=Hold.PAUSE, hold_count=1), cause="pause", detail=said)
        assert len(found.text) == LONGEST
        assert found.text.startswith("is on hold: a b [31m c [removed] xxx")
        assert found.text.endswith("...")

    def test_the_cost_is_a_sentence(self) -> None:
        assert message.cost(notification()) == "Cost so far: about $12.35; its machines cost $3.21/h now."
        assert message.cost(notification(usd_per_hour=0.0)) == "Cost so far: about $12.35."
        assert message.cost(notification(spent_usd=None)) == ""

    def test_a_test_message_says_what_the_channel_gets(self) -> None:
        found = message.test_message(SLACK, STACK, AT, "0123")
        assert found.text == ("can send to the channel ml-team. Default events: hold, over-budget, finished, failed.")
        assert (found.id, found.events, found.job) == ("test.0123", (), "")
        none = message.test_message(replace(SLACK, events=()), STACK, AT, "0123")
        assert none.text.endswith("Default events: none; a job file can choose events.")
