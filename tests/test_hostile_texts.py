"""Templates, patterns and responses that were made to hang, or to fill the memory."""

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchwright.calls.simulator.wire import Refusal, parse
from batchwright.data.tokenizers import chat as chat_module
from batchwright.data.tokenizers import sandbox
from batchwright.data.tokenizers.chat import ChatTemplate
from batchwright.errors import BadRow, ConfigError, NoTokenizer
from batchwright.rewards import rules
from batchwright.rewards.reward import Response
from batchwright.rewards.rules import Contains, Numeric, Pattern, tagged_list

MESSAGES = [{"role": "user", "content": "Hi"}]
GROWING = "{% set ns = namespace(x=START) %}{% for i in range(60) %}STEP{% endfor %}{{ ns.x }}"


def growing(start: str, step: str) -> str:
    return GROWING.replace("START", start).replace("STEP", f"{{% set ns.x = {step} %}}")


HOSTILE = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "product": "{{ 'a' * 10**11 }}",
    "list product": "{{ [1] * 10**11 }}",
    "power": "{{ 10 ** 10000000 }}",
    "old format": "{{ '%09999999999d' % 1 }}",
    "star format": "{{ '%*d' % (9999999999, 1) }}",
    "new format": "{{ '{:>9999999999}'.format(1) }}",
    "center filter": "{{ 'a'|center(10**10) }}",
    "center": "{{ 'a'.center(10**10) }}",
    "indent": "{{ 'a\nb'|indent(10**10) }}",
    "json indent": "{{ messages|tojson(indent=10**9) }}",
    "words": "{{ lipsum(10**9) }}",
    "slice": "{% for x in [1]|slice(10**9) %}{% endfor %}",
    "batch": "{{ [1]|batch(10**9, 'x')|list }}",
    "map": "{{ range(99999)|map('center', 900000)|list|length }}",
    "output": "{% for a in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
    "captured": "{% set x %}{% for a in range(99999) %}" + "A" * 9999 + "{% endfor %}{% endset %}",
    "plus": growing("'ab'", "ns.x + ns.x"),
    "tilde": growing("'ab'", "ns.x ~ ns.x"),
    "replace": growing("'ab'", "ns.x|replace('a', 'aab')"),
    "replace method": growing("'ab'", "ns.x.replace('', 'aab')"),
    "join": growing("'ab'", "[ns.x, ns.x]|join"),
    "join method": growing("'ab'", "'x'.join([ns.x, ns.x])"),
    "percent": growing("'ab'", "'%s%s' % (ns.x, ns.x)"),
    "format": growing("'ab'", "'{}{}'.format(ns.x, ns.x)"),
    "lists": growing("[1]", "ns.x + ns.x"),
    "nested lists": growing("[1]", "[ns.x, ns.x]"),
    "nested objects": growing("[1]", "{'a': ns.x, 'b': ns.x}"),
    "squares": growing("3", "ns.x * ns.x"),
    "set block": GROWING.replace("START", "'ab'").replace(
        "STEP", "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
    ),
    "division": "{{ 1 / 0 }}",
    "escape": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
}  # fmt: skip
BROKEN = {
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep loops": "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    "no end": "{% for a in b %}",
}


@contextlib.contextmanager
def processor_seconds(most: float) -> Iterator[None]:
    """Fail after so much work of this process, however busy the machine is."""

    def over(number: int, frame: object) -> None:
        raise AssertionError(f"it takes more than {most} s of the processor")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_no_template_hangs_or_fills_the_memory(monkeypatch):
    monkeypatch.setattr(sandbox, "MOST_S", 0.3)
    before = _peak_mb()
    for name, source in HOSTILE.items():
        template = ChatTemplate(source)
        with processor_seconds(20), pytest.raises(BadRow, match="chat template refuses") as error:
            template.render(MESSAGES, add_generation_prompt=False)
        assert len(str(error.value)) < 500, name
    for source in BROKEN.values():
        with processor_seconds(20), pytest.raises(NoTokenizer, match="not valid Jinja"):
            ChatTemplate(source)
    assert _peak_mb() - before < 1000


def _peak_mb() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def test_limits_change_nothing_for_a_template_that_keeps_to_them():
    """As plain Jinja renders it: loops with their counters, joined texts, filters, numbers."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = (
        "{% macro turn(m, i) %}<{{ m.role }} {{ i ~ ':' ~ m.content|trim }}>{% endmacro %}"
        "{% for m in messages %}{{ turn(m, loop.index) }}{{ loop.length - loop.revindex0 }}"
        "{% if loop.last %}last{% else %},{{ loop.nextitem.role }}{% endif %}"
        "{% for k, v in m.items()|sort if v %}{{ k }}={{ v|upper }};{% endfor %}{% endfor %}"
        "{{ [1, 2.5, none, true, {'a': [1]}] }}{{ {'b': 2} }}{{ nothing }}{{ 'x' * 3 + 'y' }}"
        "{{ '%s-%03d' % ('a', 7) }}{{ '{:>4}'.format('b') }}{{ [3, 1]|sort|join('+') }}"
        "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i ** 2 %}"
        "{% endfor %}{{ ns.n }}{% for x in missing %}{% else %}none{% endfor %}"
        "{{ messages|length }}"
        "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
    )
    messages = [{"role": r, "content": f" {r} says é\n"} for r in ("system", "user", "assistant")]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    wanted = plain.from_string(source).render(messages=messages)
    assert ChatTemplate(source).render(messages, add_generation_prompt=False) == wanted
    assert chat_module.PLAIN_TEMPLATE


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(?:a|aa)+$", r"(.*a){20}b", r"\s*\s*\s*x$"])
def test_a_pattern_that_backtracks_for_ever_is_an_outcome_and_not_a_hang(pattern, monkeypatch):
    monkeypatch.setattr(rules, "MOST_PATTERN_S", 0.2)
    rule = Pattern(pattern=pattern)
    for text in ("a" * 2**20 + "!", " " * 2**20 + "!", "a " * 2**19 + "!"):
        with processor_seconds(30):
            part = rule.part_of(Response(text), ())
        # Some engines see that it cannot match; none may take long to.
        assert part.value == 0.0 if part.valid else part.why == "pattern_timeout"


def test_patterns_match_as_those_of_python_do():
    import re

    cases = [
        (r"#### (\d+)$", "so #### 12"),
        (r"(?i)score:\s*(\d+)", "Score: 7, SCORE: 8"),
        (r"\bno\b", "nothing"),
        (r"^a|b$", "cab\nab"),
        (r"(?m)^\d+$", "1\n2x\n3"),
        (r"(a)|b", "bab"),
        (r"é", "É é"),
    ]
    for pattern, text in cases:
        assert rules.compile_pattern(pattern).findall(text) == re.findall(pattern, text), pattern
    with pytest.raises(ConfigError, match="not a regular expression"):
        rules.compile_pattern("(")


REPEATED = """<answer> </answer> \\boxed{ \\boxed { ( 1, #### ####1 $ $$ \\( \\[ ** ^2 [ ] <m>[
\\frac{ \\text{and} = 1/ . ... \\overline{3} % <| |> -1- twenty- answer: - _ ` " \\left( 0.333"""


def test_rules_read_hostile_responses_in_linear_time():
    spaced = [f"{word} " for word in REPEATED.split()] + [" ", "\n", " \n", "the answer is ", "1 "]
    for word in [*REPEATED.split(), *spaced]:
        text = word * (20_000 // len(word))
        with processor_seconds(20):
            for read in (Numeric().part_of, Contains().part_of):
                read(Response(text, "12 and 13"), ())
            tagged_list(text, "m")


@pytest.mark.parametrize("word", ["$", "$1$ ", r"\(1\) ", r"\[1\],", "$x$", "$$1$$ and "])
def test_a_megabyte_of_formulas_is_read_in_linear_time(word):
    with processor_seconds(30):
        part = Numeric().part_of(Response(word * (2**20 // len(word)), "1"), ())
    assert part.value == 0.0 or not part.valid


def test_a_formula_that_is_never_closed_does_not_hide_the_next():
    part = Numeric().part_of(Response(r"We try \[ x + 1, no: \[ 12 \] is it.", "12"), ())
    assert part.value == 1.0


def test_the_clock_of_a_template_starts_with_each_rendering(monkeypatch):
    monkeypatch.setattr(sandbox, "MOST_S", 0.2)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    for _ in range(3):
        time.sleep(0.15)
        assert template.render(MESSAGES, add_generation_prompt=False) == "Hi"


DEEP = "[" * 100_000 + "]" * 100_000

NESTED = {
    "a row": ("data lengths build -d x -t bytes -o out.jsonl -q", "x", '{"text": DEEP}\n'),
    "tools of a row": (
        "data lengths build -d x -t bytes -o out.jsonl -q",
        "x",
        '{"messages": [{"role": "user", "content": "Hi"}], "tools": "DEEP"}\n',
    ),
    "a length cache": ("data lengths stats -c x", "x", "DEEP\n"),
    "a plan": ("data batchplan info -p x", "x/manifest.json", "DEEP"),
    "a prompt": (
        "calls run -i x -o out.jsonl -e http://127.0.0.1:9/v1 -m m -q",
        "x",
        '{"prompt": "Hi", "parameters": {"tools": DEEP}}\n',
    ),
    "the responses of an earlier run": (
        "calls run -i prompts.jsonl -o x -e http://127.0.0.1:9/v1 -m m -q",
        "x",
        '{"id": 0, "text": DEEP}\n',
    ),
    "a reward's settings": (
        "reward score -i prompts.jsonl -c x -o out.jsonl -q",
        "x",
        "part = DEEP\n",
    ),
    "a row to score": (
        "reward score -i x -c reward.toml -o out.jsonl -q",
        "x",
        '{"response": "1", "ground_truth": DEEP}\n',
    ),
    "a run's settings": ("train sft --resume x", "x/config.toml", "data = DEEP\n"),
    "questions": ("calls simulate --questions x --port 0", "x", '{"question": DEEP}\n'),
}


@pytest.mark.parametrize("name", NESTED)
def test_what_is_nested_100_000_deep_is_refused_in_one_sentence(name, call, tmp_path):
    line, file, text = NESTED[name]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Hi"}\n')
    (tmp_path / "reward.toml").write_text('[[part]]\nkind = "numeric"\n')
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text.replace("DEEP", DEEP))

    done = call(line, tmp_path)

    assert done.code == 1, done.out
    assert done.err.count("\n") == 1, done.err[:500]
    assert len(done.err) < 500
    assert "internal error" not in done.err


def test_a_body_nested_100_000_deep_is_a_bad_request():
    for path in ("/v1/chat/completions", "/v1/responses", "/api/chat"):
        refused = parse(path, b'{"model": "m", "messages": %b}' % DEEP.encode(), ["m"])
        assert isinstance(refused, Refusal)
        assert refused.status == 400
