"""Operators whose bits are others while a dispatch mode is on, as one is in a capture; memfit refuses those.

It runs the samples of PyTorch's own operator tests, forward and backward, with an empty mode and without. Operators
that differ between two runs without a mode are left out. Needs the package `expecttest`.

    python benchmarks/dispatch_modes.py    # ten minutes
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from _record import store
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

SAMPLES = 8
RUNS = 3  # without a mode


class Empty(TorchDispatchMode):
    """Does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


def results(operator: Any, sample: Any) -> list[torch.Tensor]:
    """Return what an operator returns for a sample, and the gradients of the inputs that require one."""

    def copied(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf

    torch.manual_seed(0)
    given, args, kwargs = tree_map(copied, (sample.input, sample.args, sample.kwargs))
    returned = tensors(operator(given, *args, **kwargs))
    inputs = [each for each in tensors((given, args, kwargs)) if each.requires_grad]
    outputs = [each for each in returned if each.requires_grad and each.dtype.is_floating_point]
    if not inputs or not outputs:
        return returned
    weights = [torch.linspace(0.1, 1, each.numel()).reshape(each.shape).to(each.dtype) for each in outputs]
    gradients = torch.autograd.grad(outputs, inputs, weights, allow_unused=True)
    return returned + [each for each in gradients if each is not None]


def is_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether two lists hold the same bits."""
    pairs = [(one, other) for one, other in zip(some, others, strict=True) if one.layout is torch.strided]
    return all(_bits(one) == _bits(other) for one, other in pairs)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().numpy().tobytes()


def first_difference(operator: Any, *, with_gradients: bool) -> int | None:
    """Return the number of the first sample whose bits are others under a mode, or None."""
    for number, sample in enumerate(
        list(operator.sample_inputs("cpu", torch.float32, requires_grad=with_gradients))[:SAMPLES]
    ):
        try:
            first, *others = (results(operator, sample) for _ in range(RUNS))
            if not all(is_same(first, other) for other in others):
                continue
            with Empty():
                under_mode = results(operator, sample)
            if not is_same(first, under_mode):
                return number
        except Exception:  # noqa: BLE001 - a sample for another build or device may raise anything
            continue
    return None


def main() -> None:
    """Try all operators, print those that differ, and store them."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for operator in op_db:
        for with_gradients in (False, True):
            if with_gradients and not operator.supports_autograd:
                continue
            sample = first_difference(operator, with_gradients=with_gradients)
            if sample is not None:
                name = f"{operator.name} {operator.variant_test_name}".strip()
                found.append({"operator": name, "with gradients": with_gradients, "sample": sample})
                print(found[-1], flush=True)
    print(store("dispatch_modes", {"operators": len(op_db), "samples": SAMPLES, "differ": found}))


if __name__ == "__main__":
    main()
