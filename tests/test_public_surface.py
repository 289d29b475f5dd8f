"""What the package offers by name: no more, no less, and at no cost to those who do not ask."""

import ast
import importlib
import inspect
import pickle
import pkgutil
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

import batchwright
from batchwright import batching, errors
from batchwright.cli import app, data, train

DOCUMENT_NAMES = """
BucketSpec BucketStats TokenBudgetBatchSampler BatchSpec BatchMetrics BatchShapeHistogram
BatchingConfig BatchingMode PadPolicy BatchPlan BatchPlanBuilder EpochPlan MicrobatchSpec
PackingConfig PackingMode PackedSequence PackingMetrics pack_sequences
create_segment_attention_mask compute_batch_fingerprint verify_batch_fingerprint LengthCache
LengthEntry BatchWriter BatchReader CollatedBatch DistributedConfig shard_batch_plan
interleave_microbatches CheckpointPosition compute_length_histogram analyze_bucket_efficiency
suggest_bucket_edges create_efficiency_report
"""
ROOT = Path(str(files(batchwright)))
MODULES = [
    batchwright.__name__,
    *(found.name for found in pkgutil.walk_packages([str(ROOT)], "batchwright.")),
]
NEEDS_TORCH = re.compile(r"batchwright\.(train|integrations|__main__)\b")
HEAVY = ("torch", "transformers", "datasets", "matplotlib", "scipy.optimize", "pandas", "aiohttp")
CLASSES = [
    value
    for _, value in inspect.getmembers(errors, inspect.isclass)
    if value.__module__ == errors.__name__
]


def source(module: str) -> ast.Module:
    folder = ROOT.joinpath(*module.split(".")[1:])
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    return ast.parse(path.read_text())


def declared(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def defined(tree: ast.Module) -> set[str]:
    """Public classes and functions of a module; commands are reached by their words instead."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {
        node.name
        for node in tree.body
        if isinstance(node, kinds)
        and not node.name.startswith("_")
        and not any(
            re.search(r"\.(command|default)\b", ast.unparse(d)) for d in node.decorator_list
        )
    }


def reexported(tree: ast.Module) -> set[str]:
    return {
        alias.asname or alias.name
        for node in [*tree.body, *_lazy(tree)]
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("batchwright.")
        and node.module != "batchwright.lazy"
        for alias in node.names
    }


def _lazy(tree: ast.Module) -> list[ast.stmt]:
    """Imports that only a type checker makes; `__getattr__` makes them for everyone else."""
    return [
        inside
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and node.orelse
        for inside in node.body
    ]


def assigned(tree: ast.Module) -> set[str]:
    targets = [
        target
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    # Numbers that belong together are given their names in one line.
    flat = [one for t in targets for one in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return {target.id for target in flat if isinstance(target, ast.Name)}


@pytest.mark.parametrize("name", DOCUMENT_NAMES.split())
def test_names_of_the_document_come_from_batching(name) -> None:
    assert name in batching.__all__
    assert getattr(batching, name).__name__ == name


@pytest.mark.parametrize("module", MODULES)
def test_all_is_what_a_module_defines_or_passes_on(module) -> None:
    tree = source(module)
    names = declared(tree)
    if names is None:
        assert not defined(tree), "a module that defines something says so in __all__"
        return
    assert names == list(dict.fromkeys(names))
    assert defined(tree) <= set(names)
    assert set(names) <= defined(tree) | reexported(tree) | assigned(tree)
    # A folder of commands registers what it imports; it passes nothing on.
    if ROOT.joinpath(*module.split(".")[1:]).is_dir() and ".cli" not in module:
        assert reexported(tree) <= set(names)


@pytest.mark.parametrize("module", [name for name in MODULES if not NEEDS_TORCH.match(name)])
def test_all_names_can_be_imported(module) -> None:
    loaded = importlib.import_module(module)
    for name in declared(source(module)) or ():
        assert hasattr(loaded, name)


@pytest.mark.parametrize("module", ["batchwright", "batchwright.data", "batchwright.batching"])
def test_importing_an_engine_imports_nothing_heavy(module) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    loaded = set(done.stdout.split())

    assert module in loaded
    assert not loaded & set(HEAVY)
    if module == "batchwright":
        assert "numpy" not in loaded


def test_the_package_says_that_it_is_typed() -> None:
    assert files(batchwright).joinpath("py.typed").is_file()


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_every_error_stands_in_the_drawn_tree_with_its_parents(error) -> None:
    drawn = re.findall(r"^    (?:[├└]── )?(\w+)(?: +\((\w+)\))?", errors.__doc__ or "", re.M)
    parents = dict(drawn)

    assert error.__name__ in errors.__all__
    assert error.__name__ in parents
    assert issubclass(error, errors.BatchwrightError)
    if error is not errors.BatchwrightError:
        assert error.__mro__[1] is errors.BatchwrightError
        assert [parent.__name__ for parent in error.__bases__[1:]] == [parents[error.__name__]]
        assert error.__bases__[1].__module__ == "builtins"


def test_the_drawn_tree_names_no_error_that_is_not_there() -> None:
    drawn = re.findall(r"^    (?:[├└]── )?(\w+)", errors.__doc__ or "", re.M)

    assert sorted(drawn) == sorted(error.__name__ for error in CLASSES)


@pytest.mark.parametrize("error", CLASSES, ids=lambda error: error.__name__)
def test_errors_survive_the_trip_between_processes(error) -> None:
    sent = error("the disk is full; free some space")
    received = pickle.loads(pickle.dumps(sent))

    assert type(received) is error
    assert str(received) == str(sent) == "the disk is full; free some space"
    assert received.args == sent.args


PROJECT = Path(__file__).parents[1]
PAGES = [
    path.read_text("utf-8")
    for path in (
        *PROJECT.glob("*.md"),
        *PROJECT.glob("docs/**/*.md"),
        *PROJECT.glob("examples/**/*.md"),
        *PROJECT.glob("examples/**/*.py"),
    )
]
TREES = {module: source(module) for module in MODULES}


def reached_from(module: str) -> set[str]:
    """The modules that one imports, anywhere in it, or names in a string to import them later."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    # To import a module is to import the packages around it.
    found |= {name.rpartition(".")[0] for name in found | {module}}
    return found & TREES.keys()


def test_no_module_is_reached_only_by_tests() -> None:
    commands = [f"batchwright.cli.{name}" for name in app.COMMANDS]
    commands += [f"batchwright.cli.data.{name}" for name in data.GROUPS]
    commands += [
        f"batchwright.cli.train.{place.partition(':')[0]}" for place, _ in train.COMMANDS.values()
    ]
    packages = [name for name in MODULES if ROOT.joinpath(*name.split(".")[1:]).is_dir()]
    # A page names a module, or something in it.
    named = {name for page in PAGES for name in re.findall(r"batchwright(?:\.\w+)+", page)}
    named |= {name.rpartition(".")[0] for name in named}
    entries = ["batchwright.__main__", "batchwright.cli.app", *commands, *packages, *named]

    seen: set[str] = set()
    waiting = set(entries) & TREES.keys()
    while waiting:
        module = waiting.pop()
        seen.add(module)
        waiting |= reached_from(module) - seen

    assert sorted(set(MODULES) - seen) == []


def test_no_function_or_class_is_used_only_by_tests() -> None:
    used = {
        name
        for tree in TREES.values()
        for node in ast.walk(tree)
        for name in (
            [node.id]
            if isinstance(node, ast.Name)
            else [node.attr]
            if isinstance(node, ast.Attribute)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom)
            else re.findall(r"`(\w+)(?:\(\))?`", node.value)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            else []
        )
    }
    used |= {word for page in PAGES for word in re.findall(r"\w+", page)}
    # What the reference shows whole is public, whoever uses it.
    shown = {name for page in PAGES for name in re.findall(r"^::: ([\w.]+)$", page, re.M)}

    unused = [
        f"{module}.{name}"
        for module, tree in TREES.items()
        if module not in shown
        for name in sorted(defined(tree) - used)
    ]
    assert unused == []


def test_no_file_of_the_package_is_ignored_by_git() -> None:
    # A wheel and an sdist leave out what git ignores, and then lack it without a word.
    checkout = ROOT.parents[1]
    if not (checkout / ".git").exists():
        pytest.skip("not a checkout of git")
    sources = [path for path in ROOT.rglob("*.py") if "compiled" not in path.parts]
    names = "\n".join(str(path.relative_to(checkout)) for path in sources)
    asked = ["git", "check-ignore", "--no-index", "--stdin"]
    ignored = subprocess.run(asked, input=names, capture_output=True, text=True, cwd=checkout)
    assert len(sources) > 100
    assert ignored.stdout == ""
