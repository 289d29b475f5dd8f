"""No command replaces a file that it did not write, nor writes over what it reads."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls import Done, chat
from batchwright.calls.cache import Cache
from batchwright.errors import ConfigError
from batchwright.files import check_apart
from raw_server import RawServer, Seen

FOREIGN = {
    "notes": b"the only copy of my notes",
    "lines": b"one\ntwo\nthree\n",
    "json": b'{"id": "row-0", "prompt": "mine"}\n{"id": "row-1"}',
    "brace": b"{",
    "torn": b'{"id": "other", "text": "somebody else',
    "key": b'{"key": "0123"}\n',
    "binary": bytes(range(256)) * 3,
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "sqlite": b"SQLite format 3\0" + bytes(84),
    "scores by hand": b'{"id": "s0", "score": 0.25, "valid": true, "why": null, "human": "mine"}\n',
    "evaluation by hand": b"mine, not yours",
}


OUTPUT = re.compile(r"--(output|out|html|png|plot)\b")


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    for name in ("BATCHWRIGHT_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path_factory.mktemp("home")))


@pytest.fixture(scope="module")
def server():
    async def answer(seen: Seen) -> None:
        await seen.answer()

    with RawServer(answer) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [{"id": f"row-{i}", "prompt": f"question {i}"} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    body = {"choices": [{"message": {"content": "4"}, "finish_reason": "stop"}]}
    with Cache(tmp_path / "calls.db") as cache:
        cache.put_many([(chat("m", "2+2?", temperature=0), Done("4", body, "stop"))])
    return tmp_path


def commands(url: str) -> dict[str, str]:
    """Every command of `batchwright calls` that writes, with {} for what it writes."""
    to = f"-e {url} -m m"
    return {
        "run": f"calls run -i prompts.jsonl -o {{}} {to}",
        "dry run": f"calls run -i prompts.jsonl -o {{}} {to} --dry-run",
        "run with a cache": f"calls run -i prompts.jsonl -o new.jsonl --cache {{}} {to}",
        "export": "calls cache export calls.db -o {}",
        "probe": f"calls probe {to} --most 1 --max-calls 30 --plot {{}}",
        "prune": "calls cache prune {} --older-than 1d",
    }


def test_a_file_of_somebody_else_stays_as_it_is(call, folder, server, contents):
    for content in FOREIGN.values():
        (folder / "precious").write_bytes(content)
        before = contents(folder)
        stamp = (folder / "precious").stat()
        for name, line in commands(server.url).items():
            done = call(line.format("precious"), folder)
            assert done.code == 1, (name, content, done.out)
            assert done.err.startswith("error: "), done.err
            assert done.err.count("\n") == 1
            assert "internal" not in done.err
            assert contents(folder) == before, (name, content)
        assert (folder / "precious").stat().st_mtime_ns == stamp.st_mtime_ns
    assert server.seen == []


def test_force_replaces_it_and_what_was_written_is_replaced_without(call, folder, server):
    lines = commands(server.url)
    for name, begins in (("run", b'{"id"'), ("export", b'{"key"'), ("probe", b"\x89PNG")):
        out = folder / f"{name}.out"
        out.write_bytes(FOREIGN["notes"])
        forced = call(lines[name].format(out.name) + " --force", folder)
        assert forced.code == 0, forced.err
        assert out.read_bytes().startswith(begins)
        again = call(lines[name].format(out.name), folder)
        assert again.code == 0, again.err
        out.write_bytes(b"")
        assert call(lines[name].format(out.name), folder).code == 0
    assert len((folder / "run.out").read_text().splitlines()) == 4


def test_a_dry_run_leaves_a_torn_line_a_cache_and_every_time_stamp_alone(
    call, folder, server, contents
):
    run = commands(server.url)["run"].format("answers.jsonl") + " --temperature 0 --cache calls.db"
    assert call(run, folder).code == 0
    whole = (folder / "answers.jsonl").read_bytes()
    (folder / "answers.jsonl").write_bytes(whole[:-30])
    before = contents(folder)
    stamps = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    for path in folder.iterdir():
        path.chmod(0o444)
    told = call(f"{run} --dry-run --format json", folder)

    assert told.code == 0, told.err
    assert (told.data["answered"], told.data["cache_hits"]) == (3, 1)
    assert contents(folder) == before
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == stamps


def test_an_output_that_is_an_input_is_refused_by_any_name(call, folder, server, contents):
    (folder / "sub").mkdir()
    os.link(folder / "prompts.jsonl", folder / "hard")
    (folder / "soft").symlink_to("prompts.jsonl")
    os.link(folder / "calls.db", folder / "hard.db")
    (folder / "soft.db").symlink_to("calls.db")
    before = contents(folder)
    to = f"-e {server.url} -m m --force"
    for name in (
        "prompts.jsonl",
        "./sub/../prompts.jsonl",
        f"{folder}/prompts.jsonl",
        "hard",
        "soft",
    ):
        for line in (f"-o {name}", f"-o {name} --dry-run", f"-o new --cache {name}"):
            done = call(f"calls run -i prompts.jsonl {line} {to}", folder)
            assert (done.code, "is the input" in done.err) == (1, True), done.err
    for name in ("calls.db", "sub/../calls.db", "hard.db", "soft.db"):
        done = call(f"calls cache export calls.db -o {name} --force", folder)
        assert (done.code, "is the input" in done.err) == (1, True), done.err
    same = call(f"calls run -i prompts.jsonl -o new --cache ./new {to}", folder)
    assert same.code == 1
    assert contents(folder) == before


def test_devices_and_folders_are_no_outputs(call, folder, server):
    lines = commands(server.url)
    for name in ("run", "dry run", "export", "probe"):
        for place in ("/dev/full", "/dev/null", str(folder)):
            done = call(lines[name].format(place) + " --force", folder)
            assert done.code == 1, (name, place)
            assert "choose" in done.err
            assert done.err.count("\n") == 1
    assert Path("/dev/null").is_char_device()


WRITERS = {
    # Every other command that writes a file, and whether it replaces what it wrote itself.
    "data lengths build -d train.jsonl -t bytes -o {}.jsonl": False,
    "data batchplan export -p batch_plan -o {}": False,
    "data batchplan draw -p batch_plan --png {}": True,
    "data batchplan view -p batch_plan --html {}": True,
    "data batching histogram -c lengths.jsonl --png {}": True,
    "data batching analyze -c lengths.jsonl -o {}": True,
    "data kg mine graph --length 1 -q -o {}": True,
    "reward score -i train.jsonl -c rewards.toml -q -o {}": True,
    "reward agree -s scored.jsonl --plot {}": True,
    "gym run -t bytes --mock --num-episodes 1 -o {}": False,
    "--install-completion --shell bash -o {}": True,
}
FOLDERS = (
    "data batchplan build -l lengths.jsonl -e 1 -b 512 -o {}",
    "data batchplan shard -p batch_plan -w 2 -o {}",
    "data batchplan export -p batch_plan -o {}",
    "data batch generate -p batch_plan -d train.jsonl -t bytes -o {}",
    "demo --out {}",
)
"""Commands that write a folder."""
TESTED_WITH_THEIR_COMMAND = {
    "report --html": "test_report_writes_text_json_html_and_pictures",
    "report --png": "test_report_writes_text_json_html_and_pictures",
    "models merge --output": "test_an_adapter_of_ours_trains_on_and_merges",
    "evaluate query-mutator --output": "test_evaluation_compares_strategies_on_held_out_questions",
}


@pytest.fixture
def desk(copy: Path) -> Path:
    rows = [json.loads(row) for row in (copy / "train.jsonl").read_text().splitlines()]
    for row in rows:
        row |= {"response": "4", "ground_truth": "4"}
    (copy / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (copy / "rewards.toml").write_text('[[part]]\nkind = "numeric"\n')
    scored = [{"id": n, "score": n % 2, "label": n % 3 == 0} for n in range(12)]
    (copy / "scored.jsonl").write_text("".join(json.dumps(row) + "\n" for row in scored))
    (copy / "graph").mkdir()
    facts = [f"p{n}\t{r}\tp{n + 1}" for n in range(8) for r in ("parent", "elder")]
    for part in ("train", "valid", "test"):
        (copy / "graph" / f"{part}.txt").write_text("\n".join(facts) + "\n")
    return copy


@pytest.mark.parametrize("line", WRITERS)
def test_every_other_command_refuses_a_file_of_somebody_else_too(call, desk, contents, line):
    name = "precious.jsonl" if ".jsonl" in line.rpartition("{}")[2] else "precious"
    given = line.replace("{}.jsonl", "{}").format(name)
    for content in FOREIGN.values():
        (desk / name).write_bytes(content)
        before = contents(desk)
        done = call(given, desk)
        assert done.code == 1, (line, content, done.out)
        assert done.err.count("\n") == 1
        assert "internal" not in done.err
        assert contents(desk) == before, (line, content)
    if WRITERS[line]:
        forced = call(f"{given} --force", desk)
        assert forced.code == 0, forced.err
        # What is its own now is replaced without being forced.
        assert call(given, desk).code == 0


@pytest.mark.parametrize("line", [one for one in WRITERS if "kg mine" in one or "score -i" in one])
def test_what_somebody_has_changed_since_it_was_written_is_theirs(call, desk, contents, line):
    assert call(line.format("mine"), desk).code == 0
    written = (desk / "mine").read_bytes()
    lines = written.splitlines(keepends=True)
    for changed in (
        written + b"my notes at the end\n",
        written + b"my notes at the end",
        b"".join([*lines[:2], b"my own line\n", *lines[3:]]),
        b"".join([lines[0].replace(b"1", b"2").replace(b"0", b"3"), *lines[1:]]),
        b"".join([*lines[:1], *lines[2:]]),
    ):
        (desk / "mine").write_bytes(changed)
        before = contents(desk)
        done = call(line.format("mine"), desk)
        assert (done.code, "--force" in done.err) == (1, True), (changed, done.err)
        assert contents(desk) == before
    (desk / "mine").write_bytes(written)
    assert call(line.format("mine"), desk).code == 0


def test_scores_are_not_written_over_what_they_are_read_from(call, desk, contents):
    os.link(desk / "train.jsonl", desk / "hard")
    (desk / "soft").symlink_to("train.jsonl")
    before = contents(desk)
    asked = "reward score -i train.jsonl -c rewards.toml -q --force"
    for output in ("train.jsonl", "./train.jsonl", "hard", "soft", "rewards.toml"):
        assert call(f"{asked} -o {output}", desk).code == 1
    assert call(f"{asked} -o new.jsonl --cache train.jsonl", desk).code == 1
    assert contents(desk) == before


def test_folders_of_somebody_else_are_not_written_into(call, copy, contents):
    for line in FOLDERS:
        (copy / "precious").write_bytes(FOREIGN["notes"])
        (copy / "box").mkdir(exist_ok=True)
        for inside in ("meta.json", "demo.jsonl"):
            (copy / "box" / inside).write_bytes(FOREIGN["notes"])
        before = contents(copy)
        for name in ("precious", "box"):
            done = call(line.format(name), copy)
            assert done.code == 1, (line, name, done.out)
            assert contents(copy) == before, line


def test_every_flag_that_names_an_output_is_tried_with_a_file_of_somebody_else() -> None:
    """The reference has every command with its flags; `tools/reference.py --check` sees to it."""
    root = Path(__file__).parent.parent
    page = (root / "docs" / "reference" / "commands.md").read_text("utf-8")
    flags = set()
    for section in re.split(r"^#+ batchwright ", page, flags=re.MULTILINE)[1:]:
        for usage in re.split(r"```text\nbatchwright ", section)[1:]:
            command = re.split(r" --| \[| [A-Z]", f"{usage.splitlines()[0]} ")[0]
            command = command or usage.split()[0]
            for names in re.findall(r"^\* `(--[^`]*) PATH`", usage, re.MULTILINE):
                if OUTPUT.search(names):
                    flags.add((command, names.partition(",")[0]))
    assert len(flags) > 15
    tried = [*WRITERS, *FOLDERS, *commands("http://h:1").values()]
    for command, flag in sorted(flags):
        short = {"--output": "-o", "--out": "-o"}.get(flag, flag)
        here = any(
            line.startswith(f"{command} ") and re.search(rf"({flag}|{short}) \{{\}}", line)
            for line in tried
        )
        assert here or f"{command} {flag}" in TESTED_WITH_THEIR_COMMAND, (command, flag)
    sources = "".join(path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    assert all(f"def {name}(" in sources for name in TESTED_WITH_THEIR_COMMAND.values())


def test_paths_that_are_not_there_are_compared_by_where_they_lead(tmp_path):
    (tmp_path / "link").symlink_to("later")
    with pytest.raises(ConfigError, match="is the input"):
        check_apart(tmp_path / "link", [tmp_path / "x" / ".." / "later"])
    check_apart(tmp_path / "link", [tmp_path / "other"])
