"""Which columns hold text that a model may be meant to learn: by their names, or by their words."""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

__all__ = ["is_text", "strings"]

MANY_WORDS = 20
"""A text of so many words is not the name of a source, a topic or a licence."""
SENTENCE = 3
"""Texts of a list count from so many spaces on: shorter ones are tags."""

TEXTS = {
    *("input_ids", "loss_mask", "completion_mask", "assistant_masks", "labels"),
    *("messages", "conversations", "conversation", "chosen", "rejected", "text", "content"),
    *("prompt", "completion", "completions", "instruction", "instructions", "input", "output"),
    *("question", "answer", "answers", "query", "response", "responses", "solution", "targets"),
    *("system", "system_prompt", "system_message", "context", "passage", "passages", "article"),
    *("document", "documents", "background", "examples", "demonstrations", "few_shot"),
    *("history", "chat_history", "conversation_history", "dialog", "dialogue", "turns"),
    *("reasoning", "reasoning_content", "reasoning_trace", "rationale", "explanation", "cot"),
    *("chain_of_thought", "thinking", "think", "thought", "thoughts", "final_answer", "gold"),
    *("canonical_solution", "target", "reply", "assistant", "summary", "highlights"),
    *("rejected_response", "prefix", "suffix", "candidates", "choices", "distractors", "options"),
    *("tools", "functions", "audio", "audios", "image", "images", "video", "videos"),
    *("提示", "指令", "问题", "問題", "输入", "輸入", "输出", "輸出", "回答", "答案", "上下文"),
    *("对话", "對話", "思考", "解答", "質問", "質問文", "応答", "指示", "入力", "出力", "文脈"),
    *("질문", "답변", "지시", "입력", "출력"),
}
"""Names of columns that hold what a model is trained on, in the data sets people have."""

LAST_WORDS = {
    *("answer", "answers", "response", "responses", "completion", "completions", "reply"),
    *("solution", "solutions", "rationale", "explanation", "reasoning", "thinking", "thoughts"),
    *("cot", "trace", "prompt", "question", "instruction", "instructions", "context", "passage"),
    *("conversation", "conversations", "dialogue", "dialog", "messages", "summary", "history"),
    *("output", "completions", "gold"),
}
"""Last words of names of such columns, as in `generated_solution` and `gpt_answer`."""

ENDING = re.compile(r"_?(\d+|zh|en|de|fr|es|ja|ko|ru|pt|it|ar|hi|vi|th|cn|jp|kr|tw|zh_cn|zh_tw)$")
"""A language or a number behind a name: `context_zh`, `answer2`."""

SHORT_WORDS = re.compile("[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")
"""Characters of Chinese and Japanese, which write no spaces; a word has about two."""
LONG_WORDS = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u0f00-\u0fff]")
"""Those of Thai, Lao, Burmese, Khmer and Tibetan; a word has about four."""


def is_text(name: str, value: Any) -> bool:
    """Whether a column holds what a model is trained on: by its name, or by its many words."""
    if value in (None, "", [], {}) or isinstance(value, bool | int | float):
        return False
    return _is_name(name, isinstance(value, str)) or _words(value) >= MANY_WORDS


@lru_cache(4096)
def _is_name(name: str, of_text: bool) -> bool:
    """Whether a column is called like one of text; longer names tell only of a plain text."""
    parted = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name).strip())
    plain = re.sub(r"[\s.-]+", "_", parted).lower()
    bare = ENDING.sub("", plain)
    if {plain, bare, plain.replace("_", "")} & TEXTS:
        return True
    return of_text and bare.rpartition("_")[2] in LAST_WORDS


def _words(value: Any) -> int:
    """The words of a text, or of the sentences of a list; of several, those that has the most."""
    most, left = 0, [value]
    while left:
        inner = left.pop()
        if isinstance(inner, str):
            most = max(most, _spaces(inner))
        elif isinstance(inner, Mapping):
            # An object describes a row with many short texts, each of which counts alone.
            left += inner.values()
        elif isinstance(inner, Sequence):
            spaces = [_spaces(one) for one in inner if isinstance(one, str)]
            most = max(most, sum(count + 1 for count in spaces if count >= SENTENCE))
            left += [one for one in inner if isinstance(one, list | tuple | Mapping)]
    return most


def _spaces(text: str) -> int:
    """The spaces of a text, and those that other scripts would have."""
    count = text.count(" ") + text.count("\n")
    if not text.isascii():
        count += len(SHORT_WORDS.findall(text)) // 2 + len(LONG_WORDS.findall(text)) // 4
    return count


def strings(value: Any) -> list[str]:
    """All texts in a value in their order, however deep."""
    if isinstance(value, str):
        return [value]
    found, left = [], [value]
    while left:
        inner = left.pop()
        if isinstance(inner, str):
            found.append(inner)
        elif isinstance(inner, Mapping):
            left += reversed([*inner.values()])
        elif isinstance(inner, Sequence):
            left += reversed(inner)
    return found
