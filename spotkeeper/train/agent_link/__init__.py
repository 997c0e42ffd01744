"""The link between an agent and the job on its machine: the control file, ``result.json`` and untimed sections.

``control.py`` defines all three; ``control_io.py`` reads and writes words of the control file. If the job has damaged
the file, training continues: the agent reads neither progress nor answers, requests a stop by SIGTERM, and the job's
log says once what happened to the file. Imports only the standard library.
"""
