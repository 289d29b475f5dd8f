"""Functions and models of this process answer in batches, and every request ends as one outcome."""

import asyncio
import gc
import math
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.calls import Done, Endpoint, Failed, Kind, Pool, Request, chat, complete, embed
from batchwright.calls.wire.batcher import LocalModel, MicroBatcher, local_model
from batchwright.errors import BadFile, ConfigError, MissingFile
from batchwright.models import registry as models

LONG_S = 30.0
"""A wait that ends because the batch is full, not because the machine is slow."""


def call(batcher: MicroBatcher, requests: Sequence[Request]) -> list[Any]:
    """All the requests at the same time; the batcher is closed afterwards."""

    async def gather() -> list[Any]:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(batcher(request)) for request in requests]
        return [task.result() for task in started]

    try:
        return asyncio.run(gather())
    finally:
        batcher.close()


class Echo:
    """Answers with the prompt and remembers how many came together."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.threads: set[int] = set()

    def __call__(self, requests: Sequence[Request]) -> list[str]:
        self.sizes.append(len(requests))
        self.threads.add(threading.get_ident())
        return [request.body["messages"][0]["content"] for request in requests]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 40), st.integers(1, 12))
def test_every_request_gets_its_own_answer_in_full_batches(count: int, batch: int) -> None:
    echo = Echo()

    outcomes = call(
        MicroBatcher(echo, batch, wait_s=0.002), [chat("m", f"number {n}") for n in range(count)]
    )

    assert [outcome.text for outcome in outcomes] == [f"number {n}" for n in range(count)]
    assert sum(echo.sizes) == count
    assert all(1 <= size <= batch for size in echo.sizes)
    assert len(echo.threads) <= 1
    assert threading.get_ident() not in echo.threads


def test_a_full_batch_does_not_wait() -> None:
    echo = Echo()

    call(MicroBatcher(echo, 4, wait_s=LONG_S), [chat("m", str(n)) for n in range(12)])

    assert echo.sizes == [4, 4, 4]


def test_a_text_is_an_answer_in_the_openai_shape_with_nothing_invented() -> None:
    spoken, written = call(
        MicroBatcher(lambda requests: ["four"] * 2), [chat("m", "2+2?"), complete("m", "2+2=")]
    )

    assert spoken.body["choices"][0]["message"] == {"role": "assistant", "content": "four"}
    assert written.body["choices"][0]["text"] == "four"
    for outcome in (spoken, written):
        assert (outcome.text, outcome.finish, outcome.usage) == ("four", None, None)
        assert (outcome.tries, outcome.source, outcome.endpoint) == (1, "live", "in-process")


def raises(error: Exception) -> Callable[[Sequence[Request]], list[str]]:
    def function(requests: Sequence[Request]) -> list[str]:
        raise error

    return function


@pytest.mark.parametrize(
    ("function", "kind", "words"),
    [
        (raises(ZeroDivisionError("by zero")), Kind.HTTP_5XX, "raised ZeroDivisionError: by zero"),
        (raises(ConfigError("no such voice")), Kind.HTTP_4XX, "no such voice"),
        (raises(KeyError("tell me about otters")), Kind.HTTP_5XX, "raised KeyError"),
        (lambda requests: [OSError("lost")] * 2, Kind.HTTP_5XX, "raised OSError: lost"),
        (lambda requests: ["one"], Kind.BAD_BODY, "returned 1 responses to 2 requests"),
        (lambda requests: ["one"] * 3, Kind.BAD_BODY, "returned 3 responses to 2 requests"),
        (lambda requests: "no", Kind.BAD_BODY, "returned str instead of a sequence"),
        (lambda requests: None, Kind.BAD_BODY, "returned NoneType instead of a sequence"),
        (lambda requests: [3, 4], Kind.BAD_BODY, "a response of type int"),
        (lambda requests: [{}, {}], Kind.BAD_BODY, "the response to a chat call"),
        (lambda requests: [{"choices": []}] * 2, Kind.BAD_BODY, "the response to a chat call"),
        (lambda requests: ["", " \n"], Kind.EMPTY, "no text"),
    ],
)
def test_what_is_not_an_answer_is_a_failure_of_its_kind(
    function: Any, kind: Kind, words: str
) -> None:
    outcomes = call(
        MicroBatcher(function, 2, wait_s=LONG_S), [chat("m", "tell me about otters")] * 2
    )

    for outcome in outcomes:
        assert isinstance(outcome, Failed)
        assert outcome.kind is kind
        assert words in outcome.error
        assert "\n" not in outcome.error
        assert "otters" not in outcome.error


def test_one_bad_answer_spoils_no_other() -> None:
    def function(requests: Sequence[Request]) -> list[Any]:
        return ["fine", ValueError("no"), {"choices": [{"message": {"content": "also fine"}}]}]

    first, second, third = call(MicroBatcher(function, 3, wait_s=LONG_S), [chat("m", "a")] * 3)

    assert (first.text, second.kind, third.text) == ("fine", Kind.HTTP_5XX, "also fine")


def test_a_cancelled_request_leaves_its_batch_running_and_waits_for_nothing() -> None:
    running, go_on = threading.Event(), threading.Event()
    seen: list[list[str]] = []

    def function(requests: Sequence[Request]) -> list[str]:
        seen.append([request.body["messages"][0]["content"] for request in requests])
        running.set()
        assert go_on.wait(60)
        return ["done"] * len(requests)

    batcher = MicroBatcher(function, 2, wait_s=LONG_S)

    async def scenario() -> tuple[Any, Any, Any]:
        dropped, kept = (asyncio.create_task(batcher(chat("m", word))) for word in "ab")
        await asyncio.to_thread(running.wait, 60)
        waiting, late = (asyncio.create_task(batcher(chat("m", word))) for word in "cd")
        await asyncio.sleep(0)
        dropped.cancel()
        waiting.cancel()
        results = await asyncio.gather(dropped, waiting, return_exceptions=True)
        go_on.set()
        last = await batcher(chat("m", "e"))
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        return await kept, await late, last

    kept, late, last = asyncio.run(scenario())
    batcher.close()

    assert (kept.text, late.text, last.text) == ("done", "done", "done")
    assert [word for words in seen for word in words] == ["a", "b", "d", "e"]


def test_closing_ends_the_batch_that_runs_and_fails_what_waits() -> None:
    running, go_on = threading.Event(), threading.Event()
    calls = 0

    def function(requests: Sequence[Request]) -> list[str]:
        nonlocal calls
        calls += 1
        running.set()
        assert go_on.wait(60)
        return ["done"] * len(requests)

    batcher = MicroBatcher(function, 1)

    async def scenario() -> list[Any]:
        tasks = [asyncio.create_task(batcher(chat("m", "a"))) for _ in range(5)]
        await asyncio.to_thread(running.wait, 60)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        await asyncio.to_thread(batcher._closing.wait, 60)
        late = await batcher(chat("m", "a"))
        go_on.set()
        await closing
        return [await task for task in tasks] + [late]

    first, *rest = asyncio.run(scenario())

    assert first.text == "done"
    assert [outcome.kind for outcome in rest] == [Kind.CANCELLED] * 5
    assert calls == 1


def test_several_event_loops_may_share_one() -> None:
    batcher = MicroBatcher(Echo(), 3, wait_s=0.002)
    texts: list[str] = []

    def run(start: int) -> None:
        async def ask() -> list[Any]:
            return await asyncio.gather(*(batcher(chat("m", str(start + n))) for n in range(10)))

        texts.extend(outcome.text for outcome in asyncio.run(ask()))

    threads = [threading.Thread(target=run, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batcher.close()

    assert sorted(map(int, texts)) == [100 * n + m for n in range(4) for m in range(10)]


def test_a_batcher_nobody_holds_ends_its_thread_and_frees_its_function() -> None:
    echo = Echo()
    batcher = MicroBatcher(echo, 1)
    asyncio.run(_ask(batcher))
    function, thread = weakref.ref(echo), batcher._thread
    assert thread is not None

    del batcher, echo
    gc.collect()
    thread.join(60)

    assert not thread.is_alive()
    del thread
    gc.collect()
    assert function() is None


async def _ask(batcher: MicroBatcher) -> None:
    await batcher(chat("m", "a"))


def test_a_forked_child_starts_a_thread_of_its_own() -> None:
    code = """
import asyncio, os, sys
from batchwright.calls import chat
from batchwright.calls.wire.batcher import MicroBatcher

batcher = MicroBatcher(lambda requests: [str(os.getpid())] * len(requests), 1)
async def ask():
    return (await batcher(chat("m", "who?"))).text
assert asyncio.run(ask()) == str(os.getpid())
child = os.fork()
if not child:
    os._exit(0 if asyncio.run(ask()) == str(os.getpid()) else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)

    assert done.returncode == 0


def test_a_batch_must_hold_something() -> None:
    with pytest.raises(ConfigError, match="batch must be at least 1, got 0"):
        MicroBatcher(Echo(), 0)


@pytest.fixture(scope="module")
def tiny() -> LocalModel:
    return local_model("tiny")


def answers(model: LocalModel, requests: Sequence[Request]) -> list[Done]:
    """What the model says, each an answer."""
    outcomes = call(MicroBatcher(model, len(requests), wait_s=LONG_S), requests)
    assert all(outcomes), outcomes
    return outcomes


def test_an_answer_does_not_depend_on_who_shares_its_batch(tiny: LocalModel) -> None:
    greedy = [chat("tiny", "ab" * (7 * n + 1), temperature=0, max_tokens=4 + n) for n in range(8)]
    drawn = [
        complete("tiny", "x" * (n + 1), seed=n, max_tokens=6, top_p=(1, 0.8)[n % 2], top_k=30 * n)
        for n in range(8)
    ]
    requests = greedy + drawn

    together = answers(tiny, requests)
    backwards = answers(tiny, requests[::-1])[::-1]
    alone = [answers(tiny, [request])[0] for request in requests]

    facts = [(one.text, one.finish, one.usage) for one in alone]
    assert [(one.text, one.finish, one.usage) for one in together] == facts
    assert [(one.text, one.finish, one.usage) for one in backwards] == facts


def test_the_trainers_tiny_and_transformers_generation_say_the_same(tiny: LocalModel) -> None:
    import torch

    from batchwright.models.transformers import load_model

    model, tokenizer, _ = load_model("tiny")
    prompts = ["otters", "b", "the quick brown fox jumps over the lazy dog"]

    ours = answers(tiny, [complete("tiny", p, temperature=0, max_tokens=12) for p in prompts])

    for prompt, outcome in zip(prompts, ours, strict=True):
        ids = torch.tensor([[int(id) for id in tokenizer.encode_batch([prompt], special=True)[0]]])
        # A million random weights mostly say line ends, so `tiny` keeps to what can be printed.
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=12,
            suppress_tokens=[id for id in range(320) if not 33 <= id < 127 and id != 257],
        )[0, ids.shape[1] :]
        assert outcome.text == tokenizer.decode(made.tolist())
        assert outcome.usage.prompt_tokens == len(prompt)


def test_draws_follow_the_models_own_odds(tiny: LocalModel) -> None:
    """The two likeliest first letters, against the odds that the trainer's copy gives."""
    import torch

    from batchwright.models.transformers import load_model

    model = load_model("tiny").model
    with torch.inference_mode():
        logits = model(torch.tensor([[111, 116]])).logits[0, -1, 33:127].double() / 0.05
    likely = logits.topk(2)
    odds = likely.values.softmax(0)[0].item()
    first, second = (chr(33 + place) for place in likely.indices.tolist())

    count = 600
    made = answers(
        tiny,
        [
            complete("tiny", "ot", max_tokens=1, temperature=0.05, top_k=2, seed=n)
            for n in range(count)
        ],
    )

    seen = sum(outcome.text == first for outcome in made)
    assert {outcome.text for outcome in made} == {first, second}
    assert abs(seen - count * odds) < 5 * math.sqrt(count * odds * (1 - odds))
    narrow = complete("tiny", "ot", max_tokens=1, temperature=0.05, top_p=odds / 1000, seed=3)
    assert answers(tiny, [narrow])[0].text == first


def test_a_seed_or_a_draw_is_repeated_and_nothing_else_is(tiny: LocalModel) -> None:
    def texts(**settings: Any) -> set[str]:
        requests = [chat("tiny", "hello", max_tokens=12, **settings) for _ in range(4)]
        return {outcome.text for outcome in answers(tiny, requests)}

    assert len(texts(seed=0)) == len(texts(draw=2)) == len(texts(temperature=0)) == 1
    assert texts(seed=0) != texts(seed=1)
    assert texts(draw=0) != texts(draw=1)
    # Nothing seeds these, so now and then one ends at once and is a failure of kind `empty`.
    free = call(MicroBatcher(tiny, 32, wait_s=LONG_S), [chat("tiny", "hello", max_tokens=12)] * 32)
    assert {outcome.kind for outcome in free if not outcome} <= {"empty"}
    assert len({outcome.text for outcome in free if outcome}) > 16


def test_an_answer_ends_before_its_first_stop_string(tiny: LocalModel) -> None:
    settings: dict[str, Any] = {"seed": 11, "max_tokens": 40}
    (whole,) = answers(tiny, [chat("tiny", "hello", **settings)])
    assert whole.finish == "length"
    late, early = whole.text[30:32], whole.text[9:12]
    stops: list[Any] = [late, [late, early], ["not there"]]

    cut = answers(tiny, [chat("tiny", "hello", stop=stop, **settings) for stop in stops])

    assert [one.text for one in cut] == [
        whole.text[: whole.text.index(late)],
        whole.text[: min(whole.text.index(late), whole.text.index(early))],
        whole.text,
    ]
    assert [one.finish for one in cut] == ["stop", "stop", "length"]


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (embed("tiny", "a"), "has no embeddings; use local:minilm"),
        (chat("tiny", "a", n=2), "does not support n=2"),
        (chat("tiny", "a", frequency_penalty=1), "does not support frequency_penalty"),
        (chat("tiny", "a", stream=True), "does not support stream"),
        (chat("tiny", "a", temperature="warm"), "temperature must be a number"),
        (chat("tiny", "a", temperature=-1), "temperature must be a number of at least 0, got -1"),
        (chat("tiny", "a", max_tokens=0), "max_tokens at least 1"),
        (chat("tiny", "a", seed="x"), "must be integers"),
        (chat("tiny", "a", stop=[""]), "stop must be a string or a list of strings"),
        (complete("tiny", "a" * 8192), "takes 1 to 8,191"),
        (complete("tiny", ""), "has 0 tokens"),
    ],
)
def test_what_a_model_cannot_do_it_refuses_for_that_request_alone(
    tiny: LocalModel, request_: Request, words: str
) -> None:
    fine = chat("tiny", "a", temperature=0, max_tokens=2, stream=False, n=1, user=None)

    refused, answered = call(MicroBatcher(tiny, 2, wait_s=LONG_S), [request_, fine])

    assert (refused.kind, refused.status) == (Kind.HTTP_4XX, 400)
    assert words in refused.error
    assert answered.usage.completion_tokens == 2


def test_a_folder_that_was_saved_answers_as_the_model_did(tiny: LocalModel, tmp_path: Path) -> None:
    from batchwright.models.transformers import load_model

    load_model("tiny").model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "tokenizer_name.txt").write_text("bytes")
    asked = [chat("tiny", "number 3", temperature=0, max_tokens=9)]

    saved = local_model(tmp_path / "saved")

    assert answers(saved, asked)[0].text == answers(tiny, asked)[0].text
    (tmp_path / "saved" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(BadFile, match="cannot be loaded"):
        local_model(tmp_path / "saved")


def test_what_is_no_model_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, not really")

    for name in ("smollm2", "minilm"):
        with pytest.raises(MissingFile, match=f"run: batchwright models get {name}"):
            local_model(name)
    with pytest.raises(MissingFile, match="name smollm2, minilm, tiny, a GGUF file, or a folder"):
        local_model(tmp_path / "nowhere")
    with pytest.raises(MissingFile, match="no model file"):
        local_model(tmp_path / "nowhere.gguf")
    with pytest.raises(BadFile, match=r"cannot load .*bad\.gguf"):
        local_model(tmp_path / "bad.gguf")
    with pytest.raises(ConfigError, match="parallel must be at least 1, got 0"):
        local_model(tmp_path / "bad.gguf", parallel=0)


def test_a_pool_drives_a_model_and_a_function_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path))
    echo = Echo()
    requests = [chat("tiny", f"number {n}", temperature=0, max_tokens=n + 1) for n in range(12)]

    with Pool(Endpoint("local:tiny", batch=4), limit=8) as pool:
        made = pool.map(requests)
    with Pool(Endpoint(echo, batch=4), limit=8) as pool:
        echoed = pool.map(requests)

    assert [outcome.usage.completion_tokens for outcome in made if outcome] == list(range(1, 13))
    assert [outcome.text for outcome in echoed if outcome] == [f"number {n}" for n in range(12)]
    assert sum(echo.sizes) == 12
    assert max(echo.sizes) <= 4


def shared_home(factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A home of the tests' own that shows the model of this machine, fetched if there is none."""
    home = factory.mktemp("home")
    found = models.find(name)
    real = found.folder if found.path is not None else None
    with pytest.MonkeyPatch.context() as patch:
        if real is None:
            # One for all test processes, so that they fetch it once.
            patch.setenv("BATCHWRIGHT_HOME", str(factory.getbasetemp().parent / "fetched"))
            models.get(name)
            real = found.folder
        (home / "models").mkdir()
        (home / "models" / name).symlink_to(real)
        patch.setenv("BATCHWRIGHT_HOME", str(home))
        yield home


def unless_here(name: str) -> pytest.MarkDecorator:
    """Slow where the model would have to be fetched."""
    here = models.find(name).path is not None
    return pytest.mark.usefixtures(name) if here else pytest.mark.slow


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalModel]:
    for _ in shared_home(tmp_path_factory, "smollm2"):
        model = local_model("smollm2", parallel=4, threads=1, context=512)
        yield model
        model.close()


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalModel]:
    for _ in shared_home(tmp_path_factory, "minilm"):
        yield local_model("minilm")


@unless_here("smollm2")
def test_llama_answers_with_its_template_settings_and_counts(smollm2: LocalModel) -> None:
    capital, counted, *drawn, written = answers(
        smollm2,
        [
            chat("smollm2", "Name the capital of France.", temperature=0, max_tokens=20),
            chat("smollm2", "Count: one two three", temperature=0, stop=["two"], max_tokens=30),
            *(chat("smollm2", "Name a colour.", seed=5, max_tokens=8) for _ in range(2)),
            *(chat("smollm2", "Name a colour.", draw=1, max_tokens=8) for _ in range(2)),
            complete("smollm2", "1 2 3 4", temperature=0, max_tokens=4),
        ],
    )

    assert "Paris" in capital.text
    assert capital.finish == "stop"
    # The template's own system message is part of the prompt.
    assert capital.usage.prompt_tokens > 30
    assert "two" not in counted.text.lower()
    assert (counted.finish, written.finish) == ("stop", "length")
    assert written.usage.completion_tokens == 4
    assert "5" in written.text
    assert drawn[0].text == drawn[1].text
    assert drawn[2].text == drawn[3].text


@unless_here("smollm2")
def test_llama_refuses_what_it_cannot_do_for_that_request_alone(smollm2: LocalModel) -> None:
    requests = [
        embed("smollm2", "a"),
        chat("smollm2", "word " * 1000),
        chat("smollm2", [{"role": "user"}]),
        chat("smollm2", "a", stream=True),
        chat("smollm2", "a", max_tokens=3),
    ]

    *refused, answered = call(MicroBatcher(smollm2, 5, wait_s=LONG_S), requests)

    assert [outcome.kind for outcome in refused] == [Kind.HTTP_4XX] * 4
    assert "use local:minilm" in refused[0].error
    assert "context size (512 tokens)" in refused[1].error
    assert answered.usage.completion_tokens == 3


@unless_here("smollm2")
def test_nobody_else_can_use_a_model_that_runs_as_a_function(smollm2: Any) -> None:
    from urllib.error import HTTPError
    from urllib.request import ProxyHandler, build_opener

    with pytest.raises(HTTPError, match="401") as refused:
        build_opener(ProxyHandler({})).open(f"{smollm2.url}/v1/models")
    refused.value.close()
    assert smollm2.url.startswith("http://127.0.0.1:")


@unless_here("minilm")
def test_vectors_are_those_of_one_text_at_a_time(minilm: LocalModel) -> None:
    """Against the definition: the mean over a text's tokens, of length 1."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    folder = models.find("minilm").folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    texts = ["An otter swims.", "", "Interest rates rose by two percent today.", "deep " * 400]

    several, one = call(
        MicroBatcher(minilm, 2, wait_s=LONG_S), [embed("minilm", texts), embed("minilm", texts[2])]
    )

    vectors = np.array(several.vectors)
    assert vectors.shape == (4, 384)
    for text, vector in zip(texts, vectors, strict=True):
        ids = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        with torch.inference_mode():
            mean = model(**ids).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=2e-6)
    np.testing.assert_allclose(one.vectors, vectors[2:3], atol=2e-6)
    assert several.usage.prompt_tokens == 256 + sum(len(tokenizer(t).input_ids) for t in texts[:3])


@unless_here("minilm")
def test_texts_that_mean_the_same_are_close(minilm: LocalModel) -> None:
    (outcome,) = call(
        MicroBatcher(minilm, 1),
        [embed("minilm", ["How tall is the tower?", "What is the tower's height?", "I like tea."])],
    )

    question, same, other = np.array(outcome.vectors)
    assert question @ same > 0.8 > 0.3 > question @ other


@unless_here("minilm")
def test_an_embedder_refuses_what_is_not_text_to_embed(minilm: LocalModel) -> None:
    requests = [
        chat("minilm", "hello"),
        embed("minilm", [[1, 2]]),  # type: ignore[list-item]
        embed("minilm", "a", encoding_format="base64"),
        embed("minilm", "a", dimensions=5),
        embed("minilm", "a"),
    ]

    *refused, answered = call(MicroBatcher(minilm, 5, wait_s=LONG_S), requests)

    assert [outcome.kind for outcome in refused] == [Kind.HTTP_4XX] * 4
    assert len(answered.vectors[0]) == 384
