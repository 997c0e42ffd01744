"""The link between an agent and the job on its machine: the control file, ``result.json`` and untimed sections.

``control.py`` defines all three; ``control_io.py`` reads and writes words of the control file. The file has 256 bytes:
little-endian aligned 8-byte words, written in place, never renamed. The agent writes request and deadline. The job
writes phase, step, step time, newest commit, save time, loss, speed and total steps.

The job maps the file. The agent uses a descriptor, because a job that empties a mapped file would kill the agent by
SIGBUS. An unreadable file counts as no request and no progress: training continues, the agent stops the job by SIGTERM,
and the job's log says once what happened to the file. Standard library only: agent and job both import this package.
"""
