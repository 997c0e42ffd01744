"""The worlds that are searched, with their bounds.

(a) one node, two zones, rounds that may stall for ever or die at any step (``combine`` has the same with two
rounds, one combination of faults and request at a time; a dead round is one that stalls for ever). (b) two nodes
with generations and roll calls; two jobs that want one static machine, or the stack's last machine. A story's
faults may be any of the kinds it names, in any order, up to its number; so may its requests.
"""

from __future__ import annotations

from tests.model.story import ABROAD, FAULTS, ROTTEN, Story

CLOUDS = ("gce", "ec2")
NO_FORGETTING = FAULTS - {"forgotten"}
KILLED = frozenset({"killed"})
CALLS = frozenset({"SILENT", "ROLL", "crashes", "hangs"})
HANGS = frozenset({"stuck", "SILENT", "ROLL", "killed"})
LOSSES = frozenset({"killed", "noticed", "reboots", "hangs"})


def _one(cloud: str) -> tuple[Story, ...]:
    """World (a) on one cloud, all kinds at once, beyond what ``combine`` searches one by one."""
    base = Story("", cloud=cloud)
    ticks = base._replace(ticks=True, kinds=FAULTS - {"noticed"})
    return (
        base._replace(name="any one fault, one round", requests=0, faults=1, rounds=1, deaths=1),
        base._replace(name="any one request, one round", faults=0, rounds=1, deaths=1),
        base._replace(name="any two faults, one round", requests=0, rounds=1, deaths=1),
        base._replace(name="any fault and any request, one round", faults=1, rounds=1, deaths=1),
        base._replace(name="any two faults and any request, one round", rounds=1, deaths=1),
        base._replace(name="all well, two rounds, three deaths", faults=0, requests=0, deaths=3),
        base._replace(name="any one fault, two rounds", requests=0, faults=1),
        base._replace(name="any one request, two rounds", faults=0),
        ticks._replace(name="ticks beside rounds, any one fault but a notice", requests=0, faults=1),
        ticks._replace(name="ticks beside rounds, any one request", faults=0),
    )


def _static(cloud: str) -> tuple[Story, ...]:
    base = Story("", cloud=cloud, static=True, kinds=FAULTS - {"forgotten", "refused"})
    return (
        base._replace(name="a static machine, any one fault, two rounds", requests=0, faults=1),
        base._replace(name="a static machine, any fault and any request, one round", faults=1, rounds=1, deaths=1),
    )


def _two(cloud: str) -> tuple[Story, ...]:
    """World (b) on one cloud."""
    nodes = Story("", cloud=cloud, nodes=2, cap=5, zones=("a",), rounds=1, split=False)
    jobs = Story("", cloud=cloud, jobs=2, cap=1, zones=("a",), rounds=2, split=False, states=10_000_000)
    elastic = nodes._replace(least=1, request_kinds=frozenset({"resize"}))
    return (
        elastic._replace(name="an elastic job of two nodes, any two losses", requests=0, kinds=LOSSES),
        elastic._replace(name="an elastic job of two nodes, resized, and a loss", faults=1, kinds=LOSSES),
        nodes._replace(name="two nodes, any one fault", requests=0, faults=1),
        nodes._replace(name="two nodes, sharded, any one fault", requests=0, faults=1, replicated=False),
        nodes._replace(name="two nodes, any two losses", requests=0, kinds=LOSSES, states=10_000_000),
        nodes._replace(name="two nodes, roll calls", requests=0, kinds=CALLS, states=10_000_000),
        nodes._replace(name="two nodes, a fault and a request", faults=1, states=10_000_000),
        nodes._replace(name="two nodes, a hang and another thing", requests=0, kinds=HANGS, states=10_000_000),
        nodes._replace(
            name="two nodes, one on a static machine, any two losses",
            requests=0,
            kinds=LOSSES,
            static=True,
            states=10_000_000,
        ),
        jobs._replace(name="two jobs, one slot", requests=1, faults=0, request_kinds=frozenset({"cancel"})),
        jobs._replace(
            name="two jobs, one static machine", requests=0, faults=1, kinds=frozenset({"killed", "BOOT"}), static=True
        ),
    )


A = tuple(story for cloud in CLOUDS for story in (*_one(cloud), *_static(cloud)))
B = tuple(story for cloud in CLOUDS for story in _two(cloud))
LOST = tuple(
    Story(
        "a record is deleted by hand",
        cloud,
        faults=1,
        requests=0,
        kinds=frozenset({"killed", "gone"}),
        lost_records=True,
    )
    for cloud in CLOUDS
)
RESIZED = Story(
    "two nodes become one, and two again",
    nodes=2,
    cap=5,
    zones=("a",),
    rounds=1,
    faults=0,
    request_kinds=frozenset({"resize"}),
    least=1,
    split=False,
)

# The second job takes the first one's machine: that saves, stops, waits, and comes back when the second has ended.
RECALL = Story(
    "a job takes another's machine",
    jobs=2,
    cap=1,
    zones=("a",),
    rounds=1,
    faults=0,
    requests=0,
    split=False,
    recall=True,
)
RECALL_ENDS = RECALL._replace(
    name="a job takes another's machine, and one of them is cancelled or paused",
    requests=1,
    request_kinds=frozenset({"cancel", "pause"}),
)
RECALL_LOSS = RECALL._replace(name="a job takes another's machine, any one loss", faults=1, kinds=LOSSES)

# A smaller job keeps its static machine, and goes on there alone, from what that holds.
LEFT_NODE = RESIZED._replace(
    name="two nodes, one on a static machine, become one, which pauses and goes on",
    request_kinds=frozenset({"resize", "pause"}),
    static=True,
)
# A static machine may hold an older checkpoint than the node's own disk, or none: it is no bargain then.
BLANK_NODE = Story(
    "a static machine comes late, the job pauses and goes on",
    rounds=1,
    faults=1,
    kinds=frozenset({"killed", "refused", "BOOT", "reboots"}),
    request_kinds=frozenset({"pause"}),
    split=False,
    static=True,
)

# It began where spot is dear, for the cheap zone had none: one machine looks there, and the gang follows.
DEAR = Story(
    "spot is dear in the zone that it began in",
    rounds=1,
    faults=2,
    requests=0,
    kinds=frozenset({"refused", "killed"}),
    split=False,
    dear=True,
)
DEAR_LOSS = DEAR._replace(
    name="spot is dear in the zone that it began in, and a machine is taken",
    kinds=frozenset({"refused", "killed", "noticed"}),
)
DEAR_TWO = DEAR._replace(name="two nodes, spot is dear in the zone that they began in", nodes=2, cap=5)

# A static machine may be a successor: what its predecessor saves at last, another must bring along.
NODE_NOTICE = Story(
    "a static machine comes late, and a machine is under notice",
    rounds=1,
    faults=2,
    requests=0,
    deaths=0,
    kinds=frozenset({"noticed", "BOOT"}),
    zones=("a",),
    split=False,
    static=True,
)

# The longest run of a machine ends: no notice says so, its listing does.
LONGEST = Story(
    "a machine's longest run ends", faults=1, requests=0, rounds=1, kinds=frozenset({"expires"}), split=False
)
LONGEST_TWICE = LONGEST._replace(
    name="a machine's longest run ends, and another thing happens",
    faults=2,
    kinds=frozenset({"expires", "killed", "noticed", "refused"}),
    zones=("a",),
)

# A machine boots slowly: a second one boots beside it, and whichever is up first takes the node.
SLOW_BOOT = Story(
    "a machine boots slowly, and another thing happens",
    faults=2,
    requests=0,
    rounds=1,
    kinds=frozenset({"SLOW", "killed", "hangs", "refused"}),
    zones=("a",),
    split=False,
)
SLOW_BOOT_ROUNDS = SLOW_BOOT._replace(
    name="a machine boots slowly, two rounds", rounds=2, faults=1, kinds=frozenset({"SLOW"})
)
SLOW_BOOT_REQUEST = SLOW_BOOT._replace(
    name="a machine boots slowly, a loss and a request", requests=1, kinds=frozenset({"SLOW", "killed", "noticed"})
)
SLOW_BOOT_TWO = SLOW_BOOT._replace(name="two nodes, machines boot slowly", nodes=2, cap=6)

# An agent says that the job hangs; whoever is asked where its workers are may say that they only take long.
HANG = Story(
    "two nodes, the job hangs",
    nodes=2,
    cap=5,
    zones=("a",),
    rounds=1,
    faults=2,
    requests=0,
    kinds=HANGS - {"ROLL", "killed"},
    split=False,
)

# Disks may be destroyed where the bucket has a copy of what was on them: the best there is, and nothing older.
WIPED = Story(
    "a disk is destroyed, and the bucket has a copy",
    rounds=1,
    faults=2,
    requests=0,
    kinds=frozenset({"killed", "wiped"}),
    zones=("a",),
    split=False,
    mirror=True,
)
WIPED_LATER = WIPED._replace(name="a disk is destroyed, and the bucket has an older copy", faults=3)
WIPED_PAUSE = WIPED._replace(
    name="a disk is destroyed while the job pauses, and the bucket has a copy",
    faults=1,
    kinds=frozenset({"wiped"}),
    requests=1,
    request_kinds=frozenset({"pause"}),
)
WIPED_TWO = WIPED._replace(name="two nodes, a disk is destroyed, and the bucket has a copy", nodes=2, cap=5)

# A trial of a search stops at its rung, waits with a copy in the bucket and no disk, and continues or ends.
RUNG = Story(
    "a trial stops at its rung", zones=("a",), rounds=1, faults=0, requests=0, split=False, mirror=True, trial=True
)
RUNG_ROUNDS = RUNG._replace(name="a trial stops at its rung, two rounds, one dies", rounds=2, deaths=1)
RUNG_LOSS = RUNG._replace(name="a trial stops at its rung, any one loss", faults=1, kinds=LOSSES | {"crashes"})
RUNG_ASKED = RUNG._replace(
    name="a trial stops at its rung, and is paused, cancelled or done",
    requests=1,
    request_kinds=frozenset({"pause", "cancel", "finish"}),
)

# A move to another region, which ends at home as if nothing had been if its copy is refused or the region is lost.
MOVE_ABROAD = Story(
    "a move to another region, which is lost or refuses the copy",
    rounds=1,
    faults=1,
    kinds=ABROAD,
    request_kinds=frozenset({"move"}),
    split=False,
    regions=True,
    cap=4,  # beside its own, a lost region keeps the grants of the machine that it has
)
# The same by a copy in the bucket, since copies of disks cost egress: the old disks stay until the gang trains.
MOVE_BUCKET = MOVE_ABROAD._replace(
    name="a move by the bucket, whose copy or other region is lost",
    kinds=ABROAD | ROTTEN,
    mirror=True,
    toll=True,
)
MOVE_BUCKET_LOSS = MOVE_BUCKET._replace(name="a move by the bucket, and any one loss", kinds=LOSSES)
# A crash after a checkpoint's copy begins a generation, whose own checkpoint the bucket refuses: it is not waited for.
MOVE_UNSTORED = MOVE_BUCKET._replace(
    name="a job crashes, and the bucket refuses the copy for which its move waits",
    faults=2,
    pair=("crashes", "unstored"),
    kinds=frozenset(),
)
# All machines are lost, or have notices, and home refuses new ones: the gang asks abroad before its disks leave.
SEEK = Story(
    "all machines are lost, and home refuses new ones",
    rounds=1,
    faults=2,
    requests=0,
    kinds=frozenset({"killed", "refused"}),
    split=False,
    regions=True,
    cap=4,
)
SEEK_NOTICE = SEEK._replace(
    name="all machines have notices, and home refuses new ones", kinds=frozenset({"noticed", "refused"})
)
DEAR_ABROAD = DEAR._replace(
    name="spot is dear at home and cheap abroad, for a transfer that costs more", regions=True, toll=True, faults=1
)
MOVE_REFUSED = MOVE_ABROAD._replace(
    name="a move to another region, which refuses machines or the copy",
    kinds=frozenset({"refused", "uncopied"}),
    faults=2,
)
MOVE_ABROAD_DEATH = MOVE_ABROAD._replace(
    name="a move to another region, which is lost or refuses the copy, and a round dies", deaths=1
)

# What `make test` explores, up to a number of states: everything that one thing can break, on both clouds.
# `make model` has larger worlds, to their end.
SLICE = (
    RUNG,
    RUNG_LOSS,
    WIPED,
    NODE_NOTICE,
    LONGEST,
    HANG,
    DEAR,
    DEAR_ABROAD,
    MOVE_ABROAD,
    MOVE_BUCKET,
    MOVE_BUCKET_LOSS,
    SEEK,
    RECALL,
    RECALL_ENDS,
    SLOW_BOOT,
    SLOW_BOOT_ROUNDS,
    *tuple(
        story
        for cloud in CLOUDS
        for story in (
            Story("any one fault, one round", cloud, requests=0, faults=1, rounds=1),
            Story("all well, two rounds", cloud, requests=0, faults=0),
            Story("a machine is taken, two rounds", cloud, requests=0, faults=1, kinds=KILLED),
            Story("a machine is taken, ticks beside rounds", cloud, requests=0, faults=1, kinds=KILLED, ticks=True),
            Story("any one request, one round", cloud, faults=0, rounds=1),
            Story(
                "two nodes, one is taken",
                cloud,
                nodes=2,
                cap=5,
                zones=("a",),
                rounds=1,
                faults=1,
                requests=0,
                kinds=KILLED,
                split=False,
            ),
            Story("two jobs, one slot", cloud, jobs=2, cap=1, zones=("a",), faults=0, requests=0, split=False),
        )
    ),
)
WORLDS = (
    *A,
    *B,
    *LOST,
    *(story._replace(cloud=cloud) for cloud in CLOUDS for story in (RESIZED, LEFT_NODE, BLANK_NODE, NODE_NOTICE)),
    *(story._replace(cloud=cloud) for cloud in CLOUDS for story in (WIPED_LATER, WIPED_PAUSE, WIPED_TWO)),
    *(story._replace(cloud=cloud) for cloud in CLOUDS for story in (DEAR_LOSS, DEAR_TWO)),
    DEAR._replace(rounds=2, deaths=1),
    MOVE_ABROAD_DEATH,
    MOVE_ABROAD_DEATH._replace(cloud="ec2"),
    *(story._replace(cloud=cloud) for cloud in CLOUDS for story in (MOVE_BUCKET, MOVE_BUCKET_LOSS)),
    MOVE_UNSTORED,
    MOVE_BUCKET._replace(name="a move by the bucket, and a round dies", deaths=1),
    MOVE_BUCKET._replace(
        name="a move by the bucket, which is lost, and a loss too", faults=2, kinds=ROTTEN | {"killed"}
    ),
    *(story._replace(cloud=cloud) for cloud in CLOUDS for story in (SEEK, MOVE_REFUSED, DEAR_ABROAD)),
    SEEK._replace(name="all machines are lost, and home refuses new ones, two rounds", rounds=2),
    SEEK._replace(name="two nodes, all machines are lost, and home refuses new ones", nodes=2, cap=6, faults=3),
    SEEK_NOTICE,
    MOVE_ABROAD._replace(name="a move to another region, and a loss too", faults=2, kinds=ABROAD | {"killed"}),
    *(
        story._replace(cloud=cloud, rounds=rounds)
        for cloud in CLOUDS
        for story in (RECALL, RECALL_ENDS, RECALL_LOSS)
        for rounds in (1, 2)
    ),
    *(
        story._replace(cloud=cloud)
        for cloud in CLOUDS
        for story in (RUNG, RUNG_ROUNDS, RUNG_LOSS, RUNG_ASKED, RUNG_LOSS._replace(rounds=2))
    ),
    LONGEST._replace(rounds=2),
    LONGEST_TWICE,
    *(story._replace(cloud=cloud) for cloud in CLOUDS for story in (SLOW_BOOT, SLOW_BOOT_ROUNDS)),
    *(story._replace(cloud=cloud) for cloud in CLOUDS for story in (SLOW_BOOT_REQUEST, SLOW_BOOT_TWO)),
)
__all__ = [
    "BLANK_NODE",
    "CLOUDS",
    "DEAR",
    "DEAR_ABROAD",
    "DEAR_LOSS",
    "HANG",
    "LEFT_NODE",
    "LONGEST",
    "LOST",
    "MOVE_ABROAD",
    "MOVE_BUCKET",
    "MOVE_BUCKET_LOSS",
    "MOVE_UNSTORED",
    "NODE_NOTICE",
    "RECALL",
    "RECALL_ENDS",
    "RUNG",
    "RUNG_ASKED",
    "RUNG_LOSS",
    "RUNG_ROUNDS",
    "SEEK",
    "SEEK_NOTICE",
    "SLICE",
    "SLOW_BOOT",
    "WIPED",
    "WIPED_LATER",
    "WORLDS",
    "A",
    "B",
]
