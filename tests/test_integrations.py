"""The real Trainer, Lightning and Accelerate inside a budget: the stock loop's bits, and the budget measured."""

from __future__ import annotations

import copy
import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_models import Outside
from occupied import bytes_now
from torch import nn

from memfit.errors import InvalidOptionError, InvalidTargetError, OverBudgetError, UnsupportedStepError
from memfit.system.recorder import record

pytestmark = pytest.mark.filterwarnings("ignore")  # these libraries' own
OPTIONS = {"iterations": 3_000}
CPU = torch.device("cpu")
STEPS = [pytest.param(3, marks=pytest.mark.short), pytest.param(50, marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def fresh_libraries() -> Iterator[None]:
    """Forget what Dynamo compiled and what Accelerate keeps for the whole process, in the environment too."""
    before = dict(os.environ)
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    os.environ.clear()
    os.environ.update(before)
    rows.cache_clear()
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
        sys.modules["accelerate"].state.GradientState._reset_state()


def dropped_out() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1)) for _ in range(10)]
    return nn.Sequential(*layers, nn.Linear(64, 4))


@functools.cache  # so that a run does not count them as its own
def rows(count: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 64, generator=generator)
    return torch.utils.data.TensorDataset(inputs, torch.randint(0, 4, (count,), generator=generator))


def assert_same(mine: nn.Module, theirs: nn.Module) -> None:
    for (name, a), (_, b) in zip(mine.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b), name


class Peak:
    """The bytes that a run takes above what was there before it; a run within a share of it gets a budget."""

    def __init__(self) -> None:
        self.above_bytes = 0

    def budget(self, share: float) -> int:
        return bytes_now(CPU) + int(share * self.above_bytes)

    def run(self, run: Any) -> None:
        gc.collect()  # what earlier tests left would be freed inside of the record, and lower its peak
        with record("cpu") as usage:
            run()
        self.above_bytes = usage.peak_bytes


# Transformers


def small_gpt(**changed: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason="pip install memfit[transformers]")
    pytest.importorskip("accelerate", reason="the Trainer needs it: pip install memfit[transformers]")
    transformers.set_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 100, "n_positions": 64, **changed}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config)


def texts(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    made = torch.randint(0, 100, (count, 32), generator=generator)
    labels = made.clone()
    labels[:, :5] = -100
    return [{"input_ids": a, "labels": b} for a, b in zip(made, labels, strict=True)]


def trainer_of(
    path: Path, callbacks: Any = (), kind: Any = None, steps: int = 3, model: Any = None, **settings: Any
) -> Any:
    import transformers

    arguments = {
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        **settings,
    }
    extra = {"kind": kind} if kind else {}
    kind = extra.pop("kind", transformers.Trainer)
    return kind(
        model=small_gpt() if model is None else model,
        args=transformers.TrainingArguments(output_dir=str(path), **arguments),
        train_dataset=texts(8 * 4 * 2 + 5),
        eval_dataset=texts(16),
        callbacks=list(callbacks),
    )


def logged(trainer: Any) -> list[Any]:
    return [(entry.get("loss"), entry.get("grad_norm")) for entry in trainer.state.log_history[:-1]]


@pytest.mark.slow
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("settings", [{}, {"bf16": True, "label_smoothing_factor": 0.1}], ids=["plain", "bf16"])
def test_a_trainer_keeps_its_bits_and_its_budget(tmp_path: Path, steps: int, settings: Any) -> None:
    small_gpt()
    from memfit.integrations.transformers import MemfitCallback

    stock, peak = trainer_of(tmp_path, steps=steps, **settings), Peak()
    peak.run(stock.train)
    callback = MemfitCallback(peak.budget(0.9), options=OPTIONS)
    planned = trainer_of(tmp_path, [callback], steps=steps, **settings)
    planned.train()
    assert logged(planned) == logged(stock)
    assert_same(planned.model, stock.model)
    assert 0 < callback.most_bytes <= callback._held.budget
    assert callback.plans


@pytest.mark.slow
def test_a_trainer_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    small_gpt()
    from memfit.integrations.transformers import MemfitTrainer

    def make(**more: Any) -> Any:
        kind = lambda **given: MemfitTrainer(**given, budget="256MiB", memfit_options={"planner": "none"})  # noqa: E731
        return trainer_of(tmp_path, kind=kind, steps=4, save_strategy="steps", save_steps=2, **more)

    whole = make()
    whole.train()
    resumed = make()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(resumed.model, whole.model)


def test_an_evaluation_without_training_is_held_to_the_budget(tmp_path: Path) -> None:
    small_gpt()
    from memfit.integrations.transformers import MemfitCallback

    large = small_gpt(vocab_size=20_000)  # 20 MiB of logits, so that what other tests let go meanwhile does not count
    with pytest.raises(OverBudgetError, match="evaluation smaller"):
        trainer_of(tmp_path, [MemfitCallback(bytes_now(CPU) + (8 << 20))], model=large).evaluate()
    late = trainer_of(tmp_path)
    late.add_callback(MemfitCallback("1GiB"))
    with pytest.raises(UnsupportedStepError, match="callbacks=\\[MemfitCallback"):
        late.evaluate()


@pytest.mark.slow
def test_two_trainers_of_one_model_plan_it_in_turn(tmp_path: Path) -> None:
    small_gpt()
    import transformers

    from memfit.integrations.transformers import MemfitCallback

    callbacks = [MemfitCallback("256MiB", planner="none") for _ in range(2)]
    first = trainer_of(tmp_path, callbacks[:1], steps=1)
    second = transformers.Trainer(
        model=first.model, args=first.args, train_dataset=first.train_dataset, callbacks=callbacks[1:]
    )
    for trainer, callback in ((second, callbacks[1]), (first, callbacks[0])):
        trainer.train()
        assert callback.most_bytes > 0


def test_what_the_trainer_compiles_is_not_for_memfits_compile(tmp_path: Path) -> None:
    small_gpt()
    from memfit.integrations.transformers import MemfitCallback

    with pytest.raises(UnsupportedStepError, match=r"torch_compile=True.*door='checkpoint'"):
        trainer_of(tmp_path, [MemfitCallback("1GiB", door="compile")], torch_compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["layers", "whole", "trainer", "regions"])
def test_a_trainer_of_a_model_that_is_compiled_keeps_its_bits_and_its_budget(
    tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_gpt()
    from memfit.integrations.transformers import MemfitCallback

    def train(*callbacks: Any) -> None:
        torch.compiler.reset()
        model = small_gpt(n_layer=6, n_embd=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        for part in {"whole": [model], "layers": model.transformer.h}.get(which, ()):
            part.compile(backend="aot_eager")
        compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"} if which in own else {}
        made = trainer_of(tmp_path, callbacks, steps=12, model=model, gradient_accumulation_steps=1, **compiled)
        trainers.append(made)
        made.train()

    own = ("trainer", "regions")
    for name in ("BACKEND", "MODE", "USE_REGIONAL_COMPILATION"):  # which TrainingArguments set
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", {"BACKEND": "no", "MODE": "default"}.get(name, "False"))
    if which == "regions":
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "True")
    peak, trainers = Peak(), list[Any]()
    peak.run(train)
    callback = MemfitCallback(peak.budget(0.8), door="auto" if which in own else "checkpoint")
    train(callback)
    assert_same(trainers[1].model, trainers[0].model)
    report: Any = callback.report()
    assert report.over == 0
    assert "recomputed" in str(report)


def with_a_break() -> Any:
    model = small_gpt()
    own = model.transformer.h[0].mlp.forward

    def forward(given: torch.Tensor) -> torch.Tensor:
        returned = own(given)
        torch._dynamo.graph_break()
        return returned

    model.transformer.h[0].mlp.forward = forward
    return model


@pytest.mark.slow
@pytest.mark.parametrize("door", ["auto", "checkpoint", "eager"])
def test_a_trainer_whose_model_breaks_into_graphs_keeps_its_bits_and_its_budget(
    tmp_path: Path, door: str, caplog: pytest.LogCaptureFixture
) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "gradient_checkpointing": door == "checkpoint"}
    peak, trainers = Peak(), []

    def train(*callbacks: Any) -> None:
        trainers.append(trainer_of(tmp_path, callbacks, steps=6, model=with_a_break(), **evaluated))
        trainers[-1].train()

    peak.run(train)
    from memfit.integrations.transformers import MemfitCallback

    budget = peak.budget(1.03 if door == "checkpoint" else 0.9)  # it takes the place of transformers' checkpoints
    callback = MemfitCallback(budget, door=door)
    train(callback)
    stock, trainer = trainers
    assert_same(trainer.model, stock.model)
    assert 0 < callback.most_bytes <= budget
    assert ("the budget is held by memfit.checkpoint, since" in caplog.text) == (door == "auto")
    assert not any("forward" in vars(module) for name, module in trainer.model.named_modules() if name[-3:] != "mlp")
    assert not trainer.model._forward_pre_hooks
    trainer.evaluate()


def test_what_checkpoints_cannot_hold_goes_on_in_eager_mode(caplog: pytest.LogCaptureFixture) -> None:
    from memfit.eager_mode.eager import Report as EagerReport
    from memfit.integrations.held import HeldModel

    def train(model: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(1)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            model(torch.randn(512, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model, held = Outside(), HeldModel(bytes_now(CPU) + (20 << 20), "auto", {}, "here")
    before = copy.deepcopy(model)
    held.hold(model, why_not_compile="there are ranks")
    trained = train(model)
    assert isinstance(held.report(), EagerReport)
    assert held.ran == 5
    assert held.most_bytes <= held.budget
    assert "with all checkpoints, more than the budget of" in caplog.text
    held.end_training()
    assert all(map(torch.equal, trained, train(before)))
    assert not model._forward_pre_hooks


def test_a_training_that_is_over_is_not_broken_off_by_its_last_step(caplog: pytest.LogCaptureFixture) -> None:
    from memfit.integrations.held import HeldModel

    model = Outside()
    optimizer, held = (
        torch.optim.AdamW(model.parameters()),
        HeldModel(bytes_now(CPU) + (20 << 20), "checkpoint", {}, ""),
    )
    held.hold(model)
    for _ in range(2):  # the second one is planned
        model(torch.randn(512, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "the step is complete" not in caplog.text
    held.end_training()
    assert "the step is complete" in caplog.text and 'door="eager" of a callback' in caplog.text
    assert not model._forward_pre_hooks


def test_a_door_that_does_not_exist_or_lacks_an_option_is_refused() -> None:
    small_gpt()
    from memfit.integrations.transformers import MemfitCallback

    with pytest.raises(InvalidOptionError, match="'auto', 'compile', 'checkpoint', 'eager'"):
        MemfitCallback("1GiB", door="window")
    with pytest.raises(InvalidOptionError, match="has no option 'planner'; it has blocks, budget_is"):
        MemfitCallback("1GiB", door="checkpoint", planner="none")


# Accelerate


def accelerated(make_parts: Any, steps: int, **settings: Any) -> tuple[nn.Module, list[float]]:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4, **settings)
    model = dropped_out()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = torch.utils.data.DataLoader(rows(steps * 4 * 256), batch_size=256)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer, loader, scheduler = make_parts(accelerator, model, optimizer, loader, scheduler)
    losses: list[float] = []
    torch.manual_seed(3)
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return accelerator.unwrap_model(model), losses


@pytest.mark.slow
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("door", ["compile", "checkpoint"])
def test_accelerates_loop_keeps_its_bits_and_its_budget(steps: int, precision: str, door: str) -> None:
    pytest.importorskip("accelerate", reason="pip install memfit[accelerate]")
    from memfit.integrations.accelerate import prepare

    peak, runs, budgets, accelerators, _ = Peak(), [], [], [], rows(steps * 4 * 256)
    peak.run(lambda: runs.append(accelerated(lambda a, *parts: a.prepare(*parts), steps, mixed_precision=precision)))

    def planned(accelerator: Any, *parts: Any) -> Any:
        budgets.append(peak.budget(0.7))
        accelerators.append(accelerator)
        options = {"options": OPTIONS} if door == "compile" else {}
        return prepare(accelerator, *parts, budget=budgets[0], door=door, **options)

    sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    runs.append(accelerated(planned, steps, mixed_precision=precision))
    (stock, expected), (model, losses) = runs
    assert losses == expected
    assert_same(model, stock)
    assert 0 < accelerators[0].memfit[0].most_bytes <= budgets[0]


def test_what_an_accelerator_would_not_enforce_is_refused() -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install memfit[accelerate]")
    from memfit.integrations.accelerate import prepare

    with pytest.raises(InvalidTargetError, match="no model"):
        prepare(accelerate.Accelerator(cpu=True), [], budget="1GiB")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # or the first one's settings stay
    compiling = accelerate.Accelerator(cpu=True, dynamo_backend="aot_eager")
    with pytest.raises(UnsupportedStepError, match=r"dynamo_backend='aot_eager'.*door='checkpoint'"):
        prepare(compiling, dropped_out(), budget="1GiB", door="compile")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(InvalidOptionError, match=r"with memfit\.eager"):
        prepare(accelerate.Accelerator(cpu=True), dropped_out(), budget="1GiB", door="eager")


def test_accelerate_holds_several_models_by_one_plan_of_checkpoint() -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install memfit[accelerate]")
    from memfit.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    models = [dropped_out() for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(2):
        prepared = prepare(accelerator, *models, *optimizers, budget="1GiB", door="checkpoint")
    one, other, *_ = prepared  # pyright: ignore[reportPossiblyUnboundVariable]
    for _ in range(3):
        accelerator.backward((one(torch.randn(8, 64)) * other(torch.randn(8, 64))).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    first, second = accelerator.memfit
    assert first is second and first.report().windows[-1].plan == 1
    assert {name[:2] for size in first.report().sizes for name in size.planned.rules} == {"0.", "1."}
    first.let_go()
    separate = prepare(accelerator, *models, budget="1GiB", door="checkpoint", blocks=["*"])
    assert len(separate) == len(set(accelerator.memfit)) == 2


def test_accelerate_plans_several_models_that_were_prepared_once_and_again() -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install memfit[accelerate]")
    from memfit.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    models = [dropped_out() for _ in range(4)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    planned = prepare(accelerator, *models[:2], *optimizers[:2], budget="1GiB", planner="none")
    planned = prepare(accelerator, *planned, budget="1GiB", planner="none")
    stock = accelerator.prepare(*models[2:], *optimizers[2:])
    inputs, losses = torch.randn(8, 64), []
    for one, other, *own in (planned, stock):
        torch.manual_seed(2)
        loss = (one(inputs) * other(inputs)).square().mean()
        accelerator.backward(loss)
        for optimizer in own:
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for mine, theirs, optimizer in zip(planned[:2], stock[:2], optimizers, strict=False):
        assert_same(mine, theirs)
        assert mine._compiled_call_impl.account.optimizers.followed == (optimizer,)
