"""Pure: which machine a node has, gets next, or gives up.

``slots.py`` what happened to ``cur`` and ``next`` · ``replacement.py`` make before break, backups · ``reservations.py``
start zone, grants, intents · ``offers.py`` which machines a node may get · ``pending.py`` nodes without a machine ·
``machine_health.py`` planned ends, slow machines, broken hosts.

**Planned ends.** On Compute Engine a machine may run only for a limited time (``maxRunDuration``); the cloud says when
it ends (``Vm.ends``). A round copies this end into the record (``Slot.ends``) early enough for a failed boot, a refused
offer and a save, and requests a replacement, which boots beside the machine. Each node has its own time for this,
spread over a tenth of that duration. If no replacement stands by when the last save must begin, the end becomes a
notice. Reports and ``select()`` do not count it as a preemption. EC2 has no such limit.

**Slow machines.** In synchronous training a step takes equally long on all nodes. So each node measures its own work
and compares it with the median of all (``train/loop/lag.py``). If its time is above 1.3 times the median in five
windows in a row, per step and per sample, the agent reports LAGS, and KEEPS_UP once this ends. If the job file says so,
the slowest machine is replaced: one at a time and a few an hour, so that a job that is slow by nature does not use up
machines.

**Broken hosts.** After a crash an agent reports signs of broken hardware in its logs and kernel messages
(HARDWARE_FAULT). The first such crash on a machine is noted (``Slot.hardware_faults``) and counts as a crash; the
second is a loss with cause ``host``. So the crash budget still limits a faulty script, since on each new machine its
first crash counts again. A machine in REPAIRING counts as gone: nothing of the job runs there, its template forbids a
restart, and a disk that is attached to it cannot be attached elsewhere.

**Static machines** that idle are used before any machine is bought, if the newest checkpoint allows it
(``decide/checkpoint/location.py``): for a vacant node, as a replacement, and for a node on an on-demand machine. The
newest checkpoint's place is checked again when a replacement is promoted, since the old machine can have saved to its
own disk in between.
"""
