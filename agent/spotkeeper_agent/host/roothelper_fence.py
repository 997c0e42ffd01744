"""Fences the metadata server off from jobs and people; runs as root early in a boot.

A BPF program runs at every ``connect`` on the machine. It refuses connections to the metadata server's addresses for
the jobs' user and for all user ids above 999: people's ids, and ids that a job's container can use. The program reads
the user id of the initial user namespace, so a process cannot evade it by another cgroup, by a unit that systemd starts
for it, or by its own user namespace. Datagrams and port 53 pass, because the clouds' name servers have the same
address. The program needs neither nft nor iptables. If it cannot be attached, the jobs' unit does not start: a job must
never be able to act as its machine.

    roothelper_fence.py AGENT JOBS     the names of the two users (spotkeeper-fence.service)

Standard library only, one file, carried by the startup script like ``roothelper.py``. Linux 5.1, cgroup v2.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys
from pathlib import Path

# GCE and EC2 share one IPv4 address; each has its own IPv6 address.
ADDRESSES_4 = ("169.254.169.254",)
ADDRESSES_6 = ("::ffff:169.254.169.254", "fd20:ce::254", "fd00:ec2::254")
CGROUPS = Path("/sys/fs/cgroup")
SYSTEM_UID_MAX = 999  # as in systemd and Debian; accounts above it belong to people
_BPF = {"x86_64": 321, "aarch64": 280}
_PROG_LOAD, _PROG_ATTACH, _CGROUP_SOCK_ADDR, _ALLOW_MULTI = 5, 8, 18, 2
_CONNECT_4, _CONNECT_6 = 10, 11
# Fields of struct bpf_sock_addr, which r6 points to.
_IP4, _IP6, _PORT, _TYPE = 4, 8, 24, 32
_LOAD, _NOT_EQUAL, _EQUAL, _ABOVE, _SET, _EXIT = 0x61, 0x56, 0x16, 0x26, 0xB7, 0x95
_COPY, _CALL, _UID_GID = 0xBF, 0x85, 15


def program(addresses: tuple[str, ...], family: socket.AddressFamily, agent: int, jobs: int) -> bytes:
    """Return BPF code that returns 0 (refuse) for a stream of a fenced user to one of these addresses, otherwise 1.

    Fenced are the user id ``jobs`` and all ids above 999, except for ``agent``: a machine's image can give the agent's
    account such an id.
    """
    refuse = [
        _insn(_LOAD, 2, 6, _TYPE), _insn(_EQUAL, 2, 0, 4, int(socket.SOCK_DGRAM)),
        _insn(_LOAD, 2, 6, _PORT), _insn(_EQUAL, 2, 0, 2, socket.htons(53)),
        _insn(_SET, 0, 0, 0, 0), _insn(_EXIT),
        _insn(_SET, 0, 0, 0, 1), _insn(_EXIT),
    ]  # fmt: skip
    code = [
        _insn(_COPY, 6, 1), _insn(_CALL, imm=_UID_GID),
        _insn(_EQUAL, 0, 0, 2, agent), _insn(_EQUAL, 0, 0, 3, jobs), _insn(_ABOVE, 0, 0, 2, SYSTEM_UID_MAX),
        _insn(_SET, 0, 0, 0, 1), _insn(_EXIT),
    ]  # fmt: skip
    for address in addresses:
        packed = socket.inet_pton(family, address)
        words = struct.unpack(f"={len(packed) // 4}i", packed)
        at = _IP4 if family is socket.AF_INET else _IP6
        for index, word in enumerate(words):
            behind = 2 * (len(words) - index) - 2 + len(refuse)  # from here to the next address
            code += [_insn(_LOAD, 2, 6, at + 4 * index), _insn(_NOT_EQUAL, 2, 0, behind, word)]
        code += refuse
    return b"".join([*code, _insn(_SET, 0, 0, 0, 1), _insn(_EXIT)])


def _insn(code: int, dst: int = 0, src: int = 0, off: int = 0, imm: int = 0) -> bytes:
    return struct.pack("=BBhi", code, dst | src << 4, off, imm)


def raise_fence(cgroup: Path, agent: int, jobs: int) -> None:
    """Attach BPF programs for IPv4 and IPv6 to ``cgroup`` and all below it. Call it once: each call adds programs.

    Raises:
        OSError: a processor that the fence does not support, or the kernel refuses the programs.
    """
    handle = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for addresses, family, hook in (
            (ADDRESSES_4, socket.AF_INET, _CONNECT_4),
            (ADDRESSES_6, socket.AF_INET6, _CONNECT_6),
        ):
            loaded = _load(program(addresses, family, agent, jobs), hook)
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
        raise OSError(f"{platform.machine()}: the fence does not support this processor")
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.syscall(number, what, ctypes.create_string_buffer(attr, len(attr)), len(attr))
    if done < 0:
        raise OSError(ctypes.get_errno(), f"bpf({what}): {os.strerror(ctypes.get_errno())}")
    return int(done)


def main(argv: list[str]) -> None:
    """Attach the fence. ``argv``: the names of the agent's user and the jobs' user.

    Raises:
        OSError: no cgroup v2, a processor that the fence does not support, or the kernel refuses the BPF programs.
        KeyError: a user does not exist.
    """
    import pwd

    if not (CGROUPS / "cgroup.controllers").exists():
        raise OSError("this machine has no unified cgroups (v2)")
    agent, jobs = (pwd.getpwnam(name).pw_uid for name in argv)
    raise_fence(CGROUPS, agent, jobs)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, KeyError) as wrong:
        sys.exit(f"spotkeeper: the metadata server cannot be fenced off, so no job is started here: {wrong}")
