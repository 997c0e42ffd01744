"""``reconcile --once``: runs one tick from this shell, with the user's identity. ``repair``: rebuilds the allocation.

The tick is the function's own, with the same pace, time limit and leases. It can run at the same time as a tick of the
function, since every write is conditional and a job's lease allows one round at a time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Iterator
from functools import partial

from msgspec import Struct

from spotkeeper.cli.output import emit
from spotkeeper.client import find_target
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.lookup import machines
from spotkeeper.client.target import Target
from spotkeeper.clock import Clock
from spotkeeper.contract.allocation import Allocation
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.clouds.gce.api import DEFAULT_ENDPOINT, Api, MetadataToken, NoAnswerError
from spotkeeper.reconcile.clouds.gce.cloud import Gce, open_gce
from spotkeeper.reconcile.controller.repair import RepairError, rebuild_allocation
from spotkeeper.reconcile.service.runtime import FunctionSettings, Runtime
from spotkeeper.reconcile.store.objects import REQUEST_S, Deadline

TOKEN_S = 1800.0  # gcloud's tokens are valid for an hour; a new one costs a second
LOGIN_S = 30.0  # time limit for gcloud


class ShellTick(Struct, frozen=True):
    """The result of a tick.

    ``failed``: jobs whose round failed. ``orphans``: jobs that have machines but no record. ``late``: jobs for which no
    time was left.
    """

    jobs: int
    orphans: tuple[str, ...]
    failed: tuple[str, ...]
    late: tuple[str, ...] = ()


class GcloudToken(MetadataToken):
    """The user's access token from gcloud, since a user's machine has no metadata server that issues tokens."""

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


def run(stack: str | None, *, once: bool, as_json: bool) -> None:
    """Run one tick and print its result.

    Raises:
        CliError: ``once`` is False, or rounds failed; or as :func:`tick`.
    """
    if not once:
        raise CliError("reconcile needs --once", Exit.USAGE, "spotkeeper reconcile --once")
    done = tick(find_target(stack))
    late = f"; there was no time for {len(done.late)} of them, so run this again" if done.late else ""
    emit(done, as_json, f"{done.jobs} unfinished job{'' if done.jobs == 1 else 's'} reconciled{late}")
    if done.failed:
        remedy = "fix what the ALARM above names, if any, then run this again"
        raise CliError(f"rounds failed: {', '.join(done.failed)}", Exit.FAILED, remedy)


def repair(what: str, stack: str | None, *, as_json: bool) -> None:
    """Rebuild a document of the stack; ``allocation`` is the only one that can be rebuilt.

    Raises:
        CliError: ``what`` is not ``allocation``; or as :func:`repair_allocation`.
    """
    if what != "allocation":
        raise CliError(f"cannot repair {what}, only `allocation`", Exit.USAGE, "spotkeeper repair allocation")
    made = repair_allocation(find_target(stack))
    emit(made, as_json, f"rebuilt stack/allocation: {machines(len(made.grants))} granted")


def tick(target: Target) -> ShellTick:
    """Reconcile every unfinished job of the stack once.

    Raises:
        CliError: the cloud cannot be reached, or this shell has no login.
        StoreError: the bucket failed.
    """
    runtime = _runtime(target)
    with _each_line_once():
        done = runtime.tick(Deadline(REQUEST_S, runtime.monotonic))
    return ShellTick(done.jobs, done.orphans, done.failed, done.late)


class _Once(logging.StreamHandler):  # type: ignore[type-arg]
    """Logs to standard error without repeated lines."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        if line not in self._seen:
            self._seen.add(line)
            super().emit(record)


@contextlib.contextmanager
def _each_line_once() -> Iterator[None]:
    """Log each line only once, since every round reports the same unreadable document."""
    log, handler = logging.getLogger("spotkeeper"), _Once()
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def repair_allocation(target: Target) -> Allocation:
    """Rebuild the allocation from the jobs' documents and the cloud's machines.

    Raises:
        CliError: the allocation cannot or need not be rebuilt; the message says why.
        StoreError: the bucket failed.
    """
    runtime = _runtime(target)
    state = target.state(runtime.store)
    try:
        return rebuild_allocation(runtime.store, runtime.cloud(state), target.clock.now())
    except RepairError as error:
        raise CliError(str(error), Exit.REFUSED) from None


def _runtime(target: Target) -> Runtime:
    """Make the function's runtime in this shell; CliError if the target's cloud cannot be called."""
    state = target.state(target.store())
    endpoint = target.compute_endpoint or os.environ.get("SPOTKEEPER_COMPUTE_ENDPOINT") or None
    settings = FunctionSettings(state.stack, target.bucket, target.clock, compute_endpoint=endpoint)
    if state.cloud == "aws":
        _check_aws_login()
        return Runtime(settings)
    if endpoint or "GCE_METADATA_HOST" in os.environ:
        bearer = target.compute_token or os.environ.get("SPOTKEEPER_COMPUTE_TOKEN", "")
        return Runtime(settings, open_cloud=partial(open_gce, token=bearer))
    token = GcloudToken(target.clock)
    try:
        token(LOGIN_S)  # without a token every listing would be empty, and the tick would seem to succeed
    except NoAnswerError as error:
        raise CliError(f"cannot call the cloud: {error}", Exit.FAILED, "gcloud auth login") from None

    def as_user(stack: StackState, clock: Clock, _: str | None = None) -> Gce:
        return Gce(stack, Api(DEFAULT_ENDPOINT, token), clock)

    return Runtime(settings, open_cloud=as_user)


def _check_aws_login() -> None:
    """Raise CliError if requests to AWS cannot be signed, since every listing would then be empty."""
    try:
        from botocore.session import get_session
    except ImportError:  # Lambda has botocore, a laptop may not
        raise CliError("calling EC2 needs boto3, which is not installed", Exit.USAGE, "pip install boto3") from None
    if get_session().get_credentials() is None:
        raise CliError("cannot call the cloud: found no AWS credentials", Exit.FAILED, "aws sso login")
