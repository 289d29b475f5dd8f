"""`batchwright prove`: answer a query over a knowledge graph, with proofs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from batchwright.cli.output import Format, show

if TYPE_CHECKING:
    from batchwright.logic.prove.proofs import Node
    from batchwright.logic.rules import Rules
    from batchwright.logic.vocab import Vocab

__all__ = ["prove"]


def prove(
    query: Annotated[str, Parameter(help="Such as 'uncle(mira, X)' or 'uncle(mira, tomas)'.")],
    *,
    data: Annotated[
        str, Parameter(name=["--data", "-d"], help="Folder with train.txt; `family` is built in.")
    ] = "family",
    rules: Annotated[
        Path | None,
        Parameter(name=["--rules", "-r"], help="Rule file; default: rules.txt of the folder."),
    ] = None,
    mine: Annotated[bool, Parameter(negative="", help="Mine the rules from the facts.")] = False,
    kge: Annotated[
        Path | None,
        Parameter(help="Run of `batchwright train kge`, which answers p_kge(X,Y) in rules."),
    ] = None,
    accept: Annotated[
        float | None,
        Parameter(help="Minimum probability of its answers; default: chosen on valid.txt."),
    ] = None,
    depth: Annotated[int, Parameter(help="Maximum proof depth in steps.")] = 5,
    most: Annotated[int, Parameter(help="Maximum number of answers to show.")] = 10,
    hide: Annotated[
        bool, Parameter(negative="", help="Hide the queried fact itself from its proof.")
    ] = False,
    format: Format = "text",
) -> None:
    """Prove a query from facts and rules, and print the proof as a tree with rule names."""
    from batchwright.errors import BadProgram, ConfigError
    from batchwright.logic.loaders import load_graph, shipped_graph
    from batchwright.logic.prove.proofs import prove as search
    from batchwright.logic.rules import parse_atom, parse_rules

    folder = shipped_graph(data) if data == "family" and not Path(data).exists() else Path(data)
    graph = load_graph(folder)
    vocab = graph.vocab
    if mine and rules is not None:
        raise ConfigError("--mine and --rules exclude each other; give one of them")
    if kge is not None and mine:
        raise ConfigError("mined rules do not use p_kge; give --kge with --rules that do")
    if accept is not None and kge is None:
        raise ConfigError("--accept needs an embedding; give one with --kge")
    if mine:
        from batchwright.logic.mine.mining import mine as mined

        horn = mined(graph.facts, vocab).rules
    else:
        if rules is None and not (folder / "rules.txt").exists():
            raise ConfigError(f"{folder} has no rules.txt; give --rules FILE or --mine")
        path = rules or folder / "rules.txt"
        if kge is None:
            horn = parse_rules(path, vocab)
        else:
            from batchwright.logic.kge import read_rules

            horn, accepted = read_rules(path, graph, kge, accept)
            graph = accepted.graph if accepted else graph
            vocab = graph.vocab
    (predicate, first, second), names = parse_atom(query, vocab)
    asked = tuple(-1 if term >= vocab.num_entities else term for term in (first, second))
    if asked == (-1, -1):
        raise BadProgram(f"{query!r} leaves both arguments open; name at least one entity")
    triple = (asked[0], predicate, asked[1])
    found = search(triple, graph.facts, horn, depth, hide=[triple] if hide else ())
    answers: list[dict[str, Any]] = []
    for proof in found.found:
        tree = proof.tree(horn)
        bound = {name: vocab.term(proof.answer) for name in names}
        answers.append(
            {
                "atom": vocab.atom(*tree.atom),
                "bindings": bound,
                "steps": len(proof),
                "weight": proof.weight(horn),
                "proof": _plain(tree, horn, vocab),
                "text": "\n".join(tree.lines(horn, vocab)),
            }
        )
    answers.sort(key=lambda answer: (answer["steps"], -answer["weight"], answer["atom"]))
    summary = {
        "query": query,
        "answers": len(answers),
        "complete": found.complete,
        "depth": depth,
        "facts": len(graph.facts),
        "rules": len(horn),
        "proofs": [{k: v for k, v in one.items() if k != "text"} for one in answers],
    }
    show(summary, _text(query, answers, found.complete, depth, most), format)


def _text(query: str, answers: list[dict[str, Any]], complete: bool, depth: int, most: int) -> str:
    if not answers:
        end = "" if complete else "; the search was cut off, there may be one"
        return f"no proof of {query} in {depth} steps{end}"
    parts = [
        f"{one['text']}\n{one['steps']} step{'s' * (one['steps'] > 1)}, weight {one['weight']:.3g}"
        for one in answers[:most]
    ]
    if len(answers) > most:
        parts.append(f"and {len(answers) - most:,} more answers; show them with a larger --most")
    if not complete:
        parts.append("the search was cut off: there may be more answers")
    return "\n\n".join(parts)


def _plain(node: "Node", rules: "Rules", vocab: "Vocab") -> dict[str, Any]:
    """The proof tree as JSON."""
    by = None if node.rule is None else rules.names[node.rule]
    children = [_plain(child, rules, vocab) for child in node.children]
    return {"atom": vocab.atom(*node.atom), "rule": by, "children": children}
