"""Every wrong job file and stack document ends in a message that says what, where and what to do."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from pathlib import Path

import msgspec
import pytest

from spotkeeper.contract.job import JobSpec
from spotkeeper.contract.parse.check import JOB_VALIDATORS, cautions
from spotkeeper.contract.parse.check_run import IMAGE, JobContext
from spotkeeper.contract.parse.jobfile import read_job
from spotkeeper.contract.parse.problem import SpecError
from spotkeeper.contract.parse.typed import load_yaml
from spotkeeper.contract.stack import LOCAL_PROJECT, Price, StackState, StaticMachine, TeamState
from tests.contract.samples import PRICES, STACK, ZONES, check_job, pool
from tests.contract.stack_rules import POOL_VALIDATORS, check_stack

NOW = 1_800_000_000.0  # 2027-01-15T08:00Z

MIX = "machines: [{pool: gpus, nodes: 2}, {pool: workers, nodes: 1}]\n"
GOOD = "name: first\ncommand: [/opt/train.py]\n"
TEAMS = msgspec.structs.replace(  # of 6 machines 3.6 are vision's share, 1.2 audio's, and 1.2 that of everybody else
    STACK,
    teams=(
        TeamState("vision", ("ann",), share=3.0),
        TeamState("audio", ("bo",), max_machines=2, max_usd_hour=4.0, high=()),
        TeamState("default"),
    ),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A job's folder with a script and a file that is no folder."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print()\n")
    (tmp_path / "notes.txt").write_text("x\n")
    return tmp_path


def complaint(folder: Path, text: str, stack: StackState = TEAMS) -> str:
    file = folder / "job.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_job(file, stack, NOW)
    return str(caught.value)


def test_the_one_machine_cloud_refuses_images(folder: Path) -> None:
    text = GOOD + f"image: docker.io/pytorch/pytorch@sha256:{'0' * 64}\n"
    told = complaint(folder, text, msgspec.structs.replace(STACK, project=LOCAL_PROJECT))
    assert told == "job.yaml:3: image: machines of the one-machine cloud run no containers: leave it out there"
    assert read_job(folder / "job.yaml", STACK, NOW).image is not None


def test_a_valid_job_has_no_problems(folder: Path) -> None:
    text = GOOD + (
        "source: code\nnodes: {min: 2, max: 4}\npools: [workers]\nenv: {LR: '0.1'}\n"
        "deadline: 6h\ncheckpoint: {interval_s: 60, keep: 3}\n"
    )
    (folder / "job.yaml").write_text(text)
    spec = read_job(folder / "job.yaml", STACK, NOW)
    assert spec.size().min == 2
    assert spec.command == ("/opt/train.py",)


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("docker.io/pytorch/pytorch", True), ("localhost/a", True), ("localhost:5000/a", True),
        ("registry:5000/a", True), ("-x.io/a", False), ("--x:5/a", False),
        ("us-docker.pkg.dev/acme-1/train/llm", True), ("123456789012.dkr.ecr.eu-west-1.amazonaws.com/a_b", True),
        ("pytorch/pytorch", False), ("pytorch", False), ("docker.io/", False), ("docker.io/A", False), ("-v/a", False),
        ("docker.io/../a", False), ("docker.io/a/", False), ("docker.io/a b", False), ("https://docker.io/a", False),
    ],
)  # fmt: skip
def test_an_image_names_its_registry_and_its_digest(name: str, valid: bool) -> None:
    image = f"{name}@sha256:{'0123456789abcdef' * 4}"
    assert bool(IMAGE.match(image)) is valid
    assert not IMAGE.match(image[:-1]) and not IMAGE.match(image + "\n") and not IMAGE.match(name)


@pytest.mark.parametrize("words", ["-m, my.package", "/opt/train.py"])
def test_a_job_without_source_runs_a_module_or_an_absolute_path(folder: Path, words: str) -> None:
    (folder / "job.yaml").write_text(f"name: first\ncommand: [{words}]\n")
    assert read_job(folder / "job.yaml", STACK, NOW).source is None


LONG = "x" * 5000
UNREAD = "job.yaml:3: secrets: no job can read secrets, since stack prod has no `job_identity`"
BY_REFERENCE = (
    "want the address of a secret, not its value: gcp-secret://projects/.../versions/latest or aws-secret://<ARN>"
)
OFFERED = ", ".join(name for name in JobSpec.__struct_fields__ if name not in ("source_sha256", "trial"))
JOB_CASES = [
    # --- YAML itself
    ("", "job.yaml: empty, want a mapping with name, command, nodes, pools, ..."),
    ("- a\n", 'job.yaml:1: ["a"]: want a mapping with name, command, nodes, pools, ...'),
    ("name: a: b\n", "job.yaml:1: a ':' where none can be: indent the line as its neighbours, or quote the text"),
    (
        "name: a\ncheckpoint:\n    keep: 2\n  interval_s: 3\n",
        "job.yaml:4: does not line up with the lines above: indent it as its neighbours, or quote the text",
    ),
    ('name: "a\ncommand: b\n', "job.yaml:3: a quote opens and is not closed"),
    ("name: @x\n", "job.yaml:1: a text cannot begin with '@': put it in quotes"),
    ("name: [a, b]]\n", "job.yaml:1: ] has no opening bracket before it"),
    ("name: {a: 1\ncommand: c\n", "job.yaml:2: a mapping opens with { and is not closed: a } is missing before this"),
    ("name: first\n\tcommand: [a]\n", "job.yaml:2: a tab cannot indent YAML: use spaces"),
    ("name: first\ncommand: [a\n", "job.yaml:3: a list opens with [ and is not closed: a ] is missing before this"),
    (GOOD + "name: other\n", "job.yaml:3: name: given twice (first in line 1): remove one"),
    ("name: &n first\ncommand: [*n]\n", "job.yaml:2: aliases (*name) are refused: write out the value"),
    (
        GOOD + "seed: 010\n",
        "job.yaml:3: seed: 010: YAML readers disagree about a leading zero: remove the zero, or use quotes",
    ),
    (
        f"name: first\ncommand: [/opt/train.py, {'x' * 140_000}]\n",
        "job.yaml:2: command[1]: is 140,000 bytes long, but Linux takes at most 131,071",
    ),
    (
        'name: first\ncommand: ["/opt/a.py\\n"]\n',
        'job.yaml:2: command[0]: "/opt/a.py\\n": has blanks around the script\'s name (did you mean /opt/a.py?)',
    ),
    (
        "name: first\ncommand: [-m]\n",
        'job.yaml:2: command: ["-m"]: wants a module after "-m", such as my.package',
    ),
    (
        "name: first\ncommand: [-m, --help]\n",
        'job.yaml:2: command: ["-m", "--help"]: wants a module after "-m", such as my.package',
    ),
    (
        "name: first\ncommand: [-c, 'print()']\n",
        'job.yaml:2: command[0]: "-c": is an option: want the script\'s name, or -m and a module',
    ),
    (GOOD + "python: -c\n", 'job.yaml:3: python: "-c": want one interpreter, such as python3 or /opt/venv/bin/python'),
    (
        GOOD + "deadline: 9999999d\n",
        'job.yaml:3: deadline: "9999999d": is more than ten years away: for no deadline, leave the field out',
    ),
    (GOOD + "nodes: !!int 3\n", "job.yaml:3: tags (!name) are refused: remove the tag"),
    (GOOD + "seed: 0o9\n", 'job.yaml:3: seed: "0o9": want a whole number'),
    (GOOD + f"grace_s: {'1' * 5000}\n", "job.yaml:3: grace_s: inf: want a finite number"),
    (GOOD + f"nodes: 0x{'f' * 5000}\n", "job.yaml:3: nodes: Infinity: want a whole number or a mapping with min, max"),
    (
        GOOD + 'env: {A: "\\ud800"}\n',
        "job.yaml:3: env.A: contains half a character (a lone surrogate): remove it",
    ),
    (
        'name: first\ncommand: [train.py, "\\ud800"]\nsource: code\n',
        "job.yaml:2: command[1]: contains half a character (a lone surrogate): remove it",
    ),
    (GOOD + 'source: "code\\0"\n', 'job.yaml:3: source: "code\\u0000": cannot be a folder: embedded null byte'),
    (
        GOOD + f"source: {'x' * 300}\n",
        f'job.yaml:3: source: "{"x" * 55}...": cannot be a folder: File name too long',
    ),
    (GOOD + "---\nname: b\n", "job.yaml:3: a second document begins here (---), but a file may have only one"),
    (GOOD + "1: a\n", "job.yaml:1: 1: a key must be a text: put it in quotes"),
    # --- keys
    ("nme: first\ncommand: [/opt/train.py]\n", "job.yaml:1: nme: unknown key (did you mean name?)"),
    (GOOD + "checkpiont: {keep: 2}\n", "job.yaml:3: checkpiont: unknown key (did you mean checkpoint?)"),
    (GOOD + "secret: {A: b}\n", "job.yaml:3: secret: unknown key (did you mean secrets?)"),
    (GOOD + "source_sha: ab\n", f"job.yaml:3: source_sha: unknown key, want one of {OFFERED}"),
    (GOOD + "max-on-demand: 1\n", "job.yaml:3: max-on-demand: unknown key (did you mean max_on_demand?)"),
    (GOOD + "nodes: {mn: 1, max: 2}\n", "job.yaml:3: nodes.mn: unknown key (did you mean min?)"),
    (
        GOOD + "checkpoint: {saved: 3}\n",
        "job.yaml:3: checkpoint.saved: unknown key, want one of replicated, interval_s, keep, snapshots, "
        "overhead_percent, peers, peers_mb_s, mirror",
    ),
    (GOOD + "retry: {crash: 3}\n", "job.yaml:3: retry.crash: unknown key (did you mean crashes?)"),
    ("command: [/opt/train.py]\n", "job.yaml:1: name: missing, want a text"),
    ("name: first\n", "job.yaml:1: command: missing, want a list of texts with at least 1"),
    (GOOD + "nodes: {min: 1}\n", "job.yaml:3: nodes.max: missing, want a whole number"),
    # --- types
    ("name: 12\ncommand: [/opt/train.py]\n", "job.yaml:1: name: 12: want a text: put it in quotes"),
    ("name:\ncommand: [/opt/train.py]\n", "job.yaml:1: name: empty, want a text"),
    (GOOD + "max_usd:\n", "job.yaml:3: max_usd: empty, want a number, or leave it out"),
    (
        GOOD + "checkpoint: {mirror: }\n",
        "job.yaml:3: checkpoint.mirror: empty, want a mapping with every_min, mb_s, keep, or leave it out",
    ),
    (
        "name: first\ncommand: train.py --lr 1\n",
        'job.yaml:2: command: "train.py --lr 1": want a list of texts with at least 1,'
        ' such as ["train.py", "--lr", "1"]',
    ),
    ("name: first\ncommand: []\n", "job.yaml:2: command: []: too short, want a list of texts with at least 1"),
    (GOOD + "nodes: two\n", 'job.yaml:3: nodes: "two": want a whole number or a mapping with min, max'),
    (GOOD + "nodes: 1.5\n", "job.yaml:3: nodes: 1.5: want a whole number or a mapping with min, max"),
    (GOOD + "nodes: true\n", "job.yaml:3: nodes: true: want a whole number or a mapping with min, max"),
    (GOOD + "nodes:\n  min: 1\n  max: '2'\n", 'job.yaml:5: nodes.max: "2": want a whole number, without quotes'),
    (GOOD + "env: [A]\n", 'job.yaml:3: env: ["A"]: want a mapping of names to texts'),
    (GOOD + "env: {LR: 0.1}\n", "job.yaml:3: env.LR: 0.1: want a text: put it in quotes"),
    (GOOD + "env: {FLAG: false}\n", "job.yaml:3: env.FLAG: false: want a text: put it in quotes"),
    (GOOD + "spread: maybe\n", 'job.yaml:3: spread: "maybe": want true or false'),
    (GOOD + "pools: workers\n", 'job.yaml:3: pools: "workers": want a list of texts, such as ["workers"]'),
    (GOOD + "seed: '7'\n", 'job.yaml:3: seed: "7": want a whole number, without quotes'),
    # --- values
    (
        GOOD + "policy: ballanced\n",
        'job.yaml:3: policy: "ballanced": not one of balanced, on-demand, shuffle, spot (did you mean balanced?)',
    ),
    (GOOD + "launcher: zygot\n", 'job.yaml:3: launcher: "zygot": not one of exec, zygote (did you mean zygote?)'),
    (GOOD + "static: yes\n", 'job.yaml:3: static: "yes": not one of never, use'),
    (GOOD + "nodes: 0\n", "job.yaml:3: nodes: 0: must be at least 1"),
    (GOOD + "nodes: {min: 0, max: 2}\n", "job.yaml:3: nodes.min: 0: must be at least 1"),
    (GOOD + "nodes: 10001\n", "job.yaml:3: nodes: 10001: must be at most 10000"),
    (GOOD + "nproc: 0\n", "job.yaml:3: nproc: 0: must be at least 1"),
    (GOOD + "checkpoint: {keep: 1}\n", "job.yaml:3: checkpoint.keep: 1: must be at least 2"),
    (GOOD + "checkpoint: {interval_s: 0}\n", "job.yaml:3: checkpoint.interval_s: 0: must be more than 0"),
    (GOOD + "checkpoint: {interval_s: .inf}\n", "job.yaml:3: checkpoint.interval_s: inf: want a finite number"),
    (GOOD + "checkpoint: {overhead_percent: 0}\n", "job.yaml:3: checkpoint.overhead_percent: 0: must be at least 0.01"),
    (GOOD + "hold_days: -1\n", "job.yaml:3: hold_days: -1: must be at least 0"),
    (GOOD + "hold_days: 366\n", "job.yaml:3: hold_days: 366: must be at most 365"),
    (
        GOOD + "image: docker.io/pytorch/pytorch:latest\n",
        'job.yaml:3: image: "docker.io/pytorch/pytorch:latest": a tag may be another image tomorrow, so want the '
        "digest: docker.io/pytorch/pytorch@sha256:64 hex digits",
    ),
    (
        GOOD + f"image: pytorch@sha256:{'0' * 64}\n",
        f'job.yaml:3: image: "pytorch@sha256:{"0" * 40}...": want the registry and the repository before the digest: '
        "docker.io/pytorch/pytorch@sha256:...",
    ),
    (
        GOOD + "image: docker.io/pytorch/pytorch@sha256:0a3b\n",
        'job.yaml:3: image: "docker.io/pytorch/pytorch@sha256:0a3b": want 64 hex digits (0-9, a-f) after '
        "@sha256:, got 4 characters",
    ),
    (
        GOOD + f"image: docker.io/acme/gpt:v1@sha256:{'0' * 64}\n",
        f'job.yaml:3: image: "docker.io/acme/gpt:v1@sha256:{"0" * 26}...": want '
        "REGISTRY/REPOSITORY@sha256:DIGEST in lower case and without a tag, such as docker.io/pytorch/pytorch",
    ),
    (
        GOOD + "machines: []\nregions: []\n",
        "job.yaml:3: machines: []: empty, want a list of mappings with at least 1, or leave it out\n"
        "job.yaml:4: regions: []: empty, want a list of texts with at least 1, or leave it out",
    ),
    (
        GOOD + f"source: code\nrequirements: uv.lock\nimage: localhost:5000/a@sha256:{'0' * 64}\nwarm: [numpy]\n",
        'job.yaml:4: requirements: "uv.lock": excludes `image`: install the packages in the image\n'
        'job.yaml:6: warm: ["numpy"]: excludes `image`: each start of a container imports everything\n'
        'job.yaml:4: requirements: "uv.lock": no such file in `source` (code)',
    ),
    (
        GOOD + "warm: [torch, my-package]\n",
        'job.yaml:3: warm[1]: "my-package": want the name of a module, such as transformers',
    ),
    (
        GOOD + "warm: [transformers]\nlauncher: exec\n",
        "job.yaml:3: warm: needs `launcher: zygote`, since `exec` imports everything at each start",
    ),
    (GOOD + "grace_s: 601\n", "job.yaml:3: grace_s: 601: must be at most 600"),
    (
        GOOD + "requirements: notes.txt\n",
        'job.yaml:3: requirements: "notes.txt": must be in `source`, which is missing: add `source: .`',
    ),
    (
        GOOD + "source: code\nrequirements: ../notes.txt\n",
        'job.yaml:4: requirements: "../notes.txt": want a file of `source`, with its path in that folder',
    ),
    (
        GOOD + "source: .\nrequirements: note.txt\n",
        'job.yaml:4: requirements: "note.txt": no such file in `source` (.) (did you mean notes.txt?)',
    ),
    (
        GOOD + "source: code\nrequirements: pyproject.toml\n",
        'job.yaml:4: requirements: "pyproject.toml": want a requirements file (.txt) or uv.lock '
        "(did you mean uv.lock?)",
    ),
    (
        GOOD + "source: code\nrequirements: uv.lock\n",
        'job.yaml:4: requirements: "uv.lock": no such file in `source` (code)',
    ),
    (GOOD + "retry: {crashes: -1}\n", "job.yaml:3: retry.crashes: -1: must be at least 0"),
    (GOOD + "seed: 4294967296\n", "job.yaml:3: seed: 4294967296: must be less than 4294967296"),
    # --- names, command, interpreter
    (
        "name: My Job\ncommand: [/opt/train.py]\n",
        'job.yaml:1: name: "My Job": want a letter, then letters, digits and -, at most 40, all lower case'
        " (did you mean my-job?)",
    ),
    (
        "name: 1st\ncommand: [/opt/train.py]\n",
        'job.yaml:1: name: "1st": want a letter, then letters, digits and -, at most 40, all lower case'
        " (did you mean st?)",
    ),
    (
        "name: first\ncommand: [train.py --lr 1]\n",
        'job.yaml:2: command: ["train.py --lr 1"]: is one text with spaces, want one entry per word: '
        "['train.py', '--lr', '1']",
    ),
    (
        "name: first\ncommand: [/opt/train.py, '&&', eval.py]\n",
        'job.yaml:2: command[1]: "&&": is for a shell, but no shell runs the command: use a script',
    ),
    (
        "name: first\ncommand: [python3, train.py]\n",
        'job.yaml:2: command[0]: "python3": want the script: `python:` names the interpreter (did you mean train.py?)',
    ),
    (
        "name: first\ncommand: [torchrun, --nproc-per-node=8, train.py]\n",
        'job.yaml:2: command[0]: "torchrun": want the script: Spotkeeper runs torchrun itself (did you mean train.py?)',
    ),
    (
        "name: first\ncommand: [accelerate, launch, train.py]\nsource: code\n",
        'job.yaml:2: command[0]: "accelerate": want the script: Spotkeeper runs torchrun itself, in '
        "place of `accelerate launch` (did you mean train.py?)",
    ),
    (
        "name: first\ncommand: [poetry, run, train.py]\nsource: code\n",
        'job.yaml:2: command[0]: "poetry": no such file in `source` (code)',
    ),
    ("name: first\ncommand: ['']\n", "job.yaml:2: command[0]: is empty, want the script's name"),
    (
        GOOD + "python: python3 -O\n",
        'job.yaml:3: python: "python3 -O": want one interpreter, such as python3 or /opt/venv/bin/python',
    ),
    # --- environment and secrets
    (
        GOOD + "env: {lr: '1'}\n",
        "job.yaml:3: env.lr: want a name of A-Z, 0-9 and _, at most 64, no digit first (did you mean LR?)",
    ),
    (
        GOOD + "env: {'A B': '1'}\n",
        'job.yaml:3: env["A B"]: want a name of A-Z, 0-9 and _, at most 64, no digit first (did you mean A_B?)',
    ),
    (
        GOOD + "env: {SPOTKEEPER_RUN: x}\n",
        "job.yaml:3: env.SPOTKEEPER_RUN: names that begin with SPOTKEEPER_ are set by Spotkeeper",
    ),
    (GOOD + "env: {MASTER_ADDR: x}\n", "job.yaml:3: env.MASTER_ADDR: is set by torchrun: remove it"),
    (
        GOOD + f"env: {{DATA: {LONG}}}\n",
        "job.yaml:3: env.DATA: has 5000 bytes, more than 4096: put it into a file of `source`",
    ),
    (GOOD + 'env: {DATA: "a\\0b"}\n', "job.yaml:3: env.DATA: contains a NUL character"),
    (
        GOOD + "env: {WANDB_API_KEY: abc}\n",
        "job.yaml:3: env.WANDB_API_KEY: looks like a secret: move it to `secrets`, with its address in the cloud's "
        "secret store instead of its value",
    ),
    (GOOD + "secrets: {HF_TOKEN: 'hf_x y'}\n", f"job.yaml:3: secrets.HF_TOKEN: {BY_REFERENCE}\n{UNREAD}"),
    (GOOD + "secrets: {B: gcp-secret://projects/p/secrets/hf}\n", f"job.yaml:3: secrets.B: {BY_REFERENCE}\n{UNREAD}"),
    (
        GOOD + "secrets: {A: 'gcp-secret://projects/p/secrets/../../versions/latest'}\n",
        f"job.yaml:3: secrets.A: {BY_REFERENCE}\n{UNREAD}",
    ),
    (GOOD + "secrets: {HF_TOKEN: gcp-secret://projects/p/secrets/hf/versions/latest}\n", UNREAD),
    (
        GOOD + "secrets: {A: 'aws-secret://arn:aws:secretsmanager:eu-west-1:123456789012:secret:hf-AbCdEf'}\n",
        f"job.yaml:3: secrets.A: is in another cloud than the stack (gcp)\n{UNREAD}",
    ),
    (
        GOOD + "env: {A: x}\nsecrets: {A: gcp-secret://projects/p/secrets/hf/versions/7}\n",
        "job.yaml:4: secrets.A: is in `env` too: keep only one\n" + UNREAD.replace(":3:", ":4:"),
    ),
    # --- combinations
    (GOOD + "nodes: {min: 3, max: 2}\n", "job.yaml:3: nodes.min: 3: is above nodes.max (2)"),
    (
        GOOD + "nodes: {min: 1, max: 2}\ncheckpoint: {replicated: false}\n",
        "job.yaml:3: nodes: must be one number for sharded state (`checkpoint.replicated: false`), not a range",
    ),
    (
        GOOD + "nodes: 2\ncheckpoint: {peers: 1}\n",
        "job.yaml:4: checkpoint.peers: 1: needs sharded state (`checkpoint.replicated: false`): replicated state is on "
        "every node already",
    ),
    (
        GOOD + "checkpoint: {replicated: false, peers: 1}\n",
        "job.yaml:3: checkpoint.peers: 1: needs two nodes or more: a node alone has no neighbour",
    ),
    (
        GOOD + "nodes: 2\ncheckpoint: {replicated: false, snapshots: false, peers: 1}\n",
        "job.yaml:4: checkpoint.peers: 1: needs `checkpoint.snapshots: true`: the neighbour keeps a copy of a snapshot",
    ),
    (
        GOOD + "scratch_gb: 60\n",
        "job.yaml:3: scratch_gb: 60: is more than half of the disks of pool always: lower it to 25, or add "
        "`static: never`",
    ),
    (
        GOOD + MIX + "nodes: 3\n",
        "job.yaml:4: nodes: contradicts `machines`, which says how many nodes each pool has: remove `nodes`",
    ),
    (
        GOOD + MIX + "pools: [gpus]\n",
        "job.yaml:4: pools: contradicts `machines`, which names the pools: remove `pools`",
    ),
    (
        GOOD + "machines: [{pool: gpus, nodes: 2}]\n",
        "job.yaml:3: machines: names a single pool: write `pools: [gpus]` and `nodes: 2` instead",
    ),
    (
        GOOD + MIX + "stop: signal\nstatic: never\n",
        "job.yaml:4: stop: `signal` excludes `machines`: only the library divides work by the machines' speeds",
    ),
    (
        GOOD + MIX + "checkpoint: {replicated: false}\n",
        "job.yaml:4: checkpoint.replicated: `false` excludes `machines`: all ranks of a sharded model do the same work",
    ),
    (
        GOOD + MIX + "stragglers: replace\n",
        "job.yaml:4: stragglers: `replace` excludes `machines`: it would replace the slower type again and again; use "
        "`report`",
    ),
    (
        GOOD + "machines: [{pool: gpus, nodes: 1}, {pool: gpus, nodes: 1}]\n",
        'job.yaml:3: machines[1].pool: "gpus": is named twice',
    ),
    (
        GOOD + "machines: [{pool: gpus, nodes: 1}, {pool: gpus, nodes: 3}, {pool: workers, nodes: 9}]\n",
        'job.yaml:3: machines[1].pool: "gpus": is named twice\n'
        "job.yaml:3: machines[1].nodes: 3: is more machines than pool gpus may have (2)\n"
        "job.yaml:3: machines[2].nodes: 9: is more machines than pool workers may have (4)",
    ),
    (
        GOOD + "machines:\n  - {pool: gpus, nodes: 0}\n  - {pool: gpu, nodes: 1}\n  - {pool: workers, nodes: 9}\n"
        "  - {pool: always, nodes: 1}\n  - {pool: workers, nodes: 1}\n"
        "pools: [gpus]\nstop: sgnal\nstragglers: replace\n",
        "job.yaml:4: machines[0].nodes: 0: must be at least 1\n"
        'job.yaml:10: stop: "sgnal": not one of library, signal (did you mean signal?)\n'
        "job.yaml:9: pools: contradicts `machines`, which names the pools: remove `pools`\n"
        "job.yaml:11: stragglers: `replace` excludes `machines`: it would replace the slower type again and again; use "
        "`report`\n"
        'job.yaml:5: machines[1].pool: "gpu": the stack prod has no such pool (did you mean gpus?)\n'
        "job.yaml:6: machines[2].nodes: 9: is more machines than pool workers may have (4)\n"
        'job.yaml:7: machines[3].pool: "always": has static machines: a mix takes only spot and on-demand machines\n'
        'job.yaml:8: machines[4].pool: "workers": is named twice',
    ),
    (
        GOOD + "machines: [{pool: gpu, nodes: 1}, {pool: workers, nodes: 1}]\n",
        'job.yaml:3: machines[0].pool: "gpu": the stack prod has no such pool (did you mean gpus?)',
    ),
    (
        GOOD + "machines: [{pool: gpus, nodes: 1}, {pool: always, nodes: 1}]\n",
        'job.yaml:3: machines[1].pool: "always": has static machines: a mix takes only spot and on-demand machines',
    ),
    (
        GOOD + "machines: [{pool: gpus, nodes: 3}, {pool: workers, nodes: 1}]\n",
        "job.yaml:3: machines[0].nodes: 3: is more machines than pool gpus may have (2)",
    ),
    (
        GOOD + "machines: [{pool: gpus, nodes: 2}, {pool: workers, nodes: 4}]\n",
        "job.yaml:3: machines: 6: needs 6 dynamic machines, but `limits.machines` of the stack is 5",
    ),
    (
        GOOD + MIX + "policy: on-demand\n",
        'job.yaml:4: policy: "on-demand": the job needs at least 3 machines, of which 1 may be on-demand or static '
        "(max_on_demand)",
    ),
    (
        GOOD + MIX + "team: audio\n",
        "job.yaml:3: machines: 3: is more machines than team audio may have (`max_machines` is 2)",
    ),
    (
        GOOD + MIX + "max_usd: 0.1\n",
        "job.yaml:4: max_usd: 0.1: is below what one start costs (about $0.50 by list prices)",
    ),
    (
        GOOD + "stop: signal\n",
        "job.yaml:3: stop: `signal` needs `static: never`, since a static machine does not have the job's disks",
    ),
    (
        GOOD + "stop: signal\nstatic: never\nnodes: {min: 1, max: 2}\n",
        "job.yaml:3: stop: `signal` needs a fixed number of nodes: only jobs that use the library redistribute batches",
    ),
    (
        GOOD + "stop: signal\nstatic: never\ncheckpoint: {mirror: {}}\n",
        "job.yaml:3: stop: `signal` excludes `checkpoint.mirror`, which copies only what the library saves",
    ),
    (
        GOOD + "deadline: tomorrow\n",
        'job.yaml:3: deadline: "tomorrow": want a span (90m, 6h, 2d) or a time with its zone (2026-12-24T18:00Z)',
    ),
    (
        GOOD + "deadline: 2027-02-01 10:00\n",
        'job.yaml:3: deadline: "2027-02-01 10:00": a time needs its time zone (2027-02-01T10:00Z for UTC)',
    ),
    (
        GOOD + "deadline: 2027-02-01\n",
        'job.yaml:3: deadline: "2027-02-01": a time needs its time zone (2027-02-01T00:00Z for UTC)',
    ),
    (GOOD + "work: soon\n", 'job.yaml:3: work: "soon": want a length of time, such as 90m, 6h or 2d'),
    (GOOD + "max_wait: 9999999d\n", 'job.yaml:3: max_wait: "9999999d": is more than ten years'),
    (GOOD + "max_usd: 0.01\n", "job.yaml:3: max_usd: 0.01: is below what one start costs (about $0.17 by list prices)"),
    (
        GOOD + "deadline: 2020-01-01T00:00Z\n",
        'job.yaml:3: deadline: "2020-01-01T00:00Z": is in the past; '
        "now is 2027-01-15 08:00 UTC, and 6h or 2d would count from now",
    ),
    (
        GOOD + "work: 10\n",
        "job.yaml:3: work: 10: want a text: 40h, 90m, 2d: training time without interruptions; "
        "unset: estimated from the first steps",
    ),
    (GOOD + "max_on_demand: 2\n", "job.yaml:3: max_on_demand: 2: is above the number of nodes (1)"),
    (
        GOOD + "policy: on-demand\nmax_on_demand: 0\n",
        "job.yaml:4: max_on_demand: 0: contradicts `policy: on-demand`: remove one of these fields",
    ),
    (
        GOOD + "policy: spot\nmax_on_demand: 1\n",
        "job.yaml:4: max_on_demand: 1: contradicts `policy: spot`: remove one of these fields",
    ),
    (
        GOOD + "trial: {sweep: s, number: 0, metric: loss}\n",
        "job.yaml:3: trial: is filled in by sweep: remove it",
    ),
    (GOOD + "source_sha256: abc\n", 'job.yaml:3: source_sha256: "abc": is filled in by submit: remove it'),
    # --- the source folder
    (
        GOOD + "source: cod\n",
        'job.yaml:3: source: "cod": no such folder (relative to the job file) (did you mean code?)',
    ),
    (
        GOOD + "source: notes.txt\n",
        'job.yaml:3: source: "notes.txt": is a file, want the folder with the script',
    ),
    (
        GOOD + "source: /\n",
        'job.yaml:3: source: "/": would send a whole home or root folder: name the project\'s folder',
    ),
    (
        "name: first\ncommand: [tran.py]\nsource: code\n",
        'job.yaml:2: command[0]: "tran.py": no such file in `source` (code) (did you mean train.py?)',
    ),
    (
        "name: first\ncommand: [code/train.py]\n",
        'job.yaml:2: command[0]: "code/train.py": is beside the job file, but is not sent: add `source: .`',
    ),
    *(
        (
            f"name: first\ncommand: [{script}, --lr, '1']\n",
            f'job.yaml:2: command[0]: "{script}": is not sent to the machines: add `source: .`, or use the '
            "script's absolute path on the machines",
        )
        for script in ("train.py", "tools/run", "../train.py", "~/train.py")
    ),
    # --- against the stack
    (
        GOOD + "pools: [worker]\n",
        'job.yaml:3: pools[0]: "worker": the stack prod has no such pool (did you mean workers?)',
    ),
    (
        GOOD + "pools: [xyz]\n",
        'job.yaml:3: pools[0]: "xyz": the stack prod has no such pool (it has workers, always, gpus)',
    ),
    (
        GOOD + "notify: {ml-taem: [failed]}\n",
        "job.yaml:3: notify.ml-taem: the stack prod has no such channel (did you mean ml-team?)",
    ),
    (GOOD + "notify: {ops: []}\n", "job.yaml:3: notify.ops: the stack prod has no such channel (it has ml-team)"),
    (
        GOOD + "notify: {'https://hooks.slack.com/services/T/B/x': [failed]}\n",
        "job.yaml:3: notify: contains an address: name a channel, to which the stack file gives an address",
    ),
    (
        GOOD + "notify: {ml-team: [fail]}\n",
        'job.yaml:3: notify.ml-team[0]: "fail": not one of started, first-checkpoint, on-demand, hold, resumed, '
        "over-budget, finished, failed (did you mean failed?)",
    ),
    (GOOD + "pools: [workers, workers]\n", 'job.yaml:3: pools[1]: "workers": is named twice'),
    (
        GOOD + "regions: [us-esat1]\n",
        'job.yaml:3: regions[0]: "us-esat1": the stack prod is not in this region, only in us-central1 '
        "(did you mean us-central1?)",
    ),
    (GOOD + "regions: [us-central1, us-central1]\n", 'job.yaml:3: regions[1]: "us-central1": is named twice'),
    (
        GOOD + "spread: true\nregions: [us-central1, us-central2]\n",
        'job.yaml:4: regions[1]: "us-central2": the stack prod is not in this region, only in us-central1 '
        "(did you mean us-central1?)\n"
        "job.yaml:3: spread: true: a gang cannot train across regions: name one of them in `regions`",
    ),
    (GOOD + "nodes: 5\npools: [workers]\n", "job.yaml:3: nodes: 5: is more machines than pool workers may have (4)"),
    (
        GOOD + "nodes: {min: 1, max: 9}\n",
        "job.yaml:3: nodes.max: 9: is more machines than pools workers, always, gpus may have (7)",
    ),
    (
        GOOD + "nodes: 7\nspread: true\n",
        "job.yaml:3: nodes: 7: needs 6 dynamic machines, but `limits.machines` of the stack is 5",
    ),
    (
        GOOD + "static: never\npools: [always]\n",
        'job.yaml:3: static: "never": rules out every pool under `pools`, since all are static',
    ),
    (
        GOOD + "policy: on-demand\npools: [gpus]\n",
        'job.yaml:3: policy: "on-demand": no on-demand machine is allowed in pool gpus',
    ),
    (
        GOOD + "policy: on-demand\npools: [workers]\nnodes: 4\n",
        'job.yaml:3: policy: "on-demand": the job needs at least 4 machines, of which 2 may be on-demand or static'
        " (max_on_demand)",
    ),
    # --- parameters
    (
        GOOD + "params: {lr-0: 1}\n",
        "job.yaml:3: params.lr-0: want a name of letters, digits and _, at most 64, no digit first",
    ),
    (GOOD + "params: {lr: .inf}\n", "job.yaml:3: params.lr: inf: want a finite number"),
    (
        GOOD + "params: {lr: [1]}\n",
        "job.yaml:3: params.lr: [1]: want true or false or a whole number or a number or a text",
    ),
    (GOOD + 'params: {lr: "a\\0b"}\n', "job.yaml:3: params.lr: contains a NUL character"),
    (
        GOOD + f"params: {{lr: {'a' * 5000}}}\n",
        "job.yaml:3: params.lr: has 5000 bytes, more than 4096: put it into a file of `source`",
    ),
    (
        GOOD + "params:\n" + "".join(f"  p{at}: {'a' * 4000}\n" for at in range(9)),
        "job.yaml:3: params: have 36018 bytes, more than 32768: put them into a file of `source`",
    ),
    (
        "name: first\ncommand: [/opt/train.py, '--lr={rl}']\nparams: {lr: 1}\n",
        'job.yaml:2: command[1]: "--lr={rl}": no parameter has the name rl: add it to `params`, or write {{rl}} for '
        "the text {rl}",
    ),
    # --- against the stack's teams
    (
        GOOD + "priority: hihg\n",
        'job.yaml:3: priority: "hihg": not one of high, low, normal (did you mean high?)',
    ),
    (GOOD + "team: visoin\n", 'job.yaml:3: team: "visoin": the stack prod has no such team (did you mean vision?)'),
    (GOOD + "team: xyz\n", 'job.yaml:3: team: "xyz": the stack prod has no such team (it has vision, audio)'),
    (GOOD + "team: default\n", 'job.yaml:3: team: "default": is the team of users whom no team lists: leave it out'),
    (
        GOOD + "team: audio\npriority: high\n",
        'job.yaml:4: priority: "high": team audio allows it to nobody: use normal, or list members under the team\'s '
        "`high` in the stack file",
    ),
    (
        GOOD + "team: audio\nnodes: {min: 3, max: 4}\n",
        "job.yaml:4: nodes.min: 3: is more machines than team audio may have (`max_machines` is 2)",
    ),
    (
        GOOD + "team: audio\nnodes: 2\npolicy: on-demand\n",
        "job.yaml:4: nodes: 2: costs at least $6.00 an hour (a machine of workers $3.00, always $3.00, gpus $3.00), "
        "and team audio may spend $4.00 (`max_usd_per_hour`): use fewer machines or cheaper pools, or raise the team's "
        "limit in the stack file",
    ),
    (
        GOOD + "nodes: 9\nstop: signal\nstatic: never\n",
        "job.yaml:3: nodes: 9: is more machines than pools workers, gpus may have (6)",
    ),
    (
        GOOD + "nodes: 4\nstop: signal\nstatic: never\n",
        "job.yaml:3: nodes: 4: is more than the share of team vision, 3.6 of 6 machines. A job with `stop: signal` "
        "would lose work if machines were taken back, so it borrows none: use fewer nodes or `stop: library`, or "
        "raise the team's `share` in the stack file",
    ),
    (GOOD + "nproc: 16\npools: [gpus]\n", "job.yaml:3: nproc: 16: is more than the 8 devices of a machine of gpus"),
]


@pytest.mark.parametrize(("text", "message"), JOB_CASES, ids=[case[1][9:60] for case in JOB_CASES])
def test_wrong_job_file(folder: Path, text: str, message: str) -> None:
    assert complaint(folder, text) == message


@pytest.mark.parametrize("form", ["command: {}", "command: ['{}']"])
@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("train.py --lr 1", ["train.py", "--lr", "1"]),
        ("python train.py", ["train.py"]),
        ("/opt/venv/bin/python3.11 -u train.py --lr 1", ["train.py", "--lr", "1"]),
        ("python -m my.package --lr 1", ["-m", "my.package", "--lr", "1"]),
        ("torchrun --nproc-per-node 8 train.py", ["train.py"]),
        ("bash run.sh", None),
        ("cd code && python train.py", None),
    ],
)
def test_the_suggested_command_is_accepted(folder: Path, form: str, line: str, advice: list[str] | None) -> None:
    found = re.search(r"(\[[^]]*\])$", complaint(folder, f"name: first\n{form.format(line)}\nsource: code\n"))
    assert (ast.literal_eval(found[1]) if found else None) == advice
    if advice:
        spec = load_yaml(f"name: first\ncommand: {json.dumps(advice)}\nsource: code\n", JobSpec)
        assert check_job(spec, STACK, folder=folder, now=NOW) is spec


def test_all_problems_are_reported_at_once(folder: Path) -> None:
    text = "nme: a\ncommand: x\nnodes: 0\n"
    assert complaint(folder, text).splitlines() == [
        "job.yaml:1: nme: unknown key (did you mean name?)",
        'job.yaml:2: command: "x": want a list of texts with at least 1, such as ["x"]',
        "job.yaml:3: nodes: 0: must be at least 1",
    ]


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (  # types, what fields mean together, the source folder, and the stack
            "name: First\ncommand: [trian.py]\nsource: code\nnodes: {min: 9, max: 8}\nnproc: two\npools: [worker]\n"
            "policy: spot\nmax_on_demand: 2\nspred: true\nenv: {LR: 0.1, lr: '1'}\ncheckpoint: {keep: 1}\n",
            [
                'job.yaml:5: nproc: "two": want a whole number',
                "job.yaml:9: spred: unknown key (did you mean spread?)",
                "job.yaml:10: env.LR: 0.1: want a text: put it in quotes",
                "job.yaml:11: checkpoint.keep: 1: must be at least 2",
                'job.yaml:1: name: "First": want a letter, then letters, digits and -, at most 40, all lower case '
                "(did you mean first?)",
                "job.yaml:4: nodes.min: 9: is above nodes.max (8)",
                "job.yaml:10: env.lr: want a name of A-Z, 0-9 and _, at most 64, no digit first (did you mean LR?)",
                "job.yaml:8: max_on_demand: 2: contradicts `policy: spot`: remove one of these fields",
                'job.yaml:2: command[0]: "trian.py": no such file in `source` (code) (did you mean train.py?)',
                'job.yaml:6: pools[0]: "worker": the stack prod has no such pool (did you mean workers?)',
            ],
        ),
        (  # what only a wrong field could tell is not guessed: the source that was meant, the number of nodes
            "name: first\ncommand: [train.py]\nsorce: code\nnodes: many\nmax_on_demand: 5\n",
            [
                "job.yaml:3: sorce: unknown key (did you mean source?)",
                'job.yaml:4: nodes: "many": want a whole number or a mapping with min, max',
            ],
        ),
        (
            "name: first\ncommand: [train.py]\nsource: cod\npools: [7]\n"
            "policy: on-demand\nmax_on_demand: 0\nnodes: 0\n",
            [
                "job.yaml:4: pools[0]: 7: want a text: put it in quotes",
                "job.yaml:7: nodes: 0: must be at least 1",
                "job.yaml:6: max_on_demand: 0: contradicts `policy: on-demand`: remove one of these fields",
                'job.yaml:3: source: "cod": no such folder (relative to the job file) (did you mean code?)',
            ],
        ),
        ("[1, 2]\n", ["job.yaml:1: [1, 2]: want a mapping with name, command, nodes, pools, ..."]),
    ],
    ids=["all", "unknown", "partly", "none"],
)
def test_an_invalid_field_hides_no_other_problem(folder: Path, text: str, messages: list[str]) -> None:
    assert complaint(folder, text).splitlines() == messages


def test_a_gang_too_large_for_every_zone_is_refused(folder: Path) -> None:
    apart = msgspec.structs.replace(
        STACK,
        pools=(
            pool("a", zones=ZONES[:1], prices={ZONES[0]: Price(on_demand=3.0)}, max_machines=2),
            pool("b", zones=ZONES[1:2], prices={ZONES[1]: Price(on_demand=3.0)}, max_machines=1, max_on_demand=1),
        ),
    )
    message = "job.yaml:3: nodes: 3: is more than any zone allows (us-central1-a: 2): add `spread: true` or lower it"
    assert complaint(folder, GOOD + "nodes: 3\n", apart) == message
    spec = load_yaml(GOOD + "nodes: 3\nspread: true\n", JobSpec)
    assert check_job(spec, apart).spread


@pytest.mark.parametrize(
    "text",
    [
        "team: vision\npriority: high\n",
        "priority: high\n",  # vision may, and nobody knows yet whose job it is
        "team: audio\nnodes: 2\n",
        "team: audio\npolicy: on-demand\n",
        "nodes: 4\n",
        "team: vision\nnodes: 3\nstop: signal\nstatic: never\n",
    ],
)
def test_what_one_team_allows_is_accepted(text: str) -> None:
    check_job(load_yaml(GOOD + text, JobSpec), TEAMS)


def test_without_teams_any_job_may_take_the_whole_stack() -> None:
    text = GOOD + "nodes: 5\nstop: signal\nstatic: never\nspread: true\npriority: high\n"
    check_job(load_yaml(text, JobSpec), STACK)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("nodes: 3\n", ["nodes: 3 never starts if your team is audio: it is more machines than team audio may have"]),
        (
            "nodes: 3\nstop: signal\nstatic: never\n",
            ["nodes: 3 never starts if your team is audio: ", "nodes: 3 never starts if your team is audio, default: "],
        ),
        ("team: vision\nnodes: 3\n", []),
        ("nodes: 1\n", []),
    ],
)
def test_a_job_that_starts_in_some_teams_only_is_a_caution(text: str, told: list[str]) -> None:
    found = list(cautions(load_yaml(GOOD + text, JobSpec), TEAMS, {}, NOW))
    assert len(found) == len(told) and all(line.startswith(begin) for line, begin in zip(found, told, strict=True))


def test_secrets_are_accepted_with_a_job_identity() -> None:
    spec = load_yaml(GOOD + "secrets: {HF_TOKEN: gcp-secret://projects/p/secrets/hf/versions/latest}\n", JobSpec)
    stack = msgspec.structs.replace(STACK, job_identity="trainer@p.iam.gserviceaccount.com")
    assert check_job(spec, stack).secrets == spec.secrets


def test_secret_values_are_never_repeated(folder: Path) -> None:
    for text in (f"env: {{DATA: {LONG}}}", "secrets: {A: 'hunter2 x'}", "env: {MY_PASSWORD: hunter2}"):
        message = complaint(folder, GOOD + text + "\n")
        assert "hunter2" not in message
        assert "xxxx" not in message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "{path}: no such file"),
        (lambda path: path.mkdir(), "{path}: is a folder, want a file"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "{path}: not a text file (UTF-8)"),
        (
            lambda path: path.write_bytes(b"#" * 1_000_001),
            "{path}: is larger than 1000 kB, too much for a job or stack file",
        ),
        (lambda path: path.symlink_to("/dev/zero"), "{path}: is larger than 1000 kB, too much for a job or stack file"),
    ],
    ids=["missing", "folder", "binary", "huge", "endless"],
)
def test_unreadable_job_files_are_errors(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "job.yaml"
    make(path)  # type: ignore[operator]
    with pytest.raises(SpecError) as caught:
        read_job(path, None, NOW)
    assert str(caught.value) == message.format(path=path)


def test_a_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(GOOD)
    with pytest.raises(SpecError, match=r"jobs\.yaml: no such file \(did you mean job\.yaml\?\)"):
        read_job(tmp_path / "jobs.yaml", None, NOW)


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(SpecError, match="nested too deep"):
        load_yaml("[" * 1500 + "]" * 1500, JobSpec, where="job.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [("no", "no"), ("on", "on"), ("12:30", "12:30"), ("2026-01-01", "2026-01-01"), ("1_000", "1_000"), ("0o17", 15)],
)
def test_yaml_scalars_are_not_reinterpreted(text: str, value: object) -> None:
    """YAML 1.1 would make False, True, 750, a date, 1000 and a text of them."""
    from spotkeeper.contract.parse.yamltext import read

    assert read(f"a: {text}\n")[0] == {"a": value}


# --- stack/pools.json ----------------------------------------------------------------


def stack_complaint(state: StackState) -> str:
    with pytest.raises(SpecError) as caught:
        check_stack(state)
    return str(caught.value)


def with_pool(**over: object) -> StackState:
    return msgspec.structs.replace(STACK, pools=(pool("workers", **over),))


def on_aws(**over: object) -> StackState:
    given = {"subnets": dict.fromkeys(ZONES, "subnet-1"), "template_versions": {"spot": "3", "on-demand": "1"}}
    return msgspec.structs.replace(with_pool(**(given | over)), cloud="aws")


NO_C = {zone: PRICES[zone] for zone in ZONES[:2]}
STACK_CASES = [
    (
        msgspec.structs.replace(STACK, stack="Prod_1"),
        'stack: "Prod_1": want a letter, then letters, digits and -, at most 24, all lower case',
    ),
    (
        msgspec.structs.replace(STACK, pools=(pool("a"), pool("a"))),
        'pools[1].name: "a": another pool has this name',
    ),
    (
        msgspec.structs.replace(STACK, pools=(pool("a_b"),)),
        'pools[0].name: "a_b": want a letter, then letters, digits and -, at most 24, all lower case',
    ),
    (
        with_pool(zones=("us-central1-a", "us-central1-a"), prices={ZONES[0]: PRICES[ZONES[0]]}),
        'pools[0].zones[1]: "us-central1-a": is named twice',
    ),
    (
        with_pool(zones=("us-central1-a", "us-east1-b"), prices={ZONES[0]: Price(3.0), "us-east1-b": Price(3.0)}),
        'pools[0].zones[1]: "us-east1-b": is not a zone of us-central1 (did you mean us-central1-a?)',
    ),
    (with_pool(prices=NO_C), "pools[0].prices.us-central1-c: missing, want the prices of this zone"),
    (
        with_pool(zones=ZONES[:2]),
        "pools[0].prices.us-central1-c: is not a zone of this pool (did you mean us-central1-b?)",
    ),
    (
        with_pool(prices={**PRICES, ZONES[1]: Price(on_demand=1.0, spot=2.0)}),
        "pools[0].prices.us-central1-b.spot: 2.0: is above the on-demand price",
    ),
    (
        with_pool(placement={"us-central1-x": "p"}),
        "pools[0].placement.us-central1-x: is not a zone of this pool (did you mean us-central1-c?)",
    ),
    (with_pool(max_on_demand=5), "pools[0].max_on_demand: 5: is above max_machines (4)"),
    (with_pool(templates={"on-demand": "t"}), "pools[0].templates.spot: missing, want the template's link"),
    (
        with_pool(templates={"spot": "t"}),
        "pools[0].templates.on-demand: missing, but max_on_demand is above 0",
    ),
    (
        with_pool(templates={"spot": "t", "on-demand": "t", "ondemand": "t"}),
        "pools[0].templates.ondemand: is no model (did you mean on-demand?)",
    ),
    (
        with_pool(machines=(StaticMachine("n", ZONES[0]),)),
        "pools[0].machines: 1: only a static pool has machines",
    ),
    (
        with_pool(kind="static", max_on_demand=0, max_machines=2, machines=(StaticMachine("n", ZONES[0]),)),
        "pools[0].machines: has 1 entries, but max_machines is 2",
    ),
    (
        with_pool(kind="static", max_on_demand=0, max_machines=1, machines=(StaticMachine("n", "us-central1-f"),)),
        'pools[0].machines[0].zone: "us-central1-f": is not a zone of this pool (did you mean us-central1-c?)',
    ),
    (
        on_aws(subnets=dict.fromkeys(ZONES[:2], "subnet-1")),
        "pools[0].subnets.us-central1-c: missing, want the subnet of this zone",
    ),
    (
        on_aws(template_versions={"spot": "3"}),
        "pools[0].template_versions.on-demand: missing, want the version of its launch template",
    ),
]


@pytest.mark.parametrize(("state", "message"), STACK_CASES, ids=[case[1][:50] for case in STACK_CASES])
def test_wrong_stack_document(state: StackState, message: str) -> None:
    assert stack_complaint(state) == message


def test_the_tests_stack_document_is_valid() -> None:
    assert check_stack(STACK) is STACK


TYPE_CASES = [
    ('{"stack": "s"}', "cloud: missing, want one of aws, gcp"),
    ('{"stack": "s", "cloud": "azure"}', 'cloud: "azure": not one of aws, gcp'),
    ('{"stack": "s", "pools": [{"name": "a", "disc_gb": 5}]}', "pools[0].disc_gb: unknown key (did you mean disk_gb?)"),
    ('{"stack": "s", "pools": [{"nproc": 0}]}', "pools[0].nproc: 0: must be at least 1"),
    ('{"stack": "s", "pools": [{"zones": []}]}', "pools[0].zones: []: too short, want a list of texts with at least 1"),
    (
        '{"stack": "s", "pools": [{"prices": {"z": {"ondemand": 1}}}]}',
        "pools[0].prices.z.ondemand: unknown key (did you mean on-demand?)",
    ),
    (
        '{"stack": "s", "pools": [{"kind": "spott"}]}',
        'pools[0].kind: "spott": not one of spot, static (did you mean spot?)',
    ),
    ('{"stack": "s", "lease_minutes": 0}', "lease_minutes: 0: must be at least 1"),
]


@pytest.mark.parametrize(("text", "message"), TYPE_CASES, ids=[case[1][:50] for case in TYPE_CASES])
def test_a_stack_document_of_wrong_types_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        load_yaml(text, StackState)
    assert message in [str(one) for one in caught.value.problems]


def test_every_validator_has_a_case(folder: Path) -> None:
    """A validator that no case above makes complain is one that nobody has seen work."""
    seen: set[str] = set()
    for text, _ in JOB_CASES:
        with contextlib.suppress(SpecError):
            context = JobContext(load_yaml(text, JobSpec), TEAMS, folder, NOW)
            seen |= {validator.__name__ for validator in JOB_VALIDATORS if list(validator(context))}
    for state, _ in STACK_CASES:
        seen |= {v.__name__ for v in POOL_VALIDATORS for one in state.pools if list(v(one, state))}
    assert seen == {validator.__name__ for validator in (*JOB_VALIDATORS, *POOL_VALIDATORS)}


def test_the_table_of_wrong_job_files_is_long() -> None:
    messages = [message for _, message in (*JOB_CASES, *STACK_CASES, *TYPE_CASES)]
    assert len(set(messages)) == len(messages) >= 60
