"""Write the tree of the package into docs/architecture.md: every file, with its first line.

python tools/tree.py            rewrite the tree
python tools/tree.py --check    write nothing; exit with 1 if it differs
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "batchwright"
PAGE = ROOT / "docs" / "architecture.md"


def main() -> None:
    before = PAGE.read_text("utf-8")
    text = "\n".join(["src/batchwright/", *lines(PACKAGE, 1)])
    inside = r"(?<=<!-- tree -->\n```text\n).*?(?=\n```\n<!-- end of tree -->)"
    after, found = re.subn(inside, lambda _: text, before, flags=re.DOTALL)
    if found != 1:
        sys.exit(f"{PAGE.relative_to(ROOT)} has {found} places for the tree; it needs one")
    if "--check" not in sys.argv:
        PAGE.write_text(after, "utf-8")
    elif after != before:
        sys.exit(f"{PAGE.relative_to(ROOT)} differs from the sources; run {sys.argv[0]}")


def lines(folder: Path, depth: int) -> Iterator[str]:
    """The modules of a folder, then its packages with what is in them."""
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    packages = sorted(path.parent for path in folder.glob("*/__init__.py"))
    for path in modules:
        yield line(path.name, depth, path)
    for path in packages:
        yield line(f"{path.name}/", depth, path / "__init__.py")
        yield from lines(path, depth + 1)


def line(name: str, depth: int, source: Path) -> str:
    docstring = ast.get_docstring(ast.parse(source.read_text("utf-8"))) or ""
    return f"{'  ' * depth + name:<24} {docstring.partition(chr(10))[0]}".rstrip()


if __name__ == "__main__":
    main()
