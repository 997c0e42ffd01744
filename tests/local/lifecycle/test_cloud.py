"""Starting and stopping a cloud: a second up changes nothing, a kill -9 loses nothing, down leaves nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotkeeper.local.core import procs
from spotkeeper.local.core.views import VmView
from spotkeeper.local.lifecycle.cloud import LeftOver, LocalCloud, Upkeep, force_cleanup
from spotkeeper.local.lifecycle.folder import CODE, DamagedError, LocalCloudError, code_digest, running_code
from tests.local.client import SPOT, Api, eventually

ZONE = "us-central1-a"
BEAT = "while :; do date +%s.%N > $SPOTKEEPER_ROOT/var/beat; sleep 0.02; done"


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[LocalCloud]:
    cloud = LocalCloud.up(tmp_path / "cloud", scale=100)
    for zone in cloud.config.zones:
        cloud.set_capacity(zone, 4)
    yield cloud
    cloud.down(purge=True)
    assert not procs.marked(procs.mark(procs.CLOUD, cloud.config.uid))


def server_pid(cloud: LocalCloud) -> int:
    return int((cloud.folder / "server.pid").read_text().split()[0])


def keeper_pid(cloud: LocalCloud) -> int:
    return int((cloud.folder / "keeper.pid").read_text().split()[0])


def healthy(cloud: LocalCloud) -> bool:
    try:
        cloud.status()
    except LocalCloudError:
        return False
    return True


def kill_server(cloud: LocalCloud) -> None:
    old = server_pid(cloud)
    os.kill(old, 9)
    assert eventually(lambda: server_pid(cloud) != old and healthy(cloud), 20)


def test_two_ups_make_one_cloud(fresh: LocalCloud) -> None:
    again = LocalCloud.up(fresh.folder, scale=7, seed=99)
    assert fresh.fresh and not again.fresh
    assert again.config == fresh.config  # it keeps its settings
    assert LocalCloud.attach(fresh.folder).endpoint == fresh.endpoint
    assert again.clock.scale == 100


def test_an_up_that_is_interrupted_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: LocalCloud) -> None:
        assert eventually((self.folder / "server.pid").exists, 20)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LocalCloud, "_wait_healthy", interrupted)
        LocalCloud.up(tmp_path / "cloud")
    cloud = LocalCloud.attach(tmp_path / "cloud")
    assert procs.marked(procs.mark(procs.CLOUD, cloud.config.uid)) == set()


def test_attaching_without_a_cloud_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(LocalCloudError, match="spotkeeper local up"):
        LocalCloud.attach(tmp_path)
    (tmp_path / "cloud.json").write_text("{")
    with pytest.raises(DamagedError, match=r"cloud\.json: .*; end the cloud: spotkeeper local down --force --folder"):
        LocalCloud.attach(tmp_path)
    assert force_cleanup(tmp_path) == LeftOver(0, 0, 0) and not tmp_path.exists()


@pytest.mark.parametrize(("setting", "says"), [({"scale": 0}, "scale"), ({"market": "none"}, "market")])
def test_a_wrong_setting_starts_nothing(tmp_path: Path, setting: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LocalCloud.up(tmp_path / "bad", **setting)  # type: ignore[arg-type]
    assert not (tmp_path / "bad/cloud.json").exists()


def test_a_control_plane_killed_at_any_moment_loses_nothing(fresh: LocalCloud) -> None:
    api = Api.of(fresh)
    api.ok(api.vm("steady", script=BEAT, scheduling=SPOT))
    vm = fresh.status().vms[0]
    beat = Path(vm.root) / "var/beat"
    assert eventually(beat.exists)
    insert = api.vm("half-made", scheduling=SPOT)  # killed while it is PENDING
    api.ok(api.post(f"zones/{ZONE}/disks", {"name": "kept", "sizeGb": "10"}))
    os.kill(keeper_pid(fresh), 19)  # stopped, so that the outage lasts long enough to be seen
    os.kill(server_pid(fresh), 9)
    time.sleep(0.1)
    before = beat.read_text()
    assert eventually(lambda: beat.read_text() not in ("", before)), "the VM stopped with the control plane"
    old = server_pid(fresh)
    os.kill(keeper_pid(fresh), 18)
    assert eventually(lambda: server_pid(fresh) != old and healthy(fresh), 20)
    api.ok(insert)
    statuses = {vm.name: (vm.status, vm.id) for vm in fresh.status().vms}
    assert statuses["steady"] == ("RUNNING", vm.id) and statuses["half-made"][0] == "RUNNING"
    assert api.exists(f"zones/{ZONE}/disks/kept")
    fresh.preempt("steady")  # a running notice survives too
    kill_server(fresh)
    assert api.gone(f"zones/{ZONE}/instances/steady")
    assert not procs.marked(procs.mark(procs.VM, f"{fresh.config.uid}-{vm.id}"))


def test_a_vm_that_died_during_an_outage_is_found_dead(fresh: LocalCloud) -> None:
    api = Api.of(fresh)
    api.ok(api.vm("unseen", script=BEAT, scheduling=SPOT))
    assert eventually(lambda: fresh.status().vms[0].pid > 0)
    vm = fresh.status().vms[0]
    os.kill(keeper_pid(fresh), 19)
    os.kill(server_pid(fresh), 9)
    procs.kill_all(procs.mark(procs.VM, f"{fresh.config.uid}-{vm.id}"))
    os.kill(keeper_pid(fresh), 18)
    assert api_gone_after_restart(fresh, api)


def api_gone_after_restart(cloud: LocalCloud, api: Api) -> bool:
    assert eventually(lambda: healthy(cloud), 20)
    return api.gone(f"zones/{ZONE}/instances/unseen")


def test_a_killed_keeper_is_replaced_by_up(fresh: LocalCloud) -> None:
    server = server_pid(fresh)
    os.kill(keeper_pid(fresh), 9)
    assert eventually(lambda: fresh.upkeep is Upkeep.UNWATCHED)  # a kill takes effect a moment later
    assert healthy(fresh)
    LocalCloud.up(fresh.folder)
    assert server_pid(fresh) == server  # adopted, not doubled
    kill_server(fresh)


def test_up_after_an_update_restarts_the_control_plane_only(fresh: LocalCloud) -> None:
    """Otherwise a function of the new code would run beside a control plane of the old code."""
    server = server_pid(fresh)
    (fresh.folder / CODE).write_text("of another day")
    LocalCloud.up(fresh.folder)
    assert server_pid(fresh) != server
    assert healthy(fresh)
    assert running_code(fresh.folder) == code_digest()
    again = server_pid(fresh)
    LocalCloud.up(fresh.folder)
    assert server_pid(fresh) == again


def test_a_damaged_database_does_not_block_the_cleanup(tmp_path: Path) -> None:
    cloud = LocalCloud.up(tmp_path / "cloud", scale=100)
    cloud.down()
    (cloud.folder / "state.sqlite").write_bytes(b"no book at all " * 300)
    with pytest.raises(LocalCloudError, match="down --force"):
        cloud.down()
    assert cloud.down(purge=True).vms == 0
    assert not cloud.folder.exists()


@pytest.mark.parametrize("harm", ["damaged", "gone", "damaged, and only its VM lives"])
def test_force_cleanup_ends_only_its_cloud(fresh: LocalCloud, harm: str) -> None:
    """Removing the folder instead would leave all processes."""
    api = Api.of(fresh)
    beating(fresh, api)
    reader = subprocess.Popen(["sh", "-c", "read _", str(fresh.folder)], stdin=subprocess.PIPE)
    try:
        if "only its VM" in harm:
            kill_both(fresh)
        if harm == "gone":
            (fresh.folder / "cloud.json").unlink()
        else:
            (fresh.folder / "cloud.json").write_bytes(b'{"uid": 7')
        with pytest.raises(DamagedError, match="down --force"):
            LocalCloud.attach(fresh.folder)
        assert force_cleanup(fresh.folder).processes > 0
        assert procs.marked(procs.mark(procs.CLOUD, fresh.config.uid)) == set()
        assert not fresh.folder.exists() and reader.poll() is None
    finally:
        fresh.folder.mkdir(exist_ok=True)  # the fixture ends the cloud once more
        reader.kill()
        reader.wait()


def kill_both(cloud: LocalCloud) -> None:
    os.kill(keeper_pid(cloud), 9)
    os.kill(server_pid(cloud), 9)
    assert eventually(lambda: cloud.upkeep is Upkeep.STOPPED)


def beating(cloud: LocalCloud, api: Api) -> tuple[VmView, Path]:
    api.ok(api.vm("steady", script=BEAT, scheduling=SPOT))
    vm = cloud.status().vms[0]
    beat = Path(vm.root) / "var/beat"
    assert eventually(beat.exists)
    return vm, beat


def test_keeper_and_control_plane_killed_together_lose_no_vm_and_up_finds_them_again(fresh: LocalCloud) -> None:
    api = Api.of(fresh)
    vm, beat = beating(fresh, api)
    api.ok(api.post(f"zones/{ZONE}/disks", {"name": "kept", "sizeGb": "10"}))
    assert fresh.upkeep is Upkeep.WHOLE
    processes = procs.marked(procs.mark(procs.VM, f"{fresh.config.uid}-{vm.id}"))
    kill_both(fresh)
    before = beat.read_text()
    assert eventually(lambda: beat.read_text() not in ("", before)), "the VM goes on"
    again = LocalCloud.up(fresh.folder)
    assert again.fresh and again.upkeep is Upkeep.WHOLE and again.config == fresh.config
    found = again.status().vms[0]
    assert (found.name, found.id, found.status, found.pid) == ("steady", vm.id, "RUNNING", vm.pid)
    assert processes & procs.marked(procs.mark(procs.VM, f"{fresh.config.uid}-{vm.id}"))
    assert api.exists(f"zones/{ZONE}/disks/kept")


def test_an_interrupted_repairing_up_ends_no_vm(fresh: LocalCloud, monkeypatch: pytest.MonkeyPatch) -> None:
    vm, beat = beating(fresh, Api.of(fresh))
    kill_both(fresh)

    def interrupted(self: LocalCloud) -> None:
        assert eventually(lambda: self.upkeep is Upkeep.WHOLE, 20)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(LocalCloud, "_wait_healthy", interrupted)
        LocalCloud.up(fresh.folder)
    before = beat.read_text()
    assert eventually(lambda: beat.read_text() not in ("", before)), "the VM was there before, and goes on"
    assert LocalCloud.up(fresh.folder).status().vms[0].id == vm.id


def test_a_reused_pid_is_not_taken_for_the_old_process(fresh: LocalCloud) -> None:
    left = fresh.down()
    assert (left.vms, left.processes) == (0, 0)
    (fresh.folder / "keeper.pid").write_text(f"{os.getpid()} 12345\n")
    again = LocalCloud.up(fresh.folder)  # would say "it runs" if it believed the pid
    assert again.fresh and healthy(again)
    (fresh.folder / "keeper.pid").write_text(f"{os.getpid()} 12345\n")
    again.down()  # would kill this very test


def test_a_purge_that_is_killed_leaves_no_half_of_a_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(folder: Path, **how: bool) -> None:
        if folder.exists():
            raise KeyboardInterrupt

    first = LocalCloud.up(tmp_path / "cloud", scale=100)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        first.down(purge=True)
    assert not first.folder.exists(), "nobody takes what is left for a cloud"
    second = LocalCloud.up(first.folder, scale=100)
    assert second.config.uid != first.config.uid
    second.down(purge=True)
    assert list(tmp_path.iterdir()) == []


def test_down_ends_every_vm_and_reports_the_counts(fresh: LocalCloud) -> None:
    api = Api.of(fresh)
    hide = "setsid --fork sleep 5432; sleep 1000"
    api.ok(api.vm("left", script=hide, scheduling=SPOT))

    def at_work() -> int:
        """Ignores the short-lived shells that start it."""
        pids = procs.marked(procs.mark(procs.CLOUD, fresh.config.uid))
        return sum(procs.arguments(pid)[:1] == ["sleep"] for pid in pids)

    assert eventually(lambda: at_work() == 2)
    left = fresh.down()
    assert left.vms == 1 and left.disks == 1 and left.processes >= 3 and left
    assert not procs.marked(procs.mark(procs.CLOUD, fresh.config.uid))
    assert not healthy(fresh)


def test_two_clouds_do_not_affect_each_other(fresh: LocalCloud, tmp_path: Path) -> None:
    other = LocalCloud.up(tmp_path / "other", scale=100)
    try:
        for cloud in (fresh, other):
            cloud.set_capacity(ZONE, 4)
            api = Api.of(cloud)
            api.ok(api.vm("same-name", scheduling=SPOT))
        assert other.endpoint != fresh.endpoint
        assert len(fresh.status().vms) == len(other.status().vms) == 1
    finally:
        other.down(purge=True)
    assert fresh.status().vms[0].status == "RUNNING"


def test_an_idle_cloud_uses_no_processor_time(fresh: LocalCloud) -> None:
    api = Api.of(fresh)
    api.ok(api.vm("quiet", scheduling=SPOT))
    pids = procs.marked(procs.mark(procs.CLOUD, fresh.config.uid))
    time.sleep(0.5)
    before, began = sum(map(cpu_s, pids)), time.monotonic()
    time.sleep(2.0)
    share = (sum(map(cpu_s, pids)) - before) / (time.monotonic() - began)
    assert share < 0.02, f"{share:.1%} of a core for a cloud in which nothing happens"


def cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
