"""The ``spotkeeper`` command, a thin layer that reads and writes the bucket, asks for confirmation, and prints.

``main.py`` entry point · ``app.py`` help, shared options · ``for_*.py`` the commands and their options; each
command calls its module in ``jobs/``, ``stacks/`` or ``local/`` · ``stack.py`` the stack that a command is for ·
``output.py`` all printing. ``--help`` imports only what these files import at their top; a command imports further
modules when it runs.
"""
