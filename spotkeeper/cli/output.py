"""Prints the output of commands: JSON on request, otherwise text; notes and questions go to standard error.

A terminal obeys escape sequences in printed text: OSC 52 writes the clipboard, others change the window's title,
overwrite earlier lines, or make the terminal send input. So on a terminal, and only there, this module removes control
characters and escape sequences from the text of jobs, machines and clouds: C0 except tab and newline, DEL, C1 (U+0080
to U+009F, which some terminals obey like ESC and a letter) and marks of text direction (U+202A to U+202E, U+2066 to
U+2069). A job's log keeps its colors (SGR, ``ESC [ ... m``), and a carriage return in it, which would let the line
overwrite its own time and node, becomes a space. Piped output is unchanged. Only this module prints.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

import msgspec

from spotkeeper.client.errors import CliError, Exit

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 160  # characters per line of piped output, so that no column is cut off
RESET = "\x1b[0m"
_SGR = r"\x1b\[[0-9;:]*m"
_SEQUENCE = (
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d\x9e\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"  # OSC, DCS, SOS, PM, APC
    r"|\x1b[ -/]*[0-~]?"  # all others, and an ESC whose sequence is cut off
)
_CONTROL = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]"
_PLAIN = re.compile(f"{_SEQUENCE}|{_CONTROL}")
_LOG = re.compile(f"({_SGR})|(\r)|{_SEQUENCE}|{_CONTROL}")


# -- print


def emit(value: object, as_json: bool, text: RenderableType | str) -> None:
    """Print ``value`` as one JSON document, or ``text`` for people."""
    if as_json:
        print(shown_json(msgspec.json.format(msgspec.json.encode(value), indent=2).decode(), sys.stdout))
    elif isinstance(text, str):
        say(text)
    else:
        result_console().print(text, crop=False)  # long lines of a log are not cut; tables fit already


def emit_line(value: object) -> None:
    """Print one JSON document on one line and flush it, for streams such as ``watch --json``."""
    print(shown_json(msgspec.json.encode(value).decode(), sys.stdout), flush=True)


def say(text: str, *, end: str = "\n", log: bool = False) -> None:
    """Print a line of the result and flush it. ``log``: the text is a job's output."""
    print(shown(text, sys.stdout, log=log), end=end, flush=True)


def note(text: str) -> None:
    """Print a note, which is not part of the result, to standard error."""
    print(shown(text, sys.stderr), file=sys.stderr)


def note_problems(text: str) -> None:
    """Print the problems of files, one a line: a single one behind ``error:``, several beneath it."""
    problems = text.splitlines()
    note(f"error: {text}" if len(problems) == 1 else "\n  ".join([f"error: {len(problems)} problems:", *problems]))


@contextlib.contextmanager
def waiting(text: str, *, quiet: bool = False) -> Iterator[None]:
    """Show a spinner with ``text`` on standard error; without a terminal print only ``text``, or nothing if quiet."""
    if not sys.stderr.isatty():
        if not quiet:
            note(text)
        yield
        return
    with console(stderr=True, highlight=False).status(text):
        yield


@contextlib.contextmanager
def progress(what: str, steps: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar on standard error, if that is a terminal, and yield a function that advances it by one."""
    from rich.progress import Progress

    out = console(stderr=True)
    with Progress(console=out, transient=True, disable=not out.is_terminal) as bars:
        task = bars.add_task(what, total=steps)
        yield lambda: bars.advance(task)


# -- ask


def confirm(question: str) -> bool:
    """Ask at the terminal until the answer is y or n. Enter, Ctrl-C and the end of input mean no."""
    try:
        while True:
            print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            if (word := line.strip().lower()) in ("y", "yes"):
                return True
            if word in ("", "n", "no"):
                break
            note("please answer y or n")
    except KeyboardInterrupt:
        line = ""
    if not line:
        note("")  # the cursor still stands behind the question
    return False


def agree(consequence: str, question: str, again: str) -> None:
    """Ask the person at the terminal for consent before something is lost; without a terminal, refuse.

    Args:
        consequence: a description of the loss.
        question: such as ``Cancel it?``; any answer but yes means no.
        again: the command that does the same without asking.

    Raises:
        CliError: the answer is no, or this process has no terminal.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CliError(f"{consequence}\nnothing was changed, since asking needs a terminal", Exit.REFUSED, again)
    note(consequence)
    if not confirm(question):
        raise CliError("nothing was changed", Exit.REFUSED)


# -- text that is safe on a terminal


def clean(text: str, *, log: bool = False) -> str:
    """Remove control characters and sequences. ``log``: keep colors, and show ``\\r`` as a space."""
    if not log:
        return _PLAIN.sub("", text)
    kept = _LOG.sub(lambda match: match[1] or " " * bool(match[2]), text.rstrip("\r"))
    return kept + RESET if "\x1b" in kept else kept


def shown(text: str, stream: IO[str], *, log: bool = False) -> str:
    """Return ``text`` as it may go to this stream: cleaned for a terminal, else unchanged."""
    return clean(text, log=log) if stream.isatty() else text


def shown_json(text: str, stream: IO[str]) -> str:
    """Return JSON as it may go to this stream: for a terminal, with control characters as ``\\u`` escapes."""
    if not stream.isatty():
        return text
    return re.sub(_CONTROL, lambda match: f"\\u{ord(match[0]):04x}", text)


def result_console() -> Console:
    """Return the console for results, as wide as the terminal, or :data:`PLAIN_WIDTH` if piped."""
    return console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)


def console(**options: Any) -> Console:
    """Return a rich console that also removes escape sequences (rich removes only some C0 characters).

    Without a terminal it removes the spaces that pad tables at the end of lines.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Clean(Console):
        def render(self, *args: Any, **named: Any) -> Iterable[Segment]:
            for segment in super().render(*args, **named):
                if segment.control or not self.is_terminal:
                    yield segment
                else:
                    yield Segment(clean(segment.text), segment.style)

        def print(self, *args: Any, **named: Any) -> None:
            if self.is_terminal:
                super().print(*args, **named)
                return
            with self.capture() as printed:
                super().print(*args, **named)
            self.file.write("\n".join(line.rstrip(" ") for line in printed.get().split("\n")))

    return Clean(**options)
