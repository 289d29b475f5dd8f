"""The README's tree is the tree."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_tree_has_every_file_with_the_first_line_of_its_docstring() -> None:
    block = re.search(r"<!-- tree -->\n```text\n(.*?)\n```", (ROOT / "README.md").read_text(), re.S)
    assert block
    listed = {}
    folders: list[str] = []
    for line in block.group(1).splitlines()[1:]:
        depth = (len(line) - len(line.lstrip())) // 2 - 1
        name, _, says = line.strip().partition("  ")
        del folders[depth:]
        if name.endswith("/"):
            folders.append(name)
            name = "__init__.py"
        listed["".join(folders) + name] = says.strip()
    found = {}
    package = ROOT / "src" / "batchwright"
    for path in package.rglob("*.py"):
        doc = ast.get_docstring(ast.parse(path.read_text())) or ""
        found[str(path.relative_to(package))] = doc.partition("\n")[0]
    del found["__init__.py"]

    assert listed == found


def test_the_numbers_are_those_of_the_saved_results() -> None:
    script = ROOT / "benchmarks" / "readme_numbers.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() in (ROOT / "README.md").read_text()
