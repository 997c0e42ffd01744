"""The worlds that are searched, with their bounds.

(a) one rank, two zones, rounds that may stall for ever or die at any step (``combine`` has the same with two
rounds, one combination of faults and wish at a time; a dead round is one that stalls for ever). (b) two ranks
with generations and roll calls; two jobs that want one static node, or the stack's last machine. A story's
faults may be any of the kinds it names, in any order, up to its number; so may its wishes.
"""

from __future__ import annotations

from tests.model.story import FAULTS, Story

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
        base._replace(name="any one fault, one round", wishes=0, faults=1, rounds=1, deaths=1),
        base._replace(name="any one wish, one round", faults=0, rounds=1, deaths=1),
        base._replace(name="any two faults, one round", wishes=0, rounds=1, deaths=1),
        base._replace(name="any fault and any wish, one round", faults=1, rounds=1, deaths=1),
        base._replace(name="any two faults and any wish, one round", rounds=1, deaths=1),
        base._replace(name="all well, two rounds, three deaths", faults=0, wishes=0, deaths=3),
        base._replace(name="any one fault, two rounds", wishes=0, faults=1),
        base._replace(name="any one wish, two rounds", faults=0),
        ticks._replace(name="ticks beside rounds, any one fault but a notice", wishes=0, faults=1),
        ticks._replace(name="ticks beside rounds, any one wish", faults=0),
    )


def _static(cloud: str) -> tuple[Story, ...]:
    base = Story("", cloud=cloud, static=True, kinds=FAULTS - {"forgotten", "refused"})
    return (
        base._replace(name="a static node, any one fault, two rounds", wishes=0, faults=1),
        base._replace(name="a static node, any fault and any wish, one round", faults=1, rounds=1, deaths=1),
    )


def _two(cloud: str) -> tuple[Story, ...]:
    """World (b) on one cloud."""
    ranks = Story("", cloud=cloud, ranks=2, cap=5, zones=("a",), rounds=1, split=False)
    jobs = Story("", cloud=cloud, jobs=2, cap=1, zones=("a",), rounds=2, split=False, states=10_000_000)
    elastic = ranks._replace(least=1, asks=frozenset({"resize"}))
    return (
        elastic._replace(name="an elastic job of two ranks, any two losses", wishes=0, kinds=LOSSES),
        elastic._replace(name="an elastic job of two ranks, resized, and a loss", faults=1, kinds=LOSSES),
        ranks._replace(name="two ranks, any one fault", wishes=0, faults=1),
        ranks._replace(name="two ranks, sharded, any one fault", wishes=0, faults=1, replicated=False),
        ranks._replace(name="two ranks, any two losses", wishes=0, kinds=LOSSES, states=10_000_000),
        ranks._replace(name="two ranks, roll calls", wishes=0, kinds=CALLS, states=10_000_000),
        ranks._replace(name="two ranks, a fault and a wish", faults=1, states=10_000_000),
        ranks._replace(name="two ranks, a hang and another thing", wishes=0, kinds=HANGS, states=10_000_000),
        ranks._replace(
            name="two ranks, one on a static node, any two losses",
            wishes=0,
            kinds=LOSSES,
            static=True,
            states=10_000_000,
        ),
        jobs._replace(name="two jobs, one slot", wishes=1, faults=0, asks=frozenset({"cancel"})),
        jobs._replace(
            name="two jobs, one static node", wishes=0, faults=1, kinds=frozenset({"killed", "BOOT"}), static=True
        ),
    )


A = tuple(story for cloud in CLOUDS for story in (*_one(cloud), *_static(cloud)))
B = tuple(story for cloud in CLOUDS for story in _two(cloud))
LOST = tuple(
    Story(
        "a record is deleted by hand", cloud, faults=1, wishes=0, kinds=frozenset({"killed", "gone"}), lost_records=True
    )
    for cloud in CLOUDS
)
RESIZED = Story(
    "two ranks become one, and two again",
    ranks=2,
    cap=5,
    zones=("a",),
    rounds=1,
    faults=0,
    asks=frozenset({"resize"}),
    least=1,
    split=False,
)

# A smaller job keeps its static node, and goes on there alone, from what that holds.
LEFT_NODE = RESIZED._replace(
    name="two ranks, one on a static node, become one, which pauses and goes on",
    asks=frozenset({"resize", "pause"}),
    static=True,
)
# A static node may hold an older checkpoint than the rank's own disk, or none: it is no bargain then.
BLANK_NODE = Story(
    "a static node comes late, the job pauses and goes on",
    rounds=1,
    faults=1,
    kinds=frozenset({"killed", "refused", "BOOT", "reboots"}),
    asks=frozenset({"pause"}),
    split=False,
    static=True,
)

# It began where spot is dear, for the cheap zone had none: one machine looks there, and the gang follows.
DEAR = Story(
    "spot is dear in the zone that it began in",
    rounds=1,
    faults=2,
    wishes=0,
    kinds=frozenset({"refused", "killed"}),
    split=False,
    dear=True,
)
DEAR_LOSS = DEAR._replace(
    name="spot is dear in the zone that it began in, and a machine is taken",
    kinds=frozenset({"refused", "killed", "noticed"}),
)
DEAR_TWO = DEAR._replace(name="two ranks, spot is dear in the zone that they began in", ranks=2, cap=5)

# A static node may be a successor: what its predecessor saves at last, another must bring along.
NODE_NOTICE = Story(
    "a static node comes late, and a machine is under notice",
    rounds=1,
    faults=2,
    wishes=0,
    deaths=0,
    kinds=frozenset({"noticed", "BOOT"}),
    zones=("a",),
    split=False,
    static=True,
)

# The longest run of a machine ends: no notice says so, its listing does.
LONGEST = Story("a machine's longest run ends", faults=1, wishes=0, rounds=1, kinds=frozenset({"expires"}), split=False)
LONGEST_TWICE = LONGEST._replace(
    name="a machine's longest run ends, and another thing happens",
    faults=2,
    kinds=frozenset({"expires", "killed", "noticed", "refused"}),
    zones=("a",),
)

# An agent says that the job hangs; whoever is asked where its workers are may say that they only take long.
HANG = Story(
    "two ranks, the job hangs",
    ranks=2,
    cap=5,
    zones=("a",),
    rounds=1,
    faults=2,
    wishes=0,
    kinds=HANGS - {"ROLL", "killed"},
    split=False,
)

# Disks may be destroyed where the bucket has a copy of what was on them: the best there is, and nothing older.
WIPED = Story(
    "a disk is destroyed, and the bucket has a copy",
    rounds=1,
    faults=2,
    wishes=0,
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
    wishes=1,
    asks=frozenset({"pause"}),
)
WIPED_TWO = WIPED._replace(name="two ranks, a disk is destroyed, and the bucket has a copy", ranks=2, cap=5)

# What `make test` explores to the end: everything that one thing can break, on both clouds.
SLICE = (
    RESIZED,
    WIPED,
    LEFT_NODE,
    BLANK_NODE,
    NODE_NOTICE,
    LONGEST,
    HANG,
    DEAR,
    *tuple(
        story
        for cloud in CLOUDS
        for story in (
            Story("any one fault, one round", cloud, wishes=0, faults=1, rounds=1),
            Story("all well, two rounds", cloud, wishes=0, faults=0),
            Story("a machine is taken, two rounds", cloud, wishes=0, faults=1, kinds=KILLED),
            Story("a machine is taken, ticks beside rounds", cloud, wishes=0, faults=1, kinds=KILLED, ticks=True),
            Story("any one wish, one round", cloud, faults=0, rounds=1),
            Story(
                "two ranks, one is taken",
                cloud,
                ranks=2,
                cap=5,
                zones=("a",),
                rounds=1,
                faults=1,
                wishes=0,
                kinds=KILLED,
                split=False,
            ),
            Story("two jobs, one slot", cloud, jobs=2, cap=1, zones=("a",), faults=0, wishes=0, split=False),
        )
    ),
)
WORLDS = (
    *A,
    *B,
    *LOST,
    *(story._replace(cloud=cloud) for cloud in CLOUDS for story in (LEFT_NODE, BLANK_NODE, NODE_NOTICE)),
    *(story._replace(cloud=cloud) for cloud in CLOUDS for story in (WIPED_LATER, WIPED_PAUSE, WIPED_TWO)),
    *(story._replace(cloud=cloud) for cloud in CLOUDS for story in (DEAR_LOSS, DEAR_TWO)),
    DEAR._replace(rounds=2, deaths=1),
    LONGEST._replace(rounds=2),
    LONGEST_TWICE,
)
__all__ = [
    "BLANK_NODE",
    "CLOUDS",
    "DEAR",
    "DEAR_LOSS",
    "HANG",
    "LEFT_NODE",
    "LONGEST",
    "LOST",
    "NODE_NOTICE",
    "SLICE",
    "WIPED",
    "WIPED_LATER",
    "WORLDS",
    "A",
    "B",
]
