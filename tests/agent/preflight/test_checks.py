"""Preflight: each thing that can be wrong is found, in words that say what to do, and nothing keeps it waiting."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotkeeper.clock import Clock
from spotkeeper_agent import preflight
from spotkeeper_agent.cloud.ec2 import Ec2
from spotkeeper_agent.preflight import checks, checks_gpu
from spotkeeper_agent.preflight.findings import Check, Finding, Level, Machine, Report, examine
from tests.agent.cloud.imds import Imds, instance
from tests.agent.fakes import REPO


@pytest.fixture
def imds() -> Iterator[Imds]:
    with instance(**{"sk-stack": "test"}) as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine's kernel, as its files say."""
    made = tmp_path / "root"
    put(made, "proc/sys/net/ipv4/tcp_retries2", "5")
    (made / "run").mkdir()
    return made


def put(root: Path, path: str, text: str = "") -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text + "\n")


def gpu(root: Path, number: int) -> None:
    put(root, f"sys/bus/pci/devices/0000:0{number}:00.0/vendor", "0x10de")
    put(root, f"sys/bus/pci/devices/0000:0{number}:00.0/class", "0x030200")


def tool(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of this name, first on the path."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / name


def said(finding: Finding, level: Level, *words: str) -> None:
    assert finding.level is level, finding
    assert all(word in f"{finding.found} {finding.remedy}" for word in words), finding
    assert bool(finding.remedy) == (level in (Level.WARNING, Level.ERROR)), "every trouble has a remedy"


# ---------------------------------------------------------------- how it looks


def test_a_hanging_check_becomes_a_finding() -> None:
    never = threading.Event()

    def hang(_: Machine) -> Finding:
        never.wait()
        return Finding("hangs", Level.OK, "")

    def break_(_: Machine) -> Finding:
        raise PermissionError(13, "Permission denied")

    found = list(examine([Check("hangs", hang, 0.05, "kick it"), Check("breaks", break_, 5.0, "")], Machine()))
    never.set()
    assert [finding.level for finding in found] == [Level.WARNING, Level.WARNING]
    said(found[0], Level.WARNING, "within 0.05 s", "kick it")
    said(found[1], Level.WARNING, "Permission denied")
    assert Report.of(found).level is Level.WARNING and Report.of([]).level is Level.OK


def test_measuring_checks_run_alone() -> None:
    running: list[str] = []
    met: list[list[str]] = []

    def look(name: str) -> Any:
        def looking(_: Machine) -> Finding:
            running.append(name)
            met.append(list(running))
            running.remove(name)
            return Finding(name, Level.OK, "")

        return looking

    two = [Check("disk", look("disk"), 5.0, "", alone=True), Check("torch", look("torch"), 5.0, "", alone=True)]
    assert [finding.check for finding in examine(two, Machine())] == ["disk", "torch"]
    assert met == [["disk"], ["torch"]]


def test_a_boot_runs_only_quick_checks() -> None:
    names = [check.name for check in preflight.boot_checks()]
    assert names == ["clock", "metadata", "space", "tcp_retries2", "driver", "nccl"]
    assert {check.name for check in preflight.all_checks()} - set(names) == {"peers", "bandwidth", "torch"}
    assert sum(check.limit_s for check in preflight.all_checks()) < 210


# ---------------------------------------------------------------- clock and metadata


@pytest.mark.parametrize(
    ("ahead_s", "level"), [(0.0, Level.OK), (-10.0, Level.WARNING), (90.0, Level.ERROR), (-3600.0, Level.ERROR)]
)
def test_clock(imds: Imds, ahead_s: float, level: Level) -> None:
    imds.ahead_s = ahead_s
    finding = checks.clock(Machine(metadata=Ec2(Clock(), imds.url)))
    said(finding, level, "against the metadata server")
    assert abs(finding.figures["off_s"] + ahead_s) < 2.5


def test_outside_a_cloud_the_kernel_judges_the_clock() -> None:
    assert checks.clock(Machine()).level in (Level.OK, Level.WARNING, Level.SKIPPED)


def test_metadata(imds: Imds) -> None:
    place = Machine(metadata=Ec2(Clock(), imds.url))
    said(checks.metadata(place), Level.OK, "sk-test-abcdefgh-n0000-a1", "eu-west-1a")
    imds.version_1 = True
    said(checks.metadata(place), Level.WARNING, "version 1", "HttpTokens=required")
    imds.take_away("meta-data/iam/security-credentials/")
    said(checks.metadata(Machine(metadata=Ec2(Clock(), imds.url))), Level.ERROR, "instance profile")
    imds.enabled = False
    said(checks.metadata(Machine(metadata=Ec2(Clock(), imds.url))), Level.ERROR, "HttpEndpoint")
    said(checks.metadata(Machine()), Level.SKIPPED, "not a cloud machine")


# ---------------------------------------------------------------- the disk


def test_bandwidth_shows_how_much_a_notice_can_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PROBE_BYTES", 3 * checks.BLOCK)
    finding = checks.bandwidth(Machine(folder=tmp_path, notice_s=120))
    rate, in_time = finding.figures["gb_per_s"], finding.figures["gb_in_time"]
    assert in_time == pytest.approx(112 * rate, rel=0.01, abs=0.1) and f"{in_time:.1f} GB" in finding.found
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_checkpoint_too_large_for_a_notice_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_probe", lambda *_: (1_000_000, 1.0))  # 1 MB/s
    said(checks.bandwidth(Machine(folder=tmp_path, notice_s=30)), Level.WARNING, "faster or larger disk")
    commit = tmp_path / "abcdefgh/ckpt/1-20"
    commit.mkdir(parents=True)
    (commit / "COMMIT").touch()
    (commit / "model").write_bytes(bytes(23_000_000))
    said(checks.bandwidth(Machine(folder=tmp_path, notice_s=30)), Level.ERROR, "longer notice")
    assert checks.bandwidth(Machine(folder=tmp_path, notice_s=120)).level is not Level.ERROR
    said(checks.bandwidth(Machine(folder=commit.parent, notice_s=5)), Level.ERROR, "0.0 GB on each machine")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checks, "_probe", refuse)
    said(checks.bandwidth(Machine(folder=tmp_path / "not/yet")), Level.ERROR, "Read-only", str(tmp_path))


@pytest.mark.parametrize(
    ("free", "level", "words"),
    [
        (50e9, Level.OK, "50.0 GB free"),
        (9e9, Level.WARNING, "for 3 checkpoints"),
        (25e9, Level.WARNING, "for 3 checkpoints"),
        (5e9, Level.ERROR, "does not fit"),
    ],
)
def test_space(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, free: float, level: Level, words: str
) -> None:
    newest = 10e9 if free in (25e9, 5e9) else 0
    monkeypatch.setattr(checks, "newest_checkpoint", lambda _: newest)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type(usage)(100, 0, int(free)))
    said(checks.space(Machine(folder=tmp_path, root=root)), level, words)


def test_a_run_folder_that_is_full_is_an_error(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type(usage)(1, 1, 0 if path == root / "run" else 10**12))
    said(checks.space(Machine(folder=tmp_path, root=root)), Level.ERROR, "run is full")


# ---------------------------------------------------------------- kernel and network


@pytest.mark.parametrize(
    ("text", "level"), [("5", Level.OK), ("8", Level.OK), ("15", Level.WARNING), ("", Level.SKIPPED)]
)
def test_tcp_timeouts_are_checked(root: Path, text: str, level: Level) -> None:
    put(root, "proc/sys/net/ipv4/tcp_retries2", text)
    said(checks.retries(Machine(root=root)), level)


def test_refusing_peers_pass_and_silent_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening, socket.socket() as closed:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused
        up, down = (f"127.0.0.1:{sock.getsockname()[1]}" for sock in (listening, closed))
        said(checks.peers(Machine(peers=(up, down))), Level.OK, "2 answer")
        connect = socket.create_connection

        def dropped(address: tuple[str, int], timeout: float) -> socket.socket:
            if address[0] in ("10.0.0.9", "fd00::9"):
                raise TimeoutError("timed out")
            return connect(address, timeout)

        monkeypatch.setattr(socket, "create_connection", dropped)
        found = checks.peers(Machine(peers=(up, "10.0.0.9", "fd00::9")))
    said(found, Level.ERROR, "10.0.0.9, fd00::9", "firewall")
    assert "127.0.0.1" not in found.found
    said(checks.peers(Machine()), Level.SKIPPED, "--peer")
    said(checks.peers(Machine(peers=("bad..host", "127.0.0.1:99999"))), Level.ERROR, "bad..host, 127.0.0.1:99999")


# ---------------------------------------------------------------- torch, driver, NCCL

TORCH = """
class _V:
    cuda = {cuda!r}
__version__, version = "2.13.0", _V
class cuda:
    is_available = staticmethod(lambda: {devices} > 0)
    device_count = staticmethod(lambda: {devices})
    nccl = type("nccl", (), dict(version=staticmethod(lambda: (2, 27, 3))))
class distributed:
    is_nccl_available = staticmethod(lambda: True)
"""


def a_torch(tmp_path: Path, **fields: Any) -> dict[str, str]:
    """An environment in which this interpreter finds a torch of this kind."""
    (tmp_path / "torch.py").write_text(TORCH.format(**fields))
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_torch(tmp_path: Path, root: Path) -> None:
    place = Machine(python=sys.executable, root=root, environ=a_torch(tmp_path, cuda="13.0", devices=8))
    said(checks_gpu.torch(place), Level.OK, "torch 2.13.0", "8 devices", "NCCL 2.27.3")
    place = Machine(python=sys.executable, root=root, environ=a_torch(tmp_path, cuda=None, devices=0))
    said(checks_gpu.torch(place), Level.OK, "0 devices")
    gpu(root, 1)
    said(checks_gpu.torch(place), Level.ERROR, "built without CUDA", "fits the driver")


def test_a_failed_import_of_torch_shows_its_last_line(tmp_path: Path, root: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    place = Machine(python=sys.executable, root=root, environ={**os.environ, "PYTHONPATH": str(tmp_path)})
    said(checks_gpu.torch(place), Level.ERROR, "libcudart.so.13", "install torch")
    said(checks_gpu.torch(Machine(python="/no/such/python", root=root)), Level.ERROR, "/no/such/python", "--python")


SMI = "NVIDIA H100 80GB HBM3, 575.57.08, "


@pytest.mark.parametrize(
    ("script", "level", "words"),
    [
        (f"echo '{SMI}0'; echo '{SMI}0'", Level.OK, "2 x NVIDIA H100"),
        (f"echo '{SMI}[N/A]'; echo '{SMI}[N/A]'", Level.OK, "575.57.08"),
        (f"echo '{SMI}0'; echo '{SMI}3'", Level.ERROR, "memory errors"),
        (f"echo '{SMI}0'", Level.ERROR, "2 GPUs are in the machine"),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", Level.ERROR, "reboot"),
    ],
)
def test_driver(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, script: str, level: Level, words: str
) -> None:
    said(checks_gpu.driver(Machine(root=root)), Level.SKIPPED, "no GPU")
    gpu(root, 1)
    gpu(root, 2)
    tool(tmp_path / "bin", "nvidia-smi", script, monkeypatch)
    said(checks_gpu.driver(Machine(root=root)), level, words)


def test_a_missing_driver_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(root, 1)
    monkeypatch.setenv("PATH", "/nonexistent")
    said(checks_gpu.driver(Machine(root=root)), Level.ERROR, "1 GPUs, no driver", "install the driver")


def test_nccl_variables_are_checked(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "sys/class/net/ens4/mtu", "8896")
    put(root, "sys/class/net/lo/mtu", "65536")
    said(checks_gpu.network(Machine(root=root)), Level.OK, "TCP")
    for good in ("ens", "=ens4", "^lo,docker", "lo,ens4"):
        said(checks_gpu.network(Machine(root=root, environ={"NCCL_SOCKET_IFNAME": good})), Level.OK)
    for bad in ("eth0", "=ens"):
        found = checks_gpu.network(Machine(root=root, environ={"NCCL_SOCKET_IFNAME": bad}))
        said(found, Level.WARNING, "ens4, lo", "unset NCCL_SOCKET_IFNAME")
    monkeypatch.setattr(checks_gpu, "SHM_BYTES", 1 << 60)
    (root / "dev/shm").mkdir(parents=True)
    said(checks_gpu.network(Machine(root=root)), Level.WARNING, "shm", "--shm-size")


def test_an_unused_efa_adapter_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "sys/class/infiniband/rdmap0s6/device/vendor", "0x1d0f")
    monkeypatch.setattr(checks_gpu.resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    found = checks_gpu.network(Machine(root=root, environ={"FI_PROVIDER": "tcp"}))
    said(found, Level.WARNING, "FI_PROVIDER=tcp", "libnccl-net", "64 KB", "LimitMEMLOCK")
    put(root, "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net-ofi.so")
    monkeypatch.setattr(checks_gpu.resource, "getrlimit", lambda _: (-1, -1))
    said(checks_gpu.network(Machine(root=root)), Level.OK, "1 EFA")


def test_findings_are_plain_data() -> None:
    import msgspec

    finding = Finding("clock", Level.ERROR, "x", "y", {"off_s": 1.0})
    text = msgspec.json.encode(finding)
    assert json.loads(text) == {
        "check": "clock",
        "level": "error",
        "found": "x",
        "remedy": "y",
        "figures": {"off_s": 1},
    }


# ---------------------------------------------------------------- as a program, where there is no command line of ours


def test_preflight_uses_the_agents_interpreter(tmp_path: Path, imds: Imds) -> None:
    """``-S``: no package but the agent's, as on a machine of a stack."""
    environ = {
        "PYTHONPATH": f"{REPO / 'agent'}:{REPO}:{sysconfig.get_path('purelib')}",
        "PATH": os.environ["PATH"],
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": imds.url,
    }
    imds.tags({"Name": "vm", "sk-stack": "test", "sk-notice-s": "30"})
    imds.ahead_s = 120.0
    argv = [sys.executable, "-S", "-m", "spotkeeper_agent.preflight", "--quick", "--folder", str(tmp_path)]
    said = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 1, said.stderr
    lines = said.stdout.splitlines()
    assert lines[0].split()[:2] == ["clock", "error"] and "do: synchronise" in lines[1]
    assert any(line.startswith("metadata      ok       vm, eu-west-1a") for line in lines)
    imds.ahead_s = 0.0
    said = subprocess.run([*argv, "--json"], env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert said.returncode == 0 and json.loads(said.stdout)["findings"][0]["level"] == "ok"


def test_the_pools_notice_is_used(imds: Imds, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", imds.url)
    monkeypatch.delenv("GCE_METADATA_HOST", raising=False)
    imds.tags({"Name": "vm", "sk-stack": "test", "sk-notice-s": "30"})
    assert preflight.here(tmp_path, (), None, "python3").notice_s == 30.0
    assert preflight.here(tmp_path, (), 60.0, "python3").notice_s == 60.0
    imds.enabled = False
    assert preflight.here(tmp_path, (), None, "python3").notice_s == 120.0


# ---------------------------------------------------------------- the fabric between GPUs


@pytest.mark.parametrize(
    ("fabric", "have", "lacks"),
    [
        ("tcpx", (), ("no plugin for NCCL in /var/lib/tcpx", "does not run: /run/tcpx does not exist")),
        ("tcpx", ("var/lib/tcpx/lib64/libnccl-net.so",), ("the daemon of GPUDirect-TCPX does not run",)),
        ("tcpx", ("var/lib/tcpx/lib64/libnccl-net.so", "run/tcpx/socket"), ()),
        ("tcpxo", ("var/lib/tcpxo/lib64/libnccl-net.so",), ("/dev/aperture_devices does not exist",)),
        ("rdma", ("usr/local/gib/lib64/libnccl-net.so",), ("fewer than 8 RDMA adapters",)),
        ("rdma", ("usr/local/gib/lib64/libnccl-net.so", *(f"sys/class/infiniband/mlx5_{n}/x" for n in range(8))), ()),
        ("efa", (), ("the kernel shows none",)),
        ("", (), ()),
    ],
)
def test_missing_parts_of_gpudirect_are_named_with_the_remedy(
    root: Path, fabric: str, have: tuple[str, ...], lacks: tuple[str, ...]
) -> None:
    for path in have:
        put(root, path)
    found = checks_gpu.network(Machine(root=root, fabric=fabric))
    assert found.level is (Level.WARNING if lacks else Level.OK)
    assert bool(found.remedy) == bool(lacks)
    for words in lacks:
        assert words in found.found
    assert found.found.count("; ") == max(0, len(lacks) - 1), "and nothing else"
