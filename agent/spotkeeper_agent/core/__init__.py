"""The base of the agent's loop: settings, state, events, and the requests to the function.

``settings.py`` the stack's settings for this machine · ``state.py`` the machine's state, part of which survives a
killed agent · ``sync.py`` ``POST /v1/sync`` and the spool of facts · ``events.py`` events that threads post, and helper
threads · ``log.py`` JSON lines.

**Settings** come from the metadata of the machine's template (on EC2 from tags of the same names, which the metadata
service shows some time after the boot). Settings never change: job, node and attempt are no settings, since the
function assigns them.

====================== ==============================================================================================
``sk-stack``           the stack's name
``sk-function``        the function's URL
``sk-bucket``          the bucket's name
``sk-storage``         root of the Storage API, default ``https://storage.googleapis.com``; not on EC2
``sk-bundle``          SHA-256 of the agent's bundle
``sk-job-identity``    the identity that jobs get; optional
``sk-notice-s``        virtual seconds from a preemption notice to the machine's end (Compute Engine)
``startup-script``     and ``shutdown-script``. EC2 allows only 16 KB of user data, so there ``sk-boot`` has a
                       SHA-256 instead, and user data that no release changes runs ``boot/<sha256>.sh`` at every boot
====================== ==============================================================================================

**Environment.** ``GCE_METADATA_HOST`` and ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` (with ``http://``) name the metadata
server; if neither is set, the firmware's vendor decides. ``SPOTKEEPER_ROOT`` is the folder that contains ``dev``,
``mnt``, ``run`` and ``var``: ``/`` by default, and a folder per machine in the one-machine cloud. With
``SPOTKEEPER_UNITS=1`` systemd units run the root helper and the job's processes. ``SPOTKEEPER_CLOCK``: see
``spotkeeper.clock``.

**Polling.** The agent polls every 5 s. While a change is pending it polls every 0.5 s at first, then at intervals of a
fifteenth of the time waited, 15 s at most. A new generation, or a new state of the document, restarts these intervals;
a machine that joins does not.

**Old jobs.** The function tells only the machine that serves a job that the job is over (``SyncReply.over``). So a
static machine lists in ``Sync.old_jobs`` up to 32 jobs that have checkpoints on its disk, when it mounts the disk and
then hourly. It deletes the files of those in ``SyncReply.ended``: jobs with a readable record that is DONE and does not
keep the disks. A missing record proves nothing.
"""
