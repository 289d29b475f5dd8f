"""Commands killed at every step they take on the disk: what they leave is old, new or resumed.

Every point is a kill -9 of a command before one of its operations on files, or in the middle of a
write. Then its output must be what it was before or what it should become, byte by byte, and the
same command again must come to the same end and leave nothing else behind.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from batchwright.calls.simulator import Simulator
from batchwright.checkpoint import latest
from batchwright.events import read_events
from raw_server import RawServer, Seen

HERE = Path(__file__).parent
NOBODY = 65534
BASE = "data batchplan build -l lengths.jsonl -b 512 --layout packed --pack-max-len 256"


class Zygote:
    """The process that forks, kills and resumes."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self._output = folder / "said.txt"
        environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        self._process = subprocess.Popen(
            [sys.executable, HERE / "zygote.py", *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environ, "HF_HUB_OFFLINE": "1", "BATCHWRIGHT_HOME": str(folder / "home")},
            text=True,
        )

    def __call__(self, folder: Path, line: str, **more: Any) -> dict[str, Any]:
        """Run a command in a folder, or a function that is named with a colon."""
        if ":" in line.split(" ")[0]:
            what: dict[str, Any] = {"call": line, "args": [str(folder)]}
        else:
            what = {"argv": line.split()}
        tokens = {"BATCHWRIGHT_TOKENS": str(folder / "tokens")}
        found = self.ask(
            {**what, "folder": str(folder), "output": str(self._output), "env": tokens, **more}
        )
        assert not found["hung"], f"{line} {more} hangs"
        return found

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    @property
    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


@dataclasses.dataclass(frozen=True)
class Case:
    """A command, what it writes, and what of it may differ from run to run."""

    line: str
    output: str
    before: tuple[str, ...] = ()
    """Commands that come first; their outputs are there when it is killed."""
    whole: bool = True
    """Whether the output is either old or new; else it grows, and only its end is compared."""
    volatile: tuple[str, ...] = (".lock",)
    resume: str = ""
    """The command that resumes a run that has begun; else the same again."""


CASES = {
    "lengths": Case("data lengths build -d train.jsonl -t bytes -o out.jsonl -q", "out.jsonl"),
    "lengths again": Case(
        "data lengths build -d train.jsonl -t bytes -o out.safetensors -q",
        "out.safetensors",
        ("data lengths build -d few.jsonl -t bytes -o out.safetensors -q",),
    ),
    "plan": Case(f"{BASE} -e 2 -o plan", "plan", (f"{BASE} -e 1 --seed 7 -o plan",)),
    "shards": Case(
        "data batchplan shard -p base -w 2 -o shards",
        "shards",
        ("data batchplan shard -p base -w 3 -o shards",),
    ),
    "text": Case("data batchplan export -p base -o text", "text"),
    "batches": Case("data batch generate -p base -d train.jsonl -t bytes -o batches -q", "batches"),
    "rules": Case("data kg mine graph -o rules.txt -q", "rules.txt"),
    "small files": Case(
        "writers:small_files", "position.json", ("writers:small_files",), whole=True
    ),
    "checkpoints": Case(
        "writers:checkpoints", "checkpoints", whole=False, volatile=("events.jsonl",)
    ),
    "replay": Case("writers:replay", "buffer", whole=False),
}


# Of logs only the lines differ that a killed run wrote twice, of stamps the time.
LOGGED = ("events.jsonl", "stamp.json", ".lock", "timings.json")
TRAINING = {
    "train sft": Case(
        "train sft --model tiny --data train.jsonl --token-budget 512 --epochs 1 --max-steps 4 "
        "--save-every 2 --quiet --run-dir run",
        "run/model",
        volatile=LOGGED,
        resume="train sft --resume run --quiet",
    ),
    "train kge": Case(
        "train kge --data graph --rank 4 --batch-size 8 --epochs 3 --save-every 1 --quiet "
        "--run-dir run",
        "run/model",
        volatile=LOGGED,
        resume="train kge --resume run --quiet",
    ),
    "train prover": Case(
        "train prover --data graph --mine --n-envs 8 --clone-updates 2 --ppo-steps 0 --passes 1 "
        "--eval-triples 4 --save-every 1 --quiet --run-dir run",
        # A checkpoint inside, so that what is unfinished is there too.
        "run/model",
        whole=False,
        volatile=LOGGED,
        resume="train prover --resume run --quiet",
    ),
    "train query-mutator": Case(
        "train query-mutator --target-model URL#sim --num-processes 4 --num-steps 2 "
        "--num-env-steps 24 --save-interval 1 --quiet --save-dir run",
        "run/checkpoints",
        whole=False,
        volatile=LOGGED,
        resume="train query-mutator --resume run --quiet",
    ),
}


def rows(path: Path, count: int) -> None:
    draw = random.Random(3)
    with path.open("w") as file:
        for number in range(count):
            text = " ".join(draw.choices(["otters", "count", "tokens"], k=draw.randint(1, 30)))
            file.write(json.dumps({"id": f"r{number}", "text": text}) + "\n")


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    folder = tmp_path_factory.mktemp("zygote")
    # With numba in it, kernels are compiled once and not in every fork.
    process = Zygote(folder, "numba", "batchwright.cli.app", "batchwright.streaming", "writers")
    yield process
    process.close()


@pytest.fixture(scope="module")
def ground(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands read, with everything they use imported and compiled."""
    folder = tmp_path_factory.mktemp("ground")
    rows(folder / "train.jsonl", 60)
    rows(folder / "few.jsonl", 20)
    (folder / "graph").mkdir()
    names = "abcdefgh"
    facts = [f"{a}\tparent\t{b}\n{b}\tchild\t{a}\n" for a, b in itertools.pairwise(names)]
    for part in ("train", "valid", "test"):
        (folder / "graph" / f"{part}.txt").write_text("".join(facts))
    first = (
        "data lengths build -d train.jsonl -t bytes -o lengths.jsonl -q",
        f"{BASE} -e 1 -o base",
    )
    lines = [*first, *(case.line for case in CASES.values() if ":" not in case.line)]
    warm = [{"argv": line.split()} for line in lines]
    own = {"BATCHWRIGHT_TOKENS": str(folder / "tokens")}
    zygote.ask({"warm": warm, "folder": str(folder), "env": own})
    for path in folder.iterdir():
        if path.name not in ("train.jsonl", "few.jsonl", "graph", "lengths.jsonl", "base"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return folder


def listing(folder: Path, volatile: tuple[str, ...] = ()) -> dict[str, bytes | None]:
    """Every name below a folder, hidden ones too, with its content."""
    found = {"": folder.read_bytes()} if folder.is_file() else {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.name in volatile:
            continue
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else b""
    return found


@dataclasses.dataclass
class Killed:
    """One case with what it begins and ends with, to be killed anywhere."""

    zygote: Zygote
    case: Case
    start: Path
    folder: Path
    names: list[str]
    seconds: float
    """That it takes when nobody kills it."""
    end: dict[str, bytes | None]

    @classmethod
    def of(cls, zygote: Zygote, case: Case, ground: Path, folder: Path) -> "Killed":
        start = folder / "start"
        shutil.copytree(ground, start)
        for line in case.before:
            assert zygote(start, line)["code"] == 0, zygote.said
        whole = folder / "whole"
        shutil.copytree(start, whole)
        found = zygote(whole, case.line)
        assert found["code"] == 0, zygote.said
        end = listing(whole, case.volatile)
        # All in one place: some files name the folder they are in.
        return cls(zygote, case, start, folder / "here", found["names"], found["seconds"], end)

    def check(self, **moment: Any) -> bool:
        """Kill it at one moment, look at what is there, and have it resumed."""
        here, case = self.folder, self.case
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(self.start, here)
        killed = self.zygote(here, case.line, **moment)["killed"]
        if case.whole:
            old = listing(self.start / case.output)
            new = listing(self.folder.parent / "whole" / case.output)
            assert listing(here / case.output) in (old, new), f"half-written after {moment}"
        begun = case.resume and (here / "run" / "config.toml").exists()
        again = self.zygote(here, case.resume if begun else case.line)
        assert again["code"] == 0, f"not resumed after {moment}: {self.zygote.said}"
        left = listing(here, case.volatile)
        assert left.keys() == self.end.keys(), f"other files after {moment}"
        # What a run says of its time differs, what it has made does not.
        compared = f"{case.output}/" if case.resume else ""
        ended = {name: raw for name, raw in self.end.items() if name.startswith(compared)}
        assert ended
        assert {name: left.get(name) for name in ended} == ended, f"another result after {moment}"
        return killed


def moments(names: list[str], most: int) -> list[int]:
    """Up to `most` steps, evenly spread, with every kind of step among them."""
    if len(names) <= most:
        return list(range(1, len(names) + 1))
    firsts = {name: number for number, name in reversed(list(enumerate(names, start=1)))}
    spread = [1 + number * len(names) // most for number in range(most)]
    return sorted({*firsts.values(), *spread})[:: max(1, (most + len(firsts)) // most)]


@pytest.mark.parametrize("name", CASES)
def test_a_command_killed_at_any_step_is_resumed(
    name: str, zygote: Zygote, ground: Path, tmp_path: Path
) -> None:
    killed = Killed.of(zygote, CASES[name], ground, tmp_path)
    chosen = moments(killed.names, 6)  # sixty in all; `-m slow` takes every step

    assert all(killed.check(kill_at=number) for number in chosen)


def campaign(killed: Killed, steps: int, times: int) -> None:
    """Kill a case at so many of its steps and at so many random moments of its time."""
    draw = random.Random(killed.case.line)
    points: list[dict[str, Any]] = [{"kill_at": n} for n in moments(killed.names, steps)]
    points += [{"kill_after": draw.uniform(0.0, killed.seconds)} for _ in range(times)]

    hit = sum(killed.check(**point) for point in points)

    said = killed.case.line.partition(" -")[0]
    print(f"{said}: {len(points)} moments, {hit} kills, {len(killed.names)} steps on the disk")
    assert hit >= len(points) - times


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_command_killed_at_every_step_and_at_random_moments_is_resumed(
    name: str, zygote: Zygote, ground: Path, tmp_path: Path
) -> None:
    killed = Killed.of(zygote, CASES[name], ground, tmp_path)
    campaign(killed, len(killed.names), max(20, 85 - len(killed.names)))


@pytest.fixture(scope="module")
def trainers(ground: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """As `zygote`, with what training needs; the models of a run are served by one process."""
    folder = tmp_path_factory.mktemp("trainers")
    process = Zygote(folder, "torch", "transformers", "numba", "batchwright.cli.app")
    shutil.copytree(ground, folder / "ground")
    own = {"BATCHWRIGHT_TOKENS": str(folder / "tokens")}
    lines = [case.line for name, case in TRAINING.items() if "query" not in name]
    warm = [{"argv": f"{line}-{number}".split()} for number, line in enumerate(lines)]
    process.ask({"warm": warm, "folder": str(folder / "ground"), "env": own})
    yield process
    process.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINING)
def test_training_killed_at_steps_and_at_random_moments_is_resumed(
    name: str, trainers: Zygote, ground: Path, tmp_path: Path
) -> None:
    with Simulator(latency_s=0.001, knee=64).running() as url:
        line = TRAINING[name].line.replace("URL", str(url))
        case = dataclasses.replace(TRAINING[name], line=line)
        campaign(Killed.of(trainers, case, ground, tmp_path), 30, 12)


@pytest.mark.slow
def test_calls_killed_at_any_step_are_resumed_and_none_with_a_response_is_sent_again(
    zygote: Zygote, tmp_path: Path
) -> None:
    start = tmp_path / "ground"
    start.mkdir()
    rows = [{"id": f"r{n}", "prompt": f"question {n}"} for n in range(12)]
    (start / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with RawServer(Seen.answer) as server:
        case = Case(
            f"calls run -i prompts.jsonl -o answers.jsonl --endpoint {server.url} --model m "
            "--price-in 1 --price-out 1 --max-tokens 9 --max-cost 1 -q",
            "answers.jsonl",
            whole=False,
        )
        killed = Killed.of(zygote, case, start, tmp_path)
        for number in moments(killed.names, 6):
            here = killed.folder
            shutil.rmtree(here, ignore_errors=True)
            shutil.copytree(start, here)
            assert zygote(here, case.line, kill_at=number)["killed"]
            answers = here / "answers.jsonl"
            written = answers.read_bytes().count(b"\n") if answers.exists() else 0
            before = len(server.seen)
            assert zygote(here, case.line)["code"] == 0, zygote.said
            sent = {seen.text for seen in server.seen[before:]}
            assert not sent & {row["prompt"] for row in rows[:written]}
            assert listing(here) == killed.end, f"{killed.names[number - 1]}, step {number}"


@pytest.mark.parametrize(
    "name",
    [
        "replay",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("lengths again", "plan", "batches", "checkpoints")
        ),
    ],
)
def test_a_disk_that_is_full_at_any_step_changes_nothing(
    name: str, zygote: Zygote, ground: Path, tmp_path: Path
) -> None:
    killed = Killed.of(zygote, CASES[name], ground, tmp_path)
    case, here = killed.case, tmp_path / "here"
    old, new = listing(killed.start / case.output), listing(tmp_path / "whole" / case.output)
    for number in moments(killed.names, 6):
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(killed.start, here)
        found = zygote(here, case.line, fail_at=number)
        step = f"{killed.names[number - 1]}, step {number}"
        if ":" not in case.line:
            # Cleaning up may fail without harm; all else is one sentence.
            assert found["code"] in (0, 1), f"{step}: {zygote.said}"
            assert "Traceback" not in zygote.said
            assert "internal" not in zygote.said, f"{step}: {zygote.said}"
        if case.whole:
            assert listing(here / case.output) in (old, new), step
        assert zygote(here, case.line)["code"] == 0, f"{step}: {zygote.said}"
        assert listing(here, case.volatile) == killed.end, step


@pytest.mark.slow
def test_what_was_logged_before_a_kill_is_there_after_it(
    zygote: Zygote, ground: Path, tmp_path: Path
) -> None:
    """A log grows by whole lines, whichever write of it is torn."""
    killed = Killed.of(zygote, CASES["checkpoints"], ground, tmp_path)
    writes = [n for n, name in enumerate(killed.names, start=1) if name == "write"]
    assert len(writes) == 3
    for number in writes:
        killed.check(kill_at=number)
        steps = [event.fields["step"] for event in read_events(tmp_path / "here/events.jsonl")]
        # The step whose line was torn is saved, so it is not done again.
        assert steps == [n for n in (1, 2, 3) if n != writes.index(number) + 1]
        found = latest(tmp_path / "here" / "checkpoints")
        assert found is not None
        assert found.step == 3


@pytest.mark.slow
def test_leftovers_of_many_kills_do_not_add_up(
    zygote: Zygote, ground: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    shutil.copytree(ground, here)
    case = CASES["plan"]
    renames = 1 + zygote(here, case.line)["names"].index("os.mkdir")
    before = set(listing(here))
    for extra in range(4):
        assert zygote(here, case.line, kill_at=renames + 1 + extra)["killed"]
        hidden = [path for path in here.iterdir() if path.name.startswith(".")]
        assert len(hidden) <= 1
    assert zygote(here, case.line)["code"] == 0
    assert set(listing(here)) == before


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Callable[[str], object]]:
    """A file system of two megabytes, and how to make it read-only and back."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(words, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not allowed here")
    again = ["mount", "-o", "remount,{}", str(folder)]
    try:
        yield lambda how: subprocess.run([word.format(how) for word in again], check=True)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def limited(zygote: Zygote, ground: Path, tmp_path: Path) -> Callable[..., str]:
    """Run a command under a limit of the system; what it said when it was refused."""

    def run(line: str, **more: Any) -> str:
        found = zygote(tmp_path / "here", line, **more)
        assert found["code"] == 1, zygote.said
        said = zygote.said.strip()
        assert "Traceback" not in said
        assert "internal" not in said
        return said

    shutil.copytree(ground, tmp_path / "here")
    return run


def test_no_rights_are_one_sentence_and_the_command_runs_when_they_are_given(
    zygote: Zygote, ground: Path
) -> None:
    # Not below the folder of pytest, which nobody else may enter; root is made somebody else.
    with tempfile.TemporaryDirectory() as name:
        here = Path(name)
        shutil.copytree(ground, here, dirs_exist_ok=True)
        for case in (CASES[name] for name in ("lengths", "plan", "shards", "rules")):
            here.chmod(0o555)
            before = listing(here)
            found = zygote(here, case.line, user=NOBODY)
            assert found["code"] == 1, (case.line, zygote.said)
            assert zygote.said.count("\n") == 1, zygote.said
            assert "Permission denied; " in zygote.said
            assert listing(here) == before
            here.chmod(0o755)
            assert zygote(here, case.line)["code"] == 0, (case.line, zygote.said)
        (here / "lengths.jsonl").chmod(0)
        found = zygote(here, f"{BASE} -e 1 -o other", user=NOBODY)
        assert found["code"] == 1
        assert "cannot read lengths.jsonl: Permission denied; the file itself may" in zygote.said


@pytest.mark.slow
def test_a_disk_that_can_only_be_read_is_one_sentence(
    zygote: Zygote, ground: Path, tmp_path: Path
) -> None:
    here = tmp_path / "small"
    with small_disk(here) as disk:
        shutil.copytree(ground, here, dirs_exist_ok=True)
        for case in CASES.values():
            if ":" in case.line:
                continue
            disk("ro")
            before = listing(here)
            assert zygote(here, case.line)["code"] == 1, (case.line, zygote.said)
            assert zygote.said.count("\n") == 1, zygote.said
            assert "internal" not in zygote.said, zygote.said
            assert listing(here) == before
            disk("rw")
            assert zygote(here, case.line)["code"] == 0, (case.line, zygote.said)


@pytest.mark.slow
def test_a_command_does_with_few_file_descriptors(
    zygote: Zygote, ground: Path, tmp_path: Path
) -> None:
    shutil.copytree(ground, tmp_path / "here")
    for case in CASES.values():
        if ":" not in case.line:
            found = zygote(tmp_path / "here", case.line, limits={"RLIMIT_NOFILE": 64})
            assert found["code"] == 0, zygote.said


@pytest.mark.slow
def test_too_few_file_descriptors_are_one_sentence_that_calls_no_file_damaged(
    zygote: Zygote, ground: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    shutil.copytree(ground, here)
    lines = [case.line for case in CASES.values() if ":" not in case.line]
    for line in [*lines, "data batchplan info -p base", "data lengths stats -c lengths.jsonl"]:
        codes = []
        for most in (*range(6, 24, 2), 30, 64):
            codes.append(zygote(here, line, limits={"RLIMIT_NOFILE": most})["code"])
            assert codes[-1] in (0, 1), zygote.said
            assert "Traceback" not in zygote.said
            for word in ("internal", "damaged", "delete it", "cannot be used", "checksum"):
                assert word not in zygote.said, (line, most, zygote.said)
        assert codes[-1] == 0


def test_a_limit_on_the_size_of_files_is_one_sentence(limited: Callable[..., str]) -> None:
    said = limited(f"{BASE} -e 1 -o plan", limits={"RLIMIT_FSIZE": 100})
    assert "cannot write plan" in said


@pytest.mark.parametrize(
    "name",
    [
        "lengths again",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("plan", "rules", "batches")),
    ],
)
def test_a_limit_on_memory_is_one_sentence(
    name: str, zygote: Zygote, ground: Path, tmp_path: Path
) -> None:
    killed = Killed.of(zygote, CASES[name], ground, tmp_path)
    case, here = killed.case, tmp_path / "here"
    old, new = listing(killed.start / case.output), listing(tmp_path / "whole" / case.output)
    codes = []
    for memory in (0, 2**16, 2**20, 2**26):
        shutil.rmtree(here, ignore_errors=True)
        shutil.copytree(killed.start, here)
        codes.append(zygote(here, case.line, memory=memory)["code"])
        assert "Traceback" not in zygote.said
        assert "internal" not in zygote.said, (memory, zygote.said)
        assert listing(here / case.output) in (old, new)
    assert set(codes) <= {0, 1}, codes
    assert zygote(here, case.line)["code"] == 0, zygote.said
    assert listing(here, case.volatile) == killed.end


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_command_resumes_when_there_is_room(
    zygote: Zygote, ground: Path, tmp_path: Path
) -> None:
    """On a file system of its own, which is really full: not every write is one of Python's."""
    here = tmp_path / "small"
    with small_disk(here):
        shutil.copytree(ground, here, dirs_exist_ok=True)
        for case in CASES.values():
            if ":" in case.line or case.output == "position.json":
                continue
            for line in case.before:
                assert zygote(here, line)["code"] == 0, zygote.said
            old = listing(here / case.output)
            filled = here / "filled"
            with contextlib.suppress(OSError), filled.open("wb", 0) as file:
                while True:
                    file.write(bytes(4096))
            code = zygote(here, case.line)["code"]
            assert code == 1, (case.line, zygote.said)
            assert "Traceback" not in zygote.said
            assert "internal" not in zygote.said, (case.line, zygote.said)
            assert listing(here / case.output) == old
            filled.unlink()
            assert zygote(here, case.line)["code"] == 0, (case.line, zygote.said)
            hidden = [path for path in here.iterdir() if path.name.endswith(".unfinished")]
            assert hidden == []
