"""Every row shape becomes the tokens and the mask it promises."""

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.data.rows import Row
from batchwright.data.rows.sample import (
    Sample,
    content_hash,
    content_hashes,
    encode_row,
    encode_rows,
)
from batchwright.data.tokenizers import FileTokenizer, Tokenizer, load_tokenizer
from batchwright.data.tokenizers.tokenizer import with_loss_on
from batchwright.errors import BadRow

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def gpt2_with_chat(template: str = CHAT) -> Tokenizer:
    return FileTokenizer(
        load_tokenizer("gpt2")._inner,  # type: ignore[attr-defined]
        "gpt2",
        "test",
        tokens={"eos_token": "<|endoftext|>"},
        template=template,
    )


@pytest.fixture(params=["bytes", "gpt2"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer("bytes") if request.param == "bytes" else gpt2_with_chat()


def split(sample: Sample, tokenizer: Tokenizer) -> tuple[str, str]:
    """The text that is only read, and the text that is learned."""
    mask = sample.loss_mask == 1
    return tokenizer.decode(sample.input_ids[~mask]), tokenizer.decode(sample.input_ids[mask])


SHAPES: list[tuple[dict[str, Any], str, str]] = [
    ({"text": "Grüße, 世界 😀"}, "", "Grüße, 世界 😀"),
    ({"content": "c"}, "", "c"),
    ({"input": "i"}, "", "i"),
    ({"prompt": "2+2=", "completion": " 4"}, "2+2=", " 4"),
    ({"prompt": "2+2=", "response": "4"}, "2+2=", "4"),
    ({"prompt": "", "completion": "x"}, "", "x"),
    ({"prompt": "x", "completion": ""}, "x", ""),
    (
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n",
        "3",
    ),
    (
        {"instruction": "Say hi.", "input": "", "response": "hi"},
        "### Instruction:\nSay hi.\n\n### Response:\n",
        "hi",
    ),
    ({"question": "Why?", "answer": "So."}, "Why?\n", "So."),
]


@pytest.mark.parametrize(("row", "read", "learned"), SHAPES)
def test_the_mask_covers_exactly_the_response(
    row: dict[str, Any], read: str, learned: str, tokenizer: Tokenizer
) -> None:
    sample = encode_row(row, tokenizer, "7")

    assert split(sample, tokenizer) == (read, learned)
    assert sample.input_ids[-1] == tokenizer.eos_id
    assert sample.loss_mask[-1] == 1
    assert (sample.input_ids.dtype, sample.loss_mask.dtype) == (np.int32, np.uint8)
    assert sample.sample_id == "7"


@settings(max_examples=60, deadline=None)
@given(texts, texts)
def test_any_prompt_and_response_are_told_apart(prompt: str, response: str) -> None:
    if not prompt.strip() and not response:
        return
    tokenizer = load_tokenizer("bytes")
    sample = encode_row({"prompt": prompt, "completion": response}, tokenizer, "0")

    assert split(sample, tokenizer) == (prompt, response)


@pytest.mark.parametrize(
    ("row", "learned"),
    [
        ({"input_ids": [1], "messages": 3, "text": "t"}, None),
        ({"messages": [{"role": "assistant", "content": "m"}], "prompt": "m"}, "m"),
        ({"prompt": "p", "completion": "c", "text": "p: c"}, "c"),
        ({"instruction": "i", "output": "o", "question": "i", "text": "do i, then o"}, "o"),
        ({"question": "q", "answer": "a", "text": "q? a."}, "a"),
        ({"text": "t", "content": "t", "input": None}, "t"),
        ({"prompt": None, "messages": None, "text": "t"}, "t"),
    ],
)
def test_the_first_known_key_decides_and_null_counts_as_absent(
    row: dict[str, Any], learned: str | None
) -> None:
    tokenizer = load_tokenizer("bytes")
    sample = encode_row(row, tokenizer, "0")

    if learned is None:
        assert sample.input_ids.tolist() == [1]
    else:
        assert split(sample, tokenizer)[1].rstrip("\n") == learned


def test_every_assistant_turn_is_learned_and_nothing_else(tokenizer: Tokenizer) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Größe?"},
        {"role": "assistant", "content": "Groß 😀."},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes."},
    ]
    sample = encode_row({"messages": turns}, tokenizer, "0")
    read, learned = split(sample, tokenizer)

    assert learned.replace("\n", "") == "Groß 😀.Yes."
    assert [word in read for word in ("Be brief.", "Größe?", "Sure?", "Yes.")] == [1, 1, 1, 0]
    # The mark that ends a turn is learned, or the model would never stop.
    assert int(sample.loss_mask[-1]) == 1


def test_a_prompt_of_messages_is_only_read(tokenizer: Tokenizer) -> None:
    row = {
        "prompt": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "earlier"},
            {"role": "user", "content": "two"},
        ],
        "completion": [{"role": "assistant", "content": "later"}],
    }
    read, learned = split(encode_row(row, tokenizer, "0"), tokenizer)

    assert "earlier" in read
    assert learned.strip() == "later"


def test_nulls_inside_messages_count_as_absent() -> None:
    template = "{% for m in messages %}{{ m.keys() | list | join(',') }};{% endfor %}"
    tokenizer = gpt2_with_chat(template)
    turn = {"role": "assistant", "content": None, "tool_calls": [1], "name": None}

    sample = encode_row({"messages": [turn]}, tokenizer, "0")

    assert tokenizer.decode(sample.input_ids) == "role,content,tool_calls;"


def test_a_turn_that_cannot_be_located_is_a_bad_row_until_the_loss_is_said() -> None:
    twice = gpt2_with_chat(
        "{{ messages | length }}{% for m in messages %}"
        "{{ m.content }}, {{ m.content }};{% endfor %}"
    )
    turns = [{"role": r, "content": r} for r in ("user", "assistant", "user")]

    with pytest.raises(BadRow, match=r"shows its message 1 in 2 places .* choose --loss-on"):
        encode_row({"messages": turns}, twice, "0")
    sample = encode_row({"messages": turns}, with_loss_on(twice, "everything"), "0")
    assert split(sample, twice) == ("", "3user, user;assistant, assistant;user, user;")


def test_tokens_that_are_there_already_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    sample = encode_row({"input_ids": [5, 6, 7], "loss_mask": [0, 1, True]}, tokenizer, "0")

    assert sample.input_ids.tolist() == [5, 6, 7]
    assert sample.loss_mask.tolist() == [0, 1, 1]
    assert encode_row({"input_ids": [5]}, tokenizer, "0").loss_mask.tolist() == [1]


def test_a_beginning_of_text_token_stands_before_prompts_and_texts_once() -> None:
    from tokenizers import processors

    inner = load_tokenizer("gpt2")._inner  # type: ignore[attr-defined]
    inner.post_processor = processors.TemplateProcessing(
        single="! $A <|endoftext|>", special_tokens=[("!", 0), ("<|endoftext|>", 50256)]
    )
    tokenizer = FileTokenizer(inner, "bos", "test")
    text = encode_row({"text": "Hello world"}, tokenizer, "0")
    pair = encode_row({"prompt": "Hello", "completion": " world"}, tokenizer, "0")

    assert text.input_ids.tolist() == [0, 15496, 995, 50256]
    assert pair.input_ids.tolist() == [0, 15496, 995, 50256]
    assert pair.loss_mask.tolist() == [0, 0, 1, 1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, r"none of the known keys; saw \[\]"),
    ({"txt": "a", "label": 1}, r"none of the known keys; saw \[label, txt\]"),
    ({"text": None}, "its text is null, so there is nothing to train on"),
    ({"text": 3}, "its text is of type int, not text"),
    ({"text": ""}, "its text is empty"),
    ({"text": "\ud800"}, "half of a surrogate pair"),
    (
        {"prompt": "p"},
        r"no completion or response or output or answer; saw \[prompt\]",
    ),
    ({"prompt": "p", "completion": 3}, "its completion is of type int"),
    ({"prompt": [], "completion": "x"}, "its prompt are not a list with at least one message"),
    ({"prompt": "", "completion": ""}, "response empty"),
    ({"prompt": "\r\n", "completion": ""}, "prompt is blank"),
    ({"instruction": "i"}, "no output or response"),
    ({"question": "q"}, "no answer"),
    ({"messages": "hi"}, "not a list"),
    ({"messages": []}, "not a list"),
    ({"messages": [{"content": "x"}]}, "message 0 is not an object with a role"),
    ({"messages": [{"role": "user"}]}, "message 0 has no content"),
    ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
    ({"input_ids": []}, "has no tokens"),
    ({"input_ids": [[1], [2, 3]]}, "not a list of integers"),
    ({"input_ids": [1.5]}, "not a list of integers"),
    ({"input_ids": "abc"}, "not a list of integers"),
    ({"input_ids": [2**70]}, "not a list of integers"),
    ({"input_ids": [-1]}, "contain -1, outside"),
    ({"input_ids": [999_999]}, "contain 999999, outside the tokenizer's vocabulary"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "1 entries for 2 input_ids"),
    ({"input_ids": [1], "loss_mask": [2]}, "other than 0 and 1"),
    ({"text": "t", "id": 1.5}, r"its id is 1\.5"),
    ({"text": "t", "id": True}, "its id is True"),
    ({"text": "t", "sample_id": ""}, "its sample_id is empty"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_a_bad_row_says_why_in_one_line(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRow, match=reason) as caught:
        encode_row(row, load_tokenizer("bytes"), "0")
    assert "\n" not in str(caught.value)


def test_ids_come_from_the_row_before_its_number() -> None:
    tokenizer = load_tokenizer("bytes")
    rows: list[dict[str, Any]] = [
        {"text": "t", "id": "a", "sample_id": "b"},
        {"text": "t", "id": 12},
        {"text": "t", "id": None, "sample_id": "s"},
        {"text": "t"},
    ]

    assert [encode_row(row, tokenizer, "9").sample_id for row in rows] == ["a", "12", "s", "9"]


@pytest.mark.parametrize(
    ("given_", "expected"),
    [(0.5, 0.5), (3, 3.0), ("hard", None), (float("nan"), None), (True, None)],
)
def test_a_difficulty_is_a_number_or_nothing(given_: object, expected: float | None) -> None:
    row = {"text": "t", "difficulty": given_, "dataset_id": 4}
    sample = encode_row(row, load_tokenizer("bytes"), "0")

    assert (sample.difficulty, sample.dataset_id) == (expected, "4")


def test_many_rows_at_once_equal_the_rows_one_by_one(tokenizer: Tokenizer) -> None:
    chat = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
    rows = [row for row, _ in BAD] + [row for row, _, _ in SHAPES] + [chat, {"input_ids": [1]}]
    rows = rows[::2] + rows[1::2]
    given_: list[tuple[int, Any]] = [*enumerate(rows), (99, BadRow("not JSON"))]

    outcomes = encode_rows(given_, tokenizer)

    assert [name for name, _ in outcomes] == [name for name, _ in given_]
    assert str(outcomes.pop()[1]) == "not JSON"
    for name, outcome in outcomes:
        if isinstance(outcome, BadRow):
            with pytest.raises(BadRow, match=f"^{re.escape(str(outcome))}$"):
                encode_row(rows[name], tokenizer, str(name))
        else:
            alone = encode_row(rows[name], tokenizer, str(name))
            assert outcome.input_ids.tolist() == alone.input_ids.tolist()
            assert outcome.loss_mask.tolist() == alone.loss_mask.tolist()
            assert outcome.sample_id == alone.sample_id


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["text", "prompt", "messages", "id"]), json_values))
def test_no_row_of_json_raises_anything_but_bad_row(row: dict[str, Any]) -> None:
    ((_, outcome),) = encode_rows([(0, row)], load_tokenizer("bytes"))

    assert isinstance(outcome, Sample | BadRow)


def test_content_hashes_follow_the_content_and_not_its_spelling() -> None:
    assert content_hash({"a": 1, "b": "ü"}) == content_hash({"b": "ü", "a": 1, "c": None})
    assert content_hash({"a": 1}) != content_hash({"a": 2})
    assert content_hash({"a": "\ud800"}) != content_hash({"a": "\ud801"})
    assert f"{content_hash({'text': 'a'}):016x}" == "6193c97585a0f731"


def test_hashes_of_many_rows_are_those_of_each() -> None:
    rows: list[Row] = [
        {"text": '},{"a":1},', "b": [1, None]},
        {},
        {"é": None, "x": float("nan")},
        {"z": [], "a": {"y": None}},
    ]
    assert content_hashes([]).tolist() == []
    assert content_hashes(rows).tolist() == [*map(content_hash, rows)]


def test_a_difficulty_that_is_no_number_is_none() -> None:
    for difficulty in ([1], {"a": 1}, "hard", True, float("inf")):
        row = {"text": "a", "difficulty": difficulty}
        assert encode_row(row, load_tokenizer("bytes"), "0").difficulty is None
