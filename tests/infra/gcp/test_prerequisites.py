"""What the pages say of a stack on Google Cloud fits what the program declares: APIs, prices, accounts."""

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
    "projects": ("iam", "cloudresourcemanager", "serviceusage"),  # which makes Google's own account of a service
    "pubsub": ("pubsub",),
    "secretmanager": ("secretmanager",),
    "serviceaccount": ("iam", "iamcredentials"),  # a machine speaks as the jobs' identity
    "storage": ("storage",),
}

# Who may make what a module declares, rights on it included.
ROLES: dict[str, tuple[str, ...]] = {
    "artifactregistry": ("artifactregistry.admin",),
    "billing": ("billing.costsManager",),
    "cloudfunctionsv2": ("cloudfunctions.admin", "iam.serviceAccountUser"),
    "cloudrunv2": ("run.admin",),
    "cloudscheduler": ("cloudscheduler.admin",),
    "compute": ("compute.admin",),
    "logging": ("logging.configWriter",),
    "monitoring": ("monitoring.editor",),
    "projects": ("iam.roleAdmin", "resourcemanager.projectIamAdmin", "serviceusage.serviceUsageAdmin"),
    "pubsub": ("pubsub.admin",),
    "secretmanager": ("secretmanager.admin",),
    "serviceaccount": ("iam.serviceAccountAdmin",),
    "storage": ("storage.admin",),
}


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text("utf-8")


def modules() -> set[str]:
    """Of the provider, that the program declares resources of."""
    files = (ROOT / "infra" / "gcp").glob("*.py")
    return {name for file in files for name in re.findall(r"\bgcp\.([a-z0-9]+)\.[A-Z]", file.read_text())}


def test_the_page_lists_exactly_the_operators_roles() -> None:
    told = page("permissions").partition("\n## Running `up` on Google Cloud\n")[2].partition("\n## ")[0]
    named = set(re.findall(r"`(?:roles/)?([a-z]+\.[A-Za-z]+)`", told))
    assert named - {"cloudkms.cryptoKeyEncrypterDecrypter"} == {role for name in modules() for role in ROLES[name]}


def test_the_page_enables_exactly_the_needed_apis() -> None:
    line = next(each for each in page("gcp").splitlines() if "gcloud services enable" in each)
    told = {word.removesuffix(".googleapis.com") for word in line.split() if word.endswith(".googleapis.com")}
    state = {"cloudkms"}  # Pulumi's own: the key that wraps its secrets
    assert told == {api for name in modules() for api in APIS[name]} | state


def test_the_costs_page_says_what_the_examples_static_machine_costs() -> None:
    told = " ".join(page("costs").split())
    example = yaml.safe_load((STACKS / "Pulumi.example-gcp.yaml").read_text())["config"]
    (static,) = [pool for pool in example["spotkeeper:pools"] if pool["kind"] == "static"]
    machine, disk, hours = static["machine"]["type"], static["disk"], 730
    price = GCP_PRICES[machine].on_demand
    assert f"`{machine}` at ${price:.3f} an hour is about ${price * hours:,.0f}"[:-1] in told  # to ten dollars
    assert (
        f"its {disk['size_gb']} GB `{disk['type']}` ${disk['size_gb'] * GCP_DISK_PRICES[disk['type']]:.0f} more" in told
    )


def test_the_page_names_the_readers_of_the_data() -> None:
    told = " ".join(page("gcp").split())
    # Jobs are the stack's job_identity: what the machines' own account may read, they may not.
    assert "gs://DATA --role=roles/storage.objectViewer" in told
    assert "serviceAccount:trainer@PROJECT.iam.gserviceaccount.com" in told
    pages = "".join(each.read_text("utf-8") for each in (ROOT / "docs").glob("*.md"))
    assert f"serviceAccount:{account('STACK', 'vm')}@PROJECT" not in pages
    assert f"serviceAccount:{account('STACK', 'fn')}@PROJECT.iam.gserviceaccount.com" in told
