"""Checkpoints: staged by the trainer, written by the saver, complete once COMMIT exists.

``strategy.py`` replicated state, ``sharded.py`` and ``reshard.py`` sharded state · ``writer.py`` the trainer's side,
``client.py`` its connection, ``protocol.py`` messages · ``saver.py`` the other process (standard library only), for
interval, notice and final saves alike · ``durable.py`` staging memory and files · ``store.py`` the folder: newest,
COMMIT, retention · ``image.py`` tensors to bytes and back.

**Order.** A save is a new folder ``<generation>-<step>``, its files, then COMMIT (manifest with hashes, written by
temporary file, fsync, rename, fsync of the folder). Newest is the highest (generation, step). Loading takes the newest
whose COMMIT and hashes are right, else the next older one, and logs what it skipped. Old folders are renamed before
they are deleted.

**After a crash** older checkpoints are complete, and at most one folder lacks its COMMIT; the next saver quarantines it
and the job's log names it. A copy whose bytes do not match is quarantined when it is read. A saver that outlived its
generation can neither become the newest nor remove a newer checkpoint: the folder it writes has been renamed. ``make
crash`` (``tests/train/crash``) kills real trainers and savers at 50 points of a save, makes the same calls fail
(ENOSPC, EIO, EROFS, partial writes) and flips bytes; a judge that shares no code with the library reads the result. It
does not cut power: fsync is trusted.

**Sharded state** is complete when every machine has its part, but no machine sees another's disk. So a save ends in two
steps. A saver that has written its part durably writes PART and reports it. At the next agreement where no saver is
busy, the ranks exchange names and hashes of their files, and each saver writes COMMIT with the files of all nodes
(``Manifest.others``). Progress and facts mention only COMMIT. If a rank is killed in between, the next start counts
PART as COMMIT if every part is there. Parts of one save share a name drawn by rank 0. A machine keeps at most one PART
without COMMIT, the newest.

All ranks of a machine copy into the memory of its saver: the first rank receives its descriptor, the others open that.
Each tensor has a frame as in ``torch.save`` (``core/shards.py``), and ``.metadata`` is exchanged only if the layout
changed, so other tools can read the folder. If the number of ranks changes, or a disk moves to another machine, the
ranks exchange tables of contents and send each other single tensors, all in one order (``reshard.py``).
"""
