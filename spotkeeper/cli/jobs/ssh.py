"""``ssh``: a shell or one command on a machine of a job, as an unprivileged user. The job's ledger records each use.

======== ==================================================== =========================================
cloud    how                                                  user
======== ==================================================== =========================================
local    a process with the VM's environment, which ends      the user who started the cloud
         with the VM
GCP      ``gcloud compute ssh`` through the Identity-Aware    the caller's OS Login account, without sudo
         Proxy
AWS      ``aws ssm start-session`` with the stack's document  the user that the document names
======== ==================================================== =========================================
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from spotkeeper.cli.output import emit, note
from spotkeeper.cli.stack import open_stack
from spotkeeper.client import lookup
from spotkeeper.client.errors import CliError, Exit
from spotkeeper.client.logs import check_node
from spotkeeper.client.target import Target, whoami
from spotkeeper.contract.ledger import Entry, Event
from spotkeeper.contract.names import session_document, vm_name
from spotkeeper.contract.record import Record, Slot
from spotkeeper.contract.stack import StackState
from spotkeeper.reconcile.store.store import Store

PLUGIN = "session-manager-plugin"
INSTALL = {
    "gcloud": "install the Google Cloud CLI: https://cloud.google.com/sdk/docs/install",
    "aws": "install the AWS CLI, version 2: https://docs.aws.amazon.com/cli/latest/userguide/getting-started-install.html",
    PLUGIN: "install Session Manager's plugin for the AWS CLI: https://docs.aws.amazon.com/systems-manager/latest/"
    "userguide/session-manager-working-with-install-plugin.html",
}


class Machine(Struct, frozen=True):
    """The machine on which a shell opens. ``folder``, ``logs``: paths of the job's source and logs there."""

    node: int
    name: str
    uid: str
    zone: str
    attempt: int
    folder: str
    logs: str


class Program(Struct, frozen=True):
    """The program that opens the shell. ``env``: its variables; ``cwd``: its folder; None: as this process."""

    argv: tuple[str, ...]
    env: Mapping[str, str] | None = None
    cwd: Path | None = None


class ShellCommand(Struct, frozen=True):
    """The machine and the command line, as ``--json`` prints them."""

    machine: Machine
    argv: tuple[str, ...]


def run(job: str, node: int | None, stack: str | None, command: Sequence[str], *, as_json: bool) -> int:
    """Open a shell, wait for its end, and return its exit code; ``as_json``: only print the command line.

    Raises:
        CliError: the stack file allows no shells, the node has no machine, or a program is not installed here.
    """
    target, store = open_stack(stack)
    state = target.state(store)
    record = lookup.find_job(store, job)
    if target.local is None and not state.ssh:
        remedy = f"ask the stack's operator to add you to spotkeeper:ssh in Pulumi.{state.stack}.yaml and run pulumi up"
        raise CliError(f"the stack {state.stack} allows no shells on its machines", Exit.REFUSED, remedy)
    machine = find_machine(target, store, record, node)
    program = program_of(target, state, machine, command)
    if as_json:
        emit(ShellCommand(machine, program.argv), as_json, "")
        return Exit.OK
    _log_start(target, store, record, machine)
    if not command:
        note(f"{machine.name}: the job's folder is {machine.folder}, its logs are below {machine.logs}")
    return _wait_for(program)


def find_machine(target: Target, store: Store, record: Record, node: int | None) -> Machine:
    """Return the machine of a node, or the job's only machine.

    Raises:
        CliError: no such node, the node has no machine now, or no node is named and the job has several.
    """
    lookup.refuse_over(record)
    slots = {index: node.cur for index, node in enumerate(record.nodes)}
    up = {index: slot for index, slot in slots.items() if slot is not None and slot.uid is not None}
    who = f"{record.name} ({record.job})"
    if node is not None:
        check_node(record, node)
    elif len(up) == 1:
        node = next(iter(up))
    if node is None or node not in up:
        have = ", ".join(map(str, up)) or "none now"
        several = node is None and up
        why = "the job has several machines: name one by --node" if several else f"node {node or 0} has no machine now"
        raise CliError(f"{who}: {why}", Exit.REFUSED, f"nodes with a machine: {have}")
    return _machine(target, store, record, node, up[node])


def _machine(target: Target, store: Store, record: Record, node: int, slot: Slot) -> Machine:
    spec = store.read_spec(record.job, record.spec_key())
    source = (spec.source_sha256 if spec is not None else None) or "none"
    root = "" if target.local is None else str(target.local / "vms" / str(slot.uid) / "root")
    return Machine(
        node=node,
        name=slot.machine or vm_name(target.stack, record.job, node, slot.attempt),
        uid=str(slot.uid),
        zone=slot.zone,
        attempt=slot.attempt,
        folder=f"{root}/var/lib/spotkeeper/src/{source}",
        logs=f"{root}/run/spotkeeper/{record.job}",
    )


def program_of(target: Target, state: StackState, machine: Machine, command: Sequence[str]) -> Program:
    """Return the program that opens the shell.

    Raises:
        CliError: the program is not installed, or the machine of the one-machine cloud is gone.
    """
    if target.local is not None:
        return _local(target.local, machine, command)
    if state.cloud == "aws":
        _need("aws", PLUGIN)
        return Program(aws_command(state, machine, command))
    _need("gcloud")
    return Program(gcloud_command(state, machine, command))


def remote(machine: Machine, command: Sequence[str]) -> str:
    """The line that the machine's shell runs: the command, or a login shell, in the job's folder."""
    what = shlex.join(command) if command else 'exec "${SHELL:-/bin/bash}" -l'
    return f"cd {shlex.quote(machine.folder)} 2>/dev/null || cd; {what}"


def gcloud_command(state: StackState, machine: Machine, command: Sequence[str]) -> tuple[str, ...]:
    where = ("--project", state.project, "--zone", machine.zone, "--tunnel-through-iap")
    terminal = () if command else ("--ssh-flag=-t",)
    return ("gcloud", "compute", "ssh", machine.name, *where, *terminal, f"--command={remote(machine, command)}")


def aws_command(state: StackState, machine: Machine, command: Sequence[str]) -> tuple[str, ...]:
    document = session_document(state.stack)
    where = ("--region", state.region_of(machine.zone), "--target", machine.uid, "--document-name", document)
    given = json.dumps({"command": [remote(machine, command)]})
    return ("aws", "ssm", "start-session", *where, "--parameters", given)


def _local(cloud: Path, machine: Machine, command: Sequence[str]) -> Program:
    vm = cloud / "vms" / machine.uid
    try:
        plan = json.loads((vm / "boot.json").read_text())
    except OSError:
        raise CliError(f"{machine.name} is gone", Exit.REFUSED, "spotkeeper local status") from None
    terminal = {name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ}
    folder = Path(machine.folder)
    argv = tuple(command) or (os.environ.get("SHELL") or "/bin/sh",)
    return Program(argv, {**terminal, **plan["env"]}, folder if folder.is_dir() else vm / "root")


def _need(*programs: str) -> None:
    for program in programs:
        if shutil.which(program) is None:
            raise CliError(f"{program} is not on this machine's PATH", Exit.FAILED, INSTALL[program])


def _log_start(target: Target, store: Store, record: Record, machine: Machine) -> None:
    """Record in the ledger that a shell opens. If this fails, the caller opens none."""
    by = whoami()
    entry = Entry(
        at=target.clock.now(),
        id=f"{Event.SHELL.value}.{secrets.token_hex(8)}",
        event=Event.SHELL,
        gen=record.gen,
        node=machine.node,
        attempt=machine.attempt,
        zone=machine.zone,
        by=by,
        detail=f"{by or 'an unknown user'} on {machine.name}",
    )
    store.append_ledger(record.job, entry)


def _wait_for(program: Program) -> int:
    """Run the program, wait for its end, and return its exit code. Ctrl-C reaches the program and not this process."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.run(program.argv, env=program.env, cwd=program.cwd, check=False).returncode
    except OSError as error:
        raise CliError(f"{program.argv[0]}: {error.strerror}", Exit.FAILED) from None
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code
