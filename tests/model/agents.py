"""Agents and training: each machine asks the shipped ``document`` what it is, and obeys; or says what it must.

An agent's moves change its own machine and add facts about itself, nothing else (S9 holds by construction here;
that a report cannot speak for another rank is tested at the door, in ``tests/reconcile``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spotkeeper.reconcile.document import Speaker, place, role
from spotkeeper.reconcile.document import state as doc_state
from spotkeeper.spec.facts import Fact, Kind
from spotkeeper.spec.generation import DocState, Role
from spotkeeper.spec.hang import CAUSE as HANG
from spotkeeper.spec.hang import Answer, Hung, Word
from spotkeeper.spec.record import Alloc, Grant, Record, SlotState
from spotkeeper.spec.stack import StackState

from tests.model import sky as clouds
from tests.model.values import DEADLINE, JOBS, NODE, Life, N, Papers, Sky, V


class Said(NamedTuple):
    """A step of an agent: what is in the cloud and in the bucket afterwards."""

    say: str
    sky: Sky
    papers: Papers
    fault: int = 0
    wish: int = 0
    why: str = ""


def fact(v: V, kind: Kind, value: str = "0", gen: int = 0) -> Fact:
    return Fact(v.uid, f"b{v.boot}", v.rank, v.attempt, gen, kind, value)


def _add(papers: Papers, *facts: Fact) -> Papers:
    return papers._replace(facts=papers.facts | set(facts))


def steps(
    sky: Sky,
    v: V,
    record: Record,
    papers: Papers,
    stack: StackState,
    faults: frozenset[str],
    wishes: frozenset[str],
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
        yield from _fetches(sky, v, record, papers)
    if what is Role.MEMBER and copies:
        yield from _copies(v, sky, record, papers)
    if what is Role.MEMBER:
        yield from _member(sky, v, record, papers, faults, wishes)


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
        said = [attached, fact(v, Kind.HOLDS, f"{disk.commit}-0")] if found else [attached]
        yield Said(f"{v.uid} mounts its disk and says what is on it", sky, _add(papers, *said))


def _copies(v: V, sky: Sky, record: Record, papers: Papers) -> Iterator[Said]:
    """The lowest member has copied what its generation has committed."""
    if v.alive and v.writes and v.rank == min(record.members) and papers.copy < papers.newest == record.gen == v.gen:
        word = fact(v, Kind.MIRRORED, f"{record.gen}-0", record.gen)
        yield Said(f"{v.uid} has copied its checkpoint", sky, _add(papers, word)._replace(copy=record.gen))


def _fetches(sky: Sky, v: V, record: Record, papers: Papers) -> Iterator[Said]:
    """It brings a copy onto its disk as it is told to, before it trains."""
    fetch, disk = record.fetch, next((d for d in sky.disks if d.user == v.uid), None)
    if fetch is None or disk is None or v.rank not in fetch.ranks or v.alive:
        return
    told = fact(v, Kind.FETCHED, fetch.commit)
    if told not in papers.facts and fact(v, Kind.ATTACHED, str(disk.number)) in papers.facts:
        filled = sky._replace(disks=(sky.disks - {disk}) | {disk._replace(commit=int(fetch.commit.partition("-")[0]))})
        yield Said(f"{v.uid} fetches {fetch.commit}", filled, _add(papers, told, fact(v, Kind.HOLDS, fetch.commit)))


def _member(
    sky: Sky, v: V, record: Record, papers: Papers, faults: frozenset[str], wishes: frozenset[str]
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
        slot = record.ranks[v.rank].cur
        writes = slot is not None and slot.disk and any(d.user == v.uid for d in sky.disks)
        began = clouds.put(sky, v, gen=record.gen, alive=True, writes=writes)
        yield Said(f"{v.uid} trains in generation {record.gen}", began, papers, why=begun(began, record, papers, v.job))
    elif v.alive:
        yield from _exits(sky, v, record, papers, faults, wishes)


def _stacks(sky: Sky, v: V, record: Record, papers: Papers) -> Iterator[Said]:
    """Where its workers are, asked for by a roll call for a hang: they hang, or only take long."""
    if record.roll is None or record.roll.cause != HANG or not v.alive or v.gen != record.gen:
        return
    for word in (Word.ELSEWHERE, Word.BUSY):
        answer = fact(v, Kind.STACKS, str(Answer(record.ver, word)), record.gen)
        if not any(f.kind is Kind.STACKS and (f.uid, f.gen) == (v.uid, v.gen) for f in papers.facts):
            yield Said(f"{v.uid} says where its workers are: {word.value}", sky, _add(papers, answer))


def _kept(sky: Sky, v: V) -> list[Fact]:
    """What is on its disk now: said with the end of a generation."""
    commits = [d.commit for d in sky.disks if d.user == v.uid and d.commit > 0]
    return [fact(v, Kind.HOLDS, f"{commits[0]}-0")] if commits and v.writes else []


def _exits(
    sky: Sky, v: V, record: Record, papers: Papers, faults: frozenset[str], wishes: frozenset[str]
) -> Iterator[Said]:
    ended = clouds.put(sky, v, alive=False)
    if "crashes" in faults:
        broke = fact(v, Kind.EXIT, "1", record.gen)
        yield Said(f"the job's process on {v.uid} dies", ended, _add(papers, broke, *_kept(sky, v)), fault=1)
    hung = fact(v, Kind.HUNG, str(Hung(0, 0)), record.gen)
    if "stuck" in faults and hung not in papers.facts:  # it may still commit: then it was none, which changes nothing
        yield Said(f"the job hangs, says {v.uid}", sky, _add(papers, hung), fault=1)
    others = any(f.kind is Kind.EXIT and f.value == "0" and f.gen == record.gen for f in papers.facts)
    if others or "finish" in wishes:
        done = fact(v, Kind.EXIT, "0", record.gen)
        yield Said(
            f"the job has finished on {v.uid}", ended, _add(papers, done, *_kept(sky, v)), wish=0 if others else 1
        )


# -- training


def gang(sky: Sky, record: Record, job: int) -> list[V | N]:
    """The newest generation's machines, where all of them train; else none."""
    if not record.gen:
        return []
    out: list[V | N] = [v for v in sky.vms if v.alive and v.gen == record.gen and v.job == job]
    node = sky.node
    if node is not None and node.alive and node.gen == record.gen and node.serves and node.serves[0] == job:
        out.append(node)
    return out if len(out) == len(record.members) else []


def _is_member(record: Record, one: V | N) -> bool:
    members = [rank.cur for rank in record.ranks if rank.cur is not None and rank.cur.state is SlotState.MEMBER]
    return any(slot.uid == one.uid for slot in members)


def _held(sky: Sky, one: V | N, job: int) -> int | None:
    """The newest commit that this trainer can read from its disk; None without a disk."""
    if isinstance(one, N):
        return one.commits[job]
    if not one.writes:
        return None
    return next((d.commit for d in sky.disks if d.user == one.uid), None)


def begun(sky: Sky, record: Record, papers: Papers, job: int) -> str:
    """What a generation breaks by beginning: two of one rank, or a start from an old commit."""
    alive = [(v.rank, v.gen) for v in sky.vms if v.alive and v.job == job]
    node = sky.node
    if node is not None and node.alive and node.serves and node.serves[0] == job:
        alive.append((node.serves[1], node.gen))
    if len(set(alive)) != len(alive):
        return "S1: two machines train as one rank of one generation"
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
    return max([papers.copy, *disks, *([sky.node.commits[job]] if sky.node else [])])


def commit(sky: Sky, record: Record, papers: Papers, job: int) -> Said | None:
    """The whole gang commits once a generation, each on the disk it has."""
    found = gang(sky, record, job)
    if not all(_is_member(record, one) for one in found):
        return None  # what one that is given up still writes is an abandoned line of the job
    if papers.newest == record.gen or all(_held(sky, one, job) is None for one in found):
        return None
    uids = {one.uid for one in found if isinstance(one, V) and one.writes}
    disks = frozenset(d._replace(commit=record.gen) if d.user in uids else d for d in sky.disks)
    node = sky.node
    if node is not None and node in found:
        commits = (record.gen, node.commits[1]) if job == 0 else (node.commits[0], record.gen)
        node = node._replace(commits=commits)
    done = sky._replace(disks=disks, node=node)
    return Said(f"generation {record.gen} commits a checkpoint", done, papers._replace(newest=record.gen))


# -- the static node


def grant_of(alloc: Alloc) -> Grant | None:
    return next((grant for grant in alloc.grants if grant.resource == f"node:{NODE}"), None)


def node_steps(
    sky: Sky, records: tuple[Record | None, ...], papers: tuple[Papers, ...], alloc: Alloc, stack: StackState
) -> Iterator[tuple[int, Said]]:
    """What the static node's agent may do next, and for which job."""
    node = sky.node
    if node is None or not node.up or node.hung:
        return
    grant = grant_of(alloc)
    here = None if grant is None else (JOBS.index(grant.job), grant.rank, grant.attempt)
    if node.serves is not None and node.serves != here:
        yield from _drop(sky, node, node.serves, papers)
        return
    if grant is None or here is None or (record := records[here[0]]) is None:
        return
    job = here[0]
    where = place(record, stack, Speaker(node.uid, NODE, stack.zones()[0]), grant)
    what = role(record, where, f"b{node.boot}")
    if what is Role.SUPERSEDED:
        yield from _drop(sky, node, here, papers)
    elif what is not Role.UNKNOWN:
        for said in _serve(sky, node, here, record, papers[job], what):
            yield job, said


def _node_fact(node: N, rank: int, attempt: int, kind: Kind, value: str = "0", gen: int = 0) -> Fact:
    return Fact(node.uid, f"b{node.boot}", rank, attempt, gen, kind, value)


def _drop(sky: Sky, node: N, what: tuple[int, int, int], papers: tuple[Papers, ...]) -> Iterator[tuple[int, Said]]:
    job, rank, attempt = what
    word = _node_fact(node, rank, attempt, Kind.DROPPED)
    idle = sky._replace(node=node._replace(serves=None, alive=False, gen=0))
    if idle != sky or word not in papers[job].facts:
        yield job, Said(f"the static node drops attempt {attempt} of job {job}", idle, _add(papers[job], word))


def _serve(sky: Sky, node: N, here: tuple[int, int, int], record: Record, papers: Papers, what: Role) -> Iterator[Said]:
    job, rank, attempt = here
    said = {_node_fact(node, rank, attempt, Kind.HELLO)}
    if node.commits[job]:
        said.add(_node_fact(node, rank, attempt, Kind.HOLDS, f"{node.commits[job]}-0"))
    if not said <= papers.facts or node.serves != here:
        working = sky._replace(node=node._replace(serves=here))
        yield Said(f"the static node says hello for attempt {attempt} of job {job}", working, _add(papers, *said))
        return
    if what is not Role.MEMBER:
        if node.alive:
            yield Said("the static node stops training", sky._replace(node=node._replace(alive=False)), papers)
        return
    state = doc_state(record)
    released = _node_fact(node, rank, attempt, Kind.RELEASED, "0", record.gen)
    if state is DocState.SAVE_STOP:
        if released not in papers.facts:
            stopped = sky._replace(node=node._replace(alive=False, gen=record.gen))
            yield Said("the static node saves and stops", stopped, _add(papers, released))
        return
    here_fact = _node_fact(node, rank, attempt, Kind.HERE, str(record.ver), record.gen)
    if state is DocState.ROLL_CALL and here_fact not in papers.facts:
        yield Said("the static node answers the roll call", sky, _add(papers, here_fact))
    if node.gen < record.gen:
        began = sky._replace(node=node._replace(gen=record.gen, alive=True))
        why = begun(began, record, papers, job)
        yield Said(f"the static node trains in generation {record.gen}", began, papers, why=why)
