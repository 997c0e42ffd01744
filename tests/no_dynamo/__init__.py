"""Variables of processes whose scripts compile nothing: a stand-in of torch._dynamo halves what importing torch costs.

With the real one, a launcher or the first step of an optimizer takes 3.6 s of processor instead of 2.0 s.
"""

from __future__ import annotations

from pathlib import Path

from tests.sizes import size

NO_DYNAMO: dict[str, str] = size({"PYTHONPATH": str(Path(__file__).parent)}, {})
