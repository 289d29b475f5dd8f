"""The page as one file: script, styles and data inside, nothing loaded from anywhere."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from batchwright.files import write_atomic
from batchwright.report.plans import sample_text

__all__ = ["PAGE", "html_report", "part", "with_texts", "write_html"]

PAGE = re.compile(
    rb"<!doctype html>.{0,400}?<meta name=\"generator\" content=\"batchwright\">", re.DOTALL
)
"""The first bytes of every report that is written here."""
TEXTS = 200
"""Samples of the packing picture whose text is in a report."""


def part(name: str) -> str:
    """A file of the page."""
    return files("batchwright.report").joinpath("page", name).read_text("utf-8")


def html_report(summaries: Sequence[dict[str, Any]]) -> str:
    """The page of one run, or of one compared with a second; opens from disk, asks for nothing.

    Its content security policy allows the script and the styles in it by their hashes, and
    nothing else; the data stands in a block that no browser executes.
    """
    script, style = part("page.js"), part("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; "
        f"base-uri 'none'; form-action 'none'"
    )
    # "<" could end the block; JSON has another way to write it.
    data = json.dumps({"runs": list(summaries)}, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>'
    body = f'<script type="application/json" id="data">{data}</script>\n<script>{script}</script>'
    return part("page.html").replace("<!--head-->", head, 1).replace("<!--data-->", body, 1)


def write_html(path: Path, summaries: Sequence[dict[str, Any]]) -> int:
    """Write the report, whole or not at all; its size in bytes."""
    data = html_report(summaries).encode("utf-8", "replace")
    write_atomic(path, data)
    return len(data)


def with_texts(run: Path, summary: dict[str, Any]) -> dict[str, Any]:
    """A summary with the texts of samples in its packing picture, for a page without a server."""
    if not summary["plan"] or not (run / "tokens").is_dir():
        return summary
    items = list(summary["plan"]["packing"]["ids"])[:TEXTS]
    return summary | {"texts": {str(item): sample_text(run, int(item)) for item in items}}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
