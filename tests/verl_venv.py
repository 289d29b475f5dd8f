"""Makes the environment that verl needs for itself: its pins contradict those of torchrl and trl.

    python tests/verl_venv.py            makes .venv-verl, or says that it is there

verl's wheel leaves out what its own modules import, and asks for versions that need a GPU
build; so it is installed without its dependencies, and what is imported is named here.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERL = "verl==0.9.1"
# An open range would take the newest CUDA build of torch, gigabytes of it.
BESIDE = (
    *("torch==2.13.0", "tensordict", "ray", "transformers", "datasets", "codetiming", "hydra-core"),
    *("dill", "pandas", "torchdata", "cachetools", "orjson", "pillow", "peft", "accelerate"),
    *("uvicorn", "fastapi", "TransferQueue", "pyzmq", "msgspec", "pytest"),
)


def place() -> Path:
    """Where the environment stands; BATCHWRIGHT_VERL_VENV names another place."""
    return Path(os.environ.get("BATCHWRIGHT_VERL_VENV") or ROOT / ".venv-verl")


def made() -> Path:
    """The environment's python; made if it is not there.

    Raises:
        CalledProcessError: the package index cannot be reached, or has not what is needed.
    """
    folder = place()
    python, stamp = folder / "bin" / "python", folder / ".installed"
    wanted = "\n".join((VERL, *BESIDE))
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(folder, with_pip=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "--no-deps", VERL], check=True, capture_output=True, text=True)
    subprocess.run(
        [*install, *BESIDE, "--editable", ROOT], check=True, capture_output=True, text=True
    )
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    print(made())
    sys.exit(0)
