"""Everything that is for looking at: summaries of runs, advice, the page, text and pictures.

Reads run directories and writes only what it is asked to write. `batchwright.report.text` needs
nothing, `figures` needs matplotlib.
"""

from typing import TYPE_CHECKING

from batchwright.lazy import lazy_names

__all__ = [
    "Advice",
    "RunReader",
    "advise",
    "find_runs",
    "html_report",
    "summarise",
    "summarise_plan",
    "write_html",
]

if TYPE_CHECKING:
    from batchwright.report.advice import Advice, advise
    from batchwright.report.html import html_report, write_html
    from batchwright.report.summary import RunReader, find_runs, summarise, summarise_plan
else:
    __getattr__ = lazy_names(
        __name__,
        "batchwright.report.summary",
        "batchwright.report.advice",
        "batchwright.report.html",
    )
