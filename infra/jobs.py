"""Jobs by git: the job files that a stack names (``jobs:``), each a resource whose creation submits it.

``pulumi up`` calls the code of ``spotkeeper submit``, no other. What runs is the function's and
never in Pulumi's state: the resource only remembers what was submitted. So a file that has not
changed is submitted once, however often its job has ended; one that has changed is submitted
anew once its job is over, and refused while it runs. A name that leaves the list cancels
nothing, unless the stack had said ``cancel_removed_jobs`` in the `up` before.

The provider stands in an importable module, as the drain's does, and for the same reason.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pulumi
from pulumi.dynamic import CheckFailure, CheckResult, CreateResult, DiffResult, Resource, ResourceProvider, UpdateResult
from spotkeeper.cli import jobs as ledger
from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.pack import pack_source
from spotkeeper.cli.poke import poke
from spotkeeper.cli.starts import starts_of
from spotkeeper.cli.submit import check_name, submit_file, with_source
from spotkeeper.cli.target import Target, find_target
from spotkeeper.clock import Clock
from spotkeeper.reconcile.store import open_store
from spotkeeper.reconcile.store_api import StoreError
from spotkeeper.spec.job import AskKind, JobSpec, spec_sha256
from spotkeeper.spec.jobfile import read_job
from spotkeeper.spec.problem import SpecError
from spotkeeper.spec.record import Phase

from infra.settings import Settings
from infra.settings.jobs import JobFile, read_jobs

ROOT = Path(__file__).resolve().parent.parent
_SCHEMES = {"gcp": "gs", "aws": "s3"}


class JobError(Exception):
    """A job could not be submitted; the message says why, and what to do."""


class Jobs(pulumi.ComponentResource):
    """One resource for each job file, named as the job is. Registered only where there are any."""

    def __init__(self, files: Sequence[JobFile], settings: Settings, opts: pulumi.ResourceOptions) -> None:
        super().__init__("spotkeeper:all:Jobs", "jobs", None, opts)
        for file in files:
            properties = {
                "stack": settings.stack,
                "bucket": f"{_SCHEMES[settings.cloud]}://{settings.bucket_name()}",
                "here": settings.endpoints.compute.startswith("http://"),  # a cloud on this machine
                "file": file.name,
                "job": file.spec.name,
                "content": content(file.path, file.spec),
                "on_remove": "cancel" if settings.cancel_removed_jobs else "keep",
            }
            Job(file.spec.name, properties, pulumi.ResourceOptions(parent=self))
        self.register_outputs({})


def declare(settings: Settings, ready: pulumi.Resource) -> None:
    """Declare the stack's jobs; ``ready``: what must be there for a job to be taken in.

    Raises:
        SpecError: what is wrong with the files.
        CliError: a source folder cannot be sent.
    """
    # Not by the clock: the file of a job that is long over may have a deadline that is past.
    files = read_jobs(settings, ROOT, 0.0)
    Jobs(files, settings, pulumi.ResourceOptions(depends_on=[ready]))


def content(path: Path, spec: JobSpec) -> str:
    """What a job is known by: its file, whatever its comments say, and the folder it sends."""
    return spec_sha256(with_source(spec, pack_source(path, spec)))


class Job(Resource, module="spotkeeper", name="Job"):  # Pulumi's names for a type
    """Declares a job; see the module."""

    def __init__(self, name: str, properties: dict[str, Any], opts: pulumi.ResourceOptions) -> None:
        super().__init__(JobProvider(), name, properties, opts)


class JobProvider(ResourceProvider):
    """Create and update submit; delete cancels only what says so. Never replaced: there is nothing to replace."""

    serialize_as_secret_always = False

    def check(self, _olds: dict[str, Any], news: dict[str, Any]) -> CheckResult:
        """Before anything is changed, in a preview too, as far as whoever runs it may look into the bucket."""
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
    """The stack that this program declares, whatever the shell's variables name; on one machine, the one they name."""
    return find_target(props["stack"]) if props["here"] else Target(props["stack"], props["bucket"], Clock())


def _refusal(props: dict[str, Any]) -> str:
    """Why this job would not be taken; "" as well where nobody can tell: the submission itself will."""
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
    """The job's id.

    Raises:
        JobError: refused, or the bucket cannot be reached.
    """
    path = ROOT / props["file"]
    try:
        target = target_of(props)
        state, now = target.state(target.store()), target.clock.now()
        spec = read_job(path, state, now, starts_of(target.store(), state, now))
        done, heard = submit_file(target, path, spec, pack_source(path, spec))
    except CliError as error:
        raise JobError(f"{error}; {error.remedy}" if error.remedy else str(error)) from None
    except (SpecError, StoreError) as error:
        raise JobError(f"{props['file']}: {error}") from None
    word = "submitted" if done.new else f"holds ({done.holds})" if done.holds is not None else "runs already"
    _tell(f"{done.name}: {word}, job {done.job}{'' if heard else '; the next tick starts it'}")
    return done.job


def _cancel(props: dict[str, Any]) -> None:
    """The job that this resource submitted, if it is not over; a later one of its name is somebody else's.

    Raises:
        JobError: the bucket cannot be reached.
    """
    try:
        target = target_of(props)
        store = target.store()
        held = store.read_record(str(props.get("submitted", "")))
        if held is None or held.value.phase in (Phase.END, Phase.DONE):
            return
        ledger.ask(store, held.value, AskKind.CANCEL, target.clock.now(), getpass.getuser())
        poke(target, held.value.job)
    except (CliError, StoreError) as error:
        raise JobError(f"{props['job']} is not cancelled: {error}") from None
    _tell(f"{props['job']} ({held.value.job}): it has left the list, and was asked to cancel")


def _tell(text: str) -> None:
    """Pulumi shows what a provider says on its standard error."""
    print(text, file=sys.stderr, flush=True)
