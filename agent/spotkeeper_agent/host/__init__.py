"""The machine itself: disks, power, memory, and the one process that is root.

``disk.py``, ``mounting.py`` the data disk · ``systemd.py`` readiness, root requests, power-off · ``roothelper.py`` the
root process, four requests · ``roothelper_fence.py`` blocks the metadata server for jobs · ``memory.py`` memory use ·
``usage.py`` how busy the machine is · ``nvml.py`` how busy its NVIDIA devices are, read in a separate process.

**Three users** share a machine under systemd: root, the agent's and the jobs'. The agent (``spotkeeper``) may read the
kernel's log but is otherwise unprivileged. For all else that needs root it sends requests to the root helper, whose
code is in the startup script. Launcher and saver belong to the jobs' unit (``spotkeeper-job``): its process
(``launcher/host.py``) starts and signals them, each in a cgroup of its own below the unit's. systemd makes the unit's
socket, which only the agent may open. If the unit's process does not answer for 10 s, for example because a job has
stopped it, the root helper restarts the unit.

**The agent distrusts every file that a job can write.** The jobs' group may write only ``run/spotkeeper/node``, a
generation's run folder, a job's ``ckpt``, ``out`` and ``env``, and its source. The agent owns the parent folders of
these, so no job can replace one of them by a link. The agent opens these files only through ``train/core/beneath.py``,
which follows no link, opens only regular files and bounds every read. A bundle that others can write is not executed.

**Metadata.** Early in each boot a BPF program is attached to the root of all cgroups. It denies the jobs' user, and
every user id above 999, connections to the metadata server, except datagrams and port 53. Without this program no job
starts. One process of the jobs' unit serves one job: before another job begins, systemd ends all processes left in the
unit's cgroup and removes its ``/tmp``. Units stop in the order agent, jobs, root helper, network.
"""
