"""What each stack declares, every value and every option, as text.

``python -m tests.infra.golden`` writes it into ``golden/``; then review the difference. What changes with the sources
(hashes, scripts) is left out.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.infra.declaration import Declaration

FOLDER = Path(__file__).with_name("golden")
LONG = 600  # characters of a script or of user data
HASHES = (
    (re.compile(r"\b[0-9a-f]{64}\b"), "<sha256>"),
    (re.compile(r'[^"]*/(\w+)-[0-9a-f]{16}\.(tar|zip)'), r"\1.\2"),
    (re.compile(r'"python3\.?\d+"'), '"<this Python>"'),
    (re.compile(r"(instanceTemplates/[^\"]*)-[0-9a-f]{7}\b"), r"\1-<hash>"),
)


def text(declared: Declaration) -> str:
    """Return a line for each resource and, below it, one for each value (``path = value``) and each option."""
    lines = []
    for key, found in sorted(declared.items()):
        lines.append(key)
        lines += [f"  {path} = {_value(value)}" for path, value in _flat("", found.properties)]
        lines += [f"  [{path}] = {_value(value)}" for path, value in _flat("", found.options)]
        lines += [f"  [after] {other}" for other in found.depends_on]
    return "".join(f"{line}\n" for line in lines)


def difference(base: Declaration, other: Declaration) -> str:
    """Return what a stack declares otherwise than another one."""
    lines = difflib.unified_diff(text(base).splitlines(), text(other).splitlines(), n=1, lineterm="")
    return "".join("@@\n" if line.startswith("@@") else f"{line}\n" for line in list(lines)[2:])


def golden(name: str) -> str:
    return (FOLDER / f"{name}.txt").read_text("utf-8")


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key in sorted(value):
            yield from _flat(f"{path}.{key}" if path else key, value[key])
    elif isinstance(value, list | tuple) and value:
        for number, each in enumerate(value):
            name = each.get("Sid", number) if isinstance(each, dict) else number  # of an IAM policy's statement
            yield from _flat(f"{path}[{name}]", each)
    elif isinstance(value, str) and value[:1] in ("{", "["):
        try:
            yield from _flat(f"{path}:", json.loads(value))
        except ValueError:
            yield path, value
    else:
        yield path, value


def _value(value: Any) -> str:
    found = json.dumps(value, ensure_ascii=False)
    for pattern, instead in HASHES:
        found = pattern.sub(instead, found)
    return "<text>" if len(found) > LONG else found


def main() -> None:
    from spotkeeper.local.deploy.config import read_config
    from tests.infra import conftest
    from tests.infra.aws import test_declared as aws
    from tests.infra.gcp.test_networks import declare_cards

    config = read_config(conftest.STACKS / f"Pulumi.{aws.NAME}.yaml")
    example, joined = aws.declare(config), aws.declare(aws.in_another_network(config))
    google, shared, local = conftest.declare_example(), conftest.declare_shared(), conftest.declare_local()
    FOLDER.mkdir(exist_ok=True)
    found = {
        "aws": text(example),
        "aws-joined": difference(example, joined),
        "aws-shells": difference(example, aws.declare(aws.with_shells(config))),
        "gcp": text(google),
        "gcp-cards": difference(google, declare_cards()),
        "gcp-shared": difference(google, shared),
        "local": text(local),
    }
    for name, lines in found.items():
        (FOLDER / f"{name}.txt").write_text(lines, "utf-8")


if __name__ == "__main__":
    main()
