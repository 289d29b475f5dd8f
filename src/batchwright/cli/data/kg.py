"""`batchwright data kg`: inspect knowledge graphs, mine rules, check for test leakage."""

import re
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from batchwright.cli.output import Force, Format, Quiet, progress_bar, show
from batchwright.errors import BadFile

__all__ = ["kg"]

kg = App(name="kg")
_MINED = re.compile(rb"# sealed [^\n]*\n# \d+ rules mined from ")
"""How a file of mined rules begins."""

GraphFolder = Annotated[Path, Parameter(help="A folder with train.txt, valid.txt and test.txt.")]


@kg.command
def info(folder: GraphFolder, /, *, format: Format = "text") -> None:
    """Count facts, entities and relations; find inverse relations and unseen entities."""
    from batchwright.logic.audit import graph_info
    from batchwright.logic.loaders import load_graph
    from batchwright.report.text import number, percent, table

    found = graph_info(load_graph(folder))
    counts = [
        ["entities", number(found["entities"])],
        ["relations", number(len(found["relations"]))],
        ["train, valid, test", ", ".join(number(found[part]) for part in _PARTS)],
        ["duplicates in train", number(found["repeated"])],
        ["facts per entity, mean and max", f"{found['degree']:.1f}, {number(found['most'])}"],
        ["entities not in train", number(found["unseen_entities"])],
        ["valid and test triples with such", number(found["unseen_triples"])],
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
        text += "\n\n" + table(["relation", "inverse", "share of its facts"], pairs)
    show(found, text, format)


_PARTS = ("train", "valid", "test")


@kg.command
def mine(
    folder: GraphFolder,
    /,
    *,
    out: Annotated[Path, Parameter(name=["--out", "-o"], help="Where to write the rules.")],
    length: Annotated[int, Parameter(help="Longest rule body in edges, 1 to 3.")] = 3,
    min_support: Annotated[int, Parameter(help="Minimum support: facts it must predict.")] = 2,
    min_confidence: Annotated[float, Parameter(help="Minimum confidence of a rule.")] = 0.01,
    most: Annotated[int, Parameter(help="Top rules to keep for each relation.")] = 300,
    constants: Annotated[
        int,
        Parameter(help="Top rules with constants to keep for each end of a relation; 0: none."),
    ] = 1000,
    seconds: Annotated[float, Parameter(help="Time to count in; what is left is reported.")] = 300,
    seed: Annotated[int, Parameter(help="Random seed of what is sampled on large graphs.")] = 0,
    force: Force = False,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Mine chains and rules with constants from train.txt; one per line, body -> head."""
    from batchwright.files import check_output
    from batchwright.logic.loaders import load_graph
    from batchwright.logic.mine.constants import CONSTANT_CONFIDENCE, mine_constants
    from batchwright.logic.mine.mining import mine as mine_rules
    from batchwright.logic.mine.mining import write_rules
    from batchwright.report.text import number, table

    check_output(out, _is_mined, force=force)
    graph = load_graph(folder)
    with progress_bar("counting bodies", quiet) as progress:
        # The triples: an index would not fit for many entities and relations.
        mined = mine_rules(
            graph.train,
            graph.vocab,
            length=length,
            min_support=min_support,
            min_confidence=min_confidence,
            most=most,
            seconds=seconds,
            seed=seed,
            progress=progress,
        )
    rules = mined.rules
    chains = len(rules)
    if constants:
        with progress_bar("rules with constants", quiet) as progress:
            rules = rules.plus(
                mine_constants(
                    graph.train,
                    graph.vocab,
                    min_support=min_support,
                    min_confidence=max(min_confidence, CONSTANT_CONFIDENCE),
                    most=constants,
                    progress=progress,
                )
            )
    write_rules(out, rules, graph.vocab, f"{len(rules)} rules mined from {graph.name}")
    order = sorted(range(chains), key=lambda r: -float(rules.weight[r]))
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
    text += f"{number(chains)} rules from {number(mined.bodies)} bodies"
    text += f" and {number(len(rules) - chains)} with constants: {out}"
    if mined.dropped:
        text += f"\n{number(mined.dropped)} more pass the thresholds; raise --most to keep them"
    if mined.sampled:
        text += (
            f"\n{number(mined.sampled)} bodies begin at too many entities: their confidence is "
            f"that of a sample"
        )
    if mined.left:
        why = "rarer than those" if mined.in_time else "for which no time was left; raise --seconds"
        text += f"\n{number(mined.left)} more bodies were found and not counted: {why}"
    facts = {
        "out": str(out),
        "rules": len(rules),
        "chains": chains,
        "bodies": mined.bodies,
        "dropped": mined.dropped,
        "sampled": mined.sampled,
        "left": mined.left,
        "in_time": mined.in_time,
        "by_relation": {
            name: int(rules.head_ptr[p + 1] - rules.head_ptr[p])
            for p, name in enumerate(graph.vocab.predicates)
        },
    }
    show(facts, text, format)


def _is_mined(content: bytes) -> bool:
    """Whether these are mined rules, and nobody has edited them since."""
    from batchwright.sealed import check_text

    try:
        return bool(_MINED.match(content)) and check_text(content.decode(), Path(), "")
    except (BadFile, UnicodeDecodeError):
        return False


@kg.command
def check(folder: GraphFolder, /, *, format: Format = "text") -> None:
    """Check for test leakage: valid and test triples that train gives away; exit 1 if any."""
    from batchwright.logic.audit import graph_leaks
    from batchwright.logic.loaders import load_graph
    from batchwright.report.text import number, table

    found = graph_leaks(load_graph(folder))
    leaks = found["leaks"]
    rows = [
        [part, number(count), number(found["inverse"][part])]
        for part, count in found["questions"].items()
    ]
    text = table([found["name"], "triples", "inverse in train"], rows)
    for leak in leaks[:10]:
        text += f"\nleak: {leak['triple']}, number {leak['row']} of {leak['part']}"
    text += f"\n{number(len(leaks))} leaks" if leaks else "\nno leaks"
    show(found, text, format)
    if leaks:
        raise SystemExit(1)
