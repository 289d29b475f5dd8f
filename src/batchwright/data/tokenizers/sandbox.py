"""Jinja's sandbox with limits: a template of a stranger can neither hang nor fill the memory."""

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

__all__ = ["MOST_CHARACTERS", "MOST_S", "LimitedEnvironment", "TooMuch"]

MOST_S = 10.0
"""Seconds for one conversation; templates in use take milliseconds."""
MOST_CHARACTERS = 2**24
"""Of a text, or elements of a list, that a template makes: four million tokens."""
KEPT = 64
"""Results on the way may have so many times as many characters together: most are let go."""
SMALL = 64
"""Texts that are not worth counting: in its time a template does not make many enough."""
MOST_NUMBER = 10**6
"""The largest number that a filter or a method of a text is given, such as a width."""
MOST_VALUES = 10**6
"""In a nested list or object, each counted as often as it would be printed."""
PRINTING = frozenset({"string", "tojson", "pprint", "safe", "escape", "e", "forceescape"})
"""Filters that print whatever they are given."""
_WIDTH = re.compile(r"\d{6}|\*")


class TooMuch(TemplateError):
    """A template went on for too long, or made something too large."""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that transformers uses, with a clock in every loop and call.

    Operations whose result may be much larger than what they are given are measured before they
    are done, so that no single one takes long.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **settings: Any) -> None:
        super().__init__(finalize=self._printed, **settings)
        # Not of each thread: two that render at once only have a little more time together.
        self._until = float("inf")
        self._characters = 0
        # Words at random, any number of them.
        self.globals.pop("lipsum", None)
        # For HTML and for letters, in time that grows with the square of the text.
        for name in ("wordwrap", "urlize"):
            self.filters.pop(name, None)
        for name, function in list(self.filters.items()):
            # Builtins (abs, len) take nothing but the value.
            if hasattr(function, "__dict__"):
                self.add_filter(name, function)
        self.filters["batchwright_counted"] = self._counted
        self.filters["batchwright_joined"] = _joined
        self.filters["batchwright_literal"] = _literal

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """A filter that is measured: how long it takes, what it is given and what it makes."""
        # Some get the context or the environment before the value.
        first = int(hasattr(function, "jinja_pass_arg"))

        def filter(*args: Any, **keywords: Any) -> Any:
            self.check()
            _measure(name, args[first], args[first + 1 :], keywords)
            return self._kept(function(*args, **keywords))

        filter.__dict__.update(function.__dict__)
        self.filters[name] = filter

    def _kept(self, result: Any) -> Any:
        if isinstance(result, str) and len(result) > KEPT * SMALL:
            self.count(len(result) // KEPT)
            _refuse_over(len(result))
        return result

    def begin(self) -> None:
        """Start the clock of a rendering."""
        self._until = time.monotonic() + MOST_S
        self._characters = 0

    def check(self) -> None:
        """Raise if its time is over."""
        if time.monotonic() > self._until:
            raise TooMuch(f"it takes more than {MOST_S:g} s")

    def count(self, characters: int) -> None:
        """Add to what was printed, into a variable as well; raise if it has become too much."""
        self._characters += characters
        _refuse_over(self._characters)

    def _printed(self, value: Any) -> Any:
        if type(value) is not str:
            _refuse_nested(value)
            value = str(value)
        if len(value) > SMALL:
            self.count(len(value))
        return value

    def call(self, context: Any, obj: Any, *args: Any, **keywords: Any) -> Any:
        self.check()
        # The sandbox wraps `str.format`.
        obj_ = getattr(obj, "__wrapped__", obj)
        owner, name = getattr(obj_, "__self__", None), getattr(obj_, "__name__", "")
        if isinstance(owner, str):
            _measure(name, owner, args, keywords)
        return self._kept(super().call(context, obj, *args, **keywords))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            if type(left) is str and type(right) is str:
                # Two that are not too long make one that is found out here.
                return self._kept(left + right)
            if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                _refuse_over(len(left) + len(right))
                if not isinstance(left, str):
                    _refuse_nested((left, right))
        elif operator == "%":
            if isinstance(left, str):
                _measure("format", left, right if isinstance(right, tuple) else (right,), {})
        else:
            _measure_product(operator, left, right)
        return self._kept(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        return tree

    def _counted(self, items: Any, characters: int) -> Any:
        def check() -> None:
            self.check()
            self.count(characters)

        return _Counted(items, check)


class _Counted:
    """What a loop goes through, with a look at the clock for each item."""

    def __init__(self, items: Any, check: Callable[[], None]) -> None:
        self._items = items
        self._check = check
        if hasattr(items, "__len__"):
            # Instance attributes are not looked at by len(): `loop.length` would count a list.
            self.__class__ = _CountedSized

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self._check()
            yield item


class _CountedSized(_Counted):
    def __len__(self) -> int:
        return len(self._items)


class _Counting(NodeTransformer):
    """Puts the clock into loops, and measures what `~` joins."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        constant = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "batchwright_counted", nodes.Const(constant))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        inner = nodes.List(node.nodes, lineno=node.lineno)
        return _filtered(inner, "batchwright_joined")

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "batchwright_literal")

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "batchwright_literal")


def _filtered(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    assert isinstance(node, nodes.Expr)
    made = nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)
    made.environment = node.environment
    return made


def _literal(value: Any) -> Any:
    _refuse_nested(value)
    return value


def _refuse_nested(value: Any) -> None:
    """Raise if a value that holds another one twice, which does so again, is enormous."""
    seen, open_ = 0, [value]
    while open_:
        one = open_.pop()
        inner = one.values() if isinstance(one, dict) else one
        if isinstance(one, dict | list | tuple):
            seen += len(one)
            if seen > MOST_VALUES:
                raise TooMuch(f"it makes a list or object of more than {MOST_VALUES:,} values")
            open_.extend(part for part in inner if isinstance(part, dict | list | tuple))


def _joined(items: list[Any]) -> str:
    _refuse_nested(items)
    texts = [str(item) for item in items]
    _refuse_over(sum(map(len, texts)))
    return "".join(texts)


def _measure(name: str, value: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    """Raise if a method of a text, or the filter of the same name, would make too much."""
    for number in (*args, *keywords.values()):
        if type(number) is int and number > MOST_NUMBER:
            raise TooMuch(f"it calls {name} with {number:,}")
    if name == "join":
        parts = value if isinstance(value, list | tuple) else args[0] if args else ()
        glue = args[0] if value is parts and args else value
        if isinstance(parts, list | tuple):
            size = sum(len(one) for one in parts if isinstance(one, str))
            _refuse_over(size + len(parts) * (len(glue) if isinstance(glue, str) else 0))
    elif name == "replace" and isinstance(value, str) and len(args) > 1:
        old, new = str(args[0]), str(args[1])
        _refuse_over(len(value) + value.count(old) * len(new))
    elif name in ("format", "format_map") and isinstance(value, str):
        if _WIDTH.search(value):
            raise TooMuch("it formats a text to a width of many characters")
        given = (*args, *keywords.values())
        _refuse_nested(given)
        longest = max((len(one) for one in given if isinstance(one, str)), default=0)
        _refuse_over((value.count("{") + value.count("%")) * longest)
    elif name in PRINTING:
        _refuse_nested(value)


def _measure_product(operator: str, left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int):
            _refuse_over(len(one) * other)
    if isinstance(left, int) and isinstance(right, int):
        bits = (
            left.bit_length() * right
            if operator == "**"
            else left.bit_length() + right.bit_length()
        )
        if bits > MOST_NUMBER:
            raise TooMuch("it makes a number of many digits")


def _refuse_over(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise TooMuch(f"it makes a text or list of {size:,}")
