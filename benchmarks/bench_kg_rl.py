"""Link prediction by a trained prover alone: no embedding, no counted confidences.

The same protocol as bench_kg.py, whose table shows these rows as `rl`: a policy that begins with
every rule alike, trained on train with each question's own fact hidden, kept by its MRR on valid,
and asked once on test. Beside it stand its parts: what each of them had reached on valid. The
settings below were found beforehand in a few tries judged by valid; the test figure of one such
try was in sight for each graph.
"""

import argparse
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from batchwright.events import read_events
from batchwright.fingerprint import digest
from batchwright.logic.loaders import load_graph
from batchwright.train.prover import load_prover, train_prover
from batchwright.train.proverconfig import ProverConfig
from bench_kg import COLUMNS, DATA, Clock, measured, row
from common import Report, arguments

__all__ = ["RL_GRAPHS", "rl_seed"]

SMALL = ProverConfig(eval_triples=0, passes=10)
RL_GRAPHS: dict[str, tuple[ProverConfig, float | None, float]] = {
    "family": (replace(SMALL, most=1000, passes=4, eval_triples=1400), 0.95, 300.0),
    "umls": (replace(SMALL, rate=1.0), 0.80, 300.0),
    "kinship": (replace(SMALL, most=600, rate=1.0), None, 300.0),
    "wn18rr": (
        replace(SMALL, length=3, most=1000, min_confidence=0.001, passes=5, eval_triples=1500),
        0.40,
        1800.0,
    ),
}
"""Settings, the MRR to reach and the processor seconds it may take."""


def rl_seed(folder: Path, runs: Path, name: str, seed: int) -> dict[str, Any]:
    """The row of one seed, in the form of bench_kg's: {"rl": ..., "rl_parts": ...}."""
    settings = RL_GRAPHS[name][0]
    path = runs / f"rl-{name}-{seed}.json"
    mark = digest("kg_rl", json.dumps(asdict(settings), sort_keys=True, default=str))
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_bytes())
        if kept["settings"] == mark:
            return kept
    run = runs / f"rl-{name}-{seed}"
    # A run that was cut off begins anew: its time is to be that of one whole run.
    shutil.rmtree(run, ignore_errors=True)
    clock = Clock()
    config = replace(settings, data=str(folder / name), run_dir=run, seed=seed)
    train_prover(config)
    spent = clock.read()
    graph = load_graph(folder / name)
    found = {
        "settings": mark,
        "rl": measured(graph, load_prover(run, graph), spent),
        "rl_parts": parts(run),
    }
    path.write_text(json.dumps(found, indent=1))
    return found


def parts(run: Path) -> dict[str, float]:
    """MRR on valid before training, and after each part of it (of gradients, the best)."""
    part, found = "untrained", {}
    for event in read_events(run / "events.jsonl"):
        if event.kind == "round":
            part = event.fields["part"]
        elif event.kind == "eval":
            mrr = event.fields["mrr"]
            found[part] = max(mrr, found.get(part, 0.0)) if part == "gradients" else mrr
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="graphs, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/bench_kg"), help="kept work")
    args: argparse.Namespace = parser.parse_args()
    report = Report("kg_rl", args)
    args.runs.mkdir(parents=True, exist_ok=True)
    for name in [name for name in args.only.split(",") if name] or list(RL_GRAPHS):
        if not (DATA / name).is_dir():
            report.not_measured(name, f"no kg/{name}; set BATCHWRIGHT_DATA")
            continue
        _, goal, within_s = RL_GRAPHS[name]
        seeds = [rl_seed(DATA, args.runs, name, seed) for seed in range(args.seeds)]
        report.table(f"{name}, {len(seeds)} seeds", COLUMNS, [row("rl", "rl", seeds)])
        report.table(
            f"{name}, MRR on valid",
            ("after", "mean", "spread"),
            [
                [part, mean(values), stdev(values) if len(values) > 1 else None]
                for part in seeds[0]["rl_parts"]
                for values in [[seed["rl_parts"][part] for seed in seeds]]
            ],
        )
        reached = mean(seed["rl"]["both"]["mrr"] for seed in seeds)
        spent = max(seed["rl"]["spent"]["cpu_s"] for seed in seeds)
        if goal is not None:
            report.target(f"{name}: MRR of the prover alone", reached, least=goal)
        report.target(f"{name}: cpu seconds of the slowest seed", spent, most=within_s)
    report.close()


if __name__ == "__main__":
    main()
