"""Analyze before planning: the distribution of lengths, the efficiency of buckets, better edges."""

import numpy as np

from batchwright.batching import (
    BatchingConfig,
    BatchPlanBuilder,
    BucketSpec,
    OptimizationGoal,
    analyze_bucket_efficiency,
    compute_length_histogram,
    create_efficiency_report,
    suggest_bucket_edges,
)

TOKEN_BUDGET = 8192


def make_lengths() -> np.ndarray:
    """A typical mixture: short chats, longer answers, a few documents."""
    random = np.random.default_rng(2)
    parts = (
        random.normal(70, 20, 4000),
        random.normal(340, 90, 1500),
        random.lognormal(6.6, 0.3, 300),
    )
    return np.clip(np.concatenate(parts), 8, 2048).astype(int)


def planned_efficiency(lengths: np.ndarray, spec: BucketSpec) -> tuple[float, int]:
    """The efficiency of a plan with these buckets, and its batches per epoch."""
    config = BatchingConfig(
        token_budget=TOKEN_BUDGET,
        bucket_edges=spec.edges,
        overflow_max=spec.overflow_max,
        pad_policy="pad_to_bucket",
    )
    plan = BatchPlanBuilder(lengths, config).build()
    return plan.efficiency, plan.num_microbatches()


def main() -> None:
    lengths = make_lengths()
    print(compute_length_histogram(lengths, num_bins=12).to_ascii(width=40))

    original = BucketSpec(edges=(256, 512, 1024), overflow_max=2048)
    analysis = analyze_bucket_efficiency(lengths, original)
    print(f"\nbuckets up to {original.widths}:\n{analysis.to_ascii()}")

    print("\nfour buckets, optimal for each goal:")
    goals = (
        OptimizationGoal.MINIMIZE_WASTE,
        OptimizationGoal.BALANCE_BUCKETS,
        OptimizationGoal.MINIMIZE_MEMORY,
    )
    for goal in goals:
        found = suggest_bucket_edges(lengths, num_buckets=4, goal=goal, current=original)
        print(f"  {goal:<8} edges {found.edges}, {found.efficiency:.1%} useful, ", end="")
        print(f"samples {found.counts}")

    report = create_efficiency_report(lengths, original, token_budget=TOKEN_BUDGET)
    print("\nrecommendations of the report:")
    for sentence in report.recommendations:
        print(f"  {sentence}")

    # Edges at multiples of 64 suit the hardware, and cost little.
    optimised = suggest_bucket_edges(lengths, num_buckets=4, align=64, current=original)
    print("\noriginal and optimised edges, as plans:")
    for name, spec in (("original", original), ("optimised", optimised.spec())):
        efficiency, batches = planned_efficiency(lengths, spec)
        print(f"  {name:<10} {spec.widths!s:<23} {efficiency:.1%} useful, {batches} batches")
    print(f"efficiency lost by the original edges: {optimised.regret:.1%}")

    print("\nmore buckets, less padding, more shapes to compile:")
    for buckets in (2, 4, 8, 16):
        found = suggest_bucket_edges(lengths, num_buckets=buckets)
        print(f"  {buckets:>2} buckets: {found.efficiency:.1%} useful")

    print("\nthe same from the shell:")
    for command in (
        "histogram -c lengths.jsonl --bins 15",
        "analyze -c lengths.jsonl --bucket-edges 128,256,512",
        "suggest -c lengths.jsonl --num-buckets 4 --goal waste",
    ):
        print(f"  batchwright data batching {command}")


if __name__ == "__main__":
    main()
