"""A change as its reviewers read it: what would be lost, what it costs, and nothing that could be taken for more.

``previews/`` holds what Pulumi's engine (3.260) printed for changes of the local stack, `pulumi preview --json`; long
values are cut, and what was only created or refreshed has no inputs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spotkeeper.contract.stack import PoolState, Price, TeamState
from spotkeeper.report.money.cost import BootDisk, Range, StackCost, stack_cost
from spotkeeper.report.review import preview, review
from spotkeeper.report.review.preview import Change, Op, Preview, PreviewError
from spotkeeper.report.review.review import Broken, Review, Verdict, judge, markdown
from spotkeeper.report.text.words import block, code

PREVIEWS = Path(__file__).parent / "previews"
DISK = "gcp:compute/disk:Disk"
LOST = {  # preview -> what would be lost
    "disk-moved": {"sk-local-floor-s0-data": Op.REPLACE},
    "static-removed": {"sk-local-floor-s0-data": Op.DELETE},
    "retained-moved": {"sk-local-floor-s0-data": Op.REPLACE},  # the blank one would be trained on
    "bucket-renamed": {"bucket": Op.REPLACE},
}
FAILED = ("protected-removed", "broken")
CLEAR = ("fresh", "same", "refresh", "resize", "image", "unprotect", "retained-removed")


def captured(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((PREVIEWS / f"{name}.json").read_bytes())
    return document


def read(document: dict[str, Any]) -> Preview:
    return preview.read(json.dumps(document).encode())


def step(op: str, kind: str, name: str, old: dict[str, Any] | None = None, new: dict[str, Any] | None = None,
         **more: Any) -> dict[str, Any]:  # fmt: skip
    states = {"oldState": old, "newState": new}
    made = {key: {"type": kind, **state} for key, state in states.items() if state is not None}
    return {"op": op, "urn": f"urn:pulumi:prod::spotkeeper::a:b:C${kind}::{name}", **made, **more}


def foreseen(*steps: dict[str, Any]) -> Preview:
    return read({"config": {}, "steps": list(steps), "changeSummary": {"same": 1}})


def pool(name: str = "burst", **more: Any) -> PoolState:
    values: dict[str, Any] = {
        "kind": "spot", "machine_type": "a2-highgpu-1g", "zones": ("us-central1-a", "us-central1-b"), "nproc": 1,
        "max_machines": 4, "max_on_demand": 1, "disk_gb": 100, "disk_type": "pd-ssd", "disk_usd_gb_month": 0.17,
        "prices": {"us-central1-a": Price(4.0, 1.0), "us-central1-b": Price(5.0, 1.5)}, **more,
    }  # fmt: skip
    return PoolState(name=name, **values)


BOOT = BootDisk(50, 0.1)
COST = stack_cost([pool()], {"burst": BOOT})


def comment(found: Preview, agreed: bool = False, cost: StackCost = COST, before: StackCost | None = None) -> str:
    return markdown(Review("prod", judge(found, agreed), found, cost, before))


# --- what would be lost -----------------------------------------------------------------------


def test_every_captured_preview_is_tested() -> None:
    assert {path.stem for path in PREVIEWS.glob("*.json")} == {*LOST, *FAILED, *CLEAR}


@pytest.mark.parametrize("name", LOST)
def test_a_loss_of_data_is_refused_without_consent(name: str) -> None:
    found = read(captured(name))
    assert {change.name: change.op for change in found.lost()} == LOST[name]
    assert judge(found, agreed=False) is Verdict.REFUSED
    assert judge(found, agreed=True) is Verdict.AGREED
    assert "**Refused: data would be lost.**" in comment(found)
    agreed = comment(found, agreed=True)
    assert "Refused" not in agreed and "**Data will be lost" in agreed
    assert all(f"`{lost}` would be" in agreed for lost in LOST[name])


@pytest.mark.parametrize("name", CLEAR)
def test_a_harmless_change_is_clear(name: str) -> None:
    found = read(captured(name))
    assert not found.lost() and judge(found, agreed=False) is Verdict.CLEAR


@pytest.mark.parametrize("name", FAILED)
def test_a_failed_preview_is_never_clear(name: str) -> None:
    found = read(captured(name))
    assert judge(found, agreed=True) is Verdict.FAILED
    said = comment(found, agreed=True)
    assert "the preview failed" in said
    assert ("because it is protected" if name == "protected-removed" else "is not a region") in said


def test_resources_are_counted_as_pulumi_counts_them() -> None:
    for name in (*LOST, *CLEAR):
        told = captured(name)["changeSummary"]
        found = read(captured(name))
        counts: dict[str, int] = {}
        for change in found.changes:
            op = "delete" if change.op is Op.KEEP else change.op.value
            counts[op] = counts.get(op, 0) + 1
        if name == "unprotect":  # Pulumi says that nothing changes
            assert (told, counts) == ({"same": 52}, {"update": 1})
            continue
        stack = {"create": counts["create"] + 1} if name == "fresh" else {}  # Pulumi counts the stack itself
        assert counts | stack | {"same": found.same} == {"same": 0} | told, name


def test_a_retained_disk_is_noted_as_billed() -> None:
    found = read(captured("retained-removed"))
    (disk,) = [change for change in found.changes if change.type == DISK]
    assert (disk.op, disk.data) == (Op.KEEP, "") and "is billed" in disk.warning
    assert "1 deleted, 1 left in the cloud" in comment(found)


def test_lost_protection_is_reported() -> None:
    (disk,) = read(captured("unprotect")).changes
    assert "its protection ends" in disk.warning and "its protection ends" in comment(read(captured("unprotect")))
    retained = {"retainOnDelete": True}
    (other,) = foreseen(step("same", "aws:ebs/volume:Volume", "v", retained, {})).changes
    assert "its protection ends" in other.warning
    bucket = ({"inputs": {"forceDestroy": False}}, {"inputs": {"forceDestroy": True}})
    (forced,) = foreseen(step("update", "aws:s3/bucket:Bucket", "bucket", *bucket)).changes
    assert "its protection ends" in forced.warning
    assert not foreseen(step("same", DISK, "d", {"protect": True}, {"protect": True})).changes


def test_a_static_machine_that_is_replaced_stops_what_trains_on_it() -> None:
    found = read(captured("image"))
    (machine,) = [change for change in found.changes if change.name == "sk-local-floor-s0"]
    assert machine.op is Op.REPLACE and "stops" in machine.warning


@pytest.mark.parametrize("kind", sorted(preview.HOLDS_DATA))
@pytest.mark.parametrize("op", ["delete", "replace", "create-replacement", "delete-replaced", "discard-replaced"])
def test_every_type_with_data_and_every_operation_is_covered(kind: str, op: str) -> None:
    assert foreseen(step(op, kind, "it", {"inputs": {}})).lost()


def test_both_steps_of_a_replacement_are_one_change() -> None:
    halves = [step(op, DISK, "d", {}, {}) for op in ("create-replacement", "replace", "delete-replaced")]
    for order in (halves, halves[::-1]):
        (change,) = foreseen(*order).changes
        assert change.op is Op.REPLACE and change.data


def test_deleting_the_drain_or_a_cancelled_job_is_a_loss() -> None:
    drain, job = "pulumi-python:dynamic:Resource", preview.JOB
    assert foreseen(step("delete", drain, "drain", {})).lost()
    assert foreseen(step("replace", drain, "drain", {}, {})).lost(), "half of a replacement would empty a live stack"
    assert not foreseen(step("update", drain, "drain", {}, {})).lost()
    assert foreseen(step("delete", job, "vit", {"inputs": {"on_remove": "cancel"}})).lost()
    (kept,) = foreseen(step("delete", job, "vit", {"inputs": {"on_remove": "keep"}})).changes
    assert not kept.data and "continues" in kept.warning
    (changed,) = foreseen(step("update", job, "vit", {}, {})).changes
    assert "another name, or cancel" in changed.warning


GCP_BUCKET, AWS_BUCKET = "gcp:storage/bucket:Bucket", "aws:s3/bucket:Bucket"
AWS_RULES = "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration"
UNFINISHED = {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 1}}
BY_AGE = {"action": {"type": "Delete"}, "condition": {"age": 7}}
ABORTS = {"id": "unfinished", "status": "Enabled", "abortIncompleteMultipartUpload": {"daysAfterInitiation": 1}}
EXPIRES = {"id": "old", "status": "Enabled", "expiration": {"days": 7}}


@pytest.mark.parametrize(
    ("op", "kind", "key", "old", "new", "lost"),
    [
        ("update", GCP_BUCKET, "lifecycleRules", [UNFINISHED], [UNFINISHED, BY_AGE], True),
        ("update", GCP_BUCKET, "lifecycleRules", [BY_AGE], [{**BY_AGE, "condition": {"age": 1}}], True),
        ("update", GCP_BUCKET, "lifecycleRules", [BY_AGE, UNFINISHED], [UNFINISHED, BY_AGE], False),
        ("update", GCP_BUCKET, "lifecycleRules", [], [UNFINISHED], False),
        ("update", AWS_BUCKET, "lifecycleRules", [], [{"enabled": True, "expiration": {"days": 1}}], True),
        ("update", AWS_RULES, "rules", [ABORTS], [ABORTS, EXPIRES], True),
        ("update", AWS_RULES, "rules", [ABORTS], [ABORTS, {**EXPIRES, "status": "Disabled"}], False),
        ("update", AWS_RULES, "rules", [ABORTS], ["[unknown]"], True),
        ("create", AWS_RULES, "rules", None, [{"status": "Enabled", "noncurrentVersionExpiration": {}}], True),
        ("create", AWS_RULES, "rules", None, [ABORTS], False),
        ("replace", AWS_RULES, "rules", [ABORTS], [ABORTS, EXPIRES], True),
        ("update", GCP_BUCKET, "lifecycleRules", [], preview.UNKNOWN, True),
        ("update", AWS_RULES, "rules", [ABORTS], {preview.SIGNATURE: "1b47061264138c4ac30d75fd1eb44270"}, True),
        ("update", AWS_RULES, "rules", [], [{preview.SIGNATURE: "1b47061264138c4ac30d75fd1eb44270"}], True),
    ],
)
def test_a_new_lifecycle_rule_that_deletes_objects_is_a_loss(
    op: str, kind: str, key: str, old: list[Any] | None, new: list[Any], lost: bool
) -> None:
    before = None if old is None else {"inputs": {key: old}}
    rules = step(op, kind, "rules", before, {"inputs": {key: new}}, diffReasons=[key])
    assert bool(foreseen(rules).lost()) is lost
    of_new = foreseen(rules, step("create", kind.replace("LifecycleConfiguration", ""), "bucket", None, {}))
    assert (op != "create" and lost) is bool(of_new.lost()), "there is nothing yet in a bucket that is made with it"
    of_another = foreseen(rules, step("create", GCP_BUCKET, "mine", None, {"inputs": {"name": "another"}}))
    assert bool(of_another.lost()) is lost, "and much in the one beside it"


@pytest.mark.parametrize("end", [{}, {"changeSummary": {}}, {"changeSummary": {"same": 2}, "maybeCorrupt": True}])
def test_a_truncated_preview_is_never_clear(end: dict[str, Any]) -> None:
    """Deletions come last: what the engine had said until then is no word about them."""
    found = read({"config": {}, "steps": [step("same", DISK, "data", {}, {})], **end})
    assert judge(found, agreed=True) is Verdict.FAILED and "ends before its summary" in comment(found)


def test_an_unknown_operation_is_shown() -> None:
    (change,) = foreseen(step("annihilate", DISK, "d", {})).changes
    assert "check it yourself" in change.warning and "annihilate" in comment(Preview((change,), 0, ()))
    assert change.data, "of data it might be the worst"
    assert not foreseen(step("annihilate", "gcp:pubsub/topic:Topic", "t", {})).lost()


def test_a_bucket_with_an_alias_is_recognised() -> None:
    moved = step("replace", "aws:s3/other:Other", "bucket", {}, {"type": "aws:s3/other:Other"})
    moved["oldState"]["type"] = AWS_BUCKET
    assert foreseen(moved).lost()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"", "it is empty"),
        (b"error: no stack selected", "not output of `pulumi preview --json`"),
        (b"[]", "not output of"),
        (b"{}", "neither steps nor a configuration"),
        (b'{"result": "ok"}', "neither steps nor a configuration"),
        (b'{"steps": 3}', "not output of"),
        (b'{"sequence": 1}\n{"sequence": 2}', "unset PULUMI_ENABLE_STREAMING_JSON_PREVIEW"),
    ],
)
def test_text_that_is_no_preview_is_an_error(text: bytes, told: str) -> None:
    with pytest.raises(PreviewError, match=told):
        preview.read(text)


# --- what may be said -------------------------------------------------------------------------

HOSTILE = (
    "x`](javascript:alert(1)) | @everyone <img src=x onerror=y> ![](http://a.b) #12 \n# Heading\n\u202eevil\x1b[2J"
)


def test_names_and_messages_of_a_branch_are_escaped() -> None:
    steps = [
        step("delete", DISK, HOSTILE, {}),
        step("update", HOSTILE, "n", {}, {}, diffReasons=[HOSTILE], detailedDiff={HOSTILE: {}}),
        step("replace", DISK, "d", {"inputs": {"zone": HOSTILE[:40]}}, {"inputs": {"zone": "b"}}, diffReasons=["zone"]),
    ]
    document = {"config": {}, "steps": steps}
    for extra in ([], [{"severity": "error", "message": f"{HOSTILE}\n```\nout of it", "urn": f"a::{HOSTILE}"}]):
        text = comment(read({**document, "diagnostics": extra}))
        outside = _outside_code(text)
        for piece in ("javascript", "@everyone", "<img", "](", "http", "evil", "Heading", "#12", "out of it"):
            assert piece not in outside, piece
        assert "\u202e" not in text and "\x1b" not in text
        for row in text.splitlines():
            if row.startswith("| "):
                assert row.count("|") in (5, 6), f"a cell more or less: {row}"


def _outside_code(text: str) -> str:
    """What Markdown would read: without its code blocks and code spans."""
    kept, fence = [], ""
    for line in text.splitlines():
        if fence:
            fence = "" if line == fence else fence
        elif line.startswith("```"):
            fence = line.removesuffix("text")
        else:
            kept.append("".join(line.split("`")[::2]))
    assert not fence, "a block that nobody closes"
    return "\n".join(kept)


def test_code_spans_cannot_be_closed() -> None:
    assert code("a`b|c") == "`a'b¦c`" and code("") == "" and code("\n") == ""
    assert code("x" * 500, 10) == "`xxxxxxx...`"
    assert block("a\n````\nb").splitlines()[0] == "`````text"


def test_a_comment_contains_only_harmless_values() -> None:
    secret = "hunter2-" + "s3cret"
    spread: dict[str, Any] = {
        "password": secret,
        "metadata": {"startup-script": secret},
        "content": secret,
        "list": [secret],
    }
    shown = {"machineType": {"deep": secret}, "type": f"[{secret}]", "zone": secret * 9, "iops": [secret]}
    for name in (*LOST, *FAILED, *CLEAR):
        document = captured(name)
        for each in document["steps"]:
            reasons = [*spread, *shown]
            each["diffReasons"] = [*(each.get("diffReasons") or ()), *reasons]
            each["detailedDiff"] = {reason: {"kind": "update", "inputDiff": secret} for reason in reasons}
            for state in ("oldState", "newState"):
                if state in each:
                    each[state]["inputs"] = {**each[state].get("inputs", {}), **spread, **shown}
                    each[state]["outputs"] = spread
                    each[state]["id"] = secret
        document["config"]["spotkeeper:token"] = secret
        found = read(document)
        assert secret not in comment(found)
        assert secret not in msgspec.json.encode(Review("prod", Verdict.CLEAR, found, COST)).decode()


def test_secrets_in_engine_messages_are_redacted() -> None:
    token = "ya29." + "a0AfH6SMBx"
    found = read({"config": {}, "diagnostics": [{"severity": "error", "message": f"error: 401 with Bearer {token}"}]})
    assert token not in comment(found) and "401" in comment(found)


@pytest.mark.parametrize("stacks", [1, 3, 8])
def test_a_huge_change_keeps_findings_and_cost(stacks: int) -> None:
    """In as much of one comment as each of so many stacks has."""
    many = [step("create", "gcp:compute/route:Route", f"route-{i}-é{'x' * 50}", None, {}) for i in range(3000)]
    found = foreseen(step("delete", DISK, "the-data", {}), *many)
    made = Review("prod", judge(found, agreed=False), found, COST)
    limit = review.COMMENT_BYTES // stacks
    text = markdown(made, ["**`vit` on `burst`**: $7"], limit)
    assert limit - 500 < len(text.encode()) <= limit
    for shown in ("data would be lost", "- `the-data` would be deleted", "Everything at full size", "`vit` on `burst`"):
        assert text.index(shown) < text.index("#### Changes"), shown
    cut = text.count("| `compute.Route` |")
    assert f"**{3000 - cut:,} more lines left out here:** the summary of this stack's CI job has" in text
    whole = markdown(made)
    assert whole.count("| `compute.Route` |") == 3000 and "left out" not in whole


def test_many_findings_and_pools_share_the_comment() -> None:
    losses = [step("delete", DISK, f"disk-{i}-{'x' * 180}", {}) for i in range(3000)]
    found = foreseen(*losses)
    pools = [pool(f"pool-{i}") for i in range(500)]
    broken = [Broken("private", "a:b/c:D", f"thing-{i}", "is public", True) for i in range(2000)]
    cost = stack_cost(pools, {each.name: BOOT for each in pools})
    text = markdown(Review("prod", Verdict.REFUSED, found, cost, None, tuple(broken)), limit=review.COMMENT_BYTES)
    assert len(text.encode()) <= review.COMMENT_BYTES < 65_536
    for shown in ("- `disk-0-", "- `private`: ", "Everything at full size", "| `pool-0` ", "#### Changes"):
        assert shown in text, shown
    assert text.count("more lines left out here") == 4


@pytest.mark.parametrize("stacks", [1, 5, 20])
def test_engine_errors_are_shortened_to_their_share(stacks: int) -> None:
    found = read({"config": {}, "diagnostics": [{"severity": "error", "message": "ü" * 50_000}]})
    limit = review.COMMENT_BYTES // stacks
    text = markdown(Review("prod", Verdict.FAILED, found, COST), limit=limit)
    assert "üüü" in text and "Everything at full size" in text and len(text.encode()) <= limit
    assert _outside_code(text)


# --- what it costs ----------------------------------------------------------------------------


def test_a_pools_cost_ranges_from_all_spot_to_most_on_demand() -> None:
    (cost,) = COST.pools
    disks = 100 * 0.17 + 50 * 0.1
    assert (cost.machines, cost.on_demand_machines, cost.disks) == (4, 1, pytest.approx(disks))
    assert (cost.spot, cost.on_demand) == (Range(1.0, 1.5), Range(4.0, 5.0))
    assert cost.month is not None
    assert cost.month.least == pytest.approx(4 * 1.0 * 730 + 4 * disks)
    assert cost.month.most == pytest.approx((1 * 5.0 + 3 * 1.5) * 730 + 4 * disks)
    assert COST.always == Range(0.0, 0.0) and COST.month == cost.month and COST.machines == 4


def test_a_static_pool_costs_the_whole_month() -> None:
    floor = pool("floor", kind="static", zones=("us-central1-a",), max_machines=2, max_on_demand=0)
    cost = stack_cost([floor, pool()], {"floor": BOOT, "burst": BOOT})
    assert cost.always is not None and cost.always.least == pytest.approx(2 * (4.0 * 730 + 22.0))
    assert cost.machines == 4, "dynamic ones"
    text = comment(read(captured("same")), cost=cost)
    assert "| `floor` `a2-highgpu-1g` | 2, around the clock |  | $4.00 | $5,884.00 |" in text


def test_the_stacks_limits_bound_the_monthly_cost() -> None:
    capped = stack_cost([pool()], {"burst": BOOT}, machines=3, usd_per_hour=5.0)
    assert capped.machines == 3
    assert capped.month is not None and capped.month.most == pytest.approx(5.0 * 730 + 4 * 22.0)
    few = stack_cost([pool(), pool("floor", kind="static", max_machines=1)], {"burst": BOOT, "floor": BOOT}, machines=2)
    floor = stack_cost([pool("floor", kind="static", max_machines=1)], {"floor": BOOT}).month
    assert few.month is not None and floor is not None
    assert few.month.least - floor.least == pytest.approx(2 * 1.0 * 730 + 4 * 22.0), "two at once, and the disks of all"
    assert few.month.most - floor.most == pytest.approx((5.0 + 1.5) * 730 + 4 * 22.0), "one of them on demand"
    assert "$5.00 an hour (`limits.usd_per_hour`)" in comment(read(captured("same")), cost=capped)
    assert "is removed" in comment(read(captured("same")), cost=COST, before=capped)


@pytest.mark.parametrize(
    ("changes", "thing"),
    [
        ({"prices": {}}, "a2-highgpu-1g"),
        ({"prices": {"us-central1-a": Price(4.0, 1.0)}}, "a2-highgpu-1g"),  # the other zone may be the dearer one
        ({"disk_usd_gb_month": None}, "pd-ssd"),
    ],
)
def test_an_unknown_price_is_not_zero(changes: dict[str, Any], thing: str) -> None:
    cost = stack_cost([pool(**changes)], {"burst": BOOT})
    assert cost.month is None and cost.pools[0].month is None and thing in cost.pools[0].unknown
    text = comment(read(captured("same")), cost=cost)
    assert "unknown" in text and f"Unknown prices: `{thing}`" in text


def test_a_comment_shows_previous_new_and_removed_values() -> None:
    before = stack_cost([pool(max_machines=2), pool("old")], {"burst": BOOT, "old": BOOT})
    now = stack_cost([pool(), pool("fresh")], {"burst": BOOT, "fresh": BOOT})
    text = comment(read(captured("resize")), cost=now, before=before)
    assert "at most 4, 1 of them on-demand, was at most 2, 1 of them on-demand" in text
    assert "`fresh` (new)" in text and "`old` (removed)" in text
    assert "Most dynamic machines at once: 8, was 6" in text


def test_teams_are_listed_beside_the_limits() -> None:
    vision = TeamState("vision", ("ann", "bo"), 2.0, max_machines=3, max_usd_hour=5.0, max_usd_month=900, high=("ann",))
    teams = vision, TeamState("audio", ("cy",))
    before = stack_cost(
        [pool()], {"burst": BOOT}, teams=(msgspec.structs.replace(vision, share=1.0), TeamState("text", ("di",)))
    )
    now = stack_cost([pool()], {"burst": BOOT}, teams=teams)
    limits = "at most 3 machines, $5.00 an hour, $900.00 a month, 2 members, `priority: high` for 1"
    text = comment(read(captured("same")), cost=now, before=before)
    assert f"- Team `vision`: share 2, {limits}, was share 1, {limits}\n" in text
    assert "- Team `audio` (new): share 1, 1 member\n" in text and "**Team `text` is removed**" in text
    assert "(new)" not in comment(read(captured("same")), cost=now)


def test_the_comments_marker_names_its_stack() -> None:
    assert comment(read(captured("same"))).startswith(review.marker("prod") + "\n")
    assert review.marker("prod") != review.marker("prod-eu")


def test_an_update_without_differences_is_no_change() -> None:
    assert Change(Op.UPDATE, "a:b/c:D", "n") == Change(Op.UPDATE, "a:b/c:D", "n", (), "", "")
    assert comment(read(captured("same"))).splitlines()[1] == "### Stack `prod`: nothing changes"
