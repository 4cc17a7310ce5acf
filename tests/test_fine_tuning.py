"""PEFT's LoRA and TRL's SFTTrainer inside a budget: the stock loop's bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from occupied import bytes_now
from test_integrations import CPU, OPTIONS, Peak, assert_same, logged, small_gpt, texts, trainer_of
from test_integrations import fresh_libraries as fresh_libraries  # used by every test

import memfit
from memfit.errors import NotOneGraphError

peft = pytest.importorskip("peft", reason="pip install peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # these libraries' own


def lora_settings() -> Any:
    return peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM")


def adapted_gpt() -> Any:
    torch.manual_seed(3)
    return peft.get_peft_model(small_gpt(), lora_settings())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"bf16": True}], ids=["plain", "bf16"])
def test_a_trainer_of_adapters_keeps_its_bits_and_its_budget(tmp_path: Path, settings: Any) -> None:
    from memfit.integrations.transformers import MemfitCallback

    stock, peak = trainer_of(tmp_path, model=adapted_gpt(), **settings), Peak()
    peak.run(stock.train)
    callback = MemfitCallback(peak.budget(0.9), options=OPTIONS)
    planned = trainer_of(tmp_path, [callback], model=adapted_gpt(), **settings)
    planned.train()
    assert logged(planned) == logged(stock)
    assert_same(planned.model, stock.model)
    assert 0 < callback.most_bytes <= callback._held.budget
    planned.model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(small_gpt(), tmp_path / "adapter")
    for name, value in peft.get_peft_model_state_dict(again).items():
        assert torch.equal(value, peft.get_peft_model_state_dict(stock.model)[name]), name


def test_a_step_of_adapters_is_fitted() -> None:
    model = adapted_gpt()
    eager = copy.deepcopy(model)
    batch = {key: torch.stack([row[key] for row in texts(8)]) for key in ("input_ids", "labels")}

    def optimizer(each: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-3)

    def loss(each: Any, given: Any) -> torch.Tensor:
        return each(**given).loss

    step = memfit.fit(model, loss, batch, optimizer=optimizer(model), budget="80%", options=OPTIONS, verify=True)
    plain = memfit.TrainingStep(model=eager, loss=loss, batch=batch, optimizer=optimizer(eager))
    for run in (step, plain.run_eager):
        torch.manual_seed(5)
        for _ in range(6):
            run(batch)
    assert_same(model, eager)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(98)} | {"<pad>": 98, "<eos>": 99}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _sft_trainer(path: Path, callbacks: Any = (), *, adapters: bool, **settings: Any) -> Any:
    trl = pytest.importorskip("trl", reason="pip install trl")
    import datasets

    arguments = trl.SFTConfig(
        output_dir=str(path),
        max_steps=3,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **{"bf16": False, "gradient_checkpointing": False, **settings},
    )
    return trl.SFTTrainer(
        model=small_gpt(),
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in texts(70)]),
        processing_class=_tokenizer(),
        callbacks=list(callbacks),
        peft_config=lora_settings() if adapters else None,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"adapters": False}, id="all"),
        pytest.param({"adapters": False, "packing": True, "max_length": 32, "bf16": True}, id="packed-bf16"),
        pytest.param({"adapters": True}, id="adapters"),
        pytest.param(
            {
                "adapters": False,
                "door": "checkpoint",
                "gradient_checkpointing": True,
                "gradient_checkpointing_kwargs": {"selective": True},
            },
            id="all-selective",
        ),
        pytest.param({"adapters": True, "bf16": True}, id="adapters-bf16"),
    ],
)
def test_an_sft_trainer_keeps_its_bits_and_its_budget(tmp_path: Path, settings: Any) -> None:
    from memfit.integrations.transformers import MemfitCallback

    door = settings.get("door", "auto")
    settings = {name: value for name, value in settings.items() if name != "door"}
    stock, peak = _sft_trainer(tmp_path, **settings), Peak()
    peak.run(stock.train)
    budget = bytes_now(CPU) + peak.above_bytes * 11 // 10  # most is a buffer for logits, outside of the model
    callback = MemfitCallback(budget, door=door, **({} if door == "checkpoint" else {"options": OPTIONS}))
    planned = _sft_trainer(tmp_path, [callback], **settings)
    planned.train()
    assert logged(planned) == logged(stock)
    assert_same(planned.model, stock.model)
    assert 0 < callback.most_bytes <= budget
    report = callback.report()  # the logits' function breaks the graph: checkpoints hold it
    assert not callback.plans and report is not None
    assert report.lean < report.count and report.over == 0


@pytest.mark.slow
def test_an_sft_trainer_under_compile_names_the_door_that_holds_it(tmp_path: Path) -> None:
    from memfit.integrations.transformers import MemfitCallback

    trainer = _sft_trainer(tmp_path, [MemfitCallback("1GiB", door="compile", options=OPTIONS)], adapters=False)
    with pytest.raises(NotOneGraphError, match=r"out=.*; memfit\.checkpoint holds the budget of such a model"):
        trainer.train()


@pytest.mark.slow
def test_a_dpo_trainer_of_adapters_is_planned_with_the_calls_of_its_reference(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="pip install trl")
    import datasets

    from memfit.integrations.transformers import MemfitCallback

    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> str:
        return " ".join(f"w{number}" for number in torch.randint(0, 98, (count,), generator=generator).tolist())

    rows = [{"prompt": tokens(8), "chosen": f" {tokens(24)}", "rejected": f" {tokens(24)}"} for _ in range(48)]
    peak, trainers = Peak(), list[Any]()

    def train(*callbacks: Any) -> None:
        trainers.append(
            trl.DPOTrainer(
                model=small_gpt(n_layer=6, n_embd=64),
                args=trl.DPOConfig(
                    output_dir=str(tmp_path),
                    max_steps=6,
                    report_to=[],
                    use_cpu=True,
                    bf16=False,
                    save_strategy="no",
                    gradient_checkpointing=bool(callbacks),
                ),
                train_dataset=datasets.Dataset.from_list(rows),
                processing_class=_tokenizer(),
                callbacks=list(callbacks),
                peft_config=lora_settings(),
            )
        )
        trainers[-1].train()

    peak.run(train)
    callback = MemfitCallback(peak.budget(0.9), door="checkpoint")
    train(callback)
    assert_same(trainers[1].model, trainers[0].model)
    report: Any = callback.report()
    assert (report.count, report.lean, report.over) == (6, 1, 0)
