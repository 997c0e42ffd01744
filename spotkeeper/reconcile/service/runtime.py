"""The objects that a process of the function keeps between requests: settings, bucket, cloud, keys, caches.

Nothing happens at import, and everything is opened on first use. No object has state that must not be lost, since a
process can end at any moment.
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
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from spotkeeper.clock import Clock
from spotkeeper.reconcile.store.objects import LISTING_S, Deadline

if TYPE_CHECKING:
    from spotkeeper.contract.cloud import Action, Cloud, Listing, Result
    from spotkeeper.contract.job import JobSpec
    from spotkeeper.contract.market import Chances, PriceRun
    from spotkeeper.contract.record import Record
    from spotkeeper.contract.stack import StackState
    from spotkeeper.reconcile.clouds.rate_limit import TokenBucket
    from spotkeeper.reconcile.controller.reconcile_job import RoundOptions
    from spotkeeper.reconcile.controller.tick import TickResult
    from spotkeeper.reconcile.notifications.deliver import Send
    from spotkeeper.reconcile.service.auth import Verifier
    from spotkeeper.reconcile.store.store import Store

STACK_TTL_S = 5.0  # real seconds for which answers use the stack as last read; rounds read it again
SPECS_KEPT = 64
COLLECT_EVERY_S = 60.0  # real

log = logging.getLogger("spotkeeper.reconcile")


class SettingsError(ValueError):
    """A setting is missing or wrong; the text names the variable."""


@dataclass(frozen=True)
class FunctionSettings:
    """The environment variables that the package's docstring lists, read once."""

    stack: str
    bucket: str
    clock: Clock = field(default_factory=Clock)
    audience: str = ""
    invokers: frozenset[str] = frozenset()
    submitters: frozenset[str] = frozenset()  # AWS: who may assume the submitters' role
    jwks: str = "https://www.googleapis.com/oauth2/v3/certs"
    issuer: str = "https://accounts.google.com"
    compute_endpoint: str | None = None
    bucket_endpoint: str | None = None
    behind_iam: bool = False  # Cloud Run has checked who calls; it sets K_SERVICE
    region: str = ""  # this function's, in a stack with several regions
    channels: str = field(default="", repr=False)  # the channels' addresses, some of which are secrets


def settings_from_env(environ: Mapping[str, str] | None = None) -> FunctionSettings:
    """Return the settings of this process.

    Raises:
        SettingsError: ``SPOTKEEPER_STACK`` or ``SPOTKEEPER_BUCKET`` is missing, or ``SPOTKEEPER_CLOCK`` is not valid.
    """
    env = os.environ if environ is None else environ
    for name in ("SPOTKEEPER_STACK", "SPOTKEEPER_BUCKET"):
        if not env.get(name):
            raise SettingsError(f"{name} is not set; spotkeeper/reconcile/service/__init__.py lists the settings")
    try:
        clock = Clock.from_env()
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return FunctionSettings(
        stack=env["SPOTKEEPER_STACK"],
        bucket=env["SPOTKEEPER_BUCKET"],
        clock=clock,
        audience=env.get("SPOTKEEPER_AUDIENCE", ""),
        invokers=_names(env.get("SPOTKEEPER_INVOKERS", "")),
        submitters=_names(env.get("SPOTKEEPER_SUBMITTERS", "")),
        jwks=env.get("SPOTKEEPER_JWKS") or FunctionSettings.jwks,
        issuer=env.get("SPOTKEEPER_ISSUER") or FunctionSettings.issuer,
        compute_endpoint=env.get("SPOTKEEPER_COMPUTE_ENDPOINT") or None,
        bucket_endpoint=env.get("SPOTKEEPER_BUCKET_ENDPOINT") or None,
        behind_iam=bool(env.get("K_SERVICE")),
        region=env.get("SPOTKEEPER_REGION") or (env.get("AWS_REGION", "") if "AWS_LAMBDA_FUNCTION_NAME" in env else ""),
        channels=env.get("SPOTKEEPER_CHANNELS", ""),
    )


def _names(listed: str) -> frozenset[str]:
    return frozenset(name.strip() for name in listed.split(",") if name.strip())


def spare_the_collector() -> None:
    """Make garbage collection rare: rounds make 100,000 objects but no cycles, so a collection finds almost nothing.

    With 10,000 nodes collections took a third of a round. Libraries do make cycles, some with open file descriptors,
    so ``Runtime.collect`` collects garbage between requests.
    """
    gc.set_threshold(100_000, 50, 100)
    gc.freeze()  # modules and settings are never garbage


class Runtime:
    """The bucket, cloud, verifier and caches of a process, opened on first use. Thread-safe."""

    def __init__(
        self,
        settings: FunctionSettings,
        store: Store | None = None,
        cloud: Cloud | None = None,
        open_cloud: Callable[[StackState, Clock, str | None], Cloud] | None = None,
    ) -> None:
        """Open nothing yet.

        Args:
            cloud: used instead of the stack's cloud, without rate limits.
            open_cloud: (stack, clock, endpoint) -> the stack's cloud, to use another identity than the machine's.
        """
        self.settings = settings
        self.monotonic: Callable[[], float] = time.monotonic  # clock of deadlines, in real seconds
        self._lock = threading.RLock()
        self._store = store
        self._fixed_cloud = cloud
        self._open_cloud = open_cloud
        self._pace: tuple[TokenBucket, TokenBucket] | None = None  # rate limits of changes and of launches
        self._cloud: tuple[StackState, Cloud] | None = None
        self._verifier: Verifier | None = None
        self._options: RoundOptions | None = None
        self._send: Send | None = None
        self._stack: tuple[float, StackState] | None = None
        self._specs: OrderedDict[tuple[str, str], JobSpec] = OrderedDict()
        self._collected = time.monotonic()

    def collect(self) -> None:
        """Collect garbage at the end of a request, at most once a minute: see :func:`spare_the_collector`."""
        with self._lock:
            if time.monotonic() - self._collected < COLLECT_EVERY_S:
                return
            self._collected = time.monotonic()
        gc.collect()

    @property
    def clock(self) -> Clock:
        return self.settings.clock

    @property
    def store(self) -> Store:
        with self._lock:
            if self._store is None:
                from spotkeeper.reconcile.store.store import open_store

                self._store = open_store(self.settings.bucket, self.settings.bucket_endpoint, brief=True)
            return self._store

    @property
    def verifier(self) -> Verifier:
        with self._lock:
            if self._verifier is None:
                from spotkeeper.reconcile.service.auth import KeySet, Verifier

                settings = self.settings
                self._verifier = Verifier(
                    KeySet(settings.jwks), settings.clock, settings.audience, settings.issuer, settings.behind_iam
                )
            return self._verifier

    @property
    def send(self) -> Send:
        """Return the function that sends a notification to a channel.

        Addresses of this machine are allowed only if the cloud's API is on this machine too.
        """
        with self._lock:
            if self._send is None:
                from spotkeeper.reconcile.clouds.http_client import is_loopback
                from spotkeeper.reconcile.notifications.addresses import (
                    ChannelAddresses,
                    SecretReader,
                    parse_addresses,
                )
                from spotkeeper.reconcile.notifications.deliver import sender
                from spotkeeper.reconcile.notifications.https import HttpsSender

                here = is_loopback(urlsplit(self.settings.compute_endpoint or "").hostname or "")
                given = parse_addresses(self.settings.channels)
                addresses = ChannelAddresses(given, SecretReader(self.clock))
                self._send = sender(HttpsSender(here).post, addresses)
            return self._send

    def options(self) -> RoundOptions:
        """Return the options of rounds: one object per process, because its ledger writer remembers what it wrote."""
        with self._lock:
            if self._options is None:
                from spotkeeper.reconcile.controller.lease import in_thread
                from spotkeeper.reconcile.controller.reconcile_job import RoundOptions

                self._options = RoundOptions(every=in_thread, region=self.settings.region)
            return self._options

    def take_announced(self) -> bool:
        """Return whether this process has stored notifications since the last call."""
        with self._lock:
            announced = self._options is not None and self._options.writer.announced
            if self._options is not None:
                self._options.writer.announced = False
            return announced

    def cloud(self, stack: StackState) -> Cloud:
        """Return the stack's cloud, opened again after Pulumi has changed the stack."""
        if self._fixed_cloud is not None:
            return self._fixed_cloud
        with self._lock:
            if self._cloud is None or self._cloud[0] != stack:
                from spotkeeper.reconcile.clouds.rate_limit import Paced

                self._pace = self._pace or _pace(stack)  # kept for the process, even if the stack changes
                changes, launches = self._pace
                found = (self._open_cloud or _opener(stack))(stack, self.clock, self.settings.compute_endpoint)
                self._cloud = stack, Paced(found, changes, launches=launches)
            return self._cloud[1]

    def tick(self, deadline: Deadline) -> TickResult:
        """Run a tick over all jobs of the stack within the deadline.

        Raises:
            StoreError: the bucket did not answer, or the stack's document is unreadable.
        """
        from spotkeeper.reconcile.controller.tick import TickResult, tick

        store = self.store.until(deadline)
        stack = self.stack(store)
        if stack is None:
            return TickResult()
        cloud = Deadlined(self.cloud(stack), self.clock, deadline)
        return tick(store, cloud, self.clock, replace(self.options(), deadline=deadline))

    def stack(self, store: Store | None = None) -> StackState | None:
        """Return the stack as read in the last seconds (``STACK_TTL_S``), or as last read if it is unreadable now.

        Thus agents get answers until the stack's document is repaired. Rounds read the document themselves, and decide
        nothing while it is unreadable.

        Raises:
            AwayError: the stack's home is in another region.
        """
        from spotkeeper.reconcile.controller.home import check_home
        from spotkeeper.reconcile.store.documents import CorruptError

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
        if stack is not None:
            check_home(stack, self.settings.region)
        with self._lock:
            self._stack = None if stack is None else (self.monotonic(), stack)
        return stack

    def spec(self, record: Record, store: Store | None = None) -> JobSpec | None:
        """Return a job's spec, cached by its hash."""
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
    """Return the function that opens the stack's cloud; the other cloud's adapter is not imported."""
    if stack.cloud == "aws":
        from spotkeeper.reconcile.clouds.ec2.cloud import open_ec2

        return open_ec2
    from spotkeeper.reconcile.clouds.gce.cloud import open_gce

    return open_gce


def _pace(stack: StackState) -> tuple[TokenBucket, TokenBucket]:
    from spotkeeper.reconcile.clouds import rate_limit

    if stack.cloud == "aws":
        launches = rate_limit.TokenBucket(rate_limit.EC2_LAUNCHES_PER_S, rate_limit.EC2_LAUNCHES)
        return rate_limit.TokenBucket(rate_limit.EC2_PER_S, rate_limit.EC2_BURST), launches
    one = rate_limit.TokenBucket()
    return one, one


class Deadlined:
    """A cloud limited to the deadline of one request; later calls are postponed to the next round.

    If no time is left for a listing, none is made: the empty result says that no zone answered, so it proves no loss.
    """

    def __init__(self, cloud: Cloud, clock: Clock, deadline: Deadline) -> None:
        self._cloud, self._clock, self._left = cloud, clock, deadline.left

    def list(self, stack: str) -> Listing:
        from spotkeeper.contract.cloud import Listing

        if self._left() < LISTING_S:
            log.warning("no time left to list the cloud: nothing is decided about losses")
            return Listing((), ())
        return self._cloud.list(stack)

    def price_history(self, pool: str, deadline_s: float) -> tuple[PriceRun, ...] | None:
        left = self._left()
        return self._cloud.price_history(pool, min(deadline_s, left)) if left > 0 else None

    def chances(self, pool: str, deadline_s: float) -> Chances | None:
        from spotkeeper.contract.cloud import chances_of

        left = self._left()
        return chances_of(self._cloud, pool, min(deadline_s, left)) if left > 0 else None

    def perform(self, action: Action, deadline_s: float) -> Result:
        from spotkeeper.contract.cloud import Result, ResultKind

        left = self._left()
        if left <= 0:
            return Result(action, ResultKind.THROTTLED, "postponed: this request's time is up", self._clock.now())
        return self._cloud.perform(action, min(deadline_s, left))
