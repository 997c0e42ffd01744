"""The link between an agent and the job on its machine: the control file, ``result.json`` and untimed sections.

``control.py`` defines all three; ``control_io.py`` reads and writes words of the control file. If the job has damaged
the file, training continues, and the job's log says once what happened to the file. The agent then reads neither
progress nor answers, and when the job has to stop, the agent sends SIGTERM. Imports only the standard library.
"""
