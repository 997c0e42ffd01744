"""The workflows: nothing that moves by itself, no more rights than are used, and no work of their own.

Where ``actionlint`` and ``zizmor`` are installed they judge them too (`make lint` runs both).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra.settings.checks import UNWATCHED
from spotkeeper.report.review.review import COMMENT_BYTES, LABEL, marker

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONS = sorted((ROOT / ".github" / "actions").glob("*/action.yml"))
NAMES = [file.stem for file in FILES]


def tool(name: str) -> str:
    """Beside this Python, or on PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (CONTRIBUTING.md)")
    return found


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    return document


def jobs() -> list[tuple[str, str, dict[str, Any]]]:
    return [(name, key, job) for name in NAMES for key, job in read(name)["jobs"].items()]


def scripts(job: dict[str, Any]) -> str:
    return "\n".join(str(step.get("run", "")) for step in job["steps"])


def test_every_promised_workflow_exists() -> None:
    assert NAMES == ["drift", "drill", "nightly", "preview", "test", "up"]


def test_every_night_runs_what_the_tests_of_a_change_leave_out() -> None:
    (job,) = read("nightly")["jobs"].values()
    targets = {row["target"] for row in job["strategy"]["matrix"]["include"]}
    simulated = {"model", "soak", "ec2", "stories", "burst"}
    assert targets == simulated | {"crash", "features", "security", "recovery", "lifecycle", "engine"}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    assert targets <= set(re.findall(r"^([a-z0-9]+):", makefile, re.MULTILINE))
    whole = [line for line in makefile.splitlines() if "SPOTKEEPER_TESTS_WHOLE=1" in line]
    covered = tuple(word for line in whole for word in line.split() if word.startswith("tests/"))
    sized = [
        path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"^from tests.sizes", path.read_text(), re.M)
    ]
    assert len(sized) > 3
    assert [path for path in sized if not str(path.relative_to(ROOT)).startswith(covered)] == []


def test_actionlint_finds_nothing() -> None:
    done = subprocess.run(
        [tool("actionlint"), *map(str, FILES)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_zizmor_finds_nothing() -> None:
    command = [tool("zizmor"), "--offline", "--quiet", str(ROOT / ".github")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("file", [*FILES, *ACTIONS], ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_action_is_named_by_its_commit(file: Path) -> None:
    for line in file.read_text().splitlines():
        if found := re.search(r"uses: (\S+)(.*)", line):
            ours = found[1].startswith("./")
            assert ours or re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", found[1]), line
            assert ours or re.match(r" # v\d+\.\d+\.\d+", found[2]), f"and by its version, for people: {line}"


def test_one_action_is_one_commit_everywhere() -> None:
    used: dict[str, set[str]] = {}
    for file in (*FILES, *ACTIONS):
        for name, commit in re.findall(r"uses: ([\w./-]+)@([0-9a-f]{40})", file.read_text()):
            used.setdefault(name, set()).add(commit)
    assert used and all(len(commits) == 1 for commits in used.values()), used


@pytest.mark.parametrize(("name", "key", "job"), jobs(), ids=lambda value: value if isinstance(value, str) else "")
def test_each_workflow_job_has_permissions_and_a_timeout(name: str, key: str, job: dict[str, Any]) -> None:
    assert read(name)["permissions"] == {}
    assert job["timeout-minutes"] <= 60
    rights = dict(job["permissions"])
    assert rights.get("contents", "read") == "read"
    writes = {right for right, what in rights.items() if what == "write"}
    runs_ours = any("checkout" in str(step.get("uses", "")) for step in job["steps"])
    assert writes <= ({"id-token"} if runs_ours else {"pull-requests", "issues"}), "code of a branch writes nowhere"
    for step in job["steps"]:
        if "checkout" in str(step.get("uses", "")):
            assert step["with"]["persist-credentials"] is False


def test_no_workflow_needs_stored_secrets() -> None:
    for file in (*FILES, *ACTIONS):
        text = file.read_text()
        assert "secrets." not in text and "PULUMI_ACCESS_TOKEN" not in text and "pull_request_target" not in text


def test_only_an_approved_job_may_write_to_a_cloud() -> None:
    for name, key, job in jobs():
        text = yaml.safe_dump(job)
        if "UP_" in text or "_UP_" in text or "pulumi up" in text:
            assert (name, key) == ("up", "up") and job["environment"] == "${{ matrix.stack }}"
            assert job["needs"] == "review", "what is approved can be read"
    assert read("up")["concurrency"]["cancel-in-progress"] is False
    assert (
        "github.event.pull_request.head.repo.full_name == github.repository" in read("preview")["jobs"]["preview"]["if"]
    )


def test_data_is_guarded_before_every_up_and_on_every_pull_request() -> None:
    for name, key in (("preview", "preview"), ("up", "review"), ("up", "up")):
        job = read(name)["jobs"][key]
        text = scripts(job)
        reviewed = 'spotkeeper review --preview "$RUNNER_TEMP/preview.json"'
        assert "pulumi preview" in text and reviewed in text, (name, key)
        assert "|| true" not in text
        steps = [step for step in job["steps"] if "spotkeeper review" in str(step.get("run", ""))]
        assert all("SPOTKEEPER_ALLOW_DATA_LOSS" in step["env"] for step in steps)
        assert not any(step.get("continue-on-error") for step in job["steps"])
    guarded = scripts(read("up")["jobs"]["up"])
    assert guarded.index("spotkeeper review") < guarded.index("pulumi up")
    labels = (ROOT / ".github" / "workflows" / "preview.yml").read_text() + scripts(read("up")["jobs"]["review"])
    assert labels.count(LABEL) >= 4 and LABEL in (ROOT / "docs" / "pull-requests.md").read_text()


def test_no_workflow_writes_files_into_a_jobs_source() -> None:
    """What lies there is part of the job: its content would differ in every run, and an `up` be refused."""
    for name in ("preview", "up", "drift"):
        for job in read(name)["jobs"].values():
            if not any("checkout" in str(step.get("uses", "")) for step in job["steps"]):
                continue
            targets = re.findall(r"(?:>>?|mkdir) (\S+)", scripts(job))
            assert targets, name
            assert all(each.startswith(('"$RUNNER_TEMP/', '"$GITHUB_')) for each in targets), (name, targets)


def test_rules_are_checked_on_the_whole_stack() -> None:
    """A preview tells what changes alone, unless it is asked for the rest."""
    lines = [line for _, _, job in jobs() for line in scripts(job).splitlines() if "pulumi preview" in line]
    assert len(lines) == 4
    for line in lines:
        assert ("--show-sames" in line) == ("--refresh" not in line), line


def test_the_required_check_runs_on_every_pull_request() -> None:
    """GitHub waits for ever for a required check that a filter of paths left out, and takes one that was skipped for
    passed: from a fork, to which no variables are given, it must begin without them."""
    preview = read("preview")
    assert set(preview[True]) == {"pull_request"} and set(preview[True]["pull_request"]) == {"types"}
    verdict = preview["jobs"]["verdict"]
    assert verdict["needs"] == ["labels", "preview"] and "strategy" not in verdict
    fork = "github.event.pull_request.head.repo.full_name != github.repository"
    assert verdict["if"] == f"always() && (vars.SPOTKEEPER_STACKS != '' || {fork})"
    page = (ROOT / "docs" / "pull-requests.md").read_text()
    assert "the check `verdict`" in page and "`allow-no-preview`" in page


GIVEN = """#!/bin/sh
# What GitHub answers of runs and of events, through the filter that it was given.
for last; do :; done
case "$*" in
  *"/actions/runs?event=pull_request&head_sha=$HEAD"*) jq -r "$last" runs.json ;;
  *"/issues/7/events"*) jq -r "$last" events.json ;;
  *"/pulls/7"*) jq -r "$last" pull.json ;;
  *) exit 9 ;;
esac
"""
AT = "2026-11-22T10:0{}:00Z"


@pytest.mark.parametrize(
    ("came", "events", "given"),
    [
        pytest.param([1], [("labeled", LABEL, 2)], "true", id="after the push"),
        pytest.param([3], [("labeled", LABEL, 2)], "false", id="for an earlier commit"),
        pytest.param([3], [("labeled", LABEL, 2), ("unlabeled", LABEL, 4), ("labeled", LABEL, 5)], "true", id="again"),
        pytest.param([2], [("labeled", LABEL, 2)], "false", id="in the same second"),
        pytest.param([1], [("labeled", "allow-no-preview", 2)], "false", id="another label"),
        pytest.param([1, 5], [("labeled", LABEL, 2)], "true", id="a run again is no push"),
        pytest.param([1], [("labeled", LABEL, 3), ("head_ref_force_pushed", "", 4)], "false", id="an old commit, back"),
        pytest.param([], [("labeled", LABEL, 2)], "false", id="a commit that nobody saw"),
        pytest.param([1], [], "false", id="no label"),
    ],
)
def test_a_label_counts_only_for_its_commit(
    tmp_path: Path, came: list[int], events: list[tuple[str, str, int]], given: str
) -> None:
    """It stays when others are pushed, and would agree to what nobody has read."""
    tool("jq")
    (tmp_path / "gh").write_text(GIVEN)
    (tmp_path / "gh").chmod(0o755)
    ours = {"full_name": "acme/train"}
    runs = [{"created_at": AT.format(at), "head_repository": ours, "head_branch": "change"} for at in came]
    runs += [{"created_at": AT.format(0), "head_repository": ours, "head_branch": "another"}]  # it had the commit first
    (tmp_path / "runs.json").write_text(json.dumps({"workflow_runs": runs}))
    (tmp_path / "pull.json").write_text(json.dumps({"head": {"repo": ours, "ref": "change"}}))
    told = [
        {"event": what, "created_at": AT.format(at), **({"label": {"name": label}} if label else {})}
        for what, label, at in events
    ]
    (tmp_path / "events.json").write_text(json.dumps(told))
    environment = {
        "GITHUB_REPOSITORY": "acme/train",
        "HEAD": "abc",
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    command = [str(ROOT / ".github" / "labeled"), "7", "abc", LABEL]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, given), done


def test_every_use_of_a_label_checks_its_commit() -> None:
    preview, review = read("preview"), read("up")["jobs"]["review"]
    (checkout, _) = preview["jobs"]["labels"]["steps"]
    assert checkout["with"]["ref"] == "${{ github.event.pull_request.base.sha }}", "a branch may have another script"
    assert scripts(preview["jobs"]["labels"]).count('.github/labeled "$NUMBER" "$HEAD"') == 2
    told = [
        value
        for job in preview["jobs"].values()
        for step in job["steps"]
        for value in step.get("env", {}).values()
        if "pull_request.labels" in str(value)
    ]
    assert len(told) == 2 and all("needs.labels.outputs" in value for value in told)
    assert '.github/labeled "$number" "$head" allow-data-loss' in scripts(review)


GH = """#!/bin/sh
# What GitHub answers, through the filter that it was given.
for last; do :; done
case "$*" in
  *"/contents/infra/stacks"*) jq -r "$last" stacks.json ;;
  *"--paginate"*"/files"*) jq -r "$last" files.json ;;
  *) exit 9 ;;
esac
"""
SHIPPED, PROD = ["Pulumi.local.yaml", "Pulumi.example-gcp.yaml", "stack.schema.json"], "Pulumi.prod.yaml"


@pytest.mark.parametrize(
    ("result", "files", "stacks", "labeled", "count", "passes"),
    [
        ("success", [], [PROD], "false", 1, True),
        ("failure", [], [PROD], "true", 1, False),
        ("cancelled", [], [PROD], "false", 1, False),
        ("skipped", ["docs/train.md", "README.md", "tests/a/b.py", "bench/x.py"], [PROD], "false", 4, True),
        ("skipped", ["README.md", "infra/gcp/pools.py"], [PROD], "false", 2, False),
        ("skipped", ["jobs/docs/vit.yaml"], [PROD], "false", 1, False),
        ("skipped", ["spotkeeper/notes.md"], [PROD], "false", 1, False),
        ("skipped", [".github/workflows/preview.yml"], [PROD], "false", 1, False),
        ("skipped", ["docs/pools.py < infra/gcp/pools.py"], [PROD], "false", 1, False),  # moved out of a stack
        ("skipped", ["infra/gcp/pools.py"], [PROD], "true", 1, True),
        ("skipped", ["infra/gcp/pools.py"], [], "false", 1, True),  # whoever has no stacks has nothing to preview
        ("skipped", ["README.md"], [PROD], "false", 3001, False),
    ],
)
def test_an_unpreviewed_change_of_a_fork_fails(
    tmp_path: Path, result: str, files: list[str], stacks: list[str], labeled: str, count: int, passes: bool
) -> None:
    tool("jq")
    (tmp_path / "gh").write_text(GH)
    (tmp_path / "gh").chmod(0o755)
    (tmp_path / "stacks.json").write_text(json.dumps([{"name": name} for name in SHIPPED + stacks]))
    moved = (name.split(" < ") for name in files)
    (tmp_path / "files.json").write_text(
        json.dumps([{"filename": new, **({"previous_filename": old[0]} if old else {})} for new, *old in moved])
    )
    (step,) = read("preview")["jobs"]["verdict"]["steps"]
    said = {"RESULT": result, "LABELED": labeled, "CHANGED": str(count)}
    environment = {**step["env"], **said, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-e", "-c", step["run"]]  # as GitHub does where no shell is named
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode == 0) is passes, done
    if not passes:
        assert done.stdout.startswith("::error::") and done.stdout.count("\n") == 1
        assert result != "skipped" or ("sets the label allow-no-preview" in done.stdout and "branch" in done.stdout)


def test_files_ignored_by_up_need_no_preview() -> None:
    ignored = set(read("up")[True]["push"]["paths-ignore"])
    assert ignored == {"docs/**", "tests/**", "bench/**", "*.md"}
    of_stacks = read("preview")["jobs"]["verdict"]["steps"][0]["env"]["OF_STACKS"]
    assert 'test("^(docs|tests|bench)/|^[^/]+[.]md$") | not' in of_stacks


def test_a_job_file_must_be_in_a_watched_folder() -> None:
    ignored = {path.removesuffix("/**") for path in read("up")[True]["push"]["paths-ignore"]} - {"*.md"}
    assert ignored == set(UNWATCHED)


def test_a_changed_job_file_anywhere_starts_an_up() -> None:
    push = read("up")[True]["push"]
    assert "paths" not in push
    examples = {"jobs/vit.yaml", "train/job.yaml", "train/src/train.py", "examples/gpt/train.py", "Pulumi.yaml"}
    assert not [path for path in examples for ignored in push["paths-ignore"] if fnmatch(path, ignored)]


def test_a_changed_label_repeats_the_check() -> None:
    events = read("preview")[True]["pull_request"]["types"]  # YAML 1.1 reads `on` as yes
    assert {"labeled", "unlabeled", "synchronize", "opened"} <= set(events)


def test_the_comment_is_found_by_the_reviews_marker() -> None:
    mark = re.search(r'startswith\("([^"]+)"\)', scripts(read("preview")["jobs"]["comment"]))
    assert mark is not None and marker("prod").startswith(mark[1])
    without = re.search(r'\|\| echo "(.+?)" > comment\.md', scripts(read("preview")["jobs"]["comment"]))
    assert without is not None and without[1].startswith(mark[1]), "a preview that failed whole leaves one too"


def test_each_stack_has_its_share_of_the_comment() -> None:
    for name, key, told in (("preview", "preview", "comment"), ("drift", "look", "tell")):
        (step,) = [each for each in read(name)["jobs"][key]["steps"] if "spotkeeper review" in str(each.get("run", ""))]
        assert step["env"]["STACKS"] == "${{ strategy.job-total }}", name
        assert '.md" --stacks "$STACKS" >> "$GITHUB_STEP_SUMMARY"' in step["run"], name
        text = scripts(read(name)["jobs"][told])
        assert '"$RUN"' in text and "actions/runs" in str(read(name)["jobs"][told]["steps"][-1]["env"]["RUN"])
        assert int(re.search(r"head -c (\d+)", text)[1]) > COMMENT_BYTES + 500  # type: ignore[index]


def test_workflows_run_existing_commands() -> None:
    from spotkeeper.cli.main import app

    known = {command.callback.__name__ for command in app.registered_commands if command.callback}
    used = {word for _, _, job in jobs() for word in re.findall(r"\bspotkeeper ([a-z]+)", scripts(job))}
    assert used == {"review", "drill"} and used <= known
    for name, key, job in jobs():
        for step in job["steps"]:
            assert len(str(step.get("run", "")).splitlines()) <= 10, f"{name}.{key}: that much belongs into a command"


def test_no_workflow_hides_an_exit_code() -> None:
    for name, key, job in jobs():
        for line in scripts(job).splitlines():
            assert not re.search(r"\b(spotkeeper|pulumi) .*(?<!\|)\|(?!\|)", line), f"{name}.{key}: no pipefail: {line}"


def test_the_page_names_every_variable() -> None:
    page = (ROOT / "docs" / "pull-requests.md").read_text()
    used = {word for file in FILES for word in re.findall(r"\bvars\.([A-Z_]+)", file.read_text())}
    assert used and all(f"`{variable}`" in page for variable in used), used
