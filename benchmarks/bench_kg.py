"""Link prediction on several graphs: rules, embeddings, both, and a trained prover alone.

For every test triple both ends are asked for among all entities, other true answers left out, the
rank at the middle of its ties (see batchwright.logic.rank.ranking). What is compared:

    rules     chains and rules with constants mined from train, joined as does best on valid
    kge       ComplEx trained on train, the epoch that does best on valid
    hybrid    both, weighted as does best on valid: proofs as they are or as logarithms above a
              floor, and entities that train joins to the given one with less of a score where valid
              has (nearly) no such answers. FB15k-237 was made without them: its valid and test
              triples join no two entities that train joins. Where that is used, the same without
              it has a row of its own, which the target is for
    rl        the prover's policy `answers`, which begins with every rule alike, trained by PPO
              alone on train with each question's own fact hidden, kept by its MRR on valid; it is
              ranked by all proofs that its rules find. No embedding, no supervised pass
    untrained the same without PPO

The policy `rules` stands in a table of its own, each phase of its training alone and some left
out, ranked by the exact sum over its proofs (of the neural policy: bench_prover_policies.py).

What is chosen in a run is chosen on valid; kg_runs.py says how the settings came about. The seed
changes the tables, the order and the drawn entities of the embedding, the order in which evidence
of rules is learned, and all that the prover draws.

Countries is also asked the way it was made for, as the area under precision and recall over its
five regions, all pairs of all countries compared at once: by their scores as they are, or by each
country's chances over the regions (a softmax of its scores). A country with one neighbour has less
evidence for its right region than one with many has for a wrong one, so scores do not compare well
between countries; which of the two is taken is chosen by the area on valid, the scores where both
do alike. The chances were added after the areas of scores on test were known, so both stand in the
table. The rules of Countries are mined like all others, none is given.

Every graph and seed leaves a file in --runs, and is not run again while its settings and the code
stay the same. So graphs may be run one by one with --no-save and be saved together by --kept, which
runs nothing and says what was not run by this code. `--only` saves its graphs beside those that
were saved before: the file says of each graph when it was run, and by which code. Seconds are of
one thread: `cpu s` is what counts on a shared machine, `wall s` what passed.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from common import RESULTS, Report, arguments
from kg_runs import (
    CODE,
    DATA,
    GRAPHS,
    PHASE_GRAPHS,
    RL_GRAPHS,
    TARGETS,
    code,
    kept_or_run,
    phases,
    rl_seed,
)

COLUMNS = (
    *("", "MRR", "spread", "expected", "H@1", "H@3", "H@10", "tail MRR", "100 drawn"),
    *("tie gap", "cpu s", "wall s"),
)
UNLINKED = "hybrid, links not used"
WAYS = ("rules", "kge", "hybrid", UNLINKED, "rl", "untrained")
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}


def row(title: str, way: str, seeds: list[dict[str, Any]]) -> list[Any]:
    def over(*path: str) -> float:
        values = [seed[way] for seed in seeds]
        for step in path:
            values = [value[step] for value in values]
        return mean(values)

    mrrs = [seed[way]["both"]["mrr"] for seed in seeds]
    return [
        title,
        mean(mrrs),
        f"{stdev(mrrs):.4f}" if len(mrrs) > 1 else None,
        over("both", "expected_mrr"),
        over("both", "hits_1"),
        over("both", "hits_3"),
        over("both", "hits_10"),
        over("tail", "mrr"),
        over("sampled", "mrr"),
        f"{over('both', 'optimistic_mrr') - over('both', 'pessimistic_mrr'):.4f}",
        over("spent", "cpu_s"),
        over("spent", "wall_s"),
    ]


def report_on(report: Report, name: str, seeds: list[dict[str, Any]]) -> None:
    """The tables and targets of one graph."""
    settings = GRAPHS[name]
    ways = [way for way in WAYS if all(way in seed for seed in seeds)]
    report.table(
        f"{name}, {len(seeds)} seeds, {seeds[0]['mined']['rules']:,} mined rules, "
        f"{seeds[0]['hybrid']['both']['queries']:,} questions",
        COLUMNS,
        [row(way, way, seeds) for way in ways],
    )
    for way, least in TARGETS.get(name, {}).items():
        # What no peculiarity of the benchmark has helped.
        judged = UNLINKED if way == "hybrid" and UNLINKED in ways else way
        if judged in ways:
            reached = mean(seed[judged]["both"]["mrr"] for seed in seeds)
            report.target(f"{name}: MRR of {judged}", reached, least=least)
    if name in TARGETS:
        spent = max(seed["hybrid"]["spent"]["cpu_s"] for seed in seeds)
        report.target(f"{name}: cpu seconds of the slowest seed", spent, most=settings.within_s)
    if name == "fb15k237":
        mining = max(seed["mined"]["cpu_s"] for seed in seeds)
        ranking = max(seed["rules"]["ranking"]["cpu_s"] for seed in seeds)
        report.target(f"{name}: cpu seconds of mining", mining, most=300.0)
        report.target(f"{name}: cpu seconds to rank test by rules", ranking, most=180.0)
    if settings.area_goal is not None:
        areas_on(report, name, ways, seeds, settings.area_goal)
    if "rl" in ways:
        prover_on(report, name, seeds)


def areas_on(
    report: Report, name: str, ways: list[str], seeds: list[dict[str, Any]], goal: float
) -> None:
    """Areas under precision and recall: by scores, by chances, and by what valid says of them."""

    def chosen(found: dict[str, Any]) -> float:
        chances = found["valid_area_chances"] > found["valid_area"]
        return float(found["area_chances" if chances else "area"])

    rows = []
    for way in ways:
        found = [seed[way] for seed in seeds]
        areas = [chosen(each) for each in found]
        plain, chances = (mean(each[key] for each in found) for key in ("area", "area_chances"))
        rows.append([way, mean(areas), min(areas), max(areas), plain, chances])
    report.table(
        f"{name}, area under precision and recall over the five regions, rules mined",
        ("", "as valid says", "least", "greatest", "by scores", "by chances"),
        rows,
    )
    report.target(
        f"{name}: AUC-PR, hybrid with mined rules",
        mean(chosen(seed["hybrid"]) for seed in seeds),
        least=goal,
    )


def prover_on(report: Report, name: str, seeds: list[dict[str, Any]]) -> None:
    """What the parts of the prover's training reached on valid, and its targets."""
    report.table(
        f"{name}, the prover alone, MRR on valid",
        ("after", "mean", "spread"),
        [
            [part, mean(values), stdev(values) if len(values) > 1 else None]
            for part in seeds[0]["rl_parts"]
            for values in [[seed["rl_parts"][part] for seed in seeds]]
        ],
    )
    trained, without = ([seed[key]["both"]["mrr"] for seed in seeds] for key in ("rl", "untrained"))
    gained = {"policy answers, PPO alone over untrained": (trained, without)}
    if "phases" in seeds[0]:
        named = {key: [seed["phases"][key] for seed in seeds] for key in seeds[0]["phases"]}
        report.table(
            f"{name}, the policy rules by phase, MRR on test",
            ("trained by", "mean", "spread"),
            [
                [key, mean(values), stdev(values) if len(values) > 1 else None]
                for key, values in named.items()
            ],
        )
        both = named["all phases"], named["all but PPO"]
        gained["policy rules, all phases over all but PPO"] = both
    rows = []
    for title, (more, less) in gained.items():
        gains = [a - b for a, b in zip(more, less, strict=True)]
        # Student's t of as many seeds: 95 % of such intervals hold the true mean.
        wide = T_95[len(gains)] * stdev(gains) / len(gains) ** 0.5 if len(gains) in T_95 else None
        rows.append([title, mean(gains), wide])
    report.table(
        f"{name}, what PPO brings, MRR on test over the seeds",
        ("", "mean", "95 % interval +-"),
        rows,
    )
    if name == "umls":
        report.target(f"{name}: MRR that PPO brings to the prover", rows[0][1], least=0.05)
    if name in RL_GRAPHS:
        spent = max(seed["rl"]["spent"]["cpu_s"] for seed in seeds)
        report.target(f"{name}: cpu seconds of the prover", spent, most=RL_GRAPHS[name][1])


def measured_seed(
    report: Report, args: argparse.Namespace, name: str, seed: int
) -> dict[str, Any] | None:
    """All rows of one graph and seed; None if --kept does not find all of them."""
    found = {"graph": kept_or_run(args.runs, name, seed, args.kept)}
    if name in RL_GRAPHS and not args.without_rl:
        found["prover"] = rl_seed(DATA, args.runs, name, seed, only_kept=args.kept)
        if name in PHASE_GRAPHS and not args.without_phases:
            found["phases"] = phases(args.runs, name, seed, args.kept)
    missing = [part for part, value in found.items() if value is None]
    if missing:
        report.not_measured(f"{name}, seed {seed}", f"no {' and '.join(missing)} by this code")
        return None
    rows = {**found["graph"], **found.get("prover", {})}
    return rows | ({"phases": found["phases"]} if "phases" in found else {})


def beside_earlier(report: Report, ran: dict[str, dict[str, str]]) -> None:
    """Add what was saved of the graphs that were not run now, in the order of all."""
    report.stamp["graphs"] = ran
    saved = RESULTS / "kg.json"
    if report.args.quick or report.args.smoke or not report.args.only or not saved.exists():
        return
    before = json.loads(saved.read_bytes())
    kept = {name: one for name, one in before["machine"]["graphs"].items() if name not in ran}
    report.stamp["graphs"] = kept | ran
    places = {name: place for place, name in enumerate(GRAPHS)}
    report.tables = sorted(
        [one for one in before["tables"] if _graph(one["title"]) in kept] + report.tables,
        key=lambda one: places[_graph(one["title"])],
    )
    report.targets = sorted(
        [one for one in before["targets"] if _graph(one["what"]) in kept] + report.targets,
        key=lambda one: places[_graph(one["what"])],
    )


def _graph(title: str) -> str:
    """The graph of a table or a target, which both begin with it."""
    return title.replace(":", ",").partition(",")[0]


def smoke(report: Report, runs: Path) -> None:
    """The smallest graph by every way, with hardly any training."""
    name = "countries_s1"
    if not (DATA / name).is_dir():
        report.not_measured(name, f"no kg/{name}; set BATCHWRIGHT_DATA")
        return
    few = replace(RL_GRAPHS["umls"][0], ppo_steps=640)
    prover = rl_seed(DATA, runs, name, 0, few)
    ranked = kept_or_run(runs, name, 0)
    assert prover is not None
    assert ranked is not None
    report_on(report, name, [{**ranked, **prover}])


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="graphs, separated by commas")
    parser.add_argument("--without-rl", action="store_true", help="leave the prover out")
    parser.add_argument("--without-phases", action="store_true", help="no ablation by phase")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kept", action="store_true", help="only report what was run before")
    parser.add_argument("--runs", type=Path, default=Path("runs/bench_kg"), help="kept work")
    args: argparse.Namespace = parser.parse_args()
    report = Report("kg", args)
    chosen = [name for name in args.only.split(",") if name] or list(GRAPHS)
    ran: dict[str, dict[str, str]] = {}
    if args.smoke:
        smoke(report, args.runs)
        chosen = []
    elif args.quick:
        chosen = [name for name in chosen if name.startswith(("umls", "countries"))]
    for name in chosen:
        if not (DATA / name).is_dir():
            report.not_measured(name, f"no kg/{name}; set BATCHWRIGHT_DATA")
            continue
        seeds = [
            found
            for seed in range(1 if args.quick else args.seeds)
            if (found := measured_seed(report, args, name, seed)) is not None
        ]
        if seeds:
            report_on(report, name, seeds)
            ran[name] = {"date": report.stamp["date"], **{way: code(way) for way in CODE}}
    beside_earlier(report, ran)
    report.close()


if __name__ == "__main__":
    main()
