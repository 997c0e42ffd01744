"""Takes one machine away, as its provider would: announced by the provider's own drill, or at once. For drills alone.

======== ======================================== =================================================
cloud    announced                                not announced
======== ======================================== =================================================
local    the control plane preempts it            the same, without a word
GCP      ``instances.simulateMaintenanceEvent``   ``instances.delete``, by its unique id
AWS      an experiment of FIS, from a template    ``TerminateInstances``
         that is chosen by a tag (below)
======== ======================================== =================================================

FIS interrupts the machines that a template's target selects: ``resourceTags: {sk-drill: "now"}`` for
``aws:ec2:spot-instance``, action ``aws:ec2:send-spot-instance-interruptions`` with
``durationBeforeInterruption: PT2M``. The tag is set on the one machine that is meant.

Sources: https://cloud.google.com/compute/docs/instances/simulating-host-maintenance,
https://docs.aws.amazon.com/fis/latest/userguide/fis-actions-reference.html#send-spot-instance-interruptions
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from spotkeeper.cli.errors import CliError, Exit
from spotkeeper.cli.target import Target
from spotkeeper.clock import Clock
from spotkeeper.reconcile.gce_api import DEFAULT_ENDPOINT, Api, MetadataToken, NoAnswerError
from spotkeeper.reconcile.gce_errors import parse_error
from spotkeeper.report.drill import Struck
from spotkeeper.spec.cloud import Class, Cloud, DeleteVm
from spotkeeper.spec.stack import StackState

CALL_S = 30.0
TAG, NOW = "sk-drill", "now"
TEMPLATE = "SPOTKEEPER_FIS_TEMPLATE"


def strike(target: Target, state: StackState, struck: Struck) -> None:
    """
    Raises:
        CliError: the machine could not be taken, and why.
    """
    if target.local is not None:
        _local(target, struck)
    elif state.cloud == "aws":
        _aws(target, state, struck)
    else:
        _gcp(target, state, struck)


def check(target: Target, state: StackState, *, announced: bool) -> None:
    """What can be known to be missing before anybody is asked.

    Raises:
        CliError: says what.
    """
    if target.local is None and state.cloud == "aws" and announced and not os.environ.get(TEMPLATE):
        remedy = f"export {TEMPLATE}=EXT... (docs/operate.md has the template), or --no-notice"
        raise CliError("FIS gives a notice by an experiment template, and none is named", Exit.USAGE, remedy)


def _local(target: Target, struck: Struck) -> None:
    from spotkeeper.cli.localcloud import attach, failures

    assert target.local is not None
    with failures(remedy="spotkeeper local status"):
        attach(target.local).preempt(struck.vm, notice=struck.announced)


def _delete(cloud: Cloud, struck: Struck) -> None:
    result = cloud.perform(DeleteVm(struck.vm, struck.uid, struck.zone), CALL_S)
    if result.kind is not Class.ACCEPTED:
        raise CliError(f"{struck.vm} could not be deleted: {result.detail or result.kind.value}", Exit.FAILED)


# -- Compute Engine


def gce_api(target: Target) -> Api:
    """With the user's own login; without one where the endpoint is this machine's."""
    from spotkeeper.cli.tick import GcloudToken

    endpoint = target.compute_endpoint or os.environ.get("SPOTKEEPER_COMPUTE_ENDPOINT") or DEFAULT_ENDPOINT
    token: MetadataToken | None = GcloudToken(target.clock) if endpoint.startswith("https://") else None
    return Api(endpoint, token)


def _gcp(target: Target, state: StackState, struck: Struck) -> None:
    from spotkeeper.reconcile.gce import Gce

    api = gce_api(target)
    try:
        if struck.announced:
            simulate(api, state.project, struck)
        else:
            _delete(Gce(state, api, target.clock), struck)
    except NoAnswerError as error:
        raise CliError(f"the cloud cannot be asked: {error}", Exit.FAILED, "gcloud auth login") from None


def simulate(api: Api, project: str, struck: Struck) -> None:
    """A spot machine is really preempted by it, with its notice; one on demand has its host's maintenance.

    Raises:
        CliError: Compute Engine refused it.
        NoAnswerError: it did not answer.
    """
    path = f"projects/{project}/zones/{struck.zone}/instances/{struck.uid}/simulateMaintenanceEvent"
    answer = api.call("POST", path, CALL_S, {"requestId": str(uuid.uuid4())})
    if answer.status != 200:
        said = parse_error(answer.status, answer.body)[1]
        right = "the right it takes: compute.instances.simulateMaintenanceEvent" if answer.status == 403 else ""
        raise CliError(f"{struck.vm} gets no notice: {said}", Exit.FAILED, right)


# -- EC2


def _aws(target: Target, state: StackState, struck: Struck) -> None:
    if not struck.announced:
        _delete(_ec2(state, target.clock), struck)
        return
    from botocore.session import get_session

    session = get_session()
    experiment(
        session.create_client("ec2", state.region),
        session.create_client("fis", state.region),
        os.environ.get(TEMPLATE, ""),
        struck,
    )


def _ec2(state: StackState, clock: Clock) -> Cloud:
    from spotkeeper.reconcile.ec2 import open_ec2

    return open_ec2(state, clock)


def experiment(ec2: Any, fis: Any, template: str, struck: Struck) -> None:
    """The tag, then the experiment, which finds the machine by it. ``ec2``, ``fis``: clients of botocore.

    Raises:
        CliError: AWS refused it; then the tag is taken off again.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    tag = {"Resources": [struck.uid], "Tags": [{"Key": TAG, "Value": NOW}]}
    try:
        ec2.create_tags(**tag)
    except (BotoCoreError, ClientError) as error:
        raise CliError(f"{struck.vm} cannot be marked for FIS: {error}", Exit.FAILED) from None
    try:
        fis.start_experiment(
            experimentTemplateId=template, clientToken=str(uuid.uuid4()), tags={"sk-job": struck.job, TAG: struck.vm}
        )
    except (BotoCoreError, ClientError) as error:
        ec2.delete_tags(**tag)
        raise CliError(f"{struck.vm} gets no notice: {error}", Exit.FAILED, f"is {TEMPLATE} the template?") from None
