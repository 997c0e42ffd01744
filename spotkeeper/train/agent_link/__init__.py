"""The link between an agent and the job on its machine: the control file, ``result.json`` and untimed sections.

``control.py`` has the file's words and the other two; ``control_io.py`` reads and writes words. The file has 256 bytes:
little-endian aligned 8-byte words, written in place, never renamed. Agent to job: request and deadline. Job to agent:
phase, step, step time, newest commit, save time, loss, speed, total steps.

The job maps the file. The agent uses a descriptor, because a job that empties a mapped file would kill the agent by
SIGBUS. An unreadable file counts as no request and no progress: training continues, a stop comes as SIGTERM, and the
job's log says once what happened to the file. Standard library only: agent and job both import this package.
"""
