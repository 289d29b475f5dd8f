"""Chat templates, rendered the way transformers renders them."""

import copy
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from batchwright.errors import BadRow, NoTokenizer, one_line

__all__ = ["PLAIN_TEMPLATE", "ChatTemplate", "Message", "Spans"]

Message = Mapping[str, Any]
Spans = list[tuple[int, int]]
"""Ranges of characters, each from its start up to but not including its end."""

REASONING = ("reasoning_content", "thinking", "reasoning")
"""What data sets call the reasoning of a turn. Templates read the first, gpt-oss the second."""

LONGEST_REASON = 300
"""Characters of what a template says when it refuses."""
RENDERED = "batchwright_rendered"
"""The variable of a rendering that holds its blocks so far, and the spans of its marks."""

PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>\n{{ message['content'] }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The template of the `bytes` tokenizer: each turn is its role on a line, the content and a
newline. The role markers are plain text, because bytes have no special tokens."""


class ChatTemplate:
    """One compiled template with the special tokens it may use.

    Templates come with downloaded tokenizers, so they run in Jinja's sandbox, see only the
    messages, and have limits on time and size.

    >>> chat = ChatTemplate(PLAIN_TEMPLATE)
    >>> chat.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    '<|user|>\\nHi\\n<|assistant|>\\n'
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._tokens = dict(tokens or {})
        self.marked = False
        self.options: dict[str, Any] = {}
        self.verified: dict[str, str] = {}
        self.later_ends: dict[bool, str] = {}
        self._jinja = self._environment()
        try:
            self._template = self._jinja.from_string(source)
        except Exception as error:
            # Broad on purpose: whatever a stranger's template does to the compiler. SyntaxError
            # and RecursionError are some of it.
            reason = one_line(error)[:LONGEST_REASON]
            raise NoTokenizer(f"the chat template is not valid Jinja: {reason}") from None

    def with_options(self, options: Mapping[str, Any]) -> "ChatTemplate":
        """The same template that is given more variables, as `chat_template_kwargs` has them."""
        other = copy.copy(self)
        other.options, other.verified, other.later_ends = {**self.options, **options}, {}, {}
        return other

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The text of a conversation; `BadRow` with the template's own message if it refuses."""
        return self.render_spans(
            messages, add_generation_prompt=add_generation_prompt, tools=tools
        )[0]

    def render_spans(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> tuple[str, Spans]:
        """The text, and the characters inside `{% generation %}` marks, as transformers counts.

        >>> marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}."
        >>> ChatTemplate(marked + "{% endfor %}").render_spans([{"role": "a", "content": "Hi"}])
        ('Hi.', [(0, 2)])
        """
        given = [_with_reasoning(message) for message in messages]
        try:
            return self._generated(given, add_generation_prompt, tools)
        except Exception as error:
            # Broad on purpose: a template is a program of somebody else's.
            reason = one_line(error)[:LONGEST_REASON]
            if tools is None and self._renders(given, add_generation_prompt, []):
                raise BadRow(
                    f"the chat template refuses rows without tools: {reason}; give the rows tools, "
                    f"or use a template that asks whether there are any"
                ) from None
            raise BadRow(f"the chat template refuses its messages: {reason}") from None

    def _renders(
        self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Any]
    ) -> bool:
        try:
            self._generated(messages, add_generation_prompt, tools)
        except Exception:
            # Broad as above; what it says is no better than what it said before.
            return False
        return True

    def _generated(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        tools: Sequence[Any] | None,
    ) -> tuple[str, Spans]:
        blocks: list[str] = []
        spans: Spans = []
        self._jinja.begin()
        for block in self._template.generate(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._tokens, **self.options},
            **{RENDERED: (blocks, spans)},
        ):
            blocks.append(block)  # noqa: PERF402 - marks count the blocks so far
        return "".join(blocks), spans

    def _environment(self) -> Any:
        import jinja2
        from jinja2.ext import Extension

        # Importing Jinja takes a tenth of a second, and only rows of messages need it.
        from batchwright.data.tokenizers.sandbox import LimitedEnvironment

        template = self

        class Generation(Extension):
            """Notes where the text between `{% generation %}` and its end stands."""

            tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

            def parse(self, parser: Any) -> Any:
                template.marked = True
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                block = jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body)
                return block.set_lineno(line)

            @jinja2.pass_context
            def _inside(self, context: Any, caller: Any) -> str:
                inside = str(caller())
                blocks, spans = context[RENDERED]
                start = sum(map(len, blocks))
                spans.append((start, start + len(inside)))
                return inside

        environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.add_filter("tojson", _tojson)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment


def _with_reasoning(message: Message) -> Message:
    """The message with its reasoning under the names that templates read."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if found is None:
        return message
    return {"thinking": found, **message, "reasoning_content": found}


def _raise_exception(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
