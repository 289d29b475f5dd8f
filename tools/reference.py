"""Write docs/reference/commands.md from the help of the commands.

python tools/reference.py            rewrite the page
python tools/reference.py --check    write nothing; exit with 1 if it differs
"""

import re
import sys
from pathlib import Path

from batchwright.cli.app import app

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "commands.md"
HEAD = """# Commands and options

What `--help` says, of every command. [Commands](../commands.md) has examples.
"""


def main() -> None:
    found = app.generate_docs(output_format="markdown", heading_level=1)
    # The site makes its own table of contents.
    commands = found[re.search(r"^## batchwright ", found, re.MULTILINE).start() :]  # type: ignore[union-attr]
    text = HEAD + "\n" + commands.replace("```console", "```text").rstrip() + "\n"
    if "--check" not in sys.argv:
        PAGE.write_text(text, "utf-8")
    elif text != PAGE.read_text("utf-8"):
        sys.exit(f"{PAGE.relative_to(ROOT)} differs from the help; run {sys.argv[0]}")


if __name__ == "__main__":
    main()
