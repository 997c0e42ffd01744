"""The stacks of both clouds through Pulumi's own engine: what changes, what is refused, and what a destroy leaves.

Stand-in providers take the place of Google's and Amazon's (``standin``): strict about arguments, and with their rules
of replacement. Needs the ``pulumi`` command with its Python host: https://www.pulumi.com/docs/install/
Some fifty runs of the engine: ``make engine``; ``make test`` has ``test_engine.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import msgspec
import pytest
from pulumi.automation import CommandError, ConcurrentUpdateError, OpType

from spotkeeper.cli.stacks import review as rules
from spotkeeper.contract.record import Hold, Node, Phase, Record
from spotkeeper.report.review.preview import declared
from tests.engine.conftest import needs_pulumi
from tests.engine.standin.engine import Told
from tests.engine.standin.machines import OTHER, Machines, OnGoogle, on_amazon
from tests.engine.standin.project import Project, checkout
from tests.engine.standin.rules import REPLACES
from tests.infra.cloud import serve
from tests.infra.conftest import STACKS
from tests.reconcile.clouds.ec2.region import JOB

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(3600),
    needs_pulumi,
    pytest.mark.filterwarnings("ignore:.*deprecated in favor of:DeprecationWarning"),
]
FLOOR, BURST = "floor", "burst"
REGIONS = ("us-east-1", "us-west-2")


@dataclass(frozen=True)
class World:
    """A stack that is up, as the tests of its cloud begin with it. ``machines``: where the drain's calls go."""

    cloud: str
    project: Project
    machines: Machines
    template: str  # types, as this cloud calls them
    descriptor: str
    node: str
    disk: str
    bucket: str
    acts: tuple[str, ...]  # the function, and what starts it
    zone: tuple[str, str]

    def pools(self, **burst: Any) -> list[dict[str, Any]]:
        pools = msgspec.json.decode(msgspec.json.encode(self.project.config["spotkeeper:pools"]))
        return [{**pool, **burst} if pool["name"] == BURST else pool for pool in pools]


def small(name: str) -> dict[str, Any]:
    """An example, without the pools that add nothing here."""
    config = msgspec.yaml.decode((STACKS / f"Pulumi.{name}.yaml").read_bytes())["config"]
    config["spotkeeper:pools"] = [pool for pool in config["spotkeeper:pools"] if pool["name"] in (FLOOR, BURST)]
    return dict(config)


@pytest.fixture(scope="module")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with serve() as cloud:
        config = small("example-gcp")
        config["spotkeeper:endpoints"] = {"compute": f"{cloud.endpoint}/compute/v1", "storage": cloud.endpoint}
        needed = tuple(type_ for type_ in REPLACES if type_.startswith("gcp:"))
        folder = tmp_path_factory.mktemp("google")
        project = Project(folder / "stack", "gcp", config, {}, checkout(folder / "checkout"), needed=needed)
        project.write()
        yield World(
            "gcp", project, OnGoogle(cloud),
            template="gcp:compute/regionInstanceTemplate:RegionInstanceTemplate",
            descriptor="gcp:storage/bucketObject:BucketObject",
            node="gcp:compute/instance:Instance",
            disk="gcp:compute/disk:Disk",
            bucket="gcp:storage/bucket:Bucket",
            acts=("gcp:cloudfunctionsv2/function:Function", "gcp:cloudscheduler/job:Job"),
            zone=("us-central1-a", "us-central1-b"),
        )  # fmt: skip


@pytest.fixture(scope="module")
def amazon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    config = small("example-aws")
    with on_amazon(f"sk-{config['spotkeeper:account']}-demo") as machines:
        environment = {
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_ENDPOINT_URL": machines.s3,
            "AWS_ENDPOINT_URL_EC2": machines.here.endpoint,
        }
        needed = tuple(type_ for type_ in REPLACES if type_.startswith("aws:"))
        folder = tmp_path_factory.mktemp("amazon")
        program = checkout(folder / "checkout")
        project = Project(folder / "stack", "aws", config, environment, program, needed=needed)
        project.write()
        yield World(
            "aws", project, machines,
            template="aws:ec2/launchTemplate:LaunchTemplate",
            descriptor="aws:s3/bucketObjectv2:BucketObjectv2",
            node="aws:ec2/instance:Instance",
            disk="aws:ebs/volume:Volume",
            bucket="aws:s3/bucket:Bucket",
            acts=("aws:lambda/function:Function", "aws:scheduler/schedule:Schedule"),
            zone=("us-east-1a", "us-east-1b"),
        )  # fmt: skip


@pytest.fixture(scope="module", params=["google", "amazon"])
def world(request: pytest.FixtureRequest) -> World:
    found: World = request.getfixturevalue(request.param)
    assert {step.op for step in found.project.up().changed()} == {OpType.CREATE}
    return found


@pytest.fixture
def project(world: World, tmp_path: Path) -> Project:
    return world.project.copied(tmp_path / "stack")


def test_a_first_preview_lists_every_resource_and_makes_none(world: World, tmp_path: Path) -> None:
    """Of a stack that is not there yet: much of it is known only when something else has been made."""
    fresh = world.project.anew(tmp_path / "fresh")
    steps = json.loads(fresh.foreseen())["steps"]
    assert {step["op"] for step in steps} == {"create"}
    made = {(each["type"], each["name"]) for each in world.project.there().values()}
    assert made == {(type_, name) for type_, name in map(_typed, steps) if type_.startswith(f"{world.cloud}:")}
    assert fresh.log() == []


def _typed(step: dict[str, Any]) -> tuple[str, str]:
    *_, types, name = step["urn"].split("::")
    return types.rsplit("$", 1)[-1], name


def test_a_second_up_and_a_refresh_are_empty_while_machines_come_and_go(world: World, project: Project) -> None:
    """What reconcile makes is in nobody's state: no preview, no drift check ever speaks of it."""
    assert project.up(expect_no_changes=True).changed() == []
    world.machines.appear(2)
    project.drift()
    world.machines.clear()
    project.hand("gone", "tick")  # a schedule that somebody deleted: the check is not deaf
    with pytest.raises(CommandError, match="no changes were expected"):
        project.drift()


def test_resizing_a_pool_updates_one_object(world: World, project: Project) -> None:
    done = project.with_(pools=world.pools(size=12)).up()
    assert [(step.op, step.name) for step in done.changed()] == [(OpType.UPDATE, "pools")]


def test_a_new_image_changes_templates_and_touches_no_static_machine(world: World, project: Project) -> None:
    image = {"gcp": "projects/acme-images/global/images/train-2027-01-01", "aws": "ami-0ddddddddddddddd1"}[world.cloud]
    before = len(project.log())
    done = project.with_(image=image).up()
    log = [(what, name) for what, type_, name in project.log()[before:] if type_ == world.template and what != "begin"]
    assert not [step for step in done.changed() if step.type in (world.node, world.disk)]
    if world.cloud == "aws":  # a launch template's change is a new version of it
        assert {what for what, _ in log} == {"update"}
        return
    assert [what for what, _ in log] == ["create", "create", "delete", "delete"], "no moment without a template"
    whole = [(what, name) for what, _, name in project.log()[before:]]
    assert whole.index(("update", "pools")) < whole.index(("delete", "demo-burst-spot")), "nobody is sent to a dead one"


@pytest.mark.parametrize("keep", ["protect", "delete", "retain"])
def test_a_disk_that_would_move_to_another_zone_is_refused(world: World, project: Project, keep: str) -> None:
    pools = world.pools()
    pools[0]["disk"] = {**pools[0]["disk"], "on_destroy": keep}
    if keep != "protect":  # as the example has it
        project.with_(pools=pools).up()
    pools[0]["zones"] = [world.zone[1]]
    before = len(project.log())
    with pytest.raises(CommandError, match=f"cannot move to {world.zone[1]}"):
        project.with_(pools=pools).up()
    if keep == "protect":  # and where data may be lost, the engine's own word holds
        with pytest.raises(CommandError, match="marked for protection"):
            project.with_(pools=pools, allow_data_loss=True).up()
    touched = {(what, type_) for what, type_, _ in project.log()[before:] if type_ in (world.disk, world.node)}
    assert not touched, "neither the disk nor its node"


def test_the_stacks_break_no_rule_of_the_review(world: World, project: Project) -> None:
    """By the inputs that the engine tells, of everything that stays as it is."""
    told = project.foreseen()
    found, all_of_it = declared(told)
    assert len(found) > 30 and all_of_it
    assert rules.broken_rules(told, project.name) == ()


def test_a_protected_stack_refuses_a_destroy_untouched(world: World, project: Project) -> None:
    before = project.log()
    with pytest.raises(CommandError, match="protected"):
        project.destroy()
    assert project.log() == before


def test_a_destroy_drains_and_leaves_retained_resources(world: World, project: Project) -> None:
    """With running jobs, from a checkout whose code has changed since the last up: its drain is the one that runs."""
    pools = world.pools()
    pools[0]["disk"] = {**pools[0]["disk"], "on_destroy": "retain"}
    free = project.with_(pools=pools, bucket={"on_destroy": "delete"})
    free.up()
    assert "sk-demo-floor-s0-data" in free.stack.outputs()["keptDisks"].value
    world.machines.appear(3)
    theirs = [name for name in world.machines.left() if name.startswith(f"sk-{OTHER}-")]
    assert theirs and len(world.machines.left()) - len(theirs) == 3 + 3 + 1
    before = len(free.log())
    done = free.with_(checkout=changed_checkout(free.folder.parent)).destroy()
    assert "THE NEWER DRAIN of demo: deleted 3 disks, 3 machines, 1 snapshot" in done.said, done.said
    assert world.machines.left() == theirs, "nothing of this stack, and all of the other"
    assert world.machines.marked(), "no round of the function makes anything any more"
    assert [each["name"] for each in free.there().values()] == ["sk-demo-floor-s0-data"]
    order = [name for what, _, name in free.log()[before:] if what == "delete"]
    steps = done.deleted()
    assert steps.index("tick") < steps.index("drain") < steps.index("function"), (
        "nothing refills what the drain empties"
    )
    assert order.index("sk-demo-floor-s0") < order.index("network" if world.cloud == "gcp" else "vpc")
    world.machines.clear()


@pytest.mark.filterwarnings("ignore:Error in event stream")  # it is cut off with the engine
def test_a_killed_up_can_continue(world: World, tmp_path: Path) -> None:
    fresh = world.project.anew(tmp_path / "fresh")
    fresh.hand("hang", "pools")
    with pytest.raises(CommandError, match=f"code: -{SIGKILL}"):
        fresh.up(Told(hear=lambda said: "pools: 102" in said and fresh.kill()), parallel=1)
    made = set(fresh.there())
    assert made
    pending = fresh.stack.export_stack().deployment["pending_operations"]
    assert [(each["type"], each["resource"]["urn"].rsplit("::", 1)[-1]) for each in pending] == [("creating", "pools")]
    fresh.hand("hang", None)
    with pytest.raises(ConcurrentUpdateError):  # by the one that was killed
        fresh.up()
    fresh.stack.cancel()
    fresh.up()
    assert made < set(fresh.there()), "what was made before stands, and was made once"
    fresh.up(expect_no_changes=True)


def test_after_a_refusal_up_can_continue(world: World, tmp_path: Path) -> None:
    fresh = world.project.anew(tmp_path / "fresh")
    fresh.hand("fail", "function")
    with pytest.raises(CommandError, match="503 the cloud cannot do it now"):
        fresh.up()
    fresh.hand("fail", None)
    fresh.up()
    assert len(fresh.there()) == len(world.project.there())


def in_one_region(world: World, folder: Path) -> tuple[Project, dict[str, Any]]:
    """A stack that is not there yet and protects nothing; and what its file says to be in two regions."""
    near, far = (("us-central1", "us-east1"), "us-east1-b") if world.cloud == "gcp" else (REGIONS, "us-west-2b")
    pools = [{key: value for key, value in pool.items() if key != "zones"} for pool in world.pools()]
    pools[0] |= {"zones": [world.zone[0]], "disk": {**pools[0]["disk"], "on_destroy": "delete"}}
    base = {"region": "", "pools": pools, "bucket": {"on_destroy": "delete"}}
    one = world.project.anew(folder).with_(**base, regions=[near[0]], zones=[world.zone[0]])
    more = {"images": {near[1]: "ami-0eeeeeeeeeeeeeee1"}} if world.cloud == "aws" else {}
    return one, {"regions": list(near), "zones": [world.zone[0], far], **more}


def test_a_region_comes_and_goes(world: World, tmp_path: Path) -> None:
    """It adds resources and takes them away, and what a job left there; nothing else changes but who may do what."""
    fresh, more = in_one_region(world, tmp_path / "fresh")
    far = more["zones"][1]
    fresh.up()
    at_home = fresh.there()

    both = fresh.with_(**more)
    added = both.up().changed()
    made = {step.name for step in added if step.op is OpType.CREATE}
    changed = {step.name for step in added if step.op is not OpType.CREATE}
    assert changed <= {"pools", "regions", "drain", "rights-fn"}
    assert {step.op for step in added} == {OpType.CREATE, OpType.UPDATE}
    assert len(made) >= (4 if world.cloud == "gcp" else 20)
    assert both.up(expect_no_changes=True).changed() == []

    world.machines.forget(far)
    assert len(world.machines.left()) == 1
    without = fresh.with_(regions=more["regions"][:1], zones=[world.zone[0]], images={})
    held = Record(JOB, "u", "first", "", 0.0, zone=far, gen=1, nodes=(Node(zone=far),))
    world.machines.hold(msgspec.structs.replace(held, phase=Phase.HOLD, hold=Hold.PAUSE))
    before = both.there()
    with pytest.raises(CommandError, match=f"only checkpoint is in {far}"):
        without.up()
    assert without.there() == before, "no object of a refused `up` says that the region has gone"
    world.machines.hold(None)
    gone = without.up().changed()
    assert {step.name for step in gone if step.op is OpType.DELETE} == made
    assert {step.name for step in gone if step.op is not OpType.DELETE} == changed
    assert world.machines.left() == [], "what the job left there was billed"
    assert fresh.there() == at_home

    fresh.with_(**more).up()
    fresh.destroy()
    assert fresh.there() == {}
    world.machines.clear()


def test_a_home_moves_and_returns(world: World, tmp_path: Path) -> None:
    """Away from a region that deletes nothing; whichever home it is, only one function may act at any time."""
    one, more = in_one_region(world, tmp_path / "fresh")
    (near, far), acts = more["regions"], {*world.acts}
    one.with_(**more).up()
    before = one.there()
    assert {place for place, type_ in places(one) if type_ in acts} == {near}

    moved, told = one.with_(**more, home=far), Told()
    moved.hand("stuck", world.acts[0])
    with pytest.raises(CommandError, match="503 the cloud cannot do it now"):
        moved.up(told)
    in_order(told, world)
    assert {(far, type_) for type_ in acts} < places(moved), "the stack has a home, whatever the old one answers"
    moved.hand("stuck", None)
    moved.up()
    assert {place for place, type_ in places(moved) if type_ in acts} == {far}
    assert moved.up(expect_no_changes=True).changed() == []
    moved.drift()

    back = one.with_(**more, home="")
    in_order(back.up(), world)
    assert back.there() == before
    back.destroy()
    assert back.there() == {}
    world.machines.clear()


def places(project: Project) -> set[tuple[str, str]]:
    """(region, type) of whatever has a region, as it is in the cloud."""
    found = ((each["state"], each["type"]) for each in project.there().values())
    return {(str(state.get("region") or state.get("location")), type_) for state, type_ in found}


def in_order(told: Told, world: World) -> None:
    """The new function is there before the old one stops, which this write of the pools does; then what starts it."""
    steps = [(step.op, step.type) for step in told.changed()]
    stops = steps.index((OpType.UPDATE, world.descriptor))
    made, deleted = ({at for at, (op, _) in enumerate(steps) if op is each} for each in (OpType.CREATE, OpType.DELETE))
    function, *starts = ({at for at in made if steps[at][1] == type_} for type_ in world.acts)
    assert len(function) == 1 and max(function) < stops
    assert starts and all(stops < min(each) for each in starts)
    assert deleted and max(made) < min(deleted), "what a lost region refuses comes last"


# --- another checkout --------------------------------------------------


def changed_checkout(folder: Path) -> Path:
    """A newer one: its drain says another thing, and its program cannot even be run."""
    newer = checkout(folder / "newer")
    drain = newer / "infra" / "drain" / "__init__.py"
    changed = drain.read_text().replace('print(f"drain of {stack}', 'print(f"THE NEWER DRAIN of {stack}')
    assert changed != drain.read_text()
    drain.write_text(changed)
    (newer / "infra" / "__main__.py").write_text("raise SystemExit('a destroy runs no program')\n")
    return newer
