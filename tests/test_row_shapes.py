"""Rows as the data sets that people train on have them: what is read, and what is learned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchwright.data.rows.sample import Sample, encode_row
from batchwright.data.rows.source import open_source
from batchwright.data.tokenizers import FileTokenizer, Tokenizer, load_tokenizer
from batchwright.data.tokenizers.tokenizer import LossOn, with_loss_on
from batchwright.data.tokens import TokenStore
from batchwright.errors import BadRow, NoTokenizer

BYTES = load_tokenizer("bytes")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def split(sample: Sample, tokenizer: Tokenizer = BYTES) -> tuple[str, str]:
    """The text that is only read, and the text that is learned."""
    mask = sample.loss_mask == 1
    return tokenizer.decode(sample.input_ids[~mask]), tokenizer.decode(sample.input_ids[mask])


def encoded(row: dict[str, Any], loss_on: LossOn = "all-turns") -> tuple[str, str]:
    return split(encode_row(row, with_loss_on(BYTES, loss_on), "0"))


# As the cards of these data sets show their rows; the texts are our own.
FIELD: dict[str, tuple[dict[str, Any], str, str]] = {
    "alpaca": (
        {
            "instruction": "Add.",
            "input": "1 2",
            "output": "3",
            "text": "Below is a task.\n### Instruction:\nAdd.\n### Input:\n1 2\n### Response:\n3",
        },
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n",
        "3",
    ),
    "dolly": (
        {"instruction": "Who?", "context": "Ann sang.", "response": "Ann", "category": "qa"},
        "### Instruction:\nWho?\n\n### Input:\nAnn sang.\n\n### Response:\n",
        "Ann",
    ),
    "openorca": (
        {"id": "flan.1", "system_prompt": "Be brief.", "question": "1+1?", "response": "2"},
        "Be brief.\n\n1+1?\n",
        "2",
    ),
    "question with context": (
        {"context": "Ann sang.", "question": "Who?", "answer": "Ann"},
        "Ann sang.\n\nWho?\n",
        "Ann",
    ),
    "input and output": ({"input": "1+1", "output": "2"}, "1+1\n", "2"),
    "prompt and output": ({"prompt": "1+1=", "output": "2"}, "1+1=", "2"),
    "system column": (
        {"system": "Be brief.", "prompt": "1+1=", "completion": "2"},
        "Be brief.\n\n1+1=",
        "2",
    ),
    "sharegpt": (
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Hi"},
                {"from": "gpt", "value": "Hello"},
            ]
        },
        "<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n",
        "Hello\n",
    ),
    "ultrachat": (
        {
            "prompt": "Hi",
            "prompt_id": "ab12",
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ],
        },
        "<|user|>\nHi\n<|assistant|>\n",
        "Hello\n",
    ),
    "ultrachat of 2023": (
        {"id": "0", "data": ["Hi", "Hello", "1+1?", "2"]},
        "<|user|>\nHi\n<|assistant|>\n<|user|>\n1+1?\n<|assistant|>\n",
        "Hello\n2\n",
    ),
    "messages and a system column": (
        {
            "system": "Be brief.",
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ],
        },
        "<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n",
        "Hello\n",
    ),
    "ultrafeedback": (
        {
            "prompt": "Hi",
            "chosen": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ],
            "rejected": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Go away"},
            ],
            "score_chosen": 8.0,
        },
        "<|user|>\nHi\n<|assistant|>\n",
        "Hello\n",
    ),
    "preference of texts": (
        {"prompt": "Hi", "chosen": " Hello", "rejected": " No"},
        "Hi",
        " Hello",
    ),
    "anthropic": (
        {
            "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 1+1?\n\nAssistant: 2",
            "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 1+1?\n\nAssistant: 3",
        },
        "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: 1+1?\n\nAssistant:",
        " 2",
    ),
    "alpaca without input": (
        {"instruction": "Name a colour", "input": "<noinput>", "output": "blue"},
        "### Instruction:\nName a colour\n\n### Response:\n",
        "blue",
    ),
    "ultrafeedback with messages": (
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ],
            "chosen": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ],
            "rejected": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Go away"},
            ],
        },
        "<|user|>\nHi\n<|assistant|>\n",
        "Hello\n",
    ),
    "orca pairs": (
        {"system": "Be brief.", "question": "1+1?", "chosen": "2", "rejected": "3"},
        "Be brief.\n\n1+1?\n",
        "2",
    ),
    "lima": (
        {"conversations": ["Hi", "Hello", "1+1?", "2"], "source": "multi_turn"},
        "<|user|>\nHi\n<|assistant|>\n<|user|>\n1+1?\n<|assistant|>\n",
        "Hello\n2\n",
    ),
    "capybara": (
        {"conversation": [{"input": "Hi", "output": "Hello"}], "source": "Dove"},
        "<|user|>\nHi\n<|assistant|>\n",
        "Hello\n",
    ),
    "sharegpt of either kind": (
        {"items": [{"from": "human", "content": "Hi"}, {"role": "gpt", "value": "Hello"}]},
        "<|user|>\nHi\n<|assistant|>\n",
        "Hello\n",
    ),
    "openhermes": (
        {
            "conversations": [
                {"from": "human", "value": "Hi", "weight": None},
                {"from": "gpt", "value": "Hello", "weight": 1.0},
            ],
            "system_prompt": None,
            "title": None,
            "source": "x",
        },
        "<|user|>\nHi\n<|assistant|>\n",
        "Hello\n",
    ),
    "tulu": (
        {
            "id": "t1",
            "source": "s",
            "messages": [
                {"role": "system", "content": ""},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"},
            ],
        },
        "<|system|>\n\n<|user|>\nHi\n<|assistant|>\n",
        "Hello\n",
    ),
    "metamath": ({"type": "x", "query": "1+1?", "response": "2"}, "1+1?\n", "2"),
    "numina": ({"source": "s", "problem": "1+1?", "solution": "2"}, "1+1?\n", "2"),
    "flan": ({"inputs": "1+1?", "targets": "2", "task": "sum"}, "1+1?\n", "2"),
    "gsm8k": (
        {"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"},
        "1+1?\n",
        "1+1=<<1+1=2>>2\n#### 2",
    ),
    "kto": ({"prompt": "1+1=", "completion": "2", "label": True}, "1+1=", "2"),
    "train false": (
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Bad", "train": False},
                {"role": "user", "content": "Hm"},
                {"role": "assistant", "content": "Good", "train": True},
            ]
        },
        "<|user|>\nHi\n<|assistant|>\nBad\n<|user|>\nHm\n<|assistant|>\n",
        "Good\n",
    ),
    "weight 0": (
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Bad", "weight": 0},
                {"role": "user", "content": "Hm"},
                {"role": "assistant", "content": "Good", "weight": 1},
            ]
        },
        "<|user|>\nHi\n<|assistant|>\nBad\n<|user|>\nHm\n<|assistant|>\n",
        "Good\n",
    ),
}


@pytest.mark.parametrize("name", FIELD)
def test_rows_of_known_data_sets_are_read_as_their_users_mean_them(name: str) -> None:
    row, read, learned = FIELD[name]
    assert encoded(row) == (read, learned)


@pytest.mark.parametrize("name", FIELD)
def test_the_loss_can_cover_everything(name: str) -> None:
    row, read, learned = FIELD[name]
    only_read, all_of_it = encoded(row, "everything")
    assert only_read == ""
    assert sorted(all_of_it) == sorted(read + learned)


def test_the_loss_can_cover_the_last_turn_alone() -> None:
    turns = [{"role": r, "content": r + str(n)} for n in range(3) for r in ("user", "assistant")]
    assert encoded({"messages": turns}, "last-turn")[1] == "assistant2\n"
    assert encoded({"messages": turns})[1] == "assistant0\nassistant1\nassistant2\n"


@pytest.mark.parametrize(
    ("masks", "learned"),
    [
        ({"labels": [-100, -100, 7, 8]}, [0, 0, 1, 1]),
        ({"completion_mask": [0, 1, 1, 1]}, [0, 1, 1, 1]),
        ({"assistant_masks": [0, 0, 0, 1]}, [0, 0, 0, 1]),
        ({"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}, [0, 1, 0, 1]),
        ({"labels": [-100, 6, 7, 8], "loss_mask": [1, 1, 1, 0]}, [0, 1, 1, 0]),
        ({"labels": [5, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}, [1, 1, 1]),
    ],
)
def test_labels_and_masks_beside_tokens_are_honoured(
    masks: dict[str, Any], learned: list[int]
) -> None:
    sample = encode_row({"input_ids": [5, 6, 7, 8], **masks}, BYTES, "0")
    assert sample.loss_mask.tolist() == learned
    assert sample.input_ids.tolist() == [5, 6, 7, 8][: len(learned)]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [5, 6], "labels": [6, -100]}, "labels differ from its input_ids"),
        ({"input_ids": [5, 6], "labels": [5]}, "labels have 1 entries for 2"),
        ({"text": "t", "labels": [1]}, "has labels, which is not used beside text"),
        ({"prompt": "p", "completion": "c", "explanation": "e"}, "--ignore-column explanation"),
        ({"text": "t", "rejected": "r"}, "has rejected"),
        ({"question": "q", "answer": None}, "its answer is null"),
        ({"prompt": "p", "completion": "c", "label": False}, "its label is false"),
        ({"conversations": ["only a question"]}, "no assistant message to train on"),
        ({"query": "q", "tools": "[]", "answers": "{}"}, "answers are not a list of calls"),
        ({"prompt": "p", "completion": None}, "its completion is null"),
        ({"prompt": "p", "response": None}, "its response is null"),
        ({"prompt": None, "response": "r"}, "its prompt is null"),
        ({"instruction": "i", "output": None}, "its output is null"),
        ({"input": "i", "output": None}, "its output is null"),
        ({"prompt": "p", "chosen": None, "rejected": "r"}, "its chosen is null"),
        ({"messages": None}, "its messages is null"),
        ({"input_ids": None, "labels": None}, "its input_ids is null"),
        ({"text": None, "txet": "t"}, "its text is null"),
        ({"messages": [None]}, "its message 0 is null"),
        ({"messages": [{"role": None, "content": "c"}]}, "message 0 has a role that is null"),
        ({"chosen": "no transcript", "rejected": "x"}, "add a prompt column"),
        ({"conversations": [{"from": "gpt"}]}, "message 0 has no content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "null and no tool_calls"),
        ({"messages": [{"role": "assistant", "content": "a"}], "tools": "{"}, "not JSON"),
        (
            {"messages": [{"role": "assistant", "content": "a", "weight": 0}]},
            "no assistant message to train on",
        ),
        (
            {
                "system": "Be brief.",
                "messages": [
                    {"role": "system", "content": "Be kind."},
                    {"role": "assistant", "content": "a"},
                ],
            },
            "has a system column and another system message",
        ),
    ],
)
def test_what_could_be_trained_wrong_is_refused_by_name(row: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRow, match=words):
        encode_row(row, BYTES, "0")


def test_what_only_repeats_is_no_unused_column() -> None:
    row = {"prompt": "Hi", "completion": "Hello", "text": "Hi Hello", "instruction": "Hi"}
    assert encoded(row) == ("Hi", "Hello")


def test_columns_that_hold_no_training_text_are_left_alone() -> None:
    row = {"text": "t", "url": "http://a/b", "label": 0, "score": 0.5, "category": "qa", "n": [1]}
    assert encoded(row) == ("", "t")


def test_tools_as_a_json_string_are_tools() -> None:
    template = (
        "{{ tools | length if tools else 'none' }}:{% for m in messages %}{{ m.role[0] }}"
        "{{ m.content or m.tool_calls[0].function.name }};{% endfor %}"
    )
    gpt2 = load_tokenizer("gpt2")
    tokenizer = FileTokenizer(gpt2._inner, "gpt2", "test", template=template)  # type: ignore[attr-defined]
    messages = [
        {"role": "user", "content": "1+?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "it is 3"},
    ]
    one = encode_row({"messages": messages, "tools": [CALL]}, tokenizer, "0")
    two = encode_row({"messages": messages, "tools": json.dumps([CALL])}, tokenizer, "0")
    none = encode_row({"messages": messages, "tools": ""}, tokenizer, "0")

    assert one.input_ids.tolist() == two.input_ids.tolist()
    assert tokenizer.decode(none.input_ids).startswith("none:")
    assert split(one, tokenizer)[1] == "aadd;ait is 3;"


ROWS = [
    {"id": "a", "prompt": "2+2=", "completion": " 4", "url": "http://x"},
    {"prompt": "2+2=", "completion": " 4", "explanation": "because"},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def test_rows_show_says_that_there_is_no_such_row(folder: Path, call: Callable[..., Any]) -> None:
    said = call("data rows show rows.jsonl --first 999", folder)
    assert said.code == 1
    assert "--first 999 is past the last of " in said.err


def test_rows_show_prints_what_is_read_and_learned_and_which_columns_are_used(
    folder: Path, call: Callable[..., Any]
) -> None:
    said = call("data rows show rows.jsonl -n 3", folder)
    assert said.code == 0
    assert said.out.splitlines()[:3] == [
        "rows.jsonl:1: prompt + completion, 7 tokens, 3 with loss; not used: url",
        "  read    '2+2='",
        "  learned ' 4<eos>'",
    ]
    assert "rows.jsonl:2: cannot be trained: has explanation" in said.out
    assert said.out.endswith("; tokenizer bytes, loss on all-turns\n")
    shown = call("data rows show rows.jsonl -t bytes --format json", folder).data["shown"]
    assert shown[0]["pieces"][1] == {"learned": True, "text": " 4<eos>"}
    assert set(shown[1]) == {"row", "error"}
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    forms = {"chat": {"messages": turns}, "Alpaca": {"instruction": "i", "output": "o"}}
    for name, row in forms.items():
        (folder / "one.jsonl").write_text(json.dumps(row))
        assert f" in the {name} template, " in call("data rows show one.jsonl", folder).out


def test_a_column_can_be_left_out_of_lengths_plans_and_batches_alike(
    folder: Path, call: Callable[..., Any]
) -> None:
    data = "-d rows.jsonl -t bytes"
    refused = call(f"data lengths build {data} -o l.jsonl", folder)
    assert (refused.code, refused.err.count("\n")) == (1, 1)
    assert "rows.jsonl:2: has explanation" in refused.err

    flag = "--ignore-column explanation"
    assert call(f"data lengths build {data} {flag} -o l.jsonl --quiet", folder).code == 0
    assert call("data batchplan build -l l.jsonl -o plan", folder).code == 0
    done = call(f"data batch generate -p plan {data} {flag} -o out --quiet", folder)
    assert done.code == 0, done.err
    other = call(f"data batch generate -p plan {data} -o out2", folder)
    assert "built for data" in other.err


def test_lengths_of_another_loss_are_another_cache(folder: Path, call: Callable[..., Any]) -> None:
    line = "data lengths build -d rows.jsonl -t bytes --ignore-column explanation --format json"
    hashes = {
        loss: call(f"{line} --loss-on {loss} -o {loss}.jsonl", folder).data["tokenizer_hash"]
        for loss in ("all-turns", "last-turn", "everything")
    }
    assert len(set(hashes.values())) == 3
    # And by several processes, which load the tokenizer anew.
    again = call(f"{line} --loss-on everything -o w.jsonl --workers 2", folder).data
    assert again["tokenizer_hash"] == hashes["everything"]


@pytest.mark.training
@pytest.mark.parametrize("flags", ["", "--online --online-source mock --online-min-samples 4"])
def test_training_takes_the_columns_and_the_loss_that_it_is_told(
    folder: Path, call: Callable[..., Any], flags: str
) -> None:
    line = f"train sft --model tiny --data rows.jsonl --max-steps 1 --quiet {flags}"
    refused = call(f"{line} --run-dir no", folder)
    assert "rows.jsonl:2: has explanation" in refused.err
    more = "--ignore-column explanation --loss-on everything"
    done = call(f"{line} {more} --run-dir run", folder)
    assert done.code == 0, done.err
    if not flags:
        store = TokenStore(folder / "run" / "tokens")
        assert all(store(i).loss_mask.all() for i in range(2))


ESSAY = (
    "It is a truth that a text of many words beside a row is there to be trained on, or not. " * 2
)


@pytest.mark.parametrize(
    "beside",
    [
        {"prompt": "Where do otters sleep?", "completion": "On water."},
        {
            "messages": [
                {"role": "user", "content": "Hello"},
                {"role": "assistant", "content": "Hi"},
            ]
        },
        {"text": "Otters sleep on water."},
        {"instruction": "Name a colour", "output": "blue"},
    ],
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((n, "short") for n in ("history", "reasoning_content", "cot", "query", "Response")),
        ("turns", [{"role": "user", "content": "before"}]),
        *((n, ESSAY) for n in ("whatever", "note", "x1")),
        ("nested", {"deep": [{"er": ESSAY}]}),
    ],
)
def test_any_column_that_looks_like_training_text_is_used_or_named(
    beside: dict[str, Any], name: str, value: Any
) -> None:
    row = {**beside, name: value}
    with pytest.raises(BadRow, match=f"has {name}, which is not used beside"):
        encode_row(row, BYTES, "0")


def test_columns_about_a_row_are_no_training_text() -> None:
    about = {
        "source": "https://example.org/a/b",
        "title": "A page about the habits of otters",
        "license": "Creative Commons Attribution Share Alike 4.0 International",
        "score": 0.7,
        "tags": ["animals", "water"],
        "meta": {"lang": "en", "year": 2024},
        "approved": True,
    }
    assert len(encode_row({"text": "otters", **about}, BYTES, "0")) == 7


@pytest.mark.parametrize("weight", ["0", 0.5, 2])
def test_a_weight_that_is_neither_0_nor_1_is_refused(weight: Any) -> None:
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "weight": weight},
    ]
    with pytest.raises(BadRow, match=r"its message 1 has a weight of .*, not 0 or 1"):
        encode_row({"messages": messages}, BYTES, "0")


def test_what_a_message_says_beside_its_content_is_shown_or_named() -> None:
    for name in ("thought", "cot", "note"):
        value = ESSAY if name == "note" else "short"
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        messages[1][name] = value
        with pytest.raises(BadRow, match=f"message 1 has {name}, which the chat template does not"):
            encode_row({"messages": messages}, BYTES, "0")


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": "u", "train": True}, "has train True and the role 'user'"),
        ({"role": "assistant", "content": "a", "train": "yes"}, "has a train of 'yes'"),
        (
            {"role": "assistant", "content": "a", "train_detail": [{"begin_offset": 0}]},
            "has a train_detail, and turns are trained whole",
        ),
    ],
)
def test_what_a_message_says_of_its_training_is_followed_or_refused(
    message: dict[str, Any], words: str
) -> None:
    answer = {"role": "assistant", "content": "a"}
    with pytest.raises(BadRow, match=words):
        encode_row({"messages": [message, answer]}, BYTES, "0")


def test_a_key_of_every_message_can_be_left_out(folder: Path, call: Callable[..., Any]) -> None:
    messages = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "why", "thought": "so"},
    ]
    (folder / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    line = "data rows show chat.jsonl -t bytes"
    assert "leaves out the reasoning_content of its message 1" in call(line, folder).out
    line += " --ignore-column messages.reasoning_content"
    assert "message 1 has thought, which the chat template" in call(line, folder).out
    line += " --ignore-column messages.thought"
    assert "  learned 'a\\n'" in call(line, folder).out.splitlines()


@pytest.mark.parametrize("verdict", [False, 0, "false", "False", "0"])
@pytest.mark.parametrize("name", ["label", "kto_tag"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        {"instruction": "a", "output": "b"},
        {"prompt": "a", "completion": "b"},
    ],
    ids=lambda row: next(iter(row)),
)
def test_an_answer_that_its_row_calls_bad_is_not_learned(
    row: dict[str, Any], name: str, verdict: Any
) -> None:
    with pytest.raises(BadRow, match=f"its {name} is .* not to learn; .*--ignore-column {name}"):
        encode_row(row | {name: verdict}, load_tokenizer("bytes"), "0")
    assert len(encode_row(row | {name: True}, load_tokenizer("bytes"), "0"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("assistant_mask", [0, 1, 1]), ("prompt_mask", [1, 0, 0])),
        *(("loss_weights", [0.0, 0.5, 1.0]), ("seq_lengths", [1, 2]), ("cu_seqlens", [0, 1, 3])),
        ("position_ids", [0, 0, 1]),
    ],
)
def test_numbers_beside_tokens_that_nobody_reads_are_named(name: str, value: list[Any]) -> None:
    row = {"input_ids": [72, 73, 74], name: value}
    with pytest.raises(BadRow, match=f"has {name}, .*--ignore-column {name}"):
        encode_row(row, load_tokenizer("bytes"), "0")
    harmless = {"position_ids": [0, 1, 2], "token_type_ids": [0, 0, 0], "scores": [0.5]}
    assert len(encode_row({"input_ids": [72, 73, 74]} | harmless, load_tokenizer("bytes"), "0"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("choices", ["x", "y"]), ("options", {"A": "x", "B": "y"}), ("images", ["a.png"])),
        *(("videos", ["a.mp4"]), ("functions", [{"name": "f"}])),
    ],
)
def test_what_belongs_to_a_question_and_is_not_read_is_named(name: str, value: Any) -> None:
    row = {"question": "Which?", "answer": "A", name: value}
    with pytest.raises(BadRow, match=f"has {name}, which is not used .*--ignore-column {name}"):
        encode_row(row, load_tokenizer("bytes"), "0")


ASKED = {"role": "user", "content": "a"}
ANSWERED = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, {"role": "model", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "bot", "value": "b"}]},
        {"prompt": [ASKED], "completion": "b"},
        {"prompt": "a", "completion": [ANSWERED]},
        {
            "conversations": [{"from": "human", "value": "a"}],
            "chosen": {"from": "gpt", "value": "b"},
            "rejected": {"from": "gpt", "value": "c"},
        },
    ],
    ids=["model", "bot", "text after messages", "messages after text", "chosen"],
)
def test_other_spellings_of_one_question_and_answer(row: dict[str, Any]) -> None:
    plain = encode_row({"messages": [ASKED, ANSWERED]}, load_tokenizer("bytes"), "0")
    sample = encode_row(row, load_tokenizer("bytes"), "0")

    assert sample.input_ids.tolist() == plain.input_ids.tolist()
    assert sample.loss_mask.tolist() == plain.loss_mask.tolist()


def test_a_system_column_in_parts_is_its_text() -> None:
    row = {"messages": [ASKED, ANSWERED]}
    parts = encode_row(
        row | {"system": [{"type": "text", "text": "Be kind"}]}, load_tokenizer("bytes"), "0"
    )
    text = encode_row(row | {"system": "Be kind"}, load_tokenizer("bytes"), "0")
    assert parts.input_ids.tolist() == text.input_ids.tolist()


def test_roles_and_older_calls_are_named_in_their_errors() -> None:
    with pytest.raises(BadRow, match="no assistant message to train on; its roles are 'user', 'x'"):
        encode_row(
            {"messages": [ASKED, {"role": "x", "content": "b"}]}, load_tokenizer("bytes"), "0"
        )
    older = {"role": "assistant", "content": None, "function_call": {"name": "f"}}
    with pytest.raises(BadRow, match="its message 1 has a function_call"):
        encode_row({"messages": [ASKED, older]}, load_tokenizer("bytes"), "0")


LOSS_NAMES = [
    *("loss_mask", "mask", "masked", "is_masked", "isMasked", "weights", "lossWeight"),
    *("trainable", "is_trainable", "train_on", "no_train", "include_in_loss", "compute_loss"),
    *("label", "labels", "learn", "supervised", "ignore", "exclude_from_loss", "skip_training"),
]


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_a_turn_that_speaks_of_the_loss_in_other_words_is_named(name: str) -> None:
    def row(column: str, answer: dict[str, Any]) -> dict[str, Any]:
        if column == "completion":
            return {"prompt": [ASKED], "completion": [answer]}
        return {column: [ASKED, answer]}

    for column in ("messages", "conversations", "completion"):
        for value in (0, 1, 0.0, 0.5, True, False, "false", "0", [0, 1]):
            with pytest.raises(BadRow, match=f"has {name} .*--ignore-column {column}.{name}$"):
                encode_row(row(column, ANSWERED | {name: value}), BYTES, "0")
        # Parquet gives every message every key.
        assert encoded(row(column, ANSWERED | {name: None}))[1].startswith("b")


def test_a_flag_inside_an_object_of_a_turn_is_named() -> None:
    answer = ANSWERED | {"extra": {"masked": True}}
    with pytest.raises(BadRow, match=r"has extra.masked true, .*--ignore-column messages.extra$"):
        encode_row({"messages": [ASKED, answer]}, BYTES, "0")
    call = ANSWERED | {"tool_calls": [{"function": {"name": "add", "arguments": {"weight": 0}}}]}
    with pytest.raises(BadRow, match="leaves out or rewrites the tool calls"):
        encode_row({"messages": [ASKED, call]}, BYTES, "0")


def test_loss_weights_of_turns_are_followed() -> None:
    turns = [ASKED | {"loss_weight": 0.0}, ANSWERED | {"loss_weight": 0.0}]
    turns += [ASKED | {"loss_weight": 0}, {"role": "assistant", "content": "c", "loss_weight": 1.0}]
    assert encoded({"messages": turns})[1] == "c\n"
    for wrong in ([ASKED | {"loss_weight": 1.0}], [ANSWERED | {"loss_weight": 0.5}]):
        with pytest.raises(BadRow, match="loss_weight"):
            encode_row({"messages": [*wrong, ANSWERED]}, BYTES, "0")


def test_numbers_of_a_turn_that_say_nothing_of_the_loss_are_left_alone() -> None:
    about = {
        **dict.fromkeys(("timestamp", "id", "turn", "score", "rating", "step", "accepted"), 0),
        **dict.fromkeys(("constraint", "num_trained_tokens", "label_id", "glossary"), 1),
        **dict.fromkeys(("learning_rate", "mask_id", "weight_kg"), 0.5),
    }
    assert encoded({"messages": [ASKED | about, ANSWERED | about]})[1] == "b\n"


SHAPES: list[dict[str, Any]] = [
    {"messages": [ASKED, ANSWERED]},
    {"prompt": "a", "completion": "b"},
    {"instruction": "a", "output": "b"},
    {"text": "b"},
    {"input_ids": [72, 73]},
]


@pytest.mark.parametrize("row", SHAPES, ids=lambda row: next(iter(row)))
def test_a_row_that_says_it_is_not_to_be_trained_or_weighs_its_loss_is_refused(
    row: dict[str, Any],
) -> None:
    names = ("weight", "train", "training", "loss", "loss_weight", "is_trainable", "supervised")
    for name in names:
        for value in (0, 0.0, False, "false", "0", "no"):
            with pytest.raises(BadRow, match=rf"its {name} is .* not to be trained; .*{name}$"):
                encode_row(row | {name: value}, BYTES, "0")
        for value in (0.5, 2, -1, float("nan")):
            with pytest.raises(
                BadRow, match=rf"its {name} is .*not used; .*--ignore-column {name}"
            ):
                encode_row(row | {name: value}, BYTES, "0")
        for value in (1, 1.0, True, "true", None):
            assert len(encode_row(row | {name: value}, BYTES, "0"))
    for name in ("masked", "is_masked", "ignore", "excluded", "skip"):
        with pytest.raises(BadRow, match=rf"its {name} is true, .*--ignore-column {name}"):
            encode_row(row | {name: True}, BYTES, "0")
        assert len(encode_row(row | {name: False}, BYTES, "0"))
    for name in ("mask", "no_train", "include_in_loss", "unmasked"):
        for value in (0, 1):
            with pytest.raises(BadRow, match=rf"its {name} is {value}, .*--ignore-column {name}"):
                encode_row(row | {name: value}, BYTES, "0")


def test_numbers_of_a_row_that_say_nothing_of_the_loss_are_left_alone() -> None:
    about = {
        **dict.fromkeys(("score", "train_id", "constraint", "num_train_rows", "step"), 0),
        **dict.fromkeys(("weight_kg", "difficulty", "year", "approved", "learning_rate"), 0.5),
    }
    for row in SHAPES:
        assert len(encode_row(row | about, BYTES, "0"))


def test_rows_show_lists_keys_of_messages_that_change_nothing_and_fails_where_no_row_is_good(
    folder: Path, call: Callable[..., Any]
) -> None:
    answer = ANSWERED | {"timestamp": 1700000000, "weight": 1, "id": "m2"}
    (folder / "chat.jsonl").write_text(json.dumps({"messages": [ASKED, answer], "n": 1}) + "\n")
    said = call("data rows show chat.jsonl -t bytes", folder)
    assert said.code == 0
    assert said.out.splitlines()[0].endswith("; not used: n, messages.timestamp")

    (folder / "bad.jsonl").write_text('{"txet": 1}\n{"txet": 2}\n')
    said = call("data rows show bad.jsonl -t bytes", folder)
    assert (said.code, said.out.count("cannot be trained")) == (1, 2)


@pytest.mark.parametrize("depth", [198, 199, 250, 900, 960, 3000, 100_000])
def test_rows_nested_too_deeply_are_bad_rows_wherever_they_are_read(
    depth: int, tmp_path: Path, call: Callable[..., Any]
) -> None:
    for opens, closes in (("[", "]"), ('{"a":', "}")):
        inner = f'{opens * depth}"x"{closes * depth}'
        text = '{"text":"x","meta":' + inner + "}\n"
        (tmp_path / "deep.jsonl").write_text(text)
        for line in ("rows show deep.jsonl -t bytes", "lengths build -d deep.jsonl -t bytes -o l"):
            said = call(f"data {line}.jsonl" if line[0] == "l" else f"data {line}", tmp_path)
            assert said.code == (depth >= 200), said.err
            assert ("nested too deeply" in said.out + said.err) == (depth >= 200)
            assert "internal" not in said.err


def test_brackets_in_a_text_are_no_depth(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "[{" * 5000, "n": [[1]] * 500}) + "\n")
    assert len(open_source(tmp_path / "b.jsonl")[0]["text"]) == 10_000


@pytest.mark.parametrize(
    "line",
    [
        '{"text": "a", "text": "b"}',
        ' {"text": "a", "text": "a"}',
        '{"messages": [{"role": "user", "content": "q"}, {"role": "user", "content": "q", '
        '"role": "assistant"}]}',
        '{"text": "a", "te\\u0078t": "b"}',
    ],
)
def test_a_key_that_stands_twice_in_one_object_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "twice.jsonl").write_text(f'{{"text": "fine"}}\n{line}\n')
    source = open_source(tmp_path / "twice.jsonl")
    assert source[0] == {"text": "fine"}
    with pytest.raises(BadRow, match=r'twice.jsonl:2: has the key "(text|role)" more than once'):
        source[1]


def parts(key: str, words: str) -> list[dict[str, Any]]:
    return [{"type": "text", key: words[:1]}, {"type": "text", key: words[1:]}]


def test_the_text_of_a_part_is_read_by_each_of_its_names_or_named() -> None:
    plain = encoded({"messages": [ASKED, ANSWERED]})
    for key in ("text", "value", "content"):
        turns = [ASKED | {"content": parts(key, "a")}, ANSWERED | {"content": parts(key, "b")}]
        assert encoded({"messages": turns}) == plain
    for wrong in ({"txet": "b"}, {"text": None}, {"text": 3}, {"text": "b", "value": "c"}):
        turns = [ASKED, ANSWERED | {"content": [{"type": "text", **wrong}]}]
        with pytest.raises(BadRow, match=r"its message 1 has a part of text .*; saw \[.*type"):
            encode_row({"messages": turns}, BYTES, "0")


@pytest.mark.parametrize("mask", [[1, 0, 1], [0, 1, 0, 1], [1, 0, 0, 1, 0], [True, False, True]])
def test_a_hole_in_the_attention_mask_is_named(mask: list[int]) -> None:
    row = {"input_ids": [*range(70, 70 + len(mask))], "attention_mask": mask}
    with pytest.raises(BadRow, match=rf"attention_mask is 0 at token {mask.index(0, 1)} between"):
        encode_row(row, BYTES, "0")


def test_padding_on_both_sides_is_left_out() -> None:
    row = {"input_ids": [256, 72, 73, 256], "attention_mask": [0, 1, 1, 0]}
    assert encode_row(row, BYTES, "0").input_ids.tolist() == [72, 73]


@pytest.mark.parametrize("column", ["input_ids", "labels"])
@pytest.mark.parametrize("given", [[True, False], [True, 72], [72, False], [72, 73, True]])
def test_booleans_are_no_tokens(column: str, given: list[Any]) -> None:
    row = {"input_ids": [int(one) for one in given], column: given}
    with pytest.raises(BadRow, match=f"its {column} (are not a list of|have true or false among)"):
        encode_row(row, BYTES, "0")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ["a", "b"], "completion": "c"},
        {"prompt": ["a"], "completion": "c"},
        {"prompt": "a", "completion": ["b", "c"]},
        {"prompt": [ASKED], "response": ["b"]},
        {"prompt": [ASKED], "chosen": ["b", "c"], "rejected": ["d", "e"]},
        {"prompt": ["a", "b"], "chosen": [ANSWERED], "rejected": [ANSWERED]},
        {"messages": [ASKED], "chosen": ["b"]},
    ],
)
def test_texts_in_place_of_a_prompt_or_an_answer_are_named(row: dict[str, Any]) -> None:
    with pytest.raises(BadRow, match="is a list of texts, which may be turns or variants"):
        encode_row(row, BYTES, "0")


@pytest.mark.parametrize("row", [[1, 2], "text", 5, None, b"x"])
def test_what_is_no_object_is_a_bad_row(row: Any) -> None:
    with pytest.raises(BadRow, match=f"is a {type(row).__name__}, not an object"):
        encode_row(row, BYTES, "0")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_of_a_tokenizer_is_named(name: str) -> None:
    with pytest.raises(NoTokenizer, match=r"^the empty name has no tokenizer; name a"):
        load_tokenizer(name)


@pytest.mark.parametrize(
    "value",
    [
        "这是一个很长的中文段落" * 5,
        "日本語の長い文章です。" * 5,
        "คำภาษาไทยยาวมาก" * 8,
        "ភាសាខ្មែរវែង" * 10,
        "한국어 문장 하나 " * 8,
        "a\nlist\nof\nlines\n" * 6,
        ["this is a sentence of words that is long"] * 5,
        [["this is a sentence of words"] * 4],
        {"inner": ["these are several words here"] * 5},
    ],
)
@pytest.mark.parametrize("row", SHAPES[:4], ids=lambda row: next(iter(row)))
def test_many_words_are_seen_in_any_script_and_in_lists(row: dict[str, Any], value: Any) -> None:
    with pytest.raises(BadRow, match=r"has note, which is not used .*--ignore-column note"):
        encode_row(row | {"note": value}, BYTES, "0")
    turns = [ASKED, ANSWERED | {"note": value}]
    with pytest.raises(BadRow, match=r"message 1 has note, which the chat template does not show"):
        encode_row({"messages": turns}, BYTES, "0")


@pytest.mark.parametrize(
    "name",
    [
        *(
            "summary",
            "reply",
            "assistant",
            "gold",
            "generated_solution",
            "reasoning_trace",
            "think",
        ),
        *("prefix", "suffix", "examples", "background", "回答", "context_zh", "answer2", "输出"),
        *("gpt_answer", "correctAnswer", "Response", "cot-en", "Expected Output", "finalAnswer"),
    ],
)
def test_columns_with_telling_names_are_used_or_named_however_short(name: str) -> None:
    for row in SHAPES[:4]:
        with pytest.raises(BadRow, match=f"has {name}, which is not used"):
            encode_row(row | {name: "x y"}, BYTES, "0")


def test_what_describes_a_row_is_no_text_of_it() -> None:
    about = {
        "tags": ["machine learning", "otters"] * 20,
        "authors": ["Ann B. Cox", "Dee F."] * 9,
        "标题": "关于水獭生活习性的一篇文章",
        "title": "The habits of otters in winter",
        "meta": {f"key{n}": "three short words" for n in range(30)},
        "tokens": ["a"] * 99,
        "url": "https://example.org/" + "a" * 500,
        "answer_type": "number",
        "prompt_id": "ab",
        "response_model": "gpt",
        "question_id": "q1",
        "context_length": 40,
        "lang": "zh",
        "generation_options": {"top_p": 0.9},
        "input_format": "json",
        "source": "gsm8k",
    }
    for row in SHAPES:
        assert len(encode_row(row | about, BYTES, "0"))
