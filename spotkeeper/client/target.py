"""How client programs reach a stack: its bucket, clock and function, or the folder of a one-machine cloud."""

from __future__ import annotations

import getpass
import hashlib
import os
import shlex
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from spotkeeper.client.errors import CliError, Exit
from spotkeeper.clock import Clock

if TYPE_CHECKING:
    from spotkeeper.contract.stack import StackState
    from spotkeeper.local.lifecycle.cloud import LocalCloud
    from spotkeeper.reconcile.store.store import Store
    from spotkeeper.report.job.view import Site

LOCAL = Path(".spotkeeper") / "local"  # default folder of a one-machine cloud (--folder)
SCALE = 20.0  # default speed of a one-machine cloud's clock (--scale)
STACK = "local"  # stack name of a one-machine cloud
STACK_FILE = Path(__file__).resolve().parents[2] / "infra" / "stacks" / "Pulumi.local.yaml"
CLOUD_FILE = "cloud.json"
FOLDER = "SPOTKEEPER_FOLDER"


@dataclass(frozen=True)
class Target:
    """A stack: its bucket and clock; ``local`` is the folder of the one-machine cloud, None for a real cloud."""

    stack: str
    bucket: str
    clock: Clock
    local: Path | None = None
    function_url: str = ""
    compute_endpoint: str = ""  # root of the Compute API, if it is not the cloud's own
    compute_token: str = field(default="", repr=False)  # bearer token for that endpoint

    def site(self) -> Site:
        from spotkeeper.report.job.view import Site

        return Site(self.clock.scale, self.local is not None)

    def up(self) -> str:
        """Return the command that creates or updates the stack."""
        return "pulumi up" if self.local is None else f"spotkeeper local up {folder_option(self.local)}"

    def store(self) -> Store:
        """Return the bucket. Raises CliError if the bucket's address is not valid."""
        from spotkeeper.reconcile.store.store import open_store

        try:
            return open_store(self.bucket)
        except ValueError as error:
            raise CliError(str(error), Exit.USAGE) from None

    def state(self, store: Store) -> StackState:
        """Return the stack, read from ``stack/pools.json``.

        Raises:
            CliError: the bucket contains no stack, or another stack.
        """
        state = store.read_stack()
        if state is None:
            why = f"{self.bucket} contains no stack (no stack/pools.json)"
            raise CliError(why, Exit.MISSING, f"bring it up: {self.up()}")
        if self.stack and state.stack != self.stack:
            why = f"{self.bucket} belongs to the stack {state.stack}, not to {self.stack}"
            raise CliError(why, Exit.MISSING, export_bucket(self.stack))
        return state


def export_bucket(stack: str) -> str:
    """Return the shell command that sets ``SPOTKEEPER_BUCKET``: ``gs://`` and Pulumi's output ``bucket``."""
    return f"export SPOTKEEPER_BUCKET=gs://$(pulumi stack output bucket --stack {shlex.quote(stack)})  # s3:// on AWS"


# -- the one-machine cloud


def folder_option(folder: Path) -> str:
    return f"--folder {shlex.quote(str(folder))}"


def named_folder() -> Path | None:
    """Return the one-machine cloud's folder that ``SPOTKEEPER_FOLDER`` names, if set."""
    named = os.environ.get(FOLDER, "")
    return Path(named) if named else None


def local_folder(start: Path) -> Path | None:
    """Return the folder of the one-machine cloud in ``start`` or above, if one was ever started there."""
    for folder in (start, *start.parents):
        if (folder / LOCAL / CLOUD_FILE).is_file():
            return folder / LOCAL
    return None


def named(folder: Path) -> Path:
    """Return the folder of the one-machine cloud that a command is for: ``folder``, unless that is the default.

    For the default, the first of these counts: the folder that ``SPOTKEEPER_FOLDER`` names; an existing cloud's folder
    in the working folder or above it; the default itself.
    """
    return named_folder() or local_folder(Path.cwd()) or folder if folder == LOCAL else folder


def attach(folder: Path) -> LocalCloud:
    """Return the one-machine cloud in a folder. Raises CliError if the folder has none."""
    from spotkeeper.local.lifecycle.cloud import LocalCloud
    from spotkeeper.local.lifecycle.folder import LocalCloudError

    try:
        return LocalCloud.attach(named(folder))
    except LocalCloudError as error:
        raise CliError(str(error), Exit.MISSING) from None


def local_target(folder: Path) -> Target:
    cloud = attach(folder)
    compute = {"compute_endpoint": cloud.compute_endpoint, "compute_token": cloud.token}
    return Target(STACK, cloud.bucket, cloud.clock, cloud.folder, **compute)


def local_token(target: Target, url: str) -> str:
    """Return an identity token for the function at ``url``, from the one-machine cloud.

    It names this machine's user if a team of the stack file lists that name, else the schedule's account.
    """
    from infra.naming import account

    state, user = target.state(target.store()), whoami()
    if not any(user in (*team.members, *(team.high or ())) for team in state.teams):
        user = f"{account(state.stack, 'ck')}@{state.project}.iam.gserviceaccount.com"
    assert target.local is not None
    return attach(target.local).identity_token(user, url)


def whoami() -> str:
    """Return the user's name; "" if this machine has none (some containers)."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


# -- the function. It is notified of a submission or request so that the job need not wait for the next tick. A failed
# notification raises nothing and soon returns False, because the next tick finds the same news.

TIMEOUTS_S = (5.0, 2.0)  # to connect, and to answer; a round may take longer and continues without the caller
BODY, JSON = b"{}", {"Content-Type": "application/json"}
TOKEN = "SPOTKEEPER_TOKEN"  # noqa: S105 - the name of a variable


def notify(target: Target, store: Store, job: str) -> bool:
    """Request a round of one job; return False if the function was not reached, refused the caller, or hangs."""
    state = None if target.function_url else store.read_stack()
    url, headers = call_of_function(target, state, f"/v1/notify/{job}")
    if not headers:
        return False
    import requests

    try:
        answer = requests.post(url, headers=headers, data=BODY, timeout=TIMEOUTS_S)
    except requests.ReadTimeout:  # the round is under way, or the function hangs
        return not silence(store, state, target)
    except requests.RequestException:
        return False
    return answer.ok


def call_of_function(target: Target, state: StackState | None, path: str) -> tuple[str, dict[str, str]]:
    """Return the URL and the headers of a POST of ``BODY`` to a path of the function.

    The headers are {} if such a call is not possible: the function's address is unknown (the URL is then only the
    path), or this machine has no login that the function accepts.
    """
    root = target.function_url or (state.function_url if state else "")
    url = f"{root.rstrip('/')}{path}"
    if not root:
        return url, {}
    sign = state is not None and state.cloud == "aws" and not os.environ.get(TOKEN)
    return url, _signed(url, state.region) if state is not None and sign else _bearer(target, root)


def silence(store: Store, stack: StackState | None, target: Target) -> str:
    """Return as text how long no tick has succeeded, and why; "" if ticks succeed or the bucket has no report."""
    from spotkeeper.contract.stack import tick_silence
    from spotkeeper.reconcile.controller.alarm import read_note
    from spotkeeper.reconcile.store.objects import StoreError

    try:
        note = read_note(store)
    except StoreError:  # the caller may have the right to read jobs only
        return ""
    log = (
        f"{target.local}/serial/function-*.log"
        if target.local is not None
        else 'its log (docs/troubleshooting.md, "Alarms")'
    )
    return tick_silence(note, target.clock.now(), stack.tick_minutes if stack is not None else 1, log)


def _bearer(target: Target, root: str) -> dict[str, str]:
    """Return headers with an identity token, which the function checks; {} if none is available."""
    token = identity_token(target, root) if root else ""
    bearer = f"Bearer {token}"
    return {"Authorization": bearer, "X-Serverless-Authorization": bearer, **JSON} if token else {}


def _signed(url: str, region: str) -> dict[str, str]:
    """Return headers with a signature, which IAM checks before the function runs; {} without AWS credentials."""
    try:
        from botocore.exceptions import BotoCoreError, ClientError
        from botocore.session import get_session
    except ImportError:
        return {}
    from spotkeeper_agent.cloud.sigv4 import Credentials, Scope, sign

    try:
        found = get_session().get_credentials()
        now = found.get_frozen_credentials() if found is not None else None
    except (BotoCoreError, ClientError):
        return {}
    if now is None:
        return {}
    keys = Credentials(now.access_key, now.secret_key, now.token or "")
    return sign(keys, Scope(region, "lambda"), "POST", url, JSON, hashlib.sha256(BODY).hexdigest(), time.time())


def identity_token(target: Target, url: str) -> str:
    """Return a token for the function, from ``SPOTKEEPER_TOKEN``, the local cloud or gcloud; "" without one."""
    given = os.environ.get(TOKEN, "")
    if given:
        return given
    if target.local is not None:
        return local_token(target, url)
    try:
        done = subprocess.run(
            ["gcloud", "auth", "print-identity-token"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
