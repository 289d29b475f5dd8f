"""The page in a real browser: figures equal the files, updates arrive, text stays text.

Screenshots for the documentation are made here, with BATCHWRIGHT_SCREENSHOTS=docs/assets.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder
from batchwright.data.tokens import TokenStore
from batchwright.events import EventLog
from batchwright.report.html import write_html
from batchwright.report.summary import summarise
from conftest import COMMAND
from stored_run import HOSTILE, column, proof_run, records, stored_run, write_steps

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
PATIENCE_MS = 120_000
VIEWPORT = {"width": 1280, "height": 900}

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed; make chromium"),
    # One browser and one server for the module.
    pytest.mark.xdist_group("view"),
]


@dataclass
class Seen:
    """What went wrong in a page, and what it asked for."""

    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHWRIGHT_TOKENS", str(folder / "stores"))
        stored_run(folder / "runs" / "packed", ranks=4)
        stored_run(folder / "runs" / "bucketed", steps=30, layout="bucketed")
    proof_run(folder / "runs" / "prover")
    live = folder / "runs" / "live"
    live.mkdir()
    (live / "events.jsonl").touch()
    return folder / "runs"


@pytest.fixture(scope="module")
def url(runs: Path) -> Iterator[str]:
    """The command itself, serving the runs."""
    command = [COMMAND, "view", str(runs), "--port", "0"]
    said = runs.parent / "stderr"
    with (
        said.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+/", line)
            assert found, line
            yield found[0]
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    assert said.read_text().strip() == "stopped"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield started
        started.close()


def opened(browser: Any, url: str, ready: str = "yes", **options: Any) -> tuple[Any, Seen]:
    context = browser.new_context(**{"viewport": VIEWPORT, "reduced_motion": "reduce", **options})
    page, seen = context.new_page(), Seen()
    page.set_default_timeout(PATIENCE_MS)
    page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("dialog", lambda dialog: seen.errors.append(f"dialog {dialog.message}"))
    page.goto(url)
    page.wait_for_selector(f"body[data-ready={ready}]")
    return page, seen


def figure(page: Any, name: str) -> str:
    return str(page.locator(f'[data-figure="{name}"]').inner_text())


def says(page: Any, where: str, text: str) -> None:
    """Wait until a part of the page has a text; the page's policy lets no test evaluate words."""
    page.locator(where).filter(has_text=text).wait_for()


def share(value: float) -> str:
    return f"{value:.1%}"


def whole(value: float) -> str:
    return f"{round(value):,}"


def photographed(page: Any, name: str) -> None:
    if folder := os.environ.get("BATCHWRIGHT_SCREENSHOTS"):
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.wait_for_timeout(150)
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)


def test_every_panel_shows_the_numbers_of_the_files(browser: Any, runs: Path, url: str) -> None:
    page, seen = opened(browser, f"{url}?run=packed")
    run = runs / "packed"
    steps, calls = records(run, "step"), records(run, "calls")
    useful = column(steps, "tokens") / column(steps, "padded")
    ended = column(calls, "done") + column(calls, "failed")
    texts = {
        name: page.locator(f"#{name}").inner_text()
        for name in ("plan", "packing", "steps", "ranks", "rollouts", "calls", "state", "advice")
    }

    assert figure(page, "useful tokens") == share(useful)
    assert figure(page, "token ullage") == share(1 - useful)
    waited = column(steps, "data_wait_s") / column(steps, "seconds")
    assert figure(page, "data wait") == share(waited)
    assert figure(page, "calls failed") == share(column(calls, "failed") / ended)
    assert figure(page, "cache hits") == share(column(calls, "hit") / ended)
    assert float(figure(page, "loss")) == pytest.approx(steps[-1]["loss"], rel=1e-3)
    assert "finished" in texts["state"]
    assert "step 40 of 40" in texts["state"]
    manifest = json.loads((run / "plan" / "manifest.json").read_text())
    assert f"{manifest['counts']['samples']:,} samples" in texts["plan"]
    assert f"{manifest['counts']['planned_tokens']:,} tokens" in texts["plan"]
    assert "40 steps recorded" in texts["steps"]
    ranks = [whole(sum(step["rank_padded"][k] for step in steps)) for k in range(4)]
    assert all(tokens in texts["ranks"] for tokens in ranks)
    assert f"{whole(column(calls, 'done'))} answered" in texts["calls"]
    assert f"{whole(column(calls, 'failed'))} failed" in texts["calls"]
    assert "12 episodes, 24 turns, 4 of them invalid (timeout 4)" in texts["rollouts"]
    assert "16.7% of the turns are invalid" in texts["advice"]
    photographed(page, "view")
    # The table of a chart has every point of it.
    page.locator("#steps details summary").first.click()
    cells = page.locator("#steps details").first.locator("tbody tr")
    cells.nth(39).wait_for(state="attached")
    assert cells.count() == 40
    assert float(cells.nth(4).locator("td").nth(1).inner_text()) == pytest.approx(
        steps[4]["loss"], rel=1e-3
    )
    assert seen.errors == []
    assert all(request.startswith(url) for request in seen.requests)
    page.context.close()


def test_a_selection_of_steps_is_followed_by_all_panels(browser: Any, runs: Path, url: str) -> None:
    page, seen = opened(browser, f"{url}?run=packed")
    chosen = records(runs / "packed", "step")[9:20]
    page.locator('[data-key="brush-from"]').fill("9")
    page.locator('[data-key="brush-to"]').fill("19")
    says(page, "#brush", "steps 10 to 20")

    assert figure(page, "useful tokens") == share(
        column(chosen, "tokens") / column(chosen, "padded")
    )
    ranks = [whole(sum(step["rank_padded"][k] for step in chosen)) for k in range(4)]
    text = page.locator("#ranks").inner_text()
    assert all(tokens in text for tokens in ranks)
    before, last = records(runs / "packed", "step")[8]["t"], chosen[-1]["t"]
    calls = [one for one in records(runs / "packed", "calls") if before < one["t"] <= last]
    done = column(calls, "done")
    assert f"{whole(done)} answered" in page.locator("#calls").inner_text()
    page.keyboard.press("Escape")
    assert "All steps" in page.locator("#brush").inner_text()
    # Dragging over a chart selects as well.
    page.locator('[data-key="m-loss"]').scroll_into_view_if_needed()
    box = page.locator('[data-key="m-loss"]').bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 40, steps=3)
    page.mouse.up()
    assert "Selected" in page.locator("#brush").inner_text()
    assert seen.errors == []
    page.context.close()


def test_hostile_text_is_shown_as_text(browser: Any, url: str) -> None:
    page, seen = opened(browser, f"{url}?run=packed")
    page.locator("#calls details summary").last.click()
    assert HOSTILE in page.locator("#calls").text_content()
    page.locator('[data-key="search"]').fill("question 0")
    page.locator("#rollouts tr.open-row").first.click()
    assert HOSTILE in page.locator(".turns").text_content()
    page.locator('[data-key="search"]').fill("question 3")
    page.locator("#rollouts tr.open-row").first.click()
    assert page.locator(".turns li.invalid").count() == 2
    canvas = page.locator('[data-key="packing-canvas"]')
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.wait_for_selector("#sample pre")
    assert "word word" in page.locator("#sample pre").text_content()
    assert page.locator("img").count() == 0
    assert "owned" not in page.title()
    assert seen.errors == []
    page.context.close()


def test_edges_of_buckets_can_be_moved_and_the_page_works_out_what_they_give(
    browser: Any, runs: Path, url: str, tmp_path: Path
) -> None:
    page, seen = opened(browser, f"{url}?run=bucketed")
    edge = page.locator('[data-key="lengths-edge-0"]')
    assert edge.get_attribute("aria-valuenow") == "128"
    edge.focus()
    for key in ("PageDown", "PageDown", "PageDown", "ArrowRight"):
        page.keyboard.press(key)
    assert edge.get_attribute("aria-valuenow") == "81"
    edges = tomllib.loads(page.locator("#whatif-toml").text_content())["bucket_edges"]
    assert edges[0] == 81
    # The planner itself, over many epochs as batches are drawn anew in each.
    config = BatchPlan.load(runs / "bucketed" / "plan").config
    lengths = TokenStore(runs / "bucketed" / "tokens").lengths
    epochs = 40
    changed = BatchingConfig(**{**config.model_dump(), "bucket_edges": tuple(edges)})
    plan = BatchPlanBuilder(lengths, changed).build(epochs)
    expected = [plan.useful_tokens(k) / plan.padded_tokens(k) for k in range(epochs)]
    words = page.locator("#whatif-result").inner_text()
    shown = re.search(r"≈ ([\d,]+) microbatches per epoch, ≈ ([\d.]+)% useful", words)
    assert shown, words
    assert re.search(r"against ≈ [\d.]+% by the same estimate", words)
    assert int(shown[1]) == plan.num_microbatches(0)
    assert float(shown[2]) / 100 == pytest.approx(sum(expected) / epochs, abs=0.006)
    # Dragging moves it too, and never past its neighbour.
    edge.scroll_into_view_if_needed()
    box, next_edge = edge.bounding_box(), page.locator('[data-key="lengths-edge-1"]')
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 900, box["y"] + 20, steps=4)
    page.mouse.up()
    stopped = int(edge.get_attribute("aria-valuenow"))
    assert stopped == int(next_edge.get_attribute("aria-valuenow")) - 1
    # And back again from over its neighbour.
    box = edge.bounding_box()
    page.mouse.move(box["x"] + 9, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] - 30, box["y"] + 20, steps=4)
    page.mouse.up()
    assert int(edge.get_attribute("aria-valuenow")) < stopped
    stopped = int(edge.get_attribute("aria-valuenow"))
    command = page.locator("#whatif-command").text_content()
    assert f"--bucket-edges {stopped}," in command
    length_file = tmp_path / "lengths.jsonl"
    data = runs / "bucketed.jsonl"
    for line in (
        f"batchwright data lengths build -d {data} -t bytes -o {length_file}",
        command.replace("lengths.jsonl", str(length_file)),
    ):
        done = subprocess.run(
            [COMMAND, *shlex.split(line)[1:]], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    page.get_by_text("Edges as planned").click()
    assert edge.get_attribute("aria-valuenow") == "128"
    assert seen.errors == []
    page.context.close()


def test_a_proof_is_shown_as_a_tree(browser: Any, url: str) -> None:
    page, seen = opened(browser, f"{url}?run=prover")
    tree = page.locator(".turns .tree .tree")
    page.locator("#rollouts tr.open-row").nth(1).click()
    assert tree.count() == 2
    assert "proved, the right answer · 3 steps · reward 1" in page.locator(".turns").inner_text()
    assert page.locator(".turns .by").all_inner_texts() == ["rule gp", "fact", "fact"]
    assert HOSTILE in page.locator(".turns").text_content()
    page.locator("#rollouts tr.open-row").first.click()
    assert "not proved · 2 steps" in page.locator(".turns").inner_text()
    assert "expected: cy" in page.locator(".turns").inner_text()
    names = page.locator("#rollouts tr.open-row button").evaluate_all(
        "(all) => all.map((one) => one.ariaLabel)"
    )
    assert len(set(names)) == len(names) > 1
    assert page.locator(".turns .by.left").all_inner_texts() == ["open"]
    assert seen.errors == []
    page.context.close()


def test_new_records_and_the_end_of_a_run_arrive_by_themselves(
    browser: Any, runs: Path, url: str
) -> None:
    page, seen = opened(browser, f"{url}?run=live")
    draw = random.Random(3)
    with EventLog(runs / "live" / "events.jsonl") as log:
        log.write("start", step=0, steps=9)
        write_steps(log, 1, 4, 1, draw)
        says(page, "#state", "step 4 of 9")
        assert "live" in page.locator("#state").inner_text()
        write_steps(log, 5, 9, 1, draw)
        log.write("stop", step=9, why="done")
    says(page, "#state", "finished")
    steps = records(runs / "live", "step")
    assert figure(page, "useful tokens") == share(column(steps, "tokens") / column(steps, "padded"))
    assert seen.errors == []
    page.context.close()


def small_run(folder: Path, *losses: float, **more: Any) -> Path:
    folder.mkdir()
    with EventLog(folder / "events.jsonl") as log:
        log.write("start", step=0, steps=9)
        for step, loss in enumerate(losses, 1):
            log.write("step", step=step, loss=loss, seconds=0.5, **more)
    return folder


def test_twelve_tabs_of_one_browser_all_show_their_page_and_new_records(
    browser: Any, runs: Path, url: str
) -> None:
    run = small_run(runs / "tabs", 4.0)
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    pages = [context.new_page() for _ in range(12)]
    for page in pages:
        page.goto(f"{url}?run=tabs", wait_until="commit")
    for page in pages:
        says(page, "#state", "step 1 of 9")
    with EventLog(run / "events.jsonl") as log:
        log.write("step", step=2, loss=3.0, seconds=0.5)
    for page in pages:
        says(page, "#state", "step 2 of 9")
    context.close()


def test_a_run_that_cannot_be_read_leaves_no_figures_of_another_and_new_runs_are_listed(
    browser: Any, runs: Path, url: str
) -> None:
    page, seen = opened(browser, f"{url}?run=nosuch", ready="no")
    says(page, "#notes", "There is no run nosuch in this folder")
    assert page.locator("[data-figure]").count() == 0
    gone = small_run(runs / "gone", 4.0)
    page.locator("#run option[value=gone]").wait_for(state="attached")
    page.locator("#run").select_option("packed")
    says(page, "#state", "step 40 of 40")
    gone.rename(runs.parent / "gone")
    page.locator("#run").select_option("gone")
    says(page, "#notes", "The server refused this run")
    assert page.locator("[data-figure]").count() == 0
    assert "packed" not in page.locator("#name").inner_text()
    assert page.locator("#calls figure").count() == 0
    # One with odd records is shown without them.
    odd = small_run(runs / "odd", 1e308, 7.25, -1e308, tokens=10**400, padded=9)
    (odd / "rollouts").mkdir()
    deep = '{"goal":"g","by":"r","children":[' * 900 + "]}" * 900
    proof = f'{{"env":0,"episode":0,"reward":1,"proof":{deep}}}'
    (odd / "rollouts" / "1.jsonl").write_text(proof + '\n{"env":1,"episode":0,"reward":0.5}\n')
    page.locator("#run option[value=odd]").wait_for(state="attached")
    page.locator("#run").select_option("odd")
    says(page, "#notes", "left out")
    assert figure(page, "loss") == "7.25"
    page.locator("#rollouts tr.open-row").last.click()
    # The browser itself reports the refused request.
    assert all("404" in error for error in seen.errors)
    page.context.close()


def test_charts_have_units_and_no_label_twice_and_text_turns_no_sentence_round(
    browser: Any, tmp_path: Path
) -> None:
    turning = "\u202egnp.exe\u2066 \u200f"
    run = small_run(tmp_path / "run", 1000.01, 1000.02, 1000.03, **{turning: 1.0})
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'{"t":9,"kind":"st')
    one = small_run(tmp_path / f"one{turning}", 5.0)
    with EventLog(one / "events.jsonl") as log:
        log.write("limit", endpoint=turning, **{"from": 4, "to": 8, "why": turning})
        log.write("calls", window_s=1, done=4, failed=0, p50=0.1, p95=0.2, in_flight=2)
    path = tmp_path / "report.html"
    write_html(path, [summarise(run)])
    page, seen = opened(browser, path.as_uri(), color_scheme="dark")
    assert "reading" not in page.locator("#state").inner_text()
    axes = page.locator("svg[role=img]").evaluate_all(
        """(all) => all.map((svg) => {
        const of = (anchor) => [...svg.querySelectorAll(`text[text-anchor=${anchor}]`)];
        return [of("end"), of("middle")].map((on) => on.map((t) => t.textContent));
        })"""
    )
    assert axes
    for labels in (labels for both in axes for labels in both):
        assert len(set(labels)) == len(labels), labels
    # On paper, in light colours whatever the page has.
    page.emulate_media(media="print")
    light = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(light) == "rgb(255, 255, 255)"
    ink = page.evaluate("getComputedStyle(document.querySelector('.lead b')).color")
    assert sum(map(int, re.findall(r"\d+", ink))) < 200
    page.context.close()
    write_html(path, [summarise(one)])
    page, more = opened(browser, path.as_uri())
    # One value is one dot; times have their unit.
    assert page.locator('[data-key="m-loss"] circle').count() == 1
    latency = page.locator('[data-key="latency"] text').all_text_contents()
    assert all(re.search(r"\d (s|ms|µs)$", text) for text in latency), latency
    whole = page.locator("html").inner_html() + page.title()
    shown = whole.replace(re.findall(r"<script type=.*?</script>", whole, re.DOTALL)[0], "")
    assert not set(turning) & set(shown) & set("\u202e\u2066\u200f")
    assert "\\u202egnp.exe" in page.locator("#name").inner_text()
    assert "1 step recorded" in page.locator("#steps").inner_text()
    assert seen.errors == more.errors == []
    page.context.close()


def test_the_report_is_the_same_page_from_disk_and_asks_for_nothing(
    browser: Any, runs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_html(path, [summarise(runs / "bucketed"), summarise(runs / "packed")])
    page, seen = opened(browser, path.as_uri(), color_scheme="dark")

    both = {}
    for name in ("bucketed", "packed"):
        steps = records(runs / name, "step")
        both[name] = share(column(steps, "tokens") / column(steps, "padded"))
    assert figure(page, "useful tokens") == both["bucketed"]
    assert f"packed: {both['packed']}" in page.locator("#strip").inner_text()
    assert page.locator("#steps path.curve.c2").count() > 0
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    photographed(page, "report-dark")
    assert seen.requests == [path.as_uri()]
    assert seen.errors == []
    page.context.close()


def test_the_page_fits_a_phone_and_speaks_to_screen_readers(
    browser: Any, runs: Path, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_html(path, [summarise(runs / "packed")])
    phone = {"width": 390, "height": 844}
    page, seen = opened(browser, path.as_uri(), viewport=phone, color_scheme="light")

    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, a, input, select, canvas, svg[role=img]')]
        .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
        .map((e) => e.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3')].map((e) => Number(e.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for key, panel in zip(
        "123456", ("plan", "packing", "steps", "ranks", "rollouts", "calls"), strict=True
    ):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == panel
    photographed(page, "report-phone")
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert seen.errors == []
    page.context.close()
