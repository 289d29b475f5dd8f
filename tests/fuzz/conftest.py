"""Modules of this folder are found by their names, as when `fuzz.py` is started."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
