"""Compile the kernels when a wheel is built, so that no command waits for a compiler."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileKernels(BuildHookInterface):
    """What is compiled is data: where it does not fit, the wheel works without it."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Put the compiled kernels into the wheel; an editable one is a checkout's own affair."""
        if version == "editable":
            return
        if not find_spec("numba"):
            self.app.display_warning("numba is not there: kernels compile on their first use")
            return
        folder = Path(self.root, "build", "compiled")
        # What this build may import, an isolated environment of pip's too, and the sources. Not by
        # PYTHONPATH: pip's own start-up code fails on it, and takes the sources off the path where
        # they are installed as well.
        path = [str(Path(self.root, "src")), *filter(None, sys.path)]
        code = f"import sys; sys.path[:] = {path!r}; from batchwright.ahead import main; main()"
        done = subprocess.run([sys.executable, "-c", code, folder])
        if done.returncode:
            self.app.display_warning("no kernel was compiled: kernels compile on their first use")
            return
        build_data["force_include"][str(folder)] = "batchwright/compiled"
