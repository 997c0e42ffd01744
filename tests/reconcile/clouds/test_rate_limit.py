"""Mutations are paced below the cloud's quota, and what there is no time for is put off, not refused."""

from __future__ import annotations

from spotkeeper.contract.cloud import Action, DeleteDisk, InsertVm, Listing, Result, ResultKind
from spotkeeper.contract.stack import Model
from spotkeeper.reconcile.clouds.rate_limit import BURST, PER_S, Paced, TokenBucket

GOOGLE_A_MINUTE = 1500


class Counted:
    """A cloud that notes when it was called."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[float, float]] = []  # moment, deadline

    def list(self, stack: str) -> Listing:
        return Listing((), ())

    def price_history(self, pool: str, deadline_s: float) -> None:
        return None

    def perform(self, action: Action, deadline_s: float) -> Result:
        self.calls.append((self.now, deadline_s))
        return Result(action, ResultKind.ACCEPTED)

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def disk(number: int) -> DeleteDisk:
    return DeleteDisk(f"d{number}", "z")


def test_a_thousand_calls_stay_below_the_quota_of_every_minute() -> None:
    cloud = Counted()
    paced = Paced(cloud, TokenBucket(now=lambda: cloud.now), cloud.sleep)
    for number in range(4000):
        assert paced.perform(disk(number), 20.0).kind is ResultKind.ACCEPTED
    moments = [at for at, _ in cloud.calls]
    fullest = max(sum(start <= at < start + 60.0 for at in moments) for start in moments[::50])
    assert fullest <= GOOGLE_A_MINUTE
    assert fullest <= BURST + 60 * PER_S + 1
    assert moments[int(BURST) - 1] == 0.0, "a gang of the usual size does not wait at all"


def test_a_call_without_time_is_deferred() -> None:
    cloud = Counted()
    paced = Paced(
        cloud, TokenBucket(per_s=1.0, burst=2.0, now=lambda: cloud.now), lambda _: None
    )  # many threads at once
    results = [paced.perform(disk(number), 6.0) for number in range(10)]
    assert [result.kind for result in results] == [ResultKind.ACCEPTED] * 5 + [ResultKind.THROTTLED] * 5
    assert [deadline for _, deadline in cloud.calls] == [6.0, 6.0, 5.0, 4.0, 3.0], "what waiting took is not had twice"
    cloud.now += 100.0
    assert paced.perform(disk(99), 6.0).kind is ResultKind.ACCEPTED


def test_tokens_are_saved_up_to_the_burst_only() -> None:
    clock = [0.0]
    bucket = TokenBucket(per_s=1.0, burst=3.0, now=lambda: clock[0])
    clock[0] = 1e6
    assert [bucket.take(0.5) for _ in range(4)] == [0.0, 0.0, 0.0, None]


def launch(node: int) -> InsertVm:
    return InsertVm("j", "u", node, 1, "gpu", "z", Model.SPOT)


def test_launches_may_have_a_limit_of_their_own() -> None:
    """Neither kind of call uses up the other's."""
    cloud = Counted()

    def bucket() -> TokenBucket:
        return TokenBucket(per_s=1.0, burst=2.0, now=lambda: cloud.now)

    accepted, put_off = ResultKind.ACCEPTED, ResultKind.THROTTLED
    separate = Paced(cloud, bucket(), launches=bucket())
    actions: list[Action] = [launch(0), launch(1), launch(2), disk(0), disk(1), disk(2), launch(3)]
    assert [separate.perform(action, 1.0).kind for action in actions] == [
        *(accepted, accepted, put_off),
        *(accepted, accepted, put_off, put_off),
    ]
    shared = Paced(cloud, bucket())
    assert [shared.perform(action, 1.0).kind for action in actions[2:5]] == [accepted, accepted, put_off]


def test_a_postponed_call_is_named_in_the_result() -> None:
    cloud = Counted()
    paced = Paced(cloud, TokenBucket(per_s=1.0, burst=0.0, now=lambda: cloud.now))
    why = "postponed: the cloud's quota of calls is used up for now"
    assert paced.perform(disk(0), 1.0) == Result(disk(0), ResultKind.THROTTLED, why)
    assert cloud.calls == []
