"""`train query-mutator` and `evaluate query-mutator` through the installed command."""

import http.server
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchwright.calls.simulator import Simulator
from batchwright.envs.questions import load_questions
from batchwright.events import read_events
from batchwright.models import registry as models

EXAMPLE = Path(__file__).parents[1] / "examples" / "query_mutation" / "train_query_mutator.py"
SMALL = "--target-model sim --num-processes 8 --num-steps 4 --num-env-steps 96"
ONE_CORE = {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the flags in SMALL; to read only."""
    from batchwright.train.query_mutator.config import QueryMutatorConfig
    from batchwright.train.query_mutator.loop import train_query_mutator

    run = tmp_path_factory.mktemp("trained") / "run"
    train_query_mutator(
        QueryMutatorConfig(
            target_model="sim", num_processes=8, num_steps=4, num_env_steps=96, save_dir=run
        )
    )
    return run


def numbers(run: Path) -> list[dict[str, Any]]:
    """The metrics of every update, except those that depend on the clock."""
    idle = ("SPS", "_s")
    return [
        {k: v for k, v in event.fields.items() if not k.endswith(idle)}
        for event in read_events(run / "events.jsonl")
        if event.kind == "update"
    ]


def turns(run: Path) -> list[Any]:
    files = sorted((run / "rollouts").iterdir())
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


DOCUMENT = [
    "",
    "--num-processes 16",
    "--num-processes 16 --use-batching",
    "--num-processes 16 --no-batching",
    "--num-processes 16 --num-steps 32 --ppo-epoch 4 --num-mini-batch 4 --use-batching",
    "--num-processes 16 --num-env-steps 1000 --no-batching",
    "--num-processes 16 --num-env-steps 1000 --use-batching",
    "--batch-size 16",
    "--batch-size 4",
    "--batch-size 2",
    "--num-processes 16 --batch-size 8 --num-env-steps 10000 --use-batching",
    "--num-processes 8 --batch-size 4",
    "--num-processes 16 --batch-size 8",
    "--num-processes 32 --batch-size 16",
    "--no-batching",
    "--num-processes 8 --batch-size 4 --num-env-steps 500",
    "--num-processes 8 --batch-size 8 --num-env-steps 500",
    "--num-processes 8 --batch-size 16 --num-env-steps 500",
    "--mutator-model qwen2.5:3b",
]
"""What the documents write after `python train_query_mutator.py`, in their order."""


@pytest.mark.parametrize("line", DOCUMENT)
def test_the_documents_flags_are_understood(
    line: str, tmp_path: Path, call: Callable[..., Any]
) -> None:
    """With a model that is not there they end in one sentence, which is past all flags."""
    outcome = call(f"train query-mutator {line} --target-model local:nowhere -q", tmp_path)
    assert outcome.code == 1
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1


@pytest.mark.training
@pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")
def test_the_example_trains_on_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"{SMALL} --no-batching --batch-size 8 --save-dir run --format json"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *line.split()])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert not end.value.code
    result = json.loads(capsys.readouterr().out)
    assert result["finished"]
    assert result["steps"] == 96
    assert result["invalid_steps"] == 0
    assert len(numbers(tmp_path / "run")) == 3
    assert len(turns(tmp_path / "run")) == 96
    assert (tmp_path / "run" / "stamp.json").is_file()


@pytest.mark.training
def test_a_command_typed_again_starts_the_next_numbered_run_with_progress_and_tracker(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    line = (
        "train query-mutator --target-model sim --num-processes 4 --num-steps 2 "
        "--num-env-steps 16 --track tensorboard"
    )
    for folder in ("", " --save-dir own/run-{n}"):
        first, second = call(line + folder, tmp_path), call(line + folder, tmp_path)
        assert (first.code, second.code) == (0, 0), first.err + second.err
        assert first.err.startswith("training, steps: 0 of 16, opening sim\n")
    for run in ("runs/query-mutator-1", "runs/query-mutator-2", "own/run-1", "own/run-2"):
        assert turns(tmp_path / run) == turns(tmp_path / "runs/query-mutator-1") != []
        assert list((tmp_path / run / "tensorboard").iterdir())


@pytest.mark.training
def test_trackers_get_the_metrics_of_every_update_and_cannot_end_a_run(tmp_path: Path) -> None:
    from batchwright.train.query_mutator.config import QueryMutatorConfig
    from batchwright.train.query_mutator.loop import train_query_mutator

    class Tracker:
        def __init__(self, fails: bool) -> None:
            self.fails, self.calls = fails, list[Any]()

        def start(self, config: Any) -> None:
            self.calls.append(config["target_model"])

        def log(self, step: int, metrics: Any) -> None:
            self.calls.append({"update": step, **metrics})
            if self.fails:
                raise OSError("no route")

        def finish(self) -> None:
            self.calls.append("finish")

    good, bad = Tracker(False), Tracker(True)
    config = QueryMutatorConfig(
        target_model="sim",
        num_processes=4,
        num_steps=2,
        num_env_steps=16,
        save_dir=tmp_path / "run",
    )
    seen: list[tuple[int, int, str]] = []
    result = train_query_mutator(
        config, trackers=lambda folder: [good, bad], progress=lambda *given: seen.append(given)
    )
    updates = [
        dict(e.fields) for e in read_events(tmp_path / "run/events.jsonl") if e.kind == "update"
    ]
    assert good.calls == bad.calls == ["sim", *updates, "finish"]
    assert len(updates) == result.tracker_failures == 2
    assert seen[0] == (0, 16, "0 calls")
    assert seen == sorted(seen, key=lambda row: row[0])
    assert (seen[-1][0], seen[-1][1]) == (16, 16)


@pytest.mark.training
def test_a_run_killed_anywhere_resumes_to_the_same_numbers(
    tmp_path: Path, call: Callable[..., Any], environ: dict[str, str], trained: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), *f"{SMALL} --save-interval 1 --save-dir run".split()],
        cwd=tmp_path,
        env={**environ, **ONE_CORE},
        stdout=subprocess.DEVNULL,
    )
    checkpoints = tmp_path / "run" / "checkpoints"
    for _ in range(60_000):
        if process.poll() is not None or (checkpoints.is_dir() and any(checkpoints.iterdir())):
            break
        time.sleep(0.01)
    # It may be finished already, if this process had to wait for its turn.
    process.kill()
    assert process.wait() in (0, -9)
    outcome = call("train query-mutator --resume run --quiet --format json", tmp_path)
    assert outcome.code == 0, outcome.err
    assert outcome.data["finished"]
    last = {row["update"]: row for row in numbers(tmp_path / "run")}
    assert [last[n] for n in sorted(last)] == numbers(trained)
    assert turns(tmp_path / "run") == turns(trained)


@pytest.mark.training
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_heard_between_the_steps_of_a_rollout_and_costs_no_number(
    which: signal.Signals, overlap: bool, tmp_path: Path, trained: Path
) -> None:
    from batchwright.train.query_mutator.config import QueryMutatorConfig
    from batchwright.train.query_mutator.loop import train_query_mutator

    config = QueryMutatorConfig(
        target_model="sim",
        num_processes=8,
        num_steps=4,
        num_env_steps=96,
        overlap=overlap,
        save_dir=tmp_path / "run",
    )
    steps: list[int] = []

    def at(step: int) -> Callable[[int, int, str], None]:
        def progress(done: int, total: int, text: str) -> None:
            steps.append(done)
            if done == step:
                os.kill(os.getpid(), which)

        return progress

    # In the first rollout of the run, in a later one, and in the first one of a resumed run.
    for n, (step, updates) in enumerate([(9, 0), (41, 1), (70, 2)]):
        result = train_query_mutator(config, resume=n > 0, progress=at(step))
        name = "Ctrl-C" if which == signal.SIGINT else which.name
        assert (result.updates, result.finished, result.stopped_by) == (updates, False, name)
        assert max(steps) < 32 * (updates + 1), "the rollout was not waited for"
    result = train_query_mutator(config, resume=True)
    assert result.finished
    last = {row["update"]: row for row in numbers(tmp_path / "run")}
    assert [last[n] for n in sorted(last)] == numbers(trained)
    assert turns(tmp_path / "run") == turns(trained)
    assert result.invalid_steps == sum(t["gain"] is None for t in turns(trained))


@pytest.mark.training
def test_waiting_for_the_slowest_environment_changes_no_number(
    tmp_path: Path, call: Callable[..., Any], trained: Path
) -> None:
    assert (
        call(f"train query-mutator {SMALL} --quiet --no-overlap --save-dir run", tmp_path).code == 0
    )

    assert numbers(tmp_path / "run") == numbers(trained) != []
    assert turns(tmp_path / "run") == turns(trained)


@pytest.fixture(scope="module")
def server() -> Any:
    """A simulated server with the shipped questions, some of whose calls fail."""
    questions = load_questions("shipped", "all")
    faults = {"bad_json": 0.05, "empty": 0.05}
    with Simulator(questions=questions, latency_s=0.001, faults=faults).running() as url:
        yield url


@pytest.mark.training
def test_a_finished_run_is_replayed_with_no_server_to_the_same_numbers(
    tmp_path: Path, call: Callable[..., Any], server: Any
) -> None:
    models = f"--target-model {server}/v1#sim-qa --mutator-model {server}/v1#sim-mutator"
    flags = "--num-processes 8 --num-steps 4 --num-env-steps 96 --error-budget 0.9 --batch-size 8"
    line = f"train query-mutator {models} {flags} --save-dir run --quiet --format json"
    live = call(line, tmp_path)
    assert live.code == 0, live.err
    before = server.stats()["received"]
    again = call("train query-mutator --replay run --quiet --format json", tmp_path)
    assert again.code == 0, again.err

    assert server.stats()["received"] == before
    assert numbers(tmp_path / "run-replay-1") == numbers(tmp_path / "run")
    assert turns(tmp_path / "run-replay-1") == turns(tmp_path / "run")
    assert again.data["invalid_steps"] == live.data["invalid_steps"] > 0
    for run, said in (("run", live.data), ("run-replay-1", again.data)):
        reasons = [turn["why"] for turn in turns(tmp_path / run) if turn["gain"] is None]
        assert said["reasons"] == dict(Counter(reasons))
        logged = sum(update["charts/invalid_steps"] for update in numbers(tmp_path / run))
        assert said["invalid_steps"] == len(reasons) == logged
        assert "" not in reasons
        assert "guard" not in reasons


def test_a_dead_server_stops_the_run_with_one_sentence(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    outcome = call(
        "train query-mutator --target-model http://127.0.0.1:9/v1#m --deadline 1 --quiet "
        "--num-processes 4",
        tmp_path,
    )
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "127.0.0.1:9" in outcome.err


@pytest.mark.training
def test_a_name_of_ollama_means_the_server_of_ollama(
    tmp_path: Path, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    models = ("qwen2.5:3b",)
    with Simulator(questions=load_questions("shipped", "all"), models=models).running() as url:
        monkeypatch.setenv("OLLAMA_HOST", url.removeprefix("http://"))
        flags = "--num-processes 4 --num-steps 2 --num-env-steps 8 --quiet"
        done = call(
            f"train query-mutator --target-model sim-qa --mutator-model qwen2.5:3b {flags}",
            tmp_path,
        )
        assert done.code == 0, done.err
        assert url.stats()["received"] > 0
        other = call("train query-mutator --target-model qwen2.5:7b --quiet", tmp_path)
    assert other.code == 1
    assert "qwen2.5:3b; ollama pull qwen2.5:7b gets it" in other.err
    gone = call("train query-mutator --target-model qwen2.5:3b --quiet", tmp_path)
    assert gone.code == 1
    assert gone.err.count("\n") == 1
    assert "cannot connect to ollama://" in gone.err
    assert "ollama serve starts it, and OLLAMA_HOST holds another address" in gone.err


def test_a_server_that_is_no_ollama_is_told_apart_before_a_step_is_made(
    tmp_path: Path, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        do_POST = do_GET

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        monkeypatch.setenv("OLLAMA_HOST", f"127.0.0.1:{other.server_port}")
        outcome = call("train query-mutator --mutator-model qwen2.5:3b --quiet", tmp_path)
        other.shutdown()
    assert outcome.code == 1
    assert outcome.err.count("\n") == 1
    assert "is no Ollama: it has no /api/tags" in outcome.err
    assert "http://HOST:PORT/v1" in outcome.err
    assert not list(tmp_path.glob("runs/*/config.toml")), "it has not begun"


def test_an_error_about_a_model_name_lists_the_models_there_are(
    tmp_path: Path, call: Callable[..., Any], server: Any
) -> None:
    for model in (f"{server}/v1#gpt-none", f"ollama+{server}#none"):
        outcome = call(f"train query-mutator --target-model {model} --quiet", tmp_path)
        assert outcome.code == 1
        assert "it has sim" in outcome.err
        assert outcome.err.count("\n") == 1


BAD = {
    "no model": ("--target-model http://127.0.0.1:9/v1", "URL#NAME"),
    "missing data": ("--target-model sim --dataset none.jsonl", "none.jsonl"),
    "no answers": ("--target-model sim --dataset bare.jsonl", "no answer"),
    "no train split": ("--target-model sim --dataset held.jsonl", "no question in its train split"),
    "width": ("--target-model sim --batch-size many", "--batch-size must be"),
    "none at once": (
        "--target-model sim --num-processes 0",
        "--num-processes must be at least 1, got 0",
    ),
    "less than a rollout": (
        "--target-model sim --num-env-steps 10",
        "--num-env-steps must be at least 128, one rollout of",
    ),
    "tracker": ("--target-model sim --track comet", "--track must be one of tensorboard, wandb"),
    "gamma": ("--target-model sim --gamma 2", "--gamma must be from 0 to 1, got 2"),
    "operators": ("--target-model sim --operators none.toml", "none.toml"),
    "no run": ("--resume nowhere", "nowhere"),
    "no record": ("--replay nowhere", "nowhere"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_sentence(case: str, tmp_path: Path, call: Callable[..., Any]) -> None:
    (tmp_path / "bare.jsonl").write_text('{"question": "2+2?"}\n')
    (tmp_path / "held.jsonl").write_text('{"question": "2+2?", "answer": "4", "split": "test"}\n')
    arguments, words = BAD[case]
    outcome = call(f"train query-mutator {arguments} --quiet", tmp_path)
    assert outcome.code == 1
    assert words in outcome.err
    assert outcome.err.count("\n") == 1
    assert not (tmp_path / "runs/query-mutator-1/config.toml").exists()


def test_a_run_is_neither_overwritten_nor_resumed_with_another_configuration(
    call: Callable[..., Any], trained: Path
) -> None:
    again = call(f"train query-mutator {SMALL} --save-dir run --quiet", trained.parent)
    assert again.code == 1
    assert "--resume run" in again.err
    other = call("train query-mutator --resume run --num-processes 4 --quiet", trained.parent)
    assert other.code == 1
    assert "--num-processes is 8, got 4" in other.err


@pytest.mark.training
def test_evaluation_compares_strategies_on_held_out_questions(
    tmp_path: Path, call: Callable[..., Any], trained: Path
) -> None:
    shutil.copytree(trained, tmp_path / "run")
    line = "evaluate query-mutator run --questions 10 --bandit-episodes 20 --quiet"
    outcome = call(f"{line} --format json", tmp_path)
    assert outcome.code == 0, outcome.err
    ways = {way["name"]: way for way in outcome.data["ways"]}
    assert list(ways) == ["identity", "random", "best single", "greedy plan", "bandit", "ppo"]
    assert ways["identity"]["gain"] == 0.0
    assert all(way["questions"] == 10 for way in ways.values())
    for way in ways.values():
        assert way["low"] <= way["gain"] <= way["high"]
    assert [way["rewritings"] <= 2 for way in ways.values()] == [True] * 6
    versus = outcome.data["versus"]
    baselines = {name: way["accuracy"] for name, way in ways.items() if name != "ppo"}
    assert baselines[versus["baseline"]] == max(baselines.values())
    assert versus["gain"] == pytest.approx(ways["ppo"]["accuracy"] - max(baselines.values()))
    assert versus["low"] <= versus["gain"] <= versus["high"]
    robust = outcome.data["robustness"]
    assert robust["worst"] <= robust["mean"] <= robust["best"]
    folder = tmp_path / "run" / "evaluation"
    assert (folder / "gain.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "evaluation.json").read_text())["ways"] == outcome.data["ways"]
    text = call(line, tmp_path).out
    assert all(name in text for name in ways)
    assert f"ppo against the best baseline, {versus['baseline']}: " in text
    lines = (folder / "transcripts" / "ppo.jsonl").read_text().splitlines()
    assert {json.loads(row)["env"] for row in lines} == set(range(10))
    # Files of somebody else in the folder of the output stay as they are.
    for name in ("evaluation.json", "gain.png", "transcripts/ppo.jsonl"):
        theirs = tmp_path / name.replace("/", "-") / name
        theirs.parent.mkdir(parents=True)
        theirs.write_text("mine, not yours")
        refused = call(f"{line} -o {name.replace('/', '-')}", tmp_path)
        assert (refused.code, "--force" in refused.err) == (1, True), refused.err
        assert theirs.read_text() == "mine, not yours"
        assert call(f"{line} -o {name.replace('/', '-')} --force", tmp_path).code == 0


@pytest.fixture(scope="module")
def with_models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home that holds the real small models, fetched if this machine has none."""
    names = ("smollm2", "minilm")
    with pytest.MonkeyPatch.context() as patch:
        if any(models.find(name).path is None for name in names):
            # One for all test processes, so that they fetch it once.
            shared = tmp_path_factory.getbasetemp().parent / "fetched"
            patch.setenv("BATCHWRIGHT_HOME", str(shared))
            for name in names:
                models.get(name)
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("with_models")
def test_real_models_rewrite_answer_and_embed_inside_the_process(
    tmp_path: Path, call: Callable[..., Any]
) -> None:
    line = (
        "train query-mutator --target-model local:smollm2 --embedder local:minilm "
        "--num-processes 4 --num-steps 2 --num-env-steps 16 --max-tokens 12 --save-dir run "
        "--quiet --format json"
    )
    live = call(line, tmp_path)
    assert live.code == 0, live.err
    assert live.data["finished"]
    assert live.data["invalid_steps"] <= 4
    assert len(turns(tmp_path / "run")) == 16
    again = call("train query-mutator --replay run --quiet --format json", tmp_path)
    assert again.code == 0, again.err
    assert turns(tmp_path / "run-replay-1") == turns(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ppo_finds_the_hidden_rule(seed: int, tmp_path: Path, call: Callable[..., Any]) -> None:
    """The optimum is one operator a question, known from the simulator, and worth 100 %."""
    line = (
        f"train query-mutator --target-model sim --num-processes 32 --num-env-steps 8192 "
        f"--seed {seed} --save-dir run --quiet"
    )
    assert call(line, tmp_path).code == 0
    outcome = call("evaluate query-mutator run --quiet --format json", tmp_path)
    ways = {way["name"]: way for way in outcome.data["ways"]}
    target = Simulator(questions=load_questions("shipped", "all")).target()
    optimum = sum(
        target.best_plan(q.question) is not None for q in load_questions("shipped", "test")
    ) / len(load_questions("shipped", "test"))

    assert ways["ppo"]["accuracy"] >= optimum - 0.15
    assert ways["ppo"]["low"] > ways["random"]["high"]
    assert ways["ppo"]["accuracy"] > ways["greedy plan"]["accuracy"]
