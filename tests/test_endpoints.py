"""Addresses mean what they say, and answers are read the same whatever protocol they came by."""

import base64
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.calls import (
    Done,
    Endpoint,
    Failed,
    Kind,
    Usage,
    chat,
    complete,
    embed,
    parse_model,
    respond,
)
from batchwright.calls.outcome import read_body
from batchwright.calls.wire import ollama as ollama_wire
from batchwright.calls.wire import openai as openai_wire
from batchwright.calls.wire.masking import Mask
from batchwright.calls.wire.openai import retry_after_s, scrub
from batchwright.errors import ConfigError

ADDRESSES = {
    "http://gpu0:8000/v1": ("openai", "http://gpu0:8000/v1", None),
    "http://gpu0:8000": ("openai", "http://gpu0:8000/v1", None),
    "http://gpu0:8000/": ("openai", "http://gpu0:8000/v1", None),
    "https://api.example.com/openai/v1/": ("openai", "https://api.example.com/openai/v1", None),
    "http://[::1]:8000": ("openai", "http://[::1]:8000/v1", None),
    "ollama://gpu0": ("ollama", "http://gpu0:11434", None),
    "ollama://gpu0:99": ("ollama", "http://gpu0:99", None),
    "ollama+https://gpu0:99/x": ("ollama", "https://gpu0:99/x", None),
    "unix:///run/llm.sock": ("openai", "http://localhost/v1", "/run/llm.sock"),
    "ollama+unix:///run/o.sock": ("ollama", "http://localhost", "/run/o.sock"),
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_addresses_are_read(address):
    endpoint = Endpoint(address)

    assert (endpoint.protocol, endpoint.base, endpoint.socket) == ADDRESSES[address]
    # Its own name leads to the same place.
    again = Endpoint(endpoint.name)
    assert (again.protocol, again.base, again.socket) == ADDRESSES[address]


@pytest.mark.parametrize(
    "address",
    [
        *("gpu0:8000", "ftp://gpu0", "http://", "unix://", "unix://host/x", "local:", ""),
        *("http://user:s3cr3t@gpu0", "http://gpu0?key=1", "http://gpu0:port", "http://gpu0#m"),
    ],
)
def test_other_addresses_are_refused_in_a_sentence_without_passwords(address):
    with pytest.raises(ConfigError) as caught:
        Endpoint(address)

    assert "s3cr3t" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_models_have_one_word_names(monkeypatch):
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    cases = {
        "ollama:qwen2.5:3b": ("http://localhost:11434", "qwen2.5:3b"),
        "qwen2.5:3b": ("http://localhost:11434", "qwen2.5:3b"),
        "hf.co/someone/some-model:Q4_K_M": (
            "http://localhost:11434",
            "hf.co/someone/some-model:Q4_K_M",
        ),
        "http://h:1/v1#org/judge": ("http://h:1/v1", "org/judge"),
        "ollama://h#m": ("http://h:11434", "m"),
        "local:smollm2": ("smollm2", "smollm2"),
    }
    for text, (base, name) in cases.items():
        endpoint, model = parse_model(text)
        assert (endpoint.base, model) == (base, name)
    monkeypatch.setenv("OLLAMA_HOST", "gpu7:4000")
    assert parse_model("ollama:m")[0].base == "http://gpu7:4000"
    assert parse_model("m:1b")[0].base == "http://gpu7:4000"
    as_ollama_reads_it = {
        "": "http://localhost:11434",
        "0.0.0.0": "http://0.0.0.0:11434",
        ":4000": "http://localhost:4000",
        "http://gpu7": "http://gpu7:80",
        "https://gpu7/models": "https://gpu7:443/models",
        "http://[::1]:4000": "http://[::1]:4000",
    }
    for host, base in as_ollama_reads_it.items():
        monkeypatch.setenv("OLLAMA_HOST", host)
        assert parse_model("m:1b")[0].base == base
    for wrong in ("gpt", "ollama:", "http://h:1/v1", "#m"):
        with pytest.raises(ConfigError, match="cannot parse"):
            parse_model(wrong)


def test_keys_come_from_the_environment_only(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")
    monkeypatch.setenv("OTHER", "sk-2")

    assert Endpoint("https://h").api_key() == "sk-1"
    assert Endpoint("https://h", key_env="OTHER").api_key() == "sk-2"
    assert Endpoint("https://h", key_env="").api_key() is None
    assert "sk-" not in repr(Endpoint("https://h"))
    monkeypatch.delenv("OPENAI_API_KEY")
    assert Endpoint("https://h").api_key() is None
    with pytest.raises(ConfigError, match="UNSET"):
        Endpoint("http://h", key_env="UNSET").api_key()


@pytest.mark.parametrize(
    "address",
    [
        *("http://localhost:8000", "http://api.example.com/v1", "unix:///run/llm.sock"),
        *("ollama://h", "ollama+https://h", "local:smollm2"),
    ],
)
def test_the_usual_key_goes_to_https_only_unless_it_is_named(address, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1")

    assert Endpoint(address).api_key() is None
    assert Endpoint(address, key_env="OPENAI_API_KEY").api_key() == "sk-1"


def test_what_is_sent_to_an_openai_server_is_the_body_and_nothing_else():
    request = chat("m", "hello", temperature=0, logit_bias={"50256": -100}, top_k=3)
    path, data = openai_wire.encode(request)

    assert path == "/chat/completions"
    assert json.loads(data) == request.body


def test_ollama_says_the_same_in_its_own_words():
    request = chat(
        "m",
        [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is this?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
                ],
            },
        ],
        max_tokens=5,
        stop="END",
        seed=3,
        response_format={"type": "json_object"},
        keep_alive="5m",
    )
    path, data = ollama_wire.encode(request)

    assert path == "/api/chat"
    assert json.loads(data) == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "what is this?", "images": ["AAAA"]},
        ],
        "options": {"num_predict": 5, "stop": ["END"], "seed": 3},
        "format": "json",
        "keep_alive": "5m",
        "stream": False,
    }
    path, data = ollama_wire.encode(complete("m", "once", max_tokens=2))
    assert path == "/api/generate"
    assert json.loads(data)["raw"] is True
    assert json.loads(data)["options"] == {"num_predict": 2}
    assert json.loads(ollama_wire.encode(embed("m", ["a", "b"]))[1])["input"] == ["a", "b"]


@pytest.mark.parametrize("word", ["logit_bias", "service_tier", "n", "user"])
def test_what_ollama_cannot_say_is_refused_and_not_left_out(word):
    with pytest.raises(ConfigError, match=word):
        ollama_wire.encode(chat("m", "x", **{word: 2}))


@given(st.text(min_size=1).filter(lambda t: not t.isspace()), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_both_protocols_give_equal_outcomes(text, asked, said):
    request = chat("m", "q")
    usage = {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "finish_reason": "stop",
    }
    body = {"model": "m", "object": "chat.completion", "choices": [choice], "usage": usage}
    theirs = {"model": "m", "message": {"role": "assistant", "content": text}, "done": True}
    theirs |= {"done_reason": "stop", "prompt_eval_count": asked, "eval_count": said}

    by_openai = openai_wire.decode(request, 200, {}, json.dumps(body).encode())
    by_ollama = ollama_wire.decode(request, 200, {}, json.dumps(theirs).encode())

    assert isinstance(by_openai, Done)
    assert by_openai.text == text
    assert by_openai == by_ollama


@given(st.binary(max_size=200), st.sampled_from([200, 200, 200, 404, 429, 500, 503]))
@settings(max_examples=100, deadline=None)
def test_no_bytes_can_make_reading_fail_or_pass_for_an_answer(body, status):
    for request in (chat("m", "q"), complete("m", "q"), embed("m", "q")):
        for wire in (openai_wire, ollama_wire):
            assert isinstance(wire.decode(request, status, {}, body), Failed)


FIELDS = [
    *("choices", "message", "content", "text", "data", "embedding", "index", "usage", "error"),
    *("finish_reason", "response", "embeddings", "prompt_tokens"),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
@settings(max_examples=100, deadline=None)
def test_no_json_can_make_reading_raise_and_an_answer_always_has_something(body):
    raw = json.dumps(body).encode()
    for request in (chat("m", "q"), complete("m", "q"), embed("m", "q")):
        for wire in (openai_wire, ollama_wire):
            outcome = wire.decode(request, 200, {}, raw)
            if isinstance(outcome, Done):
                assert outcome.text.strip() or request.kind != "chat"
                assert request.kind != "embed" or outcome.vectors[0]


def test_vectors_must_be_as_many_as_the_texts():
    def rows(*indices):
        return json.dumps({"data": [{"index": i, "embedding": [0.5]} for i in indices]}).encode()

    request = embed("m", ["a", "b"])
    assert openai_wire.decode(request, 200, {}, rows(1, 0)).vectors == [[0.5], [0.5]]
    for wrong in (rows(0), rows(0, 0), rows(0, 1, 2), b'{"data": [{"embedding": []}]}'):
        assert not openai_wire.decode(request, 200, {}, wrong)


def test_tool_calls_are_an_answer_without_text():
    message = {"content": None, "tool_calls": [{"id": "1"}]}
    body = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    done = openai_wire.decode(chat("m", "q"), 200, {}, json.dumps(body).encode())

    assert done
    assert (done.text, done.finish) == ("", "tool_calls")


def choice_of(kind, text, **more):
    said = {"message": {"role": "assistant", "content": text}} if kind == "chat" else {"text": text}
    return json.dumps({"choices": [{"index": 0, **said, **more}]}).encode()


@pytest.mark.parametrize("request_of", [chat, complete])
def test_a_response_that_was_broken_off_is_a_failure_whatever_text_there_is(request_of):
    request = request_of("m", "q")
    # OpenRouter's form of a provider that failed in the middle, vLLM's and SGLang's of an abort.
    broken = {"code": 502, "message": "Provider disconnected"}
    for more, kind, said in (
        ({"finish_reason": "error", "error": broken}, Kind.HTTP_5XX, "Provider disconnected"),
        ({"finish_reason": "stop", "error": broken}, Kind.HTTP_5XX, "Provider disconnected"),
        ({"finish_reason": "error"}, Kind.TRUNCATED, "broke the response off"),
        ({"finish_reason": "abort"}, Kind.TRUNCATED, "broke the response off"),
        ({"finish_reason": "error", "error": {"message": "gone"}}, Kind.BAD_BODY, "gone"),
        ({"error": {"code": 429, "message": "slow down"}}, Kind.RATE_LIMITED, "slow down"),
    ):
        failed = openai_wire.decode(request, 200, {}, choice_of(request.kind, "half of", **more))
        assert isinstance(failed, Failed), more
        assert failed.kind is kind
        assert said in failed.error
    whole = json.loads(choice_of(request.kind, "half of", finish_reason="stop"))
    body = json.dumps({**whole, "error": {"code": 500, "message": "overheated"}}).encode()
    failed = openai_wire.decode(request, 200, {}, body)
    assert (failed.kind, "overheated" in failed.error) == (Kind.HTTP_5XX, True)
    for fine in ({"finish_reason": "stop", "error": None}, {"finish_reason": "length"}, {}):
        assert openai_wire.decode(request, 200, {}, choice_of(request.kind, "all", **fine))


def test_waits_are_read_in_all_their_forms():
    now = 1_700_000_000.0
    date = "Tue, 14 Nov 2023 22:13:30 GMT"

    assert retry_after_s({"Retry-After": "3"}) == 3
    assert retry_after_s({"retry-after-ms": "250", "Retry-After": "3"}) == 0.25
    assert retry_after_s({"Retry-After": date}, now) == 10
    assert retry_after_s({"Retry-After": date}, now + 60) == 0
    for wrong in ("soon", "-1", "nan", "inf", ""):
        assert retry_after_s({"Retry-After": wrong}) is None
    assert retry_after_s({}) is None


@pytest.mark.parametrize(
    ("status", "said", "headers", "kind"),
    [
        (429, "slow down", {}, Kind.RATE_LIMITED),
        (429, "insufficient_quota: check your billing", {}, Kind.RATE_LIMITED),
        (503, "server busy, please try again. maximum pending requests", {}, Kind.RATE_LIMITED),
        (503, "x", {"Retry-After": "1"}, Kind.RATE_LIMITED),
        (503, "no healthy upstream", {}, Kind.HTTP_5XX),
        (529, "x", {}, Kind.RATE_LIMITED),
        (408, "x", {}, Kind.TIMEOUT),
        (400, "context too long", {}, Kind.HTTP_4XX),
        (500, "x", {}, Kind.HTTP_5XX),
    ],
)
def test_refusals_have_their_kinds(status, said, headers, kind):
    body = json.dumps({"error": {"message": said}}).encode()
    failed = openai_wire.decode(chat("m", "q"), status, headers, body)

    assert (failed.kind, failed.status) == (kind, status)
    assert said[:20] in failed.error


def google(message: str, **more: object) -> list[object]:
    error = {"code": 429, "message": message, "status": "RESOURCE_EXHAUSTED", **more}
    return [{"error": error}]


# Bodies that somebody saw and reported, with the place; ids and the ends of long texts are cut.
RECORDED = {
    # github.com/Pythagora-io/gpt-pilot/issues/340
    "OpenAI, no credit": (
        429,
        {
            "error": {
                "message": "You exceeded your current quota, please check your plan and billing "
                "details.",
                "type": "insufficient_quota",
                "param": None,
                "code": "insufficient_quota",
            }
        },
        Kind.HTTP_4XX,
    ),
    # github.com/Chanzhaoyu/chatgpt-web/issues/1273
    "OpenAI, account not active": (
        429,
        {
            "error": {
                "message": "Your account is not active, please check your billing details on our "
                "website.",
                "type": "billing_not_active",
                "param": None,
                "code": None,
            }
        },
        Kind.HTTP_4XX,
    ),
    # github.com/openai/codex/issues/88
    "OpenAI, tokens a minute": (
        429,
        {
            "error": {
                "message": "Rate limit reached for o4-mini in organization org-1 on tokens per min "
                "(TPM): Limit 200000, Used 162960, Requested 42288. Please try again in 1.574s.",
                "type": "tokens",
                "param": None,
                "code": "rate_limit_exceeded",
            }
        },
        Kind.RATE_LIMITED,
    ),
    # github.com/Trae-AI/TRAE/issues/625
    "Anthropic": (
        429,
        {
            "type": "error",
            "error": {
                "type": "rate_limit_error",
                "message": "This request would exceed the rate limit for your organization (---) "
                "of 20,000 input tokens per minute.",
            },
        },
        Kind.RATE_LIMITED,
    ),
    # github.com/FoundationAgents/OpenManus/issues/746
    "Anthropic, at its OpenAI address": (
        429,
        {
            "error": {
                "code": "rate_limit_error",
                "message": "This request would exceed the rate limit for your organization of "
                "20,000 input tokens per minute.",
                "type": "invalid_request_error",
                "param": None,
            }
        },
        Kind.RATE_LIMITED,
    ),
    # github.com/anthropics/claude-code/issues/4207
    "Anthropic, no credit": (
        400,
        {
            "type": "error",
            "error": {
                "type": "invalid_request_error",
                "message": "Your credit balance is too low to access the Anthropic API. Please go "
                "to Plans & Billing to upgrade or purchase credits.",
            },
        },
        Kind.HTTP_4XX,
    ),
    # github.com/RooCodeInc/Roo-Code/issues/3883, in the list of page-assist/issues/406
    "Gemini": (
        429,
        google(
            "You exceeded your current quota, please check your plan and billing details.",
            details=[
                {
                    "@type": "type.googleapis.com/google.rpc.QuotaFailure",
                    "violations": [
                        {"quotaId": "GenerateContentInputTokensPerModelPerMinute-FreeTier"}
                    ],
                },
                {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "26s"},
            ],
        ),
        Kind.RATE_LIMITED,
    ),
    # github.com/n4ze3m/page-assist/issues/406
    "Gemini, in short": (
        429,
        google("Resource has been exhausted (e.g. check quota)."),
        Kind.RATE_LIMITED,
    ),
    # github.com/cline/cline/issues/651
    "Vertex": (
        429,
        google(
            "Quota exceeded for aiplatform.googleapis.com/online_prediction_requests_per_base_"
            "model with base model: anthropic-claude-3-5-sonnet-v2. Please submit a quota "
            "increase request."
        ),
        Kind.RATE_LIMITED,
    ),
    # github.com/microsoft/copilot-camp/issues/551
    "Azure": (
        429,
        {"error": {"code": "429", "message": "Rate limit is exceeded. Try again in 2 seconds."}},
        Kind.RATE_LIMITED,
    ),
    # github.com/jasonacox/TinyLLM/issues/17; others of this text name aka.ms/oai/quotaincrease
    "Azure, tokens": (
        429,
        {
            "error": {
                "code": "429",
                "message": "Requests to the ChatCompletions_Create Operation under Azure OpenAI "
                "API version 2023-05-15 have exceeded token rate limit of your current AIServices "
                "S0 pricing tier. Please retry after 86400 seconds.",
            }
        },
        Kind.RATE_LIMITED,
    ),
    # vLLM sends no 429 of its own (vllm/issues/13395); this is how its errors look, old and new.
    "vLLM, flat": (
        400,
        {
            "object": "error",
            "message": "This model's maximum context length is 32768 tokens. However, you "
            "requested 54692 tokens (21924 in the messages, 32768 in the completion).",
            "type": "BadRequestError",
            "param": None,
            "code": 400,
        },
        Kind.HTTP_4XX,
    ),
    "vLLM, nested": (
        400,
        {
            "error": {
                "message": "Conversation roles must alternate user/assistant/user/assistant/...",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            }
        },
        Kind.HTTP_4XX,
    ),
    # The message of sglang's managers/scheduler.py, in the body that proxies before it test with.
    "SGLang": (
        503,
        {
            "object": "error",
            "message": "The request queue is full.",
            "type": "abort",
            "code": 503,
        },
        Kind.RATE_LIMITED,
    ),
    # llama-server while it loads the weights
    "llama.cpp": (
        503,
        {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}},
        Kind.HTTP_5XX,
    ),
    # ErrMaxQueue of ollama's server/sched.go
    "Ollama": (
        503,
        {"error": "server busy, please try again.  maximum pending requests exceeded"},
        Kind.RATE_LIMITED,
    ),
}


@pytest.mark.parametrize("name", RECORDED)
def test_only_what_is_documented_as_final_ends_a_call_that_was_rejected(name):
    status, said, kind = RECORDED[name]
    for wire in (openai_wire, ollama_wire):
        failed = wire.decode(chat("m", "q"), status, {}, json.dumps(said).encode())
        assert (failed.kind, failed.status) == (kind, status)
        assert failed.retry_after_s == (26 if name == "Gemini" else None)
        assert "{" not in failed.error
        told = wire.decode(chat("m", "q"), status, {"Retry-After": "3"}, json.dumps(said).encode())
        assert told.retry_after_s == 3


@pytest.mark.parametrize(
    "code",
    [
        "insufficient_quota",
        "credit_balance_exhausted",
        "organization_spend_limit_exceeded",
        "organization_usage_limit_exceeded",
        "project_spend_limit_exceeded",
    ],
)
def test_the_codes_that_openai_documents_as_final_are(code):
    # Written after its page on error codes, which shows the fields but no whole body.
    said = {"error": {"message": "no", "type": "insufficient_quota", "code": code}}
    assert openai_wire.decode(chat("m", "q"), 429, {}, json.dumps(said).encode()).kind == "http_4xx"
    said["error"]["type"] = "requests"
    assert openai_wire.decode(chat("m", "q"), 429, {}, json.dumps(said).encode()).kind == "http_4xx"


def test_the_spend_limit_of_anthropic_is_final_and_its_overload_is_not():
    # Written after its page on errors, as above.
    error = {"type": "rate_limit_error", "message": "no"}
    details = {"error_code": "enforced_spend_limit_reached"}
    spent = {"type": "error", "error": {**error, "details": details}}
    busy = {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}
    kinds = [
        openai_wire.decode(chat("m", "q"), status, {}, json.dumps(said).encode()).kind
        for status, said in ((429, spent), (429, {"type": "error", "error": error}), (529, busy))
    ]
    assert kinds == ["http_4xx", "rate_limited", "rate_limited"]


@pytest.mark.parametrize("delay", ["s", "-1s", "1e9s", "infs", 7, None, ["1s"], "99999999999s"])
def test_a_delay_that_is_none_is_no_delay(delay):
    said = {"error": {"message": "x", "details": [{"retryDelay": delay}, 3, None]}}
    failed = openai_wire.decode(chat("m", "q"), 429, {}, json.dumps(said).encode())
    assert (failed.kind, failed.retry_after_s) == (Kind.RATE_LIMITED, None)


@given(st.text("abcdefgh ", min_size=14, max_size=80), st.integers(0, 60), st.integers(14, 80))
@settings(max_examples=80, deadline=None)
def test_no_long_piece_of_the_prompt_is_repeated(prompt, start, size):
    quoted = prompt[start : start + size]
    said = scrub(f"ERROR <<{quoted}>> at POSITION 7", chat("m", prompt))

    plain = " ".join(prompt.split())
    pieces = {plain[i : i + 12] for i in range(len(plain) - 11)}
    assert not any(piece in said for piece in pieces)
    assert said.startswith("ERROR")


def test_a_key_is_never_repeated():
    key = "sk-" + base64.b64encode(b"0123456789").decode()
    assert Mask(key).hide(f"key {key} is wrong: {key}") == "key ... is wrong: ..."


RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "error": None,
    "incomplete_details": None,
    "output": [
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "type": "message",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "fo", "annotations": []},
                {"type": "output_text", "text": "ur", "annotations": []},
            ],
        },
    ],
    "usage": {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10},
}


def decoded(body):
    return openai_wire.decode(respond("m", "2+2?"), 200, {}, json.dumps(body).encode())


def test_a_body_of_the_responses_api_has_its_text_finish_and_usage():
    done = decoded(RESPONSE)

    assert (done.text, done.finish, done.usage) == ("four", "stop", Usage(7, 3))
    details = {"reason": "max_output_tokens"}
    cut = decoded({**RESPONSE, "status": "incomplete", "incomplete_details": details})
    assert (cut.finish, cut.cut_off) == ("length", True)
    filtered = {**RESPONSE, "status": "incomplete"}
    filtered["incomplete_details"] = {"reason": "content_filter"}
    assert decoded(filtered).cut_off
    call = {"type": "function_call", "name": "f", "call_id": "c", "arguments": "{}"}
    called = decoded({**RESPONSE, "output": [call]})
    assert (called.text, called.finish, bool(called)) == ("", "tool_calls", True)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"output": []}, Kind.EMPTY),
        ({"status": "in_progress"}, Kind.BAD_BODY),
        ({"status": "failed", "error": {"code": "server_error", "message": "x"}}, Kind.HTTP_5XX),
        (
            {"status": "failed", "error": {"code": "rate_limit_exceeded", "message": "x"}},
            Kind.RATE_LIMITED,
        ),
        ({"status": "failed", "error": None}, Kind.HTTP_5XX),
        ({"output": None}, Kind.BAD_BODY),
        ({"output": [4]}, Kind.BAD_BODY),
        ({"status": None}, Kind.HTTP_5XX),
    ],
)
def test_a_body_of_the_responses_api_without_a_response_is_a_failure_with_its_kind(change, kind):
    failed = decoded({**RESPONSE, **change})

    assert isinstance(failed, Failed)
    assert failed.kind is kind


def test_ollama_tools_and_log_probabilities_are_those_of_openai():
    arguments = {"city": "Rome", "days": 2}
    made = {"id": "c1", "type": "function"}
    made["function"] = {"name": "get_weather", "arguments": json.dumps(arguments)}
    said = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    request = chat("m", said, logprobs=True, top_logprobs=2)
    sent = json.loads(ollama_wire.encode(request)[1])
    assert sent["messages"][1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 2)

    message = {"role": "assistant", "content": ""}
    message["tool_calls"] = [{"function": {"name": "get_weather", "arguments": arguments}}]
    body = {"model": "m", "message": message, "done": True, "done_reason": "stop"}
    body["logprobs"] = [{"token": "x", "logprob": -0.5}]
    done = ollama_wire.decode(request, 200, {}, json.dumps(body).encode())
    choice = done.body["choices"][0]
    call = choice["message"]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == arguments
    assert (call["type"], choice["finish_reason"]) == ("function", "tool_calls")
    assert choice["logprobs"]["content"][0]["logprob"] == -0.5
    with pytest.raises(ConfigError, match="OpenAI address"):
        ollama_wire.encode(respond("m", "2+2?"))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (429, Kind.RATE_LIMITED),
        ("429", Kind.RATE_LIMITED),
        (502, Kind.HTTP_5XX),
        (400, Kind.HTTP_4XX),
        (408, Kind.TIMEOUT),
        ("rate_limit", Kind.BAD_BODY),
        (None, Kind.BAD_BODY),
        (7, Kind.BAD_BODY),
    ],
)
def test_an_error_inside_a_200_is_what_its_code_says(code: Any, kind: Kind) -> None:
    said = {"error": {"message": "Provider returned error", "code": code}}
    failed = openai_wire.decode(chat("m", "q"), 200, {}, json.dumps(said).encode())
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.status) == (kind, 200)
    assert "Provider returned error" in failed.error


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (204, Kind.HTTP_4XX),
        (202, Kind.HTTP_4XX),
        (302, Kind.HTTP_4XX),
        (409, Kind.TIMEOUT),
        (425, Kind.TIMEOUT),
    ],
)
def test_statuses_that_are_neither_an_answer_nor_a_refusal(status: int, kind: Kind) -> None:
    failed = openai_wire.decode(chat("m", "q"), status, {}, b"")
    assert isinstance(failed, Failed)
    assert failed.kind is kind
    assert ("redirects" in failed.error) is (status == 302)


def test_content_in_parts_is_read_as_its_text_from_the_wire_and_from_a_body() -> None:
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "4."}]
    body = {"choices": [{"message": {"content": parts}, "finish_reason": "stop"}]}
    done = openai_wire.decode(chat("m", "q"), 200, {}, json.dumps(body).encode())
    assert isinstance(done, Done)
    assert done.text == read_body(body)[0] == "It is 4."
    body["choices"][0]["message"]["content"] = [{"type": "image", "url": "x"}]
    assert not openai_wire.decode(chat("m", "q"), 200, {}, json.dumps(body).encode())
