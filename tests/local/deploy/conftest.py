"""The declared stacks of ``tests/infra``, as fixtures."""

from tests.infra.conftest import example, local, shared

__all__ = ["example", "local", "shared"]
