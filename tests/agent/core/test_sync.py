"""Facts between agent and function: the spool on disk, refusals, and how often an agent polls."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotkeeper.clock import Clock
from spotkeeper.contract.facts import Kind
from spotkeeper.contract.generation import DocState, FactIn, Progress, Role, Sync, SyncReply
from spotkeeper.reconcile.controller.intake import MAX_FACTS
from spotkeeper.reconcile.decide import Times
from spotkeeper_agent.cloud.gce import Gce
from spotkeeper_agent.core import sync
from spotkeeper_agent.core.log import Log
from tests.agent.fakes import JOB, Fake, document

QUIET = Log(write=lambda _: None)


def test_spool_keeps_facts_over_a_restart_but_not_over_a_reboot(tmp_path: Path) -> None:
    first = sync.Outbox(tmp_path, "boot-a", QUIET)
    first.assigned("job")
    first.add(FactIn(Kind.NOTICE, 3, "1000"))
    first.add(FactIn(Kind.RELEASED, 3, "7"))
    assert not first.add(FactIn(Kind.RELEASED, 3, "7"))
    first.delivered((FactIn(Kind.NOTICE, 3, "1000"),))
    assert sync.Outbox(tmp_path, "boot-a", QUIET).waiting() == (FactIn(Kind.RELEASED, 3, "7"),)
    assert sync.Outbox(tmp_path, "boot-b", QUIET).waiting() == ()


def test_a_new_job_clears_the_spool_except_for_dropped(tmp_path: Path) -> None:
    box = sync.Outbox(tmp_path, "b", QUIET)
    box.assigned("one")
    box.add(FactIn(Kind.FREED, 3, "0"))
    box.add(FactIn(Kind.DROPPED, 3, attempt=4))
    box.assigned("two")
    assert box.waiting() == (FactIn(Kind.DROPPED, 3, attempt=4),)


def test_a_new_job_keeps_spooled_notices(tmp_path: Path) -> None:
    box = sync.Outbox(tmp_path, "b", QUIET)
    box.assigned("old")
    box.add(FactIn(Kind.RELEASED, 7, "70"))
    box.add(FactIn(Kind.REPRIEVE, 7, "1795286127"))
    box.assigned("new")
    assert box.waiting() == (FactIn(Kind.REPRIEVE, 0, "1795286127"),)


# What a power cut, another program or a flipped bit leaves of a small file.
DAMAGED = [b"", b'{"boot": "b", "fac', b'{"boot": "\xff"}', bytes(64), b"[" * 100_000, b"null", b"\xff\xfe"]


@pytest.mark.parametrize("left", DAMAGED)
def test_a_damaged_spool_is_skipped(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "facts.json").write_bytes(left)
    box = sync.Outbox(tmp_path, "b", QUIET)
    assert box.waiting() == ()
    assert box.add(FactIn(Kind.HELLO))


def test_an_unwritable_spool_keeps_facts_in_memory(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file where the folder should be")
    lines: list[str] = []
    box = sync.Outbox(tmp_path / "spool", "b", Log(write=lines.append))
    box.add(FactIn(Kind.NOTICE, 1, "5"))
    box.add(FactIn(Kind.NOTICE, 1, "6"))
    assert len(box.waiting()) == 2
    assert len(lines) == 1, "said once"


def test_a_refused_fact_does_not_block_the_others(fake: Fake, tmp_path: Path) -> None:
    fake.instance("9", "n")
    clock = Clock(time.time(), time.time(), 20.0)
    box = sync.Outbox(tmp_path, "b", QUIET)
    answers: list[SyncReply] = []
    client = sync.FunctionClient(f"{fake.url}/fn", Gce(clock, fake.listen("9")))
    syncer = sync.Syncer(client, box, "b", lambda event: answers.append(event.reply), clock, QUIET)
    fake.function_status = 400
    syncer.say(FactIn(Kind.FULL, 1))
    syncer._exchange()
    assert box.waiting() == ()
    fake.function_status = 500
    syncer.say(FactIn(Kind.FULL, 2))
    syncer._exchange()
    assert len(box.waiting()) == 1, "anything but a refusal is tried again"
    fake.function_status = 200
    syncer._exchange()
    assert box.waiting() == () and answers[0].role is Role.UNKNOWN
    assert [fact.gen for _, fact in fake.facts] == [2]


class Deaf:
    """Answers nobody for a while; ``again``: whether it was told, each time, that the last exchange had no answer."""

    def __init__(self) -> None:
        self.silent = False
        self.again: list[bool] = []

    def sync(self, body: Sync) -> SyncReply:
        self.again.append(body.again)
        if self.silent:
            raise sync.SyncError("ReadTimeout")
        return SyncReply(Role.UNKNOWN)


def test_a_poll_and_an_answer_to_a_roll_call_are_given_up_early() -> None:
    """Two lost answers leave time for a third request within a roll call."""

    def wait_s(*kinds: Kind, again: bool = False) -> float:
        return sync.answer_s(Sync("b", 1, "job", tuple(FactIn(kind, 1) for kind in kinds), again=again))

    assert wait_s() == wait_s(Kind.HERE) == wait_s(Kind.HERE, Kind.STACKS) == sync.POLL_ANSWER_S
    assert wait_s(Kind.HELLO) == wait_s(Kind.HERE, Kind.EXIT) == sync.ANSWER_S, "a round answers it"
    assert wait_s(again=True) == sync.ANSWER_S, "so it does here"
    assert Times().lone_roll_s > 3 * sync.POLL_S + 2 * sync.POLL_ANSWER_S


def test_a_lost_poll_of_a_member_that_trains_starts_no_round(tmp_path: Path) -> None:
    client, clock = Deaf(), Clock(time.time(), time.time(), 20.0)
    client.silent = True
    syncer = sync.Syncer(client, sync.Outbox(tmp_path, "b", QUIET), "b", lambda _: None, clock, QUIET)  # type: ignore[arg-type]
    for pending in (False, False, True, False):
        syncer.want(1, "job", pending)
        syncer._exchange()
    syncer._exchange()
    assert client.again == [False, False, False, True, True]


def test_an_unanswered_sync_is_repeated_with_again(tmp_path: Path) -> None:
    """Whoever heard it may have died before its round: a fact that is stored is no news by itself."""
    client, clock = Deaf(), Clock(time.time(), time.time(), 20.0)
    box = sync.Outbox(tmp_path, "b", QUIET)
    syncer = sync.Syncer(client, box, "b", lambda _: None, clock, QUIET)  # type: ignore[arg-type]
    syncer.say(FactIn(Kind.RELEASED, 1))
    client.silent = True
    syncer._exchange()
    syncer._exchange()
    client.silent = False
    syncer._exchange()
    syncer._exchange()
    assert client.again == [False, True, True, False]
    syncer.say(FactIn(Kind.EXIT, 1))  # and this agent dies: who comes after it can't know whether it was heard
    heir = sync.Syncer(client, sync.Outbox(tmp_path, "b", QUIET), "b", lambda _: None, clock, QUIET)  # type: ignore[arg-type]
    heir._exchange()
    assert client.again[-1]


class Picky:
    """Looks at no more facts than the real function; refuses all that is new to it, a progress, the ``bad`` fact."""

    def __init__(self, bad: FactIn | None = None) -> None:
        self.bad = bad
        self.heard: list[FactIn] = []

    def sync(self, body: Sync) -> SyncReply:
        if body.progress is not None or body.old_jobs or body.again or self.bad in body.facts:
            raise sync.SyncRefusedError("HTTP 400")
        self.heard += body.facts[:MAX_FACTS]
        return SyncReply(Role.UNKNOWN)


def picky_syncer(folder: Path, function: Picky) -> tuple[sync.Syncer, sync.Outbox]:
    box = sync.Outbox(folder, "b", QUIET)
    client: Any = function
    return sync.Syncer(client, box, "b", lambda _: None, Clock(), QUIET), box


def test_all_facts_of_a_long_outage_are_delivered(tmp_path: Path) -> None:
    """Those beyond what the function looks at counted as told."""
    assert sync.AT_ONCE == MAX_FACTS
    function = Picky()
    syncer, box = picky_syncer(tmp_path, function)
    facts = [FactIn(Kind.STALL, 1, str(step)) for step in range(2 * MAX_FACTS + 1)]
    for fact in facts:
        syncer.say(fact)
    while box.waiting():
        syncer._exchange()
    assert function.heard == facts


def test_a_refusal_drops_only_the_invalid_fact(tmp_path: Path) -> None:
    """An exit beside a progress that the function cannot believe was never heard of."""
    function = Picky(bad=FactIn(Kind.FULL, 1))
    syncer, box = picky_syncer(tmp_path, function)
    facts = [FactIn(Kind.EXIT, 1, "7"), FactIn(Kind.FULL, 1), FactIn(Kind.RELEASED, 1, "9")]
    for fact in facts:
        syncer.say(fact)
    syncer.want(1, JOB, True, Progress(gen=1, step=1, at=0.0))
    syncer.ask_about((JOB,))  # a function of before it could be asked knows no such key
    for _ in range(6):
        syncer._exchange()
    assert box.waiting() == () and function.heard == [facts[0], facts[2]]


def test_an_empty_report_is_not_sent() -> None:
    """A newer agent is understood by the function of before, which takes no key that it does not know."""
    assert msgspec.json.encode(Sync("b")) == b'{"boot":"b"}'


def test_polls_slow_down_with_the_wait_until_a_new_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Hands(Clock):
        at = 1000.0

        def now(self) -> float:
            return Hands.at

    clock = Hands(0.0, 0.0, 1.0)
    box = sync.Outbox(tmp_path, "b", QUIET)
    client = sync.FunctionClient("", Gce(clock, ""))
    syncer = sync.Syncer(client, box, "b", lambda _: None, clock, QUIET)
    syncer.want(3, "job", True)
    pauses = []
    for waited in (0, 7, 15, 60, 150, 3600):
        Hands.at = 1000.0 + waited
        pauses.append(syncer._pause_s())
    assert pauses == [0.5, 0.5, 1.0, 4.0, 10.0, sync.LONGEST_S]
    stages = ((4, 1, DocState.RUN, 0.5), (5, 1, DocState.RUN, sync.LONGEST_S), (6, 1, DocState.SAVE_STOP, 0.5))
    for ver, gen, state, pause in (*stages, (7, 2, DocState.RUN, 0.5)):
        reply = SyncReply(Role.MEMBER, doc=document(ver, gen, (), state, port=1))
        monkeypatch.setattr(client, "sync", lambda _, reply=reply: reply)
        syncer._exchange()
        assert syncer._pause_s() == pause, "machines that join change the document, and not what is awaited"
        Hands.at += 3600
    syncer.want(4, None, True)
    syncer._pause_s()
    Hands.at += 3600
    assert syncer._pause_s() == sync.POLL_S, "a static machine is idle until a job is granted to it"
    syncer.want(4, "job", False)
    assert syncer._pause_s() == sync.POLL_S
    syncer.want(4, "job", True)
    assert syncer._pause_s() == 0.5, "so is one after a pause of waiting"
