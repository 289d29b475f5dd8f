"""`batchwright calls run` and `probe`: answers in order, whatever happens in between."""

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls.simulator import Simulator
from batchwright.report.summary import summarise
from raw_server import RawServer, Seen, answer

COMMAND = Path(sys.executable).parent / "batchwright"


@pytest.fixture(autouse=True)
def _own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


async def slower(seen: Seen) -> None:
    await asyncio.sleep(0.005)
    await seen.answer()


def write_prompts(folder: Path, n: int) -> None:
    rows = [{"id": f"row-{i}", "prompt": f"question {i}", "answer": 4} for i in range(n)]
    rows[1] = {"messages": [{"role": "user", "content": "question 1"}], "parameters": {"seed": 3}}
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def answers(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def line(url: str, more: str = "") -> str:
    return f"calls run -i prompts.jsonl -o answers.jsonl --endpoint {url} --model m {more}"


def test_every_prompt_is_answered_in_order_and_a_second_run_calls_nobody(call, tmp_path):
    write_prompts(tmp_path, 40)

    with RawServer(slower) as server:
        first = call(line(server.url, "--temperature 0.5 --max-tokens 9 --format json"), tmp_path)
        second = call(line(server.url, "--temperature 0.5 --max-tokens 9"), tmp_path)
        assert len(server.seen) == 40
        assert {seen.body["temperature"] for seen in server.seen} == {0.5}
        assert sum("seed" in seen.body for seen in server.seen) == 1

    rows = answers(tmp_path)
    assert [row["text"] for row in rows] == [f"re: question {i}" for i in range(40)]
    assert [row["id"] for row in rows[:3]] == ["row-0", 1, "row-2"]
    assert rows[0]["usage"] == {"prompt": 7, "completion": 3}
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert (first.data["written"], first.data["calls"]["sent"]) == (40, 40)
    assert "40 from an earlier run" in second.out
    # What was only for going on is gone.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "answers.jsonl",
        "home",
        "prompts.jsonl",
    ]


def test_a_dry_run_predicts_calls_hits_and_cost_and_calls_nobody(call, tmp_path):
    write_prompts(tmp_path, 10)
    prices = "--price-in 1 --price-out 2 --max-tokens 100 --temperature 0 --cache calls.db"

    with RawServer(slower) as server:
        before = call(line(server.url, f"{prices} --dry-run --format json"), tmp_path)
        assert server.seen == []
        assert not (tmp_path / "answers.jsonl").exists()
        assert call(line(server.url, prices), tmp_path).code == 0
        (tmp_path / "answers.jsonl").unlink()
        after = call(line(server.url, f"{prices} --dry-run --format json"), tmp_path)
        assert len(server.seen) == 10

    assert (before.data["calls"], before.data["cache_hits"]) == (10, 0)
    assert 10 * 200e-6 < before.data["cost_most"] < 10 * 600e-6
    assert (after.data["calls"], after.data["cache_hits"]) == (0, 10)


def test_the_responses_api_is_called_where_it_is_asked_for(call, tmp_path):
    write_prompts(tmp_path, 4)
    rows = [json.loads(row) for row in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    rows[1]["parameters"] = {"max_output_tokens": 2}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    same = "--temperature 0 --max-tokens 3"

    with Simulator(latency_s=0, models=["m"]).running(in_thread=True) as url:
        said = line(f"{url}/v1", f"--api responses {same} --cache calls.db")
        assert "seed" in call(said + " --seed 3", tmp_path).err
        first = call(said, tmp_path)
        found = answers(tmp_path)
        (tmp_path / "answers.jsonl").unlink()
        again = call(said + " --format json", tmp_path)
        assert url.stats()["started"] == 4

    assert first.code == 0, first.err
    assert [row["text"] for row in found] == ["question 0 ->", "question 1"] + [
        f"question {n} ->" for n in (2, 3)
    ]
    assert {row["finish"] for row in found} == {"length"}
    assert [row["usage"]["completion"] for row in found] == [3, 2, 3, 3]
    assert answers(tmp_path) == found
    assert again.data["calls"]["hits"] == 4


def test_failed_calls_are_marked_and_made_again_when_asked(call, tmp_path):
    write_prompts(tmp_path, 10)
    healthy = False

    async def handler(seen: Seen) -> None:
        if seen.text in ("question 3", "question 9") and not healthy:
            await seen.reply(400, {"error": {"message": "not today"}})
        else:
            await seen.answer()

    said = "--run-dir run --price-in 1 --price-out 2"
    shown = []
    with RawServer(handler) as server:
        first = call(line(server.url, said), tmp_path)
        shown.append(summarise(tmp_path / "run")["calls"])
        marked = answers(tmp_path)
        healthy = True
        unasked = call(line(server.url, said), tmp_path)
        shown.append(summarise(tmp_path / "run")["calls"])
        again = call(line(server.url, f"{said} --retry-failed --format json"), tmp_path)
        shown.append(summarise(tmp_path / "run")["calls"])
        assert len(server.seen) == 12
    # The record of all three commands together says what the last one says.
    assert [one["totals"]["failed"] for one in shown] == [2, 2, 0]
    assert [one["totals"]["done"] for one in shown] == [8, 8, 10]
    assert shown[-1]["cost"] == pytest.approx(again.data["cost"])

    assert first.code == 1
    assert "2 of 10 calls failed" in first.err
    assert (marked[3]["error"], marked[3]["detail"]) == (
        "http_4xx",
        "the server responded with status 400: not today",
    )
    assert "text" not in marked[3]
    assert (unasked.code, again.code) == (0, 0), again.err
    assert [row["text"] for row in answers(tmp_path)] == [f"re: question {i}" for i in range(10)]


def test_money_ends_the_run_and_more_money_ends_it_well(call, tmp_path):
    write_prompts(tmp_path, 60)
    # 7 in, 3 out: 0.00001 a call.
    prices = "--price-in 1 --price-out 1 --batch-size 2 --max-tokens 3"

    with RawServer(slower) as server:
        short = call(line(server.url, f"{prices} --max-cost 0.0006"), tmp_path)
        paid = len(server.seen)
        kept = len(answers(tmp_path))
        enough = call(line(server.url, f"{prices} --max-cost 1"), tmp_path)
        assert len(server.seen) == 60

    assert short.code == 1
    assert "prompts have a response" in short.err
    assert 0 < kept == paid < 60
    assert enough.code == 0, enough.err
    assert f"0.0006 spent ({1e-5 * paid:.6g} in earlier runs)" in enough.out


def test_a_spending_cap_holds_over_all_runs_of_one_output(call, tmp_path):
    write_prompts(tmp_path, 60)
    prices = "--price-in 1 --price-out 1 --batch-size 3 --max-tokens 3"
    paid = []

    with RawServer(slower) as server:
        # A call counts as 0.0002 or so before it is sent, a token for each byte, and costs 0.00001.
        for cap, more in ((0.0003, ""), (0.0003, ""), (0.0004, "--cache calls.db"), (0.0005, "")):
            done = call(line(server.url, f"{prices} --max-cost {cap} {more}"), tmp_path)
            paid.append(len(server.seen))
            assert done.code == 1
            assert f"--max-cost {cap} is reached: {1e-5 * paid[-1]:.6g} spent" in done.err
            assert "raise --max-cost and run again" in done.err
            assert done.err.count("\n") == 1
            assert 1e-5 * paid[-1] <= cap + 1e-12
        # Who killed it before it counted a response that is in its own cache has paid for it.
        (tmp_path / ".answers.jsonl.spent").unlink()
        counted = call(line(server.url, f"{prices} --max-cost 0.0003"), tmp_path)
        assert len(server.seen) == paid[-1]
        assert f"{1e-5 * paid[-1]:.6g} spent" in counted.err
    assert 0 < paid[0] == paid[1] < paid[2] < paid[3]


def test_a_report_has_the_cost_that_a_killed_run_did_not_log(call, tmp_path):
    write_prompts(tmp_path, 9)
    said = "--price-in 1 --price-out 2 --max-tokens 3 --run-dir run"
    with RawServer(slower) as server:
        assert call(line(server.url, said), tmp_path).code == 0
        # Killed after its last answer: what the log says of the calls has not been written.
        log = tmp_path / "run" / "events.jsonl"
        kept = [row for row in log.read_text().splitlines(True) if '"kind":"start"' in row]
        log.write_text("".join(kept))
        write_prompts(tmp_path, 14)
        again = call(line(server.url, f"{said} --format json"), tmp_path).data
        assert len(server.seen) == 14

    assert again["cost"] > again["cost_earlier"] > 0
    shown = call("report run --format json", tmp_path).data
    assert shown["calls"]["cost"] == pytest.approx(again["cost"])


def test_a_spending_cap_holds_over_kills(tmp_path):
    """What the server bills stays below the cap, whenever and however a run is stopped."""
    write_prompts(tmp_path, 120)
    draw = random.Random(7)
    billed: list[int] = []

    async def handler(seen: Seen) -> None:
        # The worst of all tokenizers, and every response as long as it may be.
        usage = (len(json.dumps(seen.body["messages"])), seen.body["max_tokens"])
        billed.append(sum(usage))
        await asyncio.sleep(draw.uniform(0.005, 0.1))
        if draw.random() < 0.03:
            # Nobody bills this.
            billed.remove(sum(usage))
            await seen.reply(500, {"error": {"message": "not now"}})
            return
        await seen.reply(body=answer("x", usage=usage))

    price, cap, told = 10, 0.07, ""
    with RawServer(handler) as server:
        prices = f"--price-in {price} --price-out {price} --max-tokens 50 --max-cost {cap}"
        words = line(server.url, f"--batch-size 8 --quiet {prices}").split()
        for signum in (signal.SIGKILL, signal.SIGINT, None):
            before = len(server.seen)
            process = subprocess.Popen(
                [COMMAND, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            while signum is not None and process.poll() is None and len(server.seen) < before + 8:
                time.sleep(0.002)
            if signum is not None:
                process.send_signal(signum)
            told = process.communicate(timeout=60)[1].decode()

    assert process.returncode == 1
    spent, more = map(float, re.findall(r"([\d.]+) spent .* at most ([\d.]+) more", told)[0])
    assert f"--max-cost {cap} is reached" in told
    # The rest is less than what one call may cost, which is what the dry run counts.
    assert cap - 0.004 < spent + more <= cap
    assert spent - 1e-9 <= sum(billed) * price / 1e6 <= spent + more


def test_the_count_of_what_was_paid_is_not_guessed(call, tmp_path):
    write_prompts(tmp_path, 4)
    with RawServer(slower) as server:
        for content in ("not ours", "batchwright calls run: what was paid for each prompt\nx\n"):
            (tmp_path / ".answers.jsonl.spent").write_text(content)
            done = call(line(server.url, "--price-in 1 --price-out 1"), tmp_path)
            assert (done.code, "move it away" in done.err) == (1, True)
            assert (tmp_path / ".answers.jsonl.spent").read_text() == content
        assert server.seen == []


def test_the_cost_of_a_dry_run_is_a_bound_or_there_is_none(call, tmp_path):
    draw = random.Random(2)

    async def wordy(seen: Seen) -> None:
        # As long as it may be, and a token for each character of a prompt without words.
        limit = seen.body.get("max_tokens", 5000) * seen.body.get("n", 1)
        usage = (len(seen.text.encode()) + 20, limit)
        await seen.reply(body=answer("x", usage=usage, finish="length"))

    rows = []
    for _ in range(30):
        text = "".join(draw.choices("0123456789\u4e00é~", k=draw.randint(1, 90)))
        rows.append({"prompt": text, "parameters": {"n": draw.randint(1, 3)}})
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prices = "--price-in 3 --price-out 15 --format json"

    with RawServer(wordy) as server:
        none = call(line(server.url, f"{prices} --dry-run"), tmp_path)
        told = call(line(server.url, "--price-in 3 --price-out 15 --dry-run"), tmp_path)
        bound = call(line(server.url, f"{prices} --dry-run --max-tokens 7"), tmp_path)
        real = call(line(server.url, f"{prices} --max-tokens 7"), tmp_path)

    assert (none.data["cost_most"], none.data["unbounded_calls"]) == (None, 30)
    assert "cost without a bound" in told.out
    assert "set --max-tokens" in told.out
    assert real.code == 0, real.err
    assert 0 < real.data["cost"] <= bound.data["cost_most"]


LIMITS = {
    # What servers say of a model in their own words, and the most tokens of a response by it.
    "vLLM": ({"/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]}}, 4096),
    "SGLang": ({"/v1/models": {"data": [{"id": "m", "max_model_len": 2048}]}}, 2048),
    "OpenRouter": (
        {
            "/v1/models": {
                "data": [
                    {"id": "other", "context_length": 1},
                    {
                        "id": "m",
                        "context_length": 9000,
                        "top_provider": {"context_length": 8000, "max_completion_tokens": 700},
                    },
                ]
            }
        },
        700,
    ),
    "Groq": (
        {
            "/v1/models": {
                "data": [{"id": "m", "context_window": 8192, "max_completion_tokens": 512}]
            }
        },
        512,
    ),
    "Mistral": ({"/v1/models": {"data": [{"id": "m", "max_context_length": 32768}]}}, 32768),
    "llama.cpp": (
        {
            "/v1/models": {"data": [{"id": "m", "meta": {"n_ctx_train": 131072}}]},
            "/props": {"default_generation_settings": {"n_ctx": 1024}, "total_slots": 4},
        },
        1024,
    ),
    "Ollama": (
        {"/api/show": {"parameters": "", "model_info": {"qwen2.context_length": 32768}}},
        327_680,
    ),
    "Ollama, Modelfile": (
        {
            "/api/show": {
                "parameters": "num_ctx                        4096\nnum_predict    99",
                "model_info": {"qwen2.context_length": 32768},
            }
        },
        99,
    ),
    "OpenAI": ({"/v1/models": {"data": [{"id": "m", "owned_by": "openai"}]}}, None),
    "another model": ({"/v1/models": {"data": [{"id": "x", "max_model_len": 4096}]}}, None),
    "nonsense": ({"/v1/models": {"data": [{"id": "m", "max_model_len": "much"}]}}, None),
    "HTML": ({}, None),
}


@pytest.mark.parametrize("server_name", LIMITS)
def test_without_max_tokens_the_bound_is_the_models_own_or_there_is_none(
    call, tmp_path, server_name
):
    bodies, most = LIMITS[server_name]
    write_prompts(tmp_path, 3)

    async def serve(seen: Seen) -> None:
        body = bodies.get(seen.path)
        await (seen.reply(404, b"<html>") if body is None else seen.reply(body=body))

    said = "--price-in 0 --price-out 1 --dry-run --format json"
    with RawServer(serve) as server:
        address = server.url
        if server_name.startswith("Ollama"):
            address = address.replace("http://", "ollama://").removesuffix("/v1")
        dry = call(line(address, said), tmp_path)
        paths = {seen.path for seen in server.seen}
        given = call(line(address, f"{said} --model-max-tokens 50"), tmp_path)
        asked = len(server.seen)
        call(line(address, f"{said} --max-tokens 9"), tmp_path)
        # Who says it himself asks nobody.
        assert len(server.seen) == asked
    plain = line(address, "--price-in 0 --price-out 1 --dry-run")
    unreachable = call(plain, tmp_path)

    assert not paths & {"/v1/chat/completions", "/api/chat"}
    if most is None:
        assert (dry.data["cost_most"], dry.data["unbounded_calls"]) == (None, 3)
    else:
        assert dry.data["completion_tokens_most"] == 3 * most
        assert dry.data["cost_most"] == pytest.approx(3 * most / 1e6)
        assert dry.data["model_max_tokens"]["m"]["tokens"] == most
    assert given.data["cost_most"] == pytest.approx(150 / 1e6)
    assert "without a bound" in unreachable.out
    assert unreachable.code == 0


def test_a_bound_by_the_models_maximum_holds(call, tmp_path):
    write_prompts(tmp_path, 5)
    prices = "--price-in 1 --price-out 100 --format json"

    with Simulator(latency_s=0, words=500, context=20, models=["m"]).running(in_thread=True) as url:
        dry = call(line(f"{url}/v1", f"{prices} --dry-run"), tmp_path)
        done = call(line(f"{url}/v1", prices), tmp_path)

    assert done.code == 0
    assert dry.data["completion_tokens_most"] == done.data["calls"]["completion_tokens"] == 100
    assert done.data["cost"] <= dry.data["cost_most"] < 2 * done.data["cost"]


def test_prices_and_caps_that_make_no_sense_are_refused_by_the_names_of_their_flags(call, tmp_path):
    write_prompts(tmp_path, 2)
    for flags, words in (
        ("--max-cost 1", "--max-cost needs prices; give --price-in and --price-out"),
        ("--max-cost 1 --price-in 1", "--price-in and --price-out go together"),
        ("--max-cost -1 --price-in 1 --price-out 1", "--max-cost must be at least 0"),
        ("--price-in nan --price-out 1", "--price-in must be at least 0"),
    ):
        done = call(line("http://127.0.0.1:9/v1", flags), tmp_path)
        assert (done.code, words in done.err) == (1, True), done.err


def test_other_prompts_settings_or_bad_rows_are_refused(call, tmp_path):
    write_prompts(tmp_path, 5)
    with RawServer(slower) as server:
        assert call(line(server.url), tmp_path).code == 0
        other = call(line(server.url, "--temperature 1"), tmp_path)
        (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n{"text": "y"}\n')
        bad = call(line(server.url), tmp_path)
        (tmp_path / "prompts.jsonl").write_text(
            '{"id": 1, "prompt": "x"}\n{"id": 1, "prompt": "y"}'
        )
        twice = call(line(server.url), tmp_path)
        (tmp_path / "prompts.jsonl").write_text("not json\n")
        no_json = call(line(server.url), tmp_path)
        size = call(line(server.url, "--batch-size many"), tmp_path)
        assert len(server.seen) == 5

    assert "line 1: this is not a response to prompt 1" in other.err
    assert "prompts.jsonl, line 2" in bad.err
    assert "line 2: the id 1" in twice.err
    assert "line 1: not JSON" in no_json.err
    assert [one.code for one in (other, bad, twice, no_json, size)] == [1] * 5


def test_a_torn_last_line_is_written_anew(call, tmp_path):
    write_prompts(tmp_path, 6)
    with RawServer(slower) as server:
        assert call(line(server.url), tmp_path).code == 0
        whole = (tmp_path / "answers.jsonl").read_bytes()
        (tmp_path / "answers.jsonl").write_bytes(whole[: len(whole) - 20])
        assert call(line(server.url), tmp_path).code == 0
        assert len(server.seen) == 7

    assert (tmp_path / "answers.jsonl").read_bytes() == whole


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_pays_for_each_answer_once(tmp_path):
    write_prompts(tmp_path, 150)
    draw = random.Random(5)

    async def handler(seen: Seen) -> None:
        await asyncio.sleep(0.02)
        await seen.answer()

    with RawServer(handler) as server:
        words = line(server.url, "--batch-size 4 --quiet").split()
        kills = 0
        while kills < 2:
            before = len(server.seen)
            process = subprocess.Popen(
                [COMMAND, *words],
                cwd=tmp_path,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            while process.poll() is None and len(server.seen) < before + 8:
                time.sleep(0.005)
            time.sleep(draw.uniform(0, 0.05))
            if process.poll() is None:
                process.send_signal(signal.SIGKILL if kills else signal.SIGINT)
                kills += 1
            process.wait(timeout=60)
            rows = (tmp_path / "answers.jsonl").read_bytes().split(b"\n")[:-1]
            texts = [json.loads(row)["text"] for row in rows]
            assert texts == [f"re: question {i}" for i in range(len(texts))]
            if process.returncode == 0:
                break
        done = subprocess.run([COMMAND, *words], cwd=tmp_path, capture_output=True, timeout=60)
        # At a kill four calls are in flight, and as many answers may be on their way to the disk.
        assert len(server.seen) <= 150 + 8 * kills

    assert done.returncode == 0, done.stderr
    assert [row["text"] for row in answers(tmp_path)] == [f"re: question {i}" for i in range(150)]


@pytest.mark.parametrize(
    "presses", [1, *(pytest.param(presses, marks=pytest.mark.slow) for presses in (2, 3, 5))]
)
def test_ctrl_c_says_what_was_kept_and_how_to_resume(presses, tmp_path):
    write_prompts(tmp_path, 80)
    wait = True

    async def handler(seen: Seen) -> None:
        # One that never ends, and responses after it that cannot be written yet.
        await asyncio.sleep(60 if wait and seen.text == "question 6" else 0.02)
        await seen.answer()

    with RawServer(handler) as server:
        prices = "--price-in 1 --price-out 1 --max-tokens 3"
        words = line(server.url, f"--batch-size 4 --quiet {prices}").split()
        process = subprocess.Popen(
            [COMMAND, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        while process.poll() is None and len(server.seen) < 20:
            time.sleep(0.005)
        for _ in range(presses):
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        out, err = process.communicate(timeout=60)
        told = err.decode()
        wait = False
        first = len(server.seen)
        done = subprocess.run([COMMAND, *words], cwd=tmp_path, capture_output=True, timeout=60)
        # What was in flight is called for again, and nothing else.
        assert len(server.seen) <= 80 + 4

    # A Ctrl-C that comes when Python itself ends kills it, after the sentence.
    assert process.returncode in ((130,) if presses < 3 else (130, -signal.SIGINT))
    assert out == b""
    assert told.count("\n") == 1, told
    assert told.startswith("stopped: 6 of 80 responses are in answers.jsonl, and those that came")
    assert re.search(r" spent and at most 0\.000\d+ more for [1-4] tries whose resp", told), told
    assert "; run the same command again to resume" in told
    assert first < 40
    assert done.returncode == 0, done.stderr
    assert [row["text"] for row in answers(tmp_path)] == [f"re: question {i}" for i in range(80)]


def test_a_full_disk_is_one_sentence_and_the_run_resumes(tmp_path):
    write_prompts(tmp_path, 40)
    # No file may grow beyond 100 kB, which is about as a disk that becomes full.
    limited = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
        "from batchwright.cli.app import main; main()"
    )

    async def handler(seen: Seen) -> None:
        await seen.answer("x" * 4000)

    with RawServer(handler) as server:
        words = line(server.url, "--quiet").split()
        full = subprocess.run(
            [sys.executable, "-c", limited, *words], cwd=tmp_path, capture_output=True, timeout=60
        )
        size = (tmp_path / "answers.jsonl").stat().st_size
        with open("/dev/full", "w") as nowhere:
            told = subprocess.run(
                [COMMAND, *words], cwd=tmp_path, stdout=nowhere, stderr=subprocess.PIPE, timeout=60
            )

    assert full.returncode == 1
    last = full.stderr.decode().splitlines()[-1]
    assert last.startswith("error: cannot write answers.jsonl: File too large; free space and run")
    for noise in ("Traceback", "destroyed", "internal"):
        assert noise not in full.stderr.decode()
    assert size <= 100_000
    assert told.returncode == 1
    assert told.stderr == b"error: cannot write the output: no space is left there\n"
    assert [row["text"] for row in answers(tmp_path)] == ["x" * 4000] * 40


def test_probe_draws_both_curves_and_prints_the_line_to_use(call, tmp_path):
    with Simulator(kind="queue", knee=4, latency_s=0.02, sigma=0.0).running() as url:
        told = call(f"calls probe -e {url} -m sim --most 8 --max-calls 150 --plot k.png", tmp_path)
        data = call(f"calls probe -e {url} -m sim --most 1 --format json", tmp_path)
        few = call(f"calls probe -e {url} -m sim --max-calls 24", tmp_path)
        none = call(f"calls probe -e {url} -m sim --max-calls 2", tmp_path)

    assert told.code == 0, told.err
    assert "throughput" in told.out
    assert "latency p95" in told.out
    assert "90 % interval: " in told.out
    assert (
        f"use: batchwright calls run -i prompts.jsonl -o answers.jsonl --endpoint {url}" in told.out
    )
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")
    assert [level["concurrency"] for level in data.data["levels"]] == [1]
    assert (data.data["knee"], data.data["interval"], data.data["sure"]) == (1, [1, 1], True)
    assert data.data["use"].endswith("--batch-size 1")
    assert data.data["failed"] == {}
    assert few.code == 0
    assert "not sure: " in few.out
    assert "after 24 calls" in few.out
    assert few.out.rstrip().endswith("--batch-size auto")
    assert none.code == 1
    assert none.err.startswith("error: 2 calls in 0 s are too few to measure a level; ")


def test_probing_nobody_is_one_sentence(call, tmp_path):
    gone = call("calls probe -e http://127.0.0.1:9 -m m", tmp_path)

    assert gone.code == 1
    assert "does not respond for the model 'm' (unreachable)" in gone.err
    assert gone.err.count("\n") == 1


def test_the_example_of_the_document_runs_without_a_server_of_ones_own(tmp_path):
    script = Path(__file__).parents[1] / "examples" / "query_mutation" / "benchmark_batching.py"
    done = subprocess.run(
        [sys.executable, "-W", "error", script], cwd=tmp_path, capture_output=True, text=True
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "8 queries" in done.stdout
    assert done.stdout.count("0 of 8 invalid") == 6
    assert [path.name for path in tmp_path.iterdir()] in ([], ["home"])


def test_a_folder_is_no_file_of_prompts(tmp_path, call):
    line = "calls run -i . -o answers.jsonl --endpoint http://127.0.0.1:9/v1 --model m"
    outcome = call(line, tmp_path)

    assert outcome.code == 1
    assert outcome.err == "error: . is a folder; name a JSONL file of prompts\n"


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "params", "model", "tools"])
def test_a_parameter_beside_the_prompt_is_refused_with_where_it_belongs(call, tmp_path, field):
    row = {"prompt": "2+2?", field: 5}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    done = call("calls run -i prompts.jsonl -o out.jsonl -e http://127.0.0.1:9/v1 -m m", tmp_path)
    assert done.code == 1
    assert f'"parameters": {{"{field}": ...}}' in done.err
    assert "line 1" in done.err
    assert not (tmp_path / "out.jsonl").exists()
