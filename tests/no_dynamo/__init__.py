"""Variables of processes whose scripts compile nothing: stand-ins for parts of torch cut what importing it costs.

With the real ones, a launcher or the first step of an optimizer takes 3.6 s of processor instead of 1.5 s.
"""

from __future__ import annotations

from pathlib import Path

from tests.sizes import size

NO_DYNAMO: dict[str, str] = size({"PYTHONPATH": str(Path(__file__).parent)}, {})
