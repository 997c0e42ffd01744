"""Stored logs as text: each line printed once, and a note where lines are left out."""

from __future__ import annotations

from spotkeeper.client.logs import News, added
from spotkeeper.contract.uploads import LogPart, join_log
from tests.cli.records import HEAD, stdout


def test_each_line_of_a_growing_log_is_printed_once() -> None:
    assert added("", "abc") == "abc"
    assert added("abc", "abcdef") == "def"
    lines = "".join(f"step {n}\n" for n in range(1000))
    assert added(lines, lines[500:] + "new\n") == "new\n"
    assert added("abc", "xyz") == "... a part of the log is left out\nxyz"


def test_only_new_lines_of_several_files_are_printed() -> None:
    warned = LogPart("node 0 (x) stderr", b"warning\n", 0, "/run/0/stderr.log")
    news, log = News(), (0, 1)
    first = news.of(log, join_log([stdout(0, b"step 1\n"), warned]))
    assert first == f"{HEAD}step 1\n--- node 0 (x) stderr\nwarning\n"
    assert news.of(log, join_log([stdout(0, b"step 1\nst"), warned])) == f"{HEAD}st", "another file speaks again"
    assert news.of(log, join_log([stdout(0, b"step 1\nstep 2\n"), warned])) == "ep 2\n"
    assert news.of(log, join_log([stdout(0, b"step 1\nstep 2\n"), warned])) == ""
    assert news.of((0, 2), join_log([stdout(0, b"step 1\n")])) == f"{HEAD}step 1\n", "each generation has its own"


def test_a_gap_in_a_followed_log_is_noted() -> None:
    """3,000 lines between two looks: the store has the last 64 KB of them."""
    news, log = News(), (0, 1)
    assert news.of(log, join_log([stdout(0, b"--- step 1\n")])) == f"{HEAD}--- step 1\n", "a job may print such lines"
    gap = "... 1.2 MB left out here; the machine has the whole file: /run/0/stdout.log\n"
    assert news.of(log, join_log([stdout(1_200_011, b"step 9\n")])) == f"{gap}step 9\n", "and its heading only once"
    assert news.of(log, join_log([stdout(1_200_018, b"step 10\n")])) == "step 10\n"
    later = news.of(log, join_log([stdout(80_000_000, b"step 99\n")]))
    assert later == "... 78.8 MB left out here; the machine has the file's last 64 MiB: /run/0/stdout.log\nstep 99\n"
