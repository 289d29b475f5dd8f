"""Make a virtual environment and install into it, for `make setup`, `make demo` and `make bench`.

    python3 tools/install.py .venv --constraints constraints.txt --editable '.[dev]'

Needs nothing but Python. Packages are installed by uv where it is on the PATH, else by pip.
torch comes first and by itself: on a machine without an accelerator it must be a CPU build, and
the newest one on a package index usually is a CUDA build with gigabytes of libraries behind it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import venv
from pathlib import Path

TORCH = "torch>=2.8,<2.14"
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
QUIETLY = ("--quiet", "--no-compile")
"""Compiling every module of every package takes longer than what is ever imported of them."""
ACCELERATORS = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("venv", type=Path)
    parser.add_argument("packages", nargs="*")
    parser.add_argument("--editable", action="append", default=[])
    parser.add_argument("--constraints", type=Path)
    given = parser.parse_intermixed_args()
    python = given.venv / "bin" / "python"
    if not python.exists():
        venv.create(given.venv, with_pip=True)
    limits = ["--constraint", str(given.constraints)] if given.constraints else []
    wanted = [*given.packages, *(word for e in given.editable for word in ("--editable", e))]
    install_torch(python, limits)
    if uv := shutil.which("uv"):
        run([uv, "pip", "install", "--quiet", "--python", str(python), *limits, *wanted])
    else:
        run([*pip(python), "install", *QUIETLY, *limits, *wanted])


def install_torch(python: Path, limits: list[str]) -> None:
    """Install torch, as a CPU build where there is no accelerator; keep one that is there."""
    there = subprocess.run(
        [*pip(python), "show", "--quiet", "torch"], check=False, capture_output=True
    )
    if there.returncode == 0:
        return
    settings = limits
    if not any(Path(device).exists() for device in ACCELERATORS) and wants_cuda(python, limits):
        print(f"no accelerator here: torch is taken from {CPU_BUILDS}", flush=True)
        # Beside the usual index, which has the packages that torch needs: of one version, a
        # build named +cpu counts as the newer one.
        settings = [*limits, "--extra-index-url", CPU_BUILDS]
        if wants_cuda(python, settings):
            sys.exit(
                f"this machine has no accelerator and {CPU_BUILDS} gives no CPU build of {TORCH}; "
                f"install one into {python.parent.parent} by hand and run this again"
            )
    run([*pip(python), "install", *QUIETLY, *settings, TORCH])


def wants_cuda(python: Path, settings: list[str]) -> bool:
    """Whether pip with these settings would install a CUDA build."""
    asked = [
        "install",
        "--quiet",
        "--dry-run",
        "--ignore-installed",
        "--report",
        "-",
        *settings,
        TORCH,
    ]
    done = subprocess.run([*pip(python), *asked], check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"pip cannot find {TORCH}: {done.stderr.strip()}")
    found = [
        one["metadata"]["name"].lower().replace("_", "-")
        for one in json.loads(done.stdout)["install"]
    ]
    return any(name.startswith(("nvidia-", "cuda-")) or name == "triton" for name in found)


def pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


def run(command: list[str]) -> None:
    """Run a command; if it fails, end with its exit code: it has said why."""
    done = subprocess.run(command, check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    main()
