"""Every file under examples/rewards is checked: configurations score, scripts run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchwright.calls.simulator import RunningSimulator, Simulator
from batchwright.rewards import Response, RewardsConfig, Scorer

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDER = EXAMPLES / "rewards"
CONFIGS = [path for path in sorted(EXAMPLES.rglob("*.toml")) if "[[part]]" in path.read_text()]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningSimulator]:
    models = ("judge", "judge-a", "judge-b", "gpt-4o-mini")
    with Simulator(latency_s=0.001, models=models).running() as url:
        yield url


def test_the_readme_names_every_file() -> None:
    readme = (FOLDER / "README.md").read_text()
    names = [path.name for path in FOLDER.iterdir() if path.is_file() and path.name != "README.md"]
    assert [name for name in names if f"`{name}`" not in readme] == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_configuration_loads_and_scores(
    path: Path, server: RunningSimulator, tmp_path: Path
) -> None:
    config = RewardsConfig.load(path)
    here = {"cache": tmp_path / "calls.db" if config.cache else None}
    if config.endpoints:
        # The simulator's models say something else to a judge, so what counts is that they answer.
        here |= {"endpoints": (f"{server}/v1",), "key_env": "", "error_budget": None}
    scorer = Scorer(config.model_copy(update=here))
    samples = [
        Response("so #### 4", "4", "sums"),
        Response("it is <measurements>[true]</measurements>", "[true]", "diamonds-seed0"),
        Response("Rome", "Rome", "capitals"),
    ]
    fitting = [s for s in samples if any(part.applies(s) for part in config.part)]
    assert fitting
    try:
        for reward in scorer.score(fitting):
            reached = {part.why for part in reward.parts.values()}
            assert reached <= {"", "parse", "bad_truth", "missing_field"}
    finally:
        scorer.close()


def test_the_function_of_the_file_is_the_one_of_the_package() -> None:
    environ = {**os.environ, "PYTHONPATH": str(FOLDER)}
    code = (
        "import rewards; print(rewards.compute_score('<measurements>[true]</measurements>', "
        "'[true]', 'diamonds-seed0', {})['score'])"
    )
    environ = {name: value for name, value in environ.items() if name != "BATCHWRIGHT_REWARDS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "4.0", done.stderr


@pytest.mark.slow
def test_the_trl_script_trains_and_saves(server: RunningSimulator, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["<pad>", "<eos>", "<unk>", "a", "b", "c"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(tmp_path / "model")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=6, num_attention_heads=2, **shape))
    model.save_pretrained(tmp_path / "model")
    rows = [{"prompt": "a b", "answer": "c"}, {"prompt": "b a", "answer": "a"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = (FOLDER / "trl.toml").read_text()
    config = config.replace("http://127.0.0.1:8000", server).replace('"judge"]', '"sim-judge"]')
    (tmp_path / "trl.toml").write_text(config)
    words_ = "--model model --data rows.jsonl --steps 1 --output out".split()  # noqa: SIM905
    done = subprocess.run(
        [sys.executable, FOLDER / "trl_grpo.py", *words_],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rewards/batchwright/mean" in done.stdout
    assert (tmp_path / "out" / "model.safetensors").exists()
