"""Install the peers of requirements.txt into the running interpreter, one at a time.

A peer that does not install is named and left out: the benchmarks run without it.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]

EXTENSION_SETUP = """
import numpy
from Cython.Build import cythonize
from setuptools import Extension, setup

extension = Extension(
    "data_utils_fast", ["data_utils_fast.pyx"], language="c++", include_dirs=[numpy.get_include()]
)
setup(name="fairseq-fast", version="0.12.2", ext_modules=cythonize([extension]))
"""


def main() -> None:
    failed = []
    for line in (HERE / "requirements.txt").read_text().splitlines():
        requirement, _, mark = (part.strip() for part in line.partition("#"))
        if not requirement:
            continue
        print(f"installing {requirement} {mark}".rstrip(), flush=True)
        try:
            if mark == "extension":
                fairseq_extension(requirement)
            else:
                more = {"no-deps": ["--no-deps"], "aside": ["--target", str(aside(requirement))]}
                run([*PIP, "install", "--quiet", *more.get(mark, []), requirement])
        except (subprocess.CalledProcessError, OSError, StopIteration) as error:
            print(f"left out: {requirement} ({type(error).__name__})", flush=True)
            failed.append(requirement)
    print(f"left out: {', '.join(failed)}" if failed else "all peers are installed")


def aside(requirement: str) -> Path:
    """Where another version of a package stands, with all it needs, for one process to import."""
    return Path(sys.prefix, "aside", requirement)


def fairseq_extension(requirement: str) -> None:
    """Compile fairseq's Cython batching alone, as the package `fairseq-fast`."""
    run([*PIP, "install", "--quiet", "setuptools", "wheel", "cython>=3.0"])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # pip runs the sdist's setup.py to learn its metadata; in isolation it would first fetch
        # build requirements that are no longer to be had.
        fetch = ["download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:"]
        run([*PIP, *fetch, "--dest", name, requirement])
        with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
            member = next(m for m in archive if m.name.endswith("/data_utils_fast.pyx"))
            source = archive.extractfile(member)
            assert source is not None
            (folder / "data_utils_fast.pyx").write_bytes(source.read())
        next(folder.glob("*.tar.gz")).unlink()
        (folder / "setup.py").write_text(EXTENSION_SETUP)
        run([*PIP, "install", "--quiet", "--no-deps", "--no-build-isolation", name])


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
