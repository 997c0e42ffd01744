"""Pure: where the newest checkpoint is, on which machines a node may therefore train, and which copy is fetched.

**Location** (``location.py``). A node remembers its checkpoints' *home* (``Node.machine``: a static machine, or its own
disk), the newest generation in which it wrote at that home (``wrote``), and the newest generation at whose beginning
the newest commit was at that home (``newest_generation``). A generation begins only if one of its machines has the
newest commit: by its own report, or because it wrote in the generation that committed it. A job without access to it
waits or holds, and retries at growing intervals. A user's ``resume --go-back`` gives the commit up
(``Record.given_up``), and the next generation reports where it begins. If every copy is damaged no user has to decide:
a machine that mounts its disk reports damaged checkpoints (DAMAGED), and once every node with the newest commit is at
home and reports this, the next older commit counts.

**Stops that no user requested** (a return to spot or to an idle static machine, growth, a move out of a zone without
capacity) must cost no work (``location.costs_nothing``). A script that saves by itself (``stop: signal``) reports no
commits. So its state counts as sharded, no generation begins before every disk is attached, and no stop is made to save
money. Its ``grace_s`` is taken as the time of a save.

**Copies in the bucket** (``mirrors.py``; layout in ``contract/uploads.py``). The function learns of a copy by the
fact MIRRORED and keeps what may be fetched in ``Record.mirror``; it never lists the bucket to decide. A copy of commits
that were given up does not count (``mirror_top``, ``given_up``). Copies that the record does not name any more are
deleted: lists before parts, and the fact last, so that the next round continues if this one dies. When all disks of a
generation are mounted and none has the newest commit, ``Record.fetch`` names the copy and who fetches it: the lowest
node, or every node for sharded state. A copy older than the newest commit is used only if that commit is provably gone.
Then, after five minutes and once the copy is on a disk, the newest commit is given up as if by a user.
"""
