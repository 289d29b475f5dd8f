"""Write the versions of a virtual environment as a constraints file: `make lock`."""

import json
import subprocess
import sys
from pathlib import Path

HEAD = "# The versions that the tests were last run with; `make lock` writes this file anew.\n"


def main() -> None:
    venv, target = Path(sys.argv[1]), Path(sys.argv[2])
    listed = subprocess.run(
        [venv / "bin" / "python", "-m", "pip", "list", "--format", "json", "--exclude-editable"],
        check=True,
        capture_output=True,
        text=True,
    )
    # 2.13.0+cpu is a build of 2.13.0; which build fits is the machine's business.
    pins = [f"{one['name']}=={one['version'].split('+')[0]}" for one in json.loads(listed.stdout)]
    tools = ("pip==", "setuptools==", "wheel==")
    chosen = sorted((pin for pin in pins if not pin.startswith(tools)), key=str.lower)
    target.write_text(HEAD + "\n".join(chosen) + "\n")


if __name__ == "__main__":
    main()
