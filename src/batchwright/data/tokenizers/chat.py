"""Chat templates, rendered the way transformers renders them."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from batchwright.errors import BadRow, NoTokenizer, one_line

__all__ = ["PLAIN_TEMPLATE", "ChatTemplate", "Message"]

Message = Mapping[str, Any]

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

    Templates come with downloaded tokenizers, so they run in Jinja's sandbox and see only the
    messages.

    >>> chat = ChatTemplate(PLAIN_TEMPLATE)
    >>> chat.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    '<|user|>\\nHi\\n<|assistant|>\\n'
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        # Importing Jinja takes a tenth of a second, and only rows of messages need it.
        from jinja2 import TemplateError

        self.source = source
        self._tokens = dict(tokens or {})
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise NoTokenizer(f"the chat template is not valid Jinja: {one_line(error)}") from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The text of a conversation; `BadRow` with the template's own message if it refuses."""
        from jinja2 import TemplateError

        try:
            text: str = self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise BadRow(f"the chat template refuses its messages: {one_line(error)}") from None
        return text


def _environment() -> Any:
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """Ignores `{% generation %}` tags; assistant turns are located by other means."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(
                line
            )

        def _inside(self, caller: Any) -> str:
            return str(caller())

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # Jinja's own filter escapes HTML, which models were not trained on.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
