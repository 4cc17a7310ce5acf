"""A test for each private name of torch that memfit uses: when a release moves one, this says which."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from memfit.capture import torch_private
from memfit.capture.torch_private import (
    DATA_DEPENDENT_ERRORS,
    FakeTensorMode,
    TorchDispatchMode,
    backward_keeps_graph,
    backward_node,
    boxed,
    checkpoints_inlined,
    compile_with_budget,
    dp_knapsack,
    fake_mode_of,
    gradient_hooks,
    greedy_knapsack,
    has_accumulation_hooks,
    has_kernel,
    ilp_knapsack,
    is_fake,
    make_boxed_func,
    module_tables,
    next_sequence_number,
    real_tensors,
    release_cublas_workspaces,
    runs_under_ddp,
    storage_key,
    trace_joint,
    tree_flatten,
    tree_map,
    tree_unflatten,
)


def test_every_public_name_of_the_module_is_tested_here() -> None:
    tree = ast.parse(Path(torch_private.__file__).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {alias.asname for alias in node.names if alias.asname}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    public = {name for name in names if not name.startswith("_")}
    assert public <= set(globals()), public - set(globals())


def test_fake_tensors() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    real = torch.nn.Parameter(torch.ones(3))
    fake = mode.from_tensor(real)
    assert is_fake(fake)
    assert not is_fake(real)
    assert fake_mode_of(fake) is mode
    with mode:
        assert is_fake(torch.empty(2) + fake.sum())
        assert is_fake(real * 2)


def test_data_dependent_errors() -> None:
    with FakeTensorMode():
        for look in (torch.Tensor.item, torch.nonzero):
            try:
                look(torch.empty(1))
            except DATA_DEPENDENT_ERRORS:
                continue
            raise AssertionError(f"{look} was expected to raise")


def test_storage_key_is_shared_by_views_only() -> None:
    base = torch.empty(4)
    assert storage_key(base) == storage_key(base[1:].view(3, 1))
    assert storage_key(base) != storage_key(base.clone())


def test_tables_of_a_module_and_hooks_of_its_parameters() -> None:
    module = torch.nn.BatchNorm1d(3)
    parameters, buffers = module_tables(module)
    assert parameters["weight"] is module.weight
    assert buffers["running_mean"] is module.running_mean
    assert gradient_hooks(module.weight) == []
    assert not has_accumulation_hooks(module.weight)
    module.weight.register_hook(torch.neg)
    module.weight.register_hook(torch.abs)
    assert gradient_hooks(module.weight) == [torch.neg, torch.abs]
    handle = module.weight.register_post_accumulate_grad_hook(lambda _parameter: None)
    assert has_accumulation_hooks(module.weight)
    handle.remove()
    assert not has_accumulation_hooks(module.weight)


def test_dispatch_mode_and_pytrees() -> None:
    seen: list[str] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with Recorder():
        torch.ones(2).relu_()
    assert seen == ["aten::ones", "aten::relu_"]
    leaves, structure = tree_flatten({"a": [1, (2, None)]})
    assert leaves == [1, 2, None]
    assert tree_unflatten(leaves, structure) == {"a": [1, (2, None)]}
    assert tree_map(lambda leaf: leaf or 0, [1, (None,)]) == [1, (0,)]


def test_cublas_gives_its_workspaces_back() -> None:
    assert hasattr(torch._C, "_cuda_clearCublasWorkspaces") == (torch.version.cuda is not None)
    release_cublas_workspaces()
    if torch.cuda.is_available():
        square = torch.ones(64, 64, device="cuda")
        before = torch.cuda.memory_allocated()
        square.copy_(square @ square)
        assert torch.cuda.memory_allocated() > before
        release_cublas_workspaces()
        assert torch.cuda.memory_allocated() == before


def test_sequence_numbers_link_forward_and_backward() -> None:
    value = torch.ones(2, requires_grad=True)
    before = next_sequence_number()
    product = value * 3
    assert product.grad_fn is not None
    assert product.grad_fn._sequence_nr() == before
    assert next_sequence_number() == before + 1
    assert backward_node() is None
    seen: list[Any] = []
    product.register_hook(lambda _gradient: seen.append(backward_keeps_graph()))

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            node = backward_node()
            if func is torch.ops.aten.mul.Tensor:
                seen.append(node)
            return func(*args, **(kwargs or {}))

    with Watch():
        product.sum().backward(retain_graph=True)
    assert seen == [True, ("MulBackward0", before)]


def test_a_forward_under_ddp_is_seen(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        seen: list[bool] = []
        inner = torch.nn.Linear(2, 2)
        inner.register_forward_hook(lambda *_: seen.append(runs_under_ddp()))
        torch.nn.parallel.DistributedDataParallel(inner)(torch.ones(1, 2))
        assert seen == [True]
        assert not runs_under_ddp()
    finally:
        torch.distributed.destroy_process_group()


def test_checkpointed_regions_run_inline() -> None:
    for use_reentrant in (False, True):
        calls: list[int] = []

        def region(value: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            return value.tanh()

        value = torch.ones(2, requires_grad=True)
        with checkpoints_inlined():
            checkpoint(region, value, use_reentrant=use_reentrant).sum().backward()
        assert len(calls) == 1
        checkpoint(region, value, use_reentrant=use_reentrant).sum().backward()
        assert len(calls) == 3


def test_joint_graph_is_partitioned_by_ours_and_compiled_functions_are_boxed() -> None:
    from torch._functorch.partitioners import default_partition

    seen: dict[str, Any] = {}

    def partition(joint: Any, inputs: Any, *, num_fwd_outputs: int, **more: Any) -> Any:
        seen["joint"] = [str(node.target) for node in joint.graph.nodes]
        seen["outputs"] = num_fwd_outputs
        with real_tensors():
            assert not is_fake(torch.ones(2))
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **more)

    def compile_half(module: Any, _inputs: Any) -> Any:
        return boxed(make_boxed_func(module.forward))

    class Pair(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> tuple[torch.Tensor]:
            return (torch.relu(value),)

    module = torch.fx.symbolic_trace(Pair())
    function = trace_joint(
        module,
        [torch.randn(3, requires_grad=True)],
        partition=partition,
        forward_compiler=compile_half,
        backward_compiler=compile_half,
        inference_compiler=compile_half,
    )
    value = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
    (result,) = function(value)
    result.sum().backward()
    assert torch.equal(value.grad, torch.tensor([0.0, 1.0, 1.0]))  # type: ignore[arg-type]
    assert seen["outputs"] == 1
    assert "aten.threshold_backward.default" in seen["joint"]
    assert any(target.startswith("tangents") for target in seen["joint"])


def test_torch_s_own_budget_recomputes() -> None:
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4)))
    value = torch.randn(16, 8)
    model(value).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    for share, solver in ((1.0, "dp"), (0.3, "dp"), (0.3, "greedy")):
        model.zero_grad(set_to_none=True)
        compile_with_budget(model, share, solver)(value).sum().backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert gradient is not None
            torch.testing.assert_close(parameter.grad, gradient)


def test_knapsack_solvers_save_what_is_dear_for_its_memory() -> None:
    for solve in (dp_knapsack, greedy_knapsack):
        seconds, saved, recomputed = solve([0.5, 0.3, 0.2], [9.0, 1.0, 2.0], 0.7)
        assert seconds == 11.0
        assert sorted(saved) == [0, 2]
        assert list(recomputed) == [1]
    try:
        assert sorted(ilp_knapsack([0.5, 0.3, 0.2], [9.0, 1.0, 2.0], 0.7)[1]) == [0, 2]
    except RuntimeError as error:
        assert "scipy" in str(error)


@pytest.mark.parametrize("device_type", ["cpu", "meta"])
def test_kernels_of_their_own(device_type: str) -> None:
    aten = torch.ops.aten
    assert has_kernel(aten.threshold_backward.grad_input, device_type)
    assert not has_kernel(
        aten.native_dropout_backward.out, device_type
    )  # generated: it computes a result and copies it
