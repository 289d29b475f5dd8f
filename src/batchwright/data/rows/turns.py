"""Where the turns of the assistant stand in a rendered conversation.

Marks come first: the template's own `{% generation %}`, as transformers reads them. Without marks
a turn is what it adds to the rendering of the turns before it, if those render as before. Where
they do not (templates that drop earlier reasoning, or end only the last turn), each turn is found
in the whole rendering: its content is exchanged for one character that occurs nowhere, and what
stays the same before and after it bounds the turn.
"""

import re
from collections.abc import Sequence
from typing import Any

from batchwright.data.tokenizers.chat import REASONING, ChatTemplate, Message, Spans
from batchwright.data.tokenizers.tokenizer import LossOn
from batchwright.errors import BadRow

__all__ = ["PIECES", "TURN_FLAGS", "common", "trained_spans", "trained_turns", "untrained_ends"]

WORDS = ("zqaqz", "zqbqz", "zqcqz", "zqdqz")
"""Words that no template has."""

TURN_FLAGS = ("weight", "train", "training", "loss", "loss_weight")
"""Whether a turn is trained, as OpenAI's, Axolotl's, ms-swift's and LLaMA-Factory's files say."""

PIECES = re.compile(r"<[^<>]*>|\[[^\[\]]*\]|.", re.DOTALL)
"""Special tokens as templates write them are not cut in two where two texts part."""


def trained_spans(
    chat: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    first: int = 0,
    loss_on: LossOn = "all-turns",
) -> tuple[str, Spans]:
    """The rendered conversation, and what the loss covers of it from message `first` on."""
    text, marks = chat.render_spans(messages, tools=tools)
    if loss_on == "everything":
        return text, [(0, len(text))]
    turns = trained_turns(messages, first, loss_on)
    if not turns:
        raise BadRow("has no assistant message to train on")
    if not chat.marked:
        spans = _by_prefix(chat, text, messages, tools, turns)
        spans = spans or [_found(chat, text, messages, tools, i) for i in turns]
        return text, _with_ends(chat, text, messages, spans)
    spans = [span for span in marks if span[0] < span[1]]
    if len(turns) < sum(message["role"] == "assistant" for message in messages):
        # Marks do not say whose they are, so those of the turns that count are looked for.
        own = [_found(chat, text, messages, tools, i) for i in turns]
        spans = [(a, b) for a, b in spans if any(a < end and b > start for start, end in own)]
    if not spans:
        raise BadRow("the chat template marks nothing of its assistant messages")
    return text, spans


def trained_turns(messages: Sequence[Message], first: int, loss_on: LossOn) -> list[int]:
    """The assistant messages that are trained, of those from `first` on.

    One with `weight` or `loss_weight` 0, or with `train`, `training` or `loss` false, is rendered
    and not trained, unless everything is.
    """
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if loss_on == "everything":
        return said
    turns = [i for i in said if i >= first and _counts(messages[i])]
    return turns[-1:] if loss_on == "last-turn" else turns


def _counts(message: Message) -> bool:
    # A flag that is null says nothing.
    return all(message.get(name) in (None, 1) for name in TURN_FLAGS)


def _by_prefix(
    chat: ChatTemplate,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    turns: Sequence[int],
) -> Spans:
    """What each turn adds to the turns before it; nothing if one of them changes those."""
    spans = []
    for i in turns:
        try:
            before = chat.render(messages[:i], add_generation_prompt=True, tools=tools)
            after = chat.render(messages[: i + 1], add_generation_prompt=False, tools=tools)
        except BadRow:
            return []
        if not (text.startswith(after) and after.startswith(before)):
            return []
        start = len(before)
        if i and messages[i - 1]["role"] == "assistant":
            # A template that sees an answer asks for no other, so the header is not yet there.
            start += _header(chat, text[start : len(after)], messages[:i], tools)
        spans.append((start, len(after)))
    return spans


def _header(
    chat: ChatTemplate, added: str, before: Sequence[Message], tools: Sequence[Any] | None
) -> int:
    """How much of what a turn adds is the header that stands before an answer to a user."""
    last = max((i for i, m in enumerate(before) if m["role"] != "assistant"), default=-1)
    prompt = _generation_prompt(chat, before[: last + 1], tools) if last >= 0 else ""
    at = added.find(prompt) if prompt else -1
    # The end of the turn before may come first.
    ends = at >= 0 and all(len(p) > 1 or p.isspace() for p in PIECES.findall(added[:at]))
    return at + len(prompt) if ends else 0


def _found(
    chat: ChatTemplate,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    turn: int,
) -> tuple[int, int]:
    """From after the generation prompt of a turn to the end of what always follows its content."""
    start, end = _content(chat, text, messages, tools, turn)
    try:
        earliest = _content(chat, text, messages, tools, turn - 1)[1] if turn else 0
    except BadRow:
        # The template does not show that message, so its words cannot be taken for a header.
        earliest = 0
    prompt = _generation_prompt(chat, messages[:turn], tools)
    header = text.rfind(prompt, earliest, start) if prompt else -1
    if header >= 0:
        start = header + len(prompt)
    else:
        # It asks in one way and shows in another: what both begin with is the header.
        start += len(common(prompt, text[start:]))
    alone = _probe(messages, turn, mark := _unused(text))[: turn + 1]
    tail = chat.render(alone, add_generation_prompt=False, tools=tools).partition(mark)[2]
    end += len(common(tail, text[end:]))
    if end <= start:
        raise BadRow(f"the chat template leaves nothing of its message {turn} to train on")
    return start, end


def _with_ends(chat: ChatTemplate, text: str, messages: Sequence[Message], spans: Spans) -> Spans:
    """The spans with the end that a template writes after every turn but the last."""
    in_parts = any(isinstance(message.get("content"), list) for message in messages)
    if in_parts not in chat.later_ends:
        chat.later_ends[in_parts] = _later_end(chat, in_parts)
    end = chat.later_ends[in_parts]
    if not end:
        return spans
    return [(a, b + len(end) if text.startswith(end, b) else b) for a, b in spans]


def _later_end(chat: ChatTemplate, in_parts: bool) -> str:
    """What a template writes after a turn only where another message follows; mostly nothing.

    Between an answer and the next question stand the end of the one and the header of the other.
    The header is what stands before the first question as well.
    """
    first, answer, second = WORDS[:3]
    probe = [_said("user", first, in_parts), _said("assistant", answer, in_parts)]
    try:
        alone = chat.render(probe, add_generation_prompt=False)
        both = chat.render([*probe, _said("user", second, in_parts)], add_generation_prompt=False)
    except BadRow:
        return ""
    if any(alone.count(word) != 1 for word in (first, answer)) or second not in both:
        return ""
    if any(len(piece) > 1 for piece in PIECES.findall(alone.partition(answer)[2])):
        # The last turn has an end of its own, which is the one to learn.
        return ""
    between = PIECES.findall(both.partition(answer)[2].partition(second)[0])
    before = PIECES.findall(both.partition(first)[0])
    header = _agree(between[::-1], before[::-1])
    end = between[: len(between) - header]
    named = any(len(piece) > 1 for piece in end)
    return "".join(end) if named and "".join(between[len(end) :]).strip() else ""


def _said(role: str, text: str, in_parts: bool) -> Message:
    return {"role": role, "content": [{"type": "text", "text": text}] if in_parts else text}


def untrained_ends(chat: ChatTemplate, loss_on: LossOn) -> str:
    """A sentence where the loss covers no end of some last turn: what is trained is not to stop.

    A template that cannot be read is not judged: its rows are refused one by one.
    """
    if loss_on == "everything":
        return ""
    roles = ("user", "assistant") * 2
    for in_parts in (False, True):
        probe = [_said(r, word, in_parts) for r, word in zip(roles, WORDS, strict=True)]
        try:
            text, spans = trained_spans(chat, probe, None, 0, loss_on)
        except BadRow:
            continue
        if any(text.count(word) != 1 for word in WORDS):
            continue
        if _is_ended(text, spans, WORDS[3]):
            return ""
        earlier = _is_ended(text, spans, WORDS[1])
        seen = "only where another message follows a turn" if earlier else "nowhere"
        return (
            f"the loss covers the end of a turn {seen}, as the chat template writes or marks none "
            f"{'elsewhere' if earlier else 'at all'}; without ends a model does not learn to stop"
        )
    return ""


def _is_ended(text: str, spans: Spans, word: str) -> bool:
    """Whether the span that covers a word goes on behind it with more than spaces."""
    at = end = text.index(word) + len(word)
    for a, b in sorted(spans):
        # Marks may part a turn.
        end = b if a <= end <= b else end
    return bool(text[at:end].strip(" "))


def _content(
    chat: ChatTemplate,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    number: int,
) -> tuple[int, int]:
    """Where the content of a message stands, reasoning included."""
    mark = _unused(text)
    probed = chat.render(_probe(messages, number, mark), add_generation_prompt=False, tools=tools)
    tail = probed.partition(mark)[2]
    if probed.count(mark) != 1 or not text.endswith(tail):
        raise BadRow(
            f"the chat template shows its message {number} in {probed.count(mark)} places or "
            f"changes others with it, so the turn cannot be located; choose --loss-on last-turn "
            f"or --loss-on everything, or mark the turns with {{% generation %}}"
        )
    return _agree(text, probed), len(text) - len(tail)


def _probe(messages: Sequence[Message], number: int, mark: str) -> list[Message]:
    """The messages, with `mark` for the content and the reasoning of one of them."""
    kept = {k: v for k, v in messages[number].items() if k not in REASONING}
    parts = isinstance(kept.get("content"), list)
    kept["content"] = [{"type": "text", "text": mark}] if parts else mark
    return [*messages[:number], kept, *messages[number + 1 :]]


def _unused(text: str) -> str:
    """A character for private use that does not occur."""
    return next(c for c in map(chr, range(0xE000, 0xF900)) if c not in text)


def _generation_prompt(
    chat: ChatTemplate, before: Sequence[Message], tools: Sequence[Any] | None
) -> str:
    """What the template adds to ask for an answer, or nothing if it cannot say."""
    try:
        plain = chat.render(before, add_generation_prompt=False, tools=tools)
        asking = chat.render(before, add_generation_prompt=True, tools=tools)
    except BadRow:
        return ""
    return asking[len(common(plain, asking)) :]


def common(one: str, other: str) -> str:
    """What both begin with, in whole pieces."""
    pieces = PIECES.findall(one)
    return "".join(pieces[: _agree(pieces, PIECES.findall(other))])


def _agree(one: Sequence[str], other: Sequence[str]) -> int:
    """How many items both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
