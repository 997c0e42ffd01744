"""Run as root before the jobs' unit starts: nothing in its cgroup reaches the machine's credentials.

A program at the cgroup's ``connect`` refuses the metadata server's addresses to everything but datagrams and port 53:
the clouds' name servers are at the same address, so DNS stays. It belongs to the cgroup and not to a user, so a
set-uid program is held by it as well; it needs neither nft nor iptables on the image, and goes with the cgroup. Where
it cannot be attached the unit does not start: a job that could speak as its machine is worse than none.

    roothelper_fence.py                the cgroup of the unit that runs this (ExecStartPre=+...)

Standard library only, one file, carried by the startup script like ``roothelper.py``. Linux 4.17, cgroup v2.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys
from pathlib import Path

# GCE and EC2: one IPv4 address; each an IPv6 address of its own.
ADDRESSES_4 = ("169.254.169.254",)
ADDRESSES_6 = ("::ffff:169.254.169.254", "fd20:ce::254", "fd00:ec2::254")
_BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH, _CGROUP_SOCK_ADDR, _ALLOW_MULTI = 5, 8, 18, 2
_CONNECT_4, _CONNECT_6 = 10, 11
# Fields of struct bpf_sock_addr, which r1 points to.
_IP4, _IP6, _PORT, _TYPE = 4, 8, 24, 32
_LOAD, _NOT_EQUAL, _EQUAL, _SET, _EXIT = 0x61, 0x56, 0x16, 0xB7, 0x95


def program(addresses: tuple[str, ...], family: socket.AddressFamily) -> bytes:
    """0 (refused) for a stream to one of these addresses, unless to port 53; 1 for all else."""
    refuse = [
        _insn(_LOAD, 2, 1, _TYPE), _insn(_EQUAL, 2, 0, 4, int(socket.SOCK_DGRAM)),
        _insn(_LOAD, 2, 1, _PORT), _insn(_EQUAL, 2, 0, 2, socket.htons(53)),
        _insn(_SET, 0, 0, 0, 0), _insn(_EXIT),
        _insn(_SET, 0, 0, 0, 1), _insn(_EXIT),
    ]  # fmt: skip
    code: list[bytes] = []
    for address in addresses:
        packed = socket.inet_pton(family, address)
        words = struct.unpack(f"={len(packed) // 4}i", packed)
        at = _IP4 if family is socket.AF_INET else _IP6
        for index, word in enumerate(words):
            behind = 2 * (len(words) - index) - 2 + len(refuse)  # from here to the next address
            code += [_insn(_LOAD, 2, 1, at + 4 * index), _insn(_NOT_EQUAL, 2, 0, behind, word)]
        code += refuse
    return b"".join([*code, _insn(_SET, 0, 0, 0, 1), _insn(_EXIT)])


def _insn(code: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0) -> bytes:
    return struct.pack("=BBhi", code, dst | src << 4, off, imm)


def raise_fence(cgroup: Path) -> None:
    """Attach both programs.

    Raises:
        OSError: with what the kernel says.
    """
    handle = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for addresses, family, hook in (
            (ADDRESSES_4, socket.AF_INET, _CONNECT_4),
            (ADDRESSES_6, socket.AF_INET6, _CONNECT_6),
        ):
            loaded = _load(program(addresses, family), hook)
            try:
                _bpf(_PROG_ATTACH, struct.pack("=IIII", handle, loaded, hook, _ALLOW_MULTI))
            finally:
                os.close(loaded)
    finally:
        os.close(handle)


def _load(code: bytes, hook: int) -> int:
    text, licence, said = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL"), bytes(16)
    # prog_type, insn_cnt, insns, license, log_level, log_size, log_buf, kern_version, flags, name, ifindex, attach type
    attr = struct.pack(
        "=IIQQIIQII16sII",
        *(_CGROUP_SOCK_ADDR, len(code) // 8, ctypes.addressof(text), ctypes.addressof(licence)),
        *(0, 0, 0, 0, 0, said, 0, hook),
    )
    return _bpf(_PROG_LOAD, attr)


def _bpf(what: int, attr: bytes) -> int:
    number = _BPF.get(platform.machine())
    if number is None:
        raise OSError(f"{platform.machine()}: no fence for this processor")
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(number, what, ctypes.create_string_buffer(attr, len(attr)), len(attr))
    if done < 0:
        raise OSError(ctypes.get_errno(), f"bpf({what}): {os.strerror(ctypes.get_errno())}")
    return int(done)


def own_cgroup() -> Path:
    """Of the unit: what systemd runs before a delegated unit's start is in a sub-group of it.

    Raises:
        OSError: this machine has no unified cgroups.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return Path("/sys/fs/cgroup") / line[3:].strip().lstrip("/").removesuffix("/.control")
    raise OSError("no unified cgroup (v2) here")


if __name__ == "__main__":
    try:
        raise_fence(own_cgroup())
    except OSError as wrong:
        sys.exit(f"spotkeeper: jobs cannot be kept from this machine's credentials, so none is started: {wrong}")
