"""What runs in the *job's* Python: the launchers and the first lines of every worker.

Standard library and torch only. It is put on the job's path by the agent, so it must
not import anything of the agent; they talk through one unix socket (``server.py``).
"""
