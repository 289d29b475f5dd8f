"""What a simulated model says: the same text for the same seed and prompt on every machine.

A prompt is handled in one of four ways. `sim` chooses by the prompt's own words; `sim-qa`,
`sim-mutator` and `sim-judge` always use their own.

    qa         a known question -> its answer, if its wording follows the hidden rule
    mutator    "Paraphrase ... Question: ..." -> the question rewritten
    judge      "... Score:" -> "Score: 7"; "... true or false ..." -> "true"
    plain      anything else -> the beginning of the prompt and some words
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from batchwright.calls.request import Request
from batchwright.calls.simulator import responses
from batchwright.calls.simulator.behaviour import Behaviour
from batchwright.calls.simulator.questions import (
    OPERATOR_WORDS,
    STRANGE,
    TOKEN,
    Target,
    mutate,
    uniform,
)
from batchwright.calls.simulator.wire import (
    PATHS,
    ParsedRequest,
    Refusal,
    Reply,
    events,
    parse,
    pieces_of,
    whole,
)
from batchwright.errors import ConfigError

__all__ = ["Models", "answer", "in_format", "operator_of", "questions_in"]

PATTERNS = {name: re.compile(pattern, re.I) for name, pattern in OPERATOR_WORDS.items()}
END = r"\s*(?=\n\s*\n|\n[\w ]{1,20}:|\Z)"
MARKED = re.compile(rf"^\s*(?:question|query)(?: \w)?:\s*(.*?){END}", re.I | re.S | re.M)
INLINE = re.compile(rf"\b(?:question|query)(?: \w)?:\s*(.*?){END}", re.I | re.S)
QUOTED = re.compile(r"[\"“](.{6,}?)[\"”]\s*$", re.S | re.M)
REWRITE = re.compile(
    r"\b(?:rewrit|rephras|paraphras|reword|reformulat|mutat|shorten|expand|crossover|combine"
    r"|similar|operator:)",
    re.I,
)
SCALE = re.compile(r"(\d+)\s*(?:to|-|and)\s*(\d+)")


class Models:
    """The models without a server: a request in, its reply out."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.target = behaviour.target()
        self.seen: Counter[bytes] = Counter()

    def reply(self, parsed: ParsedRequest, seen: int) -> Reply:
        """The reply to a request that was `seen` so many times before."""
        if parsed.kind == "embed":
            from batchwright.calls.simulator.ngrams import hashed_ngrams

            vectors = hashed_ngrams(parsed.inputs, parsed.dim or self.behaviour.dim)
            return Reply((), vectors, sum(map(_tokens, parsed.inputs)), 0)
        if parsed.tools:
            return self._call(parsed)
        texts, spent = [], 0
        for choice in range(parsed.choices):
            draw = (parsed.seed if parsed.exact else seen, choice)
            text, finish, tokens = self._say(parsed, draw)
            texts.append((text, finish))
            spent += tokens
        return Reply(texts, None, _tokens(parsed.system) + _tokens(parsed.prompt), spent)

    def _call(self, parsed: ParsedRequest) -> Reply:
        """A reply that calls functions, with arguments that fit their parameters."""
        calls = [
            (name, json.dumps(_fill({"type": "object", **schema}, parsed.prompt[:60], schema)))
            for name, schema in parsed.tools
        ]
        spent = sum(len(pieces_of(arguments)) + 1 for _, arguments in calls)
        asked = _tokens(parsed.system) + _tokens(parsed.prompt)
        texts = [("", "tool_calls")] * parsed.choices
        return Reply(texts, None, asked, spent * parsed.choices, calls)

    def _say(self, parsed: ParsedRequest, draw: object) -> tuple[str, str, int]:
        if parsed.protocol == "ollama" and not parsed.prompt:
            return "", "stop", 0
        text = answer(
            parsed.model,
            parsed.system,
            parsed.prompt,
            target=self.target,
            seed=self.behaviour.seed,
            words=self.behaviour.words,
            draw=draw,
        )
        if parsed.schema is not None:
            text = in_format(parsed.schema, text, f"{parsed.system}\n{parsed.prompt}")
        for mark in parsed.stop:
            text = text.partition(mark)[0] if mark else text
        pieces = pieces_of(text)
        limits = [one for one in (parsed.most_tokens, self.behaviour.context) if one is not None]
        if limits and len(pieces) > min(limits):
            return "".join(pieces[: min(limits)]), "length", min(limits)
        return text, "stop", len(pieces)

    @staticmethod
    def whole(parsed: ParsedRequest, reply: Reply, name: str, seconds: float) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        if parsed.protocol == "responses":
            return responses.whole(parsed, reply, name)
        return whole(parsed, reply, name, seconds)

    @staticmethod
    def events(parsed: ParsedRequest, reply: Reply, name: str, seconds: float) -> list[bytes]:
        """The events of a response that is streamed."""
        if parsed.protocol == "responses":
            return responses.events(parsed, reply, name)
        return events(parsed, reply, name, seconds)

    def respond_all(self, requests: Sequence[Request]) -> list[dict[str, Any]]:
        """Bodies in the OpenAI format, one per request; an unknown model is an error."""
        paths = {kind: path for path, (protocol, kind) in PATHS.items() if protocol == "openai"}
        paths["respond"] = "/v1/responses"
        found = []
        for request in requests:
            parsed = parse(paths[request.kind], request.data, self.behaviour.model_names)
            if isinstance(parsed, Refusal):
                raise ConfigError(parsed.message)
            seen = self.seen[parsed.key]
            self.seen[parsed.key] += 1
            plain = replace(parsed, stream=False, packed=False)
            found.append(self.whole(plain, self.reply(plain, seen), parsed.key.hex(), 0.0))
        return found


def answer(
    model: str, system: str, prompt: str, *, target: Target, seed: int, words: int, draw: object
) -> str:
    """What `model` says to the last message `prompt`, with the messages before it in `system`.

    `draw` distinguishes repeated draws of a random request.
    """
    everything = f"{system}\n\n{prompt}" if system else prompt
    role = _role(everything, prompt, target) if model == "sim" else model
    if role == "sim-mutator":
        found = questions_in(prompt, whole=bool(system))
        operator = operator_of(_without(found, everything))
        if operator == "crossover" and len(found) > 1:
            return mutate(operator, found[-2], found[-1], seed)
        return mutate(operator, found[-1], "", seed)
    if role == "sim-judge":
        return _judge(everything, seed)
    if role == "sim-qa":
        return target.reply(questions_in(prompt, whole=True)[-1])
    drawn = hashlib.blake2b(repr((seed, prompt, draw)).encode("utf-8", "surrogatepass")).digest()
    said = [STRANGE[drawn[place % 64] % len(STRANGE)] for place in range(max(1, words))]
    return f"{' '.join(prompt[:60].split())} -> {' '.join(said)}"


def questions_in(prompt: str, whole: bool = False) -> list[str]:
    """The questions in a prompt: after `Question:`, else in quotes, else its last line.

    With `whole`, a prompt without the marker is itself the question.

    >>> questions_in("Be brief.\\nQuestion: How far is Rome?\\nAnswer:")
    ['How far is Rome?']
    """
    if whole:
        return MARKED.findall(prompt) or INLINE.findall(prompt) or [prompt]
    last_line = prompt.strip().rpartition("\n")[2]
    return MARKED.findall(prompt) or QUOTED.findall(prompt) or INLINE.findall(prompt) or [last_line]


def operator_of(instruction: str) -> str:
    """The operator that an instruction names first, or `noop`.

    >>> operator_of("Rewrite it politely, in other words.")
    'politeness'
    """
    named = re.search(r"operator:\s*(\w+)", instruction, re.I)
    if named and named[1].lower() in OPERATOR_WORDS:
        return named[1].lower()
    hits = {name: hit.start() for name, p in PATTERNS.items() if (hit := p.search(instruction))}
    return min(hits, key=hits.__getitem__) if hits else "noop"


def in_format(schema: object, text: str, prompt: str) -> str:
    """`text` as the JSON that a request wants: an object, or what a JSON schema describes.

    >>> in_format("json", "hi", 'Answer as {"reply": "..."}')
    '{"reply": "hi"}'
    >>> in_format({"type": "object", "properties": {"n": {"type": "integer"}}}, "hi", "")
    '{"n": 0}'
    """
    if isinstance(schema, dict) and schema:
        return json.dumps(_fill(schema, text, schema))
    named = re.search(r'"(\w+)"\s*:', prompt)
    return json.dumps({named[1] if named else "answer": text})


def _role(everything: str, prompt: str, target: Target) -> str:
    """Which model a prompt to `sim` is meant for."""
    text = everything.lower()
    marked = ("question" in text or "query" in text) and INLINE.search(everything)
    if marked and REWRITE.search(_without(questions_in(everything), everything)):
        return "sim-mutator"
    if "Score:" in everything:
        return "sim-judge"
    if target.questions and target.recognise(questions_in(prompt, whole=True)[-1]):
        return "sim-qa"
    return "sim-judge" if "true or false" in text or "monitor" in text else "sim"


def _without(questions: Sequence[str], text: str) -> str:
    """The instruction alone: words inside a question name no operator."""
    for question in questions:
        text = text.replace(question, " ")
    return text


def _judge(prompt: str, seed: int) -> str:
    """A score on the prompt's own scale, or true or false.

    The score is the share of the reference's words in the response, where both are marked.
    A verdict counts yes and correct against incorrect. Otherwise both are drawn from the prompt.
    """
    if "Score:" not in prompt:
        text = (_section("reasoning|trace|response|text", prompt) or prompt).lower()
        # "incorrect" holds "correct": the second term takes that back and one more.
        balance = text.count("yes") + text.count("correct") - 2 * text.count("incorrect")
        yes = balance > 0 or (balance == 0 and uniform(seed, "verdict", text) < 0.5)
        return "true" if yes else "false"
    scale = SCALE.search(prompt)
    low, high = (int(scale[1]), int(scale[2])) if scale else (0, 10)
    reference = _section("reference|correct|expected", prompt)
    response = _section("response|candidate|given", prompt)
    if reference is None or response is None:
        share = uniform(seed, "score", prompt)
    else:
        wanted = set(TOKEN.findall(reference.lower()))
        share = len(wanted.intersection(TOKEN.findall(response.lower()))) / max(1, len(wanted))
    return f"Score: {low + round(share * (high - low))}"


def _section(names: str, prompt: str) -> str | None:
    """The text after the first line that begins with one of `names` and a colon."""
    hit = re.search(rf"^(?:{names})[\w ]{{0,20}}:\s*(.*?){END}", prompt, re.I | re.S | re.M)
    return hit[1] if hit else None


def _fill(schema: object, text: str, root: Mapping[str, Any]) -> Any:
    """A value that fits the common subset of JSON schema."""
    if not isinstance(schema, dict):
        return text
    if isinstance(named := schema.get("$ref"), str):
        return _fill(root.get("$defs", {}).get(named.rpartition("/")[2]), text, root)
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return _fill(choices[0], text, root)
    if choices := schema.get("enum"):
        return choices[int(uniform("enum", text) * len(choices))]
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "object":
        parts = schema.get("properties", {}).items()
        return {name: _fill(part, text, root) for name, part in parts}
    if kind == "array":
        return [_fill(schema.get("items"), text, root)] * schema.get("minItems", 1)
    least = schema.get("minimum", 0)
    return {"integer": int(least), "number": least, "boolean": True, "null": None}.get(kind, text)


def _tokens(text: str) -> int:
    """About four characters per token, as in English."""
    return (len(text) + 3) // 4
