"""`spotkeeper live-check --list`: the page of what only a cloud can tell, whole, and with a stack's own names."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from spotkeeper.cli.stacks import live
from spotkeeper.cli.stacks.stackfile import CHECKOUT
from tests.cli.conftest import Cli

NAMES = {"STACK": "prod", "BUCKET": "sk-acme-prod", "PROJECT": "acme", "REGION": "us-central1"}
TEXT = live.PAGE.read_text("utf-8")


@pytest.mark.parametrize("cloud", live.SECTIONS)
def test_every_entry_of_the_page_is_listed(cloud: str) -> None:
    parts = {part.partition("\n")[0]: part for part in TEXT.split("\n## ")}
    wanted = [re.findall(r"^\d+\. \*\*", parts[part], re.MULTILINE) for part in (live.SECTIONS[cloud], "Both")]
    assert len(live.checks(TEXT, cloud, NAMES)) == sum(map(len, wanted)) >= 12


@pytest.mark.parametrize("cloud", live.SECTIONS)
def test_commands_contain_the_stacks_names(cloud: str) -> None:
    for one in live.checks(TEXT, cloud, NAMES):
        assert all((one.what, one.why, one.command, one.expect)), one
        assert not re.search(r"STACK|PROJECT|REGION|BUCKET", " ".join(live.text([one]))), one
        first = shlex.split(one.command, comments=True)[0]  # quotes that close
        assert first in {"gcloud", "aws", "curl", "pulumi", "spotkeeper", "fi_info", "gh"}, one
        assert one.command.isascii() and "\n" not in one.command


def test_harmless_checks_have_a_match_marker() -> None:
    every = [one for cloud in live.SECTIONS for one in live.checks(TEXT, cloud, NAMES)]
    judged = [one for one in every if one.match]
    assert len(judged) >= 4
    for one in judged:
        re.compile(one.match)
        assert not re.search(r"destroy|remove|delete-function|put-function|drill", one.command), one


def test_placeholders_are_replaced_as_whole_words() -> None:
    page = "# x\n\n## AWS\n\n1. **W.** Y STACK_X.\n\n       a $(STACK)STACK_X\n\n   Expect: MY_STACK.\n\n## Both\n"
    (one,) = live.checks(page, "aws", NAMES)
    assert (one.why, one.command, one.expect) == ("Y STACK_X.", "a $(prod)STACK_X", "MY_STACK")


def test_a_stack_of_the_checkout_is_filled_in(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    done = cli("live-check", "--list", "--stack", "example-aws", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert any("arn:aws:iam::123456789012:role/sk-example-aws-fn" in one["command"] for one in told)
    words = cli("live-check", "--list", "--stack", "example-gcp").out
    assert "1. Spot templates" in words and "--location=us-central1" in words and "expect: " in words
    monkeypatch.setattr(live, "PAGE", Path("/nonexistent/page.md"))
    missing = cli("live-check", "--list", "--stack", "example-gcp")
    assert missing.code == 3 and "run it in a checkout" in missing.err


def test_other_pages_link_to_the_page() -> None:
    for page in ("README", "gcp", "aws"):
        assert "(first-live-hour.md)" in (CHECKOUT / "docs" / f"{page}.md").read_text("utf-8"), page
