"""Preflight's look at the machine: clock, metadata, disk, kernel, network. Every finding names its remedy.

Sources of the figures: measurements of this project unless a line says otherwise (docs/design.md).
"""

from __future__ import annotations

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

from spotkeeper.vm.metadata import CONNECT_S, MetadataError
from spotkeeper.vm.preflight import Check, Finding, Level, Place

GB = 1e9
CLOCK_WARNING_S, CLOCK_ERROR_S = 2.5, 30.0  # a Date header has whole seconds; tokens and signatures allow minutes
UNSYNCHRONIZED = 5  # adjtimex(2): TIME_ERROR
RESERVE_S = 8.0  # of a notice: detect, agree, hash, report, and a margin
PROBE_BYTES, PROBE_S = 1_000_000_000, 3.0
BLOCK = 16 << 20  # as the saver writes
KEPT = 3  # checkpoints at a time: two that are kept and one that is being written
LITTLE_BYTES = 10 * GB
RUN_BYTES = 64 << 20
RETRIES = 8  # tcp_retries2: 5 notices a silent peer in 13.5 s, 8 in about 100 s, the default 15 in 15 minutes
PEER_S = 4.0  # a lost SYN is sent again after 1 s, and after 3
PEER_PORT = 22  # any: a machine that refuses a connection is there
NEEDS_CLOUD = "no cloud machine: run it on a machine of the stack"
NTP = "synchronise the clock (chrony, with the cloud's own server: metadata.google.internal, 169.254.169.123 on EC2)"


def clock(place: Place) -> Finding:
    """Against the metadata server's Date; elsewhere what the kernel says of it."""
    if place.metadata is None:
        return _kernel_clock()
    before = time.time()
    try:
        with requests.Session() as session:
            session.trust_env = False
            date = session.get(place.metadata.url, timeout=CONNECT_S).headers.get("Date", "")
    except requests.RequestException as error:
        return Finding("clock", Level.WARNING, f"no time from the metadata server: {type(error).__name__}", NTP)
    parsed = parsedate_tz(date)
    if parsed is None:
        return _kernel_clock()
    off_s = (before + time.time()) / 2 - (mktime_tz(parsed) + 0.5)
    words = f"{off_s:+.1f} s against the metadata server"
    figures = {"off_s": round(off_s, 2)}
    if abs(off_s) <= CLOCK_WARNING_S:
        return Finding("clock", Level.OK, words, figures=figures)
    level = Level.ERROR if abs(off_s) > CLOCK_ERROR_S else Level.WARNING
    return Finding("clock", level, f"{words}: tokens and signatures are refused when it grows", NTP, figures)


def _kernel_clock() -> Finding:
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(256))  # modes 0: it only reads
    if state == UNSYNCHRONIZED:
        return Finding("clock", Level.WARNING, "the kernel says that it is not synchronised", NTP)
    if state < 0:
        return Finding("clock", Level.SKIPPED, "the kernel does not tell here; " + NEEDS_CLOUD)
    return Finding("clock", Level.OK, "synchronised, the kernel says")


def metadata(place: Place) -> Finding:
    """Who this machine is, whether it can prove it, and whether others may ask in its name."""
    if place.metadata is None:
        return Finding("metadata", Level.SKIPPED, NEEDS_CLOUD)
    try:
        me = place.metadata.instance()
        place.metadata.prove("https://preflight.invalid", "/", b"")
    except MetadataError as error:
        remedy = "give the machine a service account (Compute Engine) or an instance profile, and IMDSv2 (EC2)"
        return Finding("metadata", Level.ERROR, str(error), remedy)
    words = f"{me.name}, {me.zone}; it can prove who it is"
    if loose := place.metadata.loose():
        return Finding("metadata", Level.WARNING, f"{words}; {loose}", "require tokens: HttpTokens=required")
    return Finding("metadata", Level.OK, words)


def bandwidth(place: Place) -> Finding:
    """How much a save can bring to the disk before the machine is gone."""
    folder = _existing(place.folder)
    file = folder / f".spotkeeper-preflight-{os.getpid()}"
    try:
        written, seconds = _probe(file, min(PROBE_BYTES, shutil.disk_usage(folder).free // 4))
    except OSError as error:
        return Finding("bandwidth", Level.ERROR, f"{folder}: {error.strerror}", f"make {folder} writable")
    finally:
        file.unlink(missing_ok=True)
    rate = written / seconds / GB
    in_time = max(0.0, place.notice_s - RESERVE_S) * rate
    figures = {"gb_per_s": round(rate, 3), "gb_in_time": round(in_time, 1)}
    words = f"{rate:.2f} GB/s: a notice of {place.notice_s:g} s saves up to {in_time:.1f} GB on each machine"
    newest = newest_checkpoint(place.folder)
    if newest and newest > in_time * GB:
        remedy = "a faster disk, a longer notice, or sharded state; until then a notice loses the steps since a save"
        found = f"{words}; the newest checkpoint has {newest / GB:.1f} GB"
        return Finding("bandwidth", Level.ERROR, found, remedy, figures)
    if in_time < 1.0:
        return Finding("bandwidth", Level.WARNING, words, "a faster or larger disk (its size sets its speed)", figures)
    return Finding("bandwidth", Level.OK, words, figures=figures)


def _probe(file: Path, most: int) -> tuple[int, float]:
    """Bytes and real seconds until they are durable; past the page cache, where the file system lets us."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        fd = os.open(file, flags | os.O_DIRECT, 0o600)
    except OSError:
        file.unlink(missing_ok=True)
        fd = os.open(file, flags, 0o600)
    try:
        with mmap.mmap(-1, BLOCK) as block:  # page-aligned, as O_DIRECT wants it
            block.write(os.urandom(1 << 20) * (BLOCK >> 20))  # disks that compress are not to shine
            began, written = time.monotonic(), 0
            while written == 0 or (written + BLOCK <= most and time.monotonic() - began < PROBE_S):
                written += os.write(fd, block)
            os.fsync(fd)
            return written, max(1e-6, time.monotonic() - began)
    finally:
        os.close(fd)


def space(place: Place) -> Finding:
    """Room for checkpoints, and for what agent and job write in memory (``/run``)."""
    folder = _existing(place.folder)
    free = shutil.disk_usage(folder).free
    figures = {"free_gb": round(free / GB, 1)}
    newest = newest_checkpoint(place.folder)
    run = place.root / "run"
    if run.is_dir() and shutil.disk_usage(run).free < RUN_BYTES:
        return Finding("space", Level.ERROR, f"{run} is full", f"delete what fills {run}", figures)
    words = f"{free / GB:.1f} GB free in {folder}"
    if newest and free < newest:
        words += f"; the newest checkpoint has {newest / GB:.1f} GB, the next does not fit"
        return Finding(
            "space", Level.ERROR, words, "a larger disk (`disk` of the pool), or delete what fills it", figures
        )
    if (newest and free < KEPT * newest) or free < LITTLE_BYTES:
        return Finding("space", Level.WARNING, words, f"room for {KEPT} checkpoints: `disk` of the pool", figures)
    return Finding("space", Level.OK, words, figures=figures)


def retries(place: Place) -> Finding:
    """How long a connection to a machine that is gone without a word is believed in."""
    text = place.text("proc/sys/net/ipv4/tcp_retries2")
    if not text.isdigit():
        return Finding("tcp_retries2", Level.SKIPPED, "this system does not tell; run it on a machine of the stack")
    if int(text) <= RETRIES:
        return Finding("tcp_retries2", Level.OK, f"{text}: a silent peer is noticed within two minutes")
    words = f"{text}: where a machine dies silently, its peers wait in a collective for up to 15 minutes"
    return Finding("tcp_retries2", Level.WARNING, words, "sysctl -w net.ipv4.tcp_retries2=5, in the image or at boot")


def peers(place: Place) -> Finding:
    """Whether other machines answer; one that refuses the connection does."""
    if not place.peers:
        return Finding("peers", Level.SKIPPED, "none named: --peer ADDRESS of another machine of the pool")
    answered: set[str] = set()
    threads = [threading.Thread(target=_call, args=(peer, answered), daemon=True) for peer in place.peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    silent = [peer for peer in place.peers if peer not in answered]
    if not silent:
        return Finding("peers", Level.OK, f"{len(place.peers)} answer")
    remedy = "let the pool's machines reach each other on all ports: firewall rule, security group of its own members"
    return Finding("peers", Level.ERROR, f"no answer from {', '.join(silent)}", remedy)


def _call(peer: str, answered: set[str]) -> None:
    """Add it to those who answer, if it does."""
    host, colon, port = peer.rpartition(":")
    known = colon and port.isdecimal() and int(port) < 1 << 16 and ":" not in host
    address = (host, int(port)) if known else (peer.strip("[]"), PEER_PORT)
    try:
        socket.create_connection(address, timeout=PEER_S).close()
    except ConnectionRefusedError:
        pass  # by somebody who is there
    except (OSError, UnicodeError):  # no answer; or no name that anybody could have
        return
    answered.add(peer)


def newest_checkpoint(folder: Path) -> int:
    """Bytes of the newest complete checkpoint below, 0 where there is none."""
    found = max(_complete(folder), default=None, key=lambda path: path.stat().st_mtime)
    return sum(path.stat().st_size for path in found.parent.rglob("*") if path.is_file()) if found else 0


def _complete(folder: Path) -> Iterator[Path]:
    for pattern in ("*/COMMIT", "*/ckpt/*/COMMIT"):  # a folder of checkpoints, or a data disk
        yield from folder.glob(pattern)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


PEERS = Check("peers", peers, 10.0, "name fewer peers")
CHECKS = (
    Check("clock", clock, 5.0, NTP, boot=True),
    Check("metadata", metadata, 10.0, "is the metadata server's address blocked by a firewall?", boot=True),
    Check("space", space, 5.0, "the disk does not answer: look at `dmesg`", boot=True),
    Check("tcp_retries2", retries, 1.0, "", boot=True),
    PEERS,
    Check("bandwidth", bandwidth, 20.0, "the disk takes no data: look at `dmesg`", alone=True),
)
