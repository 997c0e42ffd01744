"""One job on this machine: prepares, launches and supervises it, and uploads its logs, output and checkpoints.

``prepare.py`` source, secrets, saver, launcher · ``source.py`` the job's files · ``launch_spec.py`` torchrun's
arguments and the job's environment · ``supervisor.py`` starts and stops one generation · ``launcher_client.py``,
``jobhost.py`` clients of the launcher and of the jobs' unit · ``progress.py`` reports from the control file ·
``failures.py`` how workers ended · ``usage.py`` how busy the machine is · ``logs.py``, ``chunks.py``, ``metrics.py``,
``outputs.py``, ``mirror.py``, ``mirror_transfer.py`` copies to the bucket.

**Environment of the job's processes**, besides torchrun's own (``launch_spec.environment``):

============================ ======================================================================================
``SPOTKEEPER_RUN``           folder of this generation, with ``ctl`` (the control file) and ``result.json``
``SPOTKEEPER_JOB``           the job's id; ``SPOTKEEPER_GEN`` the generation
``SPOTKEEPER_UID``           the job's UUID (``Record.uid``), from which the random generators are seeded
``SPOTKEEPER_SLOT``          the node (0, 1, ...) that this machine is
``SPOTKEEPER_CKPT``          checkpoint folder, if the disk is mounted when the generation starts
``SPOTKEEPER_CKPT_LATE``     the same, if the disk is mounted later: this machine first gets the state from a peer
``SPOTKEEPER_SAVER``         path of the machine's saver socket, which outlives generations
``SPOTKEEPER_OUTPUT``        folder for results; it is in the bucket before the job's end is reported
``SPOTKEEPER_SCRATCH``       scratch folder on the node's disk; set if the job file has ``scratch_gb``
``SPOTKEEPER_SPOOL``         folder for the processes' whole output (``launcher/spool.py``)
``SPOTKEEPER_SECRETS``       names of the variables with secrets, which the log must not show
``SPOTKEEPER_REPLICATED``    ``1``: state is replicated, so a sharded model is refused; ``0``: state is sharded
``SPOTKEEPER_MAX_WORLD``     the most processes that the job can have; set if its division of work may change
``SPOTKEEPER_INTERVAL_S``    fixed save interval; ``SPOTKEEPER_MEAN_LIFE_S`` observed mean time between losses
``SPOTKEEPER_SNAPSHOTS``     ``1``: saves copy parameters and optimizer state while training continues, and savers keep
                             images; ``SPOTKEEPER_OVERHEAD_PERCENT`` what they may cost
``SPOTKEEPER_PEERS_MB_S``    megabytes per second for copies of sharded state in a neighbour's memory; unset, or without
                             ``SPOTKEEPER_SNAPSHOTS``: none
``SPOTKEEPER_KEEP``          number of checkpoints kept; ``SPOTKEEPER_SEED`` the job file's seed
============================ ======================================================================================

**Files**, below ``SPOTKEEPER_ROOT``::

    dev/disk/by-id/google-sk-data       data disk of the node or the static machine
    mnt/sk-data/<job>/ckpt/<gen>-<step>/{...,COMMIT}   checkpoints
    mnt/sk-data/<job>/.fetch/           a checkpoint that is being fetched from the bucket
    mnt/sk-data/<job>/env/              the job's own Python environment
    mnt/sk-data/<job>/out/              the job's output; var/lib/spotkeeper/out/<job> without a disk
    mnt/sk-data/<job>/scratch.ext4      the scratch volume, mounted at mnt/sk-scratch; a folder in the one-machine cloud
    run/spotkeeper/<job>/<gen>/         ctl, result.json, metrics.json, exit.<local rank>, error.<local rank>,
                                        pid.<local rank>, stacks.log, untimed.<local rank>, torchrun's logs
    run/spotkeeper/node/                sockets, locks and logs of launcher and saver
    var/lib/spotkeeper/{bundle,src/<sha256>,spool}
    var/lib/spotkeeper-job/<job>/       the job's home, and in ``image`` its container image (``launcher/image.py``)
    var/lib/spotkeeper/logs/<job>/<node>-<gen>/         a generation's log on its way into the bucket (``chunks.py``)

**Logs** go to the boot disk and not to the data disk, which is attached late, moves to another machine, and must be
free for unmounting. A static machine deletes them once they are in the bucket; the next job finds none.

**Output.** Once all processes of a member have ended with 0, the agent uploads ``SPOTKEEPER_OUTPUT`` and only then
reports EXIT 0. So a job becomes DONE, and its disks are deleted, only when all output is in the bucket. A newer
generation ends the upload. A restarted agent compares sizes and MD5 and sends only the files that the bucket lacks.
During an upload the member reports ``Progress.uploading_s`` as a sign of life. ``out/<node>.json`` lists the files and
is written last; readers use the lists of the newest generation.

**Copies of checkpoints** are uploaded in parts of 64 MiB, so an interrupted upload continues at its last part. The
agent keeps the files open, so the checkpoint can be deleted during the upload. All nodes choose the same checkpoint
without communication: the newest one at each multiple of ``every_min`` on the clock. A copy is complete when each node
that COMMIT names as a writer has a list in the bucket. One rename makes a fetched checkpoint visible as a whole.
"""
