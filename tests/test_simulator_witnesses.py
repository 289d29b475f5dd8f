"""The official clients of OpenAI and Ollama work against the simulator as against the real ones."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import ollama
import openai
import pytest
from pydantic import BaseModel

from batchwright.calls.simulator import RunningSimulator, Simulator
from batchwright.calls.simulator.ngrams import hashed_ngrams

PROMPT = [{"role": "user", "content": "Name three rivers"}]


@pytest.fixture(scope="module")
def url() -> Iterator[RunningSimulator]:
    script = {"turn me away": "429", "break": "500", "come back later": ["429", None]}
    simulator = Simulator(latency_s=0.0, script=script, retry_after_s=0.01, words=5)
    with simulator.running(in_thread=True) as url:
        yield url


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def local(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url) as client:
        yield client


def test_openai_chat_complete_and_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="sim", messages=PROMPT, temperature=0)

    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert (choice.message.content or "").startswith("Name three rivers -> ")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len((choice.message.content or "").split())
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    plain = client.completions.create(model="sim", prompt="Name three rivers", temperature=0)
    assert plain.choices[0].text == choice.message.content


def test_openai_streams_say_the_same_as_whole_answers(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sim", "messages": PROMPT, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    usage = {"include_usage": True}
    events = list(client.chat.completions.create(**asked, stream=True, stream_options=usage))

    assert events[0].choices[0].delta.role == "assistant"
    said = [e.choices[0].delta.content or "" for e in events if e.choices]
    assert "".join(said) == whole.choices[0].message.content
    assert len([piece for piece in said if piece]) == 9
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "stop"
    assert events[-1].usage == whole.usage
    assert all(event.usage is None for event in events[:-1])
    pieces = client.completions.create(model="sim", prompt="Hello", temperature=0, stream=True)
    text = client.completions.create(model="sim", prompt="Hello", temperature=0).choices[0].text
    assert "".join(piece.choices[0].text for piece in pieces) == text


def test_openai_takes_choices_limits_stops_and_formats(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sim", "messages": PROMPT}
    three = client.chat.completions.create(**asked, n=3, seed=4)
    texts = [choice.message.content for choice in three.choices]
    assert len(set(texts)) == 3
    short = client.chat.completions.create(**asked, max_tokens=2).choices[0]
    assert (short.message.content, short.finish_reason) == ("Name three", "length")
    stopped = client.chat.completions.create(**asked, stop=" ->").choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("Name three rivers", "stop")

    class Reason(BaseModel):
        why: str
        weight: float | None

    class Rating(BaseModel):
        good: bool
        stars: int
        kind: Literal["short", "long"]
        reasons: list[Reason]

    rated = client.chat.completions.parse(**asked, response_format=Rating)
    assert rated.choices[0].message.parsed is not None


def test_openai_embeddings_are_the_hashed_ngrams(client: openai.OpenAI) -> None:
    texts = ["one text", "another text"]
    packed = client.embeddings.create(model="sim-embed", input=texts)
    plain = client.embeddings.create(model="sim-embed", input=texts, encoding_format="float")

    wanted = hashed_ngrams(texts, 256)
    for answer in (packed, plain):
        assert [row.index for row in answer.data] == [0, 1]
        got = np.array([row.embedding for row in answer.data], np.float32)
        np.testing.assert_array_equal(got, wanted)
    small = client.embeddings.create(model="sim-embed", input="one text", dimensions=16)
    assert len(small.data[0].embedding) == 16


def test_openai_lists_models_and_raises_its_own_errors(client: openai.OpenAI) -> None:
    assert "sim-qa" in [model.id for model in client.models.list()]
    assert client.models.retrieve("sim").id == "sim"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=PROMPT)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="messages"):
        client.chat.completions.create(model="sim", messages="no list")
    turned = [{"role": "user", "content": "turn me away"}]
    with pytest.raises(openai.RateLimitError) as limited:
        client.chat.completions.create(model="sim", messages=turned)
    assert limited.value.response.headers["retry-after"] == "0.01"
    with pytest.raises(openai.InternalServerError):
        client.completions.create(model="sim", prompt="break")


def test_openai_retries_after_the_wait_it_was_told(url: RunningSimulator) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=1) as client:
        answer = client.completions.create(model="sim", prompt="come back later")

    assert answer.choices[0].text.startswith("come back later")
    seen = [c for c in url.stats(calls=True)["calls"] if c["prompt"] == "come back later"]
    assert seen == [{"prompt": "come back later", "seen": 2, "finished": 1}]


def test_a_wrong_key_is_an_authentication_error() -> None:
    with Simulator(latency_s=0, api_key="right").running(in_thread=True) as url:
        for key in ("right", "wrong"):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                if key == "right":
                    assert client.models.list().data
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.completions.create(model="sim", prompt="hello")


def test_ollama_chat_generate_and_counts(local: ollama.Client) -> None:
    options = {"temperature": 0, "num_predict": 64}
    answer = local.chat("sim", PROMPT, options=options, keep_alive="5m")

    assert answer.done
    assert answer.done_reason == "stop"
    assert (answer.message.content or "").startswith("Name three rivers -> ")
    assert answer.eval_count == len((answer.message.content or "").split())
    said = local.generate("sim:latest", "Name three rivers", options=options)
    assert said.response == answer.message.content
    assert local.generate("sim", "Name", options={"num_predict": 1}).done_reason == "length"
    assert local.generate("sim").done_reason == "load"


def test_ollama_streams_say_the_same_as_whole_answers(local: ollama.Client) -> None:
    options = {"temperature": 0}
    whole = local.chat("sim", PROMPT, options=options)
    parts = list(local.chat("sim", PROMPT, options=options, stream=True))

    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * 9 + [True]
    assert parts[-1].eval_count == whole.eval_count
    pieces = local.generate("sim", "Name three rivers", options=options, stream=True)
    assert "".join(piece.response or "" for piece in pieces) == whole.message.content


def test_ollama_formats(local: ollama.Client) -> None:
    class Rating(BaseModel):
        stars: int
        words: list[str]

    schema = Rating.model_json_schema()
    answer = local.chat("sim", PROMPT, format=schema)
    assert Rating.model_validate_json(answer.message.content or "").words
    told = 'Paraphrase the query as {"mutated_query": "..."}.\nQuery: How far is Rome?'
    mutated = local.generate("sim-mutator", told, format="json").response
    assert mutated == '{"mutated_query": "Tell us, how far is Rome."}'


def test_ollama_embeddings_old_and_new(local: ollama.Client) -> None:
    wanted = hashed_ngrams(["one text", "another text"], 256)

    several = local.embed("sim-embed", ["one text", "another text"])
    np.testing.assert_array_equal(np.array(several.embeddings, np.float32), wanted)
    single = local.embeddings("sim-embed", "one text")
    np.testing.assert_array_equal(np.array(single.embedding, np.float32), wanted[0])
    assert len(local.embed("sim-embed", "one text", dimensions=32).embeddings[0]) == 32


def test_ollama_lists_shows_and_raises_its_own_errors(local: ollama.Client) -> None:
    assert "sim:latest" in [model.model for model in local.list().models]
    assert local.ps().models[0].digest
    shown = local.show("sim")
    assert shown.modelinfo is not None
    assert shown.modelinfo["general.architecture"] == "simulated"
    for call in (local.show, local.generate, local.chat):
        with pytest.raises(ollama.ResponseError, match="model 'llama9' not found") as missing:
            call("llama9")
        assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as limited:
        local.generate("sim", "turn me away")
    assert limited.value.status_code == 429


def test_a_full_server_says_503_to_ollama_as_ollama_does() -> None:
    simulator = Simulator(kind="reject", knee=1, latency_s=60, sigma=0, words=600)
    with simulator.running(in_thread=True) as url, ollama.Client(url) as client:
        served = client.generate("sim", "first", stream=True)
        assert next(served).response
        with pytest.raises(ollama.ResponseError, match="maximum pending requests") as busy:
            client.generate("sim", "second")
        served.close()
    assert busy.value.status_code == 503


def test_the_asynchronous_clients_work_too(url: RunningSimulator) -> None:
    async def all_of_it() -> tuple[list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            prompts = [f"question number {n}" for n in range(20)]
            calls = [client.completions.create(model="sim", prompt=text) for text in prompts]
            whole = [answer.choices[0].text for answer in await asyncio.gather(*calls)]
            assert all(text.startswith(p) for text, p in zip(whole, prompts, strict=True))
            opened = await client.chat.completions.create(
                model="sim",
                messages=PROMPT,
                seed=1,
                stream=True,
            )
            first = [event.choices[0].delta.content or "" async for event in opened]
        other = ollama.AsyncClient(url)
        try:
            stream = await other.chat("sim", PROMPT, options={"seed": 1}, stream=True)
            second = [part.message.content or "" async for part in stream]
        finally:
            await other.close()
        return first, second

    first, second = asyncio.run(all_of_it())
    assert "".join(first) == "".join(second)


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
}
TIME = {"type": "object", "properties": {"zone": {"type": "string", "enum": ["UTC", "CET"]}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get_time", "parameters": TIME}},
]
FLAT: list[Any] = [{"type": "function", **tool["function"]} for tool in TOOLS]
BOTH = "Use get_weather and get_time for Rome"


def test_openai_tools_are_called_whole_and_streamed_alike(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sim", "temperature": 0, "tools": TOOLS}
    messages: list[Any] = [{"role": "user", "content": BOTH}]
    whole = client.chat.completions.create(**asked, messages=messages).choices[0]
    with client.chat.completions.stream(**asked, messages=messages) as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_completion().choices[0]

    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    made, again = whole.message.tool_calls, streamed.message.tool_calls
    assert made
    assert again
    assert whole.message.content is None
    assert [call.function.name for call in made] == ["get_weather", "get_time"]
    assert [(c.function.name, c.function.arguments) for c in made] == [
        (c.function.name, c.function.arguments) for c in again
    ]
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert json.loads(made[0].function.arguments).keys() == {"city", "days"}
    # The result of a call ends the loop, as in every example of an agent.
    said = whole.message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": c.id, "content": "fine"} for c in made]
    last = client.chat.completions.create(**asked, messages=[*messages, said, *results]).choices[0]
    assert (last.finish_reason, last.message.tool_calls) == ("stop", None)


def test_openai_tool_choice_is_followed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sim", "messages": PROMPT, "tools": TOOLS}

    def called(**more: Any) -> list[str]:
        made = client.chat.completions.create(**asked, **more).choices[0].message.tool_calls
        return [call.function.name for call in made or []]  # type: ignore[union-attr]

    named = {"type": "function", "function": {"name": "get_time"}}
    assert called(tool_choice=named) == ["get_time"]
    assert called(tool_choice="none") == []
    assert called(tool_choice="required") == ["get_weather"]
    both = [{"role": "user", "content": BOTH}]
    asked["messages"] = both
    assert called(parallel_tool_calls=False) == ["get_weather"]
    with pytest.raises(openai.BadRequestError, match="tools"):
        called(extra_body={"tools": [{"type": "function"}]})


def test_openai_log_probabilities_belong_to_the_tokens_of_the_text(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sim", "messages": PROMPT, "temperature": 0}
    asked |= {"logprobs": True, "top_logprobs": 3}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert "".join(token.token for token in tokens) == choice.message.content
    for token in tokens:
        assert bytes(token.bytes or []).decode() == token.token
        assert [len(token.top_logprobs), token.top_logprobs[0].token] == [3, token.token]
        assert sum(np.exp(one.logprob) for one in token.top_logprobs) < 1
        assert token.logprob == max(one.logprob for one in token.top_logprobs)
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        streamed = stream.get_final_completion().choices[0].logprobs
    assert streamed is not None
    assert streamed.content == tokens
    assert client.chat.completions.create(model="sim", messages=PROMPT).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(**{**asked, "top_logprobs": 21})

    plain: dict[str, Any] = {"model": "sim", "prompt": "Name", "temperature": 0, "logprobs": 2}
    one = client.completions.create(**plain).choices[0]
    assert one.logprobs is not None
    assert one.logprobs.text_offset is not None
    assert one.logprobs.tokens is not None
    for offset, text in zip(one.logprobs.text_offset, one.logprobs.tokens, strict=True):
        assert one.text[offset:].startswith(text)
    assert {len(top) for top in one.logprobs.top_logprobs or []} == {2}
    offsets = [
        offset
        for piece in client.completions.create(**plain, stream=True)
        for offset in (piece.choices[0].logprobs and piece.choices[0].logprobs.text_offset) or []
    ]
    assert offsets == one.logprobs.text_offset


def test_openai_responses_say_the_same_as_chat(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sim", "input": "Name three rivers", "temperature": 0}
    answer = client.responses.create(**asked)
    chatted = client.chat.completions.create(model="sim", messages=PROMPT, temperature=0)

    assert answer.output_text == chatted.choices[0].message.content
    assert (answer.status, answer.error, answer.incomplete_details) == ("completed", None, None)
    assert answer.usage is not None
    assert chatted.usage is not None
    assert answer.usage.input_tokens == chatted.usage.prompt_tokens
    assert answer.usage.output_tokens == chatted.usage.completion_tokens
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Name three rivers"}]}]
    assert client.responses.create(**{**asked, "input": items}).output_text == answer.output_text
    told = {**asked, "instructions": "Rewrite the question politely.", "input": "Question: Who?"}
    assert client.responses.create(**told).output_text.endswith("?")
    cut = client.responses.create(**asked, max_output_tokens=2)
    assert (cut.status, cut.output_text) == ("incomplete", "Name three")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.NotFoundError, match="resp_1"):
        client.responses.create(**asked, previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="input"):
        client.responses.create(model="sim", input=4)  # type: ignore[arg-type]

    class Rating(BaseModel):
        stars: int

    assert client.responses.parse(**asked, text_format=Rating).output_parsed is not None


def test_openai_responses_stream_their_events_in_order(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sim", "input": "Name three rivers", "temperature": 0}
    asked |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()

    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    said = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(said) == final.output_text == whole.output_text
    assert final.usage == whole.usage
    part = final.output[0].content[0]  # type: ignore[union-attr]
    assert [token.token for token in part.logprobs] == said
    assert {len(token.top_logprobs) for token in part.logprobs} == {2}
    cut = list(client.responses.create(**asked, max_output_tokens=2, stream=True))
    assert cut[-1].type == "response.incomplete"


def test_openai_responses_call_functions(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "sim", "temperature": 0, "tools": FLAT}
    whole = client.responses.create(**asked, input=BOTH)
    with client.responses.stream(**asked, input=BOTH) as stream:
        deltas = [e for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()

    made = [item for item in whole.output if item.type == "function_call"]
    assert [item.name for item in made] == ["get_weather", "get_time"]
    again = [item for item in final.output if item.type == "function_call"]
    assert [(i.name, i.arguments) for i in made] == [(i.name, i.arguments) for i in again]
    for index, item in enumerate(made):
        spoken = [event.delta for event in deltas if event.output_index == index]
        assert "".join(spoken) == item.arguments
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "fine"} for item in made
    ]
    calls = [item.model_dump(exclude_none=True) for item in made]
    items: Any = [{"role": "user", "content": BOTH}, *calls, *results]
    assert client.responses.create(**asked, input=items).output_text


def test_ollama_tools_and_log_probabilities(local: ollama.Client) -> None:
    asked: dict[str, Any] = {"model": "sim", "options": {"temperature": 0}}
    messages: list[Any] = [{"role": "user", "content": BOTH}]
    whole = local.chat(**asked, messages=messages, tools=TOOLS)
    parts = list(local.chat(**asked, messages=messages, tools=TOOLS, stream=True))

    made = whole.message.tool_calls or []
    assert [call.function.name for call in made] == ["get_weather", "get_time"]
    assert made[0].function.arguments.keys() == {"city", "days"}
    assert [c for part in parts for c in part.message.tool_calls or []] == made
    assert parts[-1].done
    results = [{"role": "tool", "tool_name": c.function.name, "content": "fine"} for c in made]
    last = local.chat(**asked, messages=[*messages, whole.message, *results], tools=TOOLS)
    assert (last.message.tool_calls, bool(last.message.content)) == (None, True)

    sure = local.chat(**asked, messages=PROMPT, logprobs=True, top_logprobs=2)
    tokens = sure.logprobs or []
    assert "".join(token.token for token in tokens) == sure.message.content
    assert {len(token.top_logprobs or []) for token in tokens} == {2}
    pieces = local.generate(
        "sim", "Name three rivers", options={"temperature": 0}, logprobs=True, stream=True
    )
    assert [t.token for piece in pieces for t in piece.logprobs or []] == [t.token for t in tokens]


def batch_file(bodies: list[dict[str, Any]], path: str = "/v1/chat/completions") -> bytes:
    rows = [
        {"custom_id": f"row-{n}", "method": "POST", "url": path, "body": body}
        for n, body in enumerate(bodies)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def chats(*prompts: str) -> list[dict[str, Any]]:
    return [
        {"model": "sim", "messages": [{"role": "user", "content": text}], "temperature": 0}
        for text in prompts
    ]


def ended(client: openai.OpenAI, batch: Any) -> Any:
    while client.batches.retrieve(batch.id).status in ("validating", "in_progress", "cancelling"):
        time.sleep(0.01)
    return client.batches.retrieve(batch.id)


def results(client: openai.OpenAI, file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    rows = [json.loads(row) for row in client.files.content(file).text.splitlines()]
    return {row["custom_id"]: row for row in rows}


def test_openai_batches_answer_as_single_calls_do(client: openai.OpenAI) -> None:
    content = batch_file([*chats("Name three rivers", "break", "Hello"), {"model": "sim"}])
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("in.jsonl", len(content), "batch")
    assert client.files.content(file.id).content == content
    asked: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = client.batches.create(input_file_id=file.id, metadata={"a": "b"}, **asked)
    assert (batch.status, batch.metadata) == ("validating", {"a": "b"})
    batch = ended(client, batch)

    assert batch.status == "completed"
    assert batch.request_counts.model_dump() == {"total": 4, "completed": 2, "failed": 2}
    done, failed = results(client, batch.output_file_id), results(client, batch.error_file_id)
    single = client.chat.completions.create(**chats("Name three rivers")[0])
    body = done["row-0"]["response"]["body"]
    assert openai.types.chat.ChatCompletion(**body).choices == single.choices
    codes = {name: row["response"]["status_code"] for name, row in failed.items()}
    assert codes == {"row-1": 500, "row-3": 400}
    assert done.keys() == {"row-0", "row-2"}
    page = client.batches.list(limit=1)
    assert [one.id for one in page.data] == [batch.id]
    names = [one.filename for one in client.files.list(purpose="batch")]
    assert "in.jsonl" in names
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve("batch_none")
    with pytest.raises(openai.BadRequestError, match="File"):
        client.batches.create(input_file_id="file-none", **asked)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"no json\n", "invalid_json_line"),
        (batch_file(chats("a")) * 2, "duplicate_custom_id"),
        (batch_file(chats("a"), "/v1/responses"), "mismatched_endpoint"),
        (batch_file([*chats("a"), {**chats("b")[0], "model": "sim-qa"}]), "mismatched_model"),
        (batch_file([{**chats("b")[0], "model": "gpt-9"}]), "model_not_found"),
    ],
)
def test_openai_batches_with_a_wrong_file_fail_as_a_whole(
    client: openai.OpenAI, content: bytes, code: str
) -> None:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = ended(client, batch)

    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert batch.errors.data[-1].code == code


def test_openai_batches_expire_and_are_cancelled_with_what_was_done() -> None:
    script = {"stuck": "hang"}
    simulator = Simulator(latency_s=0, script=script, batch_s=0, batch_window_s=0.3)
    slow = Simulator(latency_s=0, batch_s=60)
    asked: Any = {"endpoint": "/v1/responses", "completion_window": "24h"}
    bodies = [{"model": "sim", "input": text, "temperature": 0} for text in ("fine", "stuck")]
    for running, status in ((simulator, "expired"), (slow, "cancelled")):
        with (
            running.running(in_thread=True) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            content = batch_file(bodies, "/v1/responses")
            file = client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = client.batches.create(input_file_id=file.id, **asked)
            if status == "cancelled":
                assert client.batches.cancel(batch.id).status == "cancelling"
            batch = ended(client, batch)
            done = results(client, batch.output_file_id)
            failed = results(client, batch.error_file_id)

        assert batch.status == status
        assert failed["row-1"]["error"]["code"] == f"batch_{status}"
        assert done.keys() == ({"row-0"} if status == "expired" else set())
        for row in done.values():
            assert openai.types.responses.Response(**row["response"]["body"]).output_text
