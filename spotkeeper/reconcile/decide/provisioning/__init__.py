"""Pure: which machine a node has, gets next, or gives up.

``slots.py`` what happened to ``cur`` and ``next`` · ``replacement.py`` make before break, backups · ``reservations.py``
the start zone; grant, then intent · ``offers.py`` what may be taken · ``pending.py`` nodes without a machine ·
``machine_health.py`` planned ends, slow machines, broken hosts.

**Planned ends.** Compute Engine says when a machine's longest run (maxRunDuration) is over (``Vm.ends``). The record
notes that end (``Slot.ends``) early enough for a failed boot, a refused offer and a save. The nodes' times differ by up
to a tenth of that run, so that a gang's machines do not all end at once. A replacement boots beside the machine. If no
replacement stands by at the last moment for a save, the end becomes a notice. Reports and ``select()`` do not count it
as a preemption. EC2 has no limit.

**Slow machines.** A synchronous step takes all nodes equally long, so each measures its own time
and compares it with the median of all (``train/loop/lag.py``). If the time is above 1.3 times the median in five
windows in a row, per step and per sample, the agent reports LAGS, and KEEPS_UP once this ends. If the job file wants
it, the slowest machine is replaced: one at a time and a few an hour, so that a job that is slow by nature cannot burn
machines.

**Broken hosts.** After a crash an agent reports signs of broken hardware in its logs and kernel messages
(HARDWARE_FAULT). The first such crash on a machine is noted (``Slot.hardware_faults``) and counts as a crash; the
second is a loss with cause ``host``. So the crash budget still limits a faulty script, since on each new machine its
first crash counts again. A machine in REPAIRING counts as gone: nothing of the job runs there, templates forbid a
restart, and the disk's attachment remains the mutex.

**Static machines** that idle are used before any machine is bought, if the newest checkpoint allows it
(``decide/checkpoint/location.py``): for a vacant node, as a replacement, and for a node on an on-demand machine. For a
replacement this is checked again when it is promoted, since a save in between is on the old machine's disk.
"""
