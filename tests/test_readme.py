"""What stands at the front door is so: generated parts, versions, targets, and the four walks."""

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import batchwright

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
STEP = re.compile(r"^\d+\. `(?P<file>[\w/]+\.py)` `(?P<name>[\w.]+)`", re.MULTILINE)


@pytest.mark.parametrize(
    "script",
    [
        *("tools/tree.py", "tools/picture.py", "tools/explain.py", "tools/reference.py"),
        "benchmarks/readme_numbers.py",
    ],
)
def test_what_is_generated_is_up_to_date(script: str) -> None:
    words = [sys.executable, ROOT / script, "--check"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr


def test_the_readme_is_short_and_has_eight_numbers() -> None:
    numbers = README.partition("<!-- numbers -->")[2].partition("<!-- end of numbers -->")[0]

    assert len(README.splitlines()) <= 145
    assert len(re.findall(r"^\| (?!what|-)", numbers, re.MULTILINE)) == 8


def test_no_page_installs_from_an_index_that_does_not_have_the_package() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    wrong = [page.name for page in pages if re.search(r"install '?batchwright", page.read_text())]

    assert wrong == []


def test_the_overrides_for_verl_are_those_that_are_tested_with_verl() -> None:
    (command,) = re.findall(r"python -m verl\.trainer\.main_ppo ((?:.*\\\n)*.*)", README)
    tested = (ROOT / "examples" / "rewards" / "verl_manager.txt").read_text("utf-8")
    overrides = [line for line in tested.splitlines() if not line.startswith("#")]
    config = "examples/rewards/judge.toml"

    assert sorted(
        shlex.split(command.replace("\\\n", " ").replace("rewards.toml", config))
    ) == sorted(overrides)


def test_every_step_of_the_walks_is_there() -> None:
    walks = re.split(r"^## ", (ROOT / "docs" / "architecture.md").read_text("utf-8"), flags=re.M)
    found = {walk.partition("\n")[0]: STEP.findall(walk) for walk in walks}
    found = {title: steps for title, steps in found.items() if steps}

    assert len(found) == 4
    for title, steps in found.items():
        missing = [f"{file}: {name}" for file, name in steps if not defines(file, name)]
        assert missing == [], title


def test_every_file_that_a_contributor_is_sent_to_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"`([\w/.]+/[\w*]+\.py)`", text))
    places = (ROOT, ROOT / "src" / "batchwright")

    assert len(named) >= 8
    assert [name for name in named if not any(list(p.glob(name)) for p in places)] == []


def defines(file: str, name: str) -> bool:
    """Whether a file of the package has a function, a class or a method of this name."""
    path = ROOT / "src" / "batchwright" / file
    if not path.is_file():
        return False
    inside: list[ast.stmt] = ast.parse(path.read_text("utf-8")).body
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        named = [n for b in inside for n in [b, *_under_if(b)] if isinstance(n, kinds)]
        fitting = [node for node in named if node.name == part]
        if not fitting:
            return False
        inside = fitting[0].body
    return True


def _under_if(node: ast.stmt) -> list[ast.stmt]:
    """Definitions that wait for an optional package stand below an `if`."""
    return node.body if isinstance(node, ast.If) else []


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert "version" not in PROJECT["project"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", batchwright.__version__)


def test_the_workflow_tests_the_python_versions_of_the_classifiers() -> None:
    said = [c.rpartition(" ")[2] for c in PROJECT["project"]["classifiers"] if ":: 3." in c]
    tested = [
        re.findall(r'"(3\.\d+)"', matrix)
        for workflow in WORKFLOWS
        for matrix in re.findall(r"^ +python: \[(.*)\]", workflow.read_text(), re.MULTILINE)
    ]

    assert tested == [said]


def test_the_workflow_and_the_guide_for_contributors_call_targets_that_are_there() -> None:
    called = set()
    for workflow in WORKFLOWS:
        text = workflow.read_text()
        assert re.findall(r"^ +- run: (.*)$", text, re.MULTILINE) == [
            "make ${{ matrix.target }}"
        ] * text.count("- run:")
        for listed in re.findall(r"target: \[(.*)\]", text):
            called |= set(listed.split(", "))
    for page in ("README.md", "CONTRIBUTING.md"):
        called |= set(re.findall(r"\bmake ([a-z][\w-]*)", (ROOT / page).read_text()))
    gate = set(re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))

    assert called <= TARGETS
    assert gate <= called


def test_hooks_run_the_linters_of_make_lint() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    lint = makefile.partition("\nlint:")[2].partition("\n\n")[0]
    tools = set(re.findall(r"\$\(BIN\)/([\w-]+)", lint))

    assert tools == {"ruff", "mypy", "lint-imports"}
    assert tools <= set(re.findall(r"entry: \.venv/bin/([\w-]+)", hooks))


def test_the_reference_has_every_public_package_and_every_integration() -> None:
    package = ROOT / "src" / "batchwright"
    # Commands are reached by what is typed, and `shipped` holds data.
    others = {"cli", "shipped", "train", "integrations"}
    public = {path.parent.name for path in package.glob("*/__init__.py")} - others
    public |= {f"train.{path.parent.name}" for path in package.glob("train/*/__init__.py")}
    public |= {f"integrations.{path.stem}" for path in package.glob("integrations/[a-z]*.py")}
    pages = sorted((ROOT / "docs" / "reference").glob("*.md"))
    text = "".join(page.read_text() for page in pages)
    shown = set(re.findall(r"^::: batchwright\.(\S+)$", text, re.MULTILINE))
    navigation = (ROOT / "mkdocs.yml").read_text()

    assert public <= shown
    assert [page.name for page in pages if f"reference/{page.name}" not in navigation] == []
