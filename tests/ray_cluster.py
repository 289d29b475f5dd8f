"""What the tests on Ray clusters share: a cluster of several nodes on loopback.

Import this before anything that imports Ray, which reads these settings when it is imported.
"""

import os
import sys
from pathlib import Path

import pytest

# A node that is gone is declared dead after two seconds instead of fifteen.
os.environ |= {"RAY_health_check_period_ms": "500", "RAY_health_check_failure_threshold": "4"}
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from ray_nodes import cluster_of, lose, new_node, processes  # isort: split

pytest.importorskip("ray", reason="ray is not installed; `make machines` installs and runs this")

__all__ = ["cluster_of", "lose", "new_node", "processes"]
