"""Write the tables of numbers from the saved results, so that none is written by hand.

python benchmarks/readme_numbers.py            every number into benchmarks/README.md, the eight
                                               of IN_README into README.md
python benchmarks/readme_numbers.py --check    write nothing; exit with 1 if a table differs
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IN_README = (
    "pack 1M lengths",
    "useful tokens, log-normal lengths",
    "fine-tuning, useful tokens per CPU second, long-tailed lengths",
    "CPU time per call, cache on",
    "throughput on 16 unknown servers (simulated), relative to the best fixed limit",
    "advantages with the wrong sign, 5 % of judge calls lost",
    "environment steps per CPU second, 4,096 proofs on WN18RR",
    "link prediction on kinship, filtered MRR, each phase of the prover alone",
)


def main() -> None:
    every = [*packing(), *plans(), *others(), *training(), *calls(), *agents(), *machines()]
    named = {row[0]: row for row in every}
    pages = {
        ROOT / "README.md": [named[name] for name in IN_README],
        ROOT / "benchmarks" / "README.md": every,
    }
    stale = [page for page, rows in pages.items() if not _written(page, table(rows))]
    if "--check" in sys.argv and stale:
        sys.exit(f"{stale[0].relative_to(ROOT)} differs from the saved results; run {sys.argv[0]}")


def _written(page: Path, text: str) -> bool:
    """Whether `text` stands between the marks of a page; it is put there unless only checked."""
    before = page.read_text("utf-8")
    inside = r"(?<=<!-- numbers -->\n).*?(?=\n<!-- end of numbers -->)"
    after, found = re.subn(inside, lambda _: text, before, flags=re.DOTALL)
    if found != 1:
        sys.exit(f"{page.relative_to(ROOT)} has {found} places for numbers; it needs one")
    if "--check" not in sys.argv:
        page.write_text(after, "utf-8")
    return after == before


def table(rows: list[list[str]]) -> str:
    """One line per claim, with the script that measured it."""
    lines = ["| what | batchwright | baseline | script |", "|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    saved = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]
    heaviest = max(max(result["load"].values()) for result in saved)
    kinds = sorted({result["machine"]["cpu"] for result in saved})
    cores = sorted({result["machine"]["cores"] for result in saved})
    lines += [
        "",
        f"Measured on {' or '.join(map(str, cores))} shared cores ({', '.join(kinds)}; each result "
        f"names its own), load up to {heaviest:.1f}: trust the ratios. `benchmarks/results/` holds "
        f"everything, with what was not measured.",
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
            f"{ten['batchwright']['bytes/sample']:.0f} bytes per sample",
            "",
            script,
        ],
        [
            "pack 1M hard lengths, mode `optimal`",
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
    fairseq, mosaic = (
        beside[name]
        for name in ("fairseq batch_by_size (Cython)", "MosaicML Streaming, padded rows")
    )
    whole = beside["batchwright sorted, every batch of an epoch"]
    return [
        [
            "build a plan of 10M samples, for any number of epochs",
            f"{by_length['build s']:.2f} s sorted, {packed['build s']:.2f} s packed",
            "",
            script,
        ],
        [
            "plan of 10M samples and every batch of one epoch",
            f"{whole['seconds']:.2f} s",
            f"fairseq (Cython) {fairseq['busy s'] / whole['busy s']:.1f}x, MosaicML Streaming, "
            f"rows in random order, {mosaic['busy s'] / whole['busy s']:.1f}x the time",
            script,
        ],
        [
            "open the plan; read any microbatch of any epoch",
            f"{packed['first open ms']:.1f} ms; {packed['batch us']:.0f} us",
            "",
            script,
        ],
        [
            "useful tokens, log-normal lengths",
            f"{by_length['efficiency %']:.2f} % sorted, {packed['efficiency %']:.2f} % packed",
            f"fairseq, sorted to the token, {fairseq['efficiency %']:.2f} %; five fixed buckets "
            f"{ten['bucketed']['efficiency %']:.2f} %, random rows {mosaic['efficiency %']:.2f} %",
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
            "useful tokens with 8 buckets, lengths up to 8,192",
            f"{edges['exact (batchwright)']['efficiency %']:.1f} %, exact",
            f"equal mass {edges['equal mass']['efficiency %']:.1f} %, "
            f"quantiles {edges['quantile']['efficiency %']:.1f} %",
            "`bench_edges.py`",
        ],
        [
            "most loaded of 64 ranks, relative to the lower bound",
            f"{worst['worst']:.4f} in the worst draw",
            f"verl {verl['worst']:.4f}, round robin {balance['round robin']['worst']:.4f}",
            "`bench_balance.py`",
        ],
        [
            "load 1M lengths",
            f"{load['batchwright .safetensors']['seconds']:.2f} s, "
            f"`.jsonl` {load['batchwright .jsonl']['seconds']:.2f} s",
            f"json loop {load['plain json loop']['seconds']:.2f} s",
            "`bench_lengths.py`",
        ],
        *tokens(),
    ]


def tokens() -> list[list[str]]:
    script = "`bench_tokenize.py`"
    found = rows("tokenize", "gpt2: GSM8K 10 times over")
    started = rows("tokenize", "train sft on 201,771 rows")
    (ours,) = (row for name, row in found.items() if re.match(r"batchwright, \d+ cores", name))
    (threads,) = (row for name, row in found.items() if name.startswith("tokenizers"))
    (mapped,) = (row for name, row in found.items() if re.match(r"datasets.map, \d", name))
    alone = threads["seconds"]
    return [
        [
            "tokens of 74,730 rows, GPT-2, all cores: counted, hashed and stored",
            f"{ours['seconds'] / alone:.2f}x the time of `tokenizers.encode_batch` alone",
            f"`datasets.map(num_proc)`, counted only, {mapped['seconds'] / alone:.2f}x",
            script,
        ],
        [
            "start of `train sft` on 201,771 rows, up to the plan, the second time",
            f"{started['second run']['seconds']:.2f} s",
            f"the first time {started['first run']['seconds']:.1f} s",
            script,
        ],
    ]


def training() -> list[list[str]]:
    tail = rows("sft", "tiny, long tail up to 2,048: 128")
    real = rows("sft", "smollm2, long tail up to 512: 32")
    resumed = rows("resume", "to the batches of step 10,000")
    # They are ahead, and do less: see the docstring of the script.
    names = {
        "accelerate skip_first_batches": "accelerate",
        "torchdata StatefulDataLoader": "StatefulDataLoader",
        "MosaicML Streaming": "MosaicML Streaming",
    }
    loaders = ", ".join(
        f"{short} {resumed[name]['seconds']:.2f} s"
        for name, short in names.items()
        if name in resumed
    )
    speed = "x plain (cpu)"

    def beside(found: dict[str, dict[str, Any]]) -> str:
        ours, trl = found["batchwright packed"][speed], found["TRL packed"][speed]
        return f"TRL packed 1/{ours / trl:.2f}, padded batches of 8 1/{ours:.2f}"

    return [
        [
            "fine-tuning, useful tokens per CPU second, long-tailed lengths",
            "1, packed",
            f"`tiny`: {beside(tail)}; SmolLM2: {beside(real)}",
            "`bench_sft.py`",
        ],
        [
            "first step after resuming at step 10,000 of 1M samples",
            f"{resumed['train_sft, tiny']['seconds']:.2f} s, "
            f"{resumed['train_sft, tiny, named']['seconds']:.2f} s with named samples, "
            f"{resumed['train_sft, tiny']['MB read']:.1f} MB read",
            f"{loaders} to one batch of random padded rows; "
            f"replaying the batches {resumed['batches replayed']['seconds']:.1f} s",
            "`bench_resume.py`",
        ],
    ]


def fastest(found: dict[str, dict[str, Any]], column: str) -> float:
    """Of OpenAI's client by its aiohttp transport, the quicker of the two."""
    slower, quicker = (
        float(found[way][column])
        for way in ("AsyncOpenAI + sem(60)", "AsyncOpenAI, aiohttp + sem(60)")
    )
    assert quicker < slower
    return quicker


PLAIN_WAYS = (
    ("rate_limited, 60", "all differ"),
    ("batch of clients, 60", "all differ"),
    ("batch of clients, 60", "482 differ"),
)


def calls() -> list[list[str]]:
    cpu = rows("calls", "processor time a call")
    wall = rows("calls", "1,024 calls of 50 ms")
    cold, warm = rows("limit", "cold: percent"), rows("limit", "warm: percent")
    table = saved("rewards", "1,024 samples, 0.1 s a call")
    kept = next(row for row in table if row[0] == "batchwright, 60, cache")
    fresh = next(row for row in table if row[:2] == ["batchwright, 60", "all differ"])
    times = {(row[0], row[1]): row[4] for row in table}
    signs = [row for row in saved("rewards", "4,096 samples") if row[1] == "5 % for good"]
    wrong = {row[0]: row[3] for row in signs}
    formats = {row[0]: row for row in saved("answers", "numbers of the corpus:")}
    unseen = {row[0]: row for row in saved("answers", "numbers of the corpus, held out:")}

    def least(found: dict[str, dict[str, Any]]) -> str:
        names = [name for name in found if name != "least"]
        good = sorted(found[name]["batchwright"] for name in names)
        return f"{good[0]:.0f} to {good[-1]:.0f} %"

    drawn = rows("limit_families", "12 drawn worlds").values()

    def family(column: str) -> str:
        good = sorted(row[column] for row in drawn)
        return f"{good[0]:.0f} to {good[-1]:.0f} %"

    slots = rows("limit_live", "live: pool and llama.cpp").values()

    def each(column: str) -> str:
        return " and ".join(f"{row[column]:.0f}" for row in slots)

    busy = rows("calls", "1,024 calls of 50 ms, 60 in flight, beside")
    return [
        [
            "CPU time per call, cache on",
            f"{cpu['batchwright + cache']['x aiohttp']:.2f}x raw aiohttp",
            f"AsyncOpenAI 3, its aiohttp transport {fastest(cpu, 'x aiohttp'):.0f}x, "
            f"litellm {cpu['litellm']['x aiohttp']:.0f}x, "
            f"inspect_ai {cpu['inspect_ai']['x aiohttp']:.0f}x",
            "`bench_calls.py`",
        ],
        [
            "1,024 calls of 50 ms, 60 in flight",
            f"{wall['batchwright']['x ideal']:.2f}x the ideal wall time",
            f"AsyncOpenAI 3, its aiohttp transport {fastest(wall, 'x ideal'):.1f}x, "
            f"AsyncOpenAI 2 {wall['AsyncOpenAI 2 + sem(60)']['x ideal']:.1f}x, "
            f"litellm {wall['litellm']['x ideal']:.1f}x, eight threads "
            f"{wall['ThreadPool(8) + OpenAI']['x ideal']:.1f}x",
            "`bench_calls.py`",
        ],
        [
            "1,024 calls of 50 ms on a fully loaded CPU",
            f"{busy['batchwright']['seconds']:.1f} s",
            f"AsyncOpenAI 3, its aiohttp transport {fastest(busy, 'x batchwright'):.0f}x, "
            f"AsyncOpenAI 2 {busy['AsyncOpenAI 2 + sem(60)']['x batchwright']:.0f}x the time",
            "`bench_calls.py`",
        ],
        [
            "throughput on 16 unknown servers (simulated), relative to the best fixed limit",
            f"cold {least(cold)}, warm {least(warm)}",
            f"worst case: AIMD {cold['least']['AIMD']:.0f} %, "
            f"inspect_ai's rule {cold['least']['inspect_ai']:.0f} %",
            "`bench_limit.py`",
        ],
        [
            "the same on servers and loads drawn at random, mean of the least and best family",
            f"cold {family('cold %')}, warm {family('warm %')}",
            "",
            "`bench_limit.py --families`",
        ],
        [
            "throughput of llama.cpp with 1 and 4 slots, relative to a limit at the slots",
            f"cold {each('cold %')} %, warm {each('warm %')} %",
            "",
            "`bench_limit.py --live`",
        ],
        [
            "1,024 samples scored by a judge, relative to sequential calls",
            f"{fresh[4]:.0f}x, {kept[4]:.0f}x if 482 texts repeat",
            "rate_limited of 60 (verl) {:.0f}x; a batch of 60 clients {:.0f}x, {:.0f}x if they "
            "repeat".format(*(times[way] for way in PLAIN_WAYS)),
            "`bench_rewards.py`",
        ],
        [
            "advantages with the wrong sign, 5 % of judge calls lost",
            f"{wrong['batchwright, 60']:.1f} %",
            f"failures scored 0: {wrong['batch of clients, 60']:.1f} %, "
            f"verl's rate_limited {wrong['rate_limited, 60']:.1f} %",
            "`bench_rewards.py`",
        ],
        [
            "right answers scored wrong, wrong ones scored right, on the formats we tuned on",
            "{1} and {2}".format(*formats["batchwright numeric"]),
            "math-verify {1} and {2}, ".format(*formats["math-verify"])
            + "verl's flexible GSM8K reader {1} and {2}".format(*formats["verl gsm8k, flexible"]),
            "`bench_answers.py`",
        ],
        [
            "the same on formats held out",
            "{1} and {2}".format(*unseen["batchwright numeric"]),
            "math-verify {1} and {2}, ".format(*unseen["math-verify"])
            + "verl's flexible GSM8K reader {1} and {2}".format(*unseen["verl gsm8k, flexible"]),
            "`bench_answers.py`",
        ],
    ]


def machines() -> list[list[str]]:
    calls = {row[0]: row for row in saved("ray", "calls in groups of 64")}
    verl = {row[0]: row for row in saved("ray", "the same calls as rewards of verl")}
    loop = verl["verl's reward loop, 2 workers"]
    lengths = {row[0]: row for row in saved("ray", "lengths of")}
    read = {row[0]: row[1] for row in saved("ray", "20,000 rows")}
    both, alone = lengths["2 nodes of Ray"][1], lengths["2 processes"][1]
    theirs = lengths["2 nodes of Ray Data, map_batches, counted only"][1]
    return [
        [
            "a call through the pool of a Ray cluster, groups of 64, server without latency",
            f"{calls['RayPool'][1] / calls['Pool'][1]:.2f}x the time of `Pool`; "
            f"{calls['RayPool, all cached'][2]:,.0f} cached outcomes a second",
            f"verl's reward loop {loop[1] / verl['RayPool'][1]:.2f}x the time of `RayPool`",
            "`bench_ray.py`",
        ],
        [
            "lengths and tokens of GSM8K on 2 Ray nodes of one core, GPT-2",
            f"{alone / both:.2f}x the speed of 2 local processes",
            f"Ray Data's `map_batches`, counted only, {both / theirs:.2f}x ours",
            "`bench_ray.py`",
        ],
        [
            "rows of an object in S3, after the first pass",
            f"{read['local'] / read['s3, from its copy']:.2f}x the speed of a local file",
            "",
            "`bench_ray.py`",
        ],
    ]


def agents() -> list[list[str]]:
    times = rows("gae", "times the time of ours")
    loop = times["numpy loop over T"]
    torchrl = min(row["B=256"] for name, row in times.items() if name.startswith("torchrl"))
    env = rows("prover_env", "WN18RR, random")
    core = env["batchwright core, B=4,096"]["steps/s"]
    slower = {
        size: [
            env[f"{name}, B={size}"]["x slower than core at this B"]
            for name in ("torch eager, tuned", "python dicts")
        ]
        for size in ("1", "16", "4,096")
    }
    pole = rows("ppo", "CartPole, 8 environments, 60,000")
    mine = pole["batchwright"]
    peers = {
        "Stable-Baselines3": pole["Stable-Baselines3 PPO, DummyVecEnv"],
        "TorchRL": pole["TorchRL, SerialEnv of GymEnv"],
    }
    graphs = ("umls", "family", "kinship", "wn18rr", "fb15k237")
    ranked = {name: rows("kg", f"{name}, ") for name in graphs}
    seeds = sorted({rows_title("kg", f"{name}, ").split(", ")[1] for name in graphs}, reverse=True)
    # Where a peculiarity of the benchmark helps, the same without it is what compares with others.
    unlinked = "hybrid, links not used"
    hybrid = {
        name: found[unlinked if unlinked in found else "hybrid"]["MRR"]
        for name, found in ranked.items()
    }
    linked = {name: found["hybrid"]["MRR"] for name, found in ranked.items() if unlinked in found}
    step = rows("query_mutation", "a step of 64 environments")
    ours = step["batchwright"]
    alone_step = rows("query_mutation", "one step of 64 environments")
    real = rows("query_mutation_real", "SmolLM2-135M")
    cost = dict(saved("query_mutation_real", "cost of the run"))
    return [
        [
            "generalized advantage estimation, [128, 256]",
            "1x",
            f"numpy loop {loop['B=256']:.1f}x, torchrl's faster one {torchrl:,.0f}x the time",
            "`bench_gae.py`",
        ],
        [
            "environment steps per CPU second, 4,096 proofs on WN18RR",
            f"{core / 1e6:.1f}M",
            "tuned torch {:.1f}x slower, Python dicts {:.1f}x; ".format(*slower["4,096"])
            + "with 16 proofs {:.0f}x and {:.1f}x; ".format(*slower["16"])
            + f"with one Python dicts are {1 / slower['1'][1]:.1f}x faster",
            "`bench_prover_env.py`",
        ],
        [
            "PPO on CartPole, 60,000 steps, same hyperparameters, 3 seeds",
            f"{mine['steps/s']:,.0f} steps per second, return {mine['return, mean']:.0f}",
            ", ".join(
                f"{name} {mine['steps/s'] / peer['steps/s']:.1f}x slower "
                f"({peer['return, mean']:.0f})"
                for name, peer in peers.items()
            ),
            "`bench_ppo.py`",
        ],
        [
            "link prediction, filtered MRR, rules + embedding",
            ", ".join(
                f"{name} {value:.3f}"
                + (
                    f" ({linked[name]:.3f} with links of train counted against answers)"
                    if name in linked
                    else ""
                )
                for name, value in hybrid.items()
            ),
            f"{' or '.join(seeds)}; epochs and weights selected on valid",
            "`bench_kg.py`",
        ],
        [
            "link prediction, filtered MRR, policy `answers` by PPO alone",
            ", ".join(f"{name} {found['rl']['MRR']:.3f}" for name, found in ranked.items()),
            "untrained "
            + ", ".join(f"{name} {found['untrained']['MRR']:.3f}" for name, found in ranked.items())
            + f"; {' or '.join(seeds)}",
            "`bench_kg.py`",
        ],
        *(
            [
                f"link prediction on {name}, filtered MRR, each phase of the prover alone",
                f"policy `answers`: PPO {ranked[name]['rl']['MRR']:.3f}; policy `rules`: "
                + ", ".join(
                    f"{phase.removesuffix(' alone')} {by_phase[phase]['mean']:.3f}"
                    for phase in by_phase
                    if phase.endswith(" alone")
                ),
                f"`answers` untrained {ranked[name]['untrained']['MRR']:.3f}; `rules` by all "
                f"phases {by_phase['all phases']['mean']:.3f}, all but PPO "
                f"{by_phase['all but PPO']['mean']:.3f}",
                "`bench_kg.py`",
            ]
            for name in ("umls", "family", "kinship")
            for by_phase in [rows("kg", f"{name}, the policy rules by phase", "trained by")]
        ),
        [
            "one step of 64 query-mutation environments, 50 ms per call",
            f"{ours['seconds']:.2f} s",
            f"sequential {ours['x sequential']:.0f}x, two phases of 64 threads "
            f"{step['two phases, 64 threads']['of ours']:.1f}x the time",
            "`bench_query_mutation.py`",
        ],
        [
            "the same step, waiting for the slowest environment",
            f"{alone_step['batchwright']['seconds']:.2f} s",
            f"two phases of 64 threads {alone_step['batchwright']['x two phases']:.1f}x the time",
            "`bench_query_mutation.py`",
        ],
        [
            "questions SmolLM2-135M answers correctly",
            f"{real['ppo']['right %']:.0f} % after 256 steps of PPO",
            f"{real['identity']['right %']:.0f} % unchanged, "
            f"{cost['target right in at least one, %']:.0f} % with the best wording of each",
            "`bench_query_mutation.py --real`",
        ],
    ]


def saved(name: str, title: str) -> list[list[Any]]:
    """The rows of one saved table as they are."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return next(table["rows"] for table in found["tables"] if table["title"].startswith(title))


def rows_title(name: str, title: str) -> str:
    """The title of the first saved table that begins like this."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    return str(next(t["title"] for t in found["tables"] if t["title"].startswith(title)))


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
