"""Show the doctests of docstrings as code on the pages that `make docs` builds."""

import re
from typing import Any

from griffe import Extension, Object

__all__ = ["FenceDoctests"]

DOCTEST = re.compile(r"(?:^>>> .*\n?)(?:^.+\n?)*", re.MULTILINE)


class FenceDoctests(Extension):
    """Put each run of lines that begins with `>>>` into a fence; Markdown would quote it."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = DOCTEST.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text
            )
