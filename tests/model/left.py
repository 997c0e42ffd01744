"""What is left of a round: what it can still change. Rounds of which the same is left are the same.

A round whose record is old writes it no more; a call whose machine is gone changes nothing. Most rounds that
stall are over long before they notice.
"""

from __future__ import annotations

from spotkeeper.contract.cloud import Result, ResultKind
from spotkeeper.reconcile.controller.steps import Todo
from tests.model import sky as clouds
from tests.model.ground import Ground, Ref, Round, Step
from tests.model.story import Story
from tests.model.values import Sky


class Left(Ground):
    """Forgets what a round can do no more."""

    def __init__(self, story: Story) -> None:
        super().__init__(story)
        self._left: dict[tuple[int, int], int] = {}
        self._doom: dict[Ref, bool] = {}
        self.forgets = may_forget(story)
        self._checked = 0  # the grants that every doom has been asked for

    def relearn(self) -> None:
        """After a failed ``recheck``, or for another story: what is left of rounds is asked anew."""
        self._left.clear()
        self._listened.clear()

    def _born(self, step: Step) -> Step:
        return step._replace(round=self.left(step.round, step.world))

    def left(self, number: int, world: int) -> int:
        """What is left of a round in a world: calls that can change nothing any more are as good as made."""
        if not number:
            return 0
        key = (number, world)
        found = self._left.get(key)
        if found is None:
            found = self._left[key] = self._is_left(number, world)
        return found

    def _is_left(self, number: int, world: int) -> int:
        at = self.rounds[number]
        assert at is not None
        records, papers, allocation, sky = self.worlds[world]
        if at.kind == "write":
            return 0 if self.story.cas and at.data[0] != records[at.job] else number
        if at.kind == "tidy":
            return number if at.data[0] & self.papers[papers[at.job]].facts else 0
        if at.kind == "grant":
            stale = self.story.cas and at.data[3] == "" and self._of(at) != records[at.job]
            return self._grant_left(at, number, allocation) if stale else number
        if at.kind == "call":
            return self._calls_left(at, number, records[at.job], self.skies[sky], world)
        return number

    def _calls_left(self, at: Round, number: int, record: int, sky: Sky, world: int) -> int:
        made, todo, results, keep, tidy = at.data
        if made not in (-1, record) and not isinstance(keep, Ref) and self.story.cas:
            # It writes the record no more: what is left after an answer is what else it would do.
            then = tuple((kind, 0 if self._writes(after) else after) for kind, after in keep)
            some = any(after for _, after in then)
            at = at._replace(data=(-1, todo, results if some else (), then if some else None, tidy))
            number, made, keep = self.rounds(at), -1, at.data[3]
        rest, got = [], list(results)
        for action in todo:
            kind = clouds.spent(sky, action, self.forgets)
            if kind is None or (kind is ResultKind.DEAD_KEY and keep is not None and made == record):
                rest.append(action)
            elif kind is not ResultKind.ACCEPTED:
                got.append(Result(action, kind))
        if len(rest) == len(todo):
            return number
        return self.left(self._after_call(at, tuple(rest), tuple(got)), world)

    def _writes(self, number: int) -> bool:
        found = self.rounds[number]
        return found is not None and found.kind == "write"

    # -- rounds whose record is old

    def _of(self, at: Round) -> int:
        ref: Ref | None = at.data[2]
        return -1 if ref is None else ref.record

    def _grant_left(self, at: Round, number: int, allocation: int) -> int:
        """A round that can write its record no more, and would not do anything but that after its grants."""
        before, after, ref, why = at.data
        if ref is None:
            return number if allocation == before else 0
        if not self._doomed(ref):
            return number
        if allocation != before:
            return 0
        won = self.rounds[self.future(ref._replace(allocation=after, first=True))]
        if won is not None and won.kind != "write":
            return number
        return self.rounds(Round("grant", at.job, (before, after, None, why)))

    def _doomed(self, ref: Ref) -> bool:
        """Whether, after a lost race, all that is left is a write that is lost as well, whatever was granted.

        Asked for all grants that were seen so far; ``recheck`` asks again when there are others.
        """
        key = ref._replace(allocation=0, first=False)
        found = self._doom.get(key)
        if found is None:
            found = self._doom[key] = all(
                self._dies(key, allocation) for allocation in range(len(self.allocations.values))
            )
        return found

    def _dies(self, key: Ref, allocation: int) -> bool:
        ref = key._replace(allocation=allocation)
        ref = ref._replace(papers=self.listened(ref.record, ref.papers))
        known = self._future.get(ref)
        if known is not None:
            return not known or self._writes(known)
        at = self.make(ref)  # the first pass is enough: what it would do after a write that is lost is no matter
        return at.todo is Todo.WRITE or (at.todo is Todo.REST and not at.decision.stale)

    def recheck(self) -> bool:
        """Whether what was taken to be over still is, now that there are grants nobody had thought of."""
        new = range(self._checked, len(self.allocations.values))
        wrong = [ref for ref, dead in self._doom.items() if dead and not all(self._dies(ref, a) for a in new)]
        self._checked = len(self.allocations.values)
        self._doom.update(dict.fromkeys(wrong, False))
        return not wrong


def may_forget(story: Story) -> bool:
    """Whether the cloud may forget an idempotency key."""
    return story.cloud == "gce" and "forgotten" in {*story.kinds, *story.pair}
