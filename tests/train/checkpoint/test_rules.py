"""Rules of images, taken away one at a time: tests must fail without each. Like ``tests/model/mutants``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.model.mutate import Patch, infect
from tests.train.forks import FORKS, LIMIT_S

HERE = Path(__file__).parent
SNAPSHOT, DEVICE, IMAGES, PARTS = "test_snapshot.py", "test_device_copy.py", "test_images.py", "../core/test_parts.py"
PEERS, LEFT, TREE, SHARDED = "test_peers.py", "test_left.py", "../core/test_tree.py", "test_sharded.py"
BITS = f"{SNAPSHOT}::test_every_checkpoint_is_the_state_of_its_step"


@dataclass(frozen=True)
class Rule:
    """A rule, the patch that takes it away, and the tests that notice: a file, or a test in it."""

    name: str
    patch: Patch
    tests: str

    @property
    def patches(self) -> tuple[Patch, ...]:
        return (self.patch,)


def snapshot(old: str, new: str) -> Patch:
    return Patch("spotkeeper.train.checkpoint.snapshot", old, new)


def parts(old: str, new: str) -> Patch:
    return Patch("spotkeeper.train.core.parts", old, new)


def strategy(old: str, new: str) -> Patch:
    return Patch("spotkeeper.train.checkpoint.strategy", old, new)


def writer(old: str, new: str) -> Patch:
    return Patch("spotkeeper.train.checkpoint.writer", old, new)


def sharded(old: str, new: str) -> Patch:
    return Patch("spotkeeper.train.checkpoint.sharded", old, new)


def peers(old: str, new: str) -> Patch:
    return Patch("spotkeeper.train.checkpoint.peers", old, new)


def reshard(old: str, new: str) -> Patch:
    return Patch("spotkeeper.train.checkpoint.reshard", old, new)


def tree(old: str, new: str) -> Patch:
    return Patch("spotkeeper.train.core.tree", old, new)


def memories(old: str, new: str) -> Patch:
    return Patch("spotkeeper.train.checkpoint.saver_memories", old, new)


_RUNNING = "        self._running = _Running(copies, versions, copied, devices, asks, discard, stalls, watch, seen)\n"
_TORN = "            if failed or name:\n                self._end("
_HOLDS = "                if running.devices is not None:\n                    running.devices.hold()\n"
_FAILED = '        failed = "" if held.devices is None else _told(held.devices.wait())\n'
_PARTS = "            if why := image.finish(memory):\n                discard(why)\n                return\n"
_RECEIVES = "            files = _receive("

RULES = (
    # when an image counts
    Rule("an image counts once its copy is complete", snapshot(_RUNNING, f"        request()\n{_RUNNING}"), BITS),
    Rule("an image counts once all small parts are in", writer(_PARTS, "            image.finish(memory)\n"), IMAGES),
    Rule("a seal is broken before its image changes", writer("        break_seal(memory)\n", ""), IMAGES),
    Rule(
        "an image requests the memory of the next one",
        writer("(following := client.images.next()) is not None:", "(following := None) is not None:"),
        f"{IMAGES}::test_each_image_finds_its_memory",
    ),
    Rule(
        "memory has room for images that grow a little",
        Patch("spotkeeper.train.checkpoint.memories", "+ _SPARE + AREA", "+ AREA"),
        f"{IMAGES}::test_each_image_finds_its_memory",
    ),
    Rule("a torn copy is discarded", snapshot(_TORN, _TORN.replace("failed or name", "failed")), SNAPSHOT),
    # waits
    Rule(
        "an optimizer's step waits",
        snapshot("        copier.before_step()\n        return None\n", "        return None\n"),
        BITS,
    ),
    Rule(
        "code between two steps can wait", strategy("            self._copier.wait()\n", "            pass\n"), SNAPSHOT
    ),
    # what is captured at the boundary
    Rule("buffers are captured", parts("name: state[name] for name in self._buffers(state)", ""), BITS),
    Rule(
        "frozen parameters are captured at once",
        parts('for param in group["params"] if param.requires_grad):', 'for param in group["params"]):'),
        SNAPSHOT,
    ),
    Rule(
        "parameters that no step changes are captured at once",
        parts("                if each.state and not state:\n                    continue\n", ""),
        BITS,
    ),
    # saves of sharded state
    Rule("a torn part makes no checkpoint", sharded("        if not torn():\n", "        if torn() < 2:\n"), SHARDED),
    Rule(
        "parts are complete before they are written",
        sharded(
            "            save.torn = self._gang.highest(int(not save.complete))\n",
            "            save.torn = self._gang.highest(0)\n",
        ),
        SHARDED,
    ),
    # layouts of earlier images
    Rule(
        "another structure has another layout",
        tree("last is None or last.structures != ", "last is None or () == "),
        TREE,
    ),
    Rule("tensors elsewhere have another layout", tree("last if last.places == places(parts) else None", "last"), TREE),
    # checks
    Rule("the first copies are checked", snapshot(" or number < CHECKED", ""), SNAPSHOT),
    Rule("one copy in some is checked later", snapshot(" or number % EVERY == 0", ""), SNAPSHOT),
    Rule("a checked copy is compared", snapshot("(self.watch is not None and not copy.equal())", "False"), SNAPSHOT),
    Rule("version counters are compared", snapshot("copy.tensor._version != version or ", ""), SNAPSHOT),
    Rule(
        "a checked copy is compared when gradients come",
        snapshot("GradientWatch(self._params(), copies)", "GradientWatch((), copies)"),
        SNAPSHOT,
    ),
    # copies of devices
    Rule("a step waits for a device's copy", snapshot(_HOLDS, ""), DEVICE),
    Rule("each optimizer's step waits for a device's copy", snapshot("self._held.devices.hold()", "pass"), DEVICE),
    Rule("a device's image counts once its bytes are there", snapshot(" and held.devices.ready()", ""), DEVICE),
    Rule("a device that fails has copied nothing", snapshot(_FAILED, '        failed = ""\n'), DEVICE),
    Rule("a device's bits are compared", snapshot("        if self.seen:\n", "        if False:\n"), DEVICE),
    # images of sharded state on several machines
    Rule("an image counts once all machines have their copies", peers("if stage != _Stage.DONE:", "if False:"), PEERS),
    Rule("an image with a torn copy is not sealed", peers("elif flight.torn():", "elif flight.torn() < 0:"), PEERS),
    Rule("the copies of an image are waited for", peers("            self._copier.wait()\n", ""), PEERS),
    Rule("a seal is broken before a part changes", peers("        break_seal(mine)\n", ""), PEERS),
    Rule("a seal is broken before a copy changes", peers("        break_seal(copy)\n", ""), PEERS),
    Rule(
        "a copy is sealed once it is there",
        peers(_RECEIVES, f"            seal(copy, named, theirs, part=True)\n{_RECEIVES}"),
        PEERS,
    ),
    Rule("the restored image is spared", peers("_other(number) if number in holding else number", "number"), PEERS),
    Rule("a received copy is checked", reshard("!= file.sha256:\n", "== '':\n"), PEERS),
    Rule("what a hanging trainer left is copied", reshard("shared=number >= LEFT_PARTS", "shared=False"), LEFT),
    Rule("a hanging trainer's memory is given to no other", memories("= {}, sealed", "= sealed, sealed"), LEFT),
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_has_its_place_in_the_code(rule: Rule) -> None:
    source = Path(*rule.patch.module.split(".")).with_suffix(".py").read_text()
    assert source.count(rule.patch.old) == 1


@pytest.mark.matrix
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_tests_fail_without_a_rule(rule: Rule, tmp_path: Path) -> None:
    process = FORKS.Process(target=run_without, args=(rule, tmp_path / "out"))
    process.start()
    process.join(LIMIT_S)
    if process.is_alive():
        process.kill()
        process.join()
    out = (tmp_path / "out").read_text()
    assert process.exitcode == pytest.ExitCode.TESTS_FAILED, f"want failed tests, got {process.exitcode}:\n{out}"


def run_without(rule: Rule, out: Path) -> None:
    """Run the tests in this process, whose code lacks the rule."""
    os.setsid()
    for number in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    infect(rule)  # type: ignore[arg-type]
    code = pytest.main(["-q", "-x", "-n", "0", "-p", "no:cacheprovider", str(HERE / rule.tests)])
    os._exit(code)
