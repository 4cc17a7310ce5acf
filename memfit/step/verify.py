"""Verification: planned and eager steps from the same states, compared bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memfit.capture import TrainingStep, capture
from memfit.capture.compare import require_as_eager
from memfit.capture.training_step import parameters_of
from memfit.errors import VerificationError
from memfit.memory.bits import same_bits, same_value
from memfit.memory.saved_on_host import EagerRun
from memfit.memory.snapshot import StepState, left_as_it_was
from memfit.plan import Plan
from memfit.step.agreement import agreed_difference
from memfit.torch_private.tensors import tree_flatten

# Added to each parameter after it is scaled: the second state differs in all values, and in no sign of a large one.
_SCALE, _SHIFT = 1.0625, 2.0**-10
_LARGE_RATE = 2.0**10
_MOST_LEFT_OUT = 0.01  # of the gradients: of more, equal bits are no evidence
_PAIRS_OF_EAGER_STEPS = 4  # kernels whose bits vary do not do so each time
_ADVICE = (
    "try torch.use_deterministic_algorithms(True), on CUDA with CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment"
)


class RunsStep(Protocol):
    """A step, and another way to run it that can be verified."""

    step: TrainingStep

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """The generators that the step's code hands to torch, beside the default ones; none are known here."""
        return ()

    def __call__(self, batch: Any) -> Any: ...


def require_same(planned: RunsStep, batch: Any, *, is_recorded: bool = True) -> None:
    """Compare the bits of planned and eager steps on `batch`, from the present state and from perturbed parameters.

    A value that was frozen at capture shows only in the second pair. The state is put back at the end. Copies of it
    are in host memory; eager's saved tensors are there, too, if the device has no room for them.

    Args:
        planned: the planned step.
        batch: the batch of all steps.
        is_recorded: whether the planned step runs what was recorded once. If the user's Python code runs in each step,
            nothing can be frozen, and one pair is enough.

    Raises:
        VerificationError: the bits differ; the message names the first tensor that does. It blames kernels that are not
            deterministic only if two eager steps differ too. Or more than 1% of the gradients show nothing, because
            they are not finite, or no update used them.
        CaptureError, UnsupportedStepError: the bits differ because the captured step dispatches other calls than eager;
            names the line.
    """
    compared, where = _compared(planned, batch, planned), ""
    before = StepState.take(planned.step, planned.generators)
    left_out = compared.left_out
    try:
        if compared.difference is None and is_recorded:
            later, changed = _later(planned.step, batch)
            compared, where = _compared(planned, later, planned), f", {changed}"
            left_out &= compared.left_out
        if compared.difference is None:
            return _require_evidence(planned.step, left_out)
        pairs = (difference_of_eager(planned, batch) for _ in range(_PAIRS_OF_EAGER_STEPS))
        eager_difference = next(filter(None, pairs), None)
        if eager_difference is not None:
            raise VerificationError(
                f"two eager steps from the same state differ in {eager_difference}, so the kernels are not "
                f"deterministic and nothing can be compared: {_ADVICE}"
            )
        if is_recorded:
            require_as_eager(planned.step, batch, capture(planned.step, batch).stream)
    finally:
        before.put_back(planned.step)
    raise VerificationError(
        f"the planned step differs from eager in {compared.difference}{where}; {_PAIRS_OF_EAGER_STEPS} pairs of eager "
        "steps from the same state are equal: report this, with the step"
    )


def first_difference(planned: RunsStep, batch: Any) -> str | None:
    """Return the name of the first value that differs between the planned step and eager, or None.

    Loss, parameters, buffers, gradients, the states of the optimizer and the scaler, and the random generators are
    compared. Both steps start from the present state, which is put back at the end.

    Args:
        planned: the planned step.
        batch: the batch of both steps.
    """
    return _compared(planned, batch, planned).difference


def difference_of_eager(planned: RunsStep, batch: Any) -> str | None:
    """Return the name of the first value that differs between two eager steps from the present state, or None.

    Args:
        planned: its step is run as eager does.
        batch: the batch of both steps.
    """
    return _compared(planned, batch, planned.step.run_eager).difference


def _later(step: TrainingStep, batch: Any) -> tuple[Any, str]:
    """Change what a step computes from: its parameters, or the state of a function; return a batch, and say so.

    Learning rates are made so large that gradients make up the updated parameters, whose bits then show theirs.
    """
    if not step.has_backward:
        return (step.run_eager(batch), batch[1]), "from the state after one call"
    perturb(step)
    for group in step.optimizer.param_groups if step.optimizer is not None else ():
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            rate.fill_(_LARGE_RATE)
        elif rate is not None:
            group["lr"] = _LARGE_RATE
    if step.scaler is not None and step.scaler.is_enabled():
        step.scaler.load_state_dict({**step.scaler.state_dict(), "scale": 1.0})  # at which gradients are finite
    return batch, "after the parameters were changed"


def perturb(step: TrainingStep) -> None:
    """Change all values of all parameters that are trained."""
    with torch.no_grad():
        for parameter in step.model.parameters():
            if parameter.requires_grad:
                parameter.mul_(_SCALE).add_(_SHIFT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """What one pair of steps has shown.

    Attributes:
        difference: the name of the first value that differs, or None.
        left_out: names of trained parameters whose gradients nothing shows that was compared.
    """

    difference: str | None
    left_out: frozenset[str]


def _compared(planned: RunsStep, batch: Any, run: Callable[[Any], Any]) -> _Compared:
    """Compare an eager step with `run`, from the present state."""
    step = planned.step
    with comparable_engines(), left_as_it_was(step, planned.generators) as put_back:
        before = StepState.take(step)
        eager = EagerRun(step.run_eager, _device_of(step), unplanned_bytes(planned), put_back)
        expected_loss, expected = _outcome(eager, planned, batch)
        left_out = _left_out(step, before, expected)
        put_back()
        loss, outcome = _outcome(eager if run == step.run_eager else run, planned, batch)
    difference = agreed_difference(step.across, _difference(step, (expected_loss, expected), (loss, outcome)))
    return _Compared(difference=difference, left_out=left_out)


def _difference(step: TrainingStep, expected: tuple[Any, StepState], found: tuple[Any, StepState]) -> str | None:
    """Return the name of the first value that differs between two results of a step, with the states after it."""
    expected_loss, loss = expected[0], found[0]
    if step.has_backward and not same_bits(expected_loss, loss):
        return f"the loss ({expected_loss.item()!r} and {loss.item()!r})"
    for number, (mine, theirs) in enumerate(zip(tree_flatten(expected_loss)[0], tree_flatten(loss)[0], strict=True)):
        if not same_bits(mine, theirs):
            return f"leaf {number} of the next state"
    return expected[1].first_difference(found[1])


def _outcome(run: Callable[[Any], Any], planned: RunsStep, batch: Any) -> tuple[Any, StepState]:
    loss = run(batch)
    return loss, StepState.take(planned.step, planned.generators)


def _left_out(step: TrainingStep, before: StepState, after: StepState) -> frozenset[str]:
    """Return the names of trained parameters whose gradients an eager step's results do not show.

    They are not finite, or the update has used none: the scaler has skipped it, or the rate is 0 and there is no state.
    """
    numbers = {parameter: number for number, parameter in enumerate(parameters_of(step.optimizer))}
    rates = [g.get("lr", 1.0) for g in (step.optimizer.param_groups if step.optimizer else ()) for _ in g["params"]]
    skipped = bool(before.scaler and after.scaler and after.scaler["scale"] < before.scaler["scale"])

    def shows_nothing(name: str, parameter: torch.nn.Parameter) -> bool:
        number, gradient = numbers.get(parameter), after.gradients[name]
        if number is None:
            return gradient is not None and not _is_finite(gradient)
        is_unused = float(rates[number]) == 0.0 and same_value(
            before.optimizer.get(number), after.optimizer.get(number)
        )
        return skipped or is_unused or not _is_finite(after.tensors[name])

    trained = ((name, p) for name, p in step.model.named_parameters() if p.requires_grad)
    return frozenset(name for name, parameter in trained if shows_nothing(name, parameter))


def _is_finite(tensor: torch.Tensor) -> bool:
    values = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return bool(torch.isfinite(values).all())


def _require_evidence(step: TrainingStep, left_out: Collection[str]) -> None:
    """Raise VerificationError if equal bits are no evidence, because too few of them come from gradients."""
    count = sum(parameter.requires_grad for parameter in step.model.parameters())
    if len(left_out) > _MOST_LEFT_OUT * count:
        raise VerificationError(
            f"planned and eager steps have the same bits, but these show nothing of {len(left_out)} of {count} "
            f"gradients, {min(left_out)!r} among them: they are not finite, or no update used them, because the "
            "learning rate is 0 or the scaler skipped it; verify at another state"
        )


@contextmanager
def comparable_engines() -> Generator[None]:
    """Let cuDNN choose its engines by rule in this block, and not by trials.

    With `torch.backends.cudnn.benchmark` each thread tries engines and remembers the fastest. Eager's backward runs on
    a thread of autograd's, so that even two eager processes differ in their bits.
    """
    cudnn = torch.backends.cudnn
    if not cudnn.benchmark:
        yield
        return
    was_deterministic = cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True  # `cudnn.flags` would read settings of TF32, which may raise
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = True, was_deterministic


def _device_of(step: TrainingStep) -> torch.device:
    return next((parameter.device for parameter in step.model.parameters()), torch.device("cpu"))


def unplanned_bytes(planned: RunsStep) -> int:
    """Return what an eager step takes beside its residents, as the plan says; 0 where there is no plan.

    Args:
        planned: the planned step.
    """
    plan: Plan | None = getattr(planned, "plan", None)
    if plan is None:
        return 0
    return max(0, plan.unplanned.peak_bytes - plan.bytes_outside - plan.device.resident_bytes(plan.graph))
