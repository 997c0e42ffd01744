"""Pure: where the newest checkpoint is, on which machines a node may therefore train, and which copy is fetched.

**Location** (``location.py``). The record remembers each node's *checkpoint disk*, the disk with its checkpoints: that
of the static machine ``Node.machine``, or if this is None the node's own disk. ``wrote`` is the last generation that
wrote to this disk. ``newest_generation`` is the last generation that began while this disk had the newest commit of
that time. A generation begins only if one of its machines has the newest commit: it reported so, or was a member when
the commit was made. If no machine has it, the job waits or holds, and retries at growing intervals. A user's
``resume --go-back`` gives the commit up (``Record.given_up``), and the ledger says where the next generation begins. If
every copy is damaged, no user has to decide: a machine that mounts a disk reports damaged checkpoints (DAMAGED), and
once all nodes whose checkpoint disks have the newest commit report it as damaged, the next older commit counts.

**Stops that no user requested** (a return to spot or to an idle static machine, growth, a move out of a zone without
capacity) must cost no work (``location.costs_nothing``). A script that saves by itself (``stop: signal``) reports
neither commits nor what is on its disks. So it is never stopped for these reasons, its state counts as sharded, and no
generation begins before every disk is attached. A save is assumed to take the job's ``grace_s``.

**Copies in the bucket** (``mirrors.py``; layout in ``contract/uploads.py``). The function learns of a copy by the
fact MIRRORED and records the copies that may be fetched in ``Record.mirror``; it never lists the bucket to decide. A
copy of a commit that was given up does not count (``mirror_top``, ``given_up``). Copies that the record does not name
any more are deleted: first each copy's list of its files, then the files, and the fact MIRRORED last, so that the next
round continues if this one dies.
When all disks of a generation are mounted and none has the newest commit, ``Record.fetch`` names the copy and who
fetches it: the lowest node, or for sharded state every node. A copy older than the newest commit is used only if that
commit is proven lost, and not before five minutes (``disk_s``) have passed since the gang stopped and since the last
of its machines was admitted. Once this copy is on a disk, the record gives the newest commit up.
"""
