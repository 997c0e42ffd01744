"""Every wrong file of a search ends in a message that says what, where and what to do."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.parse.sweepfile import RULES, read_sweep
from spotkeeper.contract.parse.typed import load_yaml
from spotkeeper.contract.sweepfile import Halving, SweepFile
from tests.contract.samples import STACK

NOW = 1_800_000_000.0
HEAD = "name: lr\njob: {command: [/opt/train.py]}\nmetric: loss\ngoal: min\n"  # 4 lines
SPACE = "space: {lr: {uniform: [0, 1]}}\n"
GOOD = HEAD + SPACE + "trials: 9\n"


def space(line: str) -> str:
    return f"{HEAD}trials: 9\nspace:\n  o: {{choice: [a, b]}}\n  {line}\n"  # the line is the 8th


def grid(line: str) -> str:
    return f"{HEAD}sampler: grid\nspace:\n  {line}\n"  # the 7th


CASES = [
    # --- types and spelling
    ("name: lr\n", "sweep.yaml:1: job: missing, want a text or a mapping of names to values"),
    (GOOD.replace("goal: min", "goal: low"), 'sweep.yaml:4: goal: "low": not one of max, min'),
    (
        GOOD + "sampler: soboll\n",
        'sweep.yaml:7: sampler: "soboll": not one of grid, random, sobol (did you mean sobol?)',
    ),
    (GOOD + "trails: 3\n", "sweep.yaml:7: trails: unknown key (did you mean trials?)"),
    (GOOD + "parallel: 0\n", "sweep.yaml:7: parallel: 0: must be at least 1"),
    (GOOD + "max_usd: 0\n", "sweep.yaml:7: max_usd: 0: must be more than 0"),
    (GOOD + "max_usd:\n", "sweep.yaml:7: max_usd: empty, want a number, or leave it out"),
    (GOOD + "seed: -1\n", "sweep.yaml:7: seed: -1: must be at least 0"),
    (GOOD.replace("trials: 9", "trials: 10001"), "sweep.yaml:6: trials: 10001: must be at most 10000"),
    (GOOD + "stop: {halving: {min: 9}}\n", "sweep.yaml:7: stop.halving.max: missing, want a whole number"),
    (GOOD + "stop: halving\n", 'sweep.yaml:7: stop: "halving": want a mapping with halving'),
    (GOOD + "stop: {halving: {min: 9, max: 99, eta: 1}}\n", "sweep.yaml:7: stop.halving.eta: 1: must be at least 2"),
    (
        space("lr: {uniform: [1]}"),
        "sweep.yaml:8: space.lr.uniform: [1]: too short, want a list of numbers with at least 2",
    ),
    (space("lr: {uniform: [1, 2, 3]}"), "sweep.yaml:8: space.lr.uniform: has 3 entries, at most 2 are allowed"),
    (space("lr: {int: [1, 2.5]}"), "sweep.yaml:8: space.lr.int[1]: 2.5: want a whole number"),
    (space("lr: {choice: []}"), "sweep.yaml:8: space.lr.choice: []: too short"),
    (space("lr: {choice: [[1]]}"), "sweep.yaml:8: space.lr.choice[0]: [1]: want true or false or"),
    (space("lr: {lognormal: [1, 2]}"), "sweep.yaml:8: space.lr.lognormal: unknown key (did you mean loguniform?)"),
    (space("lr: [1, 2]"), "sweep.yaml:8: space.lr: [1, 2]: want a mapping with choice, int, uniform, loguniform, ..."),
    # --- the name
    (
        GOOD.replace("name: lr", "name: My_Search"),
        'sweep.yaml:1: name: "My_Search": want a letter, then letters, digits and -, at most 35, all lower case '
        "(did you mean my-search?)",
    ),
    (GOOD.replace("name: lr", f"name: {'a' * 36}"), 'sweep.yaml:1: name: "aaaaaaaaaaaa'),
    # --- the space
    (
        HEAD + "trials: 9\nspace: {}\n",
        "sweep.yaml:6: space: is empty, want a parameter, such as lr: {loguniform: [1e-5, 1e-1]}",
    ),
    (space("0lr: {uniform: [0, 1]}"), 'sweep.yaml:8: space["0lr"]: want a name of letters, digits and _, at most 64'),
    (space("lr: {}"), "sweep.yaml:8: space.lr: has no values, want one of choice, int, uniform, loguniform"),
    (
        space("lr: {uniform: [0, 1], choice: [1]}"),
        "sweep.yaml:8: space.lr: has choice and uniform, want one of choice, int, uniform, loguniform",
    ),
    (
        space("lr: {uniform: [1, 0]}"),
        "sweep.yaml:8: space.lr.uniform: [1.0, 0.0]: want [low, high] with low below high",
    ),
    (space("lr: {int: [3, 3]}"), "sweep.yaml:8: space.lr.int: [3, 3]: want [low, high] with low below high"),
    (
        space("lr: {loguniform: [0, 1]}"),
        "sweep.yaml:8: space.lr.loguniform: [0.0, 1.0]: a logarithm needs a low end above 0",
    ),
    (space("lr: {uniform: [-1.7e308, 1.7e308]}"), "sweep.yaml:8: space.lr.uniform: [-1.7e+308, 1.7e+308]: is too wide"),
    (space("lr: {uniform: [0, .inf]}"), "sweep.yaml:8: space.lr.uniform[1]: inf: want a finite number"),
    (space("lr: {choice: [1, 2, 1.0]}"), "sweep.yaml:8: space.lr.choice[2]: 1.0: is there twice: remove one"),
    # --- conditions
    (
        space("lr: {uniform: [0, 1], when: {p: a}}"),
        "sweep.yaml:8: space.lr.when.p: no such parameter in `space`",
    ),
    (space("lr: {choice: [1], when: {lr: 1}}"), "sweep.yaml:8: space.lr.when.lr: is the parameter itself"),
    (space("lr: {uniform: [0, 1], when: {o: c}}"), 'sweep.yaml:8: space.lr.when.o: "c": o never has this value'),
    (
        space("lr: {uniform: [0, 1], when: {o: [a, true]}}"),
        "sweep.yaml:8: space.lr.when.o: true: o never has this value",
    ),
    (
        space("lr: {uniform: [0, 1]}\n  m: {choice: [1], when: {lr: 1}}"),
        "sweep.yaml:9: space.m.when.lr: must be a parameter with `choice`",
    ),
    (
        space("p: {choice: [1], when: {q: 1}}\n  q: {choice: [1], when: {p: 1}}"),
        "sweep.yaml:9: space.q.when: leads back to the parameter itself",
    ),
    # --- the sampler
    (HEAD + SPACE, "sweep.yaml:1: trials: missing, want a whole number: `sampler: random` has no end"),
    (space("lr: {uniform: [0, 1], points: 3}"), "sweep.yaml:8: space.lr.points: 3: only a grid has points: remove it"),
    (
        grid("lr: {choice: [1]}") + "trials: 3\n",
        "sweep.yaml:8: trials: 3: a grid tries every combination: remove it, or use `sampler: random`",
    ),
    (
        grid("lr: {uniform: [0, 1]}"),
        "sweep.yaml:7: space.lr: a range in a grid needs its number of values, such as points: 5",
    ),
    (grid("lr: {choice: [1], points: 2}"), "sweep.yaml:7: space.lr.points: 2: is for a range: remove it"),
    (
        grid("lr: {int: [1, 3], points: 4}"),
        "sweep.yaml:7: space.lr.points: 4: the range has 3 whole numbers: remove it for all of them",
    ),
    (
        grid("lr: {int: [1, 200]}\n  m: {int: [1, 100]}"),
        "sweep.yaml:6: space: has 20,000 combinations, at most 10,000 are allowed: use `sampler: random`",
    ),
    (
        HEAD + "sampler: sobol\ntrials: 9\nspace:\n" + "".join(f"  a{at}: {{uniform: [0, 1]}}\n" for at in range(22)),
        "sweep.yaml:7: space: has 22 parameters, sobol takes 21 at most: use `sampler: random`",
    ),
    # --- halving
    (GOOD + "stop: {halving: {min: 99, max: 99}}\n", "sweep.yaml:7: stop.halving.min: 99: must be below max (99)"),
    (
        GOOD.replace("9", "2") + "stop: {halving: {min: 9, max: 99}}\n",
        "sweep.yaml:6: trials: 2: is below eta (3), so only one trial would continue: use more",
    ),
    # --- the job
    (GOOD.replace("command", "comand"), "sweep.yaml:2: job.comand: unknown key (did you mean command?)"),
    (
        GOOD.replace("/opt/", ""),
        'sweep.yaml:2: job.command[0]: "train.py": is not sent to the machines: add `source: .`',
    ),
    (
        GOOD.replace("train.py]", "train.py, '{rl}']"),
        'sweep.yaml:2: job.command[1]: "{rl}": no parameter has the name rl',
    ),
    (
        GOOD.replace("train.py]}", "train.py], stop: signal, static: never}") + "stop: {halving: {min: 9, max: 99}}\n",
        'sweep.yaml:2: job.stop: "signal": a search with `stop: {halving: ...}` needs `library`: only the library '
        "stops at a step",
    ),
    (
        space("m: {uniform: [0, 1], when: {o: a}}").replace("train.py]", "train.py, '{m}']"),
        'sweep.yaml:2: job.command[1]: "{m}": m has no value in trials where its `when` does not hold: give it one '
        "under `params`",
    ),
    (GOOD.replace("{command: [/opt/train.py]}", "other.yaml"), "other.yaml: no such file"),
    (GOOD.replace("{command: [/opt/train.py]}", "bad.yaml"), "bad.yaml:2: nodes: 0: must be at least 1"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bad.yaml").write_text("command: [/opt/train.py]\nnodes: 0\n")
    (tmp_path / "job.yaml").write_text("name: NO NAME\ncommand: [/opt/train.py, '{lr}']\nparams: {a: 1}\n")
    return tmp_path


def complaint(folder: Path, text: str) -> str:
    (folder / "sweep.yaml").write_text(text)
    with pytest.raises(SpecError) as caught:
        read_sweep(folder / "sweep.yaml", STACK, NOW)
    return str(caught.value)


@pytest.mark.parametrize(("text", "message"), CASES, ids=[case[1][:60] for case in CASES])
def test_wrong_file(folder: Path, text: str, message: str) -> None:
    found = complaint(folder, text)
    assert message in found, found


def test_every_rule_has_a_case() -> None:
    seen: set[str] = set()
    for text, _ in CASES:
        try:
            file = load_yaml(text, SweepFile)
        except SpecError:
            continue
        seen |= {rule.__name__ for rule in RULES if list(rule(file))}
    assert seen == {rule.__name__ for rule in RULES}


def test_problems_of_file_and_job_are_reported_together(folder: Path) -> None:
    text = GOOD.replace("{command: [/opt/train.py]}", "bad.yaml").replace("name: lr", "name: LR")
    assert complaint(folder, text).splitlines() == [
        'sweep.yaml:1: name: "LR": want a letter, then letters, digits and -, at most 35, all lower case '
        "(did you mean lr?)",
        "bad.yaml:2: nodes: 0: must be at least 1",
    ]


def test_problems_of_type_and_of_meaning_are_reported_together(folder: Path) -> None:
    text = "name: LR\njob: job.yaml\ngoal: min\nspace: {lr: {uniform: [1, 0]}}\n"
    found = complaint(folder, text)
    assert [line.split(": ")[1] for line in found.splitlines()] == ["metric", "name", "space.lr.uniform", "trials"]
    found = complaint(folder, text + "metric: loss\nsampler: soboll\ntrails: 3\n")
    places = [line.split(": ")[1] for line in found.splitlines()]
    assert sorted(places) == ["name", "sampler", "space.lr.uniform", "trails"]


def test_a_valid_search(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(GOOD.replace("{command: [/opt/train.py]}", "job.yaml"))
    found = read_sweep(folder / "sweep.yaml", STACK, NOW)
    assert found.job.command == ("/opt/train.py", "{lr}"), "filled in for each trial"
    assert found.job.params == {"a": 1} and found.job_file == folder / "job.yaml"
    assert found.file.trials == 9


def test_without_halving_a_script_may_save_by_itself(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(GOOD.replace("train.py]}", "train.py], stop: signal, static: never}"))
    assert read_sweep(folder / "sweep.yaml", STACK, NOW).job.stop == "signal"


def test_words_of_a_command_stay_texts(folder: Path) -> None:
    text = GOOD.replace("/opt/train.py]", "/opt/train.py, --wd, 1e-4, on]")
    (folder / "sweep.yaml").write_text(text)
    assert read_sweep(folder / "sweep.yaml", STACK, NOW).job.command[1:] == ("--wd", "1e-4", "on")


@pytest.mark.parametrize(
    ("steps", "rungs"),
    [((100, 2700, 3), (100, 300, 900)), ((100, 2701, 3), (100, 300, 900, 2700)), ((7, 8, 2), (7,))],
)
def test_rungs_are_below_max(steps: tuple[int, int, int], rungs: tuple[int, ...]) -> None:
    assert Halving(*steps).rungs() == rungs
    assert msgspec.json.decode(msgspec.json.encode(Halving(*steps)), type=Halving) == Halving(*steps)
