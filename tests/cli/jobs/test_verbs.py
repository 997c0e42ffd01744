"""What is asked of a job that is there: agreed to, left for the function, and followed until it is done."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from spotkeeper.cli.jobs import verbs
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.lookup import new_request
from spotkeeper.contract.job import JobSpec, Nodes, RequestKind, spec_json
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.record import Hold, Move, Node, Outcome, Phase, Record, ZoneRequest
from spotkeeper.contract.stack import Model, Price
from spotkeeper.reconcile.store import paths
from spotkeeper.reconcile.store.store import Store
from tests.cli.conftest import Cli, Done
from tests.cli.local.test_ending import at_a_terminal
from tests.cli.records import JOB, a_job, slot
from tests.contract.samples import STACK

LOSES = [
    ("cancel", ("cancel", "first"), "deletes its machines, its disks and its checkpoints"),
    ("go back", ("resume", "first", "--go-back"), "discards its newest checkpoint"),
]


@pytest.mark.parametrize(("argv", "told"), [case[1:] for case in LOSES], ids=[case[0] for case in LOSES])
def test_without_a_terminal_destructive_commands_are_refused(
    cli: Cli, store: Store, argv: tuple[str, ...], told: str
) -> None:
    a_job(store)
    done = cli(*argv)
    assert done.code == Exit.REFUSED
    assert told in done.err
    assert done.err.endswith(f"asking needs a terminal\n  try: spotkeeper {' '.join(argv)} --yes\n")
    assert store.list_requests(JOB) == ()


@pytest.mark.parametrize("agreed", [True, False])
@pytest.mark.parametrize(("argv", "told"), [case[1:] for case in LOSES], ids=[case[0] for case in LOSES])
def test_at_a_terminal_destructive_commands_ask(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], told: str, agreed: bool
) -> None:
    a_job(store)
    at_a_terminal(monkeypatch, lambda *_, **__: agreed)
    done = cli(*argv)
    assert told in done.err
    assert (done.code, len(store.list_requests(JOB))) == ((0, 1) if agreed else (Exit.REFUSED, 0))


def test_a_drill_is_refused_without_a_terminal(cli: Cli, store: Store) -> None:
    a_job(store)
    done = cli("drill", "first", "--no-notice")
    assert done.code == Exit.REFUSED
    assert "spotkeeper drill first --node 0 --no-notice --yes" in done.err


def test_a_move_needs_a_zone_of_the_jobs_pools(cli: Cli, store: Store) -> None:
    a_job(store)
    store.put_spec(JOB, JobSpec("first", ("train.py",)))
    refused = cli("move", "first", "us-central1-x")
    assert (refused.code, "did you mean us-central1-" in refused.err) == (Exit.USAGE, True)
    assert cli("move", "first", "us-central1-b").out == f"first ({JOB}): requested: move to us-central1-b\n"
    (request,) = store.list_requests(JOB)
    assert (request.kind, request.zone) == (RequestKind.MOVE, "us-central1-b")


def test_a_move_out_of_the_jobs_regions_names_these(cli: Cli, store: Store) -> None:
    a_job(store)
    store.put_spec(JOB, JobSpec("first", ("train.py",)))
    pool = next(one for one in STACK.pools if one.kind == "spot")
    wide = replace(pool, zones=(*pool.zones, "us-east1-b"), prices={**pool.prices, "us-east1-b": Price(3.0, 1.0)})
    state = replace(STACK, regions=(STACK.region, "us-east1"), pools=(wide,))
    store.put(paths.STACK, msgspec.json.encode(state))
    refused = cli("move", "first", "us-east1-b")
    assert "us-east1-b is not in a region of this job (`regions`: us-central1)" in refused.err


def test_a_job_that_is_over_does_not_move_wherever_to(cli: Cli, store: Store) -> None:
    a_job(store, phase=Phase.END, outcome=Outcome.CANCELLED)
    store.put_spec(JOB, JobSpec("first", ("train.py",)))
    refused = cli("move", "first", "us-central1-x")
    assert refused.code == Exit.REFUSED and "is over: cancelled" in refused.err


def test_a_move_to_the_present_zone_is_refused_unless_it_cancels_a_move(cli: Cli, store: Store) -> None:
    record = a_job(store, zone="us-central1-a")
    store.put_spec(JOB, JobSpec("first", ("train.py",)))
    refused = cli("move", "first", "us-central1-a")
    assert (refused.code, refused.out, store.list_requests(JOB)) == (Exit.REFUSED, "", ())
    assert f"first ({JOB}) is in us-central1-a already" in refused.err
    held = store.read_record(record.job)
    assert held is not None and store.cas_record(replace(held.value, move=Move("us-central1-b", 1.0)), held.token)
    assert cli("move", "first", "us-central1-a").code == 0


def test_an_immediate_refusal_is_shown_without_wait(cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    a_job(store, zone="us-central1-a")
    store.put_spec(JOB, JobSpec("first", ("train.py",)))

    def round_of_the_function(*_: object) -> bool:
        (request,) = store.list_requests(JOB)
        held = store.read_record(JOB)
        why = "refused: a static machine pins the gang to its zone"
        store.append_ledger(
            JOB, Entry(at=2.0, id=f"{Event.REQUEST.value}.{request.id}", event=Event.REQUEST, detail=why)
        )
        assert held is not None and store.cas_record(replace(held.value, requests_done=(request.id,)), held.token)
        return True

    monkeypatch.setattr(verbs, "notify", round_of_the_function)
    done = cli("move", "first", "us-central1-b")
    assert (done.code, done.out) == (Exit.REFUSED, "")
    assert done.err == f"error: first ({JOB}): move: refused: a static machine pins the gang to its zone\n"


@pytest.mark.parametrize(
    ("kind", "of", "word"),
    [
        (RequestKind.CANCEL, {}, "machines and disks are deleted"),
        (RequestKind.PAUSE, {}, "checkpoint is saved and its machines are deleted"),
        (RequestKind.RESUME, {}, "trains again"),
        (RequestKind.RESIZE, {"nodes": 3}, "trains on 3 machines"),
        (RequestKind.MOVE, {"zone": "us-central1-b"}, "trains in us-central1-b"),
        (RequestKind.SWAP, {"node": 1}, "as node 1"),
    ],
)
def test_a_wait_names_the_awaited_event(
    store: Store, capsys: pytest.CaptureFixture[str], kind: RequestKind, of: dict[str, object], word: str
) -> None:
    over = replace(a_job(store), phase=Phase.DONE, outcome=Outcome.CANCELLED)
    held = store.read_record(JOB)
    assert held is not None and store.cas_record(over, held.token)
    with contextlib.suppress(CliError):  # it ended before the request was taken in
        verbs.wait_for(store, over, new_request(kind, 1.0, "me", **of))
    assert word in capsys.readouterr().err


class Typed(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "code", "asked_again"),
    [("y\n", 0, False), ("YES\n", 0, False), ("\n", 4, False), ("n\n", 4, False), ("", 4, False), ("x\ny\n", 0, True)],
)
def test_questions_accept_only_y_or_n(
    cli: Cli, store: Store, monkeypatch: pytest.MonkeyPatch, typed: str, code: int, asked_again: bool
) -> None:
    a_job(store)
    monkeypatch.setattr("sys.stdin", Typed(typed))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    done = cli("cancel", "first")
    assert (done.code, "please answer y or n\n" in done.err) == (code, asked_again)
    assert code == 0 or done.err.endswith("error: nothing was changed\n")


def test_a_swap_needs_a_replaceable_machine(cli: Cli, store: Store) -> None:
    a_job(store, nodes=(Node(cur=slot()), Node(cur=slot(model=Model.STATIC, machine="floor-s0"))))
    assert "node 1 cannot be swapped" in cli("swap", "first", "--node", "1").err
    beyond = cli("swap", "first", "--node", "7")
    assert (beyond.code, "its nodes: 0, 1" in beyond.err) == (Exit.MISSING, True)
    assert cli("swap", "first").code == 0, "the only one that can be"
    (request,) = store.list_requests(JOB)
    assert (request.kind, request.node) == (RequestKind.SWAP, 0)


def test_a_swap_among_several_machines_needs_a_node(cli: Cli, store: Store) -> None:
    a_job(store)
    done = cli("swap", "first")
    assert done.code == Exit.REFUSED
    assert "nodes that can be swapped: 0, 1" in done.err


def follow(store: Store, before: Record, kind: RequestKind, *steps: Callable[[Record], Record], **of: object) -> Record:
    """Wait for a request while a function writes the record anew at every look."""
    asked = new_request(kind, 1.0, "me", **of)
    store.put_request(JOB, asked)
    left = [lambda record: replace(record, requests_done=(asked.id,)), *steps]

    def look(_: float) -> None:
        held = store.read_record(JOB)
        assert held is not None and left, "it waits for ever"
        assert store.cas_record(left.pop(0)(held.value), held.token)

    after = verbs.wait_for(store, before, asked, look)
    assert not left, "it did not wait until it was done"
    return after


def test_waiting_ends_when_the_record_shows_the_result(store: Store) -> None:
    before = a_job(store)
    spot = replace(before.nodes[0], cur=replace(slot(), attempt=9))
    assert follow(store, before, RequestKind.SWAP, lambda r: replace(r, nodes=(spot, r.nodes[1])), node=0).gen == 2
    assert follow(
        store, before, RequestKind.MOVE, lambda r: replace(r, zone="us-central1-b"), zone="us-central1-b"
    ).zone
    assert follow(store, before, RequestKind.RESIZE, lambda r: replace(r, members=(0,), gen=3), nodes=1).gen == 3
    assert follow(store, before, RequestKind.PAUSE, lambda r: replace(r, phase=Phase.HOLD)).phase is Phase.HOLD
    trains = [lambda r: replace(r, phase=Phase.RUN, stop=True, gen=4), lambda r: replace(r, stop=False)]
    held = store.read_record(JOB)
    assert held is not None
    assert store.cas_record(replace(held.value, phase=Phase.RUN), held.token)
    assert follow(store, held.value, RequestKind.RESUME, *trains).gen == 4
    ends = [
        lambda r: replace(r, phase=Phase.END, outcome=Outcome.CANCELLED),
        lambda r: replace(r, phase=Phase.DONE),
    ]
    assert follow(store, before, RequestKind.CANCEL, *ends).phase is Phase.DONE


def test_waiting_for_a_move_ends_when_the_move_has_ended_where_it_began(store: Store) -> None:
    before = a_job(store)
    asked = new_request(RequestKind.MOVE, 5.0, "me", zone="us-central1")
    held = store.read_record(JOB)
    assert held is not None
    moved = replace(held.value, requests_done=(asked.id,), zone="us-east1-b")
    assert store.cas_record(moved, held.token)
    for at, why in ((2.0, "an earlier one"), (6.0, "no capacity")):
        store.append_ledger(JOB, Entry(at=at, id=f"move.cancel.v{at}", event=Event.MOVE, cause="refused", detail=why))
    with pytest.raises(CliError, match="move: refused: no capacity; the job stays in us-east1-b"):
        verbs.wait_for(store, before, asked)
    assert not verbs._done(before, replace(moved, asked_zone=ZoneRequest("us-central1", 5.0)), asked)


def test_waiting_ends_with_the_reason_when_it_is_refused_or_overtaken(store: Store) -> None:
    before = a_job(store)
    asked = new_request(RequestKind.MOVE, 1.0, "me", zone="us-central1-b")
    held = store.read_record(JOB)
    assert held is not None
    assert store.cas_record(replace(held.value, requests_done=(asked.id,)), held.token)
    store.append_ledger(
        JOB, Entry(at=2.0, id=f"request.{asked.id}", event=Event.REQUEST, detail="refused: it is pinned")
    )
    with pytest.raises(CliError, match="move: refused: it is pinned"):
        verbs.wait_for(store, before, asked)
    other = new_request(RequestKind.RESIZE, 1.0, "me", nodes=3)
    held = store.read_record(JOB)
    assert held is not None
    holds = replace(held.value, requests_done=(other.id,), phase=Phase.HOLD, hold=Hold.FAILURE, reason="4 crashes")
    assert store.cas_record(holds, held.token)
    with pytest.raises(CliError, match=r"on hold.*4 crashes"):
        verbs.wait_for(store, before, other)


def submitted(done: Done) -> list[str]:
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    return [one["name"] for one in (answer if isinstance(answer, list) else [answer])]


def test_arguments_and_a_name_make_a_variant_of_a_job(cli: Cli, store: Store, folder: Path) -> None:
    file = folder / "job.yaml"
    assert submitted(cli("submit", file, "--json")) == ["first"]
    assert submitted(cli("submit", file, "--name", "hot", "--json", "--", "--lr", "3e-4", "--json")) == ["hot"]
    job = store.read_name("hot")
    assert job is not None
    spec = store.read_spec(job)
    assert spec is not None
    assert spec.command == ("train.py", "--lr", "3e-4", "--json")
    again = cli("submit", file, "--name", "hot", "--", "--lr", "1e-3")
    assert (again.code, "with other content: command" in again.err) == (Exit.REFUSED, True)
    wrong = cli("submit", file, "--name", "No Name")
    assert (wrong.code, '--name: "No Name": want' in wrong.err) == (Exit.USAGE, True)


def test_several_files_are_all_checked_before_any_is_submitted(cli: Cli, store: Store, folder: Path) -> None:
    file, other = folder / "job.yaml", folder / "second.yaml"
    other.write_text("name: second\ncommand: [train.py]\nnodes: none\n")
    wrong = cli("submit", file, other)
    assert (wrong.code, "second.yaml:3: nodes" in wrong.err) == (Exit.USAGE, True)
    assert store.active_jobs() == ()
    other.write_text("name: first\ncommand: [train.py]\nsource: code\n")
    assert "several of these files have the name first" in cli("submit", file, other).err
    other.write_text("name: second\ncommand: [train.py, --lr, 3e-4]\nsource: code\n")
    assert cli("submit", file, other, "--name", "x").code == Exit.USAGE
    assert cli("submit", file, other, "--watch").code == Exit.USAGE
    assert submitted(cli("submit", file, other, "--json")) == ["first", "second"]
    spec = store.read_spec(store.read_name("second") or "")
    assert spec is not None and spec.command[-1] == "3e-4", "as it was written"


def test_a_variant_is_resumed_with_its_arguments(cli: Cli, store: Store, folder: Path) -> None:
    file = folder / "job.yaml"
    submitted(cli("submit", file, "--json", "--", "--lr", "1"))
    job = store.read_name("first") or ""
    held = store.read_record(job)
    assert held is not None
    assert store.cas_record(replace(held.value, phase=Phase.HOLD), held.token)
    done = cli("resume", "first", file, "--json", "--", "--lr", "2")
    assert json.loads(done.out)["changed"] == ["command"]
    assert "need the job file" in cli("resume", "first", "--", "--lr", "2").err


def test_a_job_with_an_overridden_name_is_resumed_with_that_name(cli: Cli, store: Store, folder: Path) -> None:
    file = folder / "job.yaml"
    submitted(cli("submit", file, "--name", "wide", "--json"))
    held = store.read_record(store.read_name("wide") or "")
    assert held is not None
    assert store.cas_record(replace(held.value, phase=Phase.HOLD), held.token)
    refused = cli("resume", "wide", file)
    assert (refused.code, "spotkeeper resume wide JOB.YAML --name wide" in refused.err) == (Exit.REFUSED, True)
    done = cli("resume", "wide", file, "--name", "wide", "--json", "--", "--lr", "2")
    assert json.loads(done.out)["changed"] == ["command"]


def test_waiting_ends_when_the_job_ends_first(store: Store) -> None:
    before = a_job(store)
    held = store.read_record(JOB)
    assert held is not None
    assert store.cas_record(replace(held.value, phase=Phase.DONE, outcome=Outcome.SUCCEEDED), held.token)
    never = lambda _: pytest.fail("it waits")  # noqa: E731
    with pytest.raises(CliError, match="succeeded"):
        verbs.wait_for(store, before, new_request(RequestKind.PAUSE, 1.0, "me"), never)
    assert verbs.wait_for(store, before, new_request(RequestKind.CANCEL, 1.0, "me"), never).phase is Phase.DONE


@pytest.mark.parametrize("kind", ["cancel", "pause", "resume"])
def test_requests_are_left_for_the_next_round(cli: Cli, store: Store, kind: str) -> None:
    phase = Phase.HOLD if kind == "resume" else Phase.RUN
    a_job(store, phase=phase)
    done = cli(kind, "first", *(["--yes"] if kind == "cancel" else []))
    assert (done.code, done.out) == (0, f"first ({JOB}): requested: {kind}\n")
    assert "next tick" in done.err
    (request,) = store.list_requests(JOB)
    assert request.kind is RequestKind(kind)
    held = store.read_record(JOB)
    assert held is not None and held.value.phase is phase  # only reconcile writes the record


def test_a_resize_needs_an_allowed_size(cli: Cli, store: Store) -> None:
    a_job(store)
    store.put_spec(JOB, JobSpec("first", ("train.py",), nodes=Nodes(1, 4)))
    done = cli("resize", "first", "3")
    assert (done.code, done.out) == (0, f"first ({JOB}): requested: resize to 3 machines\n")
    (request,) = store.list_requests(JOB)
    assert (request.kind, request.nodes) == (RequestKind.RESIZE, 3)
    refused = cli("resize", "first", "5")
    assert refused.code == 4
    assert "5 is not within `nodes: {min: 1, max: 4}`" in refused.err
    assert len(store.list_requests(JOB)) == 1
    store.put(f"jobs/{JOB}/spec.json", spec_json(JobSpec("first", ("train.py",), nodes=Nodes(2, 4))))
    assert "cannot have 1 machine: 1 is not within" in cli("resize", "first", "1").err


def test_a_resize_does_not_name_the_nodes_to_be_parked(cli: Cli) -> None:
    """Of three nodes 0 and 2 may remain (``decide/gang/test_resize.py``)."""
    told = " ".join(cli("resize", "--help").out.split())
    assert "The other nodes keep their numbers" in told and "highest" not in told


@pytest.mark.parametrize(
    ("phase", "words", "why"),
    [
        (Phase.RUN, ("resume",), "is not on hold: there is nothing to resume"),
        (Phase.HOLD, ("pause",), "is on hold already: out of luck"),
        (Phase.RUN, ("resize", "2"), "has 2 machines already"),
    ],
)
def test_requests_without_effect_are_refused_at_once(
    cli: Cli, store: Store, phase: Phase, words: tuple[str, ...], why: str
) -> None:
    """Taken in, it would be refused in the ledger, where nobody looks."""
    a_job(store, phase=phase, reason="out of luck", size=2, asked=2, nodes=(Node(), Node(), Node()))
    store.put_spec(JOB, JobSpec("first", ("train.py",), nodes=Nodes(1, 4)))
    done = cli(words[0], "first", *words[1:])
    assert (done.code, done.err) == (4, f"error: first ({JOB}) {why}\n")
    assert store.list_requests(JOB) == ()


def test_a_user_may_ask_for_the_size_to_which_the_queue_shrank_a_job(cli: Cli, store: Store) -> None:
    a_job(store, phase=Phase.RUN, size=1, nodes=(Node(), Node(), Node()))
    store.put_spec(JOB, JobSpec("first", ("train.py",), nodes=Nodes(1, 3)))
    assert cli("resize", "first", "1").code == 0
    assert [request.nodes for request in store.list_requests(JOB)] == [1]


def test_a_request_behind_another_is_judged_by_the_round(cli: Cli, store: Store) -> None:
    a_job(store)
    assert cli("pause", "first").code == 0
    assert cli("resume", "first").code == 0  # the pause is not taken in yet
    assert [request.kind for request in store.list_requests(JOB)] == [RequestKind.PAUSE, RequestKind.RESUME]


def test_going_back_needs_its_own_option(cli: Cli, store: Store) -> None:
    a_job(store)
    assert cli("resume", "first", "--go-back", "--yes").code == 0
    (request,) = store.list_requests(JOB)
    assert (request.kind, request.go_back) == (RequestKind.RESUME, True)


def test_an_ended_job_accepts_no_request(cli: Cli, store: Store) -> None:
    a_job(store, phase=Phase.END, outcome=Outcome.CANCELLED)
    done = cli("pause", "first")
    assert (done.code, done.err) == (4, f"error: first ({JOB}) is over: cancelled\n")
    assert store.list_requests(JOB) == ()


def test_cancel_withdraws_a_submission_that_was_cut_off(cli: Cli, store: Store) -> None:
    store.put_name("first", JOB)
    store.set_active(JOB)
    assert cli("cancel", "first").out == f"first ({JOB}): cancelled its unfinished submission\n"
    assert store.read_name("first") is None
    held = store.read_record(JOB)
    assert held is not None and held.value.phase is Phase.DONE, "the next tick deletes what it left"
