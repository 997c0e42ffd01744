"""The bucket, folder and command of ``tests/cli``."""

from __future__ import annotations

from tests.cli.conftest import cli, folder, store

__all__ = ["cli", "folder", "store"]
