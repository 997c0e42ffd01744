"""Pure: where the newest checkpoint is, who may therefore go where, and which copy is fetched.

**Location** (``location.py``). A node remembers its checkpoints' *home* (``Node.machine``: a static machine, or its own
disk), the newest generation in which it wrote there (``wrote``), and the newest at whose beginning the newest commit
was there (``newest_generation``). A generation begins only if one of its machines has the newest commit: by its own
report, or because it wrote in the generation that committed it. A job that cannot have it waits or holds, and tries at
growing intervals. A user's ``resume --go-back`` gives it up (``Record.given_up``), and the generation that begins says
where it begins. If every copy is damaged no user has to decide: a machine that mounts its disk reports checkpoints
that were whole once (DAMAGED), and when every node that kept the newest is at home and says so, the next older one
counts.

**Stops that no user requested** (back to spot or to an idle static machine, growth, a way out of a dry zone) must
cost no work (``location.costs_nothing``). A script that saves by itself (``stop: signal``) reports nothing, so its
state counts as sharded, no generation begins before every disk is attached, and no stop is made for money. Its
``grace_s`` stands for the time of a save.

**Copies in the bucket** (``mirrors.py``; layout in ``contract/uploads.py``). The function learns of a copy by the
fact MIRRORED and keeps what may be fetched in ``Record.mirror``; it never lists the bucket to decide. A copy of a
timeline that was given up does not count (``mirror_top``, ``given_up``). What the record does not name any more is
deleted, lists before parts, and the fact last, so a round that dies leaves the rest to the next. When all disks of a
generation are mounted and none has the newest commit, ``Record.fetch`` names the copy and who fetches it: the lowest
node, or every node for sharded state. A copy older than the newest commit is used only if that commit is provably
gone, and then after five minutes, as if a user had given it up, and not before the copy is on a disk.
"""
