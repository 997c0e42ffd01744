"""`spotkeeper review`: a comment on standard output, an exit code for the guard, whatever the files hold."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from spotkeeper.client.errors import Exit
from spotkeeper.report.review.review import COMMENT_BYTES, LABEL
from tests.cli.conftest import Cli
from tests.infra.conftest import STACKS

PREVIEWS = Path(__file__).parents[2] / "report" / "review" / "previews"
GCP, AWS, LOCAL = (STACKS / f"Pulumi.{name}.yaml" for name in ("example-gcp", "example-aws", "local"))


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTKEEPER_STACK", raising=False)


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("resize", Exit.OK, ""),
        ("static-removed", Exit.REFUSED, "data would be lost: sk-local-floor-s0-data"),
        ("protected-removed", Exit.FAILED, "the preview failed"),
    ],
)
def test_the_comment_is_printed_whatever_the_verdict(cli: Cli, name: str, code: Exit, told: str) -> None:
    done = cli("review", "--preview", PREVIEWS / f"{name}.json", "--stack", "local")
    assert done.code == code and told in done.err
    assert done.out.startswith("<!-- spotkeeper-review local -->\n### Stack `local`: ")
    assert "#### Cost" in done.out


def test_a_label_accepts_the_loss_of_data(cli: Cli) -> None:
    done = cli("review", "--preview", PREVIEWS / "static-removed.json", "--stack", "local", "--allow-data-loss")
    assert done.code == 0 and LABEL in done.out and done.err == ""


def test_a_drift_check_fails_at_any_change(cli: Cli) -> None:
    words = ("review", "--stack", "local", "--expect-no-changes", "--preview")
    assert cli(*words, PREVIEWS / "refresh.json").code == 0
    drift = cli(*words, PREVIEWS / "resize.json")
    assert drift.code == Exit.REFUSED and "differs from the declaration: pools" in drift.err


def test_review_reads_standard_input_and_prints_json(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO((PREVIEWS / "disk-moved.json").read_bytes())

    monkeypatch.setattr("sys.stdin", Stdin())
    done = cli("review", "--preview", "-", "--stack", "local", "--json")
    told = json.loads(done.out)
    assert (told["stack"], told["verdict"], done.code) == ("local", "refused", Exit.REFUSED)
    assert [change["name"] for change in told["preview"]["changes"] if "data" in change] == ["sk-local-floor-s0-data"]
    assert [pool["name"] for pool in told["cost"]["pools"]] == ["floor", "burst"]


@pytest.mark.parametrize("file", [GCP, AWS])
def test_every_pool_of_the_examples_has_a_price(cli: Cli, file: Path) -> None:
    done = cli("review", "--preview", PREVIEWS / "fresh.json", "--stack-file", file, "--json")
    assert done.code == 0, done.err
    cost = json.loads(done.out)["cost"]
    assert cost["month"]["most"] > cost["always"]["least"] >= 0
    assert all(pool["month"] and not pool["unknown"] for pool in cost["pools"])


def test_a_stack_with_overlapping_rights_fails_and_shows_its_cost(cli: Cli, tmp_path: Path) -> None:
    for name in ("train", "train-2"):
        (tmp_path / f"Pulumi.{name}.yaml").write_text(GCP.read_text())
    done = cli("review", "--preview", PREVIEWS / "fresh.json", "--stack-file", tmp_path / "Pulumi.train.yaml")
    assert done.code == Exit.FAILED
    assert "is also the project of the stack train-2 (Pulumi.train-2.yaml)" in done.out and "#### Cost" in done.out


def test_the_cost_is_compared_with_the_base_branch(cli: Cli, tmp_path: Path) -> None:
    words = ("review", "--preview", PREVIEWS / "resize.json", "--stack", "local", "--base")
    base = tmp_path / "base.yaml"
    base.write_text(LOCAL.read_text().replace("size: 8\n", "size: 4\n"))
    assert "at most 8, 2 of them on-demand, was at most 4" in cli(*words, base).out
    for none in ("", None):
        base.write_text(none) if none is not None else base.unlink()  # the other branch has no such stack
        done = cli(*words, base)
        assert done.code == 0 and "was" not in done.out and "(new)" not in done.out
    base.write_text(LOCAL.read_text().replace("kind: spot", "kind: spto"))
    done = cli(*words, base)
    assert done.code == 0 and "is not valid" in done.err and "was" not in done.out


def test_the_comment_file_is_shortened_and_the_output_complete(cli: Cli, tmp_path: Path) -> None:
    words = ("review", "--preview", PREVIEWS / "static-removed.json", "--stack", "local", "--stacks", "40", "--comment")
    done = cli(*words, tmp_path / "comment.md")
    text = (tmp_path / "comment.md").read_text()
    assert done.code == Exit.REFUSED and len(text.encode()) <= COMMENT_BYTES // 40
    assert text.splitlines()[0] == done.out.splitlines()[0] and "data would be lost" in text
    assert "left out here" in text and "left out here" not in done.out and len(done.out) > len(text)
    done = cli(*words, tmp_path / "nowhere" / "comment.md")
    assert done.code == Exit.USAGE and "No such file" in done.err


def test_an_invalid_stack_file_appears_in_the_comment(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "Pulumi.prod.yaml"
    file.write_text(GCP.read_text().replace("kind: spot", "kind: spto"))
    done = cli("review", "--preview", PREVIEWS / "broken.json", "--stack-file", file)
    assert done.code == Exit.FAILED and 'pools[1].kind: "spto": not one of spot, static' in done.out
    assert "What it costs" not in done.out


@pytest.mark.parametrize(("text", "told"), [(None, "No such file"), ("", "it is empty"), ("{}", "not output of")])
def test_an_invalid_preview_is_an_error(cli: Cli, tmp_path: Path, text: str | None, told: str) -> None:
    file = tmp_path / "preview.json"
    if text is not None:
        file.write_text(text)
    done = cli("review", "--preview", file, "--stack", "local")
    assert (done.code, done.out) == (Exit.USAGE, "") and told in done.err
    assert "pulumi preview --json --show-sames >" in done.err
