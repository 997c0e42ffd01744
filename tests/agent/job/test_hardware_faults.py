"""Signs of broken hardware in what a crash left: logs, and the kernel's messages where they can be read."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from spotkeeper.contract.facts import Sign
from spotkeeper_agent.job.failures import END_BYTES, in_kernel, in_logs, kernel_lines, of_crash

WARN = "gpu-3:77:81 [0] NCCL WARN [Service thread] Accept failed Software caused connection abort"
SYSTEM = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error"


def crash(root: Path, log: str, node: int = 0) -> Path:
    """A run folder as the launcher leaves it."""
    folder = root / "run"
    where = folder / "logs" / "none_x" / "attempt_0" / str(node)
    where.mkdir(parents=True)
    (where / "stderr.log").write_text(log)
    return folder


@pytest.mark.parametrize(
    ("line", "sign"),
    [
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", Sign.MEMORY),
        ("RuntimeError: No CUDA GPUs are available: no CUDA-capable device is detected", Sign.LOST),
        ("RuntimeError: CUDA error: an illegal instruction was encountered", Sign.FAULT),
        (WARN, Sign.NETWORK),
        (SYSTEM, Sign.NETWORK),
        (f"{SYSTEM}\nCUDA error: uncorrectable ECC error encountered", Sign.MEMORY),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", None),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", None),
        ("RuntimeError: CUDA error: device-side assert triggered", None),
        ("ValueError: not enough values to unpack", None),
    ],
)
def test_only_errors_of_hardware_are_signs(tmp_path: Path, line: str, sign: Sign | None) -> None:
    assert in_logs(crash(tmp_path, f"epoch 3\n{line}\n")) is sign


def test_only_the_ends_of_logs_are_read_and_missing_logs_are_skipped(tmp_path: Path) -> None:
    folder = crash(tmp_path, "uncorrectable ECC error\n" + "step 4\n" * END_BYTES)
    assert in_logs(folder) is None
    assert of_crash(tmp_path / "gone", tmp_path) is None


def record(seconds: float, text: str) -> str:
    return f"4,77,{int(seconds * 1e6)},-;{text}\n"


XID = "NVRM: Xid (PCI:0000:07:00): {}, pid=1234, name=python3, Ch 00000008"


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        (XID.format(79), Sign.LOST),
        (XID.format(48), Sign.MEMORY),
        (XID.format(119), Sign.DRIVER),
        (XID.format(31), None),  # a page fault: the script's own
        ("mce: [Hardware Error]: Machine check events logged", Sign.HOST),
        ("I/O error, dev nvme0n2, sector 12 op 0x1:(WRITE)", Sign.HOST),
        ("eth0: link becomes ready", None),
    ],
)
def test_kernel_messages_show_gpu_and_disk_faults(text: str, sign: Sign | None) -> None:
    assert in_kernel(["usb 1-1: new device", text]) is sign


def test_only_kernel_messages_of_this_generation_count(tmp_path: Path) -> None:
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    folder = crash(tmp_path, "Traceback\n")
    kmsg = tmp_path / "root" / "dev" / "kmsg"
    kmsg.parent.mkdir(parents=True)
    kmsg.write_text(record(now - 600, XID.format(48)) + "garbage\n" + " SUBSYSTEM=pci\n")
    assert of_crash(folder, tmp_path / "root") is None
    kmsg.write_text(record(now - 600, XID.format(48)) + record(now + 1, XID.format(79)))
    assert of_crash(folder, tmp_path / "root") is Sign.LOST
    assert kernel_lines(tmp_path / "nothing", 0.0) == []
    assert os.access(kmsg, os.R_OK)


def test_reading_the_kernel_log_does_not_block() -> None:
    """Where this process may read it; else there is nothing to see, and no error."""
    assert isinstance(kernel_lines(Path("/dev/kmsg"), 0.0), list)


def test_a_jobs_pipe_does_not_block_the_agent(tmp_path: Path) -> None:
    """Nobody ever writes to it: the end of the generation was never said."""
    folder = crash(tmp_path, "CUDA error: uncorrectable ECC error encountered")
    os.mkfifo(folder / "x.log")
    assert in_logs(folder) is Sign.MEMORY
