"""A plain Lightning script with one line more: preempted, it ends with the bits of one that was left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spotkeeper.train.control import Commit, Result

from tests.train.gangs import Gang, Job

pytest.importorskip("lightning", reason="`make adapters` has it")

SCRIPT = str(Path(__file__).with_name("lightning_script.py"))


def run(root: Path, *args: object, world: int = 1, stop: int | None = None, rank: int = 0) -> dict[str, str]:
    out = root / "out"
    argv = (SCRIPT, "--out", str(out), *map(str, args))
    if stop is not None:
        argv += ("--stop-at", str(stop), "--stop-rank", str(rank))
    with Gang(root, Job(out), nodes=world, script=argv) as gang:
        ended = gang.run(1)
        said = "\n".join(gang.log(node, 1) for node in range(world))
        if stop is not None:
            assert [each.code for each in ended] == [0] * world, said
            results = [each.result for each in ended]
            assert results == [Result("stopped", 1, stop, Commit(1, stop))] * world, said
            assert not list(out.glob("*.json")), "what follows fit() did not run"
            ended = gang.run(2)
            said = "\n".join(gang.log(node, 2) for node in range(world))
        assert [each.code for each in ended] == [0] * world, said
        assert all(each.result and each.result.outcome == "done" for each in ended), said
    return {path.name: path.read_text() for path in sorted(out.iterdir())}


@pytest.mark.parametrize("stop", range(1, 37, 3))
def test_each(tmp_path: Path, stop: int) -> None:
    assert run(tmp_path / "b", stop=stop) == run(tmp_path / "a")
