"""`batchwright data kg` and `batchwright train kge`: graphs, their rules and their embeddings."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from batchwright.cli.output import Format, Quiet, progress_bar, show
from batchwright.errors import ConfigError
from batchwright.train.kgeconfig import KgeConfig

if TYPE_CHECKING:
    from batchwright.train.kge import KgeResult

__all__ = ["kg", "train_kge"]

kg = App(name="kg", help="Knowledge graphs: what is in them, rules from them, leaks between parts.")

GraphFolder = Annotated[Path, Parameter(help="A folder with train.txt, valid.txt and test.txt.")]

CHANGEABLE = ("epochs", "stop_after", "save_every", "threads")
"""What a resumed run may change; everything else would make it another run."""


@kg.command
def info(folder: GraphFolder, /, *, format: Format = "text") -> None:
    """Count facts, entities and relations; find inverse relations and unseen entities."""
    from batchwright.logic.info import graph_info
    from batchwright.logic.loaders import load_graph
    from batchwright.report.text import number, percent, table

    found = graph_info(load_graph(folder))
    counts = [
        ["entities", number(found["entities"])],
        ["relations", number(len(found["relations"]))],
        ["train, valid, test", ", ".join(number(found[part]) for part in _PARTS)],
        ["repeated lines in train", number(found["repeated"])],
        ["facts an entity, mean and most", f"{found['degree']:.1f}, {number(found['most'])}"],
        ["entities not in train", number(found["unseen_entities"])],
        ["valid and test triples with one", number(found["unseen_triples"])],
    ]
    rows = [
        [
            name,
            *(number(each[part]) for part in _PARTS),
            number(each["heads"]),
            number(each["tails"]),
        ]
        for name, each in found["relations"].items()
    ]
    text = table(["graph", found["name"]], counts)
    text += "\n\n" + table(["relation", "train", "valid", "test", "heads", "tails"], rows)
    if found["inverses"]:
        pairs = [[a, b, percent(share)] for a, b, share in found["inverses"]]
        text += "\n\n" + table(["relation", "turned, it is", "of its facts"], pairs)
    show(found, text, format)


_PARTS = ("train", "valid", "test")


@kg.command
def mine(
    folder: GraphFolder,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"], help="Where to write the rules.")],
    length: Annotated[int, Parameter(help="Edges of the longest body, 1 to 3.")] = 2,
    min_support: Annotated[int, Parameter(help="Facts a rule must foretell.")] = 2,
    min_confidence: Annotated[float, Parameter(help="Least confidence of a rule.")] = 0.02,
    most: Annotated[int, Parameter(help="Rules to keep for each relation, the best.")] = 300,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Mine chain rules from train.txt; written one a line as `name:weight:body -> head`."""
    from batchwright.logic.loaders import load_graph
    from batchwright.logic.mine import mine as mine_rules
    from batchwright.logic.mine import write_rules
    from batchwright.report.text import number, table

    graph = load_graph(folder)
    with progress_bar("counting bodies", quiet) as progress:
        mined = mine_rules(
            graph.facts,
            graph.vocab,
            length=length,
            min_support=min_support,
            min_confidence=min_confidence,
            most=most,
            progress=progress,
        )
    rules = mined.rules
    write_rules(out, rules, graph.vocab, f"{len(rules)} rules mined from {graph.name}")
    order = sorted(range(len(rules)), key=lambda r: -float(rules.weight[r]))
    best = [
        [
            rules.text(r, graph.vocab).split(":", 2)[2],
            f"{rules.weight[r]:.3f}",
            number(int(mined.support[r])),
            number(int(mined.pairs[r])),
        ]
        for r in order[:10]
    ]
    text = table(["best rules", "confidence", "support", "pairs"], best) + "\n" if best else ""
    text += f"{number(len(rules))} rules of {number(mined.bodies)} bodies: {out}"
    if mined.dropped:
        text += f"\n{number(mined.dropped)} more were good enough; keep them with a larger --most"
    facts = {
        "out": str(out),
        "rules": len(rules),
        "bodies": mined.bodies,
        "dropped": mined.dropped,
        "by_relation": {
            name: int(rules.head_ptr[p + 1] - rules.head_ptr[p])
            for p, name in enumerate(graph.vocab.predicates)
        },
    }
    show(facts, text, format)


@kg.command
def check(folder: GraphFolder, /, *, format: Format = "text") -> None:
    """Look for questions of valid.txt and test.txt that train.txt gives away; exit 1 if any."""
    from batchwright.logic.info import graph_leaks
    from batchwright.logic.loaders import load_graph
    from batchwright.report.text import number, table

    found = graph_leaks(load_graph(folder))
    leaks = found["leaks"]
    rows = [
        [part, number(count), number(found["turned"][part])]
        for part, count in found["questions"].items()
    ]
    text = table([found["name"], "questions", "known from the other end"], rows)
    for leak in leaks[:10]:
        text += f"\nleak: {leak['triple']}, number {leak['row']} of {leak['part']}"
    text += f"\n{number(len(leaks))} leaks" if leaks else "\nno leaks"
    show(found, text, format)
    if leaks:
        raise SystemExit(1)


def train_kge(
    *,
    config: Annotated[KgeConfig | None, Parameter(name="*")] = None,
    resume: Annotated[
        Path | None, Parameter(help="Go on with the run in this folder, as it was configured.")
    ] = None,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Train an embedding of a knowledge graph, with exact resume."""
    if resume is not None:
        config = _resumed(resume, config)
    config = (config or KgeConfig()).named()
    from batchwright.train.kge import train_kge as train

    with progress_bar("training", quiet) as progress:
        result = train(config, resume=resume is not None, progress=progress)
    facts = {**dataclasses.asdict(result), "run_dir": str(result.run_dir)}
    show(facts, _table(result), format)


def _resumed(run: Path, given: KgeConfig | None) -> KgeConfig:
    """The run's own settings, with those that a resumed run may change."""
    saved = dataclasses.replace(KgeConfig.load(run / "config.toml"), run_dir=run, stop_after=0)
    if given is None:
        return saved
    blank = KgeConfig()
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(KgeConfig):
        value = getattr(given, field.name)
        if value not in (getattr(blank, field.name), getattr(saved, field.name)):
            changed[field.name] = value
    fixed = sorted(changed.keys() - set(CHANGEABLE))
    if fixed:
        raise ConfigError(
            f"a resumed run keeps its {', '.join(fixed)}; what may change is "
            f"{', '.join(CHANGEABLE)}"
        )
    return dataclasses.replace(saved, **changed)


def _table(result: "KgeResult") -> str:
    from batchwright.report.text import number, seconds, table

    mrr = "-" if result.best_mrr is None else f"{result.best_mrr:.4f}"
    rows = [
        ["epochs", number(result.epoch)],
        ["steps", number(result.step)],
        ["loss", "-" if result.loss is None else f"{result.loss:.4f}"],
        ["best MRR on valid", mrr],
        ["at epoch", number(result.best_epoch)],
        ["time", seconds(result.seconds)],
    ]
    end = (
        f"done: {result.run_dir}/model"
        if result.finished
        else f"stopped and saved; go on with: batchwright train kge --resume {result.run_dir}"
    )
    return table(["run", str(result.run_dir)], rows) + "\n" + end
