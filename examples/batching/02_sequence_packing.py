"""Sequence packing: several samples in one row, none of which attends to another."""

import numpy as np

from batchwright.batching import (
    BatchingConfig,
    BatchPlanBuilder,
    PackingConfig,
    PackingMetrics,
    PackingMode,
    create_segment_attention_mask,
    pack_lengths,
    pack_sequences,
    verify_packed,
)
from batchwright.data import Sample, encode_row, load_tokenizer

WIDTH = 512
SENTENCE = "the ship is full of barrels and each barrel is full to the brim"


def make_samples(count: int) -> list[Sample]:
    """Prompts with completions of a few words to a few dozen, tokenized as bytes."""
    random = np.random.default_rng(3)
    tokenizer = load_tokenizer("bytes")
    samples = []
    for number in range(count):
        size = int(np.clip(random.lognormal(2.8, 0.7), 2, 80))
        row = {
            "prompt": "Say it again: ",
            "completion": " ".join(random.choice(SENTENCE.split(), size)),
        }
        samples.append(encode_row(row, tokenizer, f"s{number}"))
    return samples


def show_one_small_pack() -> None:
    """A row of three samples, token by token."""
    tokenizer = load_tokenizer("bytes")
    words = ["cask", "tun", "hogshead"]
    samples = [encode_row({"text": word}, tokenizer, word) for word in words]
    (pack,) = pack_sequences(samples, PackingConfig(max_length=20), tokenizer.pad_id)
    print(f"{pack}: {', '.join(pack.sample_ids)}")
    for name in ("segment_ids", "position_ids", "labels"):
        print(f"  {name:<13}", " ".join(f"{value:>4}" for value in getattr(pack, name)))
    print(f"  cu_seqlens    {pack.cu_seqlens.tolist()}, longest {pack.max_seqlen}")
    print("attention mask, one line per token; padding attends to nothing:")
    for line in create_segment_attention_mask(pack.segment_ids):
        print("  ", "".join("#" if seen else "." for seen in line))


def attend(tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """One attention head over fixed random embeddings: enough to see which tokens interact."""
    table = np.random.default_rng(0).normal(size=(258, 16))
    vectors = table[tokens]
    scores = np.where(mask, vectors @ vectors.T / 4, -np.inf)
    scores[~mask.any(axis=1)] = 0
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    attended: np.ndarray = weights / weights.sum(axis=1, keepdims=True) @ vectors
    return attended


def compare_modes(samples: list[Sample], lengths: np.ndarray) -> None:
    bound = pack_lengths(lengths, WIDTH).lower_bound
    print(f"{'mode':<21}{'rows':>5}{'useful':>9}   (no packing needs fewer than {bound} rows)")
    for mode in ("FIRST_FIT", "BEST_FIT", "GREEDY", "BEST_FIT_DECREASING"):
        packs = pack_sequences(samples, PackingConfig(mode=PackingMode[mode], max_length=WIDTH))
        metrics = PackingMetrics.of(packs)
        print(f"{mode:<21}{metrics.num_packed_sequences:>5}{metrics.efficiency:>9.1%}")


def compare_layouts(lengths: np.ndarray) -> None:
    """Rows of one sample, buckets, and packed rows, under the same token budget."""
    config = BatchingConfig(
        token_budget=8 * WIDTH,
        bucket_edges=(64, 128, 256),
        overflow_max=WIDTH,
        pack_max_length=WIDTH,
    )
    alone = lengths.mean() / WIDTH
    bucketed = BatchPlanBuilder(lengths, config).build().efficiency
    packed = config.model_copy(update={"layout": "packed"})
    joined = BatchPlanBuilder(lengths, packed).build().efficiency
    print(f"\nefficiency: one sample per row {alone:.1%}, ", end="")
    print(f"bucketed {bucketed:.1%}, packed {joined:.1%}")
    fewer = f"{1 - alone / joined:.1%} fewer tokens than one sample per row"
    print(f"packing needs {fewer}, {1 - bucketed / joined:.1%} fewer than buckets")


def main() -> None:
    show_one_small_pack()
    samples = make_samples(600)
    lengths = np.array([len(sample) for sample in samples])
    print(f"\n{len(samples)} samples of {lengths.min()} to {lengths.max()} tokens, rows of {WIDTH}")
    compare_modes(samples, lengths)
    compare_layouts(lengths)

    packs = pack_sequences(samples, PackingConfig(max_length=WIDTH))
    proof = verify_packed(packs, samples)
    print(
        f"\nverified: {proof.segments} samples in {proof.packs} rows, complete and disjoint, ",
        end="",
    )
    print(f"{proof.absent_tokens} of {proof.tokens} tokens lost")

    # Change every token of the first sample: does the output of any other sample change?
    pack = packs[-1]
    changed = np.where(pack.segment_ids == 0, 65, pack.input_ids)
    blocks = create_segment_attention_mask(pack.segment_ids)
    for name, mask in (("segment", blocks), ("plain causal", np.tri(WIDTH, dtype=bool))):
        moved = attend(pack.input_ids, mask) != attend(changed, mask)
        leaked = moved[pack.segment_ids > 0].any(axis=1).sum()
        print(f"{name} mask: the outputs of {leaked} tokens of other samples change")


if __name__ == "__main__":
    main()
