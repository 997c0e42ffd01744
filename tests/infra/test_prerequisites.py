"""The README's line of APIs fits what the program declares."""

from __future__ import annotations

import re

from tests.infra.conftest import STACKS

ROOT = STACKS.parents[1]
# What a module of the provider calls; its parent project's policy is read and written by the resource manager.
APIS: dict[str, tuple[str, ...]] = {
    "billing": ("billingbudgets",),
    "cloudfunctionsv2": ("cloudfunctions", "run", "cloudbuild", "artifactregistry"),
    "cloudrunv2": ("run",),
    "cloudscheduler": ("cloudscheduler",),
    "compute": ("compute",),
    "logging": ("logging",),
    "monitoring": ("monitoring",),
    "projects": ("iam", "cloudresourcemanager"),
    "pubsub": ("pubsub",),
    "serviceaccount": ("iam",),
    "storage": ("storage",),
}


def test_the_readme_enables_the_apis_of_every_resource_and_no_other() -> None:
    used = set()
    for file in (ROOT / "infra" / "gcp").glob("*.py"):
        used |= set(re.findall(r"\bgcp\.([a-z0-9]+)\.[A-Z]", file.read_text()))
    line = next(each for each in (ROOT / "README.md").read_text().splitlines() if "gcloud services enable" in each)
    told = {word.removesuffix(".googleapis.com") for word in line.split() if word.endswith(".googleapis.com")}
    assert told == {api for module in used for api in APIS[module]}
