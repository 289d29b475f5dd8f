"""`batchwright prove`: answer a query over a knowledge graph, with proofs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from batchwright.cli.output import Format, show
from batchwright.errors import BadProgram, ConfigError

if TYPE_CHECKING:
    from batchwright.logic.loaders import Graph
    from batchwright.logic.prove.proofs import Node, Proof
    from batchwright.logic.rank.ranking import Side
    from batchwright.logic.rules import Rules
    from batchwright.logic.vocab import Vocab

__all__ = ["prove"]


def prove(
    query: Annotated[
        str, Parameter(help="Such as 'uncle(X, joren)', or 'uncle(anselm, joren)': is it true?")
    ],
    *,
    data: Annotated[
        str, Parameter(name=["--data", "-d"], help="Folder with train.txt; `family` is built in.")
    ] = "family",
    rules: Annotated[
        Path | None,
        Parameter(name=["--rules", "-r"], help="Rule file; default: rules.txt of the folder."),
    ] = None,
    mine: Annotated[bool, Parameter(negative="", help="Mine the rules from the facts.")] = False,
    prover: Annotated[
        Path | None,
        Parameter(help="Run of `batchwright train prover`: its rules, weighted by its policy."),
    ] = None,
    kge: Annotated[
        Path | None,
        Parameter(help="Run of `batchwright train kge`: its probability counts as evidence too."),
    ] = None,
    accept: Annotated[
        float | None,
        Parameter(help="Minimum probability of p_kge(X,Y) in rules; default: chosen on valid.txt."),
    ] = None,
    depth: Annotated[
        int, Parameter(help="Maximum steps of a proof; 0: 5, or one rule with --mine or --prover.")
    ] = 0,
    most: Annotated[int, Parameter(help="Maximum number of answers to show.")] = 10,
    all: Annotated[
        bool, Parameter(negative="", help="Show all proofs of an answer, not only the best.")
    ] = False,
    new: Annotated[
        bool, Parameter(negative="", help="Leave out answers that are facts already.")
    ] = False,
    hide: Annotated[
        bool, Parameter(negative="", help="Hide the fact that is an answer from its own proofs.")
    ] = False,
    format: Format = "text",
) -> None:
    """Prove a query from facts and rules: answers by all evidence for them, each with its proof.

    Every rule that concludes an answer is a witness as strong as its best proof. Witnesses, and
    with --kge the embedding, are joined by a noisy-or; with --prover the evidence of proofs is the
    probability that the policy gives the answer.
    """
    from batchwright.logic.loaders import load_graph
    from batchwright.logic.prove.answers import answers
    from batchwright.logic.rules import parse_atom

    if sum((mine, rules is not None, prover is not None)) > 1:
        raise ConfigError("--mine, --rules and --prover exclude each other; give one of them")
    if accept is not None and kge is None:
        raise ConfigError("--accept needs an embedding; give one with --kge")
    if min(depth, most - 1) < 0:
        raise ConfigError(f"--depth must be at least 0 and --most 1, got {depth} and {most}")
    base = load_graph(data).without_test()
    graph, horn = _rules(base, data, rules, mine, prover, kge, accept)
    vocab = graph.vocab
    (predicate, first, second), names = parse_atom(query, vocab)
    h, t = (-1 if term >= vocab.num_entities else term for term in (first, second))
    if h == t == -1:
        raise BadProgram(f"{query!r} leaves both arguments open; name at least one entity")
    side: Side = "head" if h < 0 else "tail"
    evidence = _Evidence(base, prover, kge, predicate, t if h < 0 else h, side)
    horn = evidence.weighed(horn)
    one_rule = not depth and (mine or prover is not None)
    if not depth:
        depth = 1 + int(horn.body_len.max(initial=0)) if one_rule else 5
    asked = h, predicate, t
    found = answers(asked, graph.facts, horn, depth, hide=hide, every=all, one_rule=one_rule)
    shown = []
    for answer in found.found:
        if not (new and answer.known):
            kept = answer.proofs if all else answer.proofs[:1]
            # A rule without a body, say, proves its head of anything: no entity is named then.
            anything = answer.entity >= vocab.num_entities
            bound = None if anything else vocab.term(answer.entity)
            shown.append(
                {
                    "atom": vocab.atom(*kept[0].tree(horn).atom),
                    "bindings": dict.fromkeys(names, bound),
                    "anything": anything,
                    "known": answer.known,
                    **evidence.of(None if anything else answer.entity, answer.confidence),
                    "proofs": [_proof(proof, horn, vocab) for proof in kept],
                    "more": len(answer.proofs) - len(kept),
                }
            )
    # What holds of anything at all ranks nobody, so it comes after all that is named.
    shown.sort(
        key=lambda one: (one["anything"], -one["score"], one["proofs"][0]["steps"], one["atom"])
    )
    summary = {
        "query": query,
        "answers": [
            {**one, "proofs": [{k: v for k, v in p.items() if k != "text"} for p in one["proofs"]]}
            for one in shown
        ],
        "known_left_out": sum(answer.known for answer in found.found) if new else 0,
        "complete": found.complete,
        "depth": depth,
        "facts": len(graph.facts),
        "rules": len(horn),
    }
    show(summary, _text(summary, shown, most), format)


def _rules(
    graph: "Graph",
    data: str,
    rules: Path | None,
    mine: bool,
    prover: Path | None,
    kge: Path | None,
    accept: float | None,
) -> "tuple[Graph, Rules]":
    """The rules, and the graph with what an embedding accepts where they ask for that."""
    from batchwright.files import existing
    from batchwright.logic.loaders import shipped_graph
    from batchwright.logic.rules import parse_rules

    if mine:
        from batchwright.logic.mine.mining import mine as mined

        path, horn = None, mined(graph.train, graph.vocab).rules
    elif prover is not None:
        path = existing(prover / "rules.txt", "rules of a run of `batchwright train prover`")
    else:
        folder = shipped_graph(data) if data == "family" and not Path(data).exists() else Path(data)
        if rules is None and not (folder / "rules.txt").exists():
            raise ConfigError(f"{folder} has no rules.txt; give --rules FILE, --mine or --prover")
        path = rules or folder / "rules.txt"
    if path is not None:
        if kge is not None:
            from batchwright.logic.kge import read_rules

            horn, accepted = read_rules(path, graph, kge, accept)
            return (accepted.graph if accepted else graph), horn
        horn = parse_rules(path, graph.vocab)
    elif accept is not None:
        raise ConfigError("mined rules ask for no p_kge; leave --accept out")
    return graph, horn


class _Evidence:
    """What a policy and an embedding say of the answers to one query."""

    def __init__(
        self,
        graph: "Graph",
        prover: Path | None,
        kge: Path | None,
        predicate: int,
        given: int,
        side: "Side",
    ) -> None:
        import numpy as np

        self._policy = self._embedding = self._weights = None
        asked = np.array([given], np.int32), np.array([predicate], np.int32)
        if prover is not None:
            from batchwright.train.prover.loop import load_prover
            from batchwright.train.prover.scorer import PolicyScorer

            scorer = load_prover(prover, graph)
            self._policy = scorer.mass(*asked, side)[0]
            if isinstance(scorer, PolicyScorer):
                chains = scorer.asked.chains
                own = chains.origin % 2 == (0 if side == "tail" else 1)
                self._weights = dict(
                    zip(
                        (chains.origin[own] // 2).tolist(),
                        scorer.probabilities[own].tolist(),
                        strict=True,
                    )
                )
        if kge is not None:
            from batchwright.logic.kge import load_scorer

            self._embedding = np.exp(load_scorer(kge, graph).scores(*asked, side)[0])

    def weighed(self, rules: "Rules") -> "Rules":
        """The rules with the probabilities at which the policy draws them, where it has such."""
        if self._weights is None:
            return rules
        import dataclasses

        import numpy as np

        weight = np.array([self._weights.get(r, 0.0) for r in range(len(rules))])
        return dataclasses.replace(rules, weight=weight)

    def of(self, entity: int | None, confidence: float) -> dict[str, Any]:
        """The score of an answer, and what it is made of; None: anything at all, by rules alone."""
        parts: dict[str, Any] = {"rules": confidence}
        if self._policy is not None and entity is not None:
            parts = {"policy": float(self._policy[entity])}
        if self._embedding is not None and entity is not None:
            parts["embedding"] = float(self._embedding[entity])
        doubt = 1.0
        for part in parts.values():
            doubt *= 1 - part
        return {"score": 1 - doubt, "evidence": parts}


def _proof(proof: "Proof", rules: "Rules", vocab: "Vocab") -> dict[str, Any]:
    tree = proof.tree(rules)
    return {
        "weight": proof.weight(rules),
        "steps": len(proof),
        "proof": _plain(tree, rules, vocab),
        "text": "\n".join(tree.lines(rules, vocab)),
    }


def _text(summary: dict[str, Any], shown: list[dict[str, Any]], most: int) -> str:
    cut = "" if summary["complete"] else "; the search was cut off, there may be more"
    left = summary["known_left_out"]
    without = f"; {left:,} known facts left out" if left else ""
    if not shown:
        return f"no proof of {summary['query']} in {summary['depth']} steps{without}{cut}"
    parts = []
    for one in shown[:most]:
        made = ", ".join(f"{name} {value:.3g}" for name, value in one["evidence"].items())
        line = f"{one['atom']}: {one['score']:.3g}"
        line += f" ({made})" if len(one["evidence"]) > 1 else ""
        line += ", a known fact" if one["known"] else ""
        line += ", of anything at all" if one["anything"] else ""
        parts.append("\n".join([line, *(_drawn(proof) for proof in one["proofs"])]))
        if one["more"]:
            also = "rule concludes" if one["more"] == 1 else "rules conclude"
            parts[-1] += f"\n  {one['more']:,} other {also} it; show them with --all"
    count = f"{len(shown):,} answer{'s' * (len(shown) > 1)}"
    if len(shown) > most:
        count += f", {most:,} shown; show more with --most"
    return "\n\n".join([*parts, count + without + cut])


def _drawn(proof: dict[str, Any]) -> str:
    lines = proof["text"].replace("\n", "\n  ")
    steps = f"{proof['steps']} step{'s' * (proof['steps'] > 1)}"
    return f"  {lines}\n  {steps}, weight {proof['weight']:.3g}"


def _plain(node: "Node", rules: "Rules", vocab: "Vocab") -> dict[str, Any]:
    """The proof tree as JSON."""
    by = None if node.rule is None else rules.names[node.rule]
    children = [_plain(child, rules, vocab) for child in node.children]
    return {"atom": vocab.atom(*node.atom), "rule": by, "children": children}
