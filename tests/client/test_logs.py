"""The stored ends of logs as text."""

from __future__ import annotations

from spotkeeper.client.logs import whole
from spotkeeper.contract.uploads import LogPart, join_log
from tests.cli.records import HEAD, stdout


def test_each_file_has_a_heading() -> None:
    ends = join_log(
        [stdout(5, b"step 1\nst"), LogPart("node 0 (x) stderr", b"warning\n", 0, "/x"), LogPart("", b"why")]
    )
    assert whole(ends) == f"{HEAD}step 1\nst\n--- node 0 (x) stderr\nwarning\nwhy"
