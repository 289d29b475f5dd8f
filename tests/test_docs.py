"""Every guide is a session that works: its commands and its code run in order, in one folder.

A ```text block after a ```python block is what the code prints; lines after `$ batchwright` in
a ```console block are what the command prints. Both are compared; `...` stands for anything.
A block that begins with the comment `# NAME.EXTENSION` is that file, and is written first.
"""

import contextlib
import doctest
import io
import json
import random
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cyclopts import App

from batchwright.calls.simulator import Simulator
from batchwright.cli.app import app

sys.path.insert(0, str(Path(__file__).parent))
from gym_proxy import served

pytestmark = [
    # What the guide on torch meets; the reasons stand in test_integration_torch.py.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker:UserWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]

ROOT = Path(__file__).parents[1]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [
    *GUIDES,
    *sorted((ROOT / "docs" / "reference").glob("*.md")),
    *sorted((ROOT / "examples").glob("*/README.md")),
    ROOT / "benchmarks" / "README.md",
]
NEEDS_MORE_THAN_A_FOLDER = (
    *("hf:", "--install-completion", "calls simulate", "serve", "--gym-port", "reasoning-gym"),
    *("batchwright view", "--on ray", "s3://"),
)
# test_cli.py runs the whole demo; the guides need only the lengths it leaves, see `workshop`.
TESTED_ELSEWHERE = ("batchwright demo",)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """Fenced text: its language, the line of the page its text begins at, and the text."""

    language: str
    line: int
    text: str

    @property
    def end(self) -> int:
        """The line of the closing fence."""
        return self.line + len(self.text.splitlines())

    @property
    def file(self) -> str | None:
        """The name in the comment it begins with, if that is the name of a file."""
        named = re.match(r"# ([\w-]+\.\w+)\b", self.text)
        return named[1] if named else None


@dataclass(frozen=True)
class Command:
    """One call of `batchwright`, and the output the page shows for it, if it shows any."""

    line: int
    text: str
    shown: str | None

    @property
    def words(self) -> list[str]:
        """The arguments, up to where the shell would send the output elsewhere."""
        words = shlex.split(self.text, comments=True)[1:]
        ends = [at for at, word in enumerate(words) if word in ("|", ">", "&&", "&", ";")]
        return words[: min(ends, default=len(words))]


def blocks(text: str) -> Iterator[Block]:
    language, first, lines = None, 0, []
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.match(r"\s*```(\w*)", line)
        if fence and language is None:
            language, first, lines = fence[1], number + 1, []
        elif fence:
            yield Block(str(language), first, "\n".join(lines))
            language = None
        else:
            lines.append(line)
    assert language is None, f"the block before line {first} is never closed"


def commands(block: Block) -> Iterator[Command]:
    if block.language not in ("bash", "console", "sh", "shell"):
        return
    lines = block.text.split("\n")
    at = 0
    while at < len(lines):
        number, text = at, lines[at]
        while text.endswith("\\"):
            at += 1
            text = text[:-1] + lines[at]
        at += 1
        if not text.removeprefix("$ ").startswith("batchwright "):
            continue
        output = []
        while text.startswith("$ ") and at < len(lines) and not lines[at].startswith(("$ ", "#")):
            output.append(lines[at])
            at += 1
        shown = "\n".join(output) if output else None
        yield Command(block.line + number, text.removeprefix("$ "), shown)


ALL_COMMANDS = [
    pytest.param(command, id=f"{name_of(page)}:{command.line}")
    for page in PAGES
    for block in blocks(page.read_text("utf-8"))
    for command in commands(block)
]


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the data sets the guides speak of, and nothing else."""
    draw = random.Random(0)
    words = "a barrel holds what it holds and the rest is ullage".split()  # noqa: SIM905

    def text(mean: float) -> str:
        return " ".join(draw.choices(words, k=min(2 + int(draw.expovariate(1 / mean)), 300)))

    rows = {
        "train": [
            {"instruction": text(12), "response": text(40), "difficulty": draw.random()}
            for _ in range(400)
        ],
        "pairs": [{"id": f"p{n}", "text": text(9), "pair": n // 2} for n in range(40)],
        "math": [{"id": f"m{n}", "question": text(10), "answer": text(8)} for n in range(120)],
        "chat": [
            {
                "messages": [
                    {"role": "user", "content": text(8)},
                    {"role": "assistant", "content": text(20)},
                ]
            }
            for _ in range(80)
        ],
    }
    for name, listed in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def guide(request: pytest.FixtureRequest) -> Iterator[str]:
    """The text of a page; a simulator or gym that it starts runs, at a port that is free here."""
    text = request.getfixturevalue("page").read_text("utf-8")
    if "batchwright gym serve" in text:
        with served() as (_, port):
            yield re.sub(r"\b8023\b", str(port), text)
        return
    written = re.search(r"calls simulate .*--port (\d+)", text)
    if written is None:
        yield text
        return
    with Simulator(knee=8, latency_s=0.01).running() as url:
        yield re.sub(rf"\b{written[1]}\b", url.rpartition(":")[2], text)


@pytest.mark.guides
@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_a_guide_works_from_its_first_line_to_its_last(page, guide, workshop, capsys):
    namespace = {"__name__": "guide"}
    code_end, printed = 0, ""
    for block in blocks(guide):
        if block.file is not None:
            Path(block.file).write_text(block.text + "\n")
        for command in commands(block):
            if "batchwright demo" in command.text:
                prepare_demo(capsys)
            if any(word in command.text for word in NEEDS_MORE_THAN_A_FOLDER + TESTED_ELSEWHERE):
                continue
            code, output = run(command.words, capsys)
            place = f"{name_of(page)}:{command.line}: {command.text}"
            assert code == 0, f"{place}\n{output}"
            if command.shown is not None:
                assert same(command.shown, output), f"{place} printed\n{output}"
        if block.language == "python":
            # Blank lines before the code, so that a traceback names the line of the page.
            source = "\n" * (block.line - 1) + block.text
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, str(page), "exec"), namespace)
            code_end, printed = block.end, out.getvalue()
        elif block.language == "text" and block.line - 1 <= code_end + 2:
            assert same(block.text, printed), f"{name_of(page)}:{code_end} printed\n{printed}"


def prepare_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """The lengths that the demo measures, without the plans and the training after them."""
    from importlib.resources import files

    Path("demo").mkdir()
    rows = files("batchwright.shipped").joinpath("demo.jsonl").read_bytes()
    Path("demo/demo.jsonl").write_bytes(rows)
    words = "data lengths build -d demo/demo.jsonl -t bytes -o demo/lengths.jsonl --quiet"
    assert run(words.split(), capsys)[0] == 0


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_a_command_in_a_guide_has_only_words_the_program_knows(command):
    words = [word for word in command.words if word != "--debug"]

    function, _, unused = app.parse_args(
        words, exit_on_error=False, print_error=False, help_on_error=False
    )[:3]

    assert callable(function)
    assert not unused


def test_the_page_of_commands_has_every_command_of_data_with_an_example():
    text = (ROOT / "docs" / "commands.md").read_text("utf-8")
    used = [" ".join(command.words) for block in blocks(text) for command in commands(block)]

    missing = [
        path for path in leaves(app["data"], "data") if not any(u.startswith(path) for u in used)
    ]

    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="(.+?)"', text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        # The pages of docs/ are also built into a site, which holds nothing else.
        outside = page.is_relative_to(ROOT / "docs") and not linked.resolve().is_relative_to(
            ROOT / "docs"
        )
        if outside or not linked.exists() or (anchor and anchor not in anchors(linked)):
            broken.append(target)

    assert broken == []


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of the command, and what it prints."""
    capsys.readouterr()
    code = app.meta(words, result_action="return_value")
    seen = capsys.readouterr()
    return code, seen.out + (seen.err if code else "")


def leaves(group: App, path: str) -> Iterator[str]:
    """The full words of every command below a group."""
    for name in group:
        if not name.startswith("-"):
            below = group[name]
            deeper = [inner for inner in below if not inner.startswith("-")]
            yield from leaves(below, f"{path} {name}") if deeper else [f"{path} {name}"]


def anchors(page: Path) -> set[str]:
    """What headings are called in links, by GitHub's rule."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def same(shown: str, printed: str) -> bool:
    want, got = (
        "\n".join(line.rstrip() for line in text.strip("\n").split("\n")) + "\n"
        for text in (shown, printed)
    )
    return doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)
