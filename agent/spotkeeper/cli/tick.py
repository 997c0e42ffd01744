"""``reconcile --once``: one tick from this shell, with the caller's own identity.

The same code as the function's, on the same bucket; where both run at once, every write
is conditional and one of them is merely wasteful.
"""

from __future__ import annotations

import os
import subprocess

from msgspec import Struct

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.target import Target
from spotkeeper.reconcile.gce import Gce, open_gce
from spotkeeper.reconcile.gce_api import DEFAULT_ENDPOINT, Api, MetadataToken, NoAnswerError
from spotkeeper.reconcile.repair import RepairError, rebuild_alloc
from spotkeeper.reconcile.sweep import tick as run_tick
from spotkeeper.spec.record import Alloc
from spotkeeper.spec.stack import StackState

TOKEN_S = 1800.0  # gcloud's tokens hold for an hour; asking again costs a second


class Ticked(Struct, frozen=True):
    """``failed``: jobs whose round the bucket interrupted; ``orphans``: jobs that had machines but no record."""

    jobs: int
    orphans: tuple[str, ...]
    failed: tuple[str, ...]


class GcloudToken(MetadataToken):
    """The user's access token, from gcloud: a shell has no metadata server."""

    def _fetch(self, deadline_s: float) -> None:
        try:
            done = subprocess.run(
                ["gcloud", "auth", "print-access-token"], capture_output=True, text=True, timeout=30, check=False
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
    store = target.store()
    state = target.state(store)
    try:
        done = run_tick(store, _cloud(target, state), target.clock)
    except NoAnswerError as error:
        raise CliError(f"the cloud did not answer: {error}", Exit.FAILED, "gcloud auth login") from None
    return Ticked(done.jobs, done.orphans, done.failed)


def repair_alloc(target: Target) -> Alloc:
    """Make the allocation anew.

    Raises:
        CliError: it cannot or need not be done; says why.
        StoreError: the bucket.
    """
    store = target.store()
    state = target.state(store)
    try:
        return rebuild_alloc(store, _cloud(target, state), target.clock.now())
    except RepairError as error:
        raise CliError(str(error), Exit.REFUSED) from None
    except NoAnswerError as error:
        raise CliError(f"the cloud did not answer: {error}", Exit.FAILED, "gcloud auth login") from None


def _cloud(target: Target, state: StackState) -> Gce:
    if state.cloud != "gcp":
        raise CliError(
            f"{state.stack} is a stack of {state.cloud}; only gcp can be reconciled from a shell", Exit.USAGE
        )
    endpoint = target.compute_endpoint or os.environ.get("SPOTKEEPER_COMPUTE_ENDPOINT")
    if endpoint or "GCE_METADATA_HOST" in os.environ:
        return open_gce(state, target.clock, endpoint)
    return Gce(state, Api(DEFAULT_ENDPOINT, GcloudToken(target.clock)), target.clock)
