"""Every operator of torch's own list that has a form in place: written over a step's result, it has eager's bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_planned_bits import COMPUTE_AGAIN
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db

import memfit
from memfit.doors.step import fit_step
from memfit.planning import Settings

# Torch's list forbids its settings to the whole process.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
SAMPLES = 6
IN_PLACE = {f"{each.name} {each.variant_test_name}".strip(): each for each in op_db if each.inplace_variant is not None}
# torch's list seeds these before each call, and a step that seeds is no graph.
SEEDED = ("dropout", "rrelu")
# Of real numbers it returns its argument, and no result of its own as its schema says: refused by name.
REFUSED = ("conj_physical",)


class Applied(nn.Module):
    """Writes over the product of its input and a parameter, and uses what is there afterwards."""

    def __init__(self, operator: Any, sample: Any) -> None:
        super().__init__()
        self.operator, self.args, self.named = operator, sample.args, sample.kwargs
        self.before, self.after = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, given: Tensor) -> Tensor:
        hidden = given * self.before if given.is_floating_point() or given.is_complex() else given.clone()
        written = self.operator(hidden, *self.args, **self.named)
        return (written if written.is_floating_point() else written.abs().float()) * self.after


def loss(model: Any, given: Tensor) -> Tensor:
    return model(given).nan_to_num().square().mean()


def runs_in_eager(model: nn.Module, given: Tensor) -> bool:
    try:
        with torch.random.fork_rng():
            loss(model, given).backward()
    except (RuntimeError, TypeError, ValueError):  # samples of errors, broadcasting, overlapping memory
        return False
    return given.numel() > 0 and all(p.grad is None or bool(p.grad) for p in model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IN_PLACE)
def test_an_operator_in_place_has_eagers_bits(name: str) -> None:
    operator = IN_PLACE[name]
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in operator.dtypes), None)
    samples = list(operator.sample_inputs("cpu", dtype, requires_grad=False))[:SAMPLES] if dtype else []
    tried = 0
    for sample in samples:
        model = Applied(operator.inplace_variant, sample)
        if not isinstance(sample.input, Tensor) or sample.broadcasts_input or not runs_in_eager(model, sample.input):
            continue
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = memfit.TrainingStep(model=model, loss=loss, batch=sample.input, optimizer=optimizer)
        planned = fit_step(step, Settings(budget="1GiB", planner="drop_cheap", options=COMPUTE_AGAIN))
        assert isinstance(planned, memfit.PlannedStep) or any(word in name for word in SEEDED + REFUSED)
        if isinstance(planned, memfit.PlannedStep):
            planned.verify()
        tried += 1
    if not tried:
        pytest.skip("no sample of it can be trained on")
