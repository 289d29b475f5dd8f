"""Print the README's table of numbers from the saved results, so that none is written by hand."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    print(table())


def table() -> str:
    """One line a claim, with the script that measured it."""
    lines = ["| what | ours | beside it | script |", "|---|---|---|---|"]
    every = [*packing(), *plans(), *others(), *training(), *calls(), *agents()]
    lines += [f"| {' | '.join(row)} |" for row in every]
    loads = [json.loads(path.read_text())["load"] for path in sorted(RESULTS.glob("*.json"))]
    heaviest = max(max(load.values()) for load in loads)
    machine = json.loads((RESULTS / "packing.json").read_text())["machine"]
    lines += [
        "",
        f"Measured on {machine['cores']} shared cores ({machine['cpu']}), load up to "
        f"{heaviest:.1f}: trust the ratios. `benchmarks/results/` holds everything, with what was "
        f"not measured.",
    ]
    return "\n".join(lines)


def packing() -> list[list[str]]:
    script = "`bench_packing.py`"
    million = rows("packing", "lognormal, 1,000,000")
    ten = rows("packing", "lognormal, 10,000,000")
    hard = rows("packing", "hard, 1,000,000 lengths", first="mode")
    ours, trl = million["batchwright"], million["TRL bfd, binning only"]
    cpp = million["LightBinPack obfd (C++)"]
    best, plain = hard["optimal"], hard["best_fit_decreasing"]
    return [
        [
            "pack 1M lengths",
            f"{1000 * ours['seconds']:.0f} ms, {ours['efficiency %']:.2f} % full",
            f"TRL {trl['x ours']:,.0f}x, LightBinPack (C++) {cpp['x ours']:.0f}x the time",
            script,
        ],
        [
            "pack 10M lengths",
            f"{ten['batchwright']['seconds']:.2f} s, "
            f"{ten['batchwright']['bytes/sample']:.0f} bytes a sample",
            "",
            script,
        ],
        [
            "pack a hard set of 1M, `optimal`",
            f"{best['efficiency %']:.2f} % full in {best['seconds']:.1f} s",
            f"best-fit-decreasing {plain['efficiency %']:.2f} %",
            script,
        ],
    ]


def plans() -> list[list[str]]:
    script = "`bench_plans.py`"
    ten = rows("plans", "10,000,000 samples, row numbers", first="layout")
    beside = rows("plans", "lognormal, 10,000,000 samples")
    packed, by_length = ten["packed"], ten["sorted"]
    fairseq = beside["fairseq batch_by_size (Cython)"]
    return [
        [
            "build a plan of 10M samples",
            f"{by_length['build s']:.2f} s sorted, {packed['build s']:.2f} s packed",
            f"fairseq (Cython) {fairseq['x ours']:.0f}x the time for one epoch's batches",
            script,
        ],
        [
            "open it; any microbatch of any epoch",
            f"{packed['first open ms']:.1f} ms; {packed['batch us']:.0f} us",
            "",
            script,
        ],
        [
            "useful tokens, lognormal set",
            f"{by_length['efficiency %']:.2f} % sorted, {packed['efficiency %']:.2f} % packed",
            f"five fixed buckets {ten['bucketed']['efficiency %']:.2f} %",
            script,
        ],
    ]


def others() -> list[list[str]]:
    edges = rows("edges", "lognormal, lengths to 8,192")
    balance = rows("balance", "long to 32,768")
    load = rows("lengths", "load 1,000,000")
    worst, verl = balance["batchwright balance"], balance["verl Karmarkar-Karp"]
    return [
        [
            "8 bucket edges, lengths to 8,192",
            f"{edges['exact (batchwright)']['efficiency %']:.1f} % useful, exact",
            f"equal mass {edges['equal mass']['efficiency %']:.1f} %, "
            f"quantiles {edges['quantile']['efficiency %']:.1f} %",
            "`bench_edges.py`",
        ],
        [
            "heaviest of 64 ranks over an even share",
            f"{worst['worst']:.4f} at worst",
            f"verl {verl['worst']:.4f}, round robin {balance['round robin']['worst']:.4f}",
            "`bench_balance.py`",
        ],
        [
            "load 1M lengths",
            f"{load['batchwright .safetensors']['seconds']:.2f} s, "
            f"`.jsonl` {load['batchwright .jsonl']['seconds']:.2f} s",
            f"a plain json loop {load['plain json loop']['seconds']:.2f} s",
            "`bench_lengths.py`",
        ],
    ]


def training() -> list[list[str]]:
    tail = rows("sft", "tiny, long tail up to 2,048: 128")
    real = rows("sft", "smollm2, long tail up to 512: 32")
    resumed = rows("resume", "to the batches of step 10,000")
    speed = "x plain (cpu)"

    def beside(found: dict[str, dict[str, Any]]) -> str:
        ours, trl = found["batchwright packed"][speed], found["TRL packed"][speed]
        return f"{ours:.2f}x a padded loop of 8 rows ({ours / trl:.2f}x TRL packed)"

    return [
        [
            "useful tokens a processor second, long tail, packed",
            f"`tiny` {beside(tail)}, SmolLM2 {beside(real)}",
            "the same samples, one epoch each",
            "`bench_sft.py`",
        ],
        [
            "to the first step after resume at step 10,000 of 1M samples",
            f"{resumed['train_sft, tiny']['seconds']:.2f} s, "
            f"{resumed['train_sft, tiny, named']['seconds']:.2f} s where samples have names, "
            f"{resumed['train_sft, tiny']['MB read']:.1f} MB read",
            f"batches replayed {resumed['batches replayed']['seconds']:.1f} s",
            "`bench_resume.py`",
        ],
    ]


def calls() -> list[list[str]]:
    cpu = rows("calls", "processor time a call")
    wall = rows("calls", "1,024 calls of 50 ms")
    cold, warm = rows("limit", "cold: percent"), rows("limit", "warm: percent")
    table = saved("rewards", "1,024 samples, 0.1 s a call")
    kept = next(row for row in table if row[0] == "batchwright, 60, cache")
    fresh = next(row for row in table if row[:2] == ["batchwright, 60", "all differ"])
    signs = [row for row in saved("rewards", "4,096 samples") if row[1] == "5 % for good"]
    wrong = {row[0]: row[3] for row in signs}

    def least(found: dict[str, dict[str, Any]]) -> str:
        names = [name for name in found if name != "least"]
        good = sorted(found[name]["batchwright"] for name in names)
        return f"{good[0]:.0f} to {good[-1]:.0f} %"

    busy = rows("calls", "1,024 calls of 50 ms, 60 in flight, beside")
    return [
        [
            "processor time of a call, cache on",
            f"{cpu['batchwright + cache']['x aiohttp']:.2f}x raw aiohttp",
            f"AsyncOpenAI 3 {cpu['AsyncOpenAI + sem(60)']['x aiohttp']:.0f}x, "
            f"litellm {cpu['litellm']['x aiohttp']:.0f}x, "
            f"inspect_ai {cpu['inspect_ai']['x aiohttp']:.0f}x",
            "`bench_calls.py`",
        ],
        [
            "1,024 calls of 50 ms, 60 in flight",
            f"{wall['batchwright']['x ideal']:.2f}x the ideal time",
            f"AsyncOpenAI 3 {wall['AsyncOpenAI + sem(60)']['x ideal']:.1f}x, "
            f"AsyncOpenAI 2 {wall['AsyncOpenAI 2 + sem(60)']['x ideal']:.1f}x, "
            f"litellm {wall['litellm']['x ideal']:.1f}x, eight threads "
            f"{wall['ThreadPool(8) + OpenAI']['x ideal']:.1f}x",
            "`bench_calls.py`",
        ],
        [
            "the same while every core has other work",
            f"{busy['batchwright']['seconds']:.1f} s",
            f"AsyncOpenAI 3 {busy['AsyncOpenAI + sem(60)']['x batchwright']:.0f}x, "
            f"AsyncOpenAI 2 {busy['AsyncOpenAI 2 + sem(60)']['x batchwright']:.0f}x the time",
            "`bench_calls.py`",
        ],
        [
            "throughput found on 16 unknown servers (simulated), of the best fixed limit",
            f"cold {least(cold)}, warm {least(warm)}",
            f"at worst: AIMD {cold['least']['AIMD']:.0f} %, "
            f"inspect_ai's rule {cold['least']['inspect_ai']:.0f} %",
            "`bench_limit.py`",
        ],
        [
            "1,024 judged samples, against one by one",
            f"{fresh[4]:.0f}x, {kept[4]:.0f}x where 482 texts repeat",
            "",
            "`bench_rewards.py`",
        ],
        [
            "advantages of the wrong sign, 5 % of judgements lost",
            f"{wrong['batchwright, 60']:.1f} %",
            f"zeros for failures {wrong['batch of clients, 60']:.1f} %, "
            f"verl's rate_limited {wrong['rate_limited, 60']:.1f} %",
            "`bench_rewards.py`",
        ],
    ]


def agents() -> list[list[str]]:
    times = rows("gae", "times the time of ours")
    loop, vector = (
        times["torch loop over T (CleanRL, SB3)"],
        times["torchrl vec_generalized_advantage_estimate"],
    )
    env = rows("prover_env", "WN18RR, random")
    core = env["batchwright core, B=4,096"]["steps/s"]
    slower = {
        size: [
            env[f"{name}, B={size}"]["x slower than core at this B"]
            for name in ("torch eager", "torch eager, tuned")
        ]
        for size in ("16", "4,096")
    }
    pole = rows("ppo", "CartPole, 8 environments, 60,000")
    mine = pole["batchwright"]
    peers = {
        "Stable-Baselines3": pole["Stable-Baselines3 PPO, DummyVecEnv"],
        "TorchRL": pole["TorchRL, SerialEnv of GymEnv"],
    }
    graphs = ("umls", "family", "kinship", "wn18rr")
    hybrid = {name: rows("kg", f"{name}, 3 seeds")["hybrid"]["MRR"] for name in graphs}
    alone = {
        name: rows("kg", f"{name}, 3 seeds")["rl"]["MRR"] for name in graphs if name != "kinship"
    }
    step = rows("query_mutation", "a step of 64 environments")
    ours = step["batchwright"]
    alone_step = rows("query_mutation", "one step of 64 environments")
    real = rows("query_mutation_real", "SmolLM2-135M")
    cost = dict(saved("query_mutation_real", "cost of the run"))
    return [
        [
            "advantages of [128, 256] steps",
            "1",
            f"torch loop {loop['B=256']:.1f}x, torchrl {vector['B=256']:,.0f}x the time",
            "`bench_gae.py`",
        ],
        [
            "steps of 4,096 proofs on WN18RR",
            f"{core / 1e6:.1f}M a processor second",
            "torch eager {:.0f}x slower, tuned {:.1f}x; ".format(*slower["4,096"])
            + "of 16 proofs {:.0f}x and {:.0f}x".format(*slower["16"]),
            "`bench_prover_env.py`",
        ],
        [
            "PPO on CartPole, 60,000 steps, same settings, 3 seeds",
            f"{mine['steps/s']:,.0f} steps a second, return {mine['return, mean']:.0f}",
            ", ".join(
                f"{name} {mine['steps/s'] / peer['steps/s']:.1f}x slower "
                f"({peer['return, mean']:.0f})"
                for name, peer in peers.items()
            ),
            "`bench_ppo.py`",
        ],
        [
            "link prediction, full filtered MRR, rules and embedding",
            ", ".join(f"{name} {value:.3f}" for name, value in hybrid.items()),
            "3 seeds; epochs and weights chosen on valid",
            "`bench_kg.py`",
        ],
        [
            "the same by the learned prover alone",
            ", ".join(f"{name} {value:.3f}" for name, value in alone.items()),
            "3 seeds; epochs and weights chosen on valid",
            "`bench_kg.py`",
        ],
        [
            "a step of 64 rewritten questions, 50 ms a call",
            f"{ours['seconds']:.2f} s",
            f"one by one {ours['x sequential']:.0f}x, two phases of 64 threads "
            f"{step['two phases, 64 threads']['of ours']:.1f}x the time",
            "`bench_query_mutation.py`",
        ],
        [
            "the same where a step waits for its slowest environment",
            f"{alone_step['batchwright']['seconds']:.2f} s",
            f"two phases of 64 threads {alone_step['batchwright']['x two phases']:.1f}x the time",
            "`bench_query_mutation.py`",
        ],
        [
            "questions that SmolLM2-135M answers right",
            f"{real['ppo']['right %']:.0f} % after 256 steps of PPO",
            f"{real['identity']['right %']:.0f} % as they stand, "
            f"{cost['target right in at least one, %']:.0f} % in the best of all wordings",
            "`bench_query_mutation.py --real`",
        ],
    ]


def saved(name: str, title: str) -> list[list[Any]]:
    """The rows of one saved table as they are."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return next(table["rows"] for table in found["tables"] if table["title"].startswith(title))


def rows(name: str, title: str, first: str = "") -> dict[str, dict[str, Any]]:
    """The rows of one saved table by their first cell."""
    saved = json.loads((RESULTS / f"{name}.json").read_text())
    for found in saved["tables"]:
        if found["title"].startswith(title) and found["columns"][0] == first:
            named = (dict(zip(found["columns"], row, strict=True)) for row in found["rows"])
            return {row[first]: row for row in named}
    raise SystemExit(f"{name}.json has no table {title!r}; run bench_{name}.py")


if __name__ == "__main__":
    main()
