"""The workers' spool: whole lines, stamped, without secrets, bounded in rate and size; what is missing is said."""

from __future__ import annotations

import os
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotkeeper_agent.launcher import spool
from spotkeeper_agent.launcher.spool import Spool, hide
from tests.agent.chunks import unpacked
from tests.module_time import replace_time


def lines(folder: Path) -> list[str]:
    """The spool's lines without their times, in the order of the files' names."""
    text = b"".join(unpacked(path.read_bytes()) for path in sorted(folder.glob("*.gz")))
    found = text.decode(errors="replace").split("\n")
    assert found.pop() == "", "whole lines"
    assert all(re.match(r"\d{13} ", line) for line in found)
    return [line[14:] for line in found]


def test_a_line_has_its_time_its_rank_and_its_stream(tmp_path: Path) -> None:
    one = Spool(tmp_path, b"3", [])
    began = int(time.time() * 1000)
    one.add(b"o", b"step 1\nst")
    one.add(b"e", b"trouble\n")
    one.add(b"o", b"ep 2\n\nloading")
    one.end()
    assert lines(tmp_path) == ["3o step 1", "3e trouble", "3o step 2", "3o ", "3o loading"]
    (file,) = tmp_path.glob("*.gz")
    stamps = [int(line[:13]) for line in unpacked(file.read_bytes()).splitlines()]
    assert all(began <= stamp <= time.time() * 1000 for stamp in stamps) and stamps == sorted(stamps)


def test_each_state_of_a_progress_bar_is_a_line(tmp_path: Path) -> None:
    one = Spool(tmp_path, b"0", [])
    for piece in (b"\r 1%", b"\r 2%\r", b"\n", b"done\r\n", b"of 8\r", b"of 9\r"):
        one.add(b"o", piece)
    one.end()
    assert lines(tmp_path) == ["0o ", "0o  1%", "0o  2%", "0o done", "0o of 8", "0o of 9"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=8), st.integers(0, 60))
def test_a_secret_is_hidden_however_the_output_is_cut(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], before: int
) -> None:
    folder = tmp_path_factory.mktemp("spool")
    one = Spool(folder, b"0", ["correct horse", "horse"])
    text = b"x" * before + b" correct horse battery\n" * 3 + b"at the end: correct horse"
    at = 0
    for cut in (*cuts, len(text)):
        one.add(b"o", text[at : at + cut])
        at += cut
    one.end()
    assert "horse" not in "\n".join(lines(folder))
    assert "\n".join(lines(folder)).count("*************") == 4


def test_a_line_without_an_end_is_cut_and_its_secrets_are_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "LINE_BYTES", 100)
    one = Spool(tmp_path, b"0", ["a secret value"])
    text = b"some words, a secret value; " * 40
    for at in range(0, len(text), 7):  # so that the end of a piece cuts a secret
        one.add(b"o", text[at : at + 7])
    one.end()
    found = lines(tmp_path)
    assert len(found) > 5 and max(map(len, found)) < 200
    assert "".join(line.removeprefix("0o ") for line in found) == "some words, **************; " * 40


def test_output_beyond_the_rate_is_counted_and_said_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    replace_time(monkeypatch, spool, monotonic=lambda: now)
    one, other = Spool(tmp_path, b"0", []), Spool(tmp_path, b"1", [])
    printed = 0
    for number in range(400):  # 26 MB at once
        one.add(b"o", (b"%07d\n" % number) * 8192)
        printed += 8192
    one.add(b"o", b"a line that is dropped ")
    other.add(b"o", b"the neighbour has the same rate\n")
    now += 10.0
    one.add(b"o", b"as a whole\nlater\n")
    other.add(b"o", b"later\n")
    one.end()
    other.end()
    found = lines(tmp_path)
    gap = [re.fullmatch(r"n ([\d.]+) (KB|MB) \((\d+) lines\) left out here: more than 2 MB/s", line) for line in found]
    (of_one,) = [each for each in gap if each and each[2] == "MB"]
    kept = sum(re.fullmatch(r"0o \d{7}", line) is not None for line in found)
    assert kept + int(of_one[3]) == printed + 1, "each line is there or counted, also the half one"
    assert kept * 8 >= spool.RATE * spool.BURST_S
    assert "1o later" in found and not any("neighbour" in line for line in found)
    assert found.index("0o later") == found.index(next(each[0] for each in gap if each)) + 1


def test_a_line_after_one_that_was_dropped_whole_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, refusals = Spool(tmp_path, b"0", []), iter((spool.TOO_FAST, spool.TOO_FAST, "", ""))
    monkeypatch.setattr(one, "_refusal", lambda _: next(refusals))
    for piece in (b"dropped ", b"to its end\n", b"the next\n", b"and one more\n"):
        one.add(b"o", piece)
    one.end()
    assert lines(tmp_path) == ["n 19 bytes (1 lines) left out here: more than 2 MB/s", "0o the next", "0o and one more"]


def test_a_node_that_prints_two_megabytes_a_second_has_a_complete_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    replace_time(monkeypatch, spool, monotonic=lambda: now)
    monkeypatch.setattr(spool, "SPOOL_BYTES", 1 << 30)
    workers = [Spool(tmp_path, b"%d" % rank, []) for rank in range(4)]
    for _ in range(600):  # a minute
        now += 0.1
        for one in workers:
            one.add(b"o", b"x" * 49_999 + b"\n")
    for one in workers:
        one.end()
    assert len(lines(tmp_path)) == 2400


@pytest.mark.parametrize("content", [b"", b"short", struct.pack("d", float("nan")), struct.pack("d", 1e300), b"x" * 99])
def test_a_damaged_rate_stops_no_log(tmp_path: Path, content: bytes) -> None:
    (tmp_path / spool.RATE_FILE).write_bytes(content)
    one = Spool(tmp_path, b"0", [])
    one.add(b"o", b"line\n")
    one.end()
    assert lines(tmp_path) == ["0o line"]


def test_a_rate_that_cannot_be_written_loses_whole_lines_and_says_so(tmp_path: Path) -> None:
    rate = tmp_path / spool.RATE_FILE
    rate.symlink_to("/dev/full")
    one = Spool(tmp_path, b"0", [])
    for piece in (b"lost\n", b"lost "):
        one.add(b"o", piece)
    one._rate._file = os.open("/dev/zero", os.O_RDWR)  # a block is free again
    one.add(b"o", b"too\nhere\n")
    one.end()
    assert lines(tmp_path) == ["n 14 bytes (2 lines) left out here: the disk with the spool is full", "0o here"]


@pytest.mark.parametrize("full", ["bytes", "files", "disk", "gone"])
def test_a_full_spool_loses_lines_and_says_so_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    one = Spool(folder, b"0", [])
    with monkeypatch.context() as patch:
        if full == "gone":
            folder.rename(tmp_path / "elsewhere")
        elif full == "disk":
            patch.setattr(spool, "has_room", lambda _: False)
        else:
            patch.setattr(spool, f"SPOOL_{full.upper()}", 0)
        for _ in range(2):
            one.add(b"o", b"lost\n")
            one.end()
    if full == "gone":
        (tmp_path / "elsewhere").rename(folder)
    one.add(b"o", b"here\n")
    one.end()
    assert lines(folder) == ["n 10 bytes (2 lines) left out here: the disk with the spool is full", "0o here"]


def test_lines_are_written_within_a_second_and_unfinished_ones_after_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    replace_time(monkeypatch, spool, monotonic=lambda: now)
    one = Spool(tmp_path, b"0", [])
    assert one.wait_s() is None
    one.add(b"o", b"line\nwait ...")
    assert one.wait_s() == spool.FLUSH_S
    now += spool.FLUSH_S
    one.tick()
    assert lines(tmp_path) == ["0o line"]
    assert one.wait_s() == spool.IDLE_S - spool.FLUSH_S, "from its last byte"
    now += spool.IDLE_S
    one.tick()
    now += spool.FLUSH_S
    one.tick()
    assert lines(tmp_path)[1:] == ["0o wait ..."] and one.wait_s() is None
    monkeypatch.setattr(one, "_refusal", lambda _: spool.TOO_FAST)
    one.add(b"o", b"dropped\n")
    assert one.wait_s() == spool.FLUSH_S, "a note is due as a line is"


def test_a_worker_without_a_spool_keeps_the_end_of_its_log(tmp_path: Path) -> None:
    assert Spool.of({}, before="") is None
    assert Spool.of({spool.FOLDER: str(tmp_path / "missing")}, before="") is None


def test_secrets_of_several_lines_are_hidden_line_by_line(tmp_path: Path) -> None:
    environ = {spool.FOLDER: str(tmp_path), spool.SECRETS: "KEY SHORT GONE", "KEY": "-----\nabcdef\n", "SHORT": "abc"}
    one: Any = Spool.of(environ, before="")
    one.add(b"o", b"KEY=abcdef abc\n-----\n")
    one.end()
    assert lines(tmp_path) == ["0o KEY=****** abc", "0o *****"]
    assert hide(b"1 abc: lines of it, two", spool.lines_of(["", "1", "abc", "two\nlines of it"])) == (
        b"1 abc: ***********, two"
    )


def test_a_secret_within_another_does_not_show_the_rest_of_it() -> None:
    assert hide(b"correct horse, horse", ["horse", "correct horse"]) == b"*************, *****"


def test_names_of_files_sort_by_time_and_appear_at_once(tmp_path: Path) -> None:
    one = Spool(tmp_path, b"12", [])
    for _ in range(12):
        one.add(b"o", b"line\n")
        one.end()
    names = sorted(path.name for path in tmp_path.glob("*.gz"))
    assert len(names) == 12 and all(re.fullmatch(rf"\d{{13}}-12-{os.getpid()}-\d+\.gz", name) for name in names)
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_the_agent_takes_meanwhile_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent empties the folder while workers measure it; they would drop a second of output each time."""
    one = Spool(tmp_path, b"0", [])
    one.add(b"o", b"first\n")
    one.end()
    (first,) = tmp_path.glob("*.gz")
    listed = os.scandir

    class Scanned:
        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            with listed(tmp_path) as entries:
                found = list(entries)
            first.unlink()
            return iter(found)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", lambda _: Scanned())
    one.add(b"o", b"second\n")
    one.end()
    monkeypatch.undo()
    assert lines(tmp_path) == ["0o second"]


def test_a_secret_longer_than_a_line_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "LINE_BYTES", 20)
    one = Spool(tmp_path, b"0", ["0123456789" * 4])
    for piece in (b"key: 0123456789012345678901", b"234567890123456789 and more\n"):
        one.add(b"o", piece)
    one.end()
    assert not re.search(r"\d", "".join(line.removeprefix("0o ") for line in lines(tmp_path)))
