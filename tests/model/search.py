"""Breadth first through every state of a story: the shortest way to what breaks, or none.

Every step is checked (S1 to S10), and from every world that is reached all must end well (L1, L2, L6). A state
is one 64-bit number; whole layers are taken a step further at once, from tables of what each world and each
round can do, which the shipped code is asked for once. The way to a violation is found by going back through
the layers.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tests.model.ground import Step, Unpacked, may_be_blind
from tests.model.machine import Machine
from tests.model.settle import Settler
from tests.model.story import Story
from tests.model.values import Interner

Tell = Callable[[int, int], None]  # states so far, states in the newest layer
States = npt.NDArray[np.int64]
W_BITS, R_BITS = 20, 19
CHUNK = 400_000
MEMORY_MB = 2900  # of one search; two run at once


class Found(NamedTuple):
    """``why`` is '' where everything held; ``whole``: nothing within the story's bounds was left unexplored."""

    story: Story
    why: str
    way: tuple[str, ...]
    states: int
    worlds: int
    whole: bool
    seconds: float
    stopped: str = ""  # what ended a search that is not whole


class Fields(NamedTuple):
    """The parts of many states, as columns."""

    world: States
    first: States
    second: States
    faults: States
    requests: States
    deaths: States

    def pack(self) -> States:
        low, high = np.minimum(self.first, self.second), np.maximum(self.first, self.second)
        packed = (self.world << R_BITS) | low
        packed = (packed << R_BITS) | high
        return (packed << 5) | (self.faults << 3) | (self.requests << 2) | self.deaths

    def take(self, rows: States) -> Fields:
        return Fields(*(column[rows] for column in self))


def unpack(states: States) -> Fields:
    mask = (1 << R_BITS) - 1
    rounds = states >> 5
    return Fields(
        rounds >> (2 * R_BITS),
        (rounds >> R_BITS) & mask,
        rounds & mask,
        (states >> 3) & 3,
        (states >> 2) & 1,
        states & 3,
    )


class Table:
    """Rows of steps by key, as columns that grow: what a world, or a round in a world, can do."""

    def __init__(self, make: Callable[[int], list[Step]]) -> None:
        self.make = make
        self.where: dict[int, tuple[int, int]] = {}
        self.steps: list[Step] = []
        self.bad: list[int] = []
        self._columns: tuple[States, States, States, States] | None = None

    def rows(self, keys: States) -> tuple[States, States]:
        """(index into keys, step number) of every step of every key."""
        unique, inverse = np.unique(keys, return_inverse=True)
        begin, count = np.empty(len(unique), np.int64), np.empty(len(unique), np.int64)
        for i, key in enumerate(unique.tolist()):
            found = self.where.get(key)
            if found is None:
                found = self._add(key)
            begin[i], count[i] = found
        counts = count[inverse]
        source = np.repeat(np.arange(len(keys)), counts)
        offset = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        return source, begin[inverse][source] + offset

    def _add(self, key: int) -> tuple[int, int]:
        steps = self.make(key)
        at = len(self.steps)
        self.bad += [at + i for i, step in enumerate(steps) if step.why]
        self.steps += steps
        found = self.where[key] = (at, len(steps))
        return found

    def columns(self) -> tuple[States, States, States, States]:
        """World, round, fault and request of every step."""
        done = 0 if self._columns is None else len(self._columns[0])
        if self._columns is None or done < len(self.steps):
            new = np.array([(s.world, s.round, s.fault, s.request) for s in self.steps[done:]], np.int64).reshape(-1, 4)
            fresh = (new[:, 0].copy(), new[:, 1].copy(), new[:, 2].copy(), new[:, 3].copy())
            self._columns = (
                fresh
                if self._columns is None
                else tuple(np.concatenate(pair) for pair in zip(self._columns, fresh, strict=True))  # type: ignore[assignment]
            )
        assert self._columns is not None
        return self._columns


class Seen:
    """A set of packed states: sorted runs, merged as they grow."""

    def __init__(self) -> None:
        self.runs: list[States] = []

    def __len__(self) -> int:
        return sum(len(run) for run in self.runs)

    def new(self, states: States) -> States:
        """Those (sorted, unique) that were not there."""
        for run in self.runs:
            if len(states):
                at = np.searchsorted(run, states)
                at[at == len(run)] = 0
                states = states[run[at] != states]
        return states

    def add(self, states: States) -> None:
        self.runs.append(states)
        while len(self.runs) > 1 and len(self.runs[-2]) < 3 * len(self.runs[-1]):
            last, before = self.runs.pop(), self.runs.pop()
            merged = np.concatenate((before, last))
            merged.sort(kind="stable")
            self.runs.append(merged)


class Search:
    """One search. ``run`` goes on until the end, a violation, or a limit."""

    def __init__(self, story: Story, before: Search | None = None) -> None:
        """``before``: a search whose story differs in its faults and requests only; what it has learnt is used."""
        self.story = story
        self.blinds = may_be_blind(story)
        self.machine = Machine(story) if before is None else before.machine.turned(story)
        self.settler = (
            Settler(self.machine) if before is None or before.blinds != self.machine.blinds else before.settler
        )
        self.env = Table(lambda key: self.machine.env(key >> 3, (key >> 1) & 3, key & 1))
        self.moves = Table(self._moves_of)
        self.stale: dict[int, list[int]] = {}
        self.used: Interner[int] = Interner()  # rounds that states have; the machine has thought of many more
        self.used(0)
        self.layers: list[States] = []
        self.settled = np.zeros(1 << W_BITS, np.bool_)

    def _moves_of(self, key: int) -> list[Step]:
        mine = self.used[(key >> 2) & ((1 << R_BITS) - 1)]
        steps = self.machine.acts(mine, key >> (R_BITS + 2), key & 3)
        return [step._replace(round=self.used(step.round)) for step in steps]

    def run(self, limit_s: float = 1e9, states: int = 0, tell: Tell | None = None) -> Found:
        begin = time.process_time()
        bound = states or self.story.states or 1 << 62
        world, rounds, faults, requests, deaths = self.machine.start()
        first = Fields(*(np.array([n], np.int64) for n in (world, 0, 0, faults, requests, deaths))).pack()
        assert len(rounds) <= 2
        seen = Seen()
        seen.add(first)
        self.layers = [first]
        stopped = ""
        while len(self.layers[-1]) and not stopped:
            layer = self.layers[-1]
            if not self.machine.recheck():
                self._forget()
                seen, self.layers = Seen(), [first]
                seen.add(first)
                continue
            if (bad := self._settle(layer)) is not None:
                return self._found(bad[1], self._way(len(self.layers) - 1, bad[0]), seen, begin)
            coming: list[States] = []
            for part in _chunks(layer):
                after, source, step = self._expand(part)
                if (broken := self._broken(part, source, step)) is not None:
                    state, say, why = broken
                    return self._found(why, (*self._way(len(self.layers) - 1, state), say), seen, begin)
                coming.append(seen.new(np.unique(after)))
                waiting = sum(map(len, coming))
                stopped = self._limit(len(seen) + waiting, bound, time.process_time() - begin, limit_s)
                if stopped:
                    break
            fresh = np.unique(np.concatenate(coming)) if coming else np.empty(0, np.int64)
            seen.add(fresh)
            self.layers.append(fresh)
            if tell is not None:
                tell(len(seen), len(fresh))
        return self._found("", (), seen, begin, stopped)

    def roomy(self) -> bool:
        """Whether another search may go on with these numbers."""
        machine = self.machine
        return len(machine.worlds.values) < 0.3 * (1 << W_BITS) and _memory_mb() < MEMORY_MB / 2

    def _limit(self, states: int, bound: int, taken: float, limit_s: float) -> str:
        if states > bound:
            return f"{bound:,} states"
        if taken > limit_s:
            return f"{limit_s:.0f} s"
        if len(self.machine.worlds.values) > 0.9 * (1 << W_BITS) or len(self.used.values) > 0.9 * (1 << R_BITS):
            return "as many worlds or rounds as a packed state can name"
        return f"{MEMORY_MB} MB of memory" if _memory_mb() > MEMORY_MB else ""

    def _found(self, why: str, way: tuple[str, ...], seen: Seen, begin: float, stopped: str = "") -> Found:
        worlds = len(self.machine.worlds.values)
        whole = not why and not stopped
        return Found(self.story, why, way, len(seen), worlds, whole, time.process_time() - begin, stopped)

    def _forget(self) -> None:
        """Some rounds were taken to be over that are not: begin anew, knowing better."""
        self.stale.clear()
        self.machine.relearn()
        self.env = Table(self.env.make)
        self.moves = Table(self.moves.make)

    # -- one layer

    def _settle(self, layer: States) -> tuple[int, str] | None:
        """From every world that is new in this layer all must end well."""
        worlds = layer >> (2 * R_BITS + 5)
        for world in np.unique(worlds[~self.settled[worlds]]).tolist():
            self.settled[world] = True
            if why := self.settler.why_not(world):
                return int(layer[worlds == world][0]), why
        return None

    def _expand(self, states: States) -> tuple[States, States, States]:
        """(next states, which state each came from, which step made it: env >= 0, a round's < 0, a death 1 << 40)."""
        at = unpack(states)
        parts = [self._environment(at), *self._rounds(at), *self._deaths(at)]
        after, source, step = (np.concatenate([part[i] for part in parts]) for i in range(3))
        return after, source, step

    def _environment(self, at: Fields) -> tuple[States, States, States]:
        key = (at.world << 3) | (self._may(at.faults) << 1) | at.requests
        source, step = self.env.rows(key)
        world, _, fault, request = (column[step] for column in self.env.columns())
        old = at.take(source)
        new = old._replace(world=world, faults=old.faults - fault, requests=old.requests - request)
        rows, new = self._others(old.world, new, both=True)
        return new.pack(), source[rows], step[rows]

    def _may(self, faults: States) -> States:
        """What decides which steps there are: which of a pair may still happen; else whether one may."""
        return faults if self.story.pair else np.minimum(faults, 1)

    def _rounds(self, at: Fields) -> Iterator[tuple[States, States, States]]:
        alike = at.first == at.second
        for which in (0, 1):
            if which and self.story.rounds == 1:
                return
            rows = np.nonzero(~alike)[0] if which == 0 and self.story.rounds > 1 else np.arange(len(at.world))
            mine = at.take(rows)
            moving, other = (mine.first, mine.second) if which == 0 else (mine.second, mine.first)
            if self.story.rounds == 1:
                moving, other = mine.second, mine.first
            key = (((mine.world << R_BITS) | moving) << 2) | self._may(mine.faults)
            source, step = self.moves.rows(key)
            world, after, fault, _ = (column[step] for column in self.moves.columns())
            old = mine.take(source)
            new = old._replace(world=world, first=after, second=other[source], faults=old.faults - fault)
            kept, new = self._others(old.world, new, both=False)
            yield new.pack(), rows[source[kept]], -1 - step[kept]

    def _deaths(self, at: Fields) -> Iterator[tuple[States, States, States]]:
        every = [self.machine.rounds[number] for number in self.used.values]
        dies = np.array([each is not None and each.kind not in ("read", "tick") for each in every], np.bool_)
        for mine, other in ((at.first, at.second), (at.second, at.first)):
            rows = np.nonzero((at.deaths > 0) & dies[mine])[0]
            old = at.take(rows)
            new = old._replace(first=np.zeros_like(old.first), second=other[rows], deaths=old.deaths - 1)
            yield new.pack(), rows, np.full(len(rows), 1 << 40, np.int64)

    def _others(self, before: States, new: Fields, both: bool) -> tuple[States, Fields]:
        """What may have become of the rounds that did not move, where the world has changed; see ``Machine``."""
        rows = np.arange(len(before))
        if both and self.story.rounds > 1:
            rows, new, before = self._stale(before, new, "first", rows)
        rows, new, _ = (
            self._stale(before, new, "second", rows) if both or self.story.rounds > 1 else (rows, new, before)
        )
        return rows, new

    def _stale(self, before: States, new: Fields, which: str, rows: States) -> tuple[States, Fields, States]:
        mine: States = getattr(new, which)
        unchanged = before == new.world
        key = ((((before << W_BITS) | new.world) << R_BITS) | mine)[~unchanged]
        if not len(key):
            return rows, new, before
        unique, inverse = np.unique(key, return_inverse=True)
        options = [self._options(each) for each in unique.tolist()]
        count = np.array([len(each) for each in options], np.int64)
        begin = np.cumsum(count) - count
        flat = np.array([number for each in options for number in each], np.int64)
        counts = np.ones(len(before), np.int64)
        counts[~unchanged] = count[inverse]
        source = np.repeat(np.arange(len(before)), counts)
        offset = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
        start = np.full(len(before), -1, np.int64)
        start[~unchanged] = begin[inverse]
        became = np.where(start[source] >= 0, flat[np.maximum(start[source], 0) + offset], mine[source])
        out = new.take(source)._replace(**{which: became})
        return rows[source], out, before[source]

    def _options(self, key: int) -> list[int]:
        found = self.stale.get(key)
        if found is None:
            number, worlds = key & ((1 << R_BITS) - 1), key >> R_BITS
            became = self.machine.stale(self.used[number], worlds >> W_BITS, worlds & ((1 << W_BITS) - 1))
            found = self.stale[key] = [self.used(each) for each in became]
        return found

    # -- what breaks, and the way there

    def _broken(self, part: States, source: States, steps: States) -> tuple[int, str, str] | None:
        """A step of these states that breaks a property, if there is one."""
        for table, mine in ((self.env, steps), (self.moves, -1 - steps)):
            for number in table.bad:
                hit = np.nonzero(mine == number)[0]
                if len(hit):
                    found = table.steps[number]
                    return int(part[source[hit[0]]]), found.say, found.why
        return None

    def _say(self, step: int) -> str:
        if step == 1 << 40:
            return "a round dies"
        return self.env.steps[step].say if step >= 0 else self.moves.steps[-1 - step].say

    def _way(self, depth: int, state: int) -> tuple[str, ...]:
        out: list[str] = []
        for layer in reversed(self.layers[:depth]):
            for part in _chunks(layer):
                after, source, step = self._expand(part)
                hit = np.nonzero(after == state)[0]
                if len(hit):
                    state = int(part[source[hit[0]]])
                    out.append(self._say(int(step[hit[0]])))
                    break
        return tuple(reversed(out))


def _memory_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 2**20


def _chunks(layer: States) -> Iterator[States]:
    for at in range(0, len(layer), CHUNK):
        yield layer[at : at + CHUNK]


def search(story: Story, limit_s: float = 1e9, states: int = 0, tell: Tell | None = None) -> Found:
    """Explore until the end, a violation, ``limit_s`` seconds of a processor, or ``states`` states."""
    return Search(story).run(limit_s, states, tell)


__all__ = ["Found", "Search", "Unpacked", "search"]
