"""What the tests here need of the machine, and how to get it where it is not: without it they skip."""

from __future__ import annotations

import shutil

import pytest

needs_pulumi = pytest.mark.skipif(
    not (shutil.which("pulumi") and shutil.which("pulumi-language-python")),
    reason="the pulumi command (with its Python host) is not on PATH: https://www.pulumi.com/docs/install/",
)
