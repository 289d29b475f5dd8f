"""Whether the loss covers what the assistant says and nothing of what others say.

The words of a conversation may stand anywhere, so its form is tried with words that occur nowhere
else: a word for every text, call and argument. Where each of them is rendered says whose it is.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from batchwright.data.rows.turns import PIECES, common, trained_spans, trained_turns
from batchwright.data.tokenizers.chat import REASONING, ChatTemplate, Message
from batchwright.data.tokenizers.tokenizer import LossOn
from batchwright.errors import BadRow
from batchwright.files import parse_json

__all__ = ["verify"]

KEPT = 4096
"""Forms of conversations whose outcome is remembered."""
FEW_WORDS = 4
"""An end of a turn has at most so many words beside its special tokens."""
WAYS = (
    "choose --loss-on everything, or --loss-on last-turn if the last turn is a plain answer, or "
    "mark the turns of the template with {% generation %}"
)


def verify(
    chat: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    first: int,
    loss_on: LossOn,
) -> None:
    """An error if the loss misses words of a trained turn or covers those of another message."""
    probe, words = _probe(messages)
    key = json.dumps([probe, tools, first, loss_on], default=str)
    if key not in chat.verified:
        if len(chat.verified) >= KEPT:
            chat.verified.clear()
        chat.verified[key] = _wrong(chat, probe, words, tools, first, loss_on)
    if chat.verified[key]:
        raise BadRow(chat.verified[key])


def _wrong(
    chat: ChatTemplate,
    probe: Sequence[Message],
    words: Sequence[Sequence[tuple[str, str]]],
    tools: Sequence[Any] | None,
    first: int,
    loss_on: LossOn,
) -> str:
    """What is wrong with the spans of a conversation, or nothing."""
    try:
        text, spans = trained_spans(chat, probe, tools, first, loss_on)
    except BadRow as error:
        return str(error)
    if "{'type': 'text'" in text:
        return "the chat template writes the parts of a content as Python does, not their text"
    turns = trained_turns(probe, first, loss_on)
    for number, own in enumerate(words):
        role = probe[number]["role"]
        for what, word in own:
            if role == "system" or (what == "reasoning" and number not in turns):
                continue
            if word not in text:
                return (
                    f"the chat template leaves out or rewrites the {what} of its message {number}; "
                    f"use the template that the model was made for"
                )
    if loss_on == "everything":
        return ""
    covered = [text[start:end] for start, end in spans]
    for number, own in enumerate(words):
        role = probe[number]["role"]
        for what, word in own:
            inside = sum(part.count(word) for part in covered)
            if number not in turns and inside:
                return (
                    f"the chat template shows the {what} of its message {number} ({role}) inside "
                    f"a turn that is trained, so the loss would cover it; {WAYS}"
                )
            if number in turns and not inside:
                return (
                    f"the {what} of its message {number} cannot be located in the turn that the "
                    f"chat template shows, so the loss would not cover it; {WAYS}"
                )
    if not chat.marked:
        for number, part in zip(turns, covered, strict=True):
            if probe[number].get("tool_calls") or not words[number]:
                continue
            end = max(part.rfind(word) + len(word) for _, word in words[number])
            tail = "".join(p for p in PIECES.findall(part[end:]) if len(p) == 1)
            if len(tail.split()) > FEW_WORDS:
                return (
                    f"the chat template ends its message {number} with instructions of its own, "
                    f"which the loss would cover; {WAYS}"
                )
        if _goes_on(chat, probe, words, tools, turns[-1]):
            return (
                "the chat template ends a conversation with the header of another turn, which the "
                "loss would cover; choose --loss-on everything, or mark the turns of the template "
                "with {% generation %}"
            )
    return ""


def _goes_on(
    chat: ChatTemplate,
    probe: Sequence[Message],
    words: Sequence[Sequence[tuple[str, str]]],
    tools: Sequence[Any] | None,
    turn: int,
) -> bool:
    """Whether a header follows the turn where nobody asked for one."""
    if not words[turn] or probe[turn].get("tool_calls"):
        return False
    more = {"role": "user", "content": "zqqz"}
    try:
        ended = chat.render(probe[: turn + 1], add_generation_prompt=False, tools=tools)
        going = chat.render([*probe[: turn + 1], more], add_generation_prompt=False, tools=tools)
    except BadRow:
        return False
    last = max((word for _, word in words[turn]), key=ended.rfind)
    if last not in going:
        return False
    head, _, tail = ended.rpartition(last)
    rest = tail[len(common(tail, going.rpartition(last)[2])) :]
    before = {piece for piece in PIECES.findall(head[-200:]) if len(piece) > 1}
    return any(piece in before for piece in PIECES.findall(rest))


def _probe(
    messages: Sequence[Message],
) -> tuple[list[dict[str, Any]], list[list[tuple[str, str]]]]:
    """The messages with words that occur nowhere else, and what each word stands for."""
    numbers = iter(range(1 << 30))
    probe, words = [], []
    for message in messages:
        own: list[tuple[str, str]] = []
        probe.append(_marked(message, numbers, own))
        words.append(own)
    return probe, words


def _marked(message: Message, numbers: Iterator[int], own: list[tuple[str, str]]) -> dict[str, Any]:
    def word(what: str) -> str:
        own.append((what, f"zq{next(numbers)}qz"))
        return own[-1][1]

    def leaves(value: Any) -> Any:
        if isinstance(value, str):
            return word("tool calls") if value.strip() else value
        if isinstance(value, Mapping):
            return {key: leaves(inner) for key, inner in value.items()}
        return [leaves(inner) for inner in value] if isinstance(value, list) else value

    def content(text: str) -> str:
        if not text.strip():
            return text
        before, end, after = text.rpartition("</think>")
        if not end:
            return word("content")
        inside = word("reasoning") if before.rpartition("<think>")[2].strip() else ""
        start = "<think>\n" if "<think>" in before else ""
        return f"{start}{inside}\n</think>\n\n{word('content') if after.strip() else ''}"

    marked = dict(message)
    given = message.get("content")
    if isinstance(given, str):
        marked["content"] = content(given)
    elif isinstance(given, list):
        marked["content"] = [
            {**part, "text": content(part["text"])} if isinstance(part, Mapping) else part
            for part in given
        ]
    named = [name for name in REASONING if isinstance(message.get(name), str)]
    if named and message[named[0]].strip():
        reasoning = word("reasoning")
        marked |= dict.fromkeys(named, reasoning)
    if isinstance(message.get("tool_calls"), list):
        calls = []
        for call in message["tool_calls"]:
            function = call.get("function", call) if isinstance(call, Mapping) else None
            if isinstance(function, Mapping):
                arguments = function.get("arguments")
                if isinstance(arguments, str):
                    arguments = _written(arguments, leaves)
                else:
                    arguments = leaves(arguments)
                changed = {**function, "name": word("tool calls"), "arguments": arguments}
                call = {**call, "function": changed} if "function" in call else changed
            calls.append(call)
        marked["tool_calls"] = calls
    return marked


def _written(arguments: str, leaves: Any) -> str:
    try:
        return json.dumps(leaves(parse_json(arguments)), ensure_ascii=False)
    except ValueError:
        return str(leaves(arguments))
