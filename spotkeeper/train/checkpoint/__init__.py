"""Checkpoints: staged by the trainer, written by the saver, complete once COMMIT exists.

``strategy.py`` replicated state, ``sharded.py`` and ``reshard.py`` sharded state · ``writer.py`` the trainer's side,
``client.py`` its connection to the saver, ``protocol.py`` their messages · ``saver.py`` the saver (standard library
only) · ``durable.py`` staging memory and files · ``store.py`` the folder: newest, COMMIT, retention · ``image.py``
tensors to bytes and back.

**Order.** A save creates the folder ``<generation>-<step>``, writes its files, then COMMIT (the manifest with hashes,
written by temporary file, fsync, rename, fsync of the folder). The newest checkpoint has the highest (generation,
step). A restore loads the newest one whose COMMIT and hashes are valid, and logs those that it skipped. Old folders are
renamed before they are deleted.

**After a crash** older checkpoints are complete, and at most one folder lacks its COMMIT. The next saver quarantines
that folder, and the job's log names it. A checkpoint whose bytes do not match its hashes is quarantined when it is
read. A saver that outlived its generation cannot write the newest checkpoint and cannot remove a newer one: the folder
that it writes has been renamed. ``make crash`` (``tests/train/crash``) kills real trainers and savers at 50 points of a
save, makes the same calls fail (ENOSPC, EIO, EROFS, partial writes) and flips bytes; a checker that shares no code with
the library reads the result. The test does not cut power: fsync is trusted.

**Sharded state** is complete when every machine has its part, but no machine sees another's disk. So a save ends in two
steps. A saver that has written its part durably writes PART and reports it. At the next agreement where no saver is
busy, the ranks exchange names and hashes of their files, and each saver writes COMMIT with the files of all nodes
(``Manifest.others``). Progress and facts mention only checkpoints with COMMIT. If a rank is killed between the two
steps, the next generation treats PART as COMMIT if all parts are there. Parts of one save share a name drawn by rank 0.
A machine keeps at most one PART without COMMIT, the newest.

All ranks of a machine copy into its saver's memory: the first rank receives the memory's descriptor, and the others
open that. Each tensor has a frame as in ``torch.save`` (``core/shards.py``), and ``.metadata`` (exchanged again only if
the layout changed) lists all tensors, so other tools can read the folder. If the number of ranks changes, or a disk
moves to another machine, the ranks exchange tables of contents and then send each other single tensors, all in the same
order (``reshard.py``).
"""
