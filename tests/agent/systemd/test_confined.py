"""What the jobs' unit forbids, as values, and that training and rootless containers do not need it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from infra import boot
from infra.settings.read import from_config
from spotkeeper.contract.facts import Kind
from spotkeeper.local.deploy.config import read_config
from tests.agent.fakes import JOB
from tests.agent.systemd import box as boxes
from tests.agent.systemd.stage import UID, Stage
from tests.infra.conftest import STACKS

FORBIDS = {
    "NoNewPrivileges": "yes", "CapabilityBoundingSet": "", "ProtectSystem": "full", "ProtectHome": "read-only",
    "PrivateTmp": "yes", "PrivateMounts": "yes", "InaccessiblePaths": "-/run/dbus -/run/user -/run/systemd/private",
    "ProtectKernelModules": "yes", "ProtectProc": "invisible", "RestrictRealtime": "yes", "LockPersonality": "yes",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK", "RemoveIPC": "yes", "KeyringMode": "private",
    "SystemCallArchitectures": "native", "SystemCallErrorNumber": "EPERM",
    "SystemCallFilter": "~@clock @cpu-emulation @module @obsolete @raw-io @reboot @swap bpf userfaultfd",
}  # fmt: skip
# What containers or devices would not bear, by the unit's own comment.
LEAVES = (
    "RestrictNamespaces", "RestrictSUIDSGID", "ProtectHostname", "ProtectKernelTunables", "ProtectKernelLogs",
    "ProtectClock", "PrivateDevices", "DeviceAllow", "DevicePolicy", "MemoryDenyWriteExecute", "ProcSubset",
    "PrivateUsers",
)  # fmt: skip


def test_the_jobs_unit_is_confined() -> None:
    settings = from_config(read_config(STACKS / "Pulumi.local.yaml", "http://127.0.0.1:9"), "local")
    unit = dict(re.findall(r"(?m)^(\w+)=(.*)$", boot.units(settings)["spotkeeper-job.service"]))
    assert {name: unit.get(name) for name in FORBIDS} == FORBIDS
    assert not set(LEAVES) & set(unit)
    assert unit["Requires"] == "spotkeeper-fence.service spotkeeper-job.socket"


TRAINS = """
import json, os, subprocess, sys
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
dist.init_process_group("gloo")
summed = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(summed)
read = sum(float(batch.sum()) for batch, in DataLoader(TensorDataset(torch.arange(64.0)), 8, num_workers=2))
failed = {}
for name, script in json.loads(sys.argv[1]).items() if dist.get_rank() == 0 else ():
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    if done.returncode:
        failed[name] = done.stderr
with open(os.environ["SPOTKEEPER_RUN"] + f"/seen.{dist.get_rank()}", "w") as file:
    json.dump([summed.item(), read, failed], file)
"""
# What a rootless container's runtime does, without one: podman, Apptainer and enroot do these, each in its own order.
CONTAINERS = {
    "namespaces": "unshare -UrmpfCniu --mount-proc true",
    "a root of its own": "mkdir -p ~/root; unshare -Urm sh -c 'mount --rbind / ~/root && chroot ~/root true'",
    "a tmpfs": "unshare -Urm mount -t tmpfs none /mnt",
    "a host name": "unshare -Uru hostname box",
    "an image with set-uid programs": "cp /bin/true ~/true && chmod 4755 ~/true",
    "code made at run time": "python3 -c 'import mmap; mmap.mmap(-1, 4096, prot=7)'",
    "a debugger": "python3 -c 'import ctypes; assert ctypes.CDLL(None).ptrace(0, 0, 0, 0) == 0'",
}


@pytest.mark.skipif(bool(boxes.why_not()), reason=boxes.why_not() or "")
def test_training_and_rootless_containers_run_under_the_restrictions(stage: Stage) -> None:
    """A real zygote, torchrun, gloo and loader workers, of the agent's making."""
    python, box = Path(sys.executable), stage.box
    for path in (python, python.resolve()):  # a home of root's is not for others
        box.run("chmod o+rx " + " ".join(f"'{parent}'" for parent in path.parents), check=False)
    if box.run(f"{python} -c 'import torch'", user="spotkeeper-job", check=False).returncode:
        pytest.skip(f"{python}: not for other users of this machine, or without torch")
    job = stage.job({"train.py": TRAINS}, "train.py", json.dumps(CONTAINERS))
    stage.train(1, 1, disk=False, run=replace(job, python=str(python), launcher="zygote", nproc=2))
    folder = f"/run/spotkeeper/{JOB}/1"
    try:
        exit_ = stage.cloud.wait_fact(UID, Kind.EXIT, 1, timeout_s=180)
    except AssertionError as error:
        raise AssertionError(f"{error}: {stage.log()}") from None
    assert exit_.value == "0", box.run(f"cat {folder}/*.log {folder}/error*", check=False).stdout
    seen = [json.loads(box.path(f"{folder}/seen.{rank}").read_text()) for rank in (0, 1)]
    assert seen == [[3.0, 2016.0, {}], [3.0, 2016.0, {}]]
