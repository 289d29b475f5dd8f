"""What commands print: nothing that came from elsewhere can steer the terminal."""

import ast
import json
import re
import shutil
import sys
import unicodedata
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import batchwright.cli
from batchwright.errors import printable
from raw_server import RawServer, Seen

EVIL = "\x1b[31mred\x1b]0;title\x07\x9b2J\x08\u202eback"
"""Colour, title, the eight-bit escape, backspace, right to left."""
RETURN = "\r\x0b\x85\u2028"
"""White space that a command line of these tests cannot hold."""


def steering(text: str) -> set[str]:
    """The characters of a text that a terminal would act on."""
    kinds = ("Cc", "Zl", "Zp")
    found = {c for c in text if unicodedata.category(c) in kinds} - {"\n", "\t"}
    return found | set(re.findall("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]", text))


def test_every_character_of_unicode_is_shown_or_escaped():
    everything = "".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    shown = printable(everything)
    assert steering(shown) == set()
    assert steering(printable(everything, line=True)) | {"\n", "\t"} == {"\n", "\t"}
    assert "\n" not in printable(everything, line=True)
    # All else stays as it is.
    kept = [c for c in everything if not steering(c)]
    assert printable("".join(kept)) == "".join(kept)


def test_only_one_function_of_the_command_prints():
    """A new `print` somewhere in the command would be a way around the escapes."""
    found = []
    for path in Path(batchwright.cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name) and node.id == "print":
                found.append(path.name)
            if isinstance(node, ast.Attribute) and node.attr in ("print_exc", "print_exception"):
                found.append(path.name)
    assert found == ["output.py"]


async def evil(seen: Seen) -> None:
    if seen.path.endswith("/models"):
        await seen.reply(body={"data": [{"id": f"m{EVIL}"}]})
    elif "fail" in json.dumps(seen.body):
        await seen.reply(400, {"error": {"message": f"no {EVIL} {RETURN} way"}})
    else:
        await seen.answer(f"{EVIL} {RETURN} 4")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    for name in ("OPENAI_API_KEY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    rows = [
        {"id": f"{EVIL}-{i}", "prompt": f"{EVIL} {RETURN} {i}", "completion": "yes " * (i + 1)}
        for i in range(6)
    ]
    bad = {"id": f"{EVIL} bad", f"{EVIL} column": f"{EVIL} words"}
    for name, content in {
        "rows.jsonl": rows,
        f"file{EVIL}.jsonl": rows,
        "bad.jsonl": [*rows, bad],
        "prompts.jsonl": [{"id": f"a{EVIL}", "prompt": "2+2?"}, {"id": "b", "prompt": "fail"}],
        "answers.jsonl": [{"id": f"a{EVIL}", "response": f"{EVIL} 4", "ground_truth": EVIL}],
    }.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    triples = [(f"a{EVIL}{i}", f"{r}{EVIL}", f"b{EVIL}{i}") for i in range(5) for r in "pq"]
    graph = tmp_path / "graph"
    graph.mkdir()
    lines = "".join("\t".join(triple) + "\n" for triple in triples)
    for part in ("train", "valid", "test"):
        (graph / f"{part}.txt").write_text(lines)
    (tmp_path / f"bad{EVIL}.txt").write_text(f"nonsense {EVIL}\n")
    (tmp_path / "rewards.toml").write_text('[[part]]\nkind = "exact"\n')
    (tmp_path / "judge.toml").write_text(
        'endpoints = ["URL"]\n[[part]]\nkind = "judge"\nmodels = ["m"]\ntemplate = "{response}"\n'
    )
    return tmp_path


COMMANDS = f"""
data lengths build -d rows.jsonl -t bytes -o lengths.jsonl
data lengths stats -c lengths.jsonl
data lengths build -d file{EVIL}.jsonl -t bytes -o other{EVIL}.jsonl
data lengths stats -c other{EVIL}.jsonl
data lengths build -d bad.jsonl -t bytes -o no.jsonl
data lengths build -d bad.jsonl -t bytes -o some.jsonl --on-bad-row skip
data lengths build -d missing{EVIL}.jsonl -t bytes -o no.jsonl
data rows show rows.jsonl -t bytes
data rows show bad.jsonl -t bytes
data batchplan build -l lengths.jsonl -b 4096 -o plan
data batchplan build -l lengths.jsonl -b 4096 -o plan{EVIL}
data batchplan build -l lengths.jsonl -b 40 -o small
data batchplan info -p plan -n 4
data batchplan info -p missing{EVIL}
data batchplan explain {EVIL}-0 -p plan
data batchplan explain unknown{EVIL} -p plan
data batchplan verify -p plan -l lengths.jsonl
data batchplan draw -p plan
data batchplan diff plan plan
data batchplan {EVIL}
data batching histogram -c lengths.jsonl
data batching histogram -c lengths.jsonl --bins {EVIL}
data batch generate -p plan -d rows.jsonl -t bytes -o batches{EVIL}
data kg info graph
data kg check graph
data kg mine graph -o mined.txt -q
data kg info missing{EVIL}
prove p{EVIL}(a{EVIL}0,X) -d graph --mine
prove p{EVIL}(nobody{EVIL},X) -d graph --mine
prove p(a,X) -d graph -r bad{EVIL}.txt
calls run -i prompts.jsonl -o out.jsonl --endpoint URL --model m -q --tries 1
calls run -i rows.jsonl -o out{EVIL}.jsonl --endpoint URL --model m{EVIL} -q --tries 1
calls run -i prompts.jsonl -o o2.jsonl --endpoint ht{EVIL}tp://x --model m
calls probe --endpoint URL --model fail --most 2 --max-calls 40 -q
calls cache stats calls.db{EVIL}
reward score -i answers.jsonl -c rewards.toml -o scores.jsonl -q
reward explain a{EVIL} -i answers.jsonl -c rewards.toml
reward explain a{EVIL} -i answers.jsonl -c judge.toml
reward explain none{EVIL} -i answers.jsonl -c rewards.toml
--debug reward explain none{EVIL} -i answers.jsonl -c rewards.toml
{EVIL}
"""


def test_no_command_lets_data_servers_or_file_names_steer_the_terminal(folder, call):
    shown = {}
    with RawServer(evil) as server:
        judge = folder / "judge.toml"
        judge.write_text(judge.read_text().replace("URL", server.url))
        for line in COMMANDS.strip("\n").split("\n"):
            found = call(line.replace("URL", server.url), folder)
            shown[line] = found
            assert steering(found.out + found.err) == set(), line
            assert "internal error" not in found.err, (line, found.err)
            assert not found.err.startswith("error: Unknown option"), (line, found.err)
            shutil.rmtree(folder / "small", ignore_errors=True)
    escaped = [line for line, found in shown.items() if "\\x1b" in found.out + found.err]
    # The escapes are there, so what they stand for was there too.
    assert len(escaped) > 15


def test_log_messages_and_warnings_are_escaped(capsys, monkeypatch):
    import logging
    import warnings

    from batchwright.cli.output import escape_messages

    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    escape_messages()
    record = logging.LogRecord("a", logging.WARNING, "f", 1, "said %s", (EVIL,), None)
    assert steering(logging.lastResort.format(record)) == set()
    assert steering(warnings.formatwarning(EVIL, UserWarning, EVIL, 1)) == set()
