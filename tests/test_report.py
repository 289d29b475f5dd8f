"""Runs are read as they are: sums equal the files, damage is said, nothing is written."""

import asyncio
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.errors import BadFile, BatchwrightError, ConfigError, MissingFile, NoServer
from batchwright.events import EventLog, EventTail, read_events
from batchwright.lines import checked_line, checked_lines
from batchwright.report import advice
from batchwright.report.advice import advise
from batchwright.report.columns import Columns
from batchwright.report.html import html_report
from batchwright.report.plans import sample_text
from batchwright.report.server import View, bound
from batchwright.report.summary import RunReader, find_runs, summarise, summarise_plan
from batchwright.report.words import words
from batchwright.sealed import sealed_text, write_sealed_json

sys.path.insert(0, str(Path(__file__).parent))
from stored_run import HOSTILE, column, records, stored_run, write_steps


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHWRIGHT_TOKENS", str(folder / "stores"))
        return stored_run(folder / "runs" / "stored")


def test_sums_and_shares_of_a_summary_are_those_of_the_files(run_dir: Path) -> None:
    found = summarise(run_dir)
    steps, calls = records(run_dir, "step"), records(run_dir, "calls")
    shown = {cell["name"]: cell["value"] for cell in found["strip"]}

    for name in ("tokens", "padded", "seconds", "data_wait_s"):
        assert found["steps"]["totals"][name] == pytest.approx(column(steps, name))
    for name in ("sent", "hit", "retry", "failed", "done", "busy_s"):
        assert found["calls"]["totals"][name] == pytest.approx(column(calls, name))
    assert shown["useful tokens"] == pytest.approx(
        column(steps, "tokens") / column(steps, "padded")
    )
    assert shown["loss"] == steps[-1]["loss"]
    assert found["steps"]["newest"]["grad_norm"] == steps[-1]["grad_norm"]
    busiest = sum(max(step["rank_padded"]) for step in steps)
    assert shown["rank ullage"] == pytest.approx(1 - column(steps, "padded") / 4 / busiest)
    ended = column(calls, "done") + column(calls, "failed")
    assert shown["calls failed"] == pytest.approx(column(calls, "failed") / ended)
    assert found["calls"]["failed_by"] == {"timeout": column(calls, "failed")}
    assert found["calls"]["limit_changes"] == len(records(run_dir, "limit"))
    assert found["evals"]["mean"]["loss"] == pytest.approx(
        [record["loss"] for record in records(run_dir, "eval")], rel=1e-6
    )
    assert found["state"]["name"] == "finished"
    assert found["notes"] == []


def test_the_plan_of_a_summary_is_the_plan_in_the_folder(run_dir: Path) -> None:
    from batchwright.batching import BatchPlan

    plan, shown = BatchPlan.load(run_dir / "plan"), summarise(run_dir)["plan"]
    batches = list(plan.iter_epoch(0))

    assert shown["fingerprint"] == plan.fingerprint
    assert shown["microbatches"] == len(batches)
    assert shown["useful_tokens"] == sum(batch.token_count for batch in batches)
    assert shown["padded_tokens"] == sum(batch.padded_tokens for batch in batches)
    assert sum(shown["histogram"]["samples"]) == 160
    assert sum(shown["histogram"]["tokens"]) == shown["useful_tokens"]
    for row in shown["packing"]["rows"]:
        batch = batches[row["batch"]]
        first, last = batch.row_offsets[row["row"]], batch.row_offsets[row["row"] + 1]
        assert row["lengths"] == batch.lengths[first:last].tolist()
        ids = [shown["packing"]["ids"][item] for item in row["items"]]
        assert ids == list(batch.samples[first:last])
    same = next(row for row in shown["budgets"] if row["token_budget"] == 1024)
    assert same["efficiency"] == pytest.approx(plan.efficiency)


@pytest.mark.parametrize("more", [{}, {"drop_last": True, "pad_policy": "pad_to_bucket"}])
def test_buckets_and_layouts_of_a_summary_are_those_of_all_microbatches_and_of_the_planner(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchwright.batching import BatchingConfig, BatchPlanBuilder
    from batchwright.batching.compare import compare_layouts
    from batchwright.data.lengths import Lengths
    from batchwright.report import plans

    monkeypatch.setattr(plans, "SAMPLED", 9)
    lengths = np.random.default_rng(1).lognormal(5, 1, 500).astype(np.int64).clip(1, 1500)
    config = BatchingConfig(layout="bucketed", token_budget=2048, overflow_max=1500, **more)
    plan = BatchPlanBuilder(lengths, config).build()
    shown = plans.plan_summary(plan)
    buckets: dict[int, list[int]] = {}
    for batch in plan.iter_epoch(0):
        one = buckets.setdefault(batch.bucket_id, [0, 0, 0, 0])
        for k, n in enumerate((1, len(batch.items), batch.token_count, batch.padded_tokens)):
            one[k] += n

    names = ("microbatches", "samples", "useful", "padded")
    assert [[row[name] for name in names] for row in shown["buckets"]] == [
        buckets[k] for k in sorted(buckets)
    ]
    assert shown["sampled"] == 9 < shown["microbatches"]
    assert shown["useful_tokens"] == sum(row[2] for row in buckets.values())
    rows = compare_layouts(Lengths.of(lengths), config)
    assert [(row.layout, row.efficiency) for row in rows] == [
        (row["layout"], pytest.approx(row["efficiency"])) for row in shown["layouts"]
    ]
    assert not any(row["about"] for row in shown["layouts"])


def test_rollouts_count_every_turn_and_learn_from_none_without_a_reward(run_dir: Path) -> None:
    files = sorted((run_dir / "rollouts").glob("*.jsonl"))
    turns = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    valid = [turn["gain"] for turn in turns if turn["gain"] is not None]
    found = summarise(run_dir)["rollouts"]

    assert (found["turns"], found["invalid"]) == (len(turns), len(turns) - len(valid))
    assert found["reasons"] == {"timeout": len(turns) - len(valid)}
    assert found["mean_reward"] == pytest.approx(np.mean(valid))
    assert sum(found["histogram"]["counts"]) == len(valid)
    assert len(found["envs"]) == 6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=70),
    st.integers(1, 16),
)
def test_points_are_means_of_equal_runs_and_lose_no_value(values: list[Any], points: int) -> None:
    columns = Columns()
    for value in values:
        columns.add({"x": value, "always": 1})
    width = columns.width(points)
    runs = [values[k : k + width] for k in range(0, len(values), width)]
    known = [[v for v in run if v is not None] for run in runs]

    assert len(runs) <= points
    shown = columns.points(["x"], points) if "x" in columns.names else None
    if shown:
        means = [np.nan if mean is None else mean for mean in shown["mean"]["x"]]
        expected = [np.mean(run) if run else np.nan for run in known]
        assert means == pytest.approx(expected, rel=1e-5, abs=1e-5, nan_ok=True)
        flat = [v for v in values if v is not None]
        assert columns.ends(["x"])["x"] == [flat[0], flat[-1], min(flat), max(flat)]
        assert columns.sums("x", points) == pytest.approx(
            [sum(run) for run in known], rel=1e-5, abs=1e-4
        )
    assert sum(columns.sums("always", points)) == len(values)  # type: ignore[arg-type]


def test_a_log_read_in_any_pieces_gives_the_same_records(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        write_steps(log, 1, 25, 2, random.Random(1))
    for most in (1, 50, 1000, 2**20):
        tail, found = EventTail(path), []
        while events := tail.read(most):
            found += events
        assert found == list(read_events(path))
        assert (tail.torn, tail.bad) == (0, [])


LINES = st.one_of(
    st.builds(
        lambda t, kind, x: json.dumps({"t": t, "kind": kind, "x": x}),
        st.integers(0, 9),
        st.sampled_from(["step", "calls", "},{"]),
        st.one_of(st.floats(allow_nan=False), st.text(max_size=5), st.lists(st.integers())),
    ),
    st.sampled_from(
        ['{"t":1,"ki', '{"t":2,"x":[{}', "{}", "[]", "[1}", '{"t":1,"kind":"a"},{}', "}"]
    ),
)


def check_in(line: bytes) -> int:
    return int(line[-11:-3], 16)


@settings(max_examples=200, deadline=None)
@given(lines=st.lists(LINES, max_size=8))
def test_lines_parsed_together_are_the_records_that_each_line_is(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "together.jsonl"
    raw, check, expected = b"", 0, []
    for line in lines:
        checked = checked_line(line.encode(), check)
        raw, check = raw + checked, check_in(checked)
        try:
            record = json.loads(line[:-1] + "}")
            expected.append((float(record.pop("t")), record.pop("kind"), record))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    path.write_bytes(raw)
    tail = EventTail(path)

    assert [tuple(event) for event in tail.read()] == expected
    assert len(expected) + len(tail.bad) == len(lines)
    assert tail.torn == 0


def test_a_plan_is_summarised_without_a_compiler(run_dir: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from batchwright.report import summarise;"
        f"found = summarise({str(run_dir)!r}); assert found['plan']['budgets'];"
        "assert 'numba' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["changed", "added", "added again", "removed"])
@pytest.mark.parametrize("at", [0, 3, 4])
def test_a_line_that_is_not_as_written_is_named_and_the_others_are_read(
    at: int, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        write_steps(log, 1, 6, 1, random.Random(1))
    left, lines = list(read_events(path)), path.read_bytes().splitlines()
    if kind == "changed":
        lines[at] = lines[at].replace(b'"t":', b'"t":1', 1)
        del left[at]
    elif kind == "removed":
        # The next one is as it was written, but not where it was written.
        del lines[at], left[at : at + 2]
    else:
        lines.insert(at, b"no record" if kind == "added" else lines[-1])
    path.write_bytes(b"\n".join(lines) + b"\n")

    tail = EventTail(path)

    assert tail.read() == left
    assert tail.bad == [at + 1]
    with pytest.raises(BadFile, match=f"line {at + 1}:"):
        list(read_events(path))


def test_a_run_read_while_it_grows_equals_one_read_at_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    draw = random.Random(2)
    with EventLog(run / "events.jsonl") as log:
        log.write("start", step=0, steps=30)
        reader = RunReader(run)
        for first in range(1, 30, 7):
            write_steps(log, first, first + 6, 2, draw)
            while reader.update():
                pass
        log.write("stop", step=35, why="done")
    while reader.update():
        pass
    assert reader.summary() == summarise(run)


def test_a_resumed_run_shows_each_step_once_and_says_what_was_trained_again(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with EventLog(run / "events.jsonl") as log:
        log.write("start", step=0, steps=20)
        write_steps(log, 1, 12, 1, random.Random(0))
    with EventLog(run / "events.jsonl") as log:
        log.write("resume", step=10, steps=20)
        write_steps(log, 11, 20, 1, random.Random(5))
    found = summarise(run)

    assert found["steps"]["last"] == list(range(1, 21))
    assert any("2 steps after its checkpoint were trained again" in note for note in found["notes"])
    assert found["steps"]["t"] == sorted(found["steps"]["t"])


def test_figures_of_a_long_run_are_of_its_records_and_not_of_its_points(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    draw = random.Random(4)
    steps = [
        {"round": k + 1, "loss": draw.gauss(0, 9), "seconds": draw.random()} for k in range(1300)
    ]
    for step in steps[::3]:
        # Rounds of another part: their time is not of rollouts.
        step |= {"charts/rollout_s": step["seconds"] / 4, "charts/update_s": step["seconds"] / 2}
    with EventLog(run / "events.jsonl") as log:
        for step in steps:
            log.write("round", **step)
    found = summarise(run)
    loss = [step["loss"] for step in steps]
    shown = f"{loss[0]:.4g} {loss[-1]:.4g} {min(loss):.4g} {max(loss):.4g}".split()
    times = found["steps"]["times"]
    kinds = {name: sum(sums) for name, sums in times["kinds"].items()}
    slowest = sorted(steps, key=lambda step: -step["seconds"])

    rows = [line.split()[1:5] for line in words(found).splitlines() if line.startswith("loss ")]
    assert shown in rows
    assert found["steps"]["width"] > 1
    assert sum(kinds.values()) == pytest.approx(column(steps, "seconds"), rel=1e-4)
    assert kinds["update"] == pytest.approx(column(steps[::3], "seconds") / 2, rel=1e-4)
    assert [row[0] for row in times["slowest"][:50]] == [step["round"] for step in slowest[:50]]


def test_a_record_of_many_episodes_counts_for_all_of_them(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("start", episodes=20)
        log.write("episode", episode=1, seconds=3.0)
        log.write("episode", episode=20, seconds=1.9)
    times = summarise(tmp_path)["steps"]["times"]
    assert sum(times["of"]) == 20
    assert times["slowest"] == [[1, 3.0], [20, pytest.approx(0.1)]]


def test_cancelled_calls_have_not_failed(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("start", run="calls", prompts=30)
        log.write("calls", window_s=1, done=9, failed=21, failed_by={"cancelled": 20, "timeout": 1})
        found = summarise(tmp_path)
        log.write("resume", run="calls", prompts=30, failed=0)
        log.write("calls", window_s=1, done=21, failed=0, failed_by={})
    shown = {cell["name"]: cell["value"] for cell in found["strip"]}
    assert shown["calls failed"] == pytest.approx(0.1)
    shown = {cell["name"]: cell["value"] for cell in summarise(tmp_path)["strip"]}
    assert shown["calls failed"] == 0


ODD = [
    *('{"loss":1e308}', '{"loss":-1e308}', '{"loss":1e400}', '{"loss":NaN}', '{"step":1e400}'),
    *(f'{{"tokens":{10**400}}}', f'{{"step":{10**400}}}', f'{{"t":{10**400}}}', '{"t":1e400}'),
    *('{"t":"soon"}', '{"step":"two"}', '{"step":[1]}', '{"kind":{}}', '{"loss":{"a":[{}]}}'),
    *(f'{{"x":{"[" * n}{"]" * n}}}' for n in (9, 500, 2000, 100_000)),
    *('{"kind":"start","steps":"x"}', '{"kind":"stop","error":[1e400]}', '{"kind":"eval","at":[]}'),
    '{"kind":"calls","failed_by":{"x":1e400},"errors":[],"done":"many","p50":[[1]]}',
    '{"kind":"limit","why":[[1e999]]}',
    '{"kind":"resume","step":1e400,"failed":"x"}',
]
DEEP = '{"goal":"g","by":"rule","children":['
TURNS = [
    *(f'{{"proof":{DEEP * n}{"]}" * n},"reward":1}}' for n in (30, 400, 900, 5000)),
    *('{"reward":1e400}', '{"reward":NaN,"why":[[]]}', f'{{"gain":{10**400}}}', '{"question":{}}'),
    *('{"reward":1e308}', '{"reward":-1e308}', f'{{"env":{10**400}}}', '{"episode":1e400}'),
]


@pytest.mark.parametrize("together", [True, False])
def test_an_odd_record_is_counted_and_the_rest_is_shown(together: bool, tmp_path: Path) -> None:
    """Whatever a line holds, every form of the report can be made and has the good records."""
    cases = [list(range(len(ODD) + len(TURNS)))] if together else [[k] for k in range(len(ODD))]
    for number, case in enumerate(cases):
        run = tmp_path / str(number)
        (run / "rollouts").mkdir(parents=True)
        plain = '"t":1,"kind":"step","step":%d,"loss":2.5,"tokens":9,"padded":10,"seconds":1'
        lines = ['{"t":0,"kind":"start","step":0,"steps":5}', f"{{{plain % 1}}}"]
        lines += [f"{{{plain % 2},{ODD[k][1:]}" for k in case if k < len(ODD)]
        lines += [f"{{{plain % 3}}}".replace("2.5", "1.5"), f"{{{plain % 4}}}"]
        turn = '{"env":0,"episode":%d,'
        good, check = [turn % 0 + '"reward":0.5}'], 0
        odd = [turn % k + TURNS[k - len(ODD)][1:] for k in case if k >= len(ODD)]
        (run / "rollouts" / "1.jsonl").write_text("\n".join(good + odd) + "\n")
        with (run / "events.jsonl").open("wb") as file:
            for line in lines:
                file.write(checked := checked_line(line.encode(), check))
                check = check_in(checked)
        (run / "config.toml").write_text("when = 2020-01-01\nrate = inf\n")
        found = summarise(run)

        assert found["steps"]["ends"]["loss"][1:3] == [2.5, 1.5], lines
        assert found["rollouts"]["episodes"] >= 1
        assert "loss" in words(found)
        json.loads(json.dumps(found, allow_nan=False))
        html_report([found])
        if together:
            assert any("left out" in note for note in found["notes"])


def test_damage_is_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with EventLog(run / "events.jsonl") as log:
        log.write("start", step=0, steps=20)
        write_steps(log, 1, 5, 1, random.Random(0))
        log.write("comet", tail=1)
    with (run / "events.jsonl").open("ab") as file:
        file.write(b'not a record\n{"t":9,"kind":"step","step":6,"lo')
    (run / "stamp.json").write_text('{"format": 1}')
    os.utime(run / "events.jsonl", (0, 0))
    notes = " ".join(summarise(run)["notes"])

    assert summarise(run)["state"]["name"] == "crashed"
    assert summarise(run)["steps"]["rows"] == 5
    for said in ("cut off", "line 13", "format 1", "config.toml is missing", "comet"):
        assert said in notes


@pytest.mark.parametrize("name", ["stamp.json", "config.toml"])
def test_settings_that_were_changed_are_said_and_not_shown(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with EventLog(run / "events.jsonl") as log:
        write_steps(log, 1, 3, 1, random.Random(0))
    write_sealed_json(run / "stamp.json", {"format": 3, "seed": 7})
    (run / "config.toml").write_text(sealed_text("seed = 7", "settings"))
    assert summarise(run)["notes"] == []
    raw = (run / name).read_text()
    (run / name).write_text(raw.replace("7", "8", 1) if name == "stamp.json" else raw[:-20])
    found = summarise(run)

    assert [name in note for note in found["notes"]] == [True]
    assert found["stamp" if name == "stamp.json" else "config"] == {}


def test_what_is_no_run_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"no events\.jsonl"):
        summarise(tmp_path)
    with pytest.raises(MissingFile, match="no folder"):
        summarise(tmp_path / "nowhere")


def test_links_out_of_the_folder_are_not_followed(run_dir: Path, tmp_path: Path) -> None:
    root = tmp_path / "runs"
    root.mkdir()
    (root / "out").symlink_to(run_dir)
    inside = root / "deep" / "one"
    inside.mkdir(parents=True)
    (inside / "events.jsonl").write_text("")
    (root / "loop").symlink_to(root)
    assert set(find_runs(root)) == {"deep/one"}


def test_nothing_is_read_through_links_that_lead_out_and_secrets_are_hidden(
    run_dir: Path, tmp_path: Path
) -> None:
    """Every file and folder of a run, and every file in its folders, as a link or a pipe."""
    names = ["events.jsonl", "config.toml", "stamp.json", "plan", "tokens", "rollouts"]
    inner = ["plan/items.bin", "tokens/tokens.bin", "rollouts/000001.jsonl"]
    hidden = {"config.toml": "config", "stamp.json": "stamp", "events.jsonl": "steps"}
    for name in [*names, *inner]:
        run = tmp_path / name.replace("/", "-") / "run"
        shutil.copytree(run_dir, run)
        os.rename(run / name, run.parent / "moved")
        (run / name).symlink_to(run.parent / "moved")
        found, part = summarise(run), name.partition("/")[0]
        if part == "tokens":
            assert "leads out" in sample_text(run, 0)["error"]
            assert "text" in sample_text(run, 0, run.parent)
            continue
        assert [note for note in found["notes"] if "leads out of the folder" in note], name
        if name != inner[2]:
            assert not found[hidden.get(part, part)], name
        # The same link inside the folder that is shown is followed.
        reader = RunReader(run, inside=run.parent)
        while reader.update():
            pass
        assert reader.summary()["notes"] == [], name
    run = tmp_path / "pipes"
    shutil.copytree(run_dir, run)
    for name in ("config.toml", "stamp.json", "rollouts/000001.jsonl", ".lock"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert "no regular file" in " ".join(summarise(run)["notes"])
    (run / "config.toml").unlink()
    (run / "config.toml").write_text(
        'api_secret = "hunter2"\nhf_token = "hunter2"\ntoken_budget = 512\n'
        'endpoint = ["http://me:hunter2@host/v1"]\n[judge]\npassword = "hunter2"\n'
        'note = "uses sk-hunter2hunter2"\nmodel = "tiny"\n'
    )
    config = summarise(run)["config"]
    assert "hunter2" not in json.dumps(config)
    assert (config["token_budget"], config["judge"]["model"]) == (512, "tiny")


def test_every_command_and_flag_in_advice_exists() -> None:
    """Parsed from the source of the rules, so that none is left out because it was not given."""
    from batchwright.cli.app import app

    source = (Path(advice.__file__)).read_text("utf-8")
    commands = re.findall(r"`batchwright ([^`]+)`", source)
    assert commands
    flags: set[str] = set()

    def collect(one: Any) -> None:
        for name in one:
            if name.startswith("-"):
                continue
            collect(one[name])
        if one.default_command is not None:
            for argument in one.assemble_argument_collection():
                flags.update(argument.names)

    collect(app)
    for command in commands:
        found = app
        for word in command.split():
            assert word in found, f"batchwright {command} does not exist"
            found = found[word]
    for flag in re.findall(r"--[a-z][a-z-]+", source):
        assert flag in flags, f"no command has {flag}"
    # What looks like a command is marked as one, and so is checked here.
    groups = "|".join(name for name in app if not name.startswith("-"))
    bare = re.findall(rf"(?<!batchwright )\b(?:with|run|by) (?:{groups}) [a-z]+", source)
    assert bare == []


def test_advice_is_given_for_what_it_names_and_not_otherwise(run_dir: Path) -> None:
    found = summarise(run_dir)
    said = {one["panel"] for one in found["advice"]}
    assert "rollouts" in said  # a sixth of the turns is invalid
    assert "ranks" in said  # loads of 512 to 1,024 tokens
    better = json.loads(json.dumps(found))
    better["rollouts"]["invalid"] = 0
    better["steps"]["rank_busiest"] = [
        sum(loads) / 4
        for loads in zip(*(r["padded"] for r in found["steps"]["ranks"]), strict=True)
    ]
    failing = json.loads(json.dumps(found))
    failing["calls"]["totals"]["failed"] = failing["calls"]["totals"]["done"]
    for kind, said_of in (("unreachable", "server runs"), ("timeout", "deadline")):
        failing["calls"]["failed_by"] = {"empty": 1, kind: 9}
        assert any(said_of in one["do"] for one in advise(failing)), kind
    assert {one["panel"] for one in advise(better)} <= said - {"rollouts", "ranks"}


def test_a_report_is_one_file_without_foreign_addresses_and_text_stays_text(
    run_dir: Path,
) -> None:
    page = html_report([summarise(run_dir)])
    assert HOSTILE not in page
    assert "<img" not in page
    assert page.count("<script") == 2
    for scheme in ("http://", "https://"):
        assert page.replace("http://www.w3.org/2000/svg", "").count(scheme) == 0


@pytest.mark.slow
def test_the_plan_of_a_million_samples_makes_a_small_report(tmp_path: Path) -> None:
    from batchwright.batching import BatchingConfig, BatchPlanBuilder

    draw = np.random.default_rng(0)
    lengths = np.minimum(draw.lognormal(5, 1, 1_000_000).astype(np.int64) + 1, 2048)
    BatchPlanBuilder(lengths, BatchingConfig(layout="sorted")).build().save(tmp_path / "plan")
    summary = summarise_plan(tmp_path / "plan")
    assert sum(summary["plan"]["histogram"]["samples"]) == 1_000_000
    assert len(html_report([summary])) < 2_000_000


def test_a_notebook_shows_the_rows_of_a_plan_and_escapes_what_it_holds() -> None:
    from batchwright.batching import BatchingConfig, BatchPlanBuilder

    lengths = {f"<b>{k}": 10 + k % 50 for k in range(100)}
    plan = BatchPlanBuilder(lengths, BatchingConfig(layout="packed", token_budget=512)).build()
    shown = plan._repr_html_()
    first = [plan.batch(0, k) for k in range(plan.num_microbatches())][:24]
    assert "100 samples" in shown
    assert "<b>" not in shown
    blocks = sum(len(batch.items) for batch in first) + sum(batch.batch_size for batch in first)
    assert shown.count("<rect") == blocks


def asked(run_dir: Path, *requests: dict[str, Any], **view: Any) -> list[tuple[int, str, Any]]:
    """Status, body and headers of requests to a server over the folder of the run."""

    async def main() -> list[tuple[int, str, Any]]:
        from aiohttp import web

        listening = bound("127.0.0.1", 0, None)
        port = listening.getsockname()[1]
        app = View(run_dir.parent, hosts=frozenset({f"127.0.0.1:{port}"}), **view).app
        runner = web.AppRunner(app)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        answers = []
        jar = aiohttp.DummyCookieJar()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", cookie_jar=jar) as client:
            for request in requests:
                given = {"method": "GET", "allow_redirects": False, **request}
                async with client.request(given.pop("method"), given.pop("url"), **given) as answer:
                    body = "" if "event-stream" in answer.content_type else await answer.text()
                    answers.append((answer.status, body, answer.headers))
        await runner.cleanup()
        return answers

    return asyncio.run(main())


def test_the_server_reads_only_what_it_lists_and_says_so(run_dir: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    answers = asked(
        run_dir,
        {"url": "/"},
        {"url": "/api/runs"},
        {"url": "/api/events?run=stored"},
        {"url": "/api/sample?run=stored&item=0"},
        {"url": "/api/events?run=../runs/stored"},
        {"url": "/api/events?run=/etc"},
        {"url": "/page.js/../../../etc/passwd"},
        {"url": "/api/sample?run=stored&item=-1"},
        {"url": "/", "method": "POST"},
        {"url": "/", "headers": {"Host": "evil.example"}},
        {"url": "/", "headers": {"Host": "127.0.0.1.evil.example:80"}},
    )
    statuses = [status for status, _, _ in answers]
    assert statuses == [200, 200, 200, 200, 404, 404, 404, 400, 405, 403, 403]
    assert json.loads(answers[1][1]) == {"runs": [{"key": "stored", "name": "stored"}]}
    assert json.loads(answers[3][1])["id"] == "s0"
    for status, body, headers in answers:
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        if status >= 400:
            assert json.loads(body)["error"]
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_with_a_token_nothing_is_served_without_it(run_dir: Path) -> None:
    token = "k" * 20
    cookie = {"Cookie": f"batchwright_view={token}"}
    answers = asked(
        run_dir,
        {"url": "/"},
        {"url": "/api/runs"},
        {"url": "/?token=wrong"},
        {"url": f"/?token={token}"},
        {"url": "/api/runs", "headers": cookie},
        token=token,
    )
    assert [status for status, _, _ in answers] == [401, 401, 401, 303, 200]
    assert "HttpOnly" in answers[3][2]["Set-Cookie"]


def test_an_address_that_others_reach_needs_a_token_and_a_taken_port_is_named() -> None:
    with pytest.raises(ConfigError, match="not a loopback address"):
        bound("0.0.0.0", 0, None)
    with pytest.raises(ConfigError, match="at least 16 characters"):
        bound("0.0.0.0", 0, "short")
    with pytest.raises(ConfigError, match="IP address"):
        bound("example.org", 0, None)
    with bound("127.0.0.1", 0, None) as taken, pytest.raises(NoServer, match="in use"):
        bound("127.0.0.1", taken.getsockname()[1], None)


def test_report_writes_text_json_html_and_pictures(
    run_dir: Path, tmp_path: Path, run: Any, call: Any
) -> None:
    page, pictures = tmp_path / "run.html", tmp_path / "figures"
    said = run(f"report {run_dir} --html {page} --png {pictures}", tmp_path)
    assert said.code == 0, said.err
    assert "useful tokens" in said.out
    assert "advice:" in said.out
    assert page.read_text().startswith("<!doctype html>")
    assert {"loss.png", "packing.png", "calls_latency.png"} <= {p.name for p in pictures.iterdir()}
    data = call(f"report {run_dir} --format json", tmp_path).data
    assert data["steps"]["totals"]["tokens"] == column(records(run_dir, "step"), "tokens")
    own = tmp_path / "mine.txt"
    own.write_text("mine")
    (pictures / "packing.png").write_bytes(b"mine")
    refused = call(f"report {run_dir} --png {pictures}", tmp_path)
    assert (refused.code, "was not written by this command" in refused.err) == (1, True)
    assert (pictures / "packing.png").read_bytes() == b"mine"
    assert call(f"report {run_dir} --png {pictures} --force", tmp_path).code == 0
    assert call(f"report {run_dir} --png {pictures}", tmp_path).code == 0
    refused = call(f"report {run_dir} --png {own}", tmp_path)
    assert (refused.code, "is a file" in refused.err) == (1, True)
    (tmp_path / "events.jsonl").touch()
    nothing = call(f"report {tmp_path} --png {tmp_path}/none", tmp_path)
    assert (nothing.code, "nothing to draw" in nothing.out) == (0, True)
    assert not (tmp_path / "none").exists()
    assert max(map(len, words(summarise(run_dir), 72).splitlines())) <= 72
    refused = call(f"report {run_dir} --html {own}", tmp_path)
    assert refused.code == 1
    assert own.read_text() == "mine"


def test_records_and_settings_that_are_gone_are_said(tmp_path: Path) -> None:
    """An end cut off between two lines can be known by what a finished run leaves."""
    run = tmp_path / "run"
    with EventLog(run / "events.jsonl") as log:
        log.write("start", step=0, steps=2)
        log.write("step", step=1, loss=1.0)
        log.write("stop", step=2, why="done")
    (run / "config.toml").write_text("lr = 0.1\n")
    (run / "checkpoints").mkdir()
    write_sealed_json(run / "finished.json", {"step": 2})
    (run / ".lock").touch()
    before = (run / "events.jsonl").read_bytes()

    def notes() -> str:
        return " ".join(summarise(run)["notes"])

    assert "events.jsonl" not in notes()
    (run / "config.toml").write_text("")
    assert "config.toml is empty" in notes()
    (run / "events.jsonl").write_bytes(b"".join(before.splitlines(keepends=True)[:-1]))
    assert "events.jsonl has no record of how the run ended, though finished.json" in notes()
    (run / "events.jsonl").write_bytes(b"")
    assert "events.jsonl is empty, though the run has left finished.json" in notes()
    (run / "events.jsonl").unlink()
    (run / "events.jsonl").mkdir()
    (run / "stamp.json").write_text("{}")
    assert "events.jsonl cannot be read" in notes()


def test_a_changed_transcript_is_named_and_not_read_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    EventLog(run / "events.jsonl").close()
    (run / "rollouts").mkdir()
    rows = [{"env": n, "episode": 0, "step": 1, "reward": 1.0} for n in range(5)]
    whole = checked_lines(json.dumps(row).encode() for row in rows)
    file = run / "rollouts" / "000001.jsonl"
    file.write_bytes(whole)
    assert summarise(run)["rollouts"]["mean_reward"] == 1.0
    at = whole.index(b"1.0", whole.index(b'"env": 3'))
    file.write_bytes(whole[:at] + b"9" + whole[at + 1 :])
    found = summarise(run)
    assert found["rollouts"]["turns"] == 3
    assert "000001.jsonl, line 4: this line of the transcript is not as" in " ".join(found["notes"])


def test_every_error_of_reading_a_run_is_ours(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "events.jsonl").write_bytes(b"\xff\xfe\n{}\n[]\nnull\n" + b"x" * 100)
    (run / "stamp.json").write_text("[1]")
    (run / "config.toml").write_text("= =")
    (run / "plan").mkdir()
    (run / "rollouts").mkdir()
    (run / "rollouts" / "000001.jsonl").write_text('{"env": 1}\nnull\n')
    try:
        found = summarise(run)
    except BatchwrightError as error:
        pytest.fail(f"a damaged run is shown, not refused: {error}")
    assert len(found["notes"]) >= 4
