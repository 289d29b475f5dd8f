"""Build the wheel and the sdist, install the wheel into a clean environment, run the demo from it.

    python tools/release_check.py

Everything happens in a temporary folder: the checkout is only read. Exits with 1 and a sentence
at the first thing that a release must not have, or must have and does not.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import NoReturn

from install import ACCELERATORS, install_torch

ROOT = Path(__file__).parents[1]
BUILD = "build==1.3.0"
EXTRAS = "train,plot"
"""What the demo uses: it trains and draws."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="batchwright-release-") as folder:
        work = Path(folder)
        version = declared_version()
        wheel, sdist = built(work, version)
        check_wheel(wheel, version)
        check_sdist(sdist)
        python = environment(work / "clean")
        install_torch(python, [])
        run(python, "-m", "pip", "install", "--quiet", f"{wheel}[{EXTRAS}]")
        check_installed(python, work, version)
        demo(python.parent / "batchwright", work / "elsewhere")
    print(f"batchwright {version}: wheel and sdist are whole, and the demo runs from the wheel")


def declared_version() -> str:
    """The version as the source says it, without importing the source."""
    text = (ROOT / "src" / "batchwright" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return found[1] if found else fail("src/batchwright/__init__.py has no __version__")


def built(work: Path, version: str) -> tuple[Path, Path]:
    """The wheel, made from the sdist, and the sdist itself."""
    python = environment(work / "builder")
    run(python, "-m", "pip", "install", "--quiet", BUILD)
    run(python, "-m", "build", "--outdir", work / "dist", ROOT)
    names = sorted(path.name for path in (work / "dist").iterdir())
    wanted = [f"batchwright-{version}-py3-none-any.whl", f"batchwright-{version}.tar.gz"]
    if names != wanted:
        fail(f"built {names}, not {wanted}")
    return work / "dist" / names[0], work / "dist" / names[1]


def check_wheel(wheel: Path, version: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        info = f"batchwright-{version}.dist-info"
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    outside = sorted({name.partition("/")[0] for name in names} - {"batchwright", info})
    if outside:
        fail(f"the wheel installs {outside} beside batchwright")
    shipped = ("py.typed", "shipped/demo.jsonl", "ahead.txt", "compiled/manifest.json")
    for needed in (f"batchwright/{name}" for name in shipped):
        if needed not in names:
            fail(f"the wheel has no {needed}")
    if f"{info}/licenses/LICENSE" not in names or metadata["License-Expression"] != "Apache-2.0":
        fail(f"the license is {metadata['License-Expression']!r}, or its text is not in the wheel")
    if metadata["Version"] != version or metadata["Requires-Python"] != ">=3.11":
        fail(f"the metadata says {metadata['Version']} for Python {metadata['Requires-Python']}")
    if not metadata.get_payload():
        fail("the metadata has no description; README.md should be it")


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/batchwright/py.typed"}
    if missing := sorted(wanted - names):
        fail(f"the sdist has no {', '.join(missing)}")


def check_installed(python: Path, work: Path, version: str) -> None:
    """The installed package is the one that is imported, and its torch has no CUDA in it."""
    code = "import batchwright, torch; print(batchwright.__file__, torch.version.cuda)"
    place, cuda = run(python, "-c", code, cwd=work).split()
    if not Path(place).is_relative_to(work):
        fail(f"imported batchwright from {place}, not from the wheel")
    if cuda != "None" and not any(Path(device).exists() for device in ACCELERATORS):
        fail(f"a CUDA {cuda} build of torch was installed on a machine without an accelerator")
    says = run(python.parent / "batchwright", "--version", cwd=work).strip()
    if says != version:
        fail(f"batchwright --version says {says!r}, not {version}")
    found = json.loads(run(python.parent / "batchwright", "doctor", "--format", "json", cwd=work))
    if not found["kernels"]["ahead"]:
        fail(f"the kernels in the wheel are not used: {found['kernels']['why_not_ahead']}")


def demo(command: Path, folder: Path) -> None:
    folder.mkdir()
    shown = run(command, "demo", "--out", "demo", cwd=folder)
    missing = [
        name
        for name in ("packing.png", "packed/manifest.json", "run_packed/model/config.json")
        if not (folder / "demo" / name).is_file()
    ]
    if missing:
        fail(f"the demo did not write {', '.join(missing)}; it printed\n{shown}")


def environment(folder: Path) -> Path:
    """The python of a new virtual environment."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def run(*words: object, cwd: Path | None = None) -> str:
    """What a command prints; the check ends with its errors if it fails."""
    # With PYTHONPATH the sources of a checkout would stand in front of the wheel.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=environ, capture_output=True, text=True)
    if done.returncode:
        fail(f"{' '.join(map(str, words))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def fail(sentence: str) -> NoReturn:
    sys.exit(f"release-check: {sentence}")


if __name__ == "__main__":
    main()
