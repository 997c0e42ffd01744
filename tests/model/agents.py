"""Agents and training: each machine asks the shipped ``document`` what it is, and obeys; or says what it must.

An agent's moves change its own machine and add facts about itself, nothing else (S9 holds by construction here;
that a report cannot speak for another node is tested over HTTP, in ``tests/reconcile``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spotkeeper.contract.allocation import Allocation, Grant
from spotkeeper.contract.facts import HANG, BucketCopy, Fact, Hung, Kind, Rung, StacksAnswer, WorkerState
from spotkeeper.contract.generation import DocState, Role
from spotkeeper.contract.record import Record, SlotState
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.controller.document import Speaker, place, role
from spotkeeper.reconcile.controller.document import state as doc_state
from tests.model import sky as clouds
from tests.model.values import DEADLINE, JOBS, NODE, REFUSED, VALUE, Life, N, Papers, Sky, V


class Said(NamedTuple):
    """A step of an agent: what is in the cloud and in the bucket afterwards."""

    say: str
    sky: Sky
    papers: Papers
    fault: int = 0
    request: int = 0
    why: str = ""


def fact(v: V, kind: Kind, value: str = "0", gen: int = 0) -> Fact:
    return Fact(v.uid, f"b{v.boot}", v.node, v.attempt, gen, kind, value)


def _add(papers: Papers, *facts: Fact) -> Papers:
    return papers._replace(facts=papers.facts | set(facts))


def steps(
    sky: Sky,
    v: V,
    record: Record,
    papers: Papers,
    stack: StackState,
    faults: frozenset[str],
    requests: frozenset[str],
    blind: bool,
    copies: bool,
) -> Iterator[Said]:
    """What the agent of one machine may do next. ``blind``: a zone may not answer, then or later."""
    if v.life in (Life.STOPPING, Life.DEAD) or v.hung:
        return
    where = place(record, stack, Speaker(v.uid, v.name, v.zone))
    what = role(record, where, f"b{v.boot}")
    if what is Role.SUPERSEDED:
        yield from _leave(sky, v, papers)
        return
    hello = fact(v, Kind.HELLO)
    if hello not in papers.facts:
        yield Said(f"{v.uid} says hello", sky, _add(papers, hello))
        return
    yield from _notices(sky, v, papers, faults)
    if what is Role.STANDBY and v.alive:
        yield Said(f"{v.uid} stops training: it is no member", clouds.put(sky, v, alive=False), papers)
    if where is not None and where.cur:
        yield from _mounted(sky, v, papers, blind or bool(record.mirror))
        yield from _fetches(sky, v, record, papers, faults)
    if what is Role.MEMBER and copies:
        yield from _copies(v, sky, record, papers, faults)
    if what is Role.MEMBER:
        yield from _member(sky, v, record, papers, faults, requests)


def _leave(sky: Sky, v: V, papers: Papers) -> Iterator[Said]:
    disk = next((d for d in sky.disks if d.user == v.uid), None)
    freed = fact(v, Kind.FREED, str(disk.number) if disk else "0")
    if freed not in papers.facts:
        stopped = clouds.put(sky, v, alive=False, writes=False)
        yield Said(f"{v.uid} is superseded: it stops and unmounts", stopped, _add(papers, freed))
    else:
        yield Said(f"{v.uid} powers off", clouds.put(sky, v, life=Life.STOPPING), papers)


def _notices(sky: Sky, v: V, papers: Papers, faults: frozenset[str]) -> Iterator[Said]:
    deadline = f"{DEADLINE:.0f}"
    notice, reprieve = fact(v, Kind.NOTICE, deadline), fact(v, Kind.REPRIEVE, deadline)
    if v.planned:
        return
    if v.noticed:
        spared = clouds.put(sky, v, noticed=0)
        yield Said(f"the notice of {v.uid} is withdrawn", spared, _add(papers, reprieve))
    elif "noticed" in faults and notice not in papers.facts:
        warned = clouds.put(sky, v, noticed=1)
        yield Said(f"{v.uid} is under notice", warned, _add(papers, notice), fault=1)


def _mounted(sky: Sky, v: V, papers: Papers, blind: bool) -> Iterator[Said]:
    """What was on the disk when it was mounted. Where every zone answers, nobody listens to a blank one's word."""
    disk = next((d for d in sky.disks if d.user == v.uid), None)
    if disk is None:
        return
    attached = fact(v, Kind.ATTACHED, str(disk.number))
    found = disk.commit > 0 and not (v.writes and disk.commit == v.gen)  # else it wrote that itself, since
    if attached not in papers.facts and (blind or found):
        said = [attached, fact(v, Kind.CHECKPOINT, f"{disk.commit}-0")] if found else [attached]
        yield Said(f"{v.uid} mounts its disk and says what is on it", sky, _add(papers, *said))


def _copies(v: V, sky: Sky, record: Record, papers: Papers, faults: frozenset[str]) -> Iterator[Said]:
    """The lowest member has copied what its generation has committed, or saved at a trial's rung or for a move.

    The bucket may refuse the copy for which a move waits, and from then on each.
    """
    there = v.alive or (_reached(v, record, papers) and doc_state(record) in (DocState.RUN, DocState.ROLL_CALL))
    there = there or (_uploads(record) and fact(v, Kind.RELEASED, "0", record.gen) in papers.facts)
    newest = papers.newest if not v.alive and _uploads(record) else record.gen
    lacks = REFUSED < papers.copy < papers.newest == newest
    if there and v.writes and v.node == min(record.members) and lacks and v.gen:
        if "unstored" in faults and not v.alive and _uploads(record):
            yield Said(f"the bucket refuses the copy of {v.uid}", sky, papers._replace(copy=REFUSED), fault=1)
        word = fact(v, Kind.MIRRORED, str(BucketCopy(f"{newest}-0", 1)), record.gen)
        yield Said(f"{v.uid} has copied its checkpoint", sky, _add(papers, word)._replace(copy=newest))


def _uploads(record: Record) -> bool:
    """Whether a move waits for the copy."""
    return record.leaving and record.move is not None and record.move.bucket


def _reached(v: V, record: Record, papers: Papers) -> bool:
    return any(f.kind is Kind.RUNG and (f.uid, f.gen) == (v.uid, record.gen) for f in papers.facts)


def _fetches(sky: Sky, v: V, record: Record, papers: Papers, faults: frozenset[str]) -> Iterator[Said]:
    """It brings a copy onto its disk as it is told to, before it trains. The copy may be damaged, or lost."""
    fetch, disk = record.fetch, next((d for d in sky.disks if d.user == v.uid), None)
    if fetch is None or disk is None or v.node not in fetch.nodes or v.alive:
        return
    told, none = fact(v, Kind.FETCHED, fetch.commit), fact(v, Kind.UNMIRRORED, fetch.commit)
    if told not in papers.facts and "rotten" in faults:
        lost = _add(papers, none)._replace(copy=0)
        yield Said(f"{v.uid} finds no copy of {fetch.commit}", sky, lost, fault=1)
    if none in papers.facts:
        return
    if told not in papers.facts and fact(v, Kind.ATTACHED, str(disk.number)) in papers.facts:
        filled = sky._replace(disks=(sky.disks - {disk}) | {disk._replace(commit=int(fetch.commit.partition("-")[0]))})
        yield Said(
            f"{v.uid} fetches {fetch.commit}", filled, _add(papers, told, fact(v, Kind.CHECKPOINT, fetch.commit))
        )


def _member(
    sky: Sky, v: V, record: Record, papers: Papers, faults: frozenset[str], requests: frozenset[str]
) -> Iterator[Said]:
    state = doc_state(record)
    released = fact(v, Kind.RELEASED, "0", record.gen)
    if state is DocState.SAVE_STOP:
        if released not in papers.facts:
            stopped = clouds.put(sky, v, alive=False, gen=record.gen)
            yield Said(f"{v.uid} saves and stops", stopped, _add(papers, released, *_kept(sky, v)))
        return
    if state is DocState.ROLL_CALL:
        here = fact(v, Kind.HERE, str(record.ver), record.gen)
        if here not in papers.facts:
            yield Said(f"{v.uid} answers the roll call", sky, _add(papers, here))
        yield from _stacks(sky, v, record, papers)
    if v.gen < record.gen:  # stops first, if it still trains: what can happen in between can happen before as well
        slot = record.nodes[v.node].cur
        writes = slot is not None and slot.disk and any(d.user == v.uid for d in sky.disks)
        began = clouds.put(sky, v, gen=record.gen, alive=True, writes=writes)
        yield Said(f"{v.uid} trains in generation {record.gen}", began, papers, why=begun(began, record, papers, v.job))
    elif v.alive:
        yield from _exits(sky, v, record, papers, faults, requests)
        yield from _stops_at_rung(sky, v, record, papers)


def _stacks(sky: Sky, v: V, record: Record, papers: Papers) -> Iterator[Said]:
    """Where its workers are, asked for by a roll call for a hang: they hang, or only take long."""
    if record.roll is None or record.roll.cause != HANG or not v.alive or v.gen != record.gen:
        return
    for word in (WorkerState.ELSEWHERE, WorkerState.BUSY):
        answer = fact(v, Kind.STACKS, str(StacksAnswer(record.ver, word)), record.gen)
        if not any(f.kind is Kind.STACKS and (f.uid, f.gen) == (v.uid, v.gen) for f in papers.facts):
            yield Said(f"{v.uid} says where its workers are: {word.value}", sky, _add(papers, answer))


def _kept(sky: Sky, v: V) -> list[Fact]:
    """What is on its disk now: said with the end of a generation."""
    commits = [d.commit for d in sky.disks if d.user == v.uid and d.commit > 0]
    return [fact(v, Kind.CHECKPOINT, f"{commits[0]}-0")] if commits and v.writes else []


def _exits(
    sky: Sky, v: V, record: Record, papers: Papers, faults: frozenset[str], requests: frozenset[str]
) -> Iterator[Said]:
    ended = clouds.put(sky, v, alive=False)
    if "crashes" in faults:
        broke = fact(v, Kind.EXIT, "1", record.gen)
        yield Said(f"the job's process on {v.uid} dies", ended, _add(papers, broke, *_kept(sky, v)), fault=1)
    hung = fact(v, Kind.HUNG, str(Hung(0, 0)), record.gen)
    if "stuck" in faults and hung not in papers.facts:  # it may still commit: then it was none, which changes nothing
        yield Said(f"the job hangs, says {v.uid}", sky, _add(papers, hung), fault=1)
    others = any(f.kind is Kind.EXIT and f.value == "0" and f.gen == record.gen for f in papers.facts)
    if others or "finish" in requests:
        done = fact(v, Kind.EXIT, "0", record.gen)
        yield Said(
            f"the job has finished on {v.uid}", ended, _add(papers, done, *_kept(sky, v)), request=0 if others else 1
        )


def _stops_at_rung(sky: Sky, v: V, record: Record, papers: Papers) -> Iterator[Said]:
    """A trial has done its rung's steps: it has saved, tells its metric, and its processes end."""
    trial = record.trial
    if trial is not None and trial.until is not None and papers.newest == record.gen == v.gen:
        told = fact(v, Kind.RUNG, str(Rung(trial.until, VALUE)), record.gen)
        released = fact(v, Kind.RELEASED, "0", record.gen)
        ended = clouds.put(sky, v, alive=False)
        yield Said(f"{v.uid} stops at the rung", ended, _add(papers, told, released, *_kept(sky, v)))


# -- training


def gang(sky: Sky, record: Record, job: int) -> list[V | N]:
    """The newest generation's machines, where all of them train; else none."""
    if not record.gen:
        return []
    out: list[V | N] = [v for v in sky.vms if v.alive and v.gen == record.gen and v.job == job]
    machine = sky.machine
    if (
        machine is not None
        and machine.alive
        and machine.gen == record.gen
        and machine.serves
        and machine.serves[0] == job
    ):
        out.append(machine)
    return out if len(out) == len(record.members) else []


def _is_member(record: Record, one: V | N) -> bool:
    members = [node.cur for node in record.nodes if node.cur is not None and node.cur.state is SlotState.MEMBER]
    return any(slot.uid == one.uid for slot in members)


def _held(sky: Sky, one: V | N, job: int) -> int | None:
    """The newest commit that this trainer can read from its disk; None without a disk."""
    if isinstance(one, N):
        return one.commits[job]
    if not one.writes:
        return None
    return next((d.commit for d in sky.disks if d.user == one.uid), None)


def begun(sky: Sky, record: Record, papers: Papers, job: int) -> str:
    """What a generation breaks by beginning: two of one node, or a start from an old commit."""
    alive = [(v.node, v.gen) for v in sky.vms if v.alive and v.job == job]
    machine = sky.machine
    if machine is not None and machine.alive and machine.serves and machine.serves[0] == job:
        alive.append((machine.serves[1], machine.gen))
    if len(set(alive)) != len(alive):
        return "S1: two machines train as one node of one generation"
    found = [held for one in gang(sky, record, job) if (held := _held(sky, one, job)) is not None]
    best = min(papers.newest, _best(sky, papers, job))
    if gang(sky, record, job) and max(found, default=0) != best:
        return f"S7: a generation starts from commit {max(found, default=0)}, the newest is {best}"
    return ""


def _best(sky: Sky, papers: Papers, job: int) -> int:
    """The newest commit that anything still has: disks may be wiped."""
    if not papers.copy:
        return papers.newest
    disks = [d.commit for d in sky.disks if d.job == job] + [p.commit for p in sky.snaps if p.job == job]
    return max([papers.copy, *disks, *([sky.machine.commits[job]] if sky.machine else [])])


def commit(sky: Sky, record: Record, papers: Papers, job: int) -> Said | None:
    """The whole gang commits once a generation, each on the disk it has."""
    found = gang(sky, record, job)
    if not all(_is_member(record, one) for one in found):
        return None  # what one that is given up still writes is an abandoned line of the job
    if papers.newest == record.gen or all(_held(sky, one, job) is None for one in found):
        return None
    uids = {one.uid for one in found if isinstance(one, V) and one.writes}
    disks = frozenset(d._replace(commit=record.gen) if d.user in uids else d for d in sky.disks)
    machine = sky.machine
    if machine is not None and machine in found:
        commits = (record.gen, machine.commits[1]) if job == 0 else (machine.commits[0], record.gen)
        machine = machine._replace(commits=commits)
    done = sky._replace(disks=disks, machine=machine)
    return Said(f"generation {record.gen} commits a checkpoint", done, papers._replace(newest=record.gen))


# -- the static machine


def grant_of(allocation: Allocation) -> Grant | None:
    return next((grant for grant in allocation.grants if grant.resource == f"machine:{NODE}"), None)


def node_steps(
    sky: Sky, records: tuple[Record | None, ...], papers: tuple[Papers, ...], allocation: Allocation, stack: StackState
) -> Iterator[tuple[int, Said]]:
    """What the static machine's agent may do next, and for which job."""
    machine = sky.machine
    if machine is None or not machine.up or machine.hung:
        return
    grant = grant_of(allocation)
    here = None if grant is None else (JOBS.index(grant.job), grant.node, grant.attempt)
    if machine.serves is not None and machine.serves != here:
        yield from _drop(sky, machine, machine.serves, papers)
        return
    if grant is None or here is None or (record := records[here[0]]) is None:
        return
    job = here[0]
    where = place(record, stack, Speaker(machine.uid, NODE, stack.zones()[0]), grant)
    what = role(record, where, f"b{machine.boot}")
    if what is Role.SUPERSEDED:
        yield from _drop(sky, machine, here, papers)
    elif what is not Role.UNKNOWN:
        for said in _serve(sky, machine, here, record, papers[job], what):
            yield job, said


def _node_fact(machine: N, node: int, attempt: int, kind: Kind, value: str = "0", gen: int = 0) -> Fact:
    return Fact(machine.uid, f"b{machine.boot}", node, attempt, gen, kind, value)


def _drop(sky: Sky, machine: N, what: tuple[int, int, int], papers: tuple[Papers, ...]) -> Iterator[tuple[int, Said]]:
    job, node, attempt = what
    word = _node_fact(machine, node, attempt, Kind.DROPPED)
    idle = sky._replace(machine=machine._replace(serves=None, alive=False, gen=0))
    if idle != sky or word not in papers[job].facts:
        yield job, Said(f"the static machine drops attempt {attempt} of job {job}", idle, _add(papers[job], word))


def _serve(
    sky: Sky, machine: N, here: tuple[int, int, int], record: Record, papers: Papers, what: Role
) -> Iterator[Said]:
    job, node, attempt = here
    said = {_node_fact(machine, node, attempt, Kind.HELLO)}
    if machine.commits[job]:
        said.add(_node_fact(machine, node, attempt, Kind.CHECKPOINT, f"{machine.commits[job]}-0"))
    if not said <= papers.facts or machine.serves != here:
        working = sky._replace(machine=machine._replace(serves=here))
        yield Said(f"the static machine says hello for attempt {attempt} of job {job}", working, _add(papers, *said))
        return
    if what is not Role.MEMBER:
        if machine.alive:
            yield Said("the static machine stops training", sky._replace(machine=machine._replace(alive=False)), papers)
        return
    state = doc_state(record)
    released = _node_fact(machine, node, attempt, Kind.RELEASED, "0", record.gen)
    if state is DocState.SAVE_STOP:
        if released not in papers.facts:
            stopped = sky._replace(machine=machine._replace(alive=False, gen=record.gen))
            yield Said("the static machine saves and stops", stopped, _add(papers, released))
        return
    here_fact = _node_fact(machine, node, attempt, Kind.HERE, str(record.ver), record.gen)
    if state is DocState.ROLL_CALL and here_fact not in papers.facts:
        yield Said("the static machine answers the roll call", sky, _add(papers, here_fact))
    if machine.gen < record.gen:
        began = sky._replace(machine=machine._replace(gen=record.gen, alive=True))
        why = begun(began, record, papers, job)
        yield Said(f"the static machine trains in generation {record.gen}", began, papers, why=why)
