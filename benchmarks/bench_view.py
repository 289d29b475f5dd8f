"""The page in a browser: until it shows a run of 10 MB, until a new record is seen, report sizes.

Chromium, which has shown the page of another server before, opens the page of `batchwright view`
several times with a new server, which has read nothing yet, then several times with one; an update
is the time from the write of a record until it is shown. Medians count.
Without Chromium, only the reader and the sizes of reports are measured.
"""

import contextlib
import json
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from batchwright.batching import BatchingConfig, BatchPlanBuilder
from batchwright.events import EventLog
from batchwright.report import html_report, summarise, summarise_plan
from common import Report, arguments, lengths_of

COMMAND = Path(sys.executable).parent / "batchwright"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
MEGABYTES = 10
SAMPLES = 1_000_000
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def main() -> None:
    args = arguments(__doc__).parse_args()
    report = Report("view", args)
    events = 2_000 if args.smoke else 100_000 if args.quick else 1_000_000
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = folder / "runs"
        write_run(runs / "ten", megabytes=0.1 if args.smoke else MEGABYTES)
        write_run(runs / "many", events=events)
        rows: list[list[Any]] = []
        for run in ("ten", "many"):
            size = (runs / run / "events.jsonl").stat().st_size
            began = time.perf_counter()
            found = summarise(runs / run)
            rows.append([run, found["steps"]["rows"], size / 1e6, time.perf_counter() - began])
        report.table("reading a log", ("run", "records", "MB", "s"), rows)
        samples = 2_000 if args.smoke else 100_000 if args.quick else SAMPLES
        sizes = []
        for layout in ("packed", "bucketed"):
            config = BatchingConfig(layout=layout)
            plan = BatchPlanBuilder(lengths_of("lognormal", samples), config).build()
            plan.save(folder / layout)
            began = time.perf_counter()
            size = len(html_report([summarise_plan(folder / layout)]).encode())
            sizes.append([layout, samples, size, time.perf_counter() - began])
        report.table("HTML report of a plan", ("layout", "samples", "bytes", "s"), sizes)
        report.target("HTML report of a plan, bytes", max(row[2] for row in sizes), most=2_000_000)
        if CHROMIUM is None or not find_spec("playwright"):
            report.not_measured("in Chromium", "no Chromium, or no playwright to drive it")
        else:
            write_run(folder / "other" / "small", events=1000)
            first, opened, updated = in_browser(
                runs, folder / "other", 1 if args.smoke else 3 if args.quick else 7
            )
            seen = [["open, nothing read yet", first], ["open", opened], ["update", updated]]
            report.table("in Chromium", ("what", "s"), seen)
            report.target("page open on a run of 10 MB, nothing read yet, s", first, most=1.0)
            report.target("page open on a run of 10 MB, s", opened, most=1.0)
            report.target("live update, s", updated, most=1.0)
    report.close()


def write_run(run: Path, *, megabytes: float = 0, events: int = 0) -> None:
    with EventLog(run / "events.jsonl") as log:
        log.write("start", step=0, steps=0)
        written = 0
        while written < events or (written % 1000 or size_of(log) < megabytes * 1e6):
            written += 1
            write_step(log, written)


def size_of(log: EventLog) -> int:
    return log.path.stat().st_size


def write_step(log: EventLog, step: int) -> None:
    log.write(
        "step",
        step=step,
        loss=4 / step**0.2,
        lr=1e-4,
        grad_norm=1.5,
        tokens=4000 + step % 90,
        padded=4096,
        seconds=0.5,
        data_wait_s=0.01,
    )


def in_browser(runs: Path, other: Path, times: int) -> tuple[float, float, float]:
    """Seconds until the page shows the run, the first time and after, and until a new record."""
    from playwright.sync_api import sync_playwright

    with (
        serving(other) as before,
        serving(runs) as url,
        sync_playwright() as playwright,
        EventLog(runs / "ten" / "events.jsonl") as log,
    ):
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_page()
        # A browser takes most of a second for its first page, whatever that is.
        page.goto(f"{before}?run=small")
        until_shown(page, 1000)
        firsts, opens, updates = [], [], []
        step = json.loads((runs / "ten" / "events.jsonl").read_bytes().splitlines()[-1])["step"]
        for _ in range(times):
            with serving(runs) as new:
                began = time.perf_counter()
                page.goto(f"{new}?run=ten")
                until_shown(page, step)
                firsts.append(time.perf_counter() - began)
                page.goto(f"{before}?run=small")
        for _ in range(times + 1):
            began = time.perf_counter()
            page.goto(f"{url}?run=ten")
            until_shown(page, step)
            opens.append(time.perf_counter() - began)
            step += 1
            began = time.perf_counter()
            write_step(log, step)
            until_shown(page, step)
            updates.append(time.perf_counter() - began)
        browser.close()
    opens, updates = opens[1:], updates[1:]
    return statistics.median(firsts), statistics.median(opens), statistics.median(updates)


@contextlib.contextmanager
def serving(runs: Path) -> Iterator[str]:
    """The address of a server."""
    command = [str(COMMAND), "view", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().rpartition(" at ")[2].split()[0]
        finally:
            server.send_signal(signal.SIGINT)


def until_shown(page: Any, step: int) -> None:
    page.locator("#state").filter(has_text=f"step {step:,} ").wait_for()


if __name__ == "__main__":
    main()
