"""A function that is killed or frozen at any point loses no notification; a duplicate has the same id.

Each story is played with the function killed after each of its effects in turn, among them the writes of notifications
and the moment between a channel's receipt and the note of it (``make test`` takes some of them: ``some``).
What the ledger says is what must have been announced.
"""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from spotkeeper.contract.job import RequestKind
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.notification import ChannelState, NotifyEvent
from spotkeeper.contract.record import NO_SPOT_YET, Hold, Phase
from spotkeeper.contract.stack import Fallback, StackState
from spotkeeper.reconcile.controller import ledger as controller_ledger
from spotkeeper.reconcile.notifications.deliver import CLAIM_S
from spotkeeper.reconcile.store.store import Store
from tests.sim.scenarios import JOB, ROUGH, Play, Scenario, Told, perform
from tests.sim.store import SimStore
from tests.sim.test_crash_points import effects, freeze, kill
from tests.sim.world import START, TICK_S, World
from tests.sizes import WHOLE

EVERY = ChannelState("every", "webhook", tuple(NotifyEvent))
OTHER = ChannelState("other", "slack", (NotifyEvent.FINISHED,))
TAIL_S = 300.0  # for the ticks after the end
SOON_S = 5.0  # from an event to its notification, if no process is killed
LEAST = 200  # points of all stories
LONG = "failure"


def announcing(stack: StackState) -> StackState:
    tight = Fallback(losses=1, short_life_s=3600.0, short_lives=1)
    return replace(stack, channels=(EVERY, OTHER), fallback=tight)


def _pause(play: Play) -> None:
    play.world.request(JOB, RequestKind.PAUSE)
    _resume_once_held(play)


def _resume_once_held(play: Play) -> None:
    if play.world.record(JOB).phase is Phase.HOLD:
        play.world.request(JOB, RequestKind.RESUME)
    else:
        play.world.engine.after(5.0, lambda: _resume_once_held(play))


def _failed(play: Play) -> bool:
    return play.world.record(JOB).hold is Hold.FAILURE


STORIES = (
    (
        Scenario("start", lambda play: None, lambda play: play.on, fresh=True),
        {NotifyEvent.STARTED, NotifyEvent.FINISHED},
    ),
    (Scenario("pause", _pause, lambda play: play.on), {NotifyEvent.HOLD, NotifyEvent.RESUMED, NotifyEvent.FINISHED}),
    (
        Scenario("loss", lambda play: play.preempt(1, -1), lambda play: play.on, ROUGH, on_demand=3),
        {NotifyEvent.ON_DEMAND, NotifyEvent.FINISHED},
    ),
    (
        Scenario("failure", lambda play: None, _failed, 5 * ROUGH, crashes=9),
        {NotifyEvent.STARTED, NotifyEvent.FAILED, NotifyEvent.FINISHED},
    ),
)
each = pytest.mark.parametrize(("scenario", "wanted"), STORIES, ids=[scenario.name for scenario, _ in STORIES])


class Performance:
    """A story's end: what the ledger has, what the channels received, what is still to be sent.

    ``after_s``: how much later than a tick the story begins.
    """

    def __init__(self, scenario: Scenario, interfere: object = None, after_s: float = 0.0) -> None:
        found: list[World] = []

        def begin(world: World) -> None:
            found.append(world)
            world.skip = False
            world.run(after_s)
            world.function.restart_points()
            if interfere is not None:
                interfere(world)  # type: ignore[operator]

        self.told: Told = perform(scenario, begin, lost=10 * ROUGH, on=announcing, shipped=True)
        (self.world,) = found
        self.world.run(TAIL_S)

    def why(self) -> str:
        """What went wrong, or ""."""
        if self.told.why:
            return self.told.why
        if left := self.world.store.list_notifications():
            return f"not sent: {left}"
        got = Counter(note.id for channel, note in self.world.received if channel == EVERY.name)
        due = {f"{JOB}.{entry.id}" for entry in self.world.store.list_ledger(JOB) if announced(entry)}
        if lost := due - got.keys():
            return f"lost: {lost}"
        if strange := got.keys() - due:
            return f"announced and in no ledger: {strange}"
        texts = {(note.id, note.text) for _, note in self.world.received}
        return "" if len(texts) == len(got) else f"one id for different texts: {texts}"

    def longest_s(self) -> float:
        """The longest time from an event to its notification at a channel."""
        first: dict[tuple[str, str], float] = {}
        for at, (channel, note) in zip(self.world.received_at, self.world.received, strict=True):
            first.setdefault((channel, note.id), at - note.at)
        return max(first.values())

    def duplicates(self) -> int:
        got = Counter((channel, note.id) for channel, note in self.world.received)
        return sum(count - 1 for count in got.values())


def announced(entry: Entry) -> bool:
    if entry.event is Event.GENERATION:
        return entry.gen == 1 or bool(entry.holds)
    if entry.event is Event.FALLBACK:
        return not (entry.cause or "").startswith(NO_SPOT_YET)
    return entry.event in (Event.CHECKPOINT, Event.HOLD, Event.END)


def some(scenario: Scenario, every: int) -> list[int]:
    """All effects in ``make stories``, else one of ``every``; of the longest story one of three times as many."""
    step = 1 if WHOLE else 3 * every if scenario.name == LONG else every
    return effects(Performance(scenario).told)[::step]


@each
def test_every_event_is_announced_once(scenario: Scenario, wanted: set[NotifyEvent]) -> None:
    done = Performance(scenario)
    assert done.why() == ""
    assert wanted <= {note.events[0] for _, note in done.world.received}
    assert done.duplicates() == 0
    assert done.longest_s() <= SOON_S
    assert Counter(channel for channel, _ in done.world.received)[OTHER.name] == 1, "it wants the end only"


@each
def test_a_function_killed_at_every_effect_loses_no_notification(scenario: Scenario, wanted: set[NotifyEvent]) -> None:
    done = {at: Performance(scenario, kill(at)) for at in some(scenario, 8)}
    assert {at: said for at, one in done.items() if (said := one.why())} == {}
    late = {at: one.longest_s() for at, one in done.items() if one.longest_s() > TICK_S + SOON_S}
    assert late == {}, "the next tick sends it"


@pytest.mark.parametrize("before_s", [0.5, 2.0, 6.0])
def test_a_tick_right_after_the_kill_sends(before_s: float) -> None:
    """Though the dead round's lease, or the dead process's claim of the notification, lasts for some seconds more."""
    scenario, _ = STORIES[0]
    undisturbed = Performance(scenario)
    began = next(note.at for _, note in undisturbed.world.received if note.events == (NotifyEvent.STARTED,))
    after_s = (START - began - before_s) % TICK_S
    points = Performance(scenario, after_s=after_s).told.points
    ends = [at for at, point in enumerate(points) if point.verb in ("put_notification", "cas_notification")]
    first = max(at for at in range(ends[0]) if points[at].verb == "cas_record")
    took_s = {at: Performance(scenario, kill(at), after_s).longest_s() for at in (first, ends[0], ends[1])}
    assert max(took_s.values()) <= CLAIM_S + SOON_S, took_s


@each
def test_a_function_frozen_at_every_effect_loses_no_notification(scenario: Scenario, wanted: set[NotifyEvent]) -> None:
    why = {at: said for at in some(scenario, 10) if (said := Performance(scenario, freeze(at)).why())}
    assert why == {}


def test_the_stories_have_points_between_receipt_and_its_note() -> None:
    told = [Performance(scenario).told for scenario, _ in STORIES]
    assert sum(len(effects(one)) for one in told) >= LEAST
    verbs = Counter(point.verb for one in told for point in one.points)
    assert all(verbs[verb] >= 4 for verb in ("put_notification", "cas_notification", "send", "delete_notification"))


# -- what is broken is seen


def broken(name: str) -> str:
    """The first complaint about a story whose function is killed anywhere."""
    scenario = next(scenario for scenario, _ in STORIES if scenario.name == name)
    for at in effects(Performance(scenario).told):
        if why := Performance(scenario, kill(at)).why():
            return why
    return ""


def test_a_notification_stored_after_its_ledger_entry_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    real = controller_ledger.LedgerWriter.flush

    def late(self: controller_ledger.LedgerWriter, store: Store, record: object, stack: StackState) -> None:
        new = self._new(record.job, record.outbox)  # type: ignore[attr-defined]
        before = store.appended(record.job, new)  # type: ignore[attr-defined]
        self.write(store, record.job, record.outbox)  # type: ignore[attr-defined]
        if not before:
            self._written.clear()
            monkeypatch.setattr(type(self), "write", lambda *_: None)
            monkeypatch.setattr(SimStore, "appended", lambda *_: False)
            real(self, store, record, stack)  # type: ignore[arg-type]
            monkeypatch.undo()
            monkeypatch.setattr(type(self), "flush", late)

    monkeypatch.setattr(controller_ledger.LedgerWriter, "flush", late)
    assert "lost" in broken("start")


def test_a_notification_deleted_before_it_is_sent_would_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from spotkeeper.reconcile.notifications import deliver

    real = deliver.Delivery._try

    def early(self: deliver.Delivery, claimed: object, channels: object) -> dict[str, str]:
        self.store.delete_notification(claimed)  # type: ignore[arg-type]
        return real(self, claimed, channels)  # type: ignore[arg-type]

    monkeypatch.setattr(deliver.Delivery, "_try", early)
    assert "lost" in broken("start")
