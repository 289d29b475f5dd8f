"""Keys: sent to the server they are for, and left nowhere else, whatever goes wrong."""

import base64
import itertools
import json
import pickle
import re
import sys
import time
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from batchwright.calls import Endpoint, Failed, Pool, chat
from batchwright.calls.endpoints import parse_model
from batchwright.calls.simulator import Simulator
from batchwright.calls.wire.masking import Mask
from batchwright.errors import ConfigError
from batchwright.events import EventLog
from batchwright.rewards.config import RewardsConfig
from raw_server import RawServer, Seen

KEY = "sk-otter-4815162342abcdef"
MODELS = ("good", "refuse", "garbage")
PATH = "0123456789abcdef0123secret"
FORMS = [
    text
    for secret in (KEY, PATH, "hunter2")
    for text in (
        *(secret, secret.replace("-", "%2D"), secret.replace("-", "\\u002d")),
        *(secret.encode().hex(), "".join(f"&#{ord(char)};" for char in secret)),
        *(
            base64.b64encode(before + secret.encode()).decode().rstrip("=")[2 * len(before) : -1]
            for before in (b"", b":", b"k:")
        ),
    )
]


def leaks(text: str) -> list[str]:
    return [form for form in FORMS if form.lower() in text.lower()]


def files_with_secrets(folder: Path) -> dict[str, list[str]]:
    """Everything below a folder, names too, that holds a secret in any form."""
    found = {}
    for path in folder.rglob("*"):
        content = path.read_bytes().decode("latin-1") if path.is_file() else ""
        if hit := leaks(content) + leaks(path.name):
            found[str(path)] = hit
    return found


async def telltale(seen: Seen) -> None:
    """Repeats every header it got wherever it can, in answers, errors and redirects."""
    sent = seen.headers.get("authorization", "")
    said = json.dumps(seen.body)
    if seen.path.endswith("/models"):
        await seen.reply(body={"data": [{"id": name} for name in (f"m {sent}", *MODELS)]})
    elif "refuse" in said:
        await seen.reply(401, {"error": {"message": f"{'x' * 180} wrong key: {sent}"}})
    elif "move" in said:
        await seen.reply(307, {}, Location=f"http://127.0.0.1:9/{sent.replace(' ', '/')}")
    elif "plain" in said:
        await seen.reply(500, sent.encode())
    elif "coded" in said:
        # As gateways and debug pages repeat a request, with its path too.
        ways = (quote(sent, safe="").replace("-", "%2D"), base64.b64encode(sent.encode()).decode())
        ways += (sent.encode().hex(), json.dumps(sent).replace("-", "\\u002d"), repr(sent))
        ways += ("".join(f"&#{ord(char)};" for char in sent), seen.path)
        chosen = ways[int(re.findall(r"coded (\d+)", said)[0])]
        await seen.reply(400, {"error": {"message": chosen}})
    elif "base64" in said:
        await seen.answer(base64.b64encode(f"x{sent}".encode()).decode())
    elif "escaped" in said:
        # What JSON reads as the same text, as PHP and .NET write it.
        body = json.dumps({"choices": [{"message": {"content": sent}}]}).encode()
        await seen.reply(200, body.replace(b"-", rb"\u002D").replace(b"/", rb"\/"))
    elif "encoding" in said:
        headers = {"Content-Encoding": sent.removeprefix("Bearer ")}
        await seen.reply(200, {"choices": [{"message": {"content": "Hi"}}]}, **headers)
    elif "echo" in said:
        await seen.answer(f"you sent {sent}")
    elif "garbage" in said:
        await seen.send(f"HTTP/1.1 {sent}\r\n\r\n".encode())
    else:
        await seen.answer("Score: 7")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OTTER", KEY)
    for name in ("OPENAI_API_KEY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    words = ["good", "refuse", "move", "plain", "echo", "garbage", "base64", "escaped", "encoding"]
    words += [f"coded {n}" for n in range(7)]
    rows = [{"id": word, "prompt": word, "response": word, "ground_truth": "4"} for word in words]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "one.jsonl").write_text(json.dumps(rows[0]) + "\n")
    return tmp_path


COMMANDS = """
calls run -i rows.jsonl -o out.jsonl --endpoint URL --model m --key-env OTTER --tries 1 -q
--debug calls run -i rows.jsonl -o out2.jsonl --endpoint URL --model m --key-env OTTER --tries 1 -q
calls run -i rows.jsonl -o out3.jsonl --endpoint URL --model refuse --key-env OTTER --cache c.db -q
calls run -i one.jsonl -o 4.jsonl --endpoint URL --model m --key-env OTTER --cache c.db --rpm 99 -q
calls run -i one.jsonl -o 5.jsonl --endpoint URL --model m --key-env OTTER --run-dir ran -q
calls cache export c.db -o exported.jsonl
calls cache stats c.db
calls probe --endpoint URL --model m --key-env OTTER --most 2 --max-calls 40 -q
--debug calls probe --endpoint URL --model refuse --key-env OTTER --most 2 -q
--debug calls probe --endpoint URL --model garbage --key-env OTTER --most 2 -q
reward score -i rows.jsonl -c judge.toml -o scores.jsonl --allow-missing -q
reward explain refuse -i rows.jsonl -c judge.toml
--debug reward explain echo -i rows.jsonl -c judge.toml
--debug calls run -i rows.jsonl -o no.jsonl --endpoint http://user:hunter2@127.0.0.1:port --model m
--debug calls run -i rows.jsonl -o no.jsonl --endpoint user:hunter2@127.0.0.1 --model m
--debug calls probe --endpoint http://[user:hunter2@127.0.0.1 --model m
--debug calls probe --endpoint http://127.0.0.1:9/v1?key=hunter2 --model m
"""


def test_a_test_that_looks_for_secrets_finds_them(folder):
    (folder / "left").write_text(f"Authorization: Bearer {KEY}")
    assert list(files_with_secrets(folder)) == [str(folder / "left")]


def test_commands_leave_no_key_in_any_file_or_message(folder, call):
    with RawServer(telltale) as server:
        url = f"{server.url}/{PATH}/v1"
        (folder / "judge.toml").write_text(
            f'endpoints = ["{url}"]\nkey_env = "OTTER"\ntries = 1\n[[part]]\nkind = "judge"\n'
            'models = ["m"]\ntemplate = "{response}"\n'
        )
        for line in COMMANDS.strip().splitlines():
            found = call(line.replace("URL", url), folder)
            assert leaks(found.out + found.err) == [], (line, found.out, found.err)
            assert "internal error" not in found.err, (line, found.err)
        sent = {seen.headers.get("authorization") for seen in server.seen}
        assert sent == {f"Bearer {KEY}"}
        assert {seen.path.split("/")[2] for seen in server.seen} == {PATH}
    # The address is the user's own setting.
    (folder / "judge.toml").unlink()
    assert files_with_secrets(folder) == {}
    assert (folder / "home" / "limits.json").exists()
    assert (folder / "home" / "rates.db").exists()
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows if "error" not in row] == ["good"]


def test_a_pool_leaves_no_key_in_its_log_cache_or_outcomes(folder, caplog):
    words = ("good", "refuse", "move", "plain", "echo", "garbage", "base64", "coded 1", "coded 2")
    words += ("escaped", "encoding")
    requests = [chat("m", word, temperature=0) for word in words]
    with RawServer(telltale) as server:
        endpoint = Endpoint(f"{server.url}/{PATH}/v1", key_env="OTTER")
        with EventLog(folder / "events.jsonl") as events:
            rules = {"cache": folder / "c.db", "events": events, "tries": 1}
            with Pool(endpoint, **rules) as pool:
                outcomes = pool.map(requests)
                told = repr((outcomes, pool.stats(), pool, endpoint))
    assert [isinstance(one, Failed) for one in outcomes] == [False, *[True] * 10]
    assert leaks(told + caplog.text) == []
    assert files_with_secrets(folder) == {}


def test_what_goes_to_another_process_has_no_key_in_it(folder, monkeypatch):
    """What Ray and spawned workers are given is pickled, and anybody may read a command line."""
    monkeypatch.setenv("OTTER_PATH", PATH)
    endpoint = Endpoint("http://127.0.0.1:9/${OTTER_PATH}/v1", key_env="OTTER")
    rewards = {"endpoints": ["http://127.0.0.1:9/${OTTER_PATH}/v1"], "key_env": "OTTER"}
    config = RewardsConfig.of({**rewards, "part": [{"kind": "judge", "models": ["m"]}]})
    with Simulator(api_key=KEY).running() as simulated:
        titles = Path(f"/proc/{simulated.pid}/cmdline").read_bytes()
        titles += (
            Path(f"/proc/{simulated.pid}/environ")
            .read_bytes()
            .replace(f"OTTER={KEY}".encode(), b"")
        )
    sent = pickle.dumps(endpoint) + pickle.dumps(config)
    assert endpoint.url.endswith(f"/{PATH}/v1")
    assert pickle.loads(pickle.dumps(endpoint)) == endpoint
    assert leaks(sent.decode("latin-1")) == []
    assert leaks(titles.decode("latin-1").replace(f"OTTER_PATH={PATH}", "")) == []
    assert leaks(Path("/proc/self/cmdline").read_text()) == []


WAYS = [
    str,
    lambda char: f"\\u{ord(char):04x}",
    lambda char: f"\\u{ord(char):04X}",
    lambda char: f"%{ord(char):02x}",
    lambda char: f"%25{ord(char):02X}",
    lambda char: f"&#{ord(char)};",
    lambda char: f"&#x{ord(char):04x};",
    lambda char: char if char.isalnum() else f"\\{char}",
]


@given(
    st.text("abcXYZ019-_/+~.=", min_size=16, max_size=40),
    st.lists(st.sampled_from(WAYS), min_size=1, max_size=8),
)
def test_a_key_is_found_and_hidden_however_its_characters_are_written(key, ways):
    written = "".join(way(char) for char, way in zip(key, itertools.cycle(ways), strict=False))
    mask = Mask(key)

    assert mask.is_in(f'{{"text": "it is {written}."}}'.encode())
    assert mask.hide(f"it is {written}.") == "it is ...."
    assert not mask.is_in(b'{"text": "50% of \\u0041 and \\/ are &#65;"}')


def test_looking_for_a_key_takes_no_longer_in_a_hostile_body():
    mask = Mask(KEY)
    for word in (b"\\", b"%25", b"%", b"\\u0073", b"&#0", b"sk-", b"\\\\u"):
        began = time.process_time()
        assert not mask.is_in(word * (2**22 // len(word)))
        assert time.process_time() - began < 30


@pytest.mark.parametrize("around", ["{}\n", "  {}\r\n", "\t{}"])
def test_white_space_around_a_key_is_not_sent(around, folder, monkeypatch):
    monkeypatch.setenv("OTTER", around.format(KEY))
    with RawServer(telltale) as server, Pool(Endpoint(server.url, key_env="OTTER")) as pool:
        assert pool.map([chat("m", "good")])[0]
        assert server.seen[0].headers["authorization"] == f"Bearer {KEY}"


@pytest.mark.parametrize("damaged", [f"{KEY}\n{KEY}", f"{KEY}\x00", f"{KEY}é"])
def test_a_key_that_no_header_can_hold_is_said_to_be_one_without_showing_it(damaged, monkeypatch):
    monkeypatch.setattr("os.environ", {"OTTER": damaged})
    with pytest.raises(ConfigError, match="the API key in OTTER holds a line break") as error:
        Pool(Endpoint("http://127.0.0.1:9", key_env="OTTER"))
    assert leaks(str(error.value)) == []


@pytest.mark.parametrize(
    "text",
    [
        "http://user:hunter2@host:port/v1",
        "http://user:hunter2@host/v1",
        "user:hunter2@host",
        "ftp://user:hunter2@host",
        "http://:hunter2@",
        "http://[user:hunter2@host",
        "http://host/v1?key=hunter2",
        "unix://user:hunter2@host/path",
        f"{KEY}",
        f"http//host/{PATH}/v1",
    ],
)
def test_addresses_that_cannot_be_read_are_not_repeated_with_their_secrets(text):
    for read in (Endpoint, parse_model):
        with pytest.raises(ConfigError) as error:
            read(text)
        assert leaks(str(error.value)) == []
        assert leaks(repr(error.value.__cause__)) == []


LEARNING = "--num-processes 2 --num-steps 1 --num-env-steps 4 --save-interval 1 --quiet"


@pytest.mark.training
def test_training_and_evaluating_on_a_server_leave_no_key_anywhere(folder, call, monkeypatch):
    """The key is in the path of the address, in the environment, and in what the server says."""
    monkeypatch.setenv("OTTER_PATH", PATH)
    with RawServer(telltale) as server:
        known = f"{server.url}/{PATH}/v1#good"
        hidden = f"{server.url}/${{OTTER_PATH}}/v1#"
        train = "train query-mutator --target-model"
        online = "train sft --model tiny --online --max-steps 1 --quiet --online-policy"
        lines = {
            f"{train} {hidden}good --save-dir run {LEARNING}": 0,
            "evaluate query-mutator run --questions 2 --bandit-episodes 2 --quiet": 0,
            "report run": 0,
            f"--debug {train} {hidden}refuse --save-dir 2 {LEARNING}": 0,
            f"--debug {train} {hidden}garbage --save-dir 3 {LEARNING}": 0,
            f"{train} {known} --save-dir 4 {LEARNING}": 1,
            f"--debug {train} sim --mutator-model {known} --save-dir 5 {LEARNING}": 1,
            f"{train} m --endpoint {known.partition('#')[0]} --save-dir 6": 1,
            f"--debug {train} http://u:hunter2@h/v1#m --save-dir 7": 1,
            f"--debug {train} http://h/v1?key=hunter2#m --save-dir 8": 1,
            f"{train} http://h/${{NO_SUCH}}/v1#m --save-dir 9": 1,
            f"--debug {online} http://u:hunter2@h/v1#m --run-dir 10": 1,
            f"--debug {online} http://h/v1?key=hunter2#m --run-dir 11": 1,
            f"{online} {known} --run-dir 12": 1,
            "--debug train sft --model http://u:hunter2@h/v1#m --data rows.jsonl --run-dir 13": 1,
            "train kge --data http://u:hunter2@h/graph --run-dir 14": 1,
            "train prover --data http://h/graph?key=hunter2 --run-dir 15": 1,
        }
        for line, code in lines.items():
            found = call(line, folder)
            assert leaks(found.out + found.err) == [], (line, found.out, found.err)
            assert found.code == code, (line, found.err)
            assert "internal error" not in found.err, (line, found.err)
        assert all(f"/{PATH}/" in seen.path for seen in server.seen)
    assert (folder / "run" / "config.toml").exists()
    assert files_with_secrets(folder) == {}
