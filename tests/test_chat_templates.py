"""Every chat template that TRL ships: the ids and the mask of transformers, or a named difference.

TRL trains on assistant turns by exchanging a model's template for a variant with marks. Where the
variant renders the same text, the mask of the plain template is compared with the variant's.
"""

import ast
import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from batchwright.data.rows.sample import encode_row, encode_rows
from batchwright.data.rows.turns import trained_spans
from batchwright.data.tokenizers import FileTokenizer, load_tokenizer
from batchwright.data.tokenizers.chat import ChatTemplate
from batchwright.data.tokenizers.tokenizer import LossOn, with_loss_on
from batchwright.errors import BadRow

trl = pytest.importorskip("trl", reason="TRL is not installed: pip install 'batchwright[dev]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

FOLDER = Path(trl.__file__).parent / "chat_templates"
PACKAGE = Path(transformers.__file__).parent / "models"
IN_TRANSFORMERS = {
    "llama4": "llama4/processing_llama4.py",
    "qwen2_audio": "qwen2_audio/processing_qwen2_audio.py",
    "smolvlm_processor": "smolvlm/processing_smolvlm.py",
}
"""Templates that stand in the code of transformers."""
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja")) + sorted(IN_TRANSFORMERS)
PLAIN = [name for name in NAMES if not name.endswith("_training")]
TOKENS = {
    "bos_token": "<|begin|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|pad|>",
    "unk_token": "<|unk|>",
}


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [user("Why so?"), said("Because.")],
    "two turns": [user("Hello"), said("Good day"), user("What is 2+2?"), said("four, I think")],
    "system": [
        {"role": "system", "content": "Be kind"},
        *(user("Hello"), said("Good day"), user("What is 2+2?"), said("four, I think")),
    ],
    "reasoning": [
        *(user("Hello"), said("Good day", reasoning_content="they greet")),
        *(user("What is 2+2?"), said("four, I think", reasoning_content="add them")),
    ],
    "reasoning inside": [
        *(user("Hello"), said("<think>\nthey greet\n</think>\n\nGood day")),
        *(user("What is 2+2?"), said("<think>\nadd them\n</think>\n\nfour, I think")),
    ],
    "tools": [
        *(user("1 and 2?"), said("", tool_calls=[CALL])),
        *({"role": "tool", "content": "3", "name": "add"}, said("it makes three")),
    ],
    "the same words": [user("yes"), said("yes"), user("yes"), said("yes"), user("no"), said("yes")],
}

NO_TOOLS = ("cohere", "cohere2", "gemma", "gemma3", "idefics3", "smolvlm", "smolvlm_processor")
REFUSED = {
    *((name, "system") for name in ("gemma", "gemma_training")),
    *((f"{name}{kind}", "tools") for name in NO_TOOLS for kind in ("", "_training")),
    ("deepseekv3", "tools"),
}
"""What the templates themselves refuse: these know no such turns."""

PREFILLED = "the generation prompt prefills <think>, which TRL trains"
DIFFERENT = {
    "deepseek_r1_distill": "TRL trains the turn's header too",
    "deepseekv3": "TRL trains the turn's header too",
    "gptoss": "TRL trains the header, and <|end|> where a last turn has <|return|>",
    "muse_glimmer": "TRL trains the turn's header too",
    "nemotron_3_5_lightning": PREFILLED,
    "nemotron_3_nano": PREFILLED,
    "nemotron_3_super": PREFILLED,
    "nemotron_3_ultra": PREFILLED,
    "qwen2_5": "TRL trains the newline after the role",
    "qwen3_5_nothink": PREFILLED,
    "qwen3_5_think": PREFILLED,
    "qwen3_6": PREFILLED,
    "qwen3_8": PREFILLED,
}
"""Templates of which TRL trains more than the model would generate, and what."""

EMPTY_MARK = ("diffusion_gemma", "tools")
"""Its variant has an empty mark inside a token, which transformers then counts; and its plain form
shows the beginning of a tool's response as the end of the call."""


LOSES_CALLS = ("deepseek_r1_distill", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5_vl")
"""Templates that know no tool calls: a row with one is refused instead of trained without it."""

PARTS = ("idefics3", "smolvlm", "smolvlm_processor")
"""Templates that show content in parts, and leave out a plain text."""


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{"type": "text", "text": message["content"]}]}


@cache
def source(name: str) -> str:
    if name in IN_TRANSFORMERS:
        code = ast.walk(ast.parse((PACKAGE / IN_TRANSFORMERS[name]).read_text()))
        texts = (n.value for n in code if isinstance(n, ast.Constant) and isinstance(n.value, str))
        return next(text for text in texts if "{%" in text and "messages" in text)
    return (FOLDER / f"{name}.jinja").read_text()


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(source(name), TOKENS)


def rendered(name: str, chat: list[dict[str, Any]], **options: Any) -> Any:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, marks = render_jinja_template([chat], chat_template=source(name), **options, **TOKENS)
    return texts[0], marks[0] if marks else []


def covered(spans: list[tuple[int, int]]) -> set[int]:
    return {at for start, end in spans for at in range(start, end)}


def cases(names: list[str]) -> Any:
    pairs = [(name, chat) for name in names for chat in CHATS if "llava" not in name]
    return pytest.mark.parametrize(("name", "chat"), pairs)


@cases(NAMES)
def test_a_chat_renders_as_in_transformers_or_is_refused_as_there(name: str, chat: str) -> None:
    messages = CHATS[chat]
    ours = template(name)
    try:
        text, marks = rendered(name, messages, return_assistant_tokens_mask=ours.marked)
    except Exception:
        with pytest.raises(BadRow, match="the chat template refuses its messages"):
            ours.render_spans(messages)
        assert (name, chat) in REFUSED
        return
    assert ours.render_spans(messages) == (text, marks)


@cases(PLAIN)
def test_every_turn_is_found_in_a_template_without_marks(name: str, chat: str) -> None:
    messages = CHATS[chat]
    given = [in_parts(message) for message in messages] if name in PARTS else messages
    try:
        text, _ = template(name).render_spans(given)
    except BadRow:
        return
    found, spans = trained_spans(template(name), given, None)
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    learned = [text[start:end] for start, end in spans]

    assert found == text
    assert len(learned) == len(answers)
    for answer, turn in zip(answers, learned, strict=True):
        assert answer.rpartition("</think>")[2].strip() in turn
    if chat != "the same words":
        for message in messages:
            if message["role"] not in ("assistant", "tool"):
                assert not any(message["content"] in turn for turn in learned)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@cases([name for name in PLAIN if f"{name}_training" in NAMES])
def test_the_mask_is_that_of_the_variant_that_trl_trains_with(name: str, chat: str) -> None:
    messages = CHATS[chat]
    if (name, chat) == EMPTY_MARK:
        return
    try:
        text, spans = trained_spans(template(name), messages, None)
        other, marks = trained_spans(template(f"{name}_training"), messages, None)
    except BadRow:
        return
    if text != other:
        # TRL's variants of these keep reasoning in earlier turns, or end turns differently.
        return
    ours, theirs = covered(spans), covered(marks)
    if name in DIFFERENT:
        assert ours <= theirs
    else:
        assert ours == theirs


@cache
def tokenizers() -> tuple[Any, Any]:
    """GPT-2's vocabulary with the special tokens of these tests, ours and transformers'."""
    inner = load_tokenizer("gpt2")._inner  # type: ignore[attr-defined]
    inner.add_special_tokens(list(TOKENS.values()))
    return inner, transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **TOKENS)


@cache
def tokenizer(name: str) -> FileTokenizer:
    return FileTokenizer(tokenizers()[0], "gpt2", "test", tokens=TOKENS, template=source(name))


@cases([name for name in NAMES if name.endswith("_training")])
def test_ids_and_mask_are_those_of_apply_chat_template(name: str, chat: str) -> None:
    ours, theirs = tokenizer(name), tokenizers()[1]
    messages = CHATS[chat]
    if (name, chat) in REFUSED or (name.removesuffix("_training"), chat) == EMPTY_MARK:
        return
    if chat == "tools" and name.removesuffix("_training") in LOSES_CALLS:
        with pytest.raises(BadRow, match="leaves out or rewrites the tool calls of its message 1"):
            encode_row({"messages": messages}, ours, "0")
        return
    given = [in_parts(m) for m in messages] if name.removesuffix("_training") in PARTS else messages
    expected = theirs.apply_chat_template(
        given, chat_template=source(name), return_dict=True, return_assistant_tokens_mask=True
    )
    sample = encode_rows([("0", {"messages": messages})], ours)[0][1]
    if isinstance(sample, BadRow):
        # Of a template that leaves out the reasoning of a turn that it marks.
        assert "which is trained; " in str(sample)
        text = rendered(name, given, return_assistant_tokens_mask=True)[0]
        assert "they greet" not in text or "add them" not in text
        return

    assert sample.input_ids.tolist() == list(expected["input_ids"])
    assert sample.loss_mask.tolist() == list(expected["assistant_masks"])


@pytest.mark.parametrize("name", [*PARTS, "llava_next", "gptoss", "phi3", "qwen3", "llama3"])
def test_a_row_never_loses_its_answers_to_the_template(name: str) -> None:
    ours = tokenizer(name)
    sample = encode_row({"messages": CHATS["two turns"]}, ours, "0")
    learned = ours.decode(sample.input_ids[sample.loss_mask == 1])

    assert "Good day" in learned
    assert "four, I think" in learned
    assert "What is 2+2?" not in learned


def test_a_template_that_drops_an_answer_is_refused() -> None:
    inner, _ = tokenizers()
    forgetful = "{% for m in messages %}{{ m.role }}{% endfor %}"
    ours = FileTokenizer(inner, "gpt2", "test", tokens=TOKENS, template=forgetful)
    with pytest.raises(BadRow, match="leaves out or rewrites the content of its message 1"):
        encode_row({"messages": CHATS["two turns"]}, ours, "0")


def learned(name: str, row: dict[str, Any]) -> str:
    ours = tokenizer(name)
    sample = encode_row(row, ours, "0")
    return ours.decode(sample.input_ids[sample.loss_mask == 1])


QUOTED = json.dumps({"city": "Paris", "days": 3})
ASKED: dict[str, Any] = {"role": "user", "content": "How is the weather?"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": QUOTED}}
AS_OPENAI_WRITES_IT: list[dict[str, Any]] = [
    ASKED,
    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
    {"role": "tool", "tool_call_id": "c1", "content": "rainy"},
    {"role": "assistant", "content": "It rains."},
]
AS_ANTHROPIC_WRITES_IT: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "How is the weather?"}]},
    {
        "role": "assistant",
        "content": [
            {
                "type": "tool_use",
                "id": "c1",
                "name": "weather",
                "input": {"city": "Paris", "days": 3},
            }
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "rainy"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "It rains."}]},
]


@pytest.mark.parametrize("name", NAMES)
def test_a_tool_call_is_learned_as_it_is_or_its_row_is_refused(name: str) -> None:
    texts = set()
    for messages in (AS_OPENAI_WRITES_IT, AS_ANTHROPIC_WRITES_IT):
        try:
            text = learned(name, {"messages": messages})
        except BadRow:
            text = ""
        else:
            assert "weather" in text
            assert "Paris" in text
            assert "It rains." in text
            assert "rainy" not in text
            # Neither null nor Python, nor JSON inside JSON.
            for wrong in ("None", "null", "'city'", '\\"city', '{{"city'):
                assert wrong not in text
        texts.add(text)
    assert len(texts) == 1


XLAM = {
    "id": 1,
    "query": "How is the weather in Paris?",
    "tools": json.dumps([{"name": "weather", "description": "Tells it.", "parameters": {}}]),
    "answers": json.dumps([{"name": "weather", "arguments": {"city": "Paris"}}]),
}


@pytest.mark.parametrize("name", NAMES)
def test_calls_whose_words_stand_in_the_question_are_learned_or_refused(name: str) -> None:
    outcome = encode_rows([("0", XLAM)], tokenizer(name))[0][1]
    if isinstance(outcome, BadRow):
        assert "tool" in str(outcome) or "the chat template refuses" in str(outcome), outcome
        return
    text = tokenizer(name).decode(outcome.input_ids[outcome.loss_mask == 1])
    assert "weather" in text
    assert "Paris" in text


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1", "llama4", "gptoss"])
def test_templates_that_know_tool_calls_take_rows_of_xlam(name: str) -> None:
    assert "Paris" in learned(name, XLAM)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1", "deepseekv3", "gptoss"])
def test_templates_that_know_tool_calls_take_openais_rows(name: str) -> None:
    assert "Paris" in learned(name, {"messages": AS_OPENAI_WRITES_IT})


@pytest.mark.parametrize("name", NAMES)
def test_text_in_parts_is_the_text(name: str) -> None:
    plain = CHATS["two turns"]
    try:
        expected = learned(name, {"messages": plain})
    except BadRow:
        return
    parts = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in plain]

    assert learned(name, {"messages": parts}) == expected


def test_parts_that_are_no_text_are_refused() -> None:
    image = {"role": "user", "content": [{"type": "image", "image": "x"}]}
    with pytest.raises(BadRow, match="its message 0 has a part of type 'image'; only text"):
        learned("qwen2_5_vl", {"messages": [image, {"role": "assistant", "content": "yo"}]})


TRACE = [
    *(user("Hello"), said("Good day", reasoning_content="they greet")),
    *(user("What is 2+2?"), said("four, I think", reasoning_content="add them")),
]
INSIDE = [
    *(user("Hello"), said("<think>\nthey greet\n</think>\n\nGood day")),
    *(user("What is 2+2?"), said("<think>\nadd them\n</think>\n\nfour, I think")),
]


def rendered_or_nothing(name: str, chat: list[dict[str, Any]]) -> str:
    try:
        return template(name).render(chat, add_generation_prompt=False)
    except BadRow:
        return ""


@pytest.mark.parametrize("loss_on", ["all-turns", "last-turn", "everything"])
@pytest.mark.parametrize("rows", [TRACE, INSIDE], ids=["apart", "inside"])
@pytest.mark.parametrize("name", NAMES)
def test_no_reasoning_of_a_trained_turn_is_lost(
    name: str, rows: list[dict[str, Any]], loss_on: LossOn
) -> None:
    ours = with_loss_on(tokenizer(name), loss_on)
    outcome = encode_rows([("0", {"messages": rows})], ours)[0][1]
    if isinstance(outcome, BadRow):
        texts = [rendered_or_nothing(name, chat) for chat in (rows, [*map(in_parts, rows)])]
        wanted = ("add them",) if loss_on == "last-turn" else ("add them", "they greet")
        assert not any(all(words in text for words in wanted) for text in texts), outcome
        return
    sample = outcome
    read = ours.decode(sample.input_ids[sample.loss_mask == 1])
    assert "add them" in read
    assert "four, I think" in read
    if loss_on != "last-turn":
        assert "they greet" in read


def test_the_sentence_about_lost_reasoning_names_ways_out() -> None:
    sentence = (
        r"leaves out the thinking of its message 1, which is trained; choose --loss-on last-turn, "
        r"which trains as the model is asked, or train without it with --ignore-column "
        r"messages\.thinking, or use a template that shows it"
    )
    rows = [*(user("Hello"), said("Good day", thinking="they greet")), *CHATS["two turns"][2:]]
    with pytest.raises(BadRow, match=sentence):
        learned("qwen3", {"messages": rows})
    # Of a turn that is not trained, it may be left out, as it is when the model is asked.
    rows[1]["train"] = False
    assert "four" in learned("qwen3", {"messages": rows})


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"train": False}, {"training": 0}, {"loss": False}]
)
@pytest.mark.parametrize("name", NAMES)
def test_a_turn_that_is_not_to_be_trained_is_only_read(name: str, flag: dict[str, Any]) -> None:
    plain = CHATS["two turns"]
    try:
        both = learned(name, {"messages": plain})
    except BadRow:
        return
    text = learned(name, {"messages": [plain[0], plain[1] | flag, *plain[2:]]})
    assert "Good day" not in text
    assert "four, I think" in text
    assert text in both


def with_template(text: str) -> FileTokenizer:
    return FileTokenizer(tokenizers()[0], "gpt2", "test", tokens=TOKENS, template=text)


ENDING = "<|endoftext|>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
RESULT_INSIDE = (
    "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}{% elif m.role == 'tool' %}"
    "{% else %}<a>{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% if m.tool_calls and not loop.last %}<r>{{ messages[loop.index].content }}</r>{% endif %}"
    "{{ m.content or '' }}" + ENDING
)
CALL_APART = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<u>{{ m.content }}{% else %}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}<a>"
    "{% if loop.last %}<last>{% endif %}{{ m.content or '' }}" + ENDING
)
INSTRUCTION_AFTER = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "<system>Write your answer with the sources that you have read."
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALWAYS_ASKS = (
    "{% for m in messages %}<turn><{{ m.role }}>{{ m.content }}<end>{% endfor %}<turn><assistant>"
)
ONLY_PARTS = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}"
    "<|endoftext|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
LAST_THOUGHT_LOST = (
    "{% for m in messages %}{{ m.role }}: {% if m.content is string %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|endoftext|>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
CALLS = [
    *(user("1 and 2?"), said("I add.", tool_calls=[CALL])),
    *({"role": "tool", "content": "3", "name": "add"}, said("three")),
]


@pytest.mark.parametrize(
    ("text", "messages", "wrong"),
    [
        (RESULT_INSIDE, CALLS, r"shows the content of its message 2 \(tool\) inside a turn"),
        (CALL_APART, CALLS, "tool calls of its message 1 cannot be located in the turn"),
        (INSTRUCTION_AFTER, CHATS["two turns"], "ends its message 3 with instructions of its own"),
        (LAST_THOUGHT_LOST, CHATS["reasoning inside"], "leaves out the text between <think>"),
        (ALWAYS_ASKS, CHATS["two turns"], "ends a conversation with the header of another turn"),
    ],
    ids=["result inside", "call apart", "instruction after", "parts as Python", "always asks"],
)
def test_a_loss_that_would_cover_too_much_or_too_little_is_refused(
    text: str, messages: list[dict[str, Any]], wrong: str
) -> None:
    with pytest.raises(BadRow, match=wrong):
        encode_row({"messages": messages}, with_template(text), "0")


def test_short_texts_are_not_taken_for_letters_of_the_template() -> None:
    ours = with_template(ONLY_PARTS.replace("part.text", "part['text']"))
    sample = encode_row({"messages": [user("a"), said("a"), user("s"), said("s")]}, ours, "0")
    learned = ours.decode(sample.input_ids[sample.loss_mask == 1])

    assert learned.replace("<|endoftext|>", "").split() == ["a", "s"]


@pytest.mark.parametrize(
    "end", ["<|endoftext|>", "{{ '' if loop.last else '<|endoftext|>' }}"], ids=["each", "earlier"]
)
def test_the_header_of_a_second_answer_in_a_row_is_not_learned(end: str) -> None:
    ours = with_template(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + end + "{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role == 'user' %}<assistant>{% endif %}"
    )
    row = {"messages": [user("Why?"), said("Because."), said("That is why.")]}
    sample = encode_row(row, ours, "0")
    learned = ours.decode(sample.input_ids[sample.loss_mask == 1])

    assert "<assistant>" not in learned
    assert "Because." in learned
    assert "That is why." in learned


def test_a_header_that_is_asked_for_in_another_way_is_not_learned() -> None:
    ours = with_template(
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}"
        "<think></think>{% endif %}{{ m.content }}<|endoftext|>{% endfor %}"
        "{% if add_generation_prompt %}<assistant></think>{% endif %}"
    )
    row = {"messages": [user("Why?"), said("Because."), user("So?"), said("So.")]}
    sample = encode_row(row, ours, "0")
    learned = ours.decode(sample.input_ids[sample.loss_mask == 1])

    assert "<assistant>" not in learned
    assert "Because." in learned
    assert "So." in learned
    assert "Why" not in learned


def test_variables_of_a_row_reach_its_template() -> None:
    ours = with_template(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
        "{% if not add_generation_prompt and mood %}{{ mood }}{% endif %}"
    )
    row = {"messages": [user("Why?"), said("Because.")]}
    for given in ({"mood": "!calm!"}, '{"mood": "!calm!"}'):
        sample = encode_row(row | {"chat_template_kwargs": given}, ours, "0")
        assert ours.decode(sample.input_ids).endswith("Because.!calm!")
    assert "calm" not in ours.decode(encode_row(row, ours, "0").input_ids)
    for wrong in ({"messages": []}, ["a"]):
        with pytest.raises(BadRow, match="--ignore-column chat_template_kwargs"):
            encode_row(row | {"chat_template_kwargs": wrong}, ours, "0")


def test_tools_that_the_template_does_not_show_are_named() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "Adds.", "x": {}}}]
    row = {"messages": [user("of f"), said("fine")], "tools": tools}
    with pytest.raises(BadRow, match=r"has tools, which the chat template does not show; .*tools"):
        encode_row(row, tokenizer("gemma"), "0")
    assert "fine" in learned("qwen3", row)


@pytest.mark.parametrize(
    "asks", ["{% for t in tools %}{{ t }}{% endfor %}", "{{ tools | length }}", "{{ tools[0].x }}"]
)
def test_a_template_that_needs_tools_says_so(asks: str) -> None:
    ours = with_template(asks + ONLY_PARTS)
    row = {"messages": [user("Why?"), said("Because.")]}
    with pytest.raises(
        BadRow, match=r"the chat template refuses (rows without tools|its messages)"
    ):
        encode_row(row, ours, "0")
    if "[0]" not in asks:
        with pytest.raises(BadRow, match=r"refuses rows without tools: .*; give the rows tools"):
            encode_row(row, ours, "0")


def turned(begin: str, end: str, of_user: str, first: str = "", last: str = "") -> str:
    """A template with these ends of turns; `last` ends a conversation in place of `end`."""
    said = {"b": begin, "e": end, "u": of_user, "f": first, "l": last}
    b, e, u, f, la = ("{{ " + json.dumps(text) + " }}" for text in said.values())
    return (
        f + "{% for m in messages %}<|{{ m.role }}|>" + b + "{{ m.content }}{% if loop.last %}"
        "" + la + "{% elif m.role == 'assistant' %}" + e + "{% else %}" + u + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}" + u + "<|assistant|>" + b + "{% endif %}"
    )


def trained(source: str, messages: list[dict[str, Any]], loss_on: LossOn) -> list[str]:
    text, spans = trained_spans(ChatTemplate(source, TOKENS), messages, None, 0, loss_on)
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize("begin", ["", "\n", " "])
@pytest.mark.parametrize("first", ["", "<|begin|>", "Be kind.\n"])
@pytest.mark.parametrize("end", ["<|end|>", "\n<|end|>\n", "[END]", "<|endoftext|>"])
@pytest.mark.parametrize("shared", [True, False], ids=["of all", "of answers"])
def test_an_end_after_every_turn_but_the_last_is_learned_and_no_header_is(
    shared: bool, end: str, first: str, begin: str
) -> None:
    source = turned(begin, end, end if shared else "", first)
    turns = [user("Why?"), said("Because."), user("So?"), said("So."), user("Then?")]
    for asked in (turns, [{"role": "system", "content": "Be kind"}, *turns]):
        more = [*asked, said("Yes.")]
        # A line break behind the end may be the first of the header that follows.
        ended = [f"Because.{end}".rstrip(), f"So.{end}".rstrip()]
        for messages, expected in ((more, [*ended, "Yes."]), (asked, ended)):
            read = [part.rstrip() for part in trained(source, messages, "all-turns")]
            assert read == expected
            read = [part.rstrip() for part in trained(source, messages, "last-turn")]
            assert read == expected[-1:]


def test_the_header_that_follows_a_turn_without_end_is_not_learned() -> None:
    for first in ("", "<|begin|>"):
        read = trained(turned("\n", "", "", first), CHATS["two turns"], "all-turns")
        assert read == ["Good day", "four, I think"]


@pytest.mark.parametrize(
    ("end", "last", "words"),
    [
        ("<|end|>", "<|end|>", ""),
        ("<|end|>", "<|return|>", ""),
        ("<|end|>", "", "the end of a turn only where another message follows"),
        ("", "", "the end of a turn nowhere"),
    ],
)
def test_a_template_whose_last_turn_has_no_end_is_named_before_training(
    end: str, last: str, words: str, tmp_path: Path, call: Any
) -> None:
    tokenizers()[0].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(TOKENS))
    (tmp_path / "chat_template.jinja").write_text(turned("\n", end, "", last=last))
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHATS["two turns"]}) + "\n")
    (tmp_path / "text.jsonl").write_text('{"text": "no conversation"}\n')
    for command in (
        "data rows show {} -t .",
        "data lengths build -d {} -t . -o lengths.jsonl",
        "data lengths build -d {} -t . -o lengths.jsonl --dry-run",
    ):
        shown = call(command.format("chat.jsonl"), tmp_path).out
        assert shown.count("note: ") == bool(words)
        assert words in shown
        assert "note: " not in call(command.format("text.jsonl"), tmp_path).out


DOCS = (Path(__file__).parent.parent / "docs" / "data.md").read_text()


@pytest.mark.parametrize("name", [name for name in PLAIN if f"{name}_training" in NAMES])
def test_every_difference_from_the_variant_that_trl_trains_with_is_documented(name: str) -> None:
    table = [line for line in DOCS.splitlines() if line.startswith("| `")]
    of_masks = "\n".join(line for line in table if "TRL" in line)
    of_texts = DOCS[DOCS.index("The variants of ") :].split("\n\n")[0]
    found = set()
    for messages in CHATS.values():
        row = {"messages": messages, "tools": [CALL] if "tool_calls" in str(messages) else None}
        one, other = (
            encode_rows([("0", row)], tokenizer(name + kind))[0][1] for kind in ("", "_training")
        )
        if isinstance(one, BadRow) or isinstance(other, BadRow):
            continue
        if one.input_ids.tolist() != other.input_ids.tolist():
            found.add("text")
        elif one.loss_mask.tolist() != other.loss_mask.tolist():
            found.add("mask")
    assert ("mask" in found) <= (f"`{name}`" in of_masks), found
    assert ("text" in found) <= (f"`{name}`" in of_texts), found


@pytest.mark.training
def test_a_dry_run_of_training_names_a_template_without_ends(tmp_path: Path, call: Any) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: at for at, c in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    (tmp_path / "own").mkdir()
    inner.save(str(tmp_path / "own" / "tokenizer.json"))
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": CHATS["two turns"]}) + "\n")
    for last, notes in (("", 1), ("<|end|>", 0)):
        template = turned("\n", "<|end|>", "", last=last)
        (tmp_path / "own" / "chat_template.jinja").write_text(template)
        line = "train sft --model tiny --data chat.jsonl --tokenizer own --dry-run"
        done = call(line, tmp_path)
        assert (done.code, done.out.count("note: the loss covers")) == (0, notes), done.err
