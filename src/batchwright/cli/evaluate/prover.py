"""`batchwright evaluate prover`: filtered ranking with rules, embeddings, a prover or both."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from batchwright.cli.output import Format, Quiet, progress_bar, show
from batchwright.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.logic.loaders import Graph
    from batchwright.logic.rank.ranking import Scorer
    from batchwright.logic.rank.scorers import RuleScorer
    from batchwright.train.prover.loop import Proofs

__all__ = ["evaluate_prover"]

Mode = Literal["rules", "kge", "hybrid", "rl"]


def evaluate_prover(
    *,
    data: Annotated[Path, Parameter(help="A folder with train.txt, valid.txt and test.txt.")],
    mode: Annotated[Mode, Parameter(help="What scores the entities.")] = "rules",
    rules: Annotated[
        Path | None, Parameter(help="Rule file; default: mined from train.txt.")
    ] = None,
    length: Annotated[int, Parameter(help="Longest mined rule body in edges, 1 to 3.")] = 3,
    min_confidence: Annotated[float, Parameter(help="Minimum confidence of a mined rule.")] = 0.01,
    most: Annotated[int, Parameter(help="Top mined rules to keep for each relation.")] = 300,
    constants: Annotated[
        int,
        Parameter(help="Top mined rules with constants for each end of a relation; 0: none."),
    ] = 1000,
    seconds: Annotated[float, Parameter(help="Time to count mined rules in.")] = 300,
    learn: Annotated[int, Parameter(help="Maximum epochs over train to learn rule weights.")] = 4,
    kge: Annotated[
        Path | None, Parameter(help="Run or model folder of `batchwright train kge`.")
    ] = None,
    accept: Annotated[
        float | None,
        Parameter(help="Minimum probability of --kge answers in rules; default: by valid."),
    ] = None,
    prover: Annotated[
        Path | None, Parameter(help="Run of `batchwright train prover`, for rl and hybrid.")
    ] = None,
    beam: Annotated[
        int | None,
        Parameter(
            help="Partial proofs of a query that beam search keeps; 0: the exact sum over all "
            "proofs, which only --policy rules has; default: as in training."
        ),
    ] = None,
    beta: Annotated[
        float | None, Parameter(help="Weight of the proofs in hybrid; default: chosen on valid.")
    ] = None,
    part: Annotated[Literal["test", "valid"], Parameter(help="Which part to evaluate.")] = "test",
    limit: Annotated[int, Parameter(help="Triples to evaluate, evenly spread; 0: all.")] = 0,
    sampled: Annotated[int, Parameter(help="Sampled negatives of the easy protocol.")] = 100,
    candidates: Annotated[
        str, Parameter(help="Candidate tails for average precision (AUC-PR): africa,asia,...")
    ] = "",
    seed: Annotated[int, Parameter(help="Random seed of sampled negatives and of learning.")] = 0,
    quiet: Quiet = False,
    format: Format = "text",
) -> None:
    """Rank the answers of p(h, ?) and p(?, t) among all entities, filtered: MRR and hits@k."""
    from batchwright.logic.audit import find_leaks
    from batchwright.logic.loaders import load_graph
    from batchwright.logic.rank.ranking import average_precision, rank, summary
    from batchwright.logic.rank.scorers import RuleScorer

    if min(limit, sampled, learn) < 0:
        raise ConfigError(
            f"--limit, --sampled and --learn must be at least 0, got {limit}, {sampled} and {learn}"
        )
    whole = load_graph(data)
    # All that is read, learned and chosen is of train and valid: test is only ranked.
    graph = whole.without_test()
    asked = whole if part == "test" else graph
    triples = asked.test if part == "test" else asked.valid
    if not len(triples):
        raise ConfigError(f"{data} has no {part} triples; there is nothing to evaluate")
    if limit and limit < len(triples):
        import numpy as np

        triples = triples[np.linspace(0, len(triples) - 1, limit).astype(np.int64)]

    if mode == "rl" and prover is None:
        raise ConfigError(
            "no trained prover given; --mode rl needs --prover RUN of `batchwright train prover`"
        )
    if mode in ("rules", "kge") and prover is not None:
        raise ConfigError(f"--mode {mode} takes no --prover; --mode rl and hybrid do")

    if beam is not None and prover is None:
        raise ConfigError("--beam is for the proofs of a trained prover; give --prover RUN")

    if accept is not None and (rules is None or kge is None or prover or mode in ("rl", "kge")):
        raise ConfigError("--accept is for rules that use p_kge; give --rules FILE and --kge RUN")

    trained: Proofs | None = None

    def proofs() -> "tuple[Scorer, dict[str, Any]]":
        if prover is not None:
            from batchwright.train.prover.loop import load_prover

            nonlocal trained
            trained = load_prover(prover, graph, beam=beam)
            return trained, {"prover": str(prover)}
        mined = {"length": length, "min_confidence": min_confidence, "most": most}
        mined |= {"seconds": seconds, "seed": seed}
        return _rules(graph, rules, mined, constants, learn, seed, quiet, kge, accept)

    scorer, how = _scorer(graph, mode, proofs, kge, beta)
    with progress_bar("ranking", quiet) as progress:
        ranks = rank(scorer, triples, asked.known, sampled=sampled, seed=seed, progress=progress)
    found: dict[str, Any] = {"graph": graph.name, "part": part, "mode": mode, **how}
    found["in_train"] = len(find_leaks(asked.facts, {part: triples}))
    found.update(summary(ranks, asked.vocab.predicates))
    if isinstance(scorer, RuleScorer):
        found["left_out"] = scorer.left_out
    if trained is not None:
        found["proofs"] = trained.how()
    if candidates:
        import numpy as np

        ids = np.array([asked.vocab.entity(name) for name in candidates.split(",")], np.int32)
        found["average_precision"] = average_precision(scorer, triples, ids)
        found["average_precision_softmax"] = average_precision(scorer, triples, ids, softmax=True)
    show(found, _table(found, sampled), format)


def _scorer(
    graph: "Graph",
    mode: Mode,
    make_proofs: "Callable[[], tuple[Scorer, dict[str, Any]]]",
    kge: Path | None,
    beta: float | None,
) -> "tuple[Scorer, dict[str, Any]]":
    """The scorer and how it was made; hyperparameters are chosen on valid."""
    if mode in ("rules", "rl"):
        return make_proofs()
    if kge is None:
        raise ConfigError(f"--mode {mode} needs --kge RUN; train one with `batchwright train kge`")
    from batchwright.logic.kge import load_scorer

    embedding = load_scorer(kge, graph)
    if mode == "kge":
        return embedding, {}
    from batchwright.logic.rank.scorers import Hybrid, choose_beta

    proofs, how = make_proofs()
    if beta is not None:
        return Hybrid(embedding, proofs, beta), {**how, "beta": beta}
    if not len(graph.valid):
        raise ConfigError("there is no valid.txt to choose the weight of proofs on; give --beta")
    choice = choose_beta(embedding, proofs, graph.valid, graph.known)
    how |= {"beta": choice.beta, "beta_by_relation": choice.own, "valid_mrr": choice.mrr}
    return Hybrid(embedding, proofs, choice.table), how


def _rules(
    graph: "Graph",
    path: Path | None,
    mined: dict[str, Any],
    constants: int,
    learn: int,
    seed: int,
    quiet: bool,
    kge: Path | None,
    least: float | None,
) -> "tuple[RuleScorer, dict[str, Any]]":
    from batchwright.logic.mine.constants import mine_constants
    from batchwright.logic.mine.mining import mine
    from batchwright.logic.rank.scorers import RuleScorer, choose_rules
    from batchwright.logic.rules import parse_rules

    accepted = None
    if path is None:
        with progress_bar("mining", quiet) as progress:
            rules = mine(graph.train, graph.vocab, progress=progress, **mined).rules
        if constants:
            rules = rules.plus(mine_constants(graph.train, graph.vocab, most=constants))
    elif kge is None:
        rules = parse_rules(path, graph.vocab)
    else:
        from batchwright.logic.kge import read_rules

        rules, accepted = read_rules(path, graph, kge, least)
    how: dict[str, Any] = {"rules": len(rules), "mined": path is None}
    facts = graph.facts
    if accepted:
        facts = accepted.graph.facts
        how |= {"accepted": accepted.atoms, "accept_probability": accepted.least}
    if len(graph.valid):
        with progress_bar("choosing rule aggregation", quiet) as progress:
            scorer, tried = choose_rules(
                facts,
                rules,
                graph.train,
                graph.valid,
                graph.known,
                epochs=learn,
                seed=seed,
                progress=progress,
            )
        how["joined"] = max(tried, key=lambda name: tried[name])
    else:
        scorer = RuleScorer(facts, rules)
        how["joined"] = "power 1, share 0"
    return scorer, {**how, "skipped_rules": list(scorer.skipped)}


def _table(found: dict[str, Any], sampled: int) -> str:
    from batchwright.report.text import number, table

    names = {"both": "both sides", "tail": "tails", "head": "heads"}
    names |= {"sampled": f"among {sampled} sampled (easy)"}

    def row(name: str, metrics: dict[str, Any]) -> list[str]:
        keys = ("mrr", "expected_mrr", "hits_1", "hits_3", "hits_10")
        return [name, number(metrics["queries"]), *(f"{metrics[key]:.4f}" for key in keys)]

    columns = ["", "queries", "MRR", "expected", "hits@1", "hits@3", "hits@10"]
    rows = [row(title, found[key]) for key, title in names.items() if key in found]
    text = table([f"{found['graph']} {found['part']}, {found['mode']}", *columns[1:]], rows)
    by = sorted(found["by_relation"].items(), key=lambda item: -int(item[1]["queries"]))
    text += "\n\n" + table(["relation", *columns[1:]], [row(name, each) for name, each in by[:20]])
    if len(by) > 20:
        text += f"\n{len(by) - 20} more relations with --format json"
    for key, words in (
        ("joined", "rule aggregation"),
        ("accepted", "atoms accepted from the embedding"),
        ("beta", "weight of the proofs"),
        ("average_precision", "average precision (AUC-PR)"),
        ("average_precision_softmax", "average precision, softmax over the candidates"),
    ):
        if key in found:
            value = found[key]
            text += f"\n{words}: {f'{value:.4g}' if isinstance(value, float) else value}"
    if proofs := found.get("proofs"):
        text += f"\nproofs: {proofs['search']}"
        if proofs.get("left_out"):
            text += f", but of {number(proofs['left_out'])} rules that led too far from an entity"
        if "searches" in proofs:
            text += (
                f"; per search {proofs['proofs_found']:.1f} found with probability "
                f"{proofs['probability_found']:.3f}, {proofs['probability_pruned']:.3f} pruned"
            )
    if found.get("left_out"):
        text += (
            f"\n{number(found['left_out'])} times a rule led too far from an entity and was left "
            f"out there"
        )
    if leaked := found["in_train"]:
        text += (
            f"\nwarning: {leaked:,} of the {found['part']} triples are facts of train.txt, so "
            f"these figures say little; see `batchwright data kg check`"
        )
    if skipped := found.get("skipped_rules"):
        many = (
            "1 rule is not a chain" if len(skipped) == 1 else f"{len(skipped)} rules are not chains"
        )
        text += f"\n{many} of up to 3 edges, skipped: {', '.join(skipped[:3])}"
    if found["tied"]:
        both = found["both"]
        text += (
            f"\nties matter here: by their order the MRR is {both['pessimistic_mrr']:.4f} to "
            f"{both['optimistic_mrr']:.4f}"
        )
    return text
