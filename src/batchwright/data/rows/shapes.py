"""The known shapes of rows, and which one a row has.

A shape reads the columns it knows. A column whose name says that it holds training text and that
nobody read is an error that names it: training on half of a row is worse than not training.
"""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchwright.data.rows import Row
from batchwright.data.rows.flags import refuse_row_flags, refuse_turn_flags
from batchwright.data.rows.texts import is_text, strings
from batchwright.data.rows.turns import TURN_FLAGS, trained_spans, trained_turns
from batchwright.data.rows.verify import verify
from batchwright.data.tokenizers.chat import REASONING, ChatTemplate
from batchwright.data.tokenizers.tokenizer import LossOn, Tokenizer
from batchwright.errors import BadRow
from batchwright.files import parse_json

__all__ = [
    "IGNORE",
    "KNOWN_OF_MESSAGES",
    "Chat",
    "Pair",
    "Ready",
    "Shape",
    "Text",
    "checked_unicode",
    "read_shape",
    "shape_or_reason",
]

IGNORE = -100
"""The label of a token that carries no loss, `ignore_index` of torch and transformers."""

CHATS = ("messages", "conversations", "conversation", "items")
"""What data sets call a list of messages."""

QUESTIONS = {
    "question": ("answer",),
    "query": ("response",),
    "problem": ("solution",),
    "inputs": ("targets",),
}
"""What data sets call a question, and where its answer stands first of all."""

KNOWN = (
    *("input_ids", *CHATS, "chosen", "prompt", "instruction", *QUESTIONS),
    *("input", "text", "content"),
)
"""Columns that decide the shape of a row, in the order in which they are looked for."""

RESPONSES = ("completion", "response", "output", "answer")
"""What data sets call the text that is learned, in the order in which it is looked for."""

MASKS = ("loss_mask", "completion_mask", "assistant_masks")
"""Columns of zeros and ones beside `input_ids`; the loss covers what all of them cover."""

VERDICTS = ("label", "kto_tag")
"""Columns that say whether an answer is one to learn, as KTO's rows have them."""

SYSTEM = ("system", "system_prompt")

TOKEN_COLUMNS = ("token_type_ids", "special_tokens_mask", "length", "length_column")
"""Columns that tokenizers write beside `input_ids` and that say nothing of the loss."""

OWN_OPTIONS = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"}
"""What a template is given by us, so that a row cannot pass it."""

HEADINGS = 400
"""Characters that a formatted text may have beside what it formats."""

SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Roles as ShareGPT's files name them; any other stands for itself."""

PLAIN_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "id", *REASONING})
KNOWN_OF_MESSAGES = PLAIN_KEYS | {*TURN_FLAGS, "from", "value"}
"""What is read of a message, whatever its template."""

PART_TEXTS = ("text", "value", "content")
"""What data sets call the text of a part of a content."""

TRANSCRIPT = "\n\nAssistant:"
"""The beginning of an answer in Anthropic's transcripts, `\\n\\nHuman: ...\\n\\nAssistant: ...`."""


@dataclass(frozen=True, slots=True)
class Text:
    """Plain text: the loss covers all of it."""

    text: str


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and a response: the loss covers the response."""

    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A rendered conversation and the character ranges that the loss covers."""

    text: str
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """Tokens and mask as the row has them."""

    ids: NDArray[np.int32]
    mask: NDArray[np.uint8]


Shape = Text | Pair | Chat | Ready


class _Columns:
    """A row, and which of its columns were read. One that is null counts as absent."""

    __slots__ = ("row", "used")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.used: list[str] = []

    def has(self, name: str) -> bool:
        return self.row.get(name) is not None

    def take(self, name: str) -> Any:
        self.used.append(name)
        return self.row[name]

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str):
            raise BadRow(f"its {name} is of type {type(value).__name__}, not text")
        return checked_unicode(value, name)

    def optional(self, *names: str) -> str:
        """The text of the first of these that there is, or nothing."""
        for name in names:
            if self.has(name):
                return self.text(name)
        return ""

    def response(self, having: str, *first: str) -> str:
        """The name of the column with the response, or why there is none."""
        names = (*first, *(name for name in RESPONSES if name not in first))
        for name in names:
            if self.has(name):
                return name
        null = [name for name in names if name in self.row]
        if null:
            raise BadRow(f"its {null[0]} is null, so there is no response to train on")
        if "chosen" in self.row:
            raise BadRow("its chosen is null, so there is no response to train on")
        raise BadRow(f"has {having} but no {' or '.join(names)}; saw {_keys(self.row)}")


Reader = Callable[[_Columns, Tokenizer], Shape]
"""How rows with certain columns are read."""


def shape_or_reason(row: Any, tokenizer: Tokenizer) -> Shape | BadRow:
    """The shape of a row, or why it has none."""
    if isinstance(row, BadRow):
        return row
    if not isinstance(row, Mapping):
        return BadRow(f"is a {type(row).__name__}, not an object with columns")
    try:
        return read_shape(row, tokenizer)[0]
    except BadRow as error:
        return error
    except RecursionError:
        return BadRow("is nested too deeply to be read")


def read_shape(row: Row, tokenizer: Tokenizer) -> tuple[Shape, list[str]]:
    """The shape of a row, and the columns it was made from."""
    columns = _Columns(row)
    shape = _shape(columns, tokenizer)
    if not isinstance(shape, Text | Ready):
        _refuse_unwanted(row)
    refuse_row_flags(row, tuple(row), columns.used, not isinstance(shape, Ready))
    _refuse_unread(columns)
    return shape, columns.used


def _shape(row: _Columns, tokenizer: Tokenizer) -> Shape:
    columns = row.row
    nulls = tuple([name for name, value in columns.items() if value is None])
    return _reader(tuple(columns), nulls)(row, tokenizer)


@lru_cache(1024)
def _reader(names: tuple[str, ...], nulls: tuple[str, ...]) -> Reader:
    """How to read rows with these columns: decided once for all rows that have the same ones."""
    row = _Columns(dict.fromkeys(names, "") | dict.fromkeys(nulls))
    if row.has("input_ids"):
        return _ready
    for name in CHATS:
        if row.has(name):
            return partial(_conversation, name=name)
    if row.has("query") and row.has("answers") and row.has("tools"):
        return _calling
    if row.has("chosen"):
        return _chosen
    if row.has("prompt"):
        return partial(_prompted, response=row.response("prompt"))
    if row.has("instruction"):
        return partial(_alpaca, response=row.response("instruction", "output", "response"))
    for name, first in QUESTIONS.items():
        has_answer = any(answer in row.row for answer in (*first, *RESPONSES))
        if row.has(name) and (has_answer or name == "question"):
            asked = (*_first(row, *SYSTEM), *_first(row, "context"), name)
            return partial(_answered, asked=asked, response=row.response(name, *first))
    if row.has("input") and "output" in row.row:
        asked = (*_first(row, *SYSTEM), "input")
        return partial(_answered, asked=asked, response=row.response("input", "output"))
    for name in ("text", "content", "input"):
        if row.has(name):
            return partial(_text, name=name)
    if row.has("data"):
        return _dialogue
    if null := [name for name in KNOWN if name in row.row]:
        raise BadRow(f"its {null[0]} is null, so there is nothing to train on")
    raise _unknown(row)


def _unknown(row: _Columns) -> BadRow:
    return BadRow(
        f"has none of the known keys; saw {_keys(row.row)}; known are input_ids, messages, "
        f"conversations, chosen, prompt + completion, instruction + output, question + answer, "
        f"query + response, problem + solution, inputs + targets, input + output, and text"
    )


def _first(row: _Columns, *names: str) -> tuple[str, ...]:
    """The first of these columns that there is, if any."""
    return next(((name,) for name in names if row.has(name)), ())


def _text(row: _Columns, tokenizer: Tokenizer, name: str) -> Text:
    text = row.text(name)
    if not text:
        raise BadRow(f"its {name} is empty, so there are no tokens to train on")
    return Text(text)


def _dialogue(row: _Columns, tokenizer: Tokenizer) -> Chat:
    """UltraChat, as it was first published: turns as a list of texts."""
    if not isinstance(row.row["data"], list):
        raise _unknown(row)
    return _conversation(row, tokenizer, "data")


def _prompted(row: _Columns, tokenizer: Tokenizer, response: str) -> Shape:
    if isinstance(row.row["prompt"], list) or isinstance(row.row[response], list):
        asked = _messages(_spoken(row.take("prompt"), "user", "prompt"), "prompt")
        answered = _messages(_spoken(row.take(response), "assistant", response), response)
        return _chat(row, [*asked, *answered], len(asked), tokenizer)
    prompt = _after(row.optional(*SYSTEM), row.text("prompt"))
    return _pair(prompt, row.text(response))


def _answered(row: _Columns, tokenizer: Tokenizer, asked: tuple[str, ...], response: str) -> Pair:
    """The texts of the columns `asked` and a newline, then the response."""
    prompt = _after(*[row.text(name) for name in asked]) + "\n"
    return _pair(prompt, row.text(response))


def _spoken(given: Any, role: str, name: str) -> Any:
    """A text beside messages is the message of its role."""
    if isinstance(given, list) and any(isinstance(one, str) for one in given):
        raise BadRow(
            f"its {name} is a list of texts, which may be turns or variants of one; give one text, "
            f"or messages with roles"
        )
    return [{"role": role, "content": given}] if isinstance(given, str) else given


def _refuse_unwanted(row: Row) -> None:
    """An error for an answer that the row itself calls a bad one."""
    for name in VERDICTS:
        value = row.get(name)
        if value is None:
            continue
        if value is False or value == 0 or str(value).strip().lower() in ("false", "0"):
            raise BadRow(
                f"its {name} is {json.dumps(value, default=str)}, so its answer is one not to "
                f"learn; leave such rows out with --on-bad-row skip, or learn them with "
                f"--ignore-column {name}"
            )


def _alpaca(row: _Columns, tokenizer: Tokenizer, response: str) -> Pair:
    system = row.optional(*SYSTEM)
    given = row.optional("input") or row.optional("context")
    if given == "<noinput>":
        # As the tasks that Alpaca began with have it.
        given = ""
    middle = f"### Input:\n{given}\n\n" if given else ""
    asked = f"### Instruction:\n{row.text('instruction')}\n\n{middle}### Response:\n"
    return _pair(_after(system, asked), row.text(response))


def _conversation(row: _Columns, tokenizer: Tokenizer, name: str) -> Chat:
    messages = row.take(name)
    if row.has("chosen") and row.row["chosen"] == messages:
        # The preferred answer is the conversation, as UltraFeedback has it.
        row.used += ["chosen", *(["rejected"] if row.has("rejected") else [])]
        return _chat(row, _messages(messages, name), 0, tokenizer)
    asked = _messages(messages, name)
    if row.has("chosen") and asked[-1]["role"] != "assistant":
        chosen = row.take("chosen")
        row.used += ["rejected"] if row.has("rejected") else []
        chosen = [chosen] if isinstance(chosen, Mapping) else _spoken(chosen, "assistant", "chosen")
        return _chat(row, [*asked, *_messages(chosen, "chosen")], len(asked), tokenizer)
    return _chat(row, asked, 0, tokenizer)


def _calling(row: _Columns, tokenizer: Tokenizer) -> Chat:
    """A question and the calls that answer it, as xLAM's rows have them."""
    calls = row.take("answers")
    calls = _parsed(calls) if isinstance(calls, str) else calls
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow("its answers are not a list of calls beside its query and tools")
    functions = [{"type": "function", "function": dict(call)} for call in calls]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": row.text("query")},
        {"role": "assistant", "content": None, "tool_calls": functions},
    ]
    return _chat(row, messages, 0, tokenizer)


def _chosen(row: _Columns, tokenizer: Tokenizer) -> Shape:
    """The preferred answer; the rejected one is read only to see where the prompt ends."""
    chosen = row.take("chosen")
    rejected = row.take("rejected") if row.has("rejected") else None
    if isinstance(chosen, str):
        if row.has("prompt"):
            return _pair(_after(row.optional(*SYSTEM), row.text("prompt")), row.text("chosen"))
        for name in (*QUESTIONS, "input"):
            if row.has(name):
                prompt = _after(row.optional(*SYSTEM), row.text(name))
                return _pair(prompt + "\n", row.text("chosen"))
        prompt, answer, response = row.text("chosen").rpartition(TRANSCRIPT)
        if not answer:
            raise BadRow(
                "its chosen text has no prompt column and no Assistant: turn, so the prompt "
                "cannot be told from the answer; add a prompt column"
            )
        return _pair(prompt + answer, response)
    messages = _messages(_spoken(chosen, "assistant", "chosen"), "chosen")
    if row.has("prompt") and isinstance(row.row["prompt"], list):
        asked = _messages(_spoken(row.take("prompt"), "user", "prompt"), "prompt")
        return _chat(row, [*asked, *messages], len(asked), tokenizer)
    first = 0
    if isinstance(rejected, list):
        pairs = enumerate(zip(chosen, rejected, strict=False))
        first = next((i for i, (a, b) in pairs if a != b), 0)
    return _chat(row, messages, first, tokenizer)


def _after(*parts: str) -> str:
    """Texts that are there, with an empty line between."""
    return "\n\n".join(part for part in parts if part)


def _pair(prompt: str, response: str) -> Pair:
    if not prompt.strip() and not response:
        raise BadRow("its prompt is blank and its response empty, so there is nothing to train on")
    return Pair(prompt, response)


def _ready(row: _Columns, tokenizer: Tokenizer) -> Ready:
    vocab_size = tokenizer.vocab_size
    ids = _integers(row, "input_ids")
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise BadRow(
            f"its input_ids contain {wrong}, outside the tokenizer's vocabulary of {vocab_size:,}; "
            f"name the tokenizer that made them"
        )
    mask = np.ones(len(ids), np.bool_)
    for name in MASKS:
        if row.has(name):
            mask &= _mask(row, name, len(ids))
    if row.has("labels"):
        labels = _integers(row, "labels")
        if len(labels) != len(ids):
            raise BadRow(f"its labels have {len(labels)} entries for {len(ids)} input_ids")
        learned = labels != IGNORE
        if (labels[learned] != ids[learned]).any():
            raise BadRow(
                f"its labels differ from its input_ids where they are not {IGNORE}; labels are "
                f"shifted by the model, not in the data"
            )
        mask &= learned
    if row.has("attention_mask"):
        kept = _mask(row, "attention_mask", len(ids))
        shown = np.flatnonzero(kept)
        if len(shown) and shown[-1] - shown[0] >= len(shown):
            hole = int(shown[0] + np.argmin(kept[shown[0] :]))
            raise BadRow(
                f"its attention_mask is 0 at token {hole} between tokens where it is 1; only "
                f"padding before and after can be left out, so remove such tokens from the row, "
                f"or keep them with --ignore-column attention_mask"
            )
        ids, mask = ids[kept], mask[kept]
    _refuse_unread_tokens(row, len(kept) if row.has("attention_mask") else len(ids))
    return Ready(ids.astype(np.int32), mask.astype(np.uint8))


def _refuse_unread_tokens(row: _Columns, length: int) -> None:
    """An error for numbers beside `input_ids` that nobody read: masks, weights, packing."""
    for name, value in row.row.items():
        if name in row.used or name in TOKEN_COLUMNS or not isinstance(value, list | np.ndarray):
            continue
        numbers = [x for x in value if isinstance(x, int | float | np.number)]
        if not numbers or len(numbers) < len(value):
            continue
        if name == "position_ids" and all(b > a for a, b in itertools.pairwise(numbers)):
            continue
        lengths = len(numbers) > 1 and (sum(numbers) == length or numbers[-1] == length)
        if len(numbers) == length or lengths:
            known = ", ".join((*MASKS, "labels", "attention_mask"))
            raise BadRow(
                f"has {name}, which is not used beside input_ids; known are {known}; leave it out "
                f"with --ignore-column {name}"
            )


def _mask(row: _Columns, name: str, length: int) -> NDArray[np.bool_]:
    mask = _integers(row, name)
    if len(mask) != length:
        raise BadRow(f"its {name} has {len(mask)} entries for {length} input_ids")
    if len(mask) and not 0 <= mask.min() <= mask.max() <= 1:
        raise BadRow(f"its {name} has values other than 0 and 1")
    return mask.astype(np.bool_)


def _chat(
    row: _Columns, messages: Sequence[dict[str, Any]], first: int, tokenizer: Tokenizer
) -> Chat:
    """A rendered conversation, and the assistant turns from message `first` on."""
    tools = _tools(row.take("tools")) if row.has("tools") else None
    chat = tokenizer.chat
    if row.has("chat_template_kwargs"):
        chat = chat.with_options(_options(row.take("chat_template_kwargs")))
    system = _system(row)
    if not any(message["role"] == "assistant" for message in messages):
        roles = ", ".join(dict.fromkeys(repr(message["role"]) for message in messages))
        if tokenizer.loss_on != "everything":
            raise BadRow(f"has no assistant message to train on; its roles are {roles}")
    if system and messages[0]["role"] != "system":
        messages, first = [{"role": "system", "content": system}, *messages], first and first + 1
    elif system and messages[0]["content"] != system:
        raise BadRow("has a system column and another system message; leave one of them out")
    refused: list[tuple[int, BadRow]] = []
    tried: list[list[dict[str, Any]]] = []
    for content in (_as_given, _null_is_empty, _text_in_parts):
        for arguments in (_as_given, _arguments_read, _arguments_written):
            said = [arguments(content(message)) for message in messages]
            if said in tried:
                continue
            tried.append(said)
            passed = 0
            try:
                text, spans = trained_spans(chat, said, tools, first, tokenizer.loss_on)
                for check in _checks(text, messages, said, tools, first, chat, tokenizer.loss_on):
                    passed += 1
                    check()
            except BadRow as error:
                refused.append((passed, error))
            else:
                return Chat(checked_unicode(text, "conversation"), tuple(spans))
    # Of the form that the template shows best; the first of several.
    raise max(refused, key=lambda entry: entry[0])[1]


def _checks(
    text: str,
    messages: Sequence[dict[str, Any]],
    said: Sequence[dict[str, Any]],
    tools: Any,
    first: int,
    chat: ChatTemplate,
    loss_on: LossOn,
) -> list[Callable[[], None]]:
    """What refuses a conversation as a template shows it, the gravest first."""
    turns = trained_turns(messages, first, loss_on)
    return [
        lambda: _refuse_python(text, messages),
        lambda: _refuse_null(text, said, tools, chat),
        lambda: _refuse_lost(text, messages),
        lambda: _refuse_lost_calls(text, said),
        lambda: _refuse_hidden_calls(said, tools, chat),
        lambda: _refuse_lost_reasoning(text, messages, turns, loss_on),
        lambda: _refuse_lost_keys(text, messages),
        lambda: _refuse_lost_tools(text, said, tools, chat),
        lambda: verify(chat, said, tools, first, loss_on),
    ]


def _as_given(message: dict[str, Any]) -> dict[str, Any]:
    return message


def _arguments_read(message: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's files have the arguments of a call as JSON, and most templates write that."""
    return _with_arguments(message, lambda given: _parsed(given) if _is_object(given) else given)


def _arguments_written(message: dict[str, Any]) -> dict[str, Any]:
    """Some templates show the arguments of a call as they are, which must be JSON then."""
    return _with_arguments(
        message,
        lambda given: given if isinstance(given, str) else json.dumps(given, ensure_ascii=False),
    )


def _with_arguments(message: dict[str, Any], form: Callable[[Any], Any]) -> dict[str, Any]:
    if not isinstance(message.get("tool_calls"), list):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            call = {**call, "function": {**function, "arguments": form(function["arguments"])}}
        calls.append(call)
    return message | {"tool_calls": calls}


def _is_object(given: Any) -> bool:
    return isinstance(given, str) and isinstance(_parsed(given), dict)


def _parsed(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


def _refuse_null(
    text: str, messages: Sequence[dict[str, Any]], tools: Any, chat: ChatTemplate
) -> None:
    """An error if the template writes out a content that is null."""
    if all(message.get("content", "") is not None for message in messages):
        return
    try:
        empty = [_null_is_empty(message) for message in messages]
        plain = chat.render(empty, add_generation_prompt=False, tools=tools)
    except BadRow:
        return
    for word in ("None", "null"):
        if text.count(word) > plain.count(word):
            raise BadRow(f"the chat template writes a content that is null as {word}")


def _refuse_python(text: str, messages: Sequence[dict[str, Any]]) -> None:
    """An error if the template writes out the list of parts that a content was given as."""
    wrote = "{'type': 'text'"
    if wrote in text and not any(wrote in part for part in strings(messages)):
        raise BadRow("the chat template writes the parts of a content as Python does")


def _null_is_empty(message: dict[str, Any]) -> dict[str, Any]:
    """Calls without a text have the content null; some templates can only add to a text."""
    return message | {"content": message.get("content") or ""}


def _text_in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Templates of models that see images show parts, and leave out a plain text."""
    content = message.get("content") or ""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return message | {"content": parts}


def _refuse_lost(text: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """An error for an assistant message whose words are not in the rendered conversation."""
    for number, message in enumerate(messages):
        content = message.get("content")
        if message["role"] == "assistant" and isinstance(content, str):
            words = content.rpartition("</think>")[2].strip()
            if words not in text:
                raise BadRow(
                    f"the chat template leaves out or rewrites the content of its message "
                    f"{number}; use the template that the model was made for"
                )


def _refuse_lost_reasoning(
    text: str, messages: Sequence[Mapping[str, Any]], turns: Sequence[int], loss_on: LossOn
) -> None:
    """An error if the reasoning of a trained turn is not in the rendered conversation.

    Many templates leave it out of earlier turns, as those stand before a model that is asked
    again; trained like that, it would learn to answer without.
    """
    at = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        for name, words in _reasoning(message):
            found = text.find(words, at)
            if found >= 0:
                at = found + len(words)
            elif number in turns:
                way = (
                    ""
                    if loss_on == "last-turn" or number == turns[-1]
                    else ("choose --loss-on last-turn, which trains as the model is asked, or ")
                )
                raise BadRow(
                    f"the chat template leaves out the {name} of its message {number}, which is "
                    f"trained; {way}{_without(name)}, or use a template that shows it"
                )


def _without(name: str) -> str:
    if name in REASONING:
        return f"train without it with --ignore-column messages.{name}"
    return "remove it from the rows"


def _reasoning(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The reasoning of a turn, under what name it is given."""
    given = [(name, message[name]) for name in REASONING if isinstance(message.get(name), str)]
    content = message.get("content")
    if isinstance(content, str) and "</think>" in content:
        before = content.rpartition("</think>")[0]
        given.append(("text between <think> and </think>", before.rpartition("<think>")[2]))
    return [(name, words.strip()) for name, words in given[:1] if words.strip()]


def _refuse_lost_keys(text: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """An error for a text beside the content of a message that nobody shows."""
    for number, message in enumerate(messages):
        for name, value in message.items():
            if name in KNOWN_OF_MESSAGES or not is_text(name, value):
                continue
            if not all(_has(text, part.strip()) for part in strings(value)):
                raise BadRow(
                    f"its message {number} has {name}, which the chat template does not show; "
                    f"leave it out with --ignore-column messages.{name}"
                )


def _refuse_lost_calls(text: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """An error for a tool call or a result that the rendered conversation does not show."""
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        if not all(_is_shown(text, call) for call in calls):
            raise BadRow(_LOST_CALLS.format(number))
        content = message.get("content")
        result = content.strip() if message["role"] == "tool" and isinstance(content, str) else ""
        if not _has(text, result):
            raise BadRow(
                f"the chat template leaves out or rewrites the result of a tool in its message "
                f"{number}; use the template that the model was made for"
            )


def _refuse_lost_tools(
    text: str, messages: Sequence[dict[str, Any]], tools: Any, chat: ChatTemplate
) -> None:
    """An error for schemas of tools that nobody shows."""
    if not tools:
        return
    asked = [part for m in messages if m["role"] != "assistant" for part in strings(m)]
    names = [re.escape(part) for part in strings(tools) if part.strip()]
    if all(re.search(rf"(?<!\w){name}(?!\w)", "\n".join(asked)) for name in names):
        # A system message that lists them.
        return
    try:
        same = chat.render(messages, add_generation_prompt=False) == text
    except BadRow:
        return
    if same:
        raise BadRow(
            "has tools, which the chat template does not show; leave them out with "
            "--ignore-column tools, or use a template that knows tools"
        )


def _refuse_hidden_calls(
    messages: Sequence[dict[str, Any]], tools: Any, chat: ChatTemplate
) -> None:
    """An error for a tool call that the template does not show.

    Its words may stand elsewhere in the conversation, so it is shown names that occur nowhere.
    """
    marks = map(chr, range(0xE000, 0xF900))
    wanted = []
    probe = []
    for number, message in enumerate(messages):
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function", call) if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping):
                return
            mark = next(marks, "?")
            wanted.append((number, mark))
            given: Any = {mark: mark} if function.get("arguments") else {}
            if isinstance(function.get("arguments"), str):
                given = json.dumps(given, ensure_ascii=False)
            named = {**function, "name": mark, "arguments": given}
            calls.append({**call, "function": named} if "function" in call else named)
        probe.append(message | {"tool_calls": calls} if calls else message)
    if not wanted:
        return
    text = chat.render(probe, add_generation_prompt=False, tools=tools)
    for number, mark in wanted:
        if not _has(text, mark):
            raise BadRow(_LOST_CALLS.format(number))


_LOST_CALLS = (
    "the chat template leaves out or rewrites the tool calls of its message {}; use the template "
    "that the model was made for"
)


def _is_shown(text: str, call: Any) -> bool:
    """Whether a call stands in the text by its name and all words of its arguments."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        parsed = _parsed(arguments)
        # JSON in a string of JSON, or an object in the braces of another.
        twice = (*_quoted(arguments), "{" + arguments + "}")
        if parsed and any(one in text for one in twice):
            return False
        arguments = parsed
    elif arguments and "'" in repr(arguments) and repr(arguments) in text:
        # Python's quotes, which are not JSON's.
        return False
    return str(function.get("name", "")) in text and all(
        _has(text, part) for part in strings(arguments)
    )


def _has(text: str, words: str) -> bool:
    """Whether the words stand in the text, as they are or inside JSON."""
    return words in text or any(one[1:-1] in text for one in _quoted(words))


def _quoted(text: str) -> tuple[str, str]:
    return json.dumps(text), json.dumps(text, ensure_ascii=False)


def _system(row: _Columns) -> str:
    """The system column, whose text may be in parts as Anthropic's files have it."""
    name = next((name for name in SYSTEM if row.has(name)), "")
    if name and isinstance(row.row[name], list):
        (plain,) = _plain({"role": "system", "content": row.take(name)}, 0)
        return checked_unicode(str(plain["content"]), name)
    return row.optional(*SYSTEM)


def _options(given: Any) -> dict[str, Any]:
    """What a row passes to its template, which tables may keep as a JSON string."""
    given = _parsed(given) if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        raise BadRow(
            "its chat_template_kwargs are not an object; leave them out with "
            "--ignore-column chat_template_kwargs"
        )
    if taken := OWN_OPTIONS & given.keys():
        raise BadRow(
            f"its chat_template_kwargs have {min(taken)}, which cannot be changed by row; "
            f"leave them out with --ignore-column chat_template_kwargs"
        )
    return dict(given)


def _messages(given: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise BadRow(f"its {name} are not a list with at least one message")
    messages = []
    for number, message in enumerate(_turns(given)):
        if isinstance(message, Mapping) and ("from" in message or "value" in message):
            role = str(message.get("from") or message.get("role"))
            message = {"role": SHAREGPT.get(role, role)} | {
                "content" if k == "value" else k: v
                for k, v in message.items()
                if k not in ("from", "role")
            }
        if message is None:
            raise BadRow(f"its message {number} is null")
        if isinstance(message, Mapping) and message.get("role", "") is None:
            raise BadRow(f"its message {number} has a role that is null")
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRow(f"its message {number} is not an object with a role")
        if message["role"] in ("model", "bot"):
            message = {**message, "role": "assistant"}
        if message.get("function_call") is not None:
            raise BadRow(
                f"its message {number} has a function_call, OpenAI's older form of tool_calls; "
                f"write it as tool_calls"
            )
        if "content" not in message and "tool_calls" not in message:
            raise BadRow(f"its message {number} has no content")
        if message.get("content") is None and not message.get("tool_calls"):
            raise BadRow(f"its message {number} has a content that is null and no tool_calls")
        refuse_turn_flags(message, number, name, PLAIN_KEYS)
        # Parquet gives every message every key; templates test whether a key exists.
        kept = {k: v for k, v in message.items() if v is not None or k == "content"}
        messages += _plain(kept, number)
    return messages


def _turns(given: list[Any]) -> list[Any]:
    """Turns without roles as messages: LIMA lists texts, Capybara pairs of input and output."""
    if all(isinstance(turn, str) for turn in given):
        roles = itertools.cycle(("user", "assistant"))
        return [{"role": role, "content": text} for role, text in zip(roles, given, strict=False)]
    if all(isinstance(turn, Mapping) and turn.keys() == {"input", "output"} for turn in given):
        return [
            {"role": role, "content": turn[key]}
            for turn in given
            for role, key in (("user", "input"), ("assistant", "output"))
        ]
    return given


def _plain(message: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """A message whose content is a list of parts as messages of plain text.

    Calls and results of tools, which Anthropic's files have as parts, become those of OpenAI's.
    """
    if not isinstance(message.get("content"), list):
        return [message]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    more: dict[str, Any] = {}
    for part in message["content"]:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind in ("text", "input_text", "output_text"):
            texts.append(_text_of(part, number))
        elif kind == "tool_use":
            function = {"name": part.get("name"), "arguments": part.get("input") or {}}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            inner = {"role": "tool", "content": part.get("content") or ""}
            (result,) = _plain(inner, number)
            results.append(result | {"tool_call_id": part.get("tool_use_id")})
        elif kind == "thinking" and isinstance(part.get("thinking"), str):
            more["reasoning_content"] = part["thinking"]
        else:
            raise BadRow(
                f"its message {number} has a part of type {kind!r}; only text and tool calls can "
                f"be trained on"
            )
    if calls:
        more["tool_calls"] = calls
    # A call without words has no content, as OpenAI's files have it.
    plain = {**message, "content": "".join(texts) if texts or not calls else None, **more}
    return [*results, *([plain] if texts or calls or more or not results else [])]


def _text_of(part: Any, number: int) -> str:
    """The text of a part, which LLaMA-Factory calls its value."""
    if isinstance(part, str):
        return part
    names = [
        name for name in PART_TEXTS if isinstance(part, Mapping) and part.get(name) is not None
    ]
    if len(names) == 1 and isinstance(part[names[0]], str):
        return str(part[names[0]])
    seen = _keys(part) if isinstance(part, Mapping) else type(part).__name__
    raise BadRow(
        f"its message {number} has a part of text with {len(names) or 'no'} text under "
        f"{' or '.join(PART_TEXTS)}; saw {seen}"
    )


def _tools(given: Any) -> Any:
    """The schemas of tools, which tables keep as a JSON string."""
    if isinstance(given, str):
        try:
            given = parse_json(given) if given.strip() else None
        except ValueError:
            raise BadRow(
                "its tools are a string that is not JSON; give a list of schemas"
            ) from None
    if not isinstance(given, list):
        return given or None
    # xLAM's rows have the functions without what templates expect around them.
    return [
        {"type": "function", "function": tool}
        if isinstance(tool, Mapping) and "name" in tool and "function" not in tool
        else tool
        for tool in given
    ] or None


def _refuse_unread(columns: _Columns) -> None:
    """An error for a column of text that nobody read, unless what it says was read elsewhere."""
    row = columns.row
    if "input_ids" in columns.used:
        return
    unread = [name for name in row if name not in columns.used and is_text(name, row[name])]
    if not unread:
        return
    read = [part for name in columns.used for part in strings(row[name]) if part.strip()]
    for name in unread:
        own = [part for part in strings(row[name]) if part.strip()]
        said = all(any(part.strip() in text for text in read) for part in own)
        # A column with the whole text, as it stands under its headings.
        most = 2 * sum(map(len, read)) + HEADINGS
        whole = any(len(p) <= most and all(text.strip() in p for text in read) for p in own)
        if not own or not (said or whole):
            raise BadRow(
                f"has {name}, which is not used beside {' + '.join(dict.fromkeys(columns.used))}; "
                f"leave it out with --ignore-column {name}, in Python with "
                f'open_source(path, ["{name}"]), or rename the columns'
            )


def checked_unicode(text: str, key: str) -> str:
    # JSON can encode half of a surrogate pair, which no tokenizer can read.
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError:
        raise BadRow(
            f"its {key} has half of a surrogate pair, which is not valid Unicode"
        ) from None
    return text


def _integers(row: _Columns, name: str) -> NDArray[np.int64]:
    try:
        array = np.asarray(row.take(name))
    except ValueError:
        array = np.empty(0, object)
    if array.ndim == 1 and array.size == 0 and array.dtype != object:
        return np.empty(0, np.int64)
    mask = name in MASKS or name == "attention_mask"
    if array.ndim != 1 or array.dtype.kind not in ("iub" if mask else "iu"):
        raise BadRow(f"its {name} are not a list of integers")
    if not mask and array.min() <= 1 and any(isinstance(one, bool) for one in row.row[name]):
        # Among integers, true and false are read as 1 and 0.
        raise BadRow(f"its {name} have true or false among the integers")
    return array.astype(np.int64)


def _keys(row: Row) -> str:
    names = sorted(str(key) for key in row)
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"[{shown}]"
