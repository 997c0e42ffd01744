"""The ``spotkeeper`` command. Thin: it reads and writes the bucket, asks, and shows.

Only :mod:`spotkeeper.cli.main` and :mod:`spotkeeper.cli.errors` are imported for
``--help``; everything heavy is imported by the command that needs it.
"""
