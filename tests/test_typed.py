"""What the pages tell operators to type exists: of `aws`, by botocore's own models; of `pulumi`, where it is on PATH.

A command that its cloud refuses is met by somebody in a hurry, with an account, and by no other test.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from botocore import xform_name
from botocore.session import get_session
from botocore.validate import ParamValidator

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
OF_THE_CLI = {"aws sso login", "aws logs tail"}  # the command line's own: in no model
GLOBAL = {"region", "output", "query", "cli-input-json", "profile"}


def written() -> list[str]:
    """Lines of code blocks and spans of code, a command's continued lines as one."""
    found = []
    for page in PAGES:
        text = page.read_text("utf-8").replace("\\\n", " ")
        found += re.findall(r"^ {4,}(\S.*)$", text, re.MULTILINE)
        found += [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]
    return found


def commands(program: str) -> list[tuple[str, ...]]:
    """Each invocation of a program, also within ``$(...)`` and behind ``&&``; its words up to the next operator."""
    found = set()
    for line in written():
        for part in re.split(r"\s(?:&&|\|\|?|;)\s|;\s|\$\(|(?<=\w)\)", re.sub(r"\s+#\s.*$", "", line)):
            if part.startswith(f"{program} "):
                found.add(tuple(shlex.split(part.replace("$(", "").rstrip(")"))))
    return sorted(found)


@functools.cache
def model(service: str) -> Any:
    return get_session().get_service_model({"s3api": "s3"}.get(service, service))


def options(words: tuple[str, ...]) -> set[str]:
    return {word[2:].partition("=")[0] for word in words if word.startswith("--")}


AWS = [words for words in commands("aws") if " ".join(words[:3]) not in OF_THE_CLI and len(words) > 2]


def test_the_pages_contain_commands() -> None:
    assert len(AWS) >= 12 and {words[1] for words in AWS} >= {"ec2", "iam", "kms", "s3api", "service-quotas", "ce"}


@pytest.mark.parametrize("words", AWS, ids=lambda words: " ".join(words[1:3]))
def test_an_aws_command_has_these_options(words: tuple[str, ...]) -> None:
    operations = {xform_name(name, "-"): name for name in model(words[1]).operation_names}
    assert words[2] in operations, f"{' '.join(words[:3])}: no such operation"
    shape = model(words[1]).operation_model(operations[words[2]]).input_shape
    known = {xform_name(name, "-") for name in shape.members} if shape else set()
    assert options(words) - GLOBAL <= known, f"{' '.join(words[:3])}: it has {sorted(known)}"


@pytest.mark.parametrize("words", [words for words in AWS if "--filters" in words], ids=lambda words: words[2])
def test_filters_exist_in_the_operation(words: tuple[str, ...]) -> None:
    operations = {xform_name(name, "-"): name for name in model(words[1]).operation_names}
    filters = model(words[1]).operation_model(operations[words[2]]).input_shape.members["Filters"]
    known = {re.sub(r"<[^>]+>", "", name) for name in re.findall(r"<p>\s*<code>(.*?)</code>", filters.documentation)}
    for word in words:
        if found := re.match(r"Name=([^,]+),Values=", word):
            name = re.sub(r":.*", ":", found[1])
            assert any(each.startswith(name) if name.endswith(":") else each == name for each in known), (name, known)


def test_the_fis_experiment_is_valid() -> None:
    page = (ROOT / "docs" / "day-two.md").read_text("utf-8")
    written = page[page.index('{"description": "spotkeeper drill"') :].partition("\n\n")[0]
    operation = model("fis").operation_model("CreateExperimentTemplate")
    report = ParamValidator().validate({"clientToken": "x", **json.loads(written)}, operation.input_shape)
    assert not report.has_errors(), report.generate_report()


def test_the_pages_use_existing_paths_of_the_function() -> None:
    """The output has no slash at its end, on either cloud."""
    page = (ROOT / "docs" / "first-live-hour.md").read_text("utf-8")
    after = re.findall(r"\$\(pulumi stack output reconcileUrl[^)]*\)(\S*)", page)
    assert len(after) == 2 and set(after) == {"/v1/tick"}


@pytest.mark.skipif(not shutil.which("pulumi"), reason="the pulumi command is not on PATH")
@pytest.mark.parametrize("words", commands("pulumi"), ids=lambda words: " ".join(words[1:3]))
def test_a_pulumi_command_has_these_options(words: tuple[str, ...]) -> None:
    inner = 3 if len(words) > 2 and words[1] == "stack" and words[2].isalpha() else 2
    done = subprocess.run([*words[:inner], "--help"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    missing = {name for name in options(words) if not re.search(rf"--{name}\b", done.stdout)}
    assert not missing, f"{' '.join(words)}: {missing}"
