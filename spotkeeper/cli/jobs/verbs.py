"""Sends requests to a job: cancel, pause, resume, resize, move, swap.

A command writes the request to the bucket, notifies the function, and returns; ``--wait`` follows the request until the
function has carried it out or refused it. A resume with other files first writes the source and the job file, each
under its hash, then the request that names the job file; the round that handles the request puts that file into use.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from spotkeeper.cli.jobs.queue import told_once
from spotkeeper.cli.output import agree, emit, note, waiting
from spotkeeper.cli.stack import checked, note_upkeep, open_stack, stack_for, unheard
from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.pack import Source, pack_source
from spotkeeper.client.submit import differences, with_source
from spotkeeper.client.target import Target, notify, whoami
from spotkeeper.contract.job import JobRequest, JobSpec, RequestKind, deadline_at, pools_of, spec_sha256
from spotkeeper.contract.ledger import Event
from spotkeeper.contract.parse.jobfile import Overrides
from spotkeeper.contract.parse.problem import nearest
from spotkeeper.contract.record import Phase, Record, SlotState
from spotkeeper.contract.stack import Model, StackState, within
from spotkeeper.reconcile.store.store import Store
from spotkeeper.report.job.hold import resume_with as command_with

EVERY_S = 1.0  # real
STAYED = ("refused", "cancelled")  # causes of the end of a move where it began


class Asked(Struct, frozen=True, omit_defaults=True):
    """A request that a command has sent to a job, as the command prints it.

    ``request``: its kind. ``id``: "" if the command withdrew an unfinished submission. ``changed``: fields of the job
    file that a resume replaces. ``done``: with ``--wait``, the function has carried out the request.
    """

    job: str
    name: str
    request: str
    id: str
    changed: tuple[str, ...] = ()
    done: bool = False


class Options(Struct, frozen=True):
    """Options of a command that sends a request to a job. ``yes``: ask for no confirmation."""

    stack: str | None
    as_json: bool
    wait: bool = False
    yes: bool = False


def cancel(job: str, options: Options) -> None:
    """Request the cancellation of a job that is not over, or withdraw an unfinished submission."""
    target, store = open_stack(options.stack)
    withdrawn = lookup.withdraw(store, job, target.clock.now())
    if withdrawn is not None:
        text = f"{job} ({withdrawn}): cancelled its unfinished submission"
        emit(Asked(withdrawn, job, RequestKind.CANCEL.value, ""), options.as_json, text)
        return
    record = lookup.find_job(store, job)
    lookup.refuse_over(record)
    if not options.yes:
        kept = "; its disks are kept (keep_disks)" if record.keep_disks else ", its disks and its checkpoints"
        consequence = f"{record.name} ({record.job}): this ends the job and deletes its machines{kept}"
        agree(consequence, "Cancel it?", f"spotkeeper cancel {shlex.quote(job)} --yes")
    _send(target, store, record, RequestKind.CANCEL, options)


def pause(job: str, options: Options) -> None:
    target, store = open_stack(options.stack)
    _send(target, store, lookup.find_job(store, job), RequestKind.PAUSE, options)


def resize(job: str, nodes: int, drop: tuple[int, ...], options: Options) -> None:
    target, store = open_stack(options.stack)
    _send(target, store, lookup.find_job(store, job), RequestKind.RESIZE, options, nodes=nodes, drop=drop)


def move(job: str, zone: str, options: Options) -> None:
    """Request a job's move; CliError if the job is over or its spot pools do not have this zone or region."""
    target, store = open_stack(options.stack)
    record = lookup.find_job(store, job)
    lookup.refuse_over(record)
    check_zone(store, record, zone)
    _send(target, store, record, RequestKind.MOVE, options, zone=zone)


def check_zone(store: Store, record: Record, zone: str) -> None:
    """Raise CliError if the job's spot pools do not have this zone or region."""
    spec = store.read_spec(record.job, record.spec_key())
    state = store.read_stack()
    if spec is not None and state is not None:
        zones = {zone for pool in pools_of(spec, state) if pool.kind == "spot" for zone in pool.zones}
        if not any(within(each, zone) for each in zones):
            wide = pools_of(replace(spec, regions=state.regions), state)
            if any(pool.kind == "spot" and any(within(each, zone) for each in pool.zones) for pool in wide):
                regions = ", ".join(spec.regions or (state.region,))
                raise CliError(f"{zone} is not in a region of this job (`regions`: {regions})", Exit.USAGE)
            near = nearest(zone, zones)
            hint = f" (did you mean {near}?)" if near else ""
            raise CliError(f"{zone} is not a zone of this job's spot pools{hint}", Exit.USAGE, ", ".join(sorted(zones)))


def swap(job: str, node: int | None, options: Options) -> None:
    target, store = open_stack(options.stack)
    record = lookup.find_job(store, job)
    lookup.refuse_over(record)
    _send(target, store, record, RequestKind.SWAP, options, node=_node(record, node))


def _node(record: Record, node: int | None) -> int:
    """Return the node whose machine is swapped: the named node, or the only node whose machine can be swapped.

    Raises:
        CliError: the named node cannot be swapped, or no node is named and several can be swapped.
    """
    filled = record.filled()
    if node is not None and node not in filled:
        there = ", ".join(map(str, filled))
        raise CliError(f"--node {node}: {record.name} has no such node", Exit.MISSING, f"its nodes: {there}")
    slots = {index: record.nodes[index].cur for index in record.members}
    may = [index for index, slot in slots.items() if slot and slot.state is SlotState.MEMBER and not slot.machine]
    if node is None and len(may) == 1:
        return may[0]
    if node is not None and node in may:
        return node
    which = ", ".join(map(str, may)) or "none now"
    static = node is not None and (slot := slots.get(node)) is not None and slot.model is Model.STATIC
    why = "the job has several machines: name one by --node" if node is None else f"node {node} does not train now"
    why = f"node {node} cannot be swapped, since its checkpoints are on its static machine" if static else why
    raise CliError(f"{record.name} ({record.job}): {why}", Exit.REFUSED, f"nodes that can be swapped: {which}")


def resume(job: str, file: Path | None, options: Options, overrides: Overrides, *, go_back: bool) -> None:
    """Request a job's resume, with its own files or with another job file.

    Raises:
        CliError: no such job, the user declined to return to an older checkpoint, the function refused the request,
            or (with a job file) as :func:`resume_with`.
    """
    if file is not None:
        _resume_file(job, file, options, go_back=go_back, overrides=overrides)
        return
    if overrides.arguments or overrides.name is not None:
        why = "--name and arguments after -- need the job file"
        raise CliError(why, Exit.USAGE, "spotkeeper resume JOB JOB.YAML -- ...")
    target, store = open_stack(options.stack)
    record = lookup.find_job(store, job)
    _agree_to_go_back(record, job, options, go_back=go_back)
    _send(target, store, record, RequestKind.RESUME, options, go_back=go_back)


def _agree_to_go_back(record: Record, job: str, options: Options, *, go_back: bool) -> None:
    if go_back and not options.yes:
        lookup.refuse_over(record)
        what = f"{record.name} ({record.job}): this discards its newest checkpoint and resumes from an older state"
        agree(what, "Go back?", f"spotkeeper resume {shlex.quote(job)} --go-back --yes")


def _resume_file(job: str, file: Path, options: Options, *, go_back: bool, overrides: Overrides) -> None:
    target, store, state = stack_for(options.stack, file)
    record = lookup.find_job(store, job)
    spec = checked(target, store, state, file, overrides, since=record.created)
    source = pack_source(file, spec)
    _agree_to_go_back(record, job, options, go_back=go_back)
    now = target.clock.now()
    request, changed = resume_with(store, record, spec, source, state, now, whoami(), go_back=go_back)
    files = f" with other files ({', '.join(changed)})" if changed else "; its files are unchanged"
    _finish(target, store, record, request, options, f"resume{files}", tuple(changed))


def resume_with(
    store: Store,
    record: Record,
    spec: JobSpec,
    source: Source | None,
    stack: StackState | None,
    now: float,
    by: str,
    *,
    go_back: bool = False,
) -> tuple[JobRequest, list[str]]:
    """Request a resume with a checked job file.

    Args:
        by: the user.
        go_back: resume from an older checkpoint, or from the start, because the newest is lost.

    Returns:
        The request, and the fields of the job file that change; if none changes, the request is a plain resume.

    Raises:
        CliError: the job is over or not on hold, or its disks do not fit this job file.
        StoreError: the bucket failed.
    """
    full = with_source(spec, source)
    _check_resume(store, record, full, stack, now)
    changed = differences(store.read_spec(record.job, record.spec_key()), full)
    request = lookup.new_request(RequestKind.RESUME, now, by, go_back=go_back)
    if not changed:
        return lookup.send_request(store, record, request), []
    digest = spec_sha256(full)
    if source is not None:
        store.put_source(record.job, source.sha256, source.tar)
    store.put_spec(record.job, full, digest)
    return lookup.send_request(store, record, replace(request, spec_sha256=digest)), changed


def _check_resume(store: Store, record: Record, spec: JobSpec, stack: StackState | None, now: float) -> None:
    """Raise CliError if the next round would refuse to resume the job with this job file."""
    from spotkeeper.reconcile.decide.gang.requests import file_refusal

    lookup.refuse_over(record)
    who = f"{record.name} ({record.job})"
    if record.phase is Phase.RUN and record.pause:
        remedy = "wait until `spotkeeper status` says that it is on hold"
        raise CliError(f"{who} is not on hold yet: {record.pause}", Exit.REFUSED, remedy)
    if record.phase is Phase.RUN:
        remedy = f"spotkeeper pause {record.name}, then {command_with(record.name)}"
        raise CliError(f"{who} is running, and only a job on hold accepts other files", Exit.REFUSED, remedy)
    old = store.read_spec(record.job, record.spec_key())
    if old is not None and (why := file_refusal(old, spec, stack)):
        named = f"if you submitted it with --name: spotkeeper resume {record.name} JOB.YAML --name {record.name}"
        raise CliError(f"{who} cannot resume with this job file: {why}", Exit.REFUSED, named * (old.name != spec.name))
    new = spec.deadline if old is None or spec.deadline != old.deadline else None
    if new is not None and deadline_at(new, record.created) <= now:  # the old file's deadline may have passed
        why = f"{who}: the deadline {new}, counted from the job's submission, has passed"
        raise CliError(why, Exit.USAGE, "set a later deadline, or none")


def _send(
    target: Target,
    store: Store,
    record: Record,
    kind: RequestKind,
    options: Options,
    **fields: str | int | tuple[int, ...] | None,
) -> None:
    """Send a request and tell its result; ``fields``: as for :func:`~spotkeeper.client.lookup.new_request`."""
    request = lookup.new_request(kind, target.clock.now(), whoami(), **fields)
    lookup.send_request(store, record, request)
    _finish(target, store, record, request, options, words(request))


def words(request: JobRequest) -> str:
    """What a request asks for."""
    return {
        RequestKind.RESIZE: f"resize to {lookup.machines(request.nodes or 0)}{_without(request.drop)}",
        RequestKind.MOVE: f"move to {request.zone}",
        RequestKind.SWAP: f"replace the machine of node {request.node}",
    }.get(request.kind, request.kind.value)


def _without(drop: tuple[int, ...]) -> str:
    return f" without node{'s' * (len(drop) > 1)} {', '.join(map(str, drop))}" if drop else ""


def tell(target: Target, store: Store, record: Record, asked: JobRequest) -> str:
    """Notify the function of a request. Returns a note if the function cannot be reached, else "".

    Raises:
        CliError: the function refused the request at once.
    """
    if not notify(target, store, record.job):
        return unheard(target, "carries it out")
    if (now := store.read_record(record.job)) is not None and asked.id in now.value.requests_done:
        _check_taken(store, now.value, asked)
    return ""


def _finish(
    target: Target,
    store: Store,
    record: Record,
    asked: JobRequest,
    options: Options,
    what: str,
    changed: tuple[str, ...] = (),
) -> None:
    """Notify the function of a request, wait for it with ``--wait``, and print the result."""
    note_upkeep(target.local)
    with waiting("waiting for the function's answer", quiet=True):
        unreached = tell(target, store, record, asked)
    if unreached:
        note(unreached)
    who, text = f"{record.name} ({record.job})", f"requested: {what}"
    if options.wait:
        note(f"{who}: {text}")
        text = _outcome(wait_for(store, record, asked, told_once(target, store, record.job)))
    answer = Asked(record.job, record.name, asked.kind.value, asked.id, changed, options.wait)
    emit(answer, options.as_json, f"{who}: {text}")
    if not (options.wait or options.as_json):
        note(f"  to see its effect: spotkeeper status {record.name} (`--wait` waits until the request is carried out)")


def _outcome(record: Record) -> str:
    if record.over:
        return record.outcome.value if record.outcome else "over"
    if record.phase is Phase.HOLD:
        return "on hold; its machines are deleted, its checkpoints kept"
    return f"training in generation {record.gen}"


def wait_for(store: Store, before: Record, asked: JobRequest, wait: Callable[[float], None] = time.sleep) -> Record:
    """Follow a request until the function has carried it out; return the job's record at that time.

    Ctrl-C stops waiting, not the request.

    Raises:
        CliError: the function refused the request, or the job ended or went on hold first.
    """
    who = f"{before.name} ({before.job})"
    with waiting(f"{who}: waiting until {_awaited(asked)} (Ctrl-C stops only the waiting)"):
        while True:
            record = lookup.record_of(store, before.job)
            if record.phase is Phase.DONE and asked.kind is not RequestKind.CANCEL:
                _refuse_refused(store, record, asked)  # the job ended first: no round handles the request any more
            if record.phase is Phase.DONE:
                return record
            if asked.id in record.requests_done:
                _refuse_refused(store, record, asked)
                _refuse_stayed(store, record, asked)
                if _done(before, record, asked):
                    return record
            wait(EVERY_S)


def _awaited(asked: JobRequest) -> str:
    """The event that ends the wait, for the text beside the spinner."""
    return {
        RequestKind.CANCEL: "its machines and disks are deleted",
        RequestKind.PAUSE: "its checkpoint is saved and its machines are deleted",
        RequestKind.RESUME: "it trains again",
        RequestKind.RESIZE: f"it trains on {lookup.machines(asked.nodes or 0)}",
        RequestKind.MOVE: f"each node has a machine there, the disks are copied, and it trains in {asked.zone}",
        RequestKind.SWAP: f"a new machine trains as node {asked.node}",
    }[asked.kind]


def _check_taken(store: Store, record: Record, asked: JobRequest) -> None:
    """Raise CliError if the ledger shows that the function refused the request."""
    for entry in (*store.list_ledger(record.job), *record.outbox):
        if entry.id == f"{Event.REQUEST.value}.{asked.id}" and entry.detail.startswith("refused: "):
            raise CliError(f"{record.name} ({record.job}): {asked.kind.value}: {entry.detail}", Exit.REFUSED)


def _refuse_refused(store: Store, record: Record, asked: JobRequest) -> None:
    """Raise CliError if the request was refused, or the job ended or went on hold before the request took effect."""
    _check_taken(store, record, asked)
    who = f"{record.name} ({record.job})"
    over = record.over and asked.kind is not RequestKind.CANCEL
    on_hold = record.phase is Phase.HOLD and asked.kind not in (RequestKind.CANCEL, RequestKind.PAUSE)
    if over or on_hold:
        raise CliError(f"{who}: {_outcome(record)}: {record.reason}", Exit.FAILED, f"spotkeeper status {record.name}")


def _refuse_stayed(store: Store, record: Record, asked: JobRequest) -> None:
    """Raise CliError if a requested move has ended where it began."""
    if asked.kind is not RequestKind.MOVE or record.move is not None or record.asked_zone is not None:
        return
    if not within(record.zone or "", asked.zone or ""):
        entries = (*store.list_ledger(record.job), *record.outbox)
        ended = [one for one in entries if one.event is Event.MOVE and one.cause in STAYED and one.at >= asked.at]
        if ended:
            who, last = f"{record.name} ({record.job})", max(ended, key=lambda one: one.at)
            why = ": ".join(filter(None, (last.cause, last.detail)))
            raise CliError(f"{who}: move: {why}; the job stays in {record.zone}", Exit.REFUSED)


def _done(before: Record, record: Record, asked: JobRequest) -> bool:
    slots = [record.nodes[index].cur for index in record.members]
    trains = bool(slots) and not record.stop and record.roll is None
    trains = trains and all(slot is not None and slot.state is SlotState.MEMBER for slot in slots)
    match asked.kind:
        case RequestKind.CANCEL:
            return record.phase is Phase.DONE
        case RequestKind.PAUSE:
            return record.phase is Phase.HOLD
        case RequestKind.RESUME:
            return trains and record.gen > before.gen
        case RequestKind.RESIZE:
            return trains and len(slots) == asked.nodes
        case RequestKind.MOVE:
            moves = record.move is not None or record.asked_zone is not None
            return trains and not moves and within(record.zone or "", asked.zone or "")
        case RequestKind.SWAP:
            old = before.nodes[asked.node or 0].cur
            new = record.nodes[asked.node or 0].cur
            return trains and new is not None and old is not None and new.attempt != old.attempt
