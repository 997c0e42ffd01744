"""Stands for torch._dynamo. Every interpreter with this folder on its path runs it first."""

import sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

sys.modules["torch._dynamo"] = MagicMock(
    disable=lambda function=None, *_, **__: function, __spec__=ModuleSpec("torch._dynamo", None)
)
