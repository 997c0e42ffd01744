"""Pure: which machine a node has, gets next, or gives up.

``slots.py`` what became of ``cur`` and ``next`` · ``replacement.py`` make before break, backups · ``reservations.py``
the start zone; grant, then intent · ``offers.py`` what may be taken · ``pending.py`` nodes without a machine ·
``machine_health.py`` planned ends, slow machines, broken hosts.

**Planned ends.** Compute Engine says when a machine's longest run (maxRunDuration) is over (``Vm.ends``). The record
notes that end (``Slot.ends``) early enough for a failed boot, a refused offer and a save, and for each node at another
time within a tenth of that run, so that a gang does not end together. A successor boots beside the machine. If none
stands by at the last moment for a save, the end becomes a notice. Reports and ``select()`` do not count it as a
preemption. EC2 has no limit.

**Slow machines.** A synchronous step takes all nodes equally long, so each measures its own time
and compares it with the median of all (``train/loop/lag.py``). Above 1.3 times the
median in five windows in a row, by step and by sample, the agent says LAGS, later KEEPS_UP. If the job file wants it,
the slowest is swapped: one at a time and a few an hour, so that a job that is slow by nature cannot burn machines.

**Broken hosts.** After a crash an agent reports signs of broken hardware in its logs and kernel messages
(HARDWARE_FAULT). The first such crash on a machine is noted (``Slot.hardware_faults``) and counts as a crash; the
second is a loss with cause ``host``. So the crash budget still bounds what a script can cause: on each new machine
the first crash counts again. A machine in REPAIRING counts as gone: nothing of the job runs there, templates forbid a
restart, and the disk's attachment remains the mutex.

**Static machines** that idle are taken before anything is bought, if the newest checkpoint allows it
(``decide/checkpoint/location.py``): by a vacant node, as a successor, and by a node on demand. What a successor may
take is checked again when it is promoted, since the save in between is on its predecessor's disk.
"""
