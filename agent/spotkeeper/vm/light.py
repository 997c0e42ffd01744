"""Imported before anything else of the agent: what its dependencies would load for nothing stays out.

``requests`` loads a library that guesses the encoding of texts: 3 MB resident, for texts that nobody reads here.
"""

from __future__ import annotations

import sys
import warnings

for _name in ("charset_normalizer", "chardet"):
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]  # so says the import system: it is not there
warnings.filterwarnings("ignore", message="Unable to find acceptable character detection dependency")
