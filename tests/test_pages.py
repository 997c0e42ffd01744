"""The pages hold together: links and pages that code names lead to a heading, and the index lists every page."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")))
NAMED = re.compile(r'\bdocs/([\w-]+\.md)(?:`*, \\?"([^"\\]+)\\?")?')  # in code: docs/train.md, "The script"


def prose(page: Path) -> str:
    """The page without its blocks of code, in which a # begins a comment."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def headings(page: Path) -> list[str]:
    return re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives the headings: lower case, no punctuation, hyphens for spaces."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(page)}


def links(page: Path) -> set[str]:
    found = re.findall(r"\]\(([^)\s]+)\)", prose(page))
    return {link for link in found if not re.match(r"[a-z]+:", link)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{page.name}: {link}: no such file"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}: it has {sorted(anchors(target))}"


def test_the_index_lists_every_page() -> None:
    listed = {link.partition("#")[0] for link in links(DOCS / "README.md")}
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= listed


def test_every_page_that_code_names_exists_with_that_heading() -> None:
    command = ["git", "ls-files", "--", "*.py", "*.yml", "*.yaml", "*.j2", "Makefile", ":!tests"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    named = {(file, *found) for file in files for found in NAMED.findall((ROOT / file).read_text("utf-8"))}
    assert len(named) >= 20
    for file, page, heading in named:
        assert (DOCS / page).exists(), f"{file}: docs/{page}: no such page"
        assert not heading or heading in headings(DOCS / page), f'{file}: docs/{page}: no heading "{heading}"'
