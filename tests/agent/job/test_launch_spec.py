"""torchrun's arguments and environment."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest

from spotkeeper.contract.generation import JobRun, Member
from spotkeeper.train.core.settings import RunSettings
from spotkeeper_agent.core import settings
from spotkeeper_agent.job import launch_spec
from tests.agent.fakes import JOB, document


def test_commands_name_the_script_in_the_source(tmp_path: Path) -> None:
    boot = Path("/b/boot.py")
    assert launch_spec.command(boot, ("t.py", "--x"), tmp_path) == ["/b/boot.py", f"{tmp_path}/t.py", "--x"]
    assert launch_spec.command(boot, ("-m", "mod", "x"), tmp_path) == ["/b/boot.py", "-m", "mod", "x"]


def test_interface_is_named_only_where_gloo_needs_it() -> None:
    assert launch_spec.interface_of("127.0.1.9") is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # no packet is sent: it only chooses a route
        except OSError:
            pytest.skip("no route beyond the loopback")
        own = probe.getsockname()[0]
    name = launch_spec.interface_of(own)
    assert name in [name for _, name in socket.if_nameindex()]
    assert launch_spec.interface_of("203.0.113.77") is None


def test_torchrun_arguments(tmp_path: Path) -> None:

    members = tuple(Member(node, 1, str(node), "b", f"10.0.0.{node}", 4) for node in (2, 5))
    doc = document(9, 7, members, port=20007)
    run = JobRun("j", ("train.py", "--say", 'a "b" {{ c }}'), None, nproc=4, grace_s=25.5)
    node = launch_spec.LaunchSpec(
        5, 1, "10.0.0.5", tmp_path, tmp_path / "s", tmp_path / "ckpt", tmp_path / "out", late=True
    )
    args = launch_spec.torchrun_args(settings.templates_path(), doc, run, node, tmp_path / "r")
    for want in (
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=4",
        "--rdzv-backend=static",
        "--master-addr=10.0.0.2",
        "--master-port=20007",
        "--local-addr=10.0.0.5",
        "--max-restarts=0",
        "--shutdown-timeout=25",
        f"--rdzv-id={doc.run_id}",
        f"--log-dir={tmp_path}/r/logs",
    ):
        assert want in args
    assert args[-3:] == [f"{tmp_path}/train.py", "--say", 'a "b" {{ c }}']
    env = launch_spec.environment(doc, run, node, tmp_path / "r")
    assert "SPOTKEEPER_CKPT" not in env and "SPOTKEEPER_INTERVAL_S" not in env and "SPOTKEEPER_MEAN_LIFE_S" not in env
    assert (env["SPOTKEEPER_GEN"], env["SPOTKEEPER_SLOT"], env["SPOTKEEPER_JOB"]) == ("7", "5", JOB)
    assert "SPOTKEEPER_MAX_WORLD" not in env and "SPOTKEEPER_SNAPSHOTS" not in env
    assert "SPOTKEEPER_PEERS_MB_S" not in env
    assert env["SPOTKEEPER_REPLICATED"] == "1", "a sharded model is refused before it trains"
    run = msgspec.structs.replace(run, max_world=12, snapshots=True, overhead_percent=2.5, peers_mb_s=80.0)
    env = launch_spec.environment(doc, run, node, tmp_path / "r")
    assert (env["SPOTKEEPER_MAX_WORLD"], env["SPOTKEEPER_SNAPSHOTS"]) == ("12", "1")
    assert RunSettings.from_env(env).overhead == 0.025
    assert env["SPOTKEEPER_PEERS_MB_S"] == "80.0"
