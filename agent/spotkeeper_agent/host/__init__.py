"""The machine itself: disks, power, memory, and the one process that is root.

``disk.py``, ``mounting.py`` the data disk · ``systemd.py`` readiness, root requests, power-off · ``roothelper.py`` the
root process, four requests · ``roothelper_fence.py`` blocks the metadata server for jobs · ``memory.py`` memory use.

**Three users** share a machine under systemd. The agent (``spotkeeper``) may read the kernel's log but has no other
right of root. For all else that needs root it sends requests to the root helper (the startup script contains the
helper's code). Launcher and saver belong to the jobs' unit (``spotkeeper-job``): ``launcher/host.py`` starts and
signals them, each in a sub-group of the unit's delegated cgroup. systemd makes the unit's socket, which only the agent
may open. If the unit's process does not answer for 10 s (a job may stop it), root restarts the unit.

**The agent distrusts every file that a job can write.** It gives the jobs' group exactly what jobs write:
``run/spotkeeper/node``, a generation's run folder, a job's ``ckpt``, ``out`` and ``env``, its source. The agent owns
the parent folders of these, so no job can replace one of them by a link. All access goes through
``train/core/beneath.py``, which follows no link, opens only regular files and bounds every read. A bundle that others
can write is not executed.

**Metadata.** Early in each boot a BPF program is attached to the root of all cgroups. It refuses ``connect`` to the
metadata server to the jobs' user and to every user id above 999, except for datagrams and port 53. Without this program
no job process starts. A process of the jobs' unit serves one job: systemd ends all that is left in its cgroup and
removes its ``/tmp`` before another job begins. Units stop in the order agent, jobs, root helper, network. The tests in
``tests/agent/systemd`` boot a machine with all of these.
"""
