"""`batchwright evaluate prover`: filtered ranking with rules, embeddings, a prover or both."""

import math
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from batchwright.cli.output import Format, Progress, Quiet, progress_bar, show
from batchwright.errors import ConfigError

if TYPE_CHECKING:
    from batchwright.logic.loaders import Graph
    from batchwright.logic.rank.ranking import Ranks, Scorer
    from batchwright.logic.rank.scorers import RuleScorer
    from batchwright.train.prover.loop import Proofs

__all__ = ["evaluate_prover"]

EPOCHS = 4
"""Epochs of learning rule weights, unless told."""

CELLS = 2 * 10**10
"""Scores of an entity for a query that all epochs together may need: some minutes."""

Mode = Literal["rules", "kge", "hybrid", "rl", "prover"]


def evaluate_prover(
    *,
    data: Annotated[Path, Parameter(help="A folder with train.txt, valid.txt and test.txt.")],
    mode: Annotated[
        Mode,
        Parameter(
            help="What scores the entities; rl: the policy that PPO trained, beside the one it "
            "started from; prover: the policy that the run kept, whatever trained it."
        ),
    ] = "rules",
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
    learn: Annotated[
        int | Literal["auto"],
        Parameter(
            help="Maximum epochs over train to learn rule weights; auto: 4, fewer or none where "
            "the graph has hundreds of thousands of entities, all of which a query scores."
        ),
    ] = "auto",
    kge: Annotated[
        Path | None, Parameter(help="Run or model folder of `batchwright train kge`.")
    ] = None,
    accept: Annotated[
        float | None,
        Parameter(help="Minimum probability of --kge answers in rules; default: by valid."),
    ] = None,
    prover: Annotated[
        list[Path] | None,
        Parameter(
            help="Run of `batchwright train prover`, for rl, prover and hybrid; rl takes several, "
            "of other seeds.",
            consume_multiple=True,
            negative="",
        ),
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

    if min(limit, sampled, 0 if learn == "auto" else learn) < 0:
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

    prover = prover or None
    _check_provers(mode, prover)
    if beta is not None and not 0 <= beta < math.inf:
        raise ConfigError(f"--beta must be a number of at least 0, got {beta:g}")

    if beam is not None and prover is None:
        raise ConfigError("--beam is for the proofs of a trained prover; give --prover RUN")

    if accept is not None and (rules is None or kge is None or prover or mode == "kge"):
        raise ConfigError("--accept is for rules that use p_kge; give --rules FILE and --kge RUN")

    trained: Proofs | None = None

    def proofs() -> "tuple[Scorer, dict[str, Any]]":
        if prover is not None:
            from batchwright.train.prover.loop import load_prover

            nonlocal trained
            trained = load_prover(prover[0], graph, beam=beam)
            return trained, {"prover": str(prover[0]), **_origin(prover[0])}
        mined = {"length": length, "min_confidence": min_confidence, "most": most}
        mined |= {"seconds": seconds, "seed": seed}
        return _rules(graph, rules, mined, constants, learn, seed, quiet, kge, accept)

    scorer: Scorer
    with progress_bar("ranking", quiet) as progress:
        if mode == "rl":
            assert prover is not None

            def ranked(scorer: "Scorer") -> "Ranks":
                return rank(scorer, triples, asked.known, sampled=sampled, seed=seed)

            scorer, ranks, how = _by_ppo(prover, graph, beam, ranked, progress)
            trained = scorer
        else:
            scorer, how = _scorer(graph, mode, proofs, kge, beta)
            ranks = rank(
                scorer, triples, asked.known, sampled=sampled, seed=seed, progress=progress
            )
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
    if mode in ("rules", "prover"):
        return make_proofs()
    if kge is None:
        raise ConfigError(f"--mode {mode} needs --kge RUN; train one with `batchwright train kge`")
    from batchwright.logic.kge import load_scorer

    embedding = load_scorer(kge, graph)
    if mode == "kge":
        return embedding, {}
    from batchwright.logic.rank.hybrid import Hybrid, choose_beta

    proofs, how = make_proofs()
    if beta is not None:
        return Hybrid(embedding, proofs, beta), {**how, "beta": beta}
    if not len(graph.valid):
        raise ConfigError("there is no valid.txt to choose the weight of proofs on; give --beta")
    choice = choose_beta(embedding, proofs, graph.valid, graph.known, facts=graph.facts)
    how |= {"beta": choice.beta, "beta_by_relation": choice.own, "floor": choice.floor}
    how |= {"linked": choice.linked or None, "valid_mrr": choice.mrr}
    hybrid = Hybrid(embedding, proofs, choice.table, choice.floor, choice.linked, graph.facts)
    return hybrid, how


def _check_provers(mode: Mode, runs: list[Path] | None) -> None:
    if mode in ("rl", "prover") and not runs:
        raise ConfigError(
            f"no trained prover given; --mode {mode} needs --prover RUN of `batchwright train "
            f"prover`"
        )
    if mode in ("rules", "kge") and runs:
        raise ConfigError(f"--mode {mode} takes no --prover; --mode rl, prover and hybrid do")
    if runs and len(runs) > 1 and mode != "rl":
        raise ConfigError(
            f"--mode {mode} takes one --prover, got {len(runs)}; --mode rl compares several"
        )
    if runs and len({run.resolve() for run in runs}) < len(runs):
        raise ConfigError("the same run is given twice to --prover; give runs of other seeds")


def _origin(run: Path) -> dict[str, Any]:
    """What trained the policy that a run kept; nothing of runs that do not say so."""
    from batchwright.errors import Mismatch
    from batchwright.train.prover.loop import origin_of

    try:
        origin = origin_of(run)
    except Mismatch:
        return {}
    return {"trained_by": list(origin.rounds), "best_round": origin.round}


def _by_ppo(
    runs: list[Path],
    graph: "Graph",
    beam: int | None,
    ranked: "Callable[[Scorer], Ranks]",
    progress: Progress | None,
) -> "tuple[Proofs, Ranks, dict[str, Any]]":
    """Rank the policies that PPO trained and those it started from; the first run's scorer too."""
    from batchwright.train.prover.gain import gain, joined
    from batchwright.train.prover.loop import load_prover, origin_of

    for run in runs:
        origin_of(run)  # that it is one at all is said before how it differs from others
    differing = _differing(runs)
    before, after, scorers, said = [], [], [], []
    for number, run in enumerate(runs):
        origins = origin_of(run, "before_ppo"), origin_of(run, "ppo"), origin_of(run)
        before.append(ranked(load_prover(run, graph, beam=beam, which="before_ppo")))
        if progress:
            progress(2 * number + 1, 2 * len(runs))
        scorers.append(load_prover(run, graph, beam=beam, which="ppo"))
        after.append(ranked(scorers[-1]))
        if progress:
            progress(2 * number + 2, 2 * len(runs))
        started, practised, kept = (list(origin.rounds) for origin in origins)
        said.append(
            {
                "started_from": started,
                "trained_by": practised,
                "round": origins[1].round,
                "kept_round": origins[2].round,
                "kept_trained_by": kept,
                "mrr_before": before[-1].metrics().mrr,
                "mrr": after[-1].metrics().mrr,
            }
        )
    how: dict[str, Any] = {"prover": [str(run) for run in runs], "runs": said}
    return scorers[0], joined(after), {**how, "gain": gain(before, after), "differing": differing}


def _differing(runs: list[Path]) -> list[str]:
    """Settings other than the seed in which the runs differ: these are not repetitions then."""
    from dataclasses import fields

    from batchwright.train.prover.config import ProverConfig

    configs = [ProverConfig.of_run(run) for run in runs]
    names = [field.name for field in fields(ProverConfig)]
    free = {"seed", "run_dir", *ProverConfig.CHANGEABLE}
    for (run, one), (other, two) in combinations(zip(runs, configs, strict=True), 2):
        if all(getattr(one, n) == getattr(two, n) for n in ("seed", *(set(names) - free))):
            raise ConfigError(
                f"{run} and {other} have the same settings and the same seed, {one.seed}, so they "
                f"are one run; give runs of other seeds to --prover"
            )
    return [n for n in names if n not in free and len({getattr(c, n) for c in configs}) > 1]


def _rules(
    graph: "Graph",
    path: Path | None,
    mined: dict[str, Any],
    constants: int,
    learn: int | Literal["auto"],
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
    epochs = _epochs(graph) if learn == "auto" else learn
    how: dict[str, Any] = {"rules": len(rules), "mined": path is None, "learn": epochs}
    if learn == "auto" and epochs < EPOCHS and len(graph.valid):
        how["learn_cut"] = EPOCHS
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
                epochs=epochs,
                seed=seed,
                progress=progress,
            )
        how["joined"] = max(tried, key=lambda name: tried[name])
    else:
        scorer = RuleScorer(facts, rules)
        how["joined"] = "power 1, share 0"
    return scorer, {**how, "skipped_rules": list(scorer.skipped)}


def _epochs(graph: "Graph") -> int:
    """Epochs of learning that a graph of this size has time for."""
    from batchwright.logic.rank.scorers import LEARNED

    queries = min(LEARNED, 2 * len(graph.train))
    return min(EPOCHS, CELLS // max(1, queries * graph.vocab.num_entities))


def _table(found: dict[str, Any], sampled: int) -> str:
    from batchwright.report.text import number, table

    names = {"both": "both sides", "tail": "tails", "head": "heads"}
    names |= {"sampled": f"among {sampled} sampled (easy)"}

    def row(name: str, metrics: dict[str, Any]) -> list[str]:
        keys = ("mrr", "expected_mrr", "hits_1", "hits_3", "hits_10")
        return [name, number(metrics["queries"]), *(f"{metrics[key]:.4f}" for key in keys)]

    columns = ["", "queries", "MRR", "expected", "hits@1", "hits@3", "hits@10"]
    rows = [row(title, found[key]) for key, title in names.items() if key in found]
    if brought := found.get("gain"):
        rows.insert(0, row("both sides, before PPO", brought["before"]))
        rows[1][0] = "both sides, after PPO"
    text = table([f"{found['graph']} {found['part']}, {found['mode']}", *columns[1:]], rows)
    by = sorted(found["by_relation"].items(), key=lambda item: -int(item[1]["queries"]))
    if brought:
        text += "\n" + _gain_said(found)
    text += "\n\n" + table(["relation", *columns[1:]], [row(name, each) for name, each in by[:20]])
    if len(by) > 20:
        text += f"\n{len(by) - 20} more relations with --format json"
    for key, words in (
        ("joined", "rule aggregation"),
        ("accepted", "atoms accepted from the embedding"),
        ("beta", "weight of the proofs"),
        ("floor", "weighed as logarithms, above a floor of"),
        ("linked", "taken from entities that train joins to the given one"),
        ("average_precision", "average precision (AUC-PR)"),
        ("average_precision_softmax", "average precision, softmax over the candidates"),
    ):
        if (value := found.get(key)) is not None:
            text += f"\n{words}: {f'{value:.4g}' if isinstance(value, float) else value}"
    if found["mode"] != "rl" and "trained_by" in found:
        from batchwright.train.prover.config import phases_said

        text += (
            f"\npolicy: trained by {phases_said(found['trained_by'])}, the best on valid after "
            f"round {found['best_round']}"
        )
    if proofs := found.get("proofs"):
        text += f"\nproofs: {proofs['search']}"
        if proofs.get("left_out"):
            text += f", but of {number(proofs['left_out'])} rules that led too far from an entity"
        if "searches" in proofs:
            text += (
                f"; per search {proofs['proofs_found']:.1f} found with probability "
                f"{proofs['probability_found']:.3f}, {proofs['probability_pruned']:.3f} pruned"
            )
    if found.get("learn_cut"):
        text += (
            f"\nrule weights were learned for {found['learn']} of {found['learn_cut']} epochs at "
            f"most: each scores very many entities; --learn sets how many"
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


def _gain_said(found: dict[str, Any]) -> str:
    """What PPO brought, how sure that is, and what the runs kept."""
    from batchwright.train.prover.config import phases_said

    gain, runs, names = found["gain"], found["runs"], found["prover"]
    text = f"PPO brought {gain['mrr']:+.4f} MRR"
    if gain["low"] is not None:
        text += f" (95 % interval {gain['low']:+.4f} to {gain['high']:+.4f}, over the "
        text += f"{len(runs)} runs)" if gain["over"] == "runs" else "queries of this run)"
    started = runs[0]["started_from"]
    text += " over the policy it started from, "
    text += f"trained by {phases_said(started)}" if started else "which is untrained"
    if len(runs) == 1:
        text += "; give runs of other seeds to --prover for an interval over seeds"
    else:
        for name, one, brought in zip(names, runs, gain["runs"], strict=True):
            text += f"\n  {name}: {one['mrr_before']:.4f} to {one['mrr']:.4f}, {brought:+.4f}"
    if found["differing"]:
        text += f"\nwarning: the runs differ in more than the seed: {', '.join(found['differing'])}"
    for name, one in zip(names, runs, strict=True):
        if one["kept_round"] != one["round"]:
            text += (
                f"\nnote: {name} kept the policy of round {one['kept_round']}, trained by "
                f"{phases_said(one['kept_trained_by'])}, which is better on valid; rank it with "
                f"--mode prover"
            )
    return text
