"""Checkpoints: the trainer copies its state into *staging memory*, from which the saver writes it to disk.

``strategy.py`` and ``restore.py`` replicated state, ``sharded.py`` and ``reshard.py`` sharded state · ``writer.py`` the
trainer's side of a save, ``client.py`` its requests to the saver, ``connection.py`` its connection to the saver,
``memories.py`` the image memories, ``protocol.py`` messages · ``saver.py`` the saver (standard library only) ·
``durable.py`` staging memory and files · ``store.py`` the folder: newest checkpoint, COMMIT, retention · ``image.py``
tensors to bytes and back · ``snapshot.py`` copies optimizers' tensors while training continues · ``seal.py`` which
image in the saver's memory is complete · ``handover.py`` the newest image of a trainer that is gone · ``peers.py``
images of sharded state, and their copies on neighbour machines.

**Order.** A save creates the folder ``<generation>-<step>``, writes its files, then COMMIT (the manifest with hashes,
written by temporary file, fsync, rename, fsync of the folder). The newest checkpoint has the highest (generation,
step). A restore loads the newest checkpoint whose COMMIT and hashes are valid, and logs those that it skipped. An old
folder is renamed before it is deleted, so that a half deleted folder never looks like a checkpoint.

**After a crash** older checkpoints are complete, and at most one folder lacks its COMMIT. The next saver quarantines
that folder, and the job's log names it. A checkpoint whose bytes do not match its hashes is quarantined when it is
read. A saver that outlives its generation does no harm: quarantine has renamed the folder into which it writes, so it
can neither complete that checkpoint nor remove a newer one. ``make crash`` (``tests/train/crash``) kills real trainers
and savers at 50 points of a save, makes the system calls there fail (ENOSPC, EIO, EROFS, partial writes) and flips
bytes; it does the same at images, their writes and hand-overs. A checker that shares no code with the library reads
the result. The test cuts no power: it trusts fsync.

**Sharded state** is complete when every machine has its part, but no machine sees another's disk. So a save ends in two
steps. A saver that has written its part durably writes PART and tells the trainer. When the ranks next agree that no
saver is busy, they exchange names and hashes of their files, and each saver writes COMMIT with the files of all nodes
(``Manifest.others``). Progress and facts mention only checkpoints with COMMIT. If a rank is killed between the two
steps, the next generation treats PART as COMMIT if the parts of all machines exist and carry the same random name:
rank 0 draws a new name for each save. A machine keeps at most one PART without COMMIT, the newest.

All ranks of a machine copy into its saver's memory: the first rank receives the memory's descriptor, and the other
ranks open the same memory. Other tools can read the folder: each tensor is stored as ``torch.save`` stores it
(``core/shards.py``), and the file ``.metadata`` lists all tensors. The ranks exchange what ``.metadata`` needs only at
the first save and after a change of the layout. If the number of ranks changes, or a disk moves to another machine, the
ranks exchange tables of contents and then send each other single tensors, all in the same order (``reshard.py``).
"""
