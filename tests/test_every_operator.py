"""Every operator of torch's own list, in the forms that write: over a step's result, and into a tensor of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_planned_bits import COMPUTE_AGAIN
from torch import Tensor, nn
from torch.testing._internal import common_methods_invocations
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import memfit
from memfit.doors.step import fit_step
from memfit.errors import VerificationError
from memfit.planning import Settings

# Torch's list forbids its settings to the whole process.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
SAMPLES = 6
IN_PLACE = {f"{each.name} {each.variant_test_name}".strip(): each for each in op_db if each.inplace_variant is not None}
# Their kernels give tensors of their own, or of values without a gradient, more memory: run under memfit.checkpoint.
_LINALG = ("det", "cond", "eigh", "eigvalsh", "ldl_factor", "slogdet", "lu_factor", "inv", "solve", "solve_ex")
NO_GRAPHS = {"masked_select", "nn.functional.logsigmoid", "slice_scatter", "msort", "norm nuc"} | {
    f"linalg.{name}" for name in (*_LINALG, "matrix_norm", "matrix_power", "matrix_rank", "matrix_rank hermitian")
}
# They raise, or give any bits, for what an updated parameter makes of their samples.
_NOT_FINITE = ("linalg.cholesky", "linalg.svdvals", "linalg.lstsq", "norm nuc")
_NAMES = {f"{each.name} {each.variant_test_name}".strip(): each for each in op_db}
INTO = {name: each for name, each in _NAMES.items() if each.supports_out and name not in _NOT_FINITE}


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


class Into(Applied):
    """Writes into a tensor that the step has made, which no gradient goes through, and uses it afterwards."""

    def forward(self, given: Tensor) -> Tensor:
        hidden = given * self.before if given.is_floating_point() or given.is_complex() else given.clone()
        with torch.no_grad():
            like = self.operator(given, *self.args, **self.named)
            into = tree_map(torch.zeros_like, like)  # `ihfftn` leaves parts of it as they were
            self.operator(hidden, *self.args, **self.named, out=into)
        written = sum(each.abs().float().nan_to_num(0.0, 0.0, 0.0).sum() for each in tree_leaves(into))
        return written * self.after + hidden.abs().float()


@pytest.fixture(autouse=True)
def without_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's list not seed before each call: a step that seeds is no graph."""
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", lambda op, *args, **kwargs: op(*args, **kwargs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "name"), [*((Applied, name) for name in IN_PLACE), *((Into, name) for name in INTO)])
def test_an_operator_that_writes_has_eagers_bits(kind: type[Applied], name: str) -> None:
    operator = (IN_PLACE if kind is Applied else INTO)[name]
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool, torch.complex64) if d in operator.dtypes), None)
    samples = list(operator.sample_inputs("cpu", dtype, requires_grad=False))[:SAMPLES] if dtype else []
    tried = 0
    for sample in samples:
        model = kind(operator.inplace_variant if kind is Applied else operator.op, sample)
        if not isinstance(sample.input, Tensor) or sample.broadcasts_input or not runs_in_eager(model, sample.input):
            continue
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = memfit.TrainingStep(model=model, loss=loss, batch=sample.input, optimizer=optimizer)
        planned = fit_step(step, Settings(budget="1GiB", planner="drop_cheap", options=COMPUTE_AGAIN))
        assert isinstance(planned, memfit.PlannedStep) or (kind is Into and name in NO_GRAPHS), planned
        try:
            if isinstance(planned, memfit.PlannedStep):
                planned.verify()
        except VerificationError as error:
            if "two eager steps" not in str(error):  # what some kernels leave of a tensor that they write to
                raise
        tried += 1
    if not tried:
        pytest.skip("no sample of it can be trained on")
