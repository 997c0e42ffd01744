"""What docs/operate.md says of a stack on Google Cloud fits what the program declares: APIs, prices, accounts."""

from __future__ import annotations

import re

import yaml

from infra.catalog import GCP_DISK_PRICES, GCP_PRICES
from infra.naming import account
from tests.infra.conftest import STACKS

ROOT = STACKS.parents[1]
# What a module of the provider calls; its parent project's policy is read and written by the resource manager.
APIS: dict[str, tuple[str, ...]] = {
    "artifactregistry": ("artifactregistry",),
    "billing": ("billingbudgets",),
    "cloudfunctionsv2": ("cloudfunctions", "run", "cloudbuild", "artifactregistry"),
    "cloudrunv2": ("run",),
    "cloudscheduler": ("cloudscheduler",),
    "compute": ("compute",),
    "logging": ("logging",),
    "monitoring": ("monitoring",),
    "projects": ("iam", "cloudresourcemanager"),
    "pubsub": ("pubsub",),
    "secretmanager": ("secretmanager",),
    "serviceaccount": ("iam", "iamcredentials"),  # a machine speaks as the jobs' identity
    "storage": ("storage",),
}


def test_the_page_enables_the_apis_of_every_resource_and_no_other() -> None:
    used = set()
    for file in (ROOT / "infra" / "gcp").glob("*.py"):
        used |= set(re.findall(r"\bgcp\.([a-z0-9]+)\.[A-Z]", file.read_text()))
    line = next(
        each for each in (ROOT / "docs" / "operate.md").read_text().splitlines() if "gcloud services enable" in each
    )
    told = {word.removesuffix(".googleapis.com") for word in line.split() if word.endswith(".googleapis.com")}
    state = {"cloudkms"}  # Pulumi's own: the key that wraps its secrets
    assert told == {api for module in used for api in APIS[module]} | state


def test_the_page_says_what_the_examples_static_node_costs_and_whom_to_let_read_the_data() -> None:
    told = " ".join((ROOT / "docs" / "operate.md").read_text().split())
    example = yaml.safe_load((STACKS / "Pulumi.example-gcp.yaml").read_text())["config"]
    (static,) = [pool for pool in example["spotkeeper:pools"] if pool["kind"] == "static"]
    machine, disk, hours = static["machine"]["type"], static["disk"], 730
    price = GCP_PRICES[machine].on_demand
    assert f"`{machine}` at ${price:.3f} an hour is about ${price * hours:,.0f}"[:-1] in told  # to ten dollars
    assert (
        f"its {disk['size_gb']} GB `{disk['type']}` ${disk['size_gb'] * GCP_DISK_PRICES[disk['type']]:.0f} more" in told
    )
    assert f"serviceAccount:{account('STACK', 'vm')}@PROJECT.iam.gserviceaccount.com" in told
