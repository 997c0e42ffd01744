"""What runs as root does four things, for one user, and refuses everything else."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from pathlib import Path

import pytest

from spotkeeper_agent.host import roothelper, roothelper_fence, systemd
from spotkeeper_agent.host.roothelper import RefusedError, RootHelper

AGENT = 4711


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Every program that it would run; none is."""
    done: list[tuple[str, ...]] = []
    monkeypatch.setattr(roothelper, "command", lambda why, *argv: done.append(argv))
    return done


@pytest.fixture
def helper(tmp_path: Path) -> RootHelper:
    (tmp_path / "by-id").mkdir()
    return RootHelper(AGENT, AGENT, tmp_path / "by-id", tmp_path / "mnt")


WRONG = [
    b"", b"{}", b"[]", b"null", b"7", b'"mount"', b"{", b"\xff\xfe", b'{"op": "mount"', b'{"op": null}', b'{"op": []}',
    b'{"op": "umount"}', b'{"op": "Mount", "disk": "google-sk-data"}', b'{"op": "mount"}', b'{"op": "shell"}',
    b'{"op": "power-off", "disk": "google-sk-data"}', b'{"op": "unmount", "force": true}', b'[["op", "unmount"]]',
    b'{"op": "restart-jobs", "unit": "ssh.service"}',
    b'{"op": "unmount", "op": "power-off"}', b'{"op": "mount", "disk": "google-sk-data", "point": "/etc"}',
    b'{"op": "scratch", "job": "abcd2345"}', b'{"op": "scratch", "job": "../../etc", "gb": "1"}',
    b'{"op": "scratch", "job": "abcd2345", "gb": "0"}', b'{"op": "scratch", "job": "abcd2345", "gb": "1\\n"}',
    b'{"op": "scratch", "job": "abcd2345", "gb": 1}', b'{"op": "scratch", "job": "abcd2345", "gb": "100000"}',
    b"[" * 400, b'{"op": {"op": "unmount"}}', '{"op": "unmount\u00df"}'.encode(),
]  # fmt: skip
WRONG_DISKS: list[object] = [
    "", ".", "..", "/dev/sda", "../../sda", "google-", "google-../sda", "google-a/b", "google-sk-data\n",
    "google-sk-data ", "google-SK", "google-a-", "google--", "google-1", "google-" + "a" * 64, "scsi-0Google",
    "google-a\0", "-o", "wwn-0x5", "nvme-Amazon_Elastic_Block_Store_vol",
    "nvme-Amazon_Elastic_Block_Store_vol0g12345678",
    "nvme-Amazon_Elastic_Block_Store_vol01234567/..", "google-$(id)", "google-`id`", "google-a;b", None, 7, True,
    ["google-sk-data"], {"disk": "google-sk-data"},
]  # fmt: skip


@pytest.mark.parametrize("packet", WRONG)
def test_invalid_requests_are_refused(helper: RootHelper, done: list[tuple[str, ...]], packet: bytes) -> None:
    answer = helper.answer(AGENT, packet)
    assert (answer["ok"], answer["why"]) == (False, "request")
    assert done == []


@pytest.mark.parametrize("disk", WRONG_DISKS)
def test_only_a_data_disk_is_accepted(helper: RootHelper, done: list[tuple[str, ...]], disk: object) -> None:
    answer = helper.answer(AGENT, json.dumps({"op": "mount", "disk": disk}).encode())
    assert (answer["ok"], answer["why"]) == (False, "request")
    assert done == []


@pytest.mark.parametrize("peer", [1, AGENT - 1, AGENT + 1, 65534, -1])
def test_only_the_agent_is_served(helper: RootHelper, done: list[tuple[str, ...]], peer: int) -> None:
    assert helper.answer(peer, b'{"op": "power-off"}')["error"] == f"user {peer} is not served"
    assert done == []


def test_a_power_off_request_powers_the_machine_off(helper: RootHelper, done: list[tuple[str, ...]]) -> None:
    assert helper.answer(AGENT, b'{"op": "power-off"}') == {"ok": True}
    assert done == [("systemctl", "poweroff", "--no-block")]


def test_only_the_jobs_unit_is_restarted(helper: RootHelper, done: list[tuple[str, ...]]) -> None:
    assert helper.answer(AGENT, b'{"op": "restart-jobs"}') == {"ok": True}
    assert done == [("systemctl", "restart", "--no-block", "spotkeeper-job.service")]


def test_unmounting_without_a_mounted_disk_succeeds(helper: RootHelper, done: list[tuple[str, ...]]) -> None:
    assert helper.answer(AGENT, b'{"op": "unmount"}') == {"ok": True}
    assert done == []


@pytest.mark.parametrize("kind", ["nothing", "a file", "a folder", "a character device"])
def test_only_a_block_device_is_accepted(
    helper: RootHelper, done: list[tuple[str, ...]], tmp_path: Path, kind: str
) -> None:
    """An id is a link that udev made: what it leads to is looked at, not what it is called."""
    target = {"a file": tmp_path / "file", "a folder": tmp_path, "a character device": Path("/dev/null")}
    (tmp_path / "file").write_text("")
    (helper.by_id / "google-sk-data").symlink_to(target.get(kind, tmp_path / "none"))
    answer = helper.answer(AGENT, b'{"op": "mount", "disk": "google-sk-data"}')
    assert (answer["ok"], answer["why"]) == (False, "missing")
    assert done == []


def test_a_disk_that_is_mounted_elsewhere_is_not_touched(
    helper: RootHelper, done: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The boot disk, above all."""
    monkeypatch.setattr(RootHelper, "_device", lambda *_: Path("/"))
    monkeypatch.setattr(roothelper, "_mounted_at", lambda _: ["/"])
    answer = helper.answer(AGENT, b'{"op": "mount", "disk": "google-sk-data"}')
    assert answer == {"ok": False, "why": "foreign", "error": "google-sk-data: the disk is mounted at /"}
    assert done == []


def test_a_link_is_not_mounted_over(
    helper: RootHelper, done: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RootHelper, "_device", lambda *_: Path("/dev/null"))
    helper.point.symlink_to("/etc")
    answer = helper.answer(AGENT, b'{"op": "mount", "disk": "google-sk-data"}')
    assert (answer["ok"], answer["why"]) == (False, "mount")
    assert done == []


def test_requests_arrive_through_the_socket(helper: RootHelper, done: list[tuple[str, ...]], tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listener = roothelper.listen(path, os.geteuid())
    assert path.stat().st_mode & 0o777 == 0o600
    ours = RootHelper(os.geteuid(), os.getegid(), helper.by_id, helper.point)

    def serve(times: int) -> None:
        for _ in range(times):
            roothelper.serve_one(ours, listener)

    thread = threading.Thread(target=serve, args=(3,))
    thread.start()
    systemd.request_root("power-off", at=path)
    with pytest.raises(RefusedError, match="is not the id of a data disk") as error:
        systemd.request_root("mount", at=path, disk="/dev/sda")
    assert error.value.why == "request"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(path))
        sock.send(b'{"op": "power-off"}'.ljust(roothelper.REQUEST_BYTES + 1))
        assert json.loads(sock.recv(4096))["ok"] is False, "too long, though it would make sense"
    thread.join(10)
    listener.close()
    assert done == [("systemctl", "poweroff", "--no-block")]
    with pytest.raises(RefusedError, match="does not answer"):
        systemd.request_root("unmount", at=path)


def test_the_fence_names_each_address_and_spares_name_servers() -> None:
    """Every jump of the programs lands inside: the kernel checks the rest when it takes them (test_systemd.py)."""
    for addresses, family in (
        (roothelper_fence.ADDRESSES_4, socket.AF_INET), (roothelper_fence.ADDRESSES_6, socket.AF_INET6),
    ):  # fmt: skip
        code = roothelper_fence.program(addresses, family, 990, 991)
        count = len(code) // 8
        for index in range(count):
            operation, offset = code[8 * index], int.from_bytes(code[8 * index + 2 : 8 * index + 4], "little")
            if operation in (0x56, 0x16, 0x26):
                assert index + 1 + offset < count
        for address in addresses:
            packed = socket.inet_pton(family, address)
            assert all(packed[at : at + 4] in code for at in range(0, len(packed), 4))


def test_root_code_imports_only_the_standard_library() -> None:
    for module in (roothelper, roothelper_fence):
        imports = re.findall(r"(?m)^ *(?:from|import) (\w+)", Path(str(module.__file__)).read_text())
        assert imports and set(imports) <= sys.stdlib_module_names
