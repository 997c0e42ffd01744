"""Preflight checks of clock, metadata, disk, kernel and network. Every finding of a problem names a remedy.

Constants come from this project's measurements unless their line names another source.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from email.utils import mktime_tz, parsedate_tz
from pathlib import Path

import requests

from spotkeeper.train.core import beneath
from spotkeeper_agent.cloud.metadata import CONNECT_S, MetadataError
from spotkeeper_agent.preflight.findings import Check, Finding, Level, Machine

GB = 1e9
CLOCK_WARNING_S, CLOCK_ERROR_S = 2.5, 30.0  # a Date header has whole seconds; tokens and signatures allow minutes
UNSYNCHRONIZED = 5  # adjtimex(2): TIME_ERROR
RESERVE_S = 8.0  # part of a notice: time to detect it, agree, hash and report, and a margin
PROBE_BYTES, PROBE_S = 1_000_000_000, 3.0
BLOCK = 16 << 20  # bytes per write, like the saver's
KEPT = 3  # checkpoints on disk at a time: two complete ones and one being written
LITTLE_BYTES = 10 * GB
RUN_BYTES = 64 << 20
RETRIES = 8  # tcp_retries2: 5 detects a silent peer in 13.5 s, 8 in about 100 s, the default 15 in 15 minutes
PEER_S = 4.0  # a lost SYN is sent again after 1 s, and after 3
PEER_PORT = 22  # any port, since a refused connection is an answer
NEEDS_CLOUD = "this is not a cloud machine; run the check on a machine of the stack"
NTP = "synchronise the clock: run chrony with the cloud's server metadata.google.internal, or 169.254.169.123 on EC2"


def clock(machine: Machine) -> Finding:
    """Compare the clock with the metadata server's Date header; outside a cloud ask the kernel."""
    if machine.metadata is None:
        return _kernel_clock()
    before = time.time()
    try:
        with requests.Session() as session:
            session.trust_env = False
            date = session.get(machine.metadata.url, timeout=CONNECT_S).headers.get("Date", "")
    except requests.RequestException as error:
        return Finding("clock", Level.WARNING, f"the metadata server gives no time: {type(error).__name__}", NTP)
    parsed = parsedate_tz(date)
    if parsed is None:
        return _kernel_clock()
    off_s = (before + time.time()) / 2 - (mktime_tz(parsed) + 0.5)
    words = f"the clock is off by {off_s:+.1f} s against the metadata server's"
    figures = {"off_s": round(off_s, 2)}
    if abs(off_s) <= CLOCK_WARNING_S:
        return Finding("clock", Level.OK, words, figures=figures)
    level = Level.ERROR if abs(off_s) > CLOCK_ERROR_S else Level.WARNING
    return Finding("clock", level, f"{words}: if the error grows, tokens and signatures are refused", NTP, figures)


def _kernel_clock() -> Finding:
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(256))  # modes 0: it only reads
    if state == UNSYNCHRONIZED:
        return Finding("clock", Level.WARNING, "the kernel reports that the clock is not synchronised", NTP)
    if state < 0:
        return Finding("clock", Level.SKIPPED, "the kernel does not show the clock's state; " + NEEDS_CLOUD)
    return Finding("clock", Level.OK, "synchronised, according to the kernel")


def metadata(machine: Machine) -> Finding:
    """Check that this machine can prove its identity, and that an attacker cannot read its metadata."""
    if machine.metadata is None:
        return Finding("metadata", Level.SKIPPED, NEEDS_CLOUD)
    try:
        me = machine.metadata.instance()
        machine.metadata.prove("https://preflight.invalid", "/", b"")
    except MetadataError as error:
        remedy = "on Compute Engine, give the machine a service account; on EC2, an instance profile and IMDSv2"
        return Finding("metadata", Level.ERROR, str(error), remedy)
    words = f"{me.name}, {me.zone}: this machine can prove its identity"
    if loose := machine.metadata.loose():
        return Finding("metadata", Level.WARNING, f"{words}; {loose}", "set HttpTokens=required")
    return Finding("metadata", Level.OK, words)


def bandwidth(machine: Machine) -> Finding:
    """Measure how many bytes a save can write between a preemption notice and the machine's end."""
    folder = _existing(machine.folder)
    file = folder / f".spotkeeper-preflight-{os.getpid()}"
    try:
        written, seconds = _probe(file, min(PROBE_BYTES, shutil.disk_usage(folder).free // 4))
    except OSError as error:
        return Finding("bandwidth", Level.ERROR, f"{folder}: {error.strerror}", f"make {folder} writable")
    finally:
        file.unlink(missing_ok=True)
    rate = written / seconds / GB
    in_time = max(0.0, machine.notice_s - RESERVE_S) * rate
    figures = {"gb_per_s": round(rate, 3), "gb_in_time": round(in_time, 1)}
    words = f"{rate:.2f} GB/s: a notice of {machine.notice_s:g} s suffices to save {in_time:.1f} GB on each machine"
    newest = newest_checkpoint(machine.folder)
    if newest and newest > in_time * GB:
        remedy = "use a faster disk, a longer notice or sharded state; until then a preemption loses all unsaved steps"
        found = f"{words}; the newest checkpoint has {newest / GB:.1f} GB"
        return Finding("bandwidth", Level.ERROR, found, remedy, figures)
    if in_time < 1.0:
        return Finding("bandwidth", Level.WARNING, words, "use a faster or larger disk", figures)
    return Finding("bandwidth", Level.OK, words, figures=figures)


def _probe(file: Path, most: int) -> tuple[int, float]:
    """Write for a while, past the page cache if possible; return how many bytes were durable after how many seconds."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError:
        file.unlink(missing_ok=True)
        fd = os.open(file, flags, 0o600)
    try:
        with mmap.mmap(-1, BLOCK) as block:  # page-aligned, as O_DIRECT wants it
            block.write(os.urandom(1 << 20) * (BLOCK >> 20))  # random, since some disks compress
            began, written = time.monotonic(), 0
            while written == 0 or (written + BLOCK <= most and time.monotonic() - began < PROBE_S):
                written += os.write(fd, block)
            os.fsync(fd)
            return written, max(1e-6, time.monotonic() - began)
    finally:
        os.close(fd)


def space(machine: Machine) -> Finding:
    """Check the free space for checkpoints, and the free memory in ``/run`` for agent and job."""
    folder = _existing(machine.folder)
    free = shutil.disk_usage(folder).free
    figures = {"free_gb": round(free / GB, 1)}
    newest = newest_checkpoint(machine.folder)
    run = machine.root / "run"
    if run.is_dir() and shutil.disk_usage(run).free < RUN_BYTES:
        return Finding("space", Level.ERROR, f"{run} is full", f"delete what fills {run}", figures)
    words = f"{free / GB:.1f} GB free in {folder}"
    if newest and free < newest:
        words += f"; the newest checkpoint has {newest / GB:.1f} GB, so the next one does not fit"
        return Finding(
            "space", Level.ERROR, words, "use a larger disk (`disk` of the pool), or delete files there", figures
        )
    if (newest and free < KEPT * newest) or free < LITTLE_BYTES:
        return Finding("space", Level.WARNING, words, f"use a larger disk, with room for {KEPT} checkpoints", figures)
    return Finding("space", Level.OK, words, figures=figures)


def retries(machine: Machine) -> Finding:
    """Check how soon the kernel gives up a connection to a machine that has ended without closing the connection."""
    text = machine.text("proc/sys/net/ipv4/tcp_retries2")
    if not text.isdecimal():
        return Finding(
            "tcp_retries2", Level.SKIPPED, "this kernel has no such setting; run the check on a machine of the stack"
        )
    if int(text) <= RETRIES:
        return Finding("tcp_retries2", Level.OK, f"{text}: a silent peer is detected within two minutes")
    words = f"{text}: if a machine dies silently, its peers wait in a collective for up to 15 minutes"
    return Finding("tcp_retries2", Level.WARNING, words, "sysctl -w net.ipv4.tcp_retries2=5, in the image or at boot")


def peers(machine: Machine) -> Finding:
    """Check that other machines answer. A refused connection is an answer."""
    if not machine.peers:
        return Finding("peers", Level.SKIPPED, "no other machine is named; name one of the pool with `--peer ADDRESS`")
    answered: set[str] = set()
    threads = [threading.Thread(target=_call, args=(peer, answered), daemon=True) for peer in machine.peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    silent = [peer for peer in machine.peers if peer not in answered]
    if not silent:
        return Finding("peers", Level.OK, f"{len(machine.peers)} answer")
    remedy = "let the pool's machines reach each other on all ports, by a firewall rule or a security group"
    return Finding("peers", Level.ERROR, f"no answer from {', '.join(silent)}", remedy)


def _call(peer: str, answered: set[str]) -> None:
    """Add the address ``peer`` to ``answered`` if that machine answers."""
    host, colon, port = peer.rpartition(":")
    known = colon and port.isdecimal() and int(port) < 1 << 16 and ":" not in host
    address = (host, int(port)) if known else (peer.strip("[]"), PEER_PORT)
    try:
        socket.create_connection(address, timeout=PEER_S).close()
    except ConnectionRefusedError:
        pass  # an answer
    except (OSError, UnicodeError):  # no answer, or not a valid name
        return
    answered.add(peer)


def newest_checkpoint(folder: Path) -> int:
    """Return the size in bytes of the newest complete checkpoint below ``folder``, 0 if there is none."""
    _, newest = max(_complete(folder), default=(0.0, ""))
    return sum(about.st_size for _, about in beneath.walk(folder, newest)) if newest else 0


def _complete(folder: Path) -> Iterator[tuple[float, str]]:
    """Yield (unix time of the commit, path relative to ``folder``) of each complete checkpoint.

    ``folder`` may be a folder of checkpoints, or a data disk with such a folder for each job (``<job>/ckpt``).
    """
    for name in _names(folder):
        for path in (name, *(f"{name}/ckpt/{below}" for below in _names(folder, f"{name}/ckpt"))):
            with contextlib.suppress(OSError):
                yield beneath.status(folder, f"{path}/COMMIT").st_mtime, path


def _names(folder: Path, name: str = "") -> list[str]:
    try:
        return beneath.names(folder, name)
    except OSError:
        return []


def _existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


PEERS = Check("peers", peers, 10.0, "name fewer peers")
CHECKS = (
    Check("clock", clock, 5.0, NTP, boot=True),
    Check("metadata", metadata, 10.0, "is the metadata server's address blocked by a firewall?", boot=True),
    Check("space", space, 5.0, "the disk does not answer: look at `dmesg`", boot=True),
    Check("tcp_retries2", retries, 1.0, "", boot=True),
    PEERS,
    Check("bandwidth", bandwidth, 20.0, "the disk does not finish writes: look at `dmesg`", alone=True),
)
