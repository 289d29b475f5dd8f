"""Packs of tokens against their definition: nothing lost, nothing seen by a stranger."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.batching.packing.modes import PackingMode
from batchwright.batching.packing.sequences import (
    PackingConfig,
    PackingMetrics,
    SequenceToPack,
    create_segment_attention_mask,
    pack_sequences,
    pack_with_metrics,
    verify_packed,
)
from batchwright.data.rows.sample import IGNORE
from batchwright.errors import BadLength, ConfigError, DuplicateId, Mismatch, OversizedSample

quick = settings(max_examples=100, deadline=None)
PAD, SEPARATOR = 0, 1


@st.composite
def samples(draw, longest=30):
    """Samples of distinct tokens, so that a token found anywhere tells where it came from."""
    lengths = draw(st.lists(st.integers(1, longest), max_size=20))
    made, token = [], 10
    for number, length in enumerate(lengths):
        mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=length, max_size=length))
        made.append(SequenceToPack(f"s{number}", list(range(token, token + length)), mask))
        token += length
    return made


configs = st.builds(
    PackingConfig,
    mode=st.sampled_from(list(PackingMode)),
    max_length=st.integers(2, 24),
    pad_to_max=st.booleans(),
    add_separator=st.booleans(),
    separator_token_id=st.just(SEPARATOR),
    max_segments=st.none() | st.integers(1, 4),
    overflow=st.sampled_from(["skip", "truncate", "split"]),
)


@quick
@given(samples(), configs)
def test_tokens_are_conserved_under_every_overflow_policy(sequences, config):
    packs, metrics = pack_with_metrics(sequences, config, PAD)
    proof = verify_packed(packs, sequences)

    limit = config.max_length - config.add_separator
    long = [len(s.input_ids) for s in sequences if len(s.input_ids) > limit]
    expected = sorted(
        token
        for s in sequences
        if config.overflow != "skip" or len(s.input_ids) <= limit
        for token in (s.input_ids if config.overflow == "split" else s.input_ids[:limit])
    )
    found = [token for pack in packs for token in pack.input_ids.tolist()]
    assert sorted(t for t in found if t not in (PAD, SEPARATOR)) == expected
    assert metrics.total_tokens == proof.tokens == len(expected)
    assert metrics.num_original_samples == len(sequences)
    assert metrics.num_skipped == proof.absent_samples
    assert metrics.num_skipped == (len(long) if config.overflow == "skip" else 0)
    assert metrics.num_truncated == (len(long) if config.overflow == "truncate" else 0)
    assert metrics.num_split == (len(long) if config.overflow == "split" else 0)
    assert proof.absent_tokens == sum(len(s.input_ids) for s in sequences) - len(expected)


@quick
@given(samples(), configs)
def test_every_token_of_a_pack_is_what_its_segment_says(sequences, config):
    by_id = {s.sample_id: s for s in sequences}
    for pack in pack_sequences(sequences, config, PAD):
        width = len(pack.input_ids)
        assert width <= config.max_length
        assert width == config.max_length or not config.pad_to_max
        token = 0
        for s, name in enumerate(pack.sample_ids):
            sample = by_id[name]
            mask = sample.loss_mask or [1] * len(sample.input_ids)
            for i in range(pack.sample_lengths[s]):
                source = pack.sample_starts[s] + i
                learned = bool(mask[source]) and i > 0
                assert pack.input_ids[token] == sample.input_ids[source]
                assert pack.labels[token] == (sample.input_ids[source] if learned else IGNORE)
                assert pack.loss_mask[token] == learned
                assert (pack.segment_ids[token], pack.position_ids[token]) == (s, i)
                token += 1
            if config.add_separator:
                assert (pack.input_ids[token], pack.labels[token]) == (SEPARATOR, IGNORE)
                assert pack.segment_ids[token] == s
                token += 1
            assert token == pack.cu_seqlens[s + 1]
        assert pack.padding_tokens == width - token
        assert (pack.input_ids[token:] == PAD).all()
        assert (pack.segment_ids[token:] == -1).all()
        assert (pack.labels[token:] == IGNORE).all()
        assert pack.num_segments <= (config.max_segments or 10**9)
        assert pack.max_seqlen == np.diff(pack.cu_seqlens).max()


@quick
@given(st.lists(st.integers(-1, 3), min_size=1, max_size=12))
def test_the_mask_is_same_segment_causal_and_blind_to_padding(segment_ids):
    mask = create_segment_attention_mask(segment_ids)

    for t, own in enumerate(segment_ids):
        for u, other in enumerate(segment_ids):
            assert mask[t, u] == (own == other and u <= t and own != -1)


def test_the_mask_of_many_rows_is_the_mask_of_each():
    rows = np.array([[0, 0, 1, -1], [0, 1, 1, 1]])
    masks = create_segment_attention_mask(rows, dtype=np.float32)

    assert masks.shape == (2, 4, 4)
    assert masks.dtype == np.float32
    for row, mask in zip(rows, masks, strict=True):
        assert np.array_equal(mask, create_segment_attention_mask(row))


@quick
@given(samples(longest=8), st.integers(0, 100), st.booleans())
def test_changing_one_sample_changes_nothing_that_another_can_see(sequences, chosen, separator):
    if not sequences:
        return
    config = PackingConfig(max_length=16, add_separator=separator, separator_token_id=SEPARATOR)
    chosen %= len(sequences)
    changed = list(sequences)
    changed[chosen] = replace(
        changed[chosen], input_ids=[token + 5000 for token in changed[chosen].input_ids]
    )

    for before, after in zip(
        pack_sequences(sequences, config), pack_sequences(changed, config), strict=True
    ):
        mask = create_segment_attention_mask(before.segment_ids)
        assert np.array_equal(mask, create_segment_attention_mask(after.segment_ids))
        assert before.sample_ids == after.sample_ids
        for t, segment in enumerate(before.segment_ids):
            if segment >= 0 and before.sample_ids[segment] != sequences[chosen].sample_id:
                assert np.array_equal(before.input_ids[mask[t]], after.input_ids[mask[t]])
                assert before.labels[t] == after.labels[t]


def test_a_loss_never_asks_one_sample_to_predict_another():
    pack = pack_sequences([SequenceToPack("a", [5, 6]), SequenceToPack("b", [7, 8])])[0]

    # The label at t is predicted from t - 1, so it must be of the same segment.
    learned = np.flatnonzero(pack.labels != IGNORE)
    assert learned.tolist() == [1, 3]
    assert (pack.segment_ids[learned] == pack.segment_ids[learned - 1]).all()


@dataclass(frozen=True)
class OtherSample:
    sample_id: str
    input_ids: np.ndarray
    loss_mask: np.ndarray
    difficulty: float = 0.5


def test_any_object_with_id_tokens_and_mask_packs():
    sample = OtherSample("x", np.array([5, 6, 7], np.uint16), np.array([0, 0, 1], np.uint8))
    pack = pack_sequences([sample], PackingConfig(max_length=4))[0]

    assert pack.labels.tolist() == [IGNORE, IGNORE, 7, IGNORE]
    assert (pack.num_loss_tokens, pack.total_tokens, pack.efficiency) == (1, 3, 0.75)
    assert pack.input_ids.dtype == pack.labels.dtype == pack.cu_seqlens.dtype == np.int32
    assert "\n" not in repr(pack)


def test_metrics_say_how_full_the_packs_are():
    sequences = [SequenceToPack(str(i), [9] * 3, [0, 1, 1]) for i in range(4)]
    _, metrics = pack_with_metrics(sequences, PackingConfig(max_length=8))

    assert metrics == PackingMetrics(4, 2, 0, 0, 0, 12, 16, 8)
    assert (metrics.packing_ratio, metrics.efficiency) == (2.0, 0.75)
    assert (metrics.loss_efficiency, metrics.ullage) == (0.5, 0.25)


def test_no_sequences_make_no_packs():
    packs, metrics = pack_with_metrics([])

    assert packs == []
    assert (metrics.packing_ratio, metrics.efficiency, metrics.ullage) == (0.0, 1.0, 0.0)


def test_what_cannot_be_packed_is_refused_by_name():
    small = PackingConfig(max_length=4)
    with pytest.raises(OversizedSample, match=r"1 of 2 sequences .* 'b' with 5;"):
        pack_sequences([SequenceToPack("a", [1]), SequenceToPack("b", [1] * 5)], small)
    with pytest.raises(BadLength, match="'a' has no tokens"):
        pack_sequences([SequenceToPack("a", [])], small)
    with pytest.raises(Mismatch, match="2 tokens but 3 loss mask values"):
        pack_sequences([SequenceToPack("a", [1, 2], [1, 1, 1])], small)
    with pytest.raises(ConfigError, match="needs separator_token_id"):
        PackingConfig(add_separator=True)
    with pytest.raises(ConfigError, match="overflow='drop' is not known"):
        PackingConfig(overflow="drop")
    with pytest.raises(ConfigError, match="'tetris' is not known"):
        PackingConfig(mode="tetris")
    with pytest.raises(ConfigError, match="max_length must be at least"):
        PackingConfig(max_length=1, add_separator=True, separator_token_id=1)


SEQUENCES = [SequenceToPack("a", [5, 6, 7], [1, 0, 1]), SequenceToPack("b", [8, 9])]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("segment_ids", [0, 0, 1, 1, 1, -1], "segment id of token 2"),
        ("segment_ids", [0, 0, 0, 1, 1, 1], "segment id of token 5"),
        ("position_ids", [0, 1, 2, 3, 4, 0], "count from 0 in every segment"),
        ("cu_seqlens", [0, 3], "do not cut"),
        ("cu_seqlens", [0, 5, 3], "do not cut"),
        ("max_seqlen", 2, "max_seqlen is 2"),
        ("input_ids", [5, 6, 7, 8, 8, 0], "segment 1 .*tokens differ"),
        ("labels", [5, -100, 7, -100, 9, -100], "loss mask and labels disagree"),
        ("labels", [-100, -100, 7, -100, 9, 0], "padding has labels"),
        ("sample_ids", ("a", "a"), "segment 1 .*'a'"),
        ("sample_ids", ("a", "c"), "'c' is not a sequence given"),
        ("sample_lengths", (3, 3), "do not fit"),
    ],
)
def test_the_verifier_finds_every_kind_of_damage(field, value, message):
    pack = pack_sequences(SEQUENCES, PackingConfig(max_length=6))[0]
    if isinstance(value, list):
        value = np.array(value, np.int32)

    with pytest.raises(Mismatch, match=message):
        verify_packed([replace(pack, **{field: value})], SEQUENCES)


def test_the_verifier_finds_a_first_token_with_loss_and_a_sample_packed_twice():
    pack = pack_sequences(SEQUENCES, PackingConfig(max_length=6))[0]
    leaking = replace(
        pack,
        labels=np.array([-100, -100, 7, 8, 9, -100], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1, 0], np.int32),
    )
    with pytest.raises(Mismatch, match=r"segment 1 \('b'\): label of token 0"):
        verify_packed([leaking], SEQUENCES)
    with pytest.raises(Mismatch, match=r"pack 1, segment 0 .*in another segment as well"):
        verify_packed([pack, pack], SEQUENCES)
    with pytest.raises(DuplicateId, match="'a'"):
        verify_packed([pack], [*SEQUENCES, SEQUENCES[0]])
