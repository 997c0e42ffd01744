"""The policy rules' checks of Google Cloud resources. A check yields violations; :data:`CHECKS` lists them by rule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infra.policy.resource import DeclaredResource, Told, at, bucket_stays, disk_stays, each, on

TEMPLATES = (
    "gcp:compute/regionInstanceTemplate:RegionInstanceTemplate",
    "gcp:compute/instanceTemplate:InstanceTemplate",
)
INSTANCE = "gcp:compute/instance:Instance"
MACHINES = (*TEMPLATES, INSTANCE)
DISKS = ("gcp:compute/disk:Disk", "gcp:compute/regionDisk:RegionDisk")
BUCKET = "gcp:storage/bucket:Bucket"
FIREWALL = "gcp:compute/firewall:Firewall"
CUSTOM_ROLE = "gcp:projects/iAMCustomRole:IAMCustomRole"
SCHEDULE = "gcp:cloudscheduler/job:Job"
BINDINGS = (
    "gcp:projects/iAMMember:IAMMember",
    "gcp:projects/iAMBinding:IAMBinding",
    "gcp:serviceaccount/iAMMember:IAMMember",
    "gcp:storage/bucketIAMMember:BucketIAMMember",
    "gcp:storage/bucketIAMBinding:BucketIAMBinding",
    "gcp:cloudrunv2/serviceIamMember:ServiceIamMember",
    "gcp:cloudfunctionsv2/functionIamMember:FunctionIamMember",
    "gcp:pubsub/topicIAMMember:TopicIAMMember",
    "gcp:secretmanager/secretIamMember:SecretIamMember",
)
LABELLED = (
    *MACHINES,
    *DISKS,
    BUCKET,
    "gcp:cloudfunctionsv2/function:Function",
    "gcp:pubsub/topic:Topic",
    "gcp:pubsub/subscription:Subscription",
)
INVOKES = ("roles/run.invoker", "roles/cloudfunctions.invoker")
_EVERYBODY = ("allUsers", "allAuthenticatedUsers")
_BROAD = ("roles/owner", "roles/editor", "roles/viewer")
_GIVES_RIGHTS = (".setIamPolicy", "iam.serviceAccountKeys.create", "iam.serviceAccounts.actAs")


def no_public_address(resource: DeclaredResource) -> Iterator[str]:
    for index, card in enumerate(resource.each("networkInterfaces")):
        if each(at(card, "accessConfigs")) or each(at(card, "ipv6AccessConfigs")):
            yield f"networkInterfaces[{index}] has a public address: leave accessConfigs out"


def no_address(resource: DeclaredResource) -> Iterator[str]:
    if resource.at("addressType") != "INTERNAL":
        yield "this resource reserves a public address, which is billed: remove it"


def no_nat(resource: DeclaredResource) -> Iterator[str]:
    yield "a NAT gateway bills by the hour and by the gigabyte: use Private Google Access"


def no_open_port(resource: DeclaredResource) -> Iterator[str]:
    if resource.at("direction") == "EGRESS" or not each(resource.at("allows")):
        return
    for source in resource.each("sourceRanges"):
        if str(source) in ("0.0.0.0/0", "::/0"):
            yield f"admits {source}: name narrower ranges"


def machines_end(resource: DeclaredResource) -> Iterator[str]:
    """Check that the cloud restarts no machine, and deletes a spot machine that it preempts."""
    if resource.at("scheduling.automaticRestart") is not False:
        yield "scheduling.automaticRestart: want false: only reconcile may replace a machine that ended"
    if resource.at("scheduling.provisioningModel") != "SPOT":
        return
    for field, want in (
        ("preemptible", True),
        ("instanceTerminationAction", "DELETE"),
        ("onHostMaintenance", "TERMINATE"),
    ):
        if (found := resource.at(f"scheduling.{field}")) != want:
            yield f"scheduling.{field} is {found}, want {want} for a spot machine"


def runs_end(resource: DeclaredResource) -> Iterator[str]:
    if resource.production and resource.at("scheduling.maxRunDuration.seconds") is None:
        yield "scheduling.maxRunDuration: missing: set limits.max_run_hours"


def no_borrowed_identity(resource: DeclaredResource) -> Iterator[str]:
    email = resource.at("serviceAccount.email")
    if email is None or str(email).endswith("-compute@developer.gserviceaccount.com"):
        yield "serviceAccount: want the stack's own service account, not the project's default one"


def shielded(resource: DeclaredResource) -> Iterator[str]:
    for field in ("enableVtpm", "enableIntegrityMonitoring"):
        if not on(resource.at(f"shieldedInstanceConfig.{field}")):
            yield f"shieldedInstanceConfig.{field}: want true"


def pinned(resource: DeclaredResource) -> Iterator[str]:
    disks = [*resource.each("disks"), *resource.each("bootDisk")]
    for image in (at(disk, path) for disk in disks for path in ("sourceImage", "initializeParams.image")):
        if image is not None and "/family/" in str(image):
            yield f"{image} is an image family, whose image may change: name one image"


def narrow(resource: DeclaredResource) -> Iterator[str]:
    role = str(resource.at("role"))
    if role in _BROAD or role.lower().endswith("admin"):
        yield f"{role} grants too much: name the permissions in a custom role"


def named(resource: DeclaredResource) -> Iterator[str]:
    for member in (*resource.each("member"), *resource.each("members")):
        if member in _EVERYBODY:
            yield f"{member} is public: name the members"


def narrow_role(resource: DeclaredResource) -> Iterator[str]:
    for permission in map(str, resource.each("permissions")):
        if "*" in permission:
            yield f"{permission}: name each permission"
        elif permission.endswith(_GIVES_RIGHTS):
            yield f"{permission}: its holder can get every other permission: leave it out"


def no_key(resource: DeclaredResource) -> Iterator[str]:
    yield "use a service account instead: Pulumi's state would store the key, which could outlive the stack"


def private_bucket(resource: DeclaredResource) -> Iterator[str]:
    if not on(resource.at("uniformBucketLevelAccess")):
        yield "uniformBucketLevelAccess: want true"
    if resource.at("publicAccessPrevention") != "enforced":
        yield "publicAccessPrevention: want enforced"


def tidy_bucket(resource: DeclaredResource) -> Iterator[str]:
    if not resource.each("lifecycleRules"):
        yield "lifecycleRules is missing: parts of unfinished uploads would bill forever"


def labelled(resource: DeclaredResource) -> Iterator[str]:
    if at(resource.inputs, "labels.sk-stack") is None:
        yield "the label sk-stack is missing, by which the drain and cost reports find resources"


def schedule_only_invokes(every: Sequence[DeclaredResource]) -> Told:
    """Check that the schedule's service account may only invoke the function."""
    path = "httpTarget.oidcToken.serviceAccountEmail"
    clocks = {f"serviceAccount:{resource.at(path)}" for resource in every if resource.type == SCHEDULE}
    for resource in every:
        if resource.type in BINDINGS and resource.at("role") not in INVOKES:
            for member in (*resource.each("member"), *resource.each("members")):
                if member in clocks:
                    yield resource, f"the schedule's account has {resource.at('role')}, but should only invoke"


CHECKS = (
    ("no-public-address", MACHINES, no_public_address),
    ("no-public-address", ("gcp:compute/address:Address", "gcp:compute/globalAddress:GlobalAddress"), no_address),
    ("no-nat", ("gcp:compute/routerNat:RouterNat",), no_nat),
    ("no-open-port", (FIREWALL,), no_open_port),
    ("machines-end", TEMPLATES, machines_end),
    ("runs-end", TEMPLATES, runs_end),
    ("own-identity", MACHINES, no_borrowed_identity),
    ("shielded", MACHINES, shielded),
    ("pinned-image", MACHINES, pinned),
    ("least-privilege", BINDINGS, narrow),
    ("least-privilege", BINDINGS, named),
    ("least-privilege", (CUSTOM_ROLE,), narrow_role),
    ("no-keys", ("gcp:serviceaccount/key:Key", "gcp:storage/hmacKey:HmacKey"), no_key),
    ("private-bucket", (BUCKET,), private_bucket),
    ("tidy-bucket", (BUCKET,), tidy_bucket),
    ("bucket-stays", (BUCKET,), bucket_stays),
    ("disks-stay", DISKS, disk_stays),
    ("labelled", LABELLED, labelled),
)
STACK_CHECKS = (("schedule-only-invokes", schedule_only_invokes),)
