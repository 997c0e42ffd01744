"""Two generations that publish at once: the older one's saver stands still at a point while a newer one's saves.

On one machine there is one saver; two is what a saver makes that outlived its agent, or a
disk that came back. Then the older one goes on, and must neither hurt nor mix anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

from spotkeeper.train.agent_link.control import Commit, Fault
from spotkeeper.train.checkpoint import store
from spotkeeper.train.checkpoint.client import Client
from spotkeeper.train.checkpoint.protocol import SaveDurable, SaveFailed, SaverError
from tests.train.crash import oracle
from tests.train.crash.node import LIMIT_S, mixed, quiet, served, stage, stopped
from tests.train.crash.points import STOP

OLD = (Commit(3, 1), Commit(3, 2), Commit(3, 3))  # the last one meets the rival
NEW = (Commit(4, 4), Commit(4, 5))
KEEP = 2


def survey(root: Path) -> int:
    """Points of the older one's last save."""
    root.mkdir(parents=True)
    with served(root, "old", step=OLD[-1].step) as (path, process):
        _save_old(Client.connect(path, LIMIT_S), root / "ckpt")
        process.terminate()
        process.wait(LIMIT_S)
    return len(json.loads((root / "points-old").read_text()))


def meet(root: Path, point: int) -> list[str]:
    """The older one stands still at ``point``; what was wrong when all was over."""
    root.mkdir(parents=True)
    folder = root / "ckpt"
    with (
        served(root, "old", point=point, step=OLD[-1].step, what=STOP) as (old_path, process),
        served(root, "new") as (new_path, newer),
        contextlib.closing(Client.connect(new_path, LIMIT_S)) as new,
    ):
        old = Client.connect(old_path, LIMIT_S)
        _save_old(old, folder, wait=False)
        if not stopped(process):
            return [f"point {point} was not reached"]
        new.hello(folder, NEW[0].gen, KEEP)
        told = [_saved(new, commit) for commit in NEW]
        os.kill(process.pid, signal.SIGCONT)
        outcome = old.wait(LIMIT_S)
        quiet(old_path, process)  # both may be dropping what is too old
        quiet(new_path, newer)
        wrong = [f"the newer one's save: {each}" for each in told if each]
        wrong += _judge(folder, outcome) + _goes_on(new, folder)
    if not wrong:
        shutil.rmtree(root)
    return wrong


def one_saver(root: Path) -> list[str]:
    """Both ask the same saver, the older one while the newer one's save is under way."""
    root.mkdir(parents=True)
    folder = root / "ckpt"
    with served(root, "one") as (path, process):
        old, new = Client.connect(path, LIMIT_S), Client.connect(path, LIMIT_S)
        old.hello(folder, 3, KEEP)
        stage(old, OLD[0])
        new.hello(folder, 4, KEEP)
        stage(new, NEW[0])
        first = old.wait(LIMIT_S)
        try:
            stage(old, OLD[1])
            second = old.wait(LIMIT_S)
        except SaverError as error:
            second = SaveFailed(OLD[1], error.fault, str(error))
        third = new.wait(LIMIT_S)
        quiet(path, process)
    wrong = [] if isinstance(first, SaveDurable) else [f"the older one had asked before the newer one spoke: {first}"]
    if not isinstance(second, SaveFailed) or second.fault is not Fault.FENCED:
        wrong.append(f"the older one may write though a newer one has spoken: {second}")
    if not isinstance(third, SaveDurable):
        wrong.append(f"the newer one's save: {third}")
    whole = [each.name for each in oracle.whole(folder)]
    if whole != [str(NEW[0]), str(OLD[0])] or any(mixed(folder, commit) for commit in (NEW[0], OLD[0])):
        wrong.append(f"on the disk: {whole}")
    return wrong


def _save_old(client: Client, folder: Path, *, wait: bool = True) -> None:
    client.hello(folder, OLD[0].gen, KEEP)
    for commit in OLD:
        stage(client, commit)
        if wait or commit != OLD[-1]:
            client.wait(LIMIT_S)


def _saved(client: Client, commit: Commit) -> str:
    stage(client, commit)
    event = client.wait(LIMIT_S)
    return "" if isinstance(event, SaveDurable) else f"{commit}: {event}"


def _judge(folder: Path, outcome: object) -> list[str]:
    """What the older one was told is so, and nothing of the newer one's has gone."""
    found = {each.name: each for each in oracle.look(folder)}
    wrong = [f"{commit} has gone" for commit in NEW if str(commit) not in found or found[str(commit)].why]
    for name, each in found.items():
        commit = Commit.parse(name)
        assert commit is not None
        if not each.why and mixed(folder, commit):
            wrong.append(f"a mixture: {mixed(folder, commit)}")
        if each.why and commit.gen == NEW[0].gen:
            wrong.append(f"{name} of the newer one lacks {each.why}")
    if store.newest(folder).commit != NEW[-1]:
        wrong.append(f"the newest is {store.newest(folder)}")
    if not isinstance(outcome, (SaveDurable, SaveFailed)):
        wrong.append(f"the older one heard {outcome}")
    return wrong


def _goes_on(new: Client, folder: Path) -> list[str]:
    """The next generation finds order, whatever the older one has left."""
    new.hello(folder, 5, KEEP)
    wrong = _saved(new, Commit(5, 6))
    new.hello(folder, 5, KEEP)  # answered after what was too old has gone
    whole = [each.name for each in oracle.whole(folder)]
    left = oracle.debris(folder)
    told = [wrong] if wrong else []
    if whole[:KEEP] != ["5-6", "4-5"] or len(oracle.look(folder)) != KEEP or left:
        told.append(f"after it: {oracle.look(folder)}, and {left}")
    return told
