"""Jobs from git: each job file that a stack lists under ``jobs:`` is a Pulumi resource whose creation submits the job.

``pulumi up`` calls the code of ``spotkeeper submit``. The resource remembers only what was submitted; the running job
is not in Pulumi's state. So an unchanged file is submitted once, even if its job has ended since. A changed file is
submitted again if its job has ended, and refused while the job runs. Removing a file from the list cancels its job only
if ``cancel_removed_jobs`` was already set in the `up` before.

The provider must be importable from a module: Pulumi stores a reference to the module and no copy of its code.
"""

from __future__ import annotations

import getpass
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pulumi
from pulumi.dynamic import CheckFailure, CheckResult, CreateResult, DiffResult, Resource, ResourceProvider, UpdateResult

from infra.settings.model import Settings
from infra.settings.read import JobFile, read_jobs
from spotkeeper.client import find_target
from spotkeeper.client import lookup as ledger
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.lookup import starts_of
from spotkeeper.client.pack import pack_source
from spotkeeper.client.submit import check_name, submit_file, with_source
from spotkeeper.client.target import Target, notify
from spotkeeper.clock import Clock
from spotkeeper.contract.job import JobSpec, RequestKind, spec_sha256
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.reconcile.store.objects import StoreError
from spotkeeper.reconcile.store.store import open_store

ROOT = Path(__file__).resolve().parent.parent
_SCHEMES = {"gcp": "gs", "aws": "s3"}


class JobError(Exception):
    """A job could not be submitted; the message gives the reason and the remedy."""


class Jobs(pulumi.ComponentResource):
    """The component with a resource for each job file, named after the job. A stack without jobs does not have it."""

    def __init__(self, files: Sequence[JobFile], settings: Settings, opts: pulumi.ResourceOptions) -> None:
        super().__init__("spotkeeper:all:Jobs", "jobs", None, opts)
        for file in files:
            properties = {
                "stack": settings.stack,
                "bucket": f"{_SCHEMES[settings.cloud]}://{settings.bucket_name()}",
                "profile": pulumi.Config("aws").get("profile") or "",
                "here": settings.endpoints.compute.startswith("http://"),  # a cloud on this machine
                "file": file.name,
                "job": file.spec.name,
                "content": content(file.path, file.spec),
                "on_remove": "cancel" if settings.cancel_removed_jobs else "keep",
            }
            Job(file.spec.name, properties, pulumi.ResourceOptions(parent=self))
        self.register_outputs({})


def declare(settings: Settings, ready: pulumi.Resource) -> None:
    """Declare the stack's jobs; ``ready``: the resource that must exist before a job can be submitted.

    Raises:
        SpecError: all problems of the files.
        CliError: a source folder cannot be packed.
    """
    # Time 0, since the file of a finished job may have a deadline in the past.
    files = read_jobs(settings, ROOT, 0.0)
    Jobs(files, settings, pulumi.ResourceOptions(depends_on=[ready]))


def content(path: Path, spec: JobSpec) -> str:
    """Return a hash of the job file (without comments) and its source folder: another hash means a changed job."""
    return spec_sha256(with_source(spec, pack_source(path, spec)))


class Job(Resource, module="spotkeeper", name="Job"):  # Pulumi's names for a type
    """The resource that declares one job."""

    def __init__(self, name: str, properties: dict[str, Any], opts: pulumi.ResourceOptions) -> None:
        super().__init__(JobProvider(), name, properties, opts)


class JobProvider(ResourceProvider):
    """The provider of :class:`Job`: create and update submit the job; delete cancels it if ``on_remove`` is cancel."""

    serialize_as_secret_always = False

    def check(self, _olds: dict[str, Any], news: dict[str, Any]) -> CheckResult:
        """Refuse a changed file while its job runs; a preview does too, if the user can read the bucket."""
        failures = []
        if _olds.get("content") != news["content"] and (told := _refusal(news)):
            failures.append(CheckFailure("file", told))
        return CheckResult(news, failures)

    def create(self, props: dict[str, Any]) -> CreateResult:
        return CreateResult(f"{props['job']}/{props['stack']}", {**props, "submitted": _submit(props)})

    def diff(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> DiffResult:
        names = [name for name in ("content", "file", "bucket", "on_remove") if _olds.get(name) != _news.get(name)]
        return DiffResult(changes=bool(names), replaces=[], stables=[], delete_before_replace=False)

    def update(self, _id: str, _olds: dict[str, Any], _news: dict[str, Any]) -> UpdateResult:
        same = all(_olds.get(name) == _news[name] for name in ("content", "bucket"))
        return UpdateResult({**_news, "submitted": _olds.get("submitted", "") if same else _submit(_news)})

    def delete(self, _id: str, _props: dict[str, Any]) -> None:
        if _props.get("on_remove") == "cancel":
            _cancel(_props)


def target_of(props: dict[str, Any]) -> Target:
    """Return this program's stack; in the one-machine cloud, the stack that environment variables name."""
    if profile := props.get("profile"):
        # Set the profile for the whole process, which serves one stack. Keys in the environment would override it.
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            os.environ.pop(name, None)
        os.environ["AWS_PROFILE"] = profile
    return find_target(props["stack"]) if props["here"] else Target(props["stack"], props["bucket"], Clock())


def _refusal(props: dict[str, Any]) -> str:
    """Return why a submission of this job would be refused; "" if it would be accepted, or if that is unknown."""
    try:
        path = ROOT / props["file"]
        spec = read_job(path, None, 0.0)
        check_name(open_store(target_of(props).bucket, brief=True), with_source(spec, pack_source(path, spec)))
    except CliError as error:
        return f"{error}; {error.remedy}" if error.code is Exit.REFUSED else ""
    except (SpecError, StoreError, ValueError):
        return ""
    return ""


def _submit(props: dict[str, Any]) -> str:
    """Submit the job and return its id.

    Raises:
        JobError: the submission is refused, or the bucket cannot be reached.
    """
    path = ROOT / props["file"]
    try:
        target = target_of(props)
        state, now = target.state(target.store()), target.clock.now()
        spec = read_job(path, state, now, starts_of(target.store(), state, now, target.clock.scale))
        done, heard = submit_file(target, path, spec, pack_source(path, spec))
    except CliError as error:
        raise JobError(f"{error}; {error.remedy}" if error.remedy else str(error)) from None
    except (SpecError, StoreError) as error:
        raise JobError(f"{props['file']}: {error}") from None
    word = "submitted" if done.new else f"on hold ({done.on_hold})" if done.on_hold is not None else "runs already"
    _tell(f"{done.name}: {word}, job {done.job}{'' if heard else '; the next tick starts it'}")
    return done.job


def _cancel(props: dict[str, Any]) -> None:
    """Cancel the job that this resource submitted, unless it has ended. A later job of the same name is not touched.

    Raises:
        JobError: the bucket cannot be reached.
    """
    try:
        target = target_of(props)
        store = target.store()
        read = store.read_record(str(props.get("submitted", "")))
        if read is None or read.value.over:
            return
        ledger.send_request(
            store, read.value, ledger.new_request(RequestKind.CANCEL, target.clock.now(), getpass.getuser())
        )
        notify(target, store, read.value.job)
    except (CliError, StoreError) as error:
        raise JobError(f"{props['job']} is not cancelled: {error}") from None
    _tell(f"{props['job']} ({read.value.job}): its file left `jobs`, so the job's cancellation is requested")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
