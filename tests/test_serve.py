"""`batchwright serve` puts a real model behind the wire, and a pool drives it."""

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest

from batchwright.calls import Done, Endpoint, Pool, chat, complete
from batchwright.models import registry as models

COMMAND = Path(sys.executable).parent / "batchwright"

HERE = models.find("smollm2").path is not None

real = pytest.mark.slow
"""These load a real model, and fetch it where it is not yet."""


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("nonsense", "unknown model nonsense; known: smollm2, or name a GGUF file"),
        ("minilm", "unknown model minilm; known: smollm2"),
        ("smollm2", "not downloaded yet; run: batchwright models get smollm2, or add --get"),
        ("no.gguf", "no model file at no.gguf"),
        ("bad.gguf --port 0", "llama.cpp cannot load bad.gguf"),
        ("bad.gguf --host 0.0.0.0", "--host 0.0.0.0 is not a loopback address"),
        ("bad.gguf --host example.org", "use 127.0.0.1"),
        ("bad.gguf --port 70000", "--port must be 0 to 65535, got 70000"),
        ("bad.gguf --port 0 --parallel 0", "parallel must be at least 1, got 0"),
        ("bad.gguf --port 0 --context -1", "context must be at least 1, got -1"),
        ("bad.gguf --port 0 --threads 0", "threads must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_served_is_one_sentence(
    call: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    sentence: str,
) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, not really")

    ended = call(f"serve {words}", tmp_path)

    assert (ended.code, ended.out) == (1, "")
    assert sentence in ended.err
    assert ended.err.count("\n") == 1


def test_a_port_in_use_is_one_sentence(call: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = call(f"serve bad.gguf --port {port}", tmp_path)

    assert ended.code == 1
    assert f"port {port} of 127.0.0.1 is in use; choose another, or --port 0" in ended.err


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of the tests' own that shows the model of this machine, fetched if there is none."""
    own, found = tmp_path_factory.mktemp("home"), models.find("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        if not HERE:
            # One for all test processes, so that they fetch it once.
            shared = tmp_path_factory.getbasetemp().parent / "fetched"
            patch.setenv("BATCHWRIGHT_HOME", str(shared))
            models.get("smollm2")
        (own / "models").mkdir()
        (own / "models" / "smollm2").symlink_to(found.folder)
        patch.setenv("BATCHWRIGHT_HOME", str(own))
        patch.setenv("NO_PROXY", "127.0.0.1")
        yield own


class Server:
    """The command as a process, and the address that it printed."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [COMMAND, "serve", "smollm2", "--port", "0", "--threads", "1", *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        self.url = self.line.split()[2]

    def stop(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Server]:
    started = Server(home, "--parallel", "4", "--context", "512")
    yield started
    assert started.stop(signal.SIGTERM) == (0, "stopped\n")


def get(url: str, **headers: str) -> Any:
    with build_opener(ProxyHandler({})).open(Request(url, headers=headers)) as answer:
        return answer.headers, answer.read()


@real
def test_the_line_it_prints_is_true(server: Server) -> None:
    assert server.line.startswith("smollm2 at http://127.0.0.1:")
    assert "(4 concurrent requests of 512 tokens)" in server.line
    root = server.url.removesuffix("/v1")
    headers, health = get(f"{root}/health", Origin="http://elsewhere.example")
    assert json.loads(health) == {"status": "ok"}
    assert headers["Access-Control-Allow-Origin"] != "http://elsewhere.example"
    (listed,) = json.loads(get(f"{server.url}/models")[1])["data"]
    assert (listed["id"], listed["meta"]["n_ctx"]) == ("smollm2", 512)
    assert b"llamacpp:prompt_tokens_total" in get(f"{root}/metrics")[1]


@real
def test_the_official_client_understands_it(server: Server) -> None:
    from openai import OpenAI

    with OpenAI(base_url=server.url, api_key="none") as client:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Name the capital of France."}],
            temperature=0,
            max_tokens=20,
        )

    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


@real
def test_a_pool_drives_the_real_server_the_model_in_process_and_both(server: Server) -> None:
    # Each answer is as long as its place in the list, which shows that the order is kept.
    requests = [
        chat("smollm2", f"Tell me about the number {n}.", max_tokens=n + 1, seed=n)
        for n in range(12)
    ]
    remote, inside = Endpoint(server.url), Endpoint("local:smollm2", batch=4)

    for endpoints in ([remote], [inside], [remote, inside]):
        with Pool(*endpoints, limit=4, deadline_s=600) as pool:
            outcomes = pool.map(requests)
        assert all(isinstance(outcome, Done) for outcome in outcomes), outcomes
        lengths = [one.usage.completion_tokens for one in outcomes if one and one.usage]
        assert lengths == list(range(1, 13))
        assert {one.endpoint for one in outcomes} <= {one.name for one in endpoints}


@real
def test_the_cache_keeps_what_the_real_server_said_to_the_end(
    server: Server, tmp_path: Path
) -> None:
    asked = [
        chat("smollm2", f"Name the capital of {country}.", temperature=0, max_tokens=60)
        for country in ("France", "Italy", "Spain")
    ] + [complete("smollm2", "1 2 3", temperature=0, max_tokens=40, stop=["6"])]

    with Pool(Endpoint(server.url), limit=4, deadline_s=600, cache=tmp_path / "c.db") as pool:
        first = pool.map(asked)
    with Pool(Endpoint(server.url), limit=4, deadline_s=600, cache=tmp_path / "c.db") as pool:
        second = pool.map(asked)

    assert all(isinstance(one, Done) for one in first + second)
    whole = [one.finish == "stop" for one in first if one]
    assert any(whole)
    for kept, before, after in zip(whole, first, second, strict=True):
        assert isinstance(before, Done)
        assert isinstance(after, Done)
        assert after.source == ("cache" if kept else "live")
        if kept:
            assert after.text == before.text


@real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_even_with_an_answer_under_way(home: Path, number: int) -> None:
    server = Server(home, "--parallel", "1")
    begun = threading.Event()
    ends: list[str] = []

    def ask() -> None:
        body = {"messages": [{"role": "user", "content": "Count to 900."}], "max_tokens": 1500}
        sent = Request(
            f"{server.url}/chat/completions", json.dumps({**body, "stream": True}).encode()
        )
        try:
            with build_opener(ProxyHandler({})).open(sent, timeout=60) as answer:
                answer.readline()
                begun.set()
                answer.read()
            ends.append("whole")
        except (OSError, HTTPException):
            ends.append("cut")

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(120)

    assert server.stop(number) == (0, "stopped\n")
    thread.join(60)
    # Never a part that looks like an answer.
    assert ends == ["cut"]
