"""The installer behind `make`, with a real pip and a package index of a few empty wheels."""

import base64
import hashlib
import importlib.util
import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import metadata
from pathlib import Path

import pytest

from batchwright import ahead

pytestmark = pytest.mark.guides
SCRIPT = Path(__file__).parents[1] / "tools" / "install.py"
spec = importlib.util.spec_from_file_location("install", SCRIPT)
assert spec
assert spec.loader
install = importlib.util.module_from_spec(spec)
spec.loader.exec_module(install)


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """An empty package as a wheel that pip installs."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": "\n".join(
            ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
            + [f"Requires-Dist: {one}" for one in needs]
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any",
    }
    record = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in files.items()]
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as made:
        for path, text in files.items():
            made.writestr(path, text)
        made.writestr(f"{info}/RECORD", "\n".join([*record, f"{info}/RECORD,,"]))


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def installed(python: Path) -> str:
    listed = [python, "-m", "pip", "list", "--format", "freeze"]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all there is to install from."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_a_cuda_build_is_seen_before_it_is_installed(index: Path) -> None:
    wheel(index, "torch", "2.13.0", "nvidia-cublas; platform_system == 'Linux'")
    wheel(index, "nvidia_cublas", "13.0")

    assert install.wants_cuda(Path(sys.executable), [])


def test_where_there_is_no_cpu_build_nothing_is_installed(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel(index, "torch", "2.13.0", "nvidia-cublas")
    wheel(index, "nvidia_cublas", "13.0")
    monkeypatch.setattr(install, "ACCELERATORS", ())
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"

    with pytest.raises(SystemExit, match=r"no accelerator and .* gives no CPU build of torch"):
        install.install_torch(python, [])
    assert "torch" not in installed(python)


def test_a_cpu_build_of_the_same_version_is_taken_where_the_index_has_one(
    index: Path, tmp_path: Path
) -> None:
    wheel(index, "torch", "2.13.0", "nvidia-cublas")
    wheel(index, "torch", "2.13.0+cpu")
    wheel(index, "nvidia_cublas", "13.0")
    wheel(index, "other", "1.0", "torch")
    limits = tmp_path / "constraints.txt"
    limits.write_text("torch==2.13.0\n")
    place = tmp_path / "venv"

    done = subprocess.run(
        [sys.executable, SCRIPT, place, "--constraints", limits, "other"],
        capture_output=True,
        text=True,
        # No uv: it would not look into pip's folder of wheels.
        env={**os.environ, "PATH": os.defpath},
        timeout=300,
    )
    listed = installed(place / "bin" / "python")

    assert done.returncode == 0, done.stderr
    assert "torch==2.13.0+cpu" in listed
    assert "other==1.0" in listed
    assert "nvidia" not in listed


def test_what_cannot_be_found_ends_with_pips_reason(index: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "venv", "other"],
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 1
    assert "torch" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wheel_has_its_kernels_wherever_it_is_built(tmp_path: Path) -> None:
    """In pip's isolated environment, also under a Python that has the checkout installed."""
    root = SCRIPT.parents[1]
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, root]
    # Every kernel is compiled, which a busy machine needs long for; only a hang takes an hour.
    subprocess.run(build, check=True, timeout=3600)
    (made,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(made) as files:
        names = files.namelist()
    assert "batchwright/compiled/manifest.json" in names
    assert sum(name.startswith("batchwright/compiled/") for name in names) > len(ahead.listed())


def test_what_errors_advise_to_install_needs_no_index_that_has_the_package(tmp_path: Path) -> None:
    """Where the package is installed, pip takes its extras from there: `batchwright[track]`."""
    extras = metadata("batchwright").get_all("Provides-Extra") or []
    assert "track" in extras
    known = f"batchwright[{','.join(extras)}]"
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-deps", known],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Requirement already satisfied: batchwright[" in done.stdout
