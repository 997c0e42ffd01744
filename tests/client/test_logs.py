"""The stored ends of logs as text."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from spotkeeper.client.logs import log_gens, whole
from spotkeeper.contract.uploads import LogPart, join_log
from spotkeeper.reconcile.store import paths
from tests.cli.records import HEAD, stdout


def test_each_file_has_a_heading() -> None:
    ends = join_log(
        [stdout(5, b"step 1\nst"), LogPart("node 0 (x) stderr", b"warning\n", 0, "/x"), LogPart("", b"why")]
    )
    assert whole(ends) == f"{HEAD}step 1\nst\n--- node 0 (x) stderr\nwarning\nwhy"


def test_objects_with_other_names_are_no_generations() -> None:
    folder = paths.log("abcdefgh", 0, 0).rpartition("/")[0]
    found = [f"{folder}/{name}.log" for name in ("12", "7", "\u00b2", "x", "9" * 20)]
    store: Any = SimpleNamespace(list=lambda _: found)
    record: Any = SimpleNamespace(job="abcdefgh")
    assert log_gens(store, record, 0) == [7, 12]
