"""One resume rule for all trainers: a flag that is given is heard, or refused by its name."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from batchwright.checkpoint import latest
from batchwright.errors import BadFile, ConfigError
from batchwright.events import read_events
from batchwright.logic.loaders import shipped_graph
from batchwright.sealed import sealed_text
from batchwright.train.kge.config import KgeConfig
from batchwright.train.prover.config import ProverConfig
from batchwright.train.query_mutator.config import QueryMutatorConfig
from batchwright.train.run import Run, RunConfig
from batchwright.train.sft.config import SftConfig

COMMAND = Path(sys.executable).parent / "batchwright"
FAMILY = shipped_graph()


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A trainer, a small run of it, and what its settings need to go together."""

    config: type[RunConfig]
    line: str
    """A run whose changeable settings are not at their defaults."""
    other: str
    """Each changeable setting at a third value."""
    fixed: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Settings of a run that exclude each other, where any value will not do."""


TRAINERS = {
    "sft": Trainer(
        SftConfig,
        "--model tiny --data train.jsonl --token-budget 80 --epochs 2 --max-steps 3 "
        "--eval-data train.jsonl "
        "--save-every 2 --save-minutes 5 --eval-every 3 --keep 3 --track tensorboard",
        "--epochs 3 --max-steps 4 --save-every 1 --save-minutes 7 --eval-every 1 --keep 1 "
        "--stop-after 1 "
        "--track tensorboard --track tensorboard "
        "--gym-host h --gym-port 1 --gym-transport tcp --gym-connections 2",
        {"layout": "packed", "batchplan": None, "eval_fraction": 0.0, "fsdp": False},
    ),
    "kge": Trainer(
        KgeConfig,
        f"--data {FAMILY} --rank 4 --batch-size 512 --epochs 2 --save-every 1 "
        "--save-minutes 5 --threads 2",
        "--epochs 3 --save-every 2 --save-minutes 7 --threads 3 --stop-after 1",
        {"model": "distmult"},
    ),
    "prover": Trainer(
        ProverConfig,
        f"--data {FAMILY} --rules {FAMILY}/rules.txt --n-envs 16 --clone-updates 2 "
        f"--ppo-steps 0 --passes 1 --eval-triples 10 --save-every 2 --save-minutes 5",
        "--save-every 3 --save-minutes 7 --stop-after 1",
        {
            "mine": False,
            "policy": "rules",
            "constants": 0,
            "start": "alike",
            "shared": False,
            "linked": "auto",
        },
    ),
    "query-mutator": Trainer(
        QueryMutatorConfig,
        "--target-model sim --num-processes 4 --num-steps 2 --num-env-steps 24 --no-batching "
        "--batch-size 4 --no-overlap --deadline 60 --error-budget 0.4 --save-interval 2 "
        "--save-minutes 5 --log-interval 2 --track tensorboard",
        "--track tensorboard --track tensorboard "
        "--use-batching --batch-size 5 --overlap --deadline 61 --error-budget 0.5 "
        "--save-interval 3 --save-minutes 7 --log-interval 3 --stop-after 1",
    ),
}


def another(hint: Any, *taken: Any) -> Any:
    """A value of this type that is none of those taken, or None if there is no other."""
    options: Any = ()
    kinds = {kind for kind in get_args(hint) if kind in (int, float, bool)}
    if kinds and "auto" in str(hint):
        # A number, or `auto`.
        (hint,) = kinds
        taken = tuple(value if value != "auto" else 0 for value in taken)
    if get_origin(hint) is Literal:
        options = get_args(hint)
    elif hint is bool:
        options = (True, False)
    elif hint is int:
        options = (max(taken) + 1,)
    elif hint in (float, float | None):
        options = (0.5, 0.25, 0.75)
    elif hint in (str, str | None):
        # Also a name of a function, which is what some of them must be.
        options = ("7.py:f", "8.py:f", "9.py:f")
    elif hint in (Path, Path | None):
        options = (Path("a"), Path("b"))
    elif hint == tuple[str, ...]:
        options = (("a",), ("b",))
    return next((option for option in options if option not in taken), None)


def typed(config: type[RunConfig], name: str, value: Any) -> str:
    """A setting as it is typed; bools and lists have a word of their own for nothing."""
    flag = config.flag(name)
    if isinstance(value, bool):
        return flag if value else "--no-" + flag.removeprefix("--").removeprefix("use-")
    if isinstance(value, tuple):
        return " ".join(f"{flag} {item}" for item in value) or "--empty-" + flag[2:]
    return f"{flag}={value}"


def defaults(config: type[RunConfig]) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(config)}


def unusual(trainer: Trainer, folder: Path) -> RunConfig:
    """Settings of which nearly none is at its default."""
    config, hints = trainer.config, get_type_hints(trainer.config)
    values = {name: another(hints[name], value) for name, value in defaults(config).items()}
    return config(**values | trainer.fixed | {config.FOLDER: folder})


FIXED = [
    (name, setting)
    for name, trainer in TRAINERS.items()
    for setting in defaults(trainer.config)
    if setting not in trainer.config.CHANGEABLE
]


@pytest.mark.parametrize(("name", "setting"), FIXED)
def test_a_flag_that_may_not_change_is_refused_by_name_at_its_default_and_at_any_value(
    name: str, setting: str, tmp_path: Path, call: Callable[..., Any]
) -> None:
    trainer = TRAINERS[name]
    config, hint = trainer.config, get_type_hints(trainer.config)[setting]
    saved = unusual(trainer, tmp_path / "run")
    with Run(saved) as run:
        run.start()
    own, default = getattr(saved, setting), defaults(config)[setting]
    if setting == config.FOLDER:
        own = Path("run")
    changes = [
        value for value in (default, another(hint, own, default)) if value not in (None, own)
    ]
    assert changes
    for value in changes:
        outcome = call(f"train {name} --resume run {typed(config, setting, value)}", tmp_path)

        assert outcome.code == 1, outcome
        assert outcome.err.count("\n") == 1
        assert f"a resumed run keeps its settings: {config.flag(setting)} is " in outcome.err
        for changeable in config.CHANGEABLE:
            assert config.flag(changeable) in outcome.err
        assert f"start a new run in another {config.flag(config.FOLDER)}" in outcome.err


@pytest.fixture(scope="module")
def made() -> dict[str, Path]:
    """Finished runs by their trainers, each made when it is first asked for."""
    return {}


@pytest.fixture
def finished(
    made: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, call: Callable[..., Any]
) -> Callable[[str], Path]:
    """The folder that holds a run of a trainer, stopped once and resumed to its end."""

    def finished(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            rows = [{"prompt": "count", "completion": " otters" * (n + 1)} for n in range(9)]
            (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            trainer = TRAINERS[name]
            place = trainer.config.flag(trainer.config.FOLDER)
            line = f"train {name} {trainer.line} {place} run --stop-after 1 --quiet"
            end = f"stopped and saved; resume with: batchwright train {name} --resume run"
            stopped = call(line, folder)
            assert stopped.code == 0, stopped.err
            assert stopped.out.splitlines()[-1] == end
            done = call(f"train {name} --resume run --quiet --format json", folder)
            assert done.data["finished"]
            made[name] = folder
        return made[name]

    return finished


def resumed(folder: Path) -> dict[str, Any]:
    """What the last resume recorded."""
    events = read_events(folder / "run" / "events.jsonl")
    return dict([event.fields for event in events if event.kind == "resume"][-1])


@pytest.mark.parametrize("name", TRAINERS)
def test_flags_given_as_they_were_saved_change_nothing(
    name: str, finished: Callable[[str], Path], call: Callable[..., Any]
) -> None:
    folder = finished(name)
    config = TRAINERS[name].config
    saved = dataclasses.asdict(config.of_run(folder / "run"))
    saved[config.FOLDER] = "run"
    same = [typed(config, n, v) for n, v in saved.items() if v not in (None, "")]
    outcome = call(f"train {name} --resume run --quiet {' '.join(same)}", folder)

    assert outcome.code == 0, outcome.err
    assert resumed(folder)["changed"] == {}
    assert resumed(folder)["passed_over"] == []


@pytest.mark.parametrize("name", TRAINERS)
def test_every_flag_that_may_change_is_heard_at_its_default(
    name: str, finished: Callable[[str], Path], call: Callable[..., Any], tmp_path: Path
) -> None:
    config = TRAINERS[name].config
    folder = shutil.copytree(finished(name), tmp_path / "copy")
    saved, default = config.of_run(folder / "run"), defaults(config)
    flags = [typed(config, setting, default[setting]) for setting in config.CHANGEABLE]
    outcome = call(f"train {name} --resume run --quiet {' '.join(flags)}", folder)

    assert outcome.code == 0, outcome.err
    expected = {n: default[n] for n in config.CHANGEABLE if getattr(saved, n) != default[n]}
    # Where the gym is may change in an online run only, which this one is not.
    usual = [n for n in config.CHANGEABLE if not n.startswith("gym_")]
    assert len(expected) >= len(usual) - 2
    assert resumed(folder)["changed"] == json.loads(json.dumps(expected))


@pytest.mark.parametrize("name", TRAINERS)
def test_every_flag_that_may_change_is_heard_at_another_value(
    name: str, finished: Callable[[str], Path], call: Callable[..., Any], tmp_path: Path
) -> None:
    trainer = TRAINERS[name]
    folder = shutil.copytree(finished(name), tmp_path / "copy")
    outcome = call(f"train {name} --resume run --quiet {trainer.other}", folder)

    assert outcome.code == 0, outcome.err
    # One rank cannot shard; that is heard as well.
    assert {*resumed(folder)["changed"], "fsdp"} == {*trainer.config.CHANGEABLE, "fsdp"}
    if name == "sft":
        outcome = call("train sft --resume run --fsdp", folder)
        assert "--fsdp needs at least 2 ranks" in outcome.err


@pytest.mark.parametrize("name", TRAINERS)
def test_a_setting_of_another_type_in_the_file_of_a_run_is_named(
    name: str, tmp_path: Path, call: Callable[..., Any]
) -> None:
    config = TRAINERS[name].config
    with Run(unusual(TRAINERS[name], tmp_path / "run")) as run:
        run.start()
    path = tmp_path / "run" / "config.toml"
    whole = path.read_text().splitlines()[1:-1]

    def write(number: int, line: str) -> None:
        """As a program that is not ours could have written and sealed it."""
        lines = [*whole[:number], line, *whole[number + 1 :]]
        path.write_text(sealed_text("\n".join(lines), "settings of this run"))

    for i, line in enumerate(whole):
        setting, value = line.split(" = ", 1)
        write(i, f"{setting} = {{}}")
        with pytest.raises(BadFile, match=f"config.toml: {setting!r} is .*; correct it"):
            config.of_run(tmp_path / "run")
        if value.isdigit():
            write(i, f'{setting} = "{value}"')
            said = call(f"train {name} --resume run", tmp_path)
            assert (said.code, said.err.count("\n")) == (1, 1)
            assert f"config.toml: {setting!r} is {value}" in said.err


def test_the_same_file_by_another_path_is_no_change(
    finished: Callable[[str], Path], call: Callable[..., Any]
) -> None:
    folder = finished("sft")
    for path in ("./train.jsonl", str(folder / "train.jsonl"), "run/../train.jsonl"):
        outcome = call(f"train sft --resume run --quiet --data {path}", folder)
        assert outcome.code == 0, outcome.err
        assert resumed(folder)["changed"] == {}
    (folder / "copy.jsonl").write_bytes((folder / "train.jsonl").read_bytes())
    outcome = call("train sft --resume run --data copy.jsonl", folder)
    assert "--data is train.jsonl, got copy.jsonl" in outcome.err


@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_is_not_written_over(
    name: str, finished: Callable[[str], Path], call: Callable[..., Any]
) -> None:
    trainer = TRAINERS[name]
    flag = trainer.config.flag(trainer.config.FOLDER)
    outcome = call(f"train {name} {trainer.line} {flag} run --quiet", finished(name))

    sentence = (
        f"run already holds a run; resume it with --resume run or choose another {flag}, "
        f"such as run-{{n}} for numbered runs"
    )
    assert (outcome.code, outcome.err) == (1, f"error: {sentence}\n")


@pytest.mark.parametrize("name", TRAINERS)
def test_a_run_of_an_older_version_is_refused_with_a_sentence_that_says_so(
    name: str, finished: Callable[[str], Path], call: Callable[..., Any], tmp_path: Path
) -> None:
    folder = shutil.copytree(finished(name), tmp_path / "copy")
    stamp = json.loads((folder / "run" / "stamp.json").read_text())
    del stamp["format"]
    (folder / "run" / "stamp.json").write_text(json.dumps(stamp))
    lines = [f"train {name} --resume run"]
    if name == "query-mutator":
        lines += ["train query-mutator --replay run", "evaluate query-mutator run"]
    if name == "prover":
        shutil.rmtree(folder / "run" / "model")
        lines.append(f"evaluate prover --data {FAMILY} --mode rl --prover run")
    for line in lines:
        outcome = call(line, folder)

        assert outcome.code == 1
        assert "the run run has format 1" in outcome.err
        assert "this version reads format 3" in outcome.err


def test_a_replayed_run_keeps_its_settings_too(
    finished: Callable[[str], Path], call: Callable[..., Any]
) -> None:
    outcome = call(
        "train query-mutator --replay run --lr 0.003 --seed 9", finished("query-mutator")
    )

    assert outcome.code == 1
    assert "a replayed run keeps its settings: --seed is 42, got 9; only " in outcome.err


def test_the_same_rule_holds_in_python(tmp_path: Path) -> None:
    config = KgeConfig(data=str(FAMILY), rank=4, run_dir=tmp_path / "run")
    with Run(config) as run:
        run.start()

    with pytest.raises(ConfigError, match="--rank is 4, got 5, --seed is 0, got 1; only --epochs"):
        Run(dataclasses.replace(config, rank=5, seed=1, epochs=9), resume=True)
    Run(dataclasses.replace(config, epochs=9), resume=True)
    with pytest.raises(ConfigError, match="already holds a run"):
        Run(config)


@pytest.mark.slow
def test_ctrl_c_saves_and_kill_9_loses_little_and_the_embedding_is_the_same_to_the_bit(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    line = f"train kge --data {FAMILY} --rank 64 --epochs 25 --batch-size 64 --save-every 1 --quiet"
    assert call(f"{line} --run-dir whole", tmp_path).code == 0
    checkpoints = tmp_path / "run" / "checkpoints"

    def newest() -> str:
        return max((path.name for path in checkpoints.glob("step_*")), default="")

    for ending, words in (
        (signal.SIGINT, f"{line} --run-dir run"),
        (signal.SIGKILL, "train kge --resume run -q"),
    ):
        before, until = newest(), time.monotonic() + 600
        with subprocess.Popen(
            [COMMAND, *words.split()],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            while newest() <= before:
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.005)
            process.send_signal(ending)
            out, _ = process.communicate(timeout=120)
        if ending == signal.SIGINT:
            assert process.returncode == 0
            assert "stopped and saved; resume with: batchwright train kge --resume run" in out
        else:
            assert process.returncode == -signal.SIGKILL
    outcome = call("train kge --resume run --quiet --format json", tmp_path)

    assert outcome.data["finished"]
    ends = [latest(tmp_path / run / "checkpoints") for run in ("whole", "run")]
    one, other = (plain(end.state) for end in ends if end is not None)
    assert one == other


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state
