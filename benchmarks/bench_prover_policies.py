"""What PPO alone brings a prover over its untrained policy, for both policies and what was tried.

No cloning and no supervised pass: every policy begins untrained and is trained by PPO only. MRR is
of the full filtered ranking, of proofs found by beam search for both policies (`pruned` is the
probability that did not fit into the beam). `right` is the share of queries that one sampled
episode answers with the entity looked for. The policy of the best MRR on valid is kept, and ranked
on test beside the untrained one. The settings were chosen by valid on UMLS and the shipped family
graph; nothing was chosen on Countries, or on test.
"""

import argparse
import time
from dataclasses import replace
from statistics import mean, stdev
from typing import Any

from batchwright.logic.loaders import Graph, load_graph, shipped_graph
from batchwright.logic.mine.mining import mine
from batchwright.logic.rank.ranking import rank
from batchwright.train.prover.config import ProverConfig
from batchwright.train.prover.loop import fit_prover
from common import Report, arguments
from kg_runs import DATA

BEAM = 256
BASE = ProverConfig(
    data="graph", policy="neural", clone_updates=0, passes=0, n_envs=512, n_eval_envs=2048,
    beam=BEAM, eval_triples=300, eval_every=20,
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "neural": {},
    "neural, all of the constants": {"constant_scale": 1.0},
    "neural, a tenth of the constants": {"constant_scale": 0.1},
    "neural, entropy bonus 0.01": {"entropy_coef": 0.01},
    "neural, curriculum by depth": {"curriculum": True},
    "rules": {"policy": "rules", "curriculum": False},
}
GRAPHS = {
    "family (shipped)": {"ppo_steps": 60_000},
    "countries_s2": {"length": 3, "ppo_steps": 100_000},
    "umls": {"ppo_steps": 250_000},
}
COLUMNS = (
    *("", "valid before", "valid after", "spread", "right before", "right after"),
    *("test untrained", "test kept", "pruned", "s"),
)


def measured(graph: Graph, config: ProverConfig) -> dict[str, float]:
    """One run: valid before and after PPO, test with the kept and with the untrained policy."""
    rules = mine(
        graph.facts, graph.vocab, length=config.length, most=config.most,
        min_confidence=config.min_confidence,
    ).rules  # fmt: skip
    start = time.perf_counter()
    kept, result = fit_prover(config, graph, rules)
    seconds = time.perf_counter() - start
    # A learning rate too small to move a weight: the untrained policy, made in the same way.
    still, _ = fit_prover(replace(config, ppo_steps=1, lr=1e-30), graph, rules)
    figures = {
        "valid before": result.before_ppo_mrr,
        "valid after": result.after_ppo_mrr,
        "right before": result.before_ppo_right,
        "right after": result.after_ppo_right,
        "test untrained": rank(still, graph.test, graph.known).metrics().mrr,
        "test kept": rank(kept, graph.test, graph.known).metrics().mrr,
        "pruned": kept.how()["probability_pruned"],
        "s": seconds,
    }
    return {name: float(value or 0.0) for name, value in figures.items()}


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="graphs, separated by commas")
    parser.add_argument("--variants", default="", help="variants, separated by semicolons")
    parser.add_argument("--seeds", type=int, default=3)
    args: argparse.Namespace = parser.parse_args()
    report = Report("prover_policies", args)
    variants = [name for name in args.variants.split(";") if name] or list(VARIANTS)
    names = [name for name in args.only.split(",") if name] or list(GRAPHS)
    base = replace(BASE, beam=8, eval_triples=8, n_envs=64) if args.smoke else BASE
    if args.smoke:
        variants = ["neural", "rules"]
    for name in names[:1] if args.smoke else names:
        folder = shipped_graph() if "shipped" in name else DATA / name
        if not folder.is_dir():
            report.not_measured(name, f"no kg/{name}; set BATCHWRIGHT_DATA")
            continue
        graph, own, rows = load_graph(folder), GRAPHS[name], []
        if args.quick:
            own = {**own, "ppo_steps": 512 if args.smoke else 20_000}
        for variant in variants:
            config = replace(base, **{**own, **VARIANTS[variant]})  # type: ignore[arg-type]
            seeds = range(1 if args.quick else args.seeds)
            runs = [measured(graph, replace(config, seed=seed)) for seed in seeds]
            means = {key: mean(run[key] for run in runs) for key in runs[0]}
            after = [run["valid after"] for run in runs]
            spread = stdev(after) if len(after) > 1 else None
            rows.append([variant, *(means.get(key, spread) for key in COLUMNS[1:])])
            print(f"  {variant}: {means['valid before']:.4f} -> {means['valid after']:.4f}")
            if variant == "neural":
                gain = means["test kept"] - means["test untrained"]
                report.target(f"{name}: test MRR that PPO brings", gain, least=0.001)
        steps = int(str(own["ppo_steps"]))
        report.table(f"{name}, PPO alone, {steps:,} steps, beam of {base.beam}", COLUMNS, rows)
    report.close()


if __name__ == "__main__":
    main()
