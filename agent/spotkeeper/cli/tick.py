"""``reconcile --once``: one tick from this shell, with the caller's own identity.

The function's own tick, on the same bucket: paced, ended in time, under leases that are renewed. Where both run at
once, every write is conditional and one of them is merely wasteful.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator

from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.target import Target
from spotkeeper.clock import Clock
from spotkeeper.reconcile.deadline import REQUEST_S, Deadline
from spotkeeper.reconcile.gce import Gce, open_gce
from spotkeeper.reconcile.gce_api import DEFAULT_ENDPOINT, Api, MetadataToken, NoAnswerError
from spotkeeper.reconcile.repair import RepairError, rebuild_alloc
from spotkeeper.reconcile.runtime import Runtime, Settings
from spotkeeper.spec.record import Alloc
from spotkeeper.spec.stack import StackState

TOKEN_S = 1800.0  # gcloud's tokens hold for an hour; asking again costs a second
LOGIN_S = 30.0  # for gcloud


class Ticked(Struct, frozen=True):
    """``failed``: jobs whose round was interrupted; ``orphans``: jobs that had machines but no record.

    ``late``: jobs that this tick had no time for.
    """

    jobs: int
    orphans: tuple[str, ...]
    failed: tuple[str, ...]
    late: tuple[str, ...] = ()


class GcloudToken(MetadataToken):
    """The user's access token, from gcloud: a shell has no metadata server."""

    def _fetch(self, deadline_s: float) -> None:
        try:
            done = subprocess.run(
                ["gcloud", "auth", "print-access-token"], capture_output=True, text=True, timeout=LOGIN_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoAnswerError(f"gcloud: {error}") from None
        if done.returncode != 0:
            raise NoAnswerError(f"gcloud auth print-access-token: {done.stderr.strip()[:200]}")
        self._value, self._until = done.stdout.strip(), self._clock.now() + TOKEN_S


def tick(target: Target) -> Ticked:
    """Reconcile every unfinished job of the stack once.

    Raises:
        CliError: the stack is not of a cloud this can reach, or nobody is logged in.
        StoreError: the bucket.
    """
    runtime = _runtime(target)
    with _told_once():
        done = runtime.tick(Deadline(REQUEST_S, runtime.monotonic))
    return Ticked(done.jobs, done.orphans, done.failed, done.late)


class _Once(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard error, where a line that was told is not told again."""

    def __init__(self) -> None:
        super().__init__()
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self._told:
            self._told.add(line)
            super().emit(record)


@contextlib.contextmanager
def _told_once() -> Iterator[None]:
    """Each round tells of what it meets; one document that all of them meet is one thing to mend."""
    log, handler = logging.getLogger("spotkeeper"), _Once()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def repair_alloc(target: Target) -> Alloc:
    """Make the allocation anew.

    Raises:
        CliError: it cannot or need not be done; says why.
        StoreError: the bucket.
    """
    runtime = _runtime(target)
    state = target.state(runtime.store)
    try:
        return rebuild_alloc(runtime.store, runtime.cloud(state), target.clock.now())
    except RepairError as error:
        raise CliError(str(error), Exit.REFUSED) from None


def _runtime(target: Target) -> Runtime:
    """What the function holds, in this shell; the cloud is reached as the target says, and can be."""
    state = target.state(target.store())
    endpoint = target.compute_endpoint or os.environ.get("SPOTKEEPER_COMPUTE_ENDPOINT") or None
    settings = Settings(state.stack, target.bucket, target.clock, compute_endpoint=endpoint)
    if state.cloud == "aws":
        _check_aws_login()
        return Runtime(settings)
    if endpoint or "GCE_METADATA_HOST" in os.environ:
        return Runtime(settings, open_cloud=open_gce)
    token = GcloudToken(target.clock)
    try:
        token(LOGIN_S)  # without it every look would come back empty, and the tick would seem to have been made
    except NoAnswerError as error:
        raise CliError(f"the cloud cannot be asked: {error}", Exit.FAILED, "gcloud auth login") from None

    def as_user(stack: StackState, clock: Clock, _: str | None = None) -> Gce:
        return Gce(stack, Api(DEFAULT_ENDPOINT, token), clock)

    return Runtime(settings, open_cloud=as_user)


def _check_aws_login() -> None:
    """Whether there are keys to sign with; without them every look would come back empty.

    Raises:
        CliError: there are none, or nothing to sign with: in Lambda boto3 is there, on a laptop it is asked for.
    """
    try:
        from botocore.session import get_session
    except ImportError:
        raise CliError("EC2 is asked through boto3, which is not installed", Exit.USAGE, "pip install boto3") from None
    if get_session().get_credentials() is None:
        raise CliError("the cloud cannot be asked: no AWS credentials are found", Exit.FAILED, "aws sso login")
