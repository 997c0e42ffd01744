"""What one process of the function holds between requests: settings, bucket, cloud, keys, small caches.

Nothing happens at import, and nothing is opened before it is needed. No state that matters lives here: a
process may end at any moment.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from spotkeeper.clock import Clock
from spotkeeper.reconcile.deadline import LOOK_S, Deadline

if TYPE_CHECKING:
    from spotkeeper.reconcile.auth import Verifier
    from spotkeeper.reconcile.pace import Bucket
    from spotkeeper.reconcile.round import Options
    from spotkeeper.reconcile.store_api import Store
    from spotkeeper.reconcile.sweep import TickResult
    from spotkeeper.spec.cloud import Action, Cloud, Listing, Result
    from spotkeeper.spec.job import JobSpec
    from spotkeeper.spec.market import Chances, PriceRun
    from spotkeeper.spec.record import Record
    from spotkeeper.spec.stack import StackState

T = TypeVar("T")
STACK_TTL_S = 5.0  # real seconds for which an answer may be made from the stack as last read; rounds read it afresh
SPECS_KEPT = 64

log = logging.getLogger("spotkeeper.reconcile")


class SettingsError(ValueError):
    """A setting is missing or wrong; the text names the variable."""


@dataclass(frozen=True)
class Settings:
    """The environment of ``docs/design.md``, read once."""

    stack: str
    bucket: str
    clock: Clock = field(default_factory=Clock)
    audience: str = ""
    invokers: frozenset[str] = frozenset()
    jwks: str = "https://www.googleapis.com/oauth2/v3/certs"
    issuer: str = "https://accounts.google.com"
    compute_endpoint: str | None = None
    bucket_endpoint: str | None = None
    behind_iam: bool = False  # Cloud Run has checked who calls; it sets K_SERVICE


def settings_from_env(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of this process.

    Raises:
        SettingsError: ``SPOTKEEPER_STACK`` or ``SPOTKEEPER_BUCKET`` is missing, or the clock makes no sense.
    """
    env = os.environ if environ is None else environ
    for name in ("SPOTKEEPER_STACK", "SPOTKEEPER_BUCKET"):
        if not env.get(name):
            raise SettingsError(f"{name} is not set (docs/design.md, Settings)")
    try:
        clock = Clock.from_env()
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return Settings(
        stack=env["SPOTKEEPER_STACK"],
        bucket=env["SPOTKEEPER_BUCKET"],
        clock=clock,
        audience=env.get("SPOTKEEPER_AUDIENCE", ""),
        invokers=frozenset(mail.strip() for mail in env.get("SPOTKEEPER_INVOKERS", "").split(",") if mail.strip()),
        jwks=env.get("SPOTKEEPER_JWKS") or Settings.jwks,
        issuer=env.get("SPOTKEEPER_ISSUER") or Settings.issuer,
        compute_endpoint=env.get("SPOTKEEPER_COMPUTE_ENDPOINT") or None,
        bucket_endpoint=env.get("SPOTKEEPER_BUCKET_ENDPOINT") or None,
        behind_iam=bool(env.get("K_SERVICE")),
    )


def spare_the_collector() -> None:
    """For a process that only serves rounds: they make 100,000 objects and no cycles.

    Measured with 10,000 ranks, the search for cycles took a third of a round.
    """
    gc.set_threshold(100_000, 50, 100)


class Runtime:
    """Opens things on first use. Thread-safe."""

    def __init__(
        self,
        settings: Settings,
        store: Store | None = None,
        cloud: Cloud | None = None,
        open_cloud: Callable[[StackState, Clock, str | None], Cloud] | None = None,
    ) -> None:
        """
        Args:
            cloud: in the place of the stack's, and not paced.
            open_cloud: how the stack's is reached (stack, clock, endpoint), where not by the machine's own identity.
        """
        self.settings = settings
        self.monotonic: Callable[[], float] = time.monotonic  # of deadlines, in real seconds
        self._lock = threading.RLock()
        self._store = store
        self._fixed_cloud = cloud
        self._open_cloud = open_cloud
        self._pace: tuple[Bucket, Bucket] | None = None  # of changes, and of launches
        self._cloud: tuple[StackState, Cloud] | None = None
        self._verifier: Verifier | None = None
        self._options: Options | None = None
        self._stack: tuple[float, StackState] | None = None
        self._specs: OrderedDict[tuple[str, str], JobSpec] = OrderedDict()

    @property
    def clock(self) -> Clock:
        return self.settings.clock

    @property
    def store(self) -> Store:
        with self._lock:
            if self._store is None:
                from spotkeeper.reconcile.store import open_store

                self._store = open_store(self.settings.bucket, self.settings.bucket_endpoint, brief=True)
            return self._store

    @property
    def verifier(self) -> Verifier:
        with self._lock:
            if self._verifier is None:
                from spotkeeper.reconcile.auth import KeySet, Verifier

                settings = self.settings
                self._verifier = Verifier(
                    KeySet(settings.jwks), settings.clock, settings.audience, settings.issuer, settings.behind_iam
                )
            return self._verifier

    def options(self) -> Options:
        """Of rounds; one for the process, because its ledger writer remembers what it wrote."""
        with self._lock:
            if self._options is None:
                from spotkeeper.reconcile.lease import in_thread
                from spotkeeper.reconcile.round import Options

                self._options = Options(every=in_thread)
            return self._options

    def cloud(self, stack: StackState) -> Cloud:
        """The stack's cloud; made anew when Pulumi has changed the stack."""
        if self._fixed_cloud is not None:
            return self._fixed_cloud
        with self._lock:
            if self._cloud is None or self._cloud[0] != stack:
                from spotkeeper.reconcile.pace import Paced

                self._pace = self._pace or _pace(stack)  # one for the process, whatever becomes of the stack
                changes, launches = self._pace
                found = (self._open_cloud or _opener(stack))(stack, self.clock, self.settings.compute_endpoint)
                self._cloud = stack, Paced(found, changes, launches=launches)
            return self._cloud[1]

    def tick(self, deadline: Deadline) -> TickResult:
        """All jobs of the stack, once, in that time; there is no other way to a tick.

        Raises:
            SettingsError, StoreError: the stack is not there, or the bucket did not answer.
        """
        from spotkeeper.reconcile.sweep import TickResult, tick

        store = self.store.until(deadline)
        stack = self.stack(store)
        if stack is None:
            return TickResult()
        cloud = Deadlined(self.cloud(stack), self.clock, deadline)
        return tick(store, cloud, self.clock, replace(self.options(), deadline=deadline))

    def stack(self, store: Store | None = None) -> StackState | None:
        """The stack, at most ``STACK_TTL_S`` old; where it makes no sense, as this process last read it.

        So agents are answered while somebody mends it; rounds read it afresh, and decide nothing.
        """
        from spotkeeper.reconcile.store_api import CorruptError

        with self._lock:
            last = self._stack
            if last is not None and self.monotonic() - last[0] < STACK_TTL_S:
                return last[1]
        try:
            stack = (store or self.store).read_stack()
        except CorruptError:
            if last is None:
                raise
            stack = last[1]
        with self._lock:
            self._stack = None if stack is None else (self.monotonic(), stack)
        return stack

    def spec(self, record: Record, store: Store | None = None) -> JobSpec | None:
        """A job's spec; it never changes under its hash."""
        key = (record.job, record.spec_sha256)
        with self._lock:
            if key in self._specs:
                return self._specs[key]
        spec = (store or self.store).read_spec(record.job, record.spec_key())
        if spec is not None:
            with self._lock:
                self._specs[key] = spec
                while len(self._specs) > SPECS_KEPT:
                    self._specs.popitem(last=False)
        return spec


def _opener(stack: StackState) -> Callable[[StackState, Clock, str | None], Cloud]:
    """The adapter of the stack's cloud; the other one is not even imported."""
    if stack.cloud == "aws":
        from spotkeeper.reconcile.ec2 import open_ec2

        return open_ec2
    from spotkeeper.reconcile.gce import open_gce

    return open_gce


def _pace(stack: StackState) -> tuple[Bucket, Bucket]:
    from spotkeeper.reconcile import pace

    if stack.cloud == "aws":
        launches = pace.Bucket(pace.EC2_LAUNCHES_PER_S, pace.EC2_LAUNCHES)
        return pace.Bucket(pace.EC2_PER_S, pace.EC2_BURST), launches
    one = pace.Bucket()
    return one, one


class Deadlined:
    """A cloud for one request: when its time is up, calls are not made but put off to the next round.

    A look that has no time to come to an end is not begun: one of nothing proves nothing.
    """

    def __init__(self, cloud: Cloud, clock: Clock, deadline: Deadline) -> None:
        self._cloud, self._clock, self._left = cloud, clock, deadline.left

    def list(self, stack: str) -> Listing:
        from spotkeeper.spec.cloud import Listing

        if self._left() < LOOK_S:
            log.warning("no time is left for a look at the cloud: nothing is decided about losses")
            return Listing((), ())
        return self._cloud.list(stack)

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        left = self._left()
        return self._cloud.price_history(pool, min(deadline_s, left)) if left > 0 else None

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        from spotkeeper.spec.cloud import chances_of

        left = self._left()
        return chances_of(self._cloud, pool, min(deadline_s, left)) if left > 0 else None

    def perform(self, action: Action, deadline_s: float) -> Result:
        from spotkeeper.spec.cloud import Class, Result

        left = self._left()
        if left <= 0:
            return Result(action, Class.THROTTLED, "put off: this request's time is up", self._clock.now())
        return self._cloud.perform(action, min(deadline_s, left))


class Flights:
    """One round of a job at a time in this process; who comes meanwhile goes, and is covered.

    The bucket's lease does the same between processes, at the price of a read and two writes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._again: dict[str, bool] = {}

    def run(
        self, key: str, work: Callable[[], T], covered: Callable[[T], bool], tired: Callable[[], bool] = lambda: False
    ) -> T | None:
        """Do the work, or None where it is being done.

        Whoever was sent away while it ran may have brought news after the work last looked: then it is
        done once more, unless ``covered`` says that nothing is new. Once ``tired``, whoever does it leaves it
        to the next to come, and need not have covered those who came before: that is for the caller to see to.
        """
        with self._lock:
            if key in self._again:
                self._again[key] = True
                return None
            self._again[key] = False
        try:
            done = work()
            while self._called_again(key):
                if tired():
                    with self._lock:
                        del self._again[key]
                    return done
                if not covered(done):
                    done = work()
            return done
        except BaseException:  # otherwise the last look has given the turn back, and by now it may be another's
            with self._lock:
                del self._again[key]
            raise

    def _called_again(self, key: str) -> bool:
        """Whether somebody was sent away since the last look; if not, the next to come does the work himself."""
        with self._lock:
            again = self._again[key]
            if again:
                self._again[key] = False
            else:
                del self._again[key]
            return again
