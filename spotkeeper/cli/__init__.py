"""The ``spotkeeper`` command, a thin layer that reads and writes the bucket, asks for confirmation, and prints.

``main.py`` entry point · ``app.py`` help, shared options · ``for_jobs.py``, ``for_stacks.py`` options of each command,
which calls its module in ``jobs/``, ``stacks/`` or ``local/`` · ``stack.py`` the stack that a command is for ·
``output.py`` all printing. ``--help`` imports only the modules named at the top of these files; each command imports
the others that it needs.
"""
