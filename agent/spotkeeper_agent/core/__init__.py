"""The base of the agent's loop: settings, state, events, and the requests to the function.

``settings.py`` the stack's settings for this machine · ``state.py`` the machine's state, part of which survives a
killed agent · ``sync.py`` ``POST /v1/sync`` and the facts not yet sent · ``events.py`` events that threads post, and
helper threads · ``log.py`` JSON lines.

**Settings** come from the metadata of the machine's template (on EC2 from tags of the same names, which the metadata
service shows some time after the boot). Settings never change. Job, node and attempt are not among them, because the
function assigns these while the machine runs.

====================== ==============================================================================================
``sk-stack``           the stack's name
``sk-function``        the function's URL
``sk-bucket``          the bucket's name
``sk-storage``         root URL of Google's Storage API, default ``https://storage.googleapis.com``; not set on EC2
``sk-bundle``          SHA-256 of the agent's bundle
``sk-job-identity``    the identity that jobs get; optional
``sk-notice-s``        virtual seconds from a preemption notice to the machine's end (Compute Engine)
``startup-script``     runs at every boot; ``shutdown-script`` at a shutdown (both Compute Engine)
``sk-boot``            SHA-256 of the startup script ``boot/<sha256>.sh`` in the bucket (EC2, which allows only 16 KB of
                       user data: the user data, the same in all releases, runs this script at every boot)
====================== ==============================================================================================

**Environment.** ``GCE_METADATA_HOST`` and ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` (with ``http://``) name the metadata
server; if neither is set, the firmware's vendor decides. ``SPOTKEEPER_ROOT`` is the folder that contains ``dev``,
``mnt``, ``run`` and ``var``: ``/`` by default, and a folder per machine in the one-machine cloud. With
``SPOTKEEPER_UNITS=1`` systemd units run the root helper and the job's processes. ``SPOTKEEPER_CLOCK``: see
``spotkeeper.clock``.

**Polling.** The agent polls every 5 s. While it waits for a change it polls every 0.5 s at first, then at intervals of
a fifteenth of the time waited, 15 s at most. A new generation, or a new state of the document, restarts these
intervals; a machine that joins does not.

**Old jobs.** When a job ends, the function tells only the machines that serve the job (``SyncReply.over``). A static
machine may still have files of jobs that it served before. So it lists up to 32 of them in ``Sync.old_jobs``, when it
mounts its disk and then hourly, and deletes the files of those that ``SyncReply.ended`` names: jobs whose record the
function could read, and that are DONE and do not keep their disks. If a record is missing, the files stay.
"""
