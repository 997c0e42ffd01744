"""What a job, a machine or a cloud has said reaches a terminal without anything that the terminal would obey."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from spotkeeper import cli
from spotkeeper.cli import output
from spotkeeper.cli.output import clean, console

CLIPBOARD = "\x1b]52;c;ZXZpbA==\x07"
EVIL = {
    "writes the clipboard": (f"a{CLIPBOARD}b", "ab"),
    "the same, ended otherwise": ("a\x1b]52;c;ZXZpbA==\x1b\\b", "ab"),
    "retitles the window": ("a\x1b]0;mine\x07b", "ab"),
    "a link": ("\x1b]8;;http://evil\x1b\\here\x1b]8;;\x1b\\", "here"),
    "moves up and clears": ("a\x1b[2A\x1b[Kb", "ab"),
    "has the terminal answer": ("a\x1b[6n\x1b[cb", "ab"),
    "a device control string": ("a\x1bP+q544e\x1b\\b", "ab"),
    "another character set": ("a\x1b(0b", "ab"),
    "resets the terminal": ("a\x1bcb", "ab"),
    "C1, as one character": ("a\x9b2Ab\x9d52;c;eA==\x9cc", "abc"),
    "bell and backspace": ("a\x07\x08\x7f\x00b", "ab"),
    "turns the text round": ("pay \u202e001\u202c \u2066x\u2069", "pay 001 x"),
    "cut off": ("a\x1b", "a"),
    "cut off in its middle": ("a\x1b]52;c;ZXZ", "a52;c;ZXZ"),
}


@pytest.mark.parametrize("text,left", EVIL.values(), ids=EVIL)
def test_control_sequences_are_removed_on_a_terminal(text: str, left: str) -> None:
    assert clean(text) == left
    assert clean(text, log=True) == left


def test_a_log_keeps_colors_and_resets_them() -> None:
    text = "\x1b[1;31merror\x1b[m 50%\t\n\x1b[38:2:1:2:3mblue"
    assert clean(text, log=True) == text + "\x1b[0m"
    assert clean(text) == "error 50%\t\nblue"
    assert clean("plain: äöü, 漢字, 🙂, e\u0301, \u200e", log=True) == "plain: äöü, 漢字, 🙂, e\u0301, \u200e"


def test_a_line_of_a_log_does_not_overwrite_its_own_beginning() -> None:
    text = "12:00 node 1: 10%\r50%\r\x1b[2K11:00 node 0: forged\r\r"
    assert clean(text, log=True) == "12:00 node 1: 10% 50% 11:00 node 0: forged"
    assert clean("colored\x1b[31m\r", log=True) == "colored\x1b[31m\x1b[0m"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


HARM = re.compile(r"\r|\x1b\]|[\x80-\x9f]|\u202e|\x07|\x1b\[2A")


@pytest.mark.parametrize("terminal", [True, False])
def test_output_is_cleaned_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    text = f"{CLIPBOARD}\r\x1b[2A\u202e\x9b2Aevil"
    for print_it in (
        lambda: output.say(text),
        lambda: output.say(text, log=True),
        lambda: output.note(text),
        lambda: output.emit({}, False, text),
        lambda: output.emit({"text": text}, True, ""),
        lambda: output.emit_line({"text": text}),
    ):
        out = Terminal() if terminal else io.StringIO()
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        print_it()
        assert "evil" in out.getvalue()
        assert bool(HARM.search(out.getvalue())) != terminal
        if out.getvalue().startswith("{"):
            assert json.loads(out.getvalue()) == {"text": text}, "the same document"


def test_tables_and_panels_are_clean_and_keep_their_own_colors() -> None:
    out = Terminal()
    table = Table("what")
    table.add_row(Text(f"{CLIPBOARD}evil\x1b[2A", style="red"))
    console(file=out, force_terminal=True, color_system="truecolor", width=60).print(
        Panel(table, title=f"{CLIPBOARD}x")
    )
    assert "evil" in out.getvalue() and "\x1b[31m" in out.getvalue()
    assert not HARM.search(out.getvalue())


def test_piped_tables_end_their_lines_in_no_space() -> None:
    table = Table("zone", "why", box=None)
    table.add_row("us-central1-a", "")
    table.add_row("", "a longer cell")
    piped, seen = io.StringIO(), Terminal()
    console(file=piped, width=60).print(table)
    assert [line.rstrip() for line in piped.getvalue().splitlines()] == piped.getvalue().splitlines()
    assert len(piped.getvalue().splitlines()) == 3 and piped.getvalue().endswith("cell\n")
    console(file=seen, force_terminal=True, width=60).print(table)
    assert any(line.endswith(" ") for line in seen.getvalue().splitlines()), "then there is nothing to take away"


def test_only_output_py_prints() -> None:
    """But for words of its own: its version, the protocol of ``policy``, a script that runs on a machine."""
    package = Path(cli.__file__).parents[1]
    past = re.compile(r"(?<![\w.])(?<!def )print\(|(?<![\w.])Console\(|rich\.print|click\.echo")
    found = {
        path.name
        for part in ("cli", "client")
        for path in (package / part).rglob("*.py")
        if past.search(path.read_text())
    }
    assert found == {"app.py", "for_stacks.py", "live_probe.py", "output.py", "policy.py"}
