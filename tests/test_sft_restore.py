"""A run whose files are damaged or gone is resumed with the same steps, or says what to do."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchwright.batching import BatchingConfig, BatchPlanBuilder
from batchwright.data.measure import build_lengths
from batchwright.errors import BadFile
from batchwright.events import read_events
from batchwright.train.sft.config import SftConfig
from batchwright.train.sft.loop import train_sft

pytestmark = pytest.mark.training

WORDS = ("otter", "tiger", "camel", "hyena", "koala", "lemur", "mouse", "sheep")
PARTS = ("plan", "tokens", "eval_plan", "eval_tokens")


def written(path: Path, count: int) -> str:
    rows = [
        {"id": f"{path.stem}{n}", "prompt": "count", "completion": f" {WORDS[n % 8]}" * (1 + n % 5)}
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def a_mixture(folder: Path) -> dict[str, Any]:
    more = written(folder / "more.jsonl", 6)
    return {"data": (f"{folder}/rows.jsonl=0.7", f"{more}=0.3"), "epochs": 2}


def planned_before(folder: Path) -> dict[str, Any]:
    lengths = build_lengths(folder / "rows.jsonl", "bytes", folder / "lengths.jsonl").cache
    config = BatchingConfig(layout="packed", token_budget=64, pack_max_length=64)
    BatchPlanBuilder(lengths, config).build(2).save(folder / "planned")
    return {"batchplan": folder / "planned", "token_budget": 4096}


RUNS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "held out data": lambda folder: {"eval_data": written(folder / "held.jsonl", 4)},
    "held out share": lambda folder: {"eval_fraction": 0.3, "epochs": 2},
    "mixture": a_mixture,
    "planned before": planned_before,
}


def gone(path: Path) -> None:
    shutil.rmtree(path)


def unreadable(path: Path) -> None:
    for file in path.rglob("manifest.json"):
        file.unlink()
        file.write_text("{")


def changed(path: Path) -> None:
    """A byte of each array, in place: where files are shared, of the shared one too."""
    for file in path.rglob("*.bin"):
        raw = bytearray(file.read_bytes())
        if raw:
            raw[len(raw) // 2] ^= 1
            file.write_bytes(raw)


def losses(run: Path) -> dict[int, float]:
    events = read_events(run / "events.jsonl")
    return {e.fields["step"]: e.fields["loss"] for e in events if e.kind == "step"}


@pytest.fixture
def stopped(tmp_path: Path) -> Callable[[str], tuple[SftConfig, dict[int, float]]]:
    """A run of some kind that was stopped, and the losses of one that was not."""

    def make(kind: str) -> tuple[SftConfig, dict[int, float]]:
        data = written(tmp_path / "rows.jsonl", 12)
        given: dict[str, Any] = {"data": data, "token_budget": 64, **RUNS[kind](tmp_path)}
        config = SftConfig(model="tiny", lr=1e-3, run_dir=tmp_path / "whole", **given)
        train_sft(config)
        part = dataclasses.replace(config, run_dir=tmp_path / "run", stop_after=2)
        train_sft(part)
        return dataclasses.replace(part, stop_after=0), losses(config.run_dir)

    return make


def resumed(config: SftConfig) -> None:
    """Resume, and do what the sentence says if it says something."""
    for _ in range(8):
        said = ""
        try:
            assert train_sft(config, resume=True).finished
        except BadFile as error:
            said = str(error)
        if not said:
            return
        found = re.search(r"; remove (\S+) and resume with --resume", said)
        assert found, said
        shutil.rmtree(found[1])
    raise AssertionError("what was removed was made again, and damaged still")


@pytest.mark.parametrize("how", [gone, unreadable, changed])
@pytest.mark.parametrize("kind", RUNS)
def test_what_is_damaged_or_gone_is_made_again_and_the_steps_are_the_same(
    stopped: Any, kind: str, how: Callable[[Path], None]
) -> None:
    config, whole = stopped(kind)
    there = [part for part in PARTS if (config.run_dir / part).is_dir()]
    for part in there:
        kept = config.run_dir.with_name("kept")
        shutil.copytree(config.run_dir, kept)
        how(config.run_dir / part)
        resumed(config)
        assert losses(config.run_dir) == whole, part
        shutil.rmtree(config.run_dir)
        kept.rename(config.run_dir)
    for part in there:
        how(config.run_dir / part)
    resumed(config)

    assert losses(config.run_dir) == whole


@pytest.mark.parametrize("part", ["plan", "tokens"])
def test_it_is_not_made_again_from_data_that_have_changed(stopped: Any, part: str) -> None:
    config, _ = stopped("held out share")
    data = Path(config.data[0])
    gone(config.run_dir / part)
    before = data.read_text()
    data.write_text(before.replace("otter", "outer"))
    kept = sorted(path.name for path in config.run_dir.iterdir())

    with pytest.raises(
        BadFile, match=r"cannot be made again: the run was trained on plan \w+, the"
    ):
        train_sft(config, resume=True)
    data.unlink()
    with pytest.raises(BadFile, match=r"cannot be made again: no data at .*rows\.jsonl"):
        train_sft(config, resume=True)
    assert sorted(path.name for path in config.run_dir.iterdir()) == kept

    data.write_text(before)
    assert train_sft(config, resume=True).finished


def test_tokens_are_made_again_where_the_plan_is_left_in_the_run_alone(stopped: Any) -> None:
    config, whole = stopped("planned before")
    gone(Path(str(config.batchplan)))
    gone(config.run_dir / "tokens")

    assert train_sft(config, resume=True).finished
    assert losses(config.run_dir) == whole


def test_a_run_without_a_whole_checkpoint_says_how_to_start_over_and_does(stopped: Any) -> None:
    config, whole = stopped("held out share")
    unreadable(config.run_dir / "checkpoints")

    with pytest.raises(BadFile, match=r"no checkpoint in .* can be used") as caught:
        train_sft(config, resume=True)
    found = re.search(r"or remove (\S+) and resume, which starts the run over", str(caught.value))
    assert found, caught.value
    shutil.rmtree(found[1])

    assert train_sft(config, resume=True).finished
    assert losses(config.run_dir) == whole
