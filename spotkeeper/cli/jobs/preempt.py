"""Preempts one machine as its cloud would, with a notice or at once, for drills.

======== ======================================== =================================================
cloud    with a notice                            without one
======== ======================================== =================================================
local    the control plane preempts it            the control plane deletes it
GCP      ``instances.simulateMaintenanceEvent``   ``instances.delete``, by its unique id
AWS      an experiment of FIS, from a template    ``TerminateInstances``
         (below)
======== ======================================== =================================================

FIS, the Fault Injection Service, interrupts the machines that the target of a template selects. The target must be
``aws:ec2:spot-instance`` with ``resourceTags: {sk-drill: "now"}``, and the action
``aws:ec2:send-spot-instance-interruptions`` with ``durationBeforeInterruption: PT2M``. A drill sets the tag on the one
machine that it preempts.

Sources: https://cloud.google.com/compute/docs/instances/simulating-host-maintenance,
https://docs.aws.amazon.com/fis/latest/userguide/fis-actions-reference.html#send-spot-instance-interruptions
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.target import Target, attach
from spotkeeper.contract.cloud import Cloud, DeleteVm, ResultKind
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.clouds.gce.api import DEFAULT_ENDPOINT, Api, GivenToken, NoAnswerError
from spotkeeper.reconcile.clouds.gce.errors import parse_error
from spotkeeper.report.drill import Victim

CALL_S = 30.0
FIS_S, FIS_EVERY_S = 120.0, 2.0  # time limit for the start of an experiment, and time between polls
FIS_SETTLED_S = 20.0  # after this long in "running" an experiment has its targets, and a refused action has failed
TAG, NOW = "sk-drill", "now"
TEMPLATE = "SPOTKEEPER_FIS_TEMPLATE"


def preempt(target: Target, state: StackState, victim: Victim) -> None:
    """Preempt the machine of a drill, in the cloud of the stack; CliError says why it could not."""
    if target.local is not None:
        _local(target, victim)
    elif state.cloud == "aws":
        _aws(target, state, victim)
    else:
        _gcp(target, state, victim)


def check(target: Target, state: StackState, *, announced: bool) -> None:
    """Raise CliError if a notice on AWS is wanted and no experiment template is named.

    Call this before asking the user to confirm. ``announced``: whether to preempt with a notice.
    """
    if target.local is None and state.cloud == "aws" and announced and not os.environ.get(TEMPLATE):
        remedy = f'export {TEMPLATE}=EXT... (docs/day-two.md, "Drills", has the template), or pass --no-notice'
        raise CliError("a notice on AWS needs a template of the Fault Injection Service (FIS)", Exit.USAGE, remedy)


def _local(target: Target, victim: Victim) -> None:
    from spotkeeper.cli.local.localcloud import failures

    assert target.local is not None
    with failures(remedy="spotkeeper local status"):
        attach(target.local).preempt(victim.vm, notice=victim.announced)


def _delete(cloud: Cloud, victim: Victim) -> None:
    result = cloud.perform(DeleteVm(victim.vm, victim.uid, victim.zone), CALL_S)
    if result.kind is not ResultKind.ACCEPTED:
        raise CliError(f"{victim.vm} could not be deleted: {result.detail or result.kind.value}", Exit.FAILED)


# -- Compute Engine


def gce_api(target: Target) -> Api:
    """Return a client of Google's Compute API with the user's gcloud login, or a client of a simulated API.

    An address without https is that of a simulated API, which runs on this machine and has a token of its own.
    """
    from spotkeeper.cli.stacks.reconcile import GcloudToken

    endpoint = target.compute_endpoint or os.environ.get("SPOTKEEPER_COMPUTE_ENDPOINT") or DEFAULT_ENDPOINT
    if endpoint.startswith("https://"):
        return Api(endpoint, GcloudToken(target.clock))
    return Api(endpoint, GivenToken(target.compute_token or os.environ.get("SPOTKEEPER_COMPUTE_TOKEN", "")))


def _gcp(target: Target, state: StackState, victim: Victim) -> None:
    from spotkeeper.reconcile.clouds.gce.cloud import Gce

    api = gce_api(target)
    try:
        if victim.announced:
            simulate(api, state.project, victim)
        else:
            _delete(Gce(state, api, target.clock), victim)
    except NoAnswerError as error:
        raise CliError(f"cannot call the cloud: {error}", Exit.FAILED, "gcloud auth login") from None


def simulate(api: Api, project: str, victim: Victim) -> None:
    """Preempt a spot machine with a notice; an on-demand machine gets a simulated host maintenance.

    Raises:
        CliError: Compute Engine refused the call.
        NoAnswerError: Compute Engine did not answer.
    """
    path = f"projects/{project}/zones/{victim.zone}/instances/{victim.uid}/simulateMaintenanceEvent"
    answer = api.call("POST", path, CALL_S, {"requestId": str(uuid.uuid4())})
    if answer.status != 200:
        said = parse_error(answer.status, answer.body)[1]
        right = "a login with compute.instances.simulateMaintenanceEvent" if answer.status == 403 else ""
        raise CliError(f"{victim.vm} gets no notice: {said}", Exit.FAILED, right)


# -- EC2


def _aws(target: Target, state: StackState, victim: Victim) -> None:
    if not victim.announced:
        from spotkeeper.reconcile.clouds.ec2.cloud import open_ec2

        _delete(open_ec2(state, target.clock), victim)
        return
    from botocore.session import get_session

    session = get_session()
    experiment(
        session.create_client("ec2", state.region_of(victim.zone)),
        session.create_client("fis", state.region_of(victim.zone)),
        os.environ.get(TEMPLATE, ""),
        victim,
    )


def experiment(ec2: Any, fis: Any, template: str, victim: Victim, wait: Callable[[float], None] = time.sleep) -> None:
    """Tag the machine, start the experiment that selects by this tag, wait until it runs, and remove the tag.

    Args:
        ec2, fis: clients of botocore.
        wait: called with the seconds between two polls.

    Raises:
        CliError: AWS refused a call, another machine has the tag, or the experiment failed.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    _refuse_others(ec2, victim)
    tag = {"Resources": [victim.uid], "Tags": [{"Key": TAG, "Value": NOW}]}
    try:
        ec2.create_tags(**tag)
    except (BotoCoreError, ClientError) as error:
        raise CliError(f"cannot tag {victim.vm} for FIS: {error}", Exit.FAILED) from None
    try:
        started = fis.start_experiment(
            experimentTemplateId=template, clientToken=str(uuid.uuid4()), tags={"sk-job": victim.job, TAG: victim.vm}
        )
        _see_it_run(fis, started["experiment"]["id"], victim, wait)
    except (BotoCoreError, ClientError) as error:
        raise CliError(
            f"{victim.vm} gets no notice: {error}", Exit.FAILED, f"check that {TEMPLATE} names the experiment template"
        ) from None
    finally:
        # The next experiment would interrupt a machine that keeps the tag; each drill first checks that none has it.
        with contextlib.suppress(BotoCoreError, ClientError):
            ec2.delete_tags(**tag)


def _refuse_others(ec2: Any, victim: Victim) -> None:
    """Raise CliError if the experiment would interrupt other machines with the tag, or EC2 cannot list them."""
    from botocore.exceptions import BotoCoreError, ClientError

    alive = {"Name": "instance-state-name", "Values": ["pending", "running"]}
    try:
        found = ec2.describe_instances(Filters=[{"Name": f"tag:{TAG}", "Values": [NOW]}, alive])
    except (BotoCoreError, ClientError) as error:
        raise CliError(f"cannot list the machines that FIS would interrupt: {error}", Exit.FAILED) from None
    marked = {each["InstanceId"] for group in found["Reservations"] for each in group["Instances"]} - {victim.uid}
    if marked:
        ids = " ".join(sorted(marked))
        remedy = f"wait for the end of the other drill, or: aws ec2 delete-tags --tags Key={TAG} --resources {ids}"
        raise CliError(f"FIS would also interrupt {ids}, which are tagged {TAG}: {NOW}", Exit.REFUSED, remedy)


def _see_it_run(fis: Any, experiment_id: str, victim: Victim, wait: Callable[[float], None]) -> None:
    """Wait until the experiment has completed, or has run for ``FIS_SETTLED_S``; a refused action fails sooner.

    Raises:
        CliError: the experiment failed, or did not start in time.
    """
    running_s = 0.0
    for _ in range(int(FIS_S / FIS_EVERY_S)):
        state = fis.get_experiment(id=experiment_id)["experiment"]["state"]
        if state["status"] in ("failed", "stopped", "stopping", "cancelled"):
            said = f"the experiment {experiment_id} {state['status']}: {state.get('reason', 'no reason given')}"
            remedy = 'check the permissions of the template\'s role (docs/day-two.md, "Drills")'
            raise CliError(f"{victim.vm} gets no notice: {said}", Exit.FAILED, remedy)
        running_s += FIS_EVERY_S if state["status"] == "running" else 0.0
        if state["status"] == "completed" or running_s > FIS_SETTLED_S:
            return
        wait(FIS_EVERY_S)
    said = f"the experiment {experiment_id} has not started after {FIS_S:.0f} s"
    raise CliError(f"{victim.vm} gets no notice: {said}", Exit.FAILED, f"aws fis get-experiment --id {experiment_id}")
