"""`batchwright report`: a run as text, JSON, one HTML file or pictures."""

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from batchwright.cli.output import Force, Format, show

__all__ = ["report"]


def report(
    run: Annotated[Path, Parameter(help="A run directory.")],
    *,
    compare: Annotated[
        Path | None,
        Parameter(help="A second run: printed too, and drawn in the same charts of the HTML file."),
    ] = None,
    html: Annotated[
        Path | None, Parameter(help="Write the page as one file that opens from disk.")
    ] = None,
    png: Annotated[Path | None, Parameter(help="Write figures into this folder.")] = None,
    force: Force = False,
    format: Format = "text",
) -> None:
    """Show how full batches, calls and environments were: text, JSON, HTML or pictures."""
    import shutil

    from batchwright.errors import CannotWrite
    from batchwright.files import check_apart, check_output
    from batchwright.report.html import PAGE, with_texts, write_html
    from batchwright.report.summary import summarise
    from batchwright.report.words import words

    if png is not None and png.exists() and not png.is_dir():
        raise CannotWrite(f"--png {png} is a file; name a folder for the figures")
    found = [summarise(path) for path in (run, compare) if path is not None]
    written: list[str] = []
    if html is not None:
        check_output(html, PAGE, force=force)
        check_apart(html, [run / "events.jsonl"])
        size = write_html(html, [with_texts(run, found[0]), *found[1:]])
        written.append(f"wrote {html} ({size:,} bytes)")
    if png is not None:
        from batchwright.report.figures import run_png

        drawn = run_png(png, found[0], force=force)
        written += [f"wrote {path}" for path in drawn]
        if not drawn:
            written.append(f"nothing to draw yet in {run}, so {png} was not written")
    width = shutil.get_terminal_size((100, 24)).columns
    text = "\n\n".join(words(one, width) for one in found)
    data: dict[str, Any] | list[Any] = found[0] if compare is None else found
    show(data, "\n".join([text, *written]), format)
