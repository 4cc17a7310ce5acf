"""The real Lightning inside a budget: the stock loop's bits, and the budget measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_integrations import OPTIONS, STEPS, Peak, assert_same, dropped_out, rows
from test_integrations import fresh_libraries as fresh_libraries  # used by every test
from torch import nn

from memfit.errors import InvalidTargetError, UnsupportedStepError

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


def fit_lightning(
    *,
    is_manual: bool,
    steps: int,
    callbacks: Any = (),
    calls_net: bool = True,
    skips: int | None = None,
    compiles: bool = False,
    **settings: Any,
) -> Any:
    lightning = pytest.importorskip("pytorch_lightning", reason="pip install memfit[lightning]")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = None if compiles else dropped_out(), []
            self.automatic_optimization = not is_manual

        def configure_model(self) -> None:
            if self.net is None:
                self.net = torch.compile(dropped_out(), backend="aot_eager")

        def training_step(self, batch: Any, number: int) -> Any:
            if number == skips:
                return None
            inputs, labels = batch
            outputs = self.net(inputs) if calls_net else self.net.forward(inputs)
            loss = nn.functional.cross_entropy(outputs, labels)
            self.losses.append(loss.item())
            self.log("loss", loss)
            if not is_manual:
                return loss
            optimizer = self.optimizers()
            self.manual_backward(loss / 4)
            if (number + 1) % 4 == 0:
                self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
                optimizer.step()
                optimizer.zero_grad()
            return None

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Module()
    if not is_manual:
        settings = {"accumulate_grad_batches": 4, "gradient_clip_val": 1.0, **settings}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, callbacks=list(callbacks), **quiet, **settings
    )
    torch.manual_seed(4)
    trainer.fit(module, torch.utils.data.DataLoader(rows(steps * 4 * 256 + 40), batch_size=256))
    return module


@pytest.mark.slow
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("is_manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("door", ["compile", "checkpoint"])
def test_lightning_keeps_its_bits_and_its_budget(steps: int, precision: str, is_manual: bool, door: str) -> None:
    pytest.importorskip("pytorch_lightning", reason="pip install memfit[lightning]")
    from memfit.integrations.lightning import MemfitCallback

    peak, modules, _ = Peak(), [], rows(steps * 4 * 256 + 40)
    peak.run(lambda: modules.append(fit_lightning(is_manual=is_manual, steps=steps, precision=precision)))
    (stock,) = modules
    budget = peak.budget(0.85)
    callback = MemfitCallback(budget, module="net", door=door, **({"options": OPTIONS} if door == "compile" else {}))
    planned = fit_lightning(is_manual=is_manual, steps=steps, callbacks=[callback], precision=precision)
    assert planned.losses == stock.losses
    assert_same(planned, stock)
    assert 0 < callback.most_bytes <= budget


def test_lightning_steps_whose_closure_calls_the_module_are_planned() -> None:
    pytest.importorskip("pytorch_lightning", reason="pip install memfit[lightning]")
    from memfit.integrations.lightning import MemfitCallback

    settings: Any = {"is_manual": False, "steps": 1, "accumulate_grad_batches": 1, "limit_train_batches": 2}
    stock = fit_lightning(**settings)
    callback = MemfitCallback("1GiB", module="net", planner="none")
    planned = fit_lightning(callbacks=[callback], **settings)
    assert planned.losses == stock.losses
    assert_same(planned, stock)
    assert callback.most_bytes > 0


@pytest.mark.parametrize("door", ["auto", "checkpoint"])
def test_a_module_that_configure_model_makes_and_compiles_is_held_by_checkpoints(door: str) -> None:
    pytest.importorskip("pytorch_lightning", reason="pip install memfit[lightning]")
    from memfit.integrations.lightning import MemfitCallback

    settings: Any = {"is_manual": False, "steps": 2, "compiles": True}
    stock = fit_lightning(**settings)
    callback = MemfitCallback("1GiB", module="net", door=door)
    held = fit_lightning(callbacks=[callback], **settings)
    assert held.losses == stock.losses
    assert_same(held, stock)
    assert callback.held.ran == len(stock.losses)


@pytest.mark.slow
@pytest.mark.parametrize("accumulated", [1, 4])
def test_a_batch_that_a_lightning_step_skips_is_skipped(accumulated: int) -> None:
    pytest.importorskip("pytorch_lightning", reason="pip install memfit[lightning]")
    from memfit.integrations.lightning import MemfitCallback

    settings: Any = {"is_manual": False, "steps": 1, "accumulate_grad_batches": accumulated, "skips": 1}
    stock = fit_lightning(**settings)
    planned = fit_lightning(callbacks=[MemfitCallback("1GiB", module="net", planner="none")], **settings)
    assert planned.losses == stock.losses
    assert_same(planned, stock)


def test_lightning_leaves_a_module_as_it_was_after_an_error() -> None:
    lightning = pytest.importorskip("pytorch_lightning", reason="pip install memfit[lightning]")
    from memfit.integrations.lightning import MemfitCallback

    class Stops(lightning.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:  # noqa: ARG002
            modules.append(pl_module.net)
            raise KeyError("stop")

    modules: list[nn.Module] = []
    with pytest.raises(KeyError, match="stop"):
        fit_lightning(
            is_manual=False, steps=1, callbacks=[MemfitCallback("1GiB", module="net", planner="none"), Stops()]
        )
    assert modules[0]._compiled_call_impl is None


def test_a_lightning_step_that_calls_another_module_raises() -> None:
    pytest.importorskip("pytorch_lightning", reason="pip install memfit[lightning]")
    from memfit.integrations.lightning import MemfitCallback

    with pytest.raises(InvalidTargetError, match="has no module 'nett'; it has net"):
        fit_lightning(is_manual=False, steps=1, callbacks=[MemfitCallback("1GiB", module="nett")])
    with pytest.raises(UnsupportedStepError, match="module that"):
        fit_lightning(is_manual=False, steps=1, callbacks=[MemfitCallback("1GiB", module="net")], calls_net=False)


def test_what_steps_take_is_written_once_a_step() -> None:
    pytest.importorskip("pytorch_lightning", reason="pip install memfit[lightning]")
    from memfit.integrations.lightning import MemfitCallback

    written: list[tuple[int, dict[str, float]]] = []
    callback = MemfitCallback(
        "64MiB", module="net", door="checkpoint", log_to=lambda numbers, step: written.append((step, numbers))
    )
    fit_lightning(is_manual=False, steps=4, callbacks=[callback], log_every_n_steps=2)
    assert [step for step, _ in written] == [2, 4]
    assert all(0 < numbers["memfit/most_bytes"] <= 64 << 20 for _, numbers in written)  # other tests' too
    assert "memfit/step_seconds" in written[1][1]
