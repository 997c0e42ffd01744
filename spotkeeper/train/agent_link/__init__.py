"""The link between an agent and the job on its machine: the control file, ``result.json`` and untimed sections.

``control.py`` defines all three; ``control_io.py`` reads and writes words of the control file. The file has 256 bytes:
little-endian aligned 8-byte words, written in place, never renamed. The agent writes requests with their deadlines. The
job writes its phase, step, step time, newest commit, save time, loss, speed and total steps.

The job maps the file. The agent uses a descriptor, because a job that empties a mapped file would kill the agent by
SIGBUS. If the job has damaged the file, training continues: the agent reads neither progress nor answers, requests a
stop by SIGTERM, and the job's log says once what happened to the file. Imports only the standard library.
"""
