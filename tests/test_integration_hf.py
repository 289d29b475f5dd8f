"""Plans behind the real Trainer and SFTTrainer, alone and on two ranks."""

import importlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorForSeq2Seq,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from batchwright.batching import BatchingConfig, BatchPlan, BatchPlanBuilder
from batchwright.batching.collation import collate
from batchwright.data.measure import build_lengths
from batchwright.data.rows.sample import Sample
from batchwright.data.rows.source import open_source
from batchwright.data.tokenizers import load_tokenizer
from batchwright.errors import BadLoss, ConfigError, Mismatch, MissingExtra, UnknownSample
from batchwright.integrations.hf import PlanTrainer, PlanTrainerMixin
from batchwright.train.attention import use_backend
from batchwright.train.sft.loop import microbatch_loss

# From Python 3.12 on, fork warns wherever a native library has started a thread, as torch has.
pytestmark = [
    pytest.mark.training,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

VOCABULARY = 60
SAMPLES = 22


class PlanSFTTrainer(PlanTrainerMixin, SFTTrainer):
    pass


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sample_of(item: int) -> Sample:
    """Tokens that follow from the row number; a third of them counts for no loss."""
    rng = np.random.default_rng(item)
    length = int(rng.integers(3, 30))
    tokens = rng.integers(3, VOCABULARY, length).astype(np.int32)
    return Sample(tokens, (rng.random(length) < 0.7).astype(np.uint8), str(item))


def build(layout: str = "packed", *, n: int = SAMPLES, epochs: int = 1, **settings) -> BatchPlan:
    lengths = {str(item): len(sample_of(item)) for item in range(n)}
    given = {"token_budget": 64, "pack_max_length": 32, "bucket_edges": (8, 16), "overflow_max": 32}
    return BatchPlanBuilder(lengths, BatchingConfig(layout=layout, **(given | settings))).build(
        epochs
    )


def one_step(layout: str) -> BatchPlan:
    """A plan whose every epoch is one optimizer step."""
    return build(layout, step_size=build(layout).num_microbatches())


def model_of() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def tokenizer_of() -> PreTrainedTokenizerFast:
    words = {word: n for n, word in enumerate(["<pad>", "<s>", "</s>", "<unk>"])}
    words |= {str(n): n for n in range(len(words), VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )


def rows() -> Dataset:
    """The same samples as the stock trainers want them."""
    samples = [sample_of(item) for item in range(SAMPLES)]
    return Dataset.from_list(
        [
            {
                "input_ids": sample.input_ids.tolist(),
                "labels": np.where(sample.loss_mask, sample.input_ids, -100).tolist(),
            }
            for sample in samples
        ]
    )


def arguments(folder: Path, kind=TrainingArguments, **settings):
    return kind(
        **{
            "output_dir": str(folder),
            "use_cpu": True,
            "optim": "sgd",
            "learning_rate": 0.5,
            "lr_scheduler_type": "constant",
            "num_train_epochs": 1,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "bf16": False,
            **settings,
        }
    )


def planned(folder: Path, plan: BatchPlan, *, read=sample_of, more=None, **settings) -> PlanTrainer:
    steps = plan.config.step_size
    settings.setdefault("gradient_accumulation_steps", 1 if steps == "world" else steps)
    more = {"model": model_of(), **(more or {})}
    return PlanTrainer(args=arguments(folder, **settings), plan=plan, read=read, **more)


def curve(trainer: Trainer, **how) -> list[tuple[float, float]]:
    """Train, and give loss and norm of the gradient at each step."""
    trainer.train(**how)
    return [(log["loss"], log["grad_norm"]) for log in trainer.state.log_history if "loss" in log]


def same(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    assert len(ours) == len(theirs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> list[tuple[float, float]]:
    """What the stock Trainer makes of all samples in one padded batch, three times."""
    collator = DataCollatorForSeq2Seq(tokenizer_of(), padding=True, label_pad_token_id=-100)
    args = arguments(
        tmp_path_factory.mktemp("padded"), num_train_epochs=3, per_device_train_batch_size=SAMPLES
    )
    return curve(Trainer(model=model_of(), args=args, train_dataset=rows(), data_collator=collator))


@pytest.mark.parametrize("layout", ["packed", "bucketed", "sorted"])
def test_loss_and_gradient_are_those_of_the_stock_trainer_on_padded_rows(layout, tmp_path, padded):
    same(curve(planned(tmp_path, one_step(layout), num_train_epochs=3)), padded)


@pytest.mark.parametrize("attention", ["sdpa", "segments"])
def test_any_attention_keeps_the_samples_apart(attention, tmp_path, padded):
    trainer = planned(tmp_path, one_step("packed"), max_steps=2, more={"attention": attention})

    same(curve(trainer), padded[:2])


def mamba() -> MambaForCausalLM:
    """No attention at all: a state runs through the row, from sample to sample."""
    torch.manual_seed(0)
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    return MambaForCausalLM(config)


def test_a_model_that_mixes_packed_samples_is_refused_before_its_first_step(tmp_path):
    trainer = planned(tmp_path, one_step("packed"), more={"model": mamba()})

    with pytest.raises(Mismatch, match="MambaForCausalLM with segments attention leaks") as caught:
        trainer.train()
    assert "plan whose layout is not packed" in str(caught.value)
    assert "leaks='allow'" in str(caught.value)
    assert trainer.state.global_step == 0


def test_a_model_that_mixes_samples_trains_on_rows_that_are_not_packed_or_by_name(tmp_path):
    assert len(curve(planned(tmp_path, one_step("sorted"), more={"model": mamba()}))) == 1
    allowed = {"model": mamba(), "leaks": "allow"}
    assert len(curve(planned(tmp_path, one_step("packed"), more=allowed))) == 1
    with pytest.raises(ConfigError, match="leaks must be refuse or allow, got 'no'"):
        planned(tmp_path, one_step("packed"), more={"leaks": "no"})


def test_weights_that_a_process_does_not_hold_are_said_to_be_untested(tmp_path):
    with torch.device("meta"):
        model = model_of()
    trainer = planned(tmp_path, one_step("packed"))
    trainer.model = model
    with pytest.warns(UserWarning, match="does not hold the weights"):
        trainer.get_train_dataloader()


def test_a_model_made_by_model_init_is_given_the_attention_too(tmp_path, padded):
    more = {"model": None, "model_init": model_of}
    trainer = planned(tmp_path, one_step("packed"), num_train_epochs=3, more=more)

    same(curve(trainer), padded)


def test_loss_and_gradient_are_those_of_the_stock_sft_trainer_on_padded_rows(tmp_path):
    plan = one_step("packed")
    settings = {"kind": SFTConfig, "num_train_epochs": 2}
    theirs = SFTTrainer(
        model=model_of(),
        args=arguments(tmp_path / "theirs", per_device_train_batch_size=SAMPLES, **settings),
        train_dataset=rows(),
        processing_class=tokenizer_of(),
    )
    settings["gradient_accumulation_steps"] = plan.num_microbatches()
    ours = PlanSFTTrainer(
        model=model_of(),
        args=arguments(tmp_path / "ours", **settings),
        processing_class=tokenizer_of(),
        plan=plan,
        read=sample_of,
    )

    same(curve(ours), curve(theirs))


def test_sft_trainer_adds_adapters_as_ever_and_evaluates_on_text(tmp_path):
    plan = build(step_size=4)
    trainer = PlanSFTTrainer(
        model=model_of(),
        args=arguments(tmp_path, SFTConfig, gradient_accumulation_steps=4, eval_strategy="epoch"),
        processing_class=tokenizer_of(),
        peft_config=LoraConfig(r=2, target_modules="all-linear"),
        eval_dataset=Dataset.from_dict({"text": ["7 8 9 10", "11 12"]}),
        plan=plan,
        read=rows(),
    )

    losses = curve(trainer)

    assert len(losses) == plan.num_steps()
    assert np.isfinite(losses).all()
    assert np.isfinite(
        [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    )


def test_a_trainer_refuses_rows_that_changed_since_they_were_planned(tmp_path):
    rows = [{"input_ids": sample_of(item).input_ids.tolist()} for item in range(SAMPLES)]
    data = tmp_path / "rows.jsonl"
    tokenizer = load_tokenizer("bytes")

    def write() -> None:
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write()
    lengths = build_lengths(data, tokenizer, tmp_path / "lengths.jsonl").cache
    config = BatchingConfig(layout="packed", token_budget=64, pack_max_length=32)
    plan = BatchPlanBuilder(lengths, config).build()
    planned(tmp_path, plan, read=rows)
    planned(tmp_path, plan, read=open_source(data), more={"tokenizer": tokenizer})
    rows[5]["input_ids"][1] ^= 1
    write()

    for read, more in ((rows, None), (open_source(data), {"tokenizer": tokenizer})):
        with pytest.raises(Mismatch, match=f"for data {plan.dataset_hash}, these rows are"):
            planned(tmp_path, plan, read=read, more=more)


def test_the_loss_of_every_step_is_the_one_our_own_loop_has(tmp_path):
    plan, model = build(step_size=4), model_of()
    use_backend(model, "segments")
    expected = []
    with torch.no_grad():
        for step in plan.iter_steps(epochs=2):
            batches = [collate(batch, sample_of) for batch in step.microbatches]
            losses = [microbatch_loss(model, b, torch.device("cpu")) for b in batches]
            expected.append(float(sum(losses)) / sum(b.num_loss_tokens for b in batches))

    ours = curve(planned(tmp_path, plan, learning_rate=0.0, num_train_epochs=2))

    assert [loss for loss, _ in ours] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_stopped(workers, tmp_path):
    plan = build(step_size=4)  # three steps an epoch, the last one of a single microbatch
    settings = {
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": 1,
        "optim": "adamw_torch",
    }
    settings |= {"learning_rate": 1e-2, "dataloader_num_workers": workers}
    whole = curve(planned(tmp_path, plan, **settings))

    for stopped_at in (2, 3, 5) if workers == 0 else (4,):
        read = set()

        def reading(item: int, read=read) -> Sample:
            read.add(item)
            return sample_of(item)

        trainer = planned(tmp_path, plan, read=reading, **settings)
        trainer.args.max_steps = stopped_at + 1
        rest = curve(trainer, resume_from_checkpoint=str(tmp_path / f"checkpoint-{stopped_at}"))

        epoch, step = divmod(stopped_at, plan.num_steps())
        (next_step,) = itertools.islice(plan.iter_steps(epoch, step * 4, epochs=1), 1)
        assert rest == whole[: stopped_at + 1]
        assert trainer.state.epoch == pytest.approx(
            epoch + next_step.stop / plan.num_microbatches()
        )
        if workers == 0:
            assert read == {int(item) for b in next_step.microbatches for item in b.items}


def test_a_resumed_run_goes_on_to_its_end(tmp_path):
    plan = build(step_size=4)
    settings = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 4}
    whole = curve(planned(tmp_path, plan, **settings))

    resumed = planned(tmp_path, plan, restore_callback_states_from_checkpoint=True, **settings)

    assert curve(resumed, resume_from_checkpoint=str(tmp_path / "checkpoint-4")) == whole


def test_a_checkpoint_of_another_plan_or_of_none_is_refused(tmp_path):
    settings = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    resume = {"resume_from_checkpoint": True}
    planned(tmp_path / "a", build(step_size=2), **settings).train()
    other = planned(tmp_path / "a", build(step_size=2, seed=7), **settings)
    collator = DataCollatorForSeq2Seq(tokenizer_of(), padding=True, label_pad_token_id=-100)
    stock = arguments(tmp_path / "b", **settings)
    Trainer(model=model_of(), args=stock, train_dataset=rows(), data_collator=collator).train()
    none = planned(tmp_path / "b", build(step_size=2), **settings)

    with pytest.raises(Mismatch, match="belongs to plan"):
        other.train(**resume)
    with pytest.raises(Mismatch, match="not trained on a plan"):
        none.train(**resume)


def test_steps_of_another_size_are_no_place_to_go_on_from(tmp_path):
    settings = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    planned(tmp_path, build(), **settings).train()
    noted = tmp_path / "checkpoint-1" / "trainer_state.json"
    # As two ranks would have written it: a step of this plan is one microbatch a rank.
    noted.write_text(noted.read_text().replace('"step_microbatches": 1', '"step_microbatches": 2'))

    with pytest.raises(Mismatch, match="has 2 microbatches per step, now there are 1"):
        planned(tmp_path, build(), **settings).train(str(noted.parent))


def test_evaluation_and_generation_have_the_attention_the_model_came_with(tmp_path):
    tokenizer = tokenizer_of()
    tokenizer.padding_side = "left"
    collator = DataCollatorForSeq2Seq(tokenizer, padding=True, label_pad_token_id=-100)
    more = {"eval_dataset": rows(), "data_collator": collator}
    plan = build()
    trainer = planned(
        tmp_path, plan, more=more, eval_strategy="steps", eval_steps=plan.num_microbatches()
    )
    trainer.train()
    evaluated = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    stock = Trainer(model=trainer.model, args=arguments(tmp_path), data_collator=collator)

    assert evaluated == [pytest.approx(stock.evaluate(rows())["eval_loss"], rel=1e-5)]
    prompt = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2)}
    assert trainer.model.generate(**prompt, max_new_tokens=3, min_new_tokens=3).shape == (1, 5)


@pytest.mark.parametrize("length", [{"num_train_epochs": 2}, {"max_steps": 2}])
def test_the_throughput_in_the_log_is_that_of_samples(length, tmp_path):
    speed = planned(tmp_path, one_step("packed"), **length).train().metrics

    seen = speed["train_samples_per_second"] * speed["train_runtime"]
    assert seen == pytest.approx(2 * SAMPLES, rel=0.02)


def test_steps_that_are_not_those_of_the_plan_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="build the plan with step_size=3"):
        planned(tmp_path, build(), gradient_accumulation_steps=3)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps must be 4"):
        planned(tmp_path, build(step_size=4), gradient_accumulation_steps=1)


def test_a_model_whose_loss_is_a_mean_of_means_is_refused(tmp_path):
    class Strict(LlamaForCausalLM):
        accepts_loss_kwargs = False

    model = Strict(model_of().config)
    with pytest.raises(ConfigError, match="compute_loss_func"):
        planned(tmp_path, build(), more={"model": model})


def test_epochs_the_trainer_cannot_count_are_refused(tmp_path):
    draw = np.random.default_rng(0)
    lengths = {str(item): int(draw.integers(3, 30)) for item in range(200)}
    config = BatchingConfig(
        layout="packed", token_budget=32, pack_max_length=32, pack_mode="first_fit"
    )
    plan = BatchPlanBuilder(lengths, config).build(4)
    assert len({plan.num_microbatches(epoch) for epoch in range(4)}) > 1

    with pytest.raises(ConfigError, match="needs equal ones"):
        planned(tmp_path, plan, num_train_epochs=4)
    with pytest.raises(UnknownSample, match="build it with more epochs"):
        planned(tmp_path, plan, num_train_epochs=5)


def test_a_step_without_a_token_that_counts_stops_the_run(tmp_path):
    def mute(item: int) -> Sample:
        sample = sample_of(item)
        return Sample(sample.input_ids, np.zeros_like(sample.loss_mask), sample.sample_id)

    with pytest.raises(BadLoss, match="step 1: none of its tokens carries loss"):
        planned(tmp_path, build(), read=mute).train()


@pytest.mark.slow
def test_two_ranks_see_every_sample_once_and_stop_where_one_can_go_on(tmp_path):
    plan = build(step_size=4)
    plan.save(tmp_path / "plan")
    rest = plan.num_microbatches() % 4
    assert rest % 2 == 1  # so one rank ends the epoch with a filler
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, __file__, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    settings = {"num_train_epochs": 2}
    alone = curve(planned(tmp_path / "one", plan, **settings))

    seen = [item for rank in ranks for item in rank["seen"]]
    assert sorted(seen) == sorted(2 * [*range(SAMPLES)])
    assert ranks[0]["batches"] == ranks[1]["batches"]
    same(ranks[0]["curve"], alone)
    resumed = planned(tmp_path / "two", plan, **settings)
    same(curve(resumed, resume_from_checkpoint=str(tmp_path / "two/checkpoint-4")), alone)


def test_without_transformers_it_says_what_to_install(monkeypatch):
    name = "batchwright.integrations.hf"
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(MissingExtra, match=r"pip install 'batchwright\[hf\]'"):
        importlib.import_module(name)


def as_one_of_two_ranks(folder: Path) -> None:
    """What torchrun starts twice: train, and write down what this rank was given."""
    torch.set_num_threads(1)
    seen, batches = [], 0

    class Watched(PlanTrainer):
        def training_step(self, model, inputs, *rest, **more):
            nonlocal batches
            batches += 1
            labels, bounds = inputs["labels"][0], inputs["cu_seq_lens_q"].tolist()
            if (labels != -100).any():
                for first, stop in itertools.pairwise(bounds):
                    seen.append(known[tuple(inputs["input_ids"][0, first:stop].tolist())])
            return super().training_step(model, inputs, *rest, **more)

    known = {tuple(sample_of(item).input_ids.tolist()): item for item in range(SAMPLES)}
    trainer = Watched(
        model=model_of(),
        args=arguments(
            folder / "two",
            num_train_epochs=2,
            gradient_accumulation_steps=2,
            save_strategy="steps",
            save_steps=4,
        ),
        plan=folder / "plan",
        read=sample_of,
    )
    losses = curve(trainer)
    with pytest.raises(ConfigError, match="average_tokens_across_devices must be True"):
        planned(
            folder, trainer.plan, gradient_accumulation_steps=2, average_tokens_across_devices=False
        )
    report = {"seen": seen, "batches": batches, "curve": losses}
    (folder / f"{trainer.args.process_index}.json").write_text(json.dumps(report))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    as_one_of_two_ranks(Path(sys.argv[1]))
