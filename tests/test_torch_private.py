"""A test for each private name of torch that memfit uses: when a release moves one, this says which."""

from __future__ import annotations

import ast
import logging
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from memfit import torch_private
from memfit.errors import UnsupportedStepError
from memfit.system import instruments
from memfit.system.recorder import record
from memfit.torch_private import cuda
from memfit.torch_private.absent import (
    DevicesHere,
    WithoutMemory,
    absent_ranks,
    has_no_memory,
    is_absent,
    real_form,
)
from memfit.torch_private.ambient import Ambient, dispatch_keys_kept, put_back_after_an_error, saved_as_they_are
from memfit.torch_private.aot import as_aot_takes_it, boxed, hand_over_absent, trace_joint
from memfit.torch_private.autocast import (
    any_autocast,
    autocast_here,
    autocast_nesting,
    autocast_watched,
    casting,
    is_cast_itself,
    without_autocast,
)
from memfit.torch_private.autograd import (
    INSTEAD_OF_TRANSFORMS,
    RUNS_BACKWARD,
    TorchDispatchMode,
    UnwrappedMode,
    at_end_of_backward,
    backward_code_through,
    backward_keeps_graph,
    backward_node,
    backward_through,
    changing_hooks,
    creates_graph,
    default_saved_hooks,
    has_modes,
    hooks_aside_in_transforms,
    in_backward,
    in_transform,
    instead_here,
    is_innermost,
    is_on,
    next_sequence_number,
    no_modes,
    only_mode,
    require_unwritten,
    saved_leaves_themselves,
    saved_with,
    switch_on,
    switched_off,
    switched_on,
    views_replayed,
)
from memfit.torch_private.checkpoints import (
    IGNORED_OPS,
    detached,
    ends_early,
    in_selective_checkpoint,
    is_cached_cast,
    saved_node_names,
    schema_of,
    tell_mismatch,
)
from memfit.torch_private.compiled_regions import CompiledRegions, compiled_as_eager
from memfit.torch_private.cuda import (
    LastStream,
    allocator_settings_text,
    has_captured_graphs,
    note_resets_of_peaks,
    prepare_allocator,
    release_cublas_workspaces,
    turn_on_expandable_segments,
)
from memfit.torch_private.dynamo import (
    compile_soundly,
    compile_with_budget,
    compiled_calls,
    dp_knapsack,
    ends_in_break,
    greedy_knapsack,
    ilp_knapsack,
    is_between_breaks,
    is_compiled_by_aot,
    is_compiled_soundly,
    is_compilers,
    times_compiled,
)
from memfit.torch_private.guarding import (
    ATTRIBUTES_HAVE_VERSIONS,
    DictVersions,
    GlobalState,
    TensorAddresses,
    TensorMetadata,
    dict_version,
)
from memfit.torch_private.inductor import HELD, LEAN, InductorHalf, ModulePair, compiled_by_inductor
from memfit.torch_private.modules import (
    CallsSeen,
    Structure,
    bare_step,
    eager_call,
    global_module_hooks,
    gradient_hooks,
    has_lazy_parameters,
    hooks_on_all_modules,
    is_compiled,
    leaf_hooks,
    module_hooks,
    module_tables,
    no_hooks_on_all_optimizers,
    optimizer_hooks,
    own_call,
    own_tensors,
    set_call,
    submodules_table,
    tables_of,
    uncompiled,
)
from memfit.torch_private.patching import replaced
from memfit.torch_private.ranks import (
    bucket_sizes,
    ddp_facts,
    ddp_sorts_buckets,
    finish_gather,
    finish_scatter,
    first_bucket_bytes,
    first_bucket_sizes,
    gradient_buckets,
    group_timeout,
    groups_inside,
    groups_of,
    groups_talked_to,
    has_ranks,
    inside_ddp,
    is_gloo,
    is_joined,
    is_lost,
    is_of_others,
    replicated_class,
    start_gather,
    start_scatter,
    start_sum,
    wait_for_sum,
)
from memfit.torch_private.sharding import (
    GroupFacts,
    divisions,
    gathered_before_it_reshards,
    groups_shown,
    is_fully_sharded,
    is_of_first_fsdp,
    is_of_fsdp,
    is_sharded,
    key_of,
    local,
    local_gradient,
    modules_that_gather,
    parameters_that_are_gathered,
    reduces_gradients,
    reshard,
    restored_by_copies,
    sharded_groups,
    whole_part,
    with_local,
)
from memfit.torch_private.symbols import guesses_noted, make_size_environment, make_size_symbol, symbolic_kernels
from memfit.torch_private.tensors import (
    DATA_DEPENDENT_ERRORS,
    INGREDIENTS,
    PLAIN_TYPES,
    READS_A_NUMBER,
    SHORTENS,
    WITHOUT_BASE,
    BatchNormBase,
    FakeTensorMode,
    StorageWeakRef,
    as_fake,
    bare_overload,
    bytes_in,
    contiguous_strides,
    draws,
    failing_fakes_unlogged,
    fake_mode_of,
    fakes_corrected,
    has_kernel,
    has_own_dispatch,
    is_data_dependent,
    is_fake,
    is_freed,
    is_of_array,
    is_plain_dense,
    is_view,
    is_zero_tensor,
    known_value,
    make_boxed_func,
    real_tensors,
    storage_key,
    storage_users,
    strided_as_real,
    tensors_in,
    tensors_reached,
    tree_flatten,
    tree_map,
    tree_unflatten,
    without_memory,
    without_torch_function,
)
from memfit.torch_private.tracing import answered_as_eager, checkpoints_inlined, stood_for

TORCH_2_11 = torch.__version__.startswith("2.11.")


def test_calls_that_draw_are_told_by_their_tag_and_their_dropout() -> None:
    aten = torch.ops.aten
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert draws(aten.rand.default, ([3],), {}) and not draws(aten.mul.Tensor, (1, 2), {})
    assert not draws(torch.add, (1, 2), {})
    assert draws(attention, (1, 2, 3, 0.5), {}) and draws(attention, (1, 2, 3), {"dropout_p": 0.5})
    assert not draws(attention, (1, 2, 3), {})


def test_a_stand_in_is_told_from_what_it_stands_for() -> None:
    original = torch.nn.functional.one_hot
    with answered_as_eager(lambda _original, indices, classes: indices * classes):
        stand_in, one_hot = torch._subclasses.fake_tensor, torch.nn.functional.one_hot
        asked = stand_in.is_fake
        assert one_hot(torch.ones(1), 3).tolist() == [3.0]
    assert one_hot is not original and stood_for(one_hot) is original is torch.nn.functional.one_hot
    assert stood_for(stand_in) is torch._subclasses.fake_tensor
    assert asked is not torch._subclasses.fake_tensor.is_fake
    assert stood_for(asked) is torch._subclasses.fake_tensor.is_fake
    assert stood_for(torch.relu) is torch.relu


def test_an_attribute_is_replaced_inside_a_block() -> None:
    class Owner:
        @staticmethod
        def name() -> int:
            return 1

    with replaced(Owner, "name", lambda: 2):
        assert Owner.name() == 2
    assert Owner().name() == 1


def test_the_groups_of_a_collective_are_told() -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        whole, (first, second) = torch.distributed.group.WORLD, mesh.get_all_groups()
        assert has_ranks()
        assert whole is not None
        ones = torch.ones(4, 4)
        functional = torch.ops._c10d_functional.all_reduce.default
        assert groups_of(functional, (ones, "sum", whole.group_name), {}, [ones]) == [whole]
        assert groups_of(functional, (ones, "sum"), {"group_name": second.group_name}, [ones]) == [second]
        sharded = distribute_tensor(ones, mesh["a"], [Shard(0)])
        assert groups_of(torch.ops.aten.relu.default, (sharded,), {}, [sharded]) == [first]
        assert groups_of(torch.ops.aten.relu.default, (ones,), {}, [ones]) == []
        alone = torch.distributed.new_group([0])
        assert groups_of(functional, (ones, "sum", alone.group_name), {}, [ones]) == []
    finally:
        torch.distributed.destroy_process_group()


def test_operators_of_others_are_told_from_pytorchs() -> None:
    cpu, ones = torch.device("cpu"), torch.ones(2)
    torch.library.custom_op("memfit_tests::doubled", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    doubled = torch.ops.memfit_tests.doubled.default
    assert is_of_others(doubled) and not is_of_others(torch.ops.aten.relu.default)
    with absent_ranks(4), groups_inside(doubled, cpu) as groups:
        doubled(ones)
    assert groups == []
    with absent_ranks(4), groups_talked_to(cpu) as groups:  # collectives of absent ranks have no numbers
        torch.distributed.all_reduce(ones)
    assert groups == []


def test_ranks_that_are_not_there_answer_at_once() -> None:
    with absent_ranks(4) as world:
        assert is_absent(world) and not is_absent(None)
        assert torch.distributed.get_world_size() == 4
        ones = torch.ones(2)
        torch.distributed.all_reduce(ones)
        assert ones.tolist() == [1.0, 1.0]
        assert is_gloo(world, torch.device("cpu"))
    assert not torch.distributed.is_initialized()


def test_large_tensors_have_no_memory_and_modules_of_them_can_be_converted() -> None:
    with WithoutMemory():
        small, large = torch.arange(4.0), torch.nn.Linear(1 << 10, 1 << 10)
        assert small.sum().item() == 6.0
        assert has_no_memory(large.weight) and not has_no_memory(large.bias)
        large.bfloat16()  # which swaps tensors, and refuses those with weak references
        moved = torch.empty(1 << 20, device="meta")
        half = large.weight[: 1 << 9]
    assert large.weight.dtype is torch.bfloat16 and has_no_memory(large.weight)
    assert moved.device.type == "cpu" and has_no_memory(moved)
    assert half.untyped_storage().nbytes() == 1 << 21
    assert real_form(small) is small
    real = real_form(large.weight.detach().t())
    assert not has_no_memory(real) and real.stride() == (1, 1 << 10)
    fake = FakeTensorMode().from_tensor(large.weight)  # as a capture shows it
    assert isinstance(fake, torch.nn.Parameter) and not has_no_memory(fake)


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is here")
def test_devices_that_are_not_here_are_the_cpu() -> None:
    with DevicesHere():
        model = torch.nn.Linear(2, 2).cuda()
        assert model.weight.device.type == torch.ones(2, device="cuda:1").device.type == "cpu"
        assert torch.ones(2).to("cuda").to(torch.device("cuda", 0), torch.float64).dtype is torch.float64


def test_every_public_name_of_the_room_is_tested_here() -> None:
    files = Path(torch_private.__file__).parent.glob("*.py")
    body = [node for file in files for node in ast.parse(file.read_text()).body]
    names = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    for node in body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {alias.asname for alias in node.names if alias.asname}
        if isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    public = {name for name in names if not name.startswith("_")}
    assert public <= set(globals()), public - set(globals())


def test_code_outside_of_torch_is_told_that_nothing_is_fake() -> None:
    mode = FakeTensorMode()
    fake = mode.from_tensor(torch.ones(3))
    asked = torch._subclasses.FakeTensor, torch._guards, torch._subclasses.fake_tensor
    with answered_as_eager(lambda original, *given: original(*given)), mode:
        assert not isinstance(fake, torch._subclasses.FakeTensor)
        assert not torch._subclasses.fake_tensor.is_fake(fake)
        assert torch._guards.detect_fake_mode([fake]) is None and torch._guards.active_fake_mode() is None
        assert is_fake(fake) and is_fake(fake + 1)
    assert isinstance(fake, torch._subclasses.FakeTensor)
    assert asked == (torch._subclasses.FakeTensor, torch._guards, torch._subclasses.fake_tensor)


def test_fakes_are_corrected_inside_a_block() -> None:
    def by_columns(func: Any, _args: Any, _kwargs: Any, returned: Any) -> Any:
        return returned.new_empty_strided((2, 3), (1, 2)) if func is torch.ops.aten.relu.default else returned

    mode = FakeTensorMode()
    with fakes_corrected(by_columns), mode:
        inside = torch.empty(2, 3).relu()
    with mode:
        assert inside.stride() == (1, 2) and torch.empty(2, 3).relu().stride() == (3, 1)


def test_a_fake_without_the_gradient_of_its_tensor() -> None:
    mode = FakeTensorMode()
    real = torch.ones(3, requires_grad=True)
    real.grad = torch.ones(3)
    with mode:
        fake = as_fake(mode, real)
    assert is_fake(fake) and not fake.requires_grad and fake.grad is None


def test_numbers_are_read_by_one_operator() -> None:
    read: list[Any] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            read.append(func)
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(())
    with Watch():
        assert tensor.item() == float(tensor) == int(tensor) == bool(tensor) == 1
    assert read == [READS_A_NUMBER] * 4


def test_views_are_replayed() -> None:
    def nodes() -> list[str]:
        view = (torch.ones(4, requires_grad=True) * 2).view(2, 2)[0]
        view.mul_(3)
        found, node = [], view.grad_fn
        while node is not None:
            found.append(node.name())
            node = node.next_functions[0][0] if node.next_functions else None
        return found

    with views_replayed():
        assert "AsStridedBackward0" not in nodes()
    assert "AsStridedBackward0" in nodes()


def test_a_mode_that_runs_alone() -> None:
    class Refuses(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    with Refuses(), only_mode(FakeTensorMode()):
        assert is_fake(torch.empty(2))


def test_a_value_that_depends_on_no_tensor_is_known() -> None:
    with FakeTensorMode():
        assert known_value(torch.tensor(2.0))
        assert not known_value(torch.ones(()))
    assert not known_value(torch.tensor(2.0))


def test_a_weak_reference_to_a_storage_reserves_its_key() -> None:
    tensor = torch.ones(1000)
    key = storage_key(tensor)
    reference = StorageWeakRef(tensor.untyped_storage())
    assert not reference.expired()
    del tensor
    assert reference.expired()
    assert all(storage_key(torch.ones(1000)) != key for _ in range(100))


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
        for read in (lambda t: t.numpy(), lambda t: f"{t.sum():.2f}", lambda t: t.tolist()):
            with pytest.raises(Exception) as raised:
                read(torch.empty(1))
            assert is_data_dependent(raised.value)
    assert not is_data_dependent(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_strides_of_a_contiguous_tensor() -> None:
    assert contiguous_strides((2, 3, 4)) == torch.empty(2, 3, 4).stride()


def test_a_tensor_that_was_written_to_since_it_was_saved() -> None:
    tensor = torch.ones(2)
    require_unwritten(tensor.detach(), tensor._version)
    version = tensor._version
    tensor.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        require_unwritten(tensor.detach(), version)


def test_storage_key_is_shared_by_views_only() -> None:
    base = torch.empty(4)
    assert storage_key(base) == storage_key(base[1:].view(3, 1))
    assert storage_key(base) != storage_key(base.clone())


def test_a_models_own_tensors_in_their_order() -> None:
    tied = torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.Sequential(torch.nn.Sequential(tied, torch.nn.BatchNorm1d(2)), torch.nn.Linear(2, 2), tied)
    model[1].weight = tied.weight
    parameters, buffers = own_tensors(model)
    for mine, theirs in ((parameters, model.parameters()), (buffers, model.buffers())):
        assert [id(each) for each in mine] == [id(each) for each in theirs]


def test_tables_of_a_module_and_hooks_of_its_parameters() -> None:
    module = torch.nn.BatchNorm1d(3)
    parameters, buffers = module_tables(module)
    assert parameters["weight"] is module.weight
    assert buffers["running_mean"] is module.running_mean
    assert not gradient_hooks(module.weight)
    assert leaf_hooks(module.weight) == (None, None)
    module.weight.register_hook(torch.neg)
    module.weight.register_hook(torch.abs)
    assert list(gradient_hooks(module.weight).values()) == [torch.neg, torch.abs]
    handle = module.weight.register_post_accumulate_grad_hook(lambda _parameter: None)
    gradient, accumulation = leaf_hooks(module.weight)
    assert list((gradient or {}).values()) == [torch.neg, torch.abs]
    assert len(accumulation or {}) == 1
    handle.remove()
    assert not leaf_hooks(module.weight)[1]


def test_the_modules_in_a_module() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert submodules_table(model) == {"0": model[0]}


def test_the_base_of_batch_normalizations() -> None:
    assert all(issubclass(kind, BatchNormBase) for kind in (torch.nn.BatchNorm1d, torch.nn.SyncBatchNorm))
    assert not issubclass(torch.nn.InstanceNorm1d, BatchNormBase)


@pytest.mark.parametrize(("name", "is_cast"), [("linear", True), ("matmul", True), ("einsum", False), ("none", False)])
def test_operators_that_autocast_casts_themselves(name: str, is_cast: bool) -> None:
    assert is_cast_itself(name, "cpu") == is_cast
    assert is_cast_itself("linear", "cuda")


def test_failing_fakes_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    for unlogged in (failing_fakes_unlogged(), nullcontext()):
        assert caplog.text == ""
        with unlogged, FakeTensorMode(), pytest.raises(RuntimeError):
            torch.empty(2) @ torch.empty(3)
    assert "failed while attempting to run meta" in caplog.text


def _counting_backend() -> tuple[Any, list[int]]:
    captured: list[int] = []

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        captured.append(len(inputs))
        return module.forward

    return backend, captured


def test_code_that_asks_whether_it_is_compiled_is_named(caplog: pytest.LogCaptureFixture) -> None:
    class Asking(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values * 2 if torch.compiler.is_compiling() else values * 3

    backend, captured = _counting_backend()
    model, values = Asking(), torch.ones(2)
    compiled = compiled_calls(model, eager_call(model), backend)
    assert torch.equal(compiled(values), values * 2) and len(captured) == 1
    assert "asks whether it is being compiled (forward in test_torch_private.py" in caplog.text
    compiled(torch.ones(3))
    assert len(captured) == 2 and caplog.text.count("asks whether it is being compiled") == 1
    another = Asking()
    compiled_calls(another, eager_call(another), backend)(values)
    assert caplog.text.count("asks whether it is being compiled") == 2, "once for each model"
    assert captured == [1, 2, 1], "sizes that have changed of one model are not those of another"
    torch.compiler.reset()


def test_messages_that_code_logs_break_no_graph() -> None:
    log = logging.getLogger("memfit.tests")

    class Logging(torch.nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            log.warning("values of %s", values.shape)
            return values * 2

    backend, captured = _counting_backend()
    model, values = Logging(), torch.ones(2)
    assert torch.equal(compiled_calls(model, eager_call(model), backend)(values), values * 2) and len(captured) == 1
    torch.compiler.reset()


def test_errors_of_the_compiler_are_told_from_others() -> None:
    from torch._dynamo.exc import TorchDynamoException

    assert is_compilers(TorchDynamoException("no"))
    assert not is_compilers(RuntimeError("no"))


def test_a_module_of_torchs_own_code_is_captured() -> None:
    backend, captured = _counting_backend()
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.ReLU())
    values = torch.ones(4, 3)
    expected = model(values)
    assert not is_compiled(model)
    set_call(model, compiled_calls(model, eager_call(model), backend))
    assert is_compiled(model) and torch.equal(model(values), expected) and len(captured) == 1
    assert own_call(model) is not None
    set_call(model, None)
    assert own_call(model) is None
    wrapped = torch.compile(model, backend="eager")
    assert not is_compiled(model) and is_compiled(wrapped)
    assert uncompiled(wrapped) is model is uncompiled(model)
    torch.compiler.reset()


class _Counting(torch.nn.Module):
    calls = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return values * self.calls


class _Calling(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.function(values)


def _seen(backend: Any, captured: list[int]) -> dict[str, bool]:
    """Return what calls that a backend compiles see of what changes."""
    model, values = torch.nn.Sequential(torch.nn.ReLU()), torch.ones(3)
    model.compile(backend=backend)
    model(values)
    found = {"torch's own code": bool(captured)}
    model = _Counting()
    model.compile(backend=backend)
    for _ in range(6):
        model(values)
    found["often"] = len(captured) >= 6
    model = torch.nn.Linear(3, 3)
    compiled = torch.compile(model, backend=backend)
    compiled(values)
    model.register_forward_hook(lambda _module, _given, returned: returned * 0)
    found["hooks"] = not compiled(values).any()

    def scaled(values: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        return values * factor

    model = torch.nn.Sequential(_Calling(scaled))
    compiled = torch.compile(model, backend=backend)
    compiled(values)
    compiled(values)
    scaled.__defaults__ = (0.0,)
    found["defaults"] = not compiled(values).any()
    torch.compiler.reset()
    return found


def test_a_backend_has_settings_of_its_own_for_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them code that changes often runs in eager, and later hooks and defaults of functions are not seen."""
    from torch._dynamo.eval_frame import OptimizeContext

    config = torch._dynamo.config
    monkeypatch.setattr(OptimizeContext, "__call__", OptimizeContext.__call__)
    with config.patch({"recompile_limit": 3, "accumulated_recompile_limit": 4, _BY_TAGS: True}):
        before = config.get_config_copy()
        mine, others = _counting_backend(), _counting_backend()
        asked: list[object] = []
        called: list[str] = []

        def watch(compiled: object) -> Callable[[], Callable[[], None]]:
            asked.append(compiled)
            return lambda: called.append("begins") or (lambda: called.append("ends"))

        compile_soundly(mine[0], watch)
        assert set(_seen(*mine).values()) == {True}
        assert len(asked) == 4
        assert set(_seen(*others).values()) == {False}
        assert len(asked) == 4
        for backend, is_mine in ((mine[0], True), (others[0], False)):
            inside = torch.nn.Linear(2, 2)
            inside.compile(backend=backend)
            made: Any = torch.compile(torch.nn.Linear(2, 2), backend=backend)
            assert is_compiled_soundly(inside) is is_compiled_soundly(made) is is_mine
            called.clear()
            inside(torch.ones(1, 2))
            made(torch.ones(1, 2))
            assert called == ["begins", "ends"] * 2 * is_mine
        assert config.get_config_copy() == before


_BY_TAGS = "use_recursive_dict_tags_for_guards"  # then functions of modules are taken to stay as they are


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, where Inductor is imported
@pytest.mark.parametrize(
    ("backend", "is_by_aot"), [("inductor", True), ("aot_eager", True), ("eager", False), ("eager_noexcept", False)]
)
def test_backends_that_use_aotautograd_are_told(backend: str, is_by_aot: bool) -> None:
    inside = torch.nn.Linear(2, 2)
    inside.compile(backend=backend)
    assert is_compiled_by_aot(inside) is is_compiled_by_aot(torch.compile(inside, backend=backend)) is is_by_aot
    of_its_own = torch._dynamo.backends.common.aot_autograd(fw_compiler=lambda module, _: module)
    assert is_compiled_by_aot(torch.compile(inside, backend=of_its_own))
    assert not is_compiled_by_aot(torch.compile(inside, backend=lambda module, _: module))
    assert not is_compiled_by_aot(torch.nn.Linear(2, 2))


def test_the_end_of_a_backward_pass_is_seen() -> None:
    seen: list[str] = []
    values = torch.ones(2, requires_grad=True)
    doubled = values * 2
    doubled.register_hook(lambda _: at_end_of_backward(lambda: seen.append("end")))
    values.register_hook(lambda _: seen.append("leaf"))
    doubled.sum().backward()
    assert seen == ["leaf", "end"]


def test_a_tensor_without_memory_has_sizes_and_ingredients(monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(torch.Tensor):
        asked: ClassVar[list[Any]] = []

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.asked.append(func)
            return super().__torch_function__(func, types, args, kwargs)

        __torch_dispatch__ = torch.Tensor.__torch_function__

    made, part = without_memory(Absent, (2, 3), torch.float16, torch.device("cpu")), torch.ones(2)
    with without_torch_function():
        assert (made.shape, made.dtype, made.device.type) == ((2, 3), torch.float16, "cpu")
    assert not Absent.asked
    assert made.dim() == 2 and Absent.asked
    monkeypatch.setitem(INGREDIENTS, Absent, lambda _: [part])
    assert [id(each) for each in tensors_in({"a": [made], "b": 1})] == [id(part)]


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
    assert structure == tree_flatten({"a": [3, (4, 5)]})[1]
    assert tensors_in({"a": [leaves, (None, torch.ones(1))], "b": 2}) == [torch.ones(1)]
    assert bytes_in({"a": [torch.ones(3, 2), (None, torch.ones(1, dtype=torch.bfloat16))], "b": 2}) == 26
    assert tree_map(lambda leaf: leaf or 0, [1, (None,)]) == [1, (0,)]


def test_tensors_in_objects_are_reached() -> None:
    class Slots:
        __slots__ = ("inner", "never_set")

        def __init__(self, inner: Any) -> None:
            self.inner = inner

    @dataclass
    class Record:
        logits: Any
        again: Any = None

    class Words(UserDict[str, Any]):
        pass

    class Rows(list[Any]):
        pass

    one, two = torch.ones(1), torch.ones(2)
    record = Record(one)
    record.again = record
    graphs = (SimpleNamespace(x=[one], store=Words(y=two)), Slots(Record({"a": one})), Rows([one]), record)
    assert [len(tensors_reached(({"graph": each}, 3))) for each in graphs] == [2, 1, 1, 1]
    assert all(not tensors_in(each) for each in graphs)
    assert bytes_in([record, two]) == 12
    assert tensors_reached((torch.nn.Linear(2, 2), (each for each in [one]), torch.optim.SGD([two]), len)) == []


def test_a_device_without_streams_has_none_to_follow() -> None:
    last = LastStream(torch.device("cpu"))
    assert not last.follow()
    assert not last.follow(follows_thread=False, waits=True)


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


def test_the_module_inside_of_ddp(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        inner = torch.nn.Linear(2, 2)
        assert inside_ddp(torch.nn.parallel.DistributedDataParallel(inner)) is inner
        assert inside_ddp(inner) is inner
    finally:
        torch.distributed.destroy_process_group()


def test_checkpointed_regions_run_inline() -> None:
    for use_reentrant in (False, True):
        calls: list[int] = []

        def region(value: torch.Tensor, calls: list[int] = calls) -> torch.Tensor:
            calls.append(1)
            return value.tanh()

        value = torch.ones(2, requires_grad=True)
        with checkpoints_inlined() as regions:
            checkpoint(region, value, use_reentrant=use_reentrant).sum().backward()
        assert len(calls) == regions.count == 1
        checkpoint(region, value, use_reentrant=use_reentrant).sum().backward()
        assert len(calls) == 3


def test_leaves_of_a_reentrant_region_that_are_used_elsewhere_are_known() -> None:
    once, twice, outside = (torch.ones(2, requires_grad=True) for _ in range(3))

    def region(value: torch.Tensor) -> torch.Tensor:
        return value * once * twice * twice

    for used, use_reentrant, expected in (
        (outside, True, []),
        (outside, False, []),
        (twice, True, [twice]),
        (twice, False, []),
    ):
        with checkpoints_inlined() as regions:
            loss = checkpoint(region, outside.exp(), use_reentrant=use_reentrant).sum() + used.sum()
            assert list(map(id, regions.summed_otherwise(loss))) == list(map(id, expected))


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


def test_hooks_of_modules_and_optimizers() -> None:
    module = torch.nn.Linear(2, 2)
    registrations: list[Any] = [
        module.register_forward_pre_hook,
        module.register_forward_hook,
        module.register_full_backward_pre_hook,
        module.register_full_backward_hook,
    ]
    for register, hooks in zip(registrations, module_hooks(module), strict=True):
        assert not hooks
        register(print)
        assert list(hooks.values()) == [print]
    own = torch.nn.modules.module
    for register, hooks in zip(
        (
            own.register_module_forward_pre_hook,
            own.register_module_forward_hook,
            own.register_module_full_backward_pre_hook,
            own.register_module_full_backward_hook,
        ),
        global_module_hooks(),
        strict=True,
    ):
        handle = register(print)  # pyright: ignore[reportArgumentType]
        assert list(hooks.values()) == [print] == hooks_on_all_modules()
        handle.remove()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for register, hooks in zip(
        (optimizer.register_step_pre_hook, optimizer.register_step_post_hook), optimizer_hooks(optimizer), strict=True
    ):
        register(print)
        assert list(hooks.values()) == [print]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_bare_step_updates_as_the_step_does_and_leaves_out_no_hook(
    kind: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    for when in ("pre", "post"):  # those of compiled models stay for good
        monkeypatch.setattr(torch_optimizer, f"_global_optimizer_{when}_hooks", OrderedDict())
    twins = [torch.nn.Linear(2, 2) for _ in range(2)]
    twins[1].load_state_dict(twins[0].state_dict())
    whole, bare = (kind(twin.parameters(), lr=0.1) for twin in twins)  # pyright: ignore[reportCallIssue]
    for _ in range(3):
        for twin in twins:
            twin(torch.ones(2)).sum().backward()
        whole.step()
        with torch.no_grad():
            step = bare_step(bare)
            assert not hasattr(step, "__wrapped__")
            step(bare)
        assert all(map(torch.equal, twins[0].parameters(), twins[1].parameters()))
    assert bare_step(bare) == kind.step, "gradients are recorded"
    with torch.no_grad():
        handle = torch_optimizer.register_optimizer_step_post_hook(print)
        assert bare_step(bare) == kind.step
        handle.remove()
        bare.register_step_pre_hook(print)
        assert bare_step(bare) == kind.step


def test_no_hooks_on_all_optimizers_run_where_they_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, seen = torch.nn.Parameter(torch.ones(2)), list[Any]()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.grad = torch.ones(2)
    for when in ("pre", "post"):
        hooks = {0: lambda *given: seen.append(given)}
        monkeypatch.setattr(torch_optimizer, f"_global_optimizer_{when}_hooks", hooks)
    with no_hooks_on_all_optimizers():
        optimizer.step()
    assert seen == []
    optimizer.step()
    assert len(seen) == 2


def test_versions_of_dictionaries() -> None:
    class Holder:
        name = 1

    holder, module = Holder(), torch.nn.Linear(2, 2)
    holder.value = 1  # pyright: ignore[reportAttributeAccessIssue]
    changes: list[tuple[dict[Any, Any], Any]] = [
        (table := {"a": 1}, lambda: table.update(a=2)),
        (module._parameters, lambda: setattr(module, "weight", torch.nn.Parameter(torch.ones(2, 2)))),
        (module._buffers, lambda: module.register_buffer("mean", torch.ones(2))),
    ]
    if ATTRIBUTES_HAVE_VERSIONS:
        changes += [
            (holder.__dict__, lambda: setattr(holder, "value", 2)),
            (holder.__dict__, lambda: delattr(holder, "value")),
            (module.__dict__, lambda: setattr(module, "in_features", 5)),
            (module.__dict__, module.eval),
        ]
    for table_now, change in changes:
        before, versions = dict_version(table_now), DictVersions([table_now, {}])
        assert dict_version(table_now) == before
        assert versions.match()
        change()
        assert dict_version(table_now) != before
        assert not versions.match()


def test_global_state_names_what_differs() -> None:
    state = GlobalState()
    assert state.difference() is None
    contexts: list[tuple[Any, str]] = [
        (torch.no_grad(), "grad_mode"),
        (torch.autocast("cpu", dtype=torch.bfloat16), "autocast"),
        (torch.device("meta"), "torch function modes"),
        (torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), "flash attention"),
        (torch.backends.cudnn.flags(enabled=not torch.backends.cudnn.enabled), "cudnn"),
    ]
    for context, name in contexts:
        with context:
            assert name in (state.difference() or "")
        assert state.difference() is None
    torch.set_default_dtype(torch.float64)
    assert "default_dtype" in (state.difference() or "")
    torch.set_default_dtype(torch.float32)


def test_autocast_of_any_device() -> None:
    assert not any_autocast()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert any_autocast()


def test_autocast_is_asked_where_nothing_switches_it() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        is_on = autocast_here()
        assert is_on("cpu")
        assert not is_on("cuda")
    with pytest.raises(UnsupportedStepError, match="switched on or off inside of a block"):
        is_on("cpu")


def test_autocast_is_seen_from_outside_of_a_dispatch_mode() -> None:
    with autocast_watched() as is_on:
        assert not is_on("cpu")
        with torch.autocast("cpu", torch.bfloat16):
            assert is_on("cpu")
            with torch.autocast("cpu", enabled=False):
                assert not is_on("cpu")
            assert is_on("cpu")
        assert not is_on("cpu")
    assert not hasattr(torch.set_autocast_enabled, "__code__"), "torch's own again"


def test_autocast_that_a_dispatch_mode_switches_on_is_not_the_code_s() -> None:
    matrix = torch.ones(2, 2)
    with autocast_watched() as is_on:
        for _ in range(2):
            with casting("cpu", torch.bfloat16):
                assert (matrix @ matrix).dtype == torch.bfloat16
                assert not is_on("cpu") and autocast_nesting() == 0
            assert (matrix @ matrix).dtype == torch.float32
    with torch.autocast("cpu"), torch.autocast("cpu", enabled=False):
        assert autocast_nesting() == 2
    assert autocast_nesting() == 0


def test_dispatch_modes_know_whether_calls_come_from_inside_of_autocast() -> None:
    class Asking(UnwrappedMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            answers.append(self.has_autocast("cpu"))
            return func(*args, **(kwargs or {}))

    answers: list[bool] = []
    ones = torch.ones(2)
    with Asking():
        ones.relu()
    with torch.autocast("cpu"), Asking():
        ones.relu()
    assert answers == [False, True]
    with Asking(), torch.autocast("cpu"), pytest.raises(UnsupportedStepError, match="inside of a block"):
        ones.relu()


def test_calls_of_compiled_code_are_told_and_modes_are_off_in_them() -> None:
    class Counting(UnwrappedMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

        def compiled_code_begins(self) -> None:
            seen.append("compiled")

    def refuse() -> Callable[[], None]:
        raise UnsupportedStepError("compiled")

    def failing(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        raise ValueError(str(x.shape))

    seen: list[str] = []
    ones, ran = torch.ones(2), list[int]()
    inner = torch.compile(torch.sin, backend=lambda module, _: lambda *given: ran.append(1) or module(*given))
    outer = torch.compile(lambda x: inner(x.cos()).relu(), backend="eager", fullgraph=True)
    wrong = torch.compile(failing, backend="eager")
    with Counting():
        (ones + 1).neg()
        for function in (inner, outer, inner):
            function(ones)
        ones.neg()
        with pytest.raises(ValueError, match="Size"):
            wrong(ones)
        ones.neg()
        with CompiledRegions(refuse), pytest.raises(UnsupportedStepError):
            inner(ones)
        with switched_off(lambda mode: isinstance(mode, UnwrappedMode)) as modes:
            assert [type(mode) for mode in modes] == [Counting] and not has_modes()
        ones.neg()
    neg = "aten.neg.default"
    assert seen == ["aten.add.Tensor", neg, *["compiled"] * 3, neg, "compiled", neg, neg]
    assert len(ran) == 2
    with compiled_as_eager():
        inner(ones)
    assert len(ran) == 2
    inner(ones)
    assert len(ran) == 3
    assert torch._dynamo.eval_frame.set_skip_guard_eval_unsafe.__module__ != "memfit.torch_private.compiled_regions"


def test_metadata_of_tensors() -> None:
    parameter, buffer = torch.nn.Parameter(torch.ones(3, 4)), torch.ones(2)
    metadata = TensorMetadata([parameter, buffer], 1)
    assert metadata.matches((parameter, buffer))
    assert metadata.matches((torch.nn.Parameter(torch.zeros(3, 4)), torch.zeros(2)))
    for others in (
        (parameter.detach(), buffer),
        (parameter, buffer.double()),
        (parameter, torch.ones(4)[::2]),
        (parameter, torch.ones(3)),
        (parameter, torch.ones(2, requires_grad=True)),
        (torch.nn.Parameter(torch.ones(4, 3).t()), buffer),
    ):
        assert not metadata.matches(others)
    parameter.grad = torch.zeros(3, 4)
    assert not metadata.matches((parameter, buffer))
    with_gradient = TensorMetadata([parameter, buffer], 1)
    parameter.grad = torch.ones(3, 4)
    assert with_gradient.matches((parameter, buffer))
    parameter.grad = torch.zeros(4, 3).t()
    assert not with_gradient.matches((parameter, buffer))


def test_addresses_of_tensors() -> None:
    tensors = (torch.nn.Parameter(torch.ones(3)), torch.ones(4)[2:], torch.ones(0))
    addresses = TensorAddresses(tensors)
    assert addresses.match()
    tensors[0].data.mul_(2)
    assert addresses.match()
    tensors[0].data = torch.ones(3)
    assert not addresses.match()
    assert TensorAddresses(()).match()


def test_plain_dense_tensors() -> None:
    plain = torch.ones(2)
    assert is_plain_dense(plain)
    assert type(plain) in PLAIN_TYPES
    assert is_plain_dense(torch.nn.Parameter(plain))
    others = (1.0, None, FakeTensorMode().from_tensor(plain), plain.to_sparse(), torch.ones(2, device="meta"))
    assert not any(map(is_plain_dense, others))


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


class _Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_no_mode_sees_what_is_called_in_between() -> None:
    with _Counts() as mode:
        torch.ones(2).add(1)
        seen = mode.calls
        with no_modes():
            torch.ones(2).add(1)
        assert mode.calls == seen > 0


class _Unwrapped(UnwrappedMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.call(func, args, kwargs or {})

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.calls += 1
        return func(*args, **kwargs)


def test_dynamo_skips_a_mode_that_is_not_wrapped() -> None:
    from torch._dynamo.utils import counters

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin().cos() + 1

    expected = function(torch.ones(4))
    compiled = torch.compile(function, backend="eager")
    counters.clear()
    with _Unwrapped() as mode:
        assert torch.equal(compiled(torch.ones(4)), expected)
        assert torch.equal(function(torch.ones(4)), expected)
    assert mode.calls >= 5
    assert counters["stats"].get("unique_graphs", 0) == 1, "of the function, and none of the mode's own code"
    assert torch.equal(compiled(torch.ones(4)), expected)


def test_the_users_of_a_storage() -> None:
    tensor = torch.ones(4)
    alone = storage_users(tensor.untyped_storage())
    view = tensor[1:]
    assert storage_users(tensor.untyped_storage()) == alone + 1
    del view
    assert storage_users(tensor.untyped_storage()) == alone == 2


def test_the_innermost_hooks_of_saved_tensors() -> None:
    assert default_saved_hooks() is None
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with hooks:
        assert default_saved_hooks() == (hooks.pack_hook, hooks.unpack_hook)
        with torch.autograd.graph.save_on_cpu():
            assert default_saved_hooks() != (hooks.pack_hook, hooks.unpack_hook)
    assert default_saved_hooks() is None


def test_hooks_of_saved_tensors_that_may_change_values_are_named() -> None:
    around = torch.autograd.graph.saved_tensors_hooks
    assert changing_hooks() == ""
    with around(torch.round, lambda tensor: tensor):
        assert changing_hooks() == "_VariableFunctionsClass.round"
        with torch.autograd.graph.save_on_cpu():
            assert changing_hooks() == ""
        with around(torch.nn.Identity(), lambda tensor: tensor):
            assert changing_hooks() == "Identity()"
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(lambda x: seen.append(changing_hooks()) or x.exp(), x, use_reentrant=False)
    assert seen == [""]


def test_backward_passes_go_through_one_function() -> None:
    seen: list[bool] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, values: torch.Tensor) -> torch.Tensor:
            return values * 1

        @staticmethod
        def backward(_context: Any, *gradients: torch.Tensor) -> torch.Tensor:  # pyright: ignore
            seen.append(any(frame.f_code is RUNS_BACKWARD.__code__ for frame, _ in traceback.walk_stack(None)))
            return gradients[0]

    values = torch.ones(3, requires_grad=True)
    Looks.apply(values).sum().backward()  # pyright: ignore
    torch.autograd.grad(Looks.apply(values).sum(), values)  # pyright: ignore
    assert seen == [True, True]


def test_memory_of_arrays_is_told_from_memory_of_torchs() -> None:
    array = np.ones(3, np.float32)
    assert is_of_array(torch.from_numpy(array)) and is_of_array(torch.as_tensor(array))
    assert not (is_of_array(torch.tensor(array)) or is_of_array(torch.as_tensor([1.0])))


def test_zero_tensors_are_known() -> None:
    assert is_zero_tensor(torch._efficientzerotensor(3))
    assert not is_zero_tensor(torch.zeros(3))


def test_tensors_whose_memory_was_freed() -> None:
    freed, view = torch.zeros(4, 3), torch.zeros(4, 3).t()[1:]
    assert not (is_freed(freed) or is_freed(view) or is_freed(torch.zeros(0)))
    freed.untyped_storage().resize_(0)
    assert is_freed(freed) and not is_freed(torch.eye(3).to_sparse()) and not is_freed(torch.zeros(3, device="meta"))


def test_tensors_with_dispatch_of_their_own() -> None:
    assert has_own_dispatch(torch.nested.nested_tensor([torch.zeros(3)], layout=torch.jagged))
    assert not has_own_dispatch(torch.zeros(3))
    assert not has_own_dispatch(torch.nn.Parameter(torch.zeros(3)))


def test_a_mode_is_taken_off_and_put_on_again() -> None:
    class Counts(UnwrappedMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counts.count += 1
            return func(*args, **(kwargs or {}))

    x, mode, other = torch.ones(2), Counts(), UnwrappedMode()
    assert not is_innermost(mode)
    with mode:
        assert is_innermost(mode)
        with switched_off(lambda each: each is mode):
            x.sin()
            assert not is_on(mode) and Counts.count == 0
            with switched_on(mode):
                x.sin()
            assert not is_on(mode) and Counts.count == 1
            switch_on(mode)
            switch_on(mode)
            x.sin()
        assert is_innermost(mode) and Counts.count == 2
        with other:
            assert not is_innermost(mode) and is_on(mode)
    assert not has_modes()


def test_backward_passes_and_their_code_go_through_functions() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(_ctx: Any, *gradients: torch.Tensor) -> Any:
            found.append("code")
            return gradients[0] * 2

    found: list[Any] = []

    @contextmanager
    def around() -> Iterator[None]:
        found.append("in")
        yield
        found.append("out")

    def run(backward: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(creates_graph(*args))
        return backward(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with backward_through(run), backward_code_through(around, lambda: found.append("hook")):
        Twice.apply(x).sum().backward()  # pyright: ignore
        torch.autograd.grad(x.square().sum(), x, create_graph=True)
        assert found == [False, "in", "code", "out", True]
        x.register_hook(lambda gradient: gradient)
        x.register_post_accumulate_grad_hook(lambda _: None)
        assert found[5:] == ["hook", "hook"]
    assert x.grad is not None and x.grad.tolist() == [2.0, 2.0]
    found.clear()
    Twice.apply(x).sum().backward()  # pyright: ignore
    assert found == ["code"]


def test_hooks_of_saved_tensors_are_taken_off_for_transformations() -> None:
    packed: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    def cosine(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda y: y.sin().sum())(x)

    original = torch.autograd.graph.disable_saved_tensors_hooks
    x = torch.ones(3, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, pack),
        hooks_aside_in_transforms(),
        pytest.raises(RuntimeError, match="saved tensor hooks"),  # the user's, as without the block
    ):
        cosine(torch.zeros(3))
    pack.__module__ = "memfit.anywhere"
    with saved_with(pack, lambda tensor: tensor):
        with hooks_aside_in_transforms():
            assert cosine(torch.zeros(3)).tolist() == [1.0] * 3
        assert cosine(torch.zeros(3)).tolist() == [1.0] * 3
        assert not packed
        x.sin()
        assert packed
    assert torch.autograd.graph.disable_saved_tensors_hooks is original


def test_custom_functions_get_saved_leaves_themselves() -> None:
    found: list[bool] = []

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, w = ctx.saved_tensors
            found.append(w is weight)
            return gradients[0] * w, gradients[0] * x

    weight = torch.ones(3, requires_grad=True)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    for inside in (nullcontext(), hooks):
        for around in (nullcontext(), saved_leaves_themselves()):
            with inside, around:
                Scale.apply(torch.ones(3), weight).sum().backward()
    assert found == [True, True, False, True]
    assert "saved_tensors" not in vars(torch.autograd.function.BackwardCFunction)


def test_nothing_is_cast_without_autocast() -> None:
    a = torch.ones(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with without_autocast():
            assert (a @ a).dtype == torch.float32


def test_an_error_leaves_modes_as_they_were() -> None:
    weight, inputs = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)

    def enter_and_fail() -> None:
        with put_back_after_an_error():
            torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)
            inputs @ weight  # its cast is in autocast's cache
            torch._C._functorch._grad_increment_nesting()
            torch._C._functorch._jvp_increment_nesting()
            torch._C._functorch._vmap_increment_nesting(2, "error")
            torch._C._functorch._func_increment_nesting(True)
            torch.set_grad_enabled(False)
            raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            enter_and_fail()
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        assert torch._C._functorch.get_dynamic_layer_stack_depth() == 0
        with torch.no_grad():
            weight.mul_(3)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal((inputs @ weight).float(), inputs @ weight.detach())
    with torch.no_grad(), pytest.raises(ValueError):
        enter_and_fail()
    with torch.no_grad(), put_back_after_an_error():
        torch.set_grad_enabled(True)
        assert torch.is_grad_enabled(), "nothing failed"


def test_guards_that_are_freed_late_change_no_kernels() -> None:
    excluded: Any = torch._C._dispatch_tls_local_exclude_set
    before, guards = str(excluded()), [torch._C._AutoDispatchBelowAutograd()]
    guards.append(torch._C._AutoDispatchBelowAutograd())
    within = str(excluded())
    del guards[0]  # in the wrong order, as frames of a failed trace may be freed
    assert str(excluded()) == before
    with dispatch_keys_kept():
        guards.clear()
        assert TORCH_2_11 or str(excluded()) == within  # there a guard takes out only what it has added
    assert str(excluded()) == before


def test_a_graph_as_aot_takes_it_computes_the_same() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        mode = torch.autograd.grad_mode._enter_inference_mode(True)
        scale = x.detach() * 2
        torch.autograd.grad_mode._exit_inference_mode(mode)
        return x + scale

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    mode = graph.call_function(torch.autograd.grad_mode._enter_inference_mode, (True,))
    scale = graph.call_function(torch.mul, (x, 2))
    graph.call_function(torch.autograd.grad_mode._exit_inference_mode, (mode,))
    graph.output((graph.call_function(torch.add, (x, scale)), scale))
    module = as_aot_takes_it(torch.fx.GraphModule(torch.nn.Module(), graph))
    inputs = torch.ones(3, requires_grad=True)
    result, scale = module(inputs)
    assert torch.equal(result, forward(inputs)) and result.requires_grad
    assert not scale.requires_grad and not scale.is_inference() and torch.is_grad_enabled()


def test_a_backward_pass_is_known_from_inside() -> None:
    seen: list[bool] = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda _gradient: seen.append(in_backward()))
    assert not in_backward()
    leaf.sum().backward()
    assert seen == [True] and not in_backward()


def test_a_mode_is_on_in_its_thread() -> None:
    mode = TorchDispatchMode()
    seen: list[bool] = []
    with only_mode(mode):
        thread = threading.Thread(target=lambda: seen.append(is_on(mode)))
        thread.start()
        thread.join()
        assert is_on(mode)
    assert seen == [False] and not is_on(mode)


def test_trees_are_put_together_again() -> None:
    leaves, structure = tree_flatten({"a": (1, [2]), "b": 3})
    assert tree_unflatten([leaf + 1 for leaf in leaves], structure) == {"a": (2, [3]), "b": 4}


def test_an_overload_is_called_without_its_python_function() -> None:
    bare = bare_overload(torch.ops.aten.add.Tensor)
    assert bare is not None and bare(torch.ones(2), torch.ones(2), alpha=2).tolist() == [3, 3]
    assert bare_overload(torch.add) is None and bare_overload(torch.ops.aten.add) is None


def test_views_are_operators_that_return_their_arguments_memory() -> None:
    aten = torch.ops.aten
    assert all(map(is_view, [aten.view.default, aten.transpose.int, aten.split.Tensor, aten._unsafe_view.default]))
    others = [aten.add.Tensor, aten.add_.Tensor, aten.clone.default, aten.to.dtype, aten.contiguous.default, print]
    assert not any(map(is_view, others))


def test_how_often_code_was_compiled_before() -> None:
    seen: list[int] = []

    def backend(module: Any, _inputs: Any) -> Any:
        seen.append(times_compiled())
        return module.forward

    compiled = torch.compile(lambda x, number: x * number, backend=backend, dynamic=False)
    for number in (1, 2, 3):
        compiled(torch.ones(2), number)
    assert seen == [0, 1, 2] and times_compiled() == 0


def test_a_graph_before_a_break_is_told_from_the_last_one() -> None:
    seen: list[bool] = []
    between: list[bool] = []

    def backend(module: Any, _inputs: Any) -> Any:
        seen.append(ends_in_break(module))
        between.append(is_between_breaks(module))
        return module.forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        torch._dynamo.graph_break()
        return x + 1

    torch.compile(broken, backend=backend)(torch.ones(2))
    assert seen == [True, False] and not ends_in_break(torch.fx.symbolic_trace(torch.nn.Identity()))
    torch.compile(lambda x: x * 3, backend=backend)(torch.ones(2))
    assert between == [True, True, False] and not is_between_breaks(torch.fx.symbolic_trace(torch.nn.Identity()))


@pytest.mark.parametrize("tells", [True, False])
def test_the_settings_of_the_allocator_are_those_of_the_environment(tells: bool) -> None:
    hide = "" if tells else "import torch; torch._C.__dict__.pop('_accelerator_getAllocatorSettings', None); "
    code = f"{hide}from memfit.torch_private.cuda import allocator_settings_text; print(allocator_settings_text())"
    settings = "expandable_segments:True,max_split_size_mb:64"
    environment = os.environ | {"PYTORCH_ALLOC_CONF": settings}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == settings
    assert isinstance(allocator_settings_text(), str)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A caching allocator that is not here: its settings, requests that are live, and those that a segment serves."""
    state: dict[str, Any] = {
        "settings": [_OTHERS],
        "live": [],
        "requests": 0,
        "free": 0,
        "error": None,
    }

    def serve(size_bytes: int, _device: torch.device) -> int:
        state["requests"] += 1
        if state["free"] < size_bytes and state["error"] is not None:
            raise state["error"]
        state["free"] -= size_bytes
        state["live"].append(state["requests"])
        return state["requests"]

    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: state["settings"][-1], raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", state["settings"].append, raising=False)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: max(0, -state["free"]))
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", serve)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", state["live"].remove)
    yield state
    cuda._tried.clear()
    cuda._set_text.clear()


ON = torch.device("cuda", 0)
_OTHERS = "garbage_collection_threshold:0.6"


def test_expandable_segments_are_turned_on_beside_the_other_settings(
    allocator: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = allocator["settings"]
    assert turn_on_expandable_segments(ON)
    assert settings == [_OTHERS, f"{_OTHERS},expandable_segments:True"]
    assert turn_on_expandable_segments(ON) and len(settings) == 2
    settings.append("expandable_segments:False")
    assert not turn_on_expandable_segments(ON), "the user has said otherwise"
    settings.append("max_split_size_mb:64")
    assert not turn_on_expandable_segments(ON), "beside which segments that grow are held unused"
    assert settings[-1] == "max_split_size_mb:64"
    settings.append("")

    def refuse(_settings: str) -> None:
        raise RuntimeError("not on this device")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse, raising=False)
    assert not turn_on_expandable_segments(ON)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    settings.append("expandable_segments:True")
    assert not turn_on_expandable_segments(ON)


def test_an_allocator_is_prepared_once_for_all_that_read_its_peaks(
    allocator: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA's statistics are stood in for; see `tests/cuda_build/test_allocator.py`."""
    peaks, device = {"current": 100, "peak": 900}, torch.device("cuda", 7)
    monkeypatch.setattr(
        torch.cuda, "memory_stats_as_nested_dict", lambda _device: {name: {"all": peaks} for name in _COUNTS}
    )
    statistics = instruments.CudaStatistics(source="test", device=device)
    monkeypatch.setitem(instruments.instruments, device, statistics)
    monkeypatch.setitem(instruments.instruments, ON, statistics)
    for name in cuda._RESETS:
        monkeypatch.setattr(torch._C, name, lambda _device: peaks.update(peak=peaks["current"]), raising=False)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _device: torch._C._cuda_resetPeakMemoryStats(7))
    note_resets_of_peaks.cache_clear()
    assert prepare_allocator(torch.device("cpu")) and len(allocator["settings"]) == 1
    assert prepare_allocator(ON) and prepare_allocator(ON) and len(allocator["settings"]) == 2
    for name in cuda._RESETS:
        peaks["peak"] = 900
        with record(device) as usage:
            peaks["peak"] = 500
            getattr(torch._C, name)(7)
        assert (usage.peak_bytes, peaks["peak"]) == (400, 100)


_COUNTS = ("allocated_bytes", "reserved_bytes")


def test_expandable_segments_are_tried_once_on_each_device_and_turned_off_where_they_fail(
    allocator: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    allocator["free"] = 3 << 20  # which serves before a segment is taken
    assert turn_on_expandable_segments(ON) and allocator["requests"] == 4 and not allocator["live"]
    assert turn_on_expandable_segments(ON) and allocator["requests"] == 4
    allocator["free"], allocator["error"] = 1 << 20, RuntimeError("CUDA driver error: unknown error")
    assert not turn_on_expandable_segments(torch.device("cuda", 1)), "the driver fails there"
    assert allocator["requests"] == 6 and not allocator["live"] and "unknown error" in caplog.text
    assert allocator["settings"][-1] == f"{_OTHERS},expandable_segments:False"
    assert not turn_on_expandable_segments(ON) and len(allocator["settings"]) == 3 and allocator["requests"] == 6


def test_expandable_segments_of_the_users_own_are_not_tried(allocator: dict[str, Any]) -> None:
    allocator["settings"].append("expandable_segments:True")
    assert turn_on_expandable_segments(ON) and not allocator["requests"] and len(allocator["settings"]) == 2


def test_packing_a_sequence_returns_as_much_as_its_lengths_say() -> None:
    (pack,) = SHORTENS
    values, rows = torch.ones(4, 2, 3), [pack.default(torch.ones(4, 2, 3), torch.tensor([4, n]), False) for n in (1, 3)]
    assert [each[0].shape[0] for each in rows] == [5, 7]
    assert torch.Tag.dynamic_output_shape not in pack.default.tags and values.shape[0] == 4


def test_sizes_are_symbols_and_questions_about_them_conditions() -> None:
    environment = make_size_environment()
    size = make_size_symbol(environment, 0, 12)
    mode = FakeTensorMode(shape_env=environment, static_shapes=True)
    with mode, symbolic_kernels():
        padded = torch.nn.functional.pad(torch.empty(3, size), (0, 1))
    assert str(padded.shape[1] - 1) == str(size) and not environment.guards
    small = (size <= 100).node
    assert not small.statically_known_true("", 0) and not environment.guards
    with guesses_noted(environment):
        assert small.statically_known_true("", 0)
    (noted,) = environment.guards
    symbol = size.node.expr
    assert noted.expr.xreplace({symbol: 12}) and not noted.expr.xreplace({symbol: 101})


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    timeout = timedelta(seconds=50)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=timeout
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_sum_over_ranks_is_made_in_place_and_waited_for() -> None:
    started = time.monotonic()
    for _ in range(500):  # in some of them gloo's thread is late
        ones = torch.ones(4)
        view = ones[:2]
        holders = ones._use_count()
        start_sum(ones, torch.distributed.group.WORLD.group_name)
        wait_for_sum(ones)
        assert ones._use_count() == holders
        assert ones.tolist() == [*view.tolist(), 1.0, 1.0] == [1.0] * 4
    assert time.monotonic() - started < 10


@pytest.mark.usefixtures("one_rank")
def test_parts_are_gathered_and_scattered_and_nobody_holds_them_then() -> None:
    name = torch.distributed.group.WORLD.group_name
    parts = [torch.arange(6.0), torch.arange(2.0)]
    whole = start_gather(parts, torch.bfloat16, name)
    matrix, row = finish_gather(whole, 1, [(6, (3, 2)), (2, (2,))])
    assert matrix.dtype == torch.bfloat16 and matrix.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert row.tolist() == [0.0, 1.0]
    assert whole.tolist() == [*parts[0].tolist(), *parts[1].tolist()] and whole._use_count() == row._use_count()
    (alone,) = [finish_gather(start_gather(parts[1:], torch.float32, name), 1, [(2, (1, 2))])]
    assert alone.tolist() == [[0.0, 1.0]]
    part = start_scatter(whole, "avg", name)
    finish_scatter(part, whole, 0)
    assert torch.equal(part, whole) and part.data_ptr() != whole.data_ptr()


@pytest.fixture
def sharded_model(one_rank: None) -> torch.nn.Module:  # noqa: ARG001 (its group is used)
    mesh, policy = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2, bias=False))
    model[1].weight.requires_grad_(False)
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def test_sharded_tensors_have_a_local_part(sharded_model: torch.nn.Module) -> None:
    weight, plain = sharded_model[0].weight, torch.ones(2)
    assert is_sharded(weight) and not is_sharded(plain) and not is_sharded(None)
    assert is_of_fsdp(weight) and not is_of_fsdp(plain)
    plain._fsdp_flattened = True  # as FSDP's first version marks its own
    assert is_of_fsdp(plain) and is_of_first_fsdp(plain) and not is_of_first_fsdp(weight) and not is_of_first_fsdp(None)
    assert key_of(weight) == key_of(local(weight)) != key_of(plain) and key_of(torch.ones(2).to_sparse()) == 0
    assert local(weight).shape == (2, 3) and not is_sharded(local(weight)) and local(plain) is plain
    assert whole_part(weight).data_ptr() == local(weight).data_ptr() and whole_part(weight).shape == (6,)
    assert local_gradient(weight) is None
    weight.grad = with_local(weight, torch.ones(2, 3))  # pyright: ignore[reportAttributeAccessIssue]
    assert is_sharded(weight.grad) and local_gradient(weight).sum() == 6  # pyright: ignore[reportOptionalMemberAccess]
    assert with_local(plain, plain) is plain


def test_groups_of_fully_shard_tell_what_they_gather_and_reduce(sharded_model: torch.nn.Module) -> None:
    assert is_fully_sharded(sharded_model) and not is_fully_sharded(torch.nn.Linear(2, 2))
    groups = sharded_groups(sharded_model)
    assert [group.name for group in groups] == ["", "0"]
    (frozen,), (weight, bias) = (group.parameters for group in groups)
    assert not frozen.parameter.requires_grad and groups[0].reduce_dtype is None
    assert weight.parameter is sharded_model[0].weight and bias.shape == bias.size == bias.padded == (2,)
    assert weight.dtype == torch.bfloat16 and groups[1].reduce_dtype == torch.float32
    assert groups[0].stays and not groups[1].stays
    assert groups[0].process_group is groups[1].process_group is torch.distributed.group.WORLD
    assert not groups[0].refused and not weight.refused
    assert divisions(groups[1], torch.float32, "cpu") == (None, None, "sum")
    assert divisions(groups[1], torch.float16, "cpu")[2] == "sum"
    assert modules_that_gather(sharded_model) == [sharded_model[0]]
    assert parameters_that_are_gathered(sharded_model) == set(sharded_model.parameters())
    with torch.no_grad():
        sharded_model(torch.ones(1, 3))
    assert not any(map(is_sharded, sharded_model[1].parameters(recurse=False)))  # the root's stay gathered
    restored = restored_by_copies(sharded_model)
    assert restored(groups[0].own.fsdp_params[0].all_gather_outputs[0]) and not restored(torch.ones(4))
    assert gathered_before_it_reshards(sharded_model) == ""
    sharded_model[0].unshard()  # pyright: ignore[reportCallIssue]
    assert gathered_before_it_reshards(sharded_model) == "0"
    sharded_model[0].reshard()  # pyright: ignore[reportCallIssue]
    reshard(groups)
    reshard(groups)
    assert all(map(is_sharded, sharded_model.parameters()))
    assert reduces_gradients(groups)
    sharded_model.set_requires_gradient_sync(False)  # pyright: ignore[reportCallIssue]
    assert not reduces_gradients(groups)


def test_hooks_of_fully_shard_show_what_they_are_told_to(sharded_model: torch.nn.Module) -> None:
    groups = sharded_groups(sharded_model)
    whole = {each.parameter: torch.ones(each.shape) for group in groups for each in group.parameters}
    seen: list[str] = []

    def show(group: GroupFacts) -> None:
        seen.append(f"show {group.name}")
        for each in group.parameters:
            each.show(whole[each.parameter].to(each.dtype).requires_grad_())

    def hide(group: GroupFacts) -> None:
        seen.append(f"hide {group.name}")
        for each in group.parameters:
            each.show(each.parameter)

    parameters = list(sharded_model.parameters())
    with groups_shown(groups, show, hide):
        output = sharded_model(torch.ones(1, 3))
        output.sum().backward()
    assert seen == ["show ", "show 0", "hide 0"]
    assert output.tolist() == [[8.0, 8.0]]
    assert all(one is other for one, other in zip(parameters, sharded_model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in parameters)
    assert sharded_model(torch.ones(1, 3)).shape == (1, 2)  # by torch's own hooks again


def test_buckets_are_those_of_ddp() -> None:
    parameters = [torch.ones(4), torch.ones(4, 4), torch.ones(4, dtype=torch.float64), torch.ones(4)]
    assert gradient_buckets(parameters, [80, 16]) == [[0, 1], [3], [2]]
    assert first_bucket_bytes() == 1 << 20


@pytest.mark.usefixtures("one_rank")
def test_ddp_tells_its_hook_and_its_buckets() -> None:
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2), bucket_cap_mb=1e-6)
    assert "rebuilt_per_bucket_param_indices" not in ddp_facts(ddp)
    own_bytes = sum(each.nbytes for each in ddp.parameters())
    assert sum(first_bucket_sizes(ddp)) == sum(bucket_sizes(ddp)) == own_bytes
    for _ in range(3):  # rebuilt in the second step, told in the third
        ddp(torch.ones(1, 2)).sum().backward()
    assert ddp_facts(ddp)["rebuilt_per_bucket_param_indices"] == "1, 0"
    assert not first_bucket_sizes(ddp) and sum(bucket_sizes(ddp)) == own_bytes
    assert "comm_hook" not in ddp_facts(ddp)
    ddp.register_comm_hook(None, allreduce_hook)
    assert ddp_facts(ddp)["comm_hook"] == "allreduce_hook"


@pytest.mark.parametrize("ranks", [2, 4])  # with two, the hook is why the order counts
def test_ddp_sorts_its_buckets_after_the_first_backward_pass(ranks: int) -> None:
    def summed(values: torch.Tensor) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(values)
        return future

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        for options, expected in (({}, [True, True, False]), ({"find_unused_parameters": True}, [False] * 3)):
            seen: list[bool] = []
            inner = torch.nn.Linear(2, 2)
            inner.register_forward_hook(lambda *_, seen=seen: seen.append(ddp_sorts_buckets()))
            ddp = torch.nn.parallel.DistributedDataParallel(inner, **options)
            ddp.register_comm_hook(None, lambda _, bucket: summed(bucket.buffer()))
            for _ in range(3):
                ddp(torch.ones(1, 2)).sum().backward()
            assert seen == expected
            assert not ddp_sorts_buckets()
    finally:
        torch.distributed.destroy_process_group()


def test_an_error_of_a_collective_says_that_another_rank_is_gone(tmp_path: Path) -> None:
    def join(rank: int) -> torch.distributed.ProcessGroupGloo:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 2)
        return torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=2))

    with ThreadPoolExecutor(2) as pool:
        one, _other = pool.map(join, (0, 1))
    with pytest.raises(RuntimeError) as raised:  # the other one never answers
        one.allreduce([torch.ones(1)]).wait()
    assert is_lost(raised.value)
    assert not is_lost(RuntimeError("out of memory"))


@pytest.mark.usefixtures("one_rank")
def test_ddp_tells_whether_it_is_joined_and_replicate_makes_a_class_of_its_own() -> None:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.algorithms.join import Join

    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert not is_joined(ddp)
    Join([ddp])
    assert is_joined(ddp)
    assert isinstance(replicate(torch.nn.Linear(2, 2)), replicated_class())
    assert not isinstance(ddp, replicated_class())


@pytest.mark.usefixtures("one_rank")
def test_a_group_tells_its_timeout() -> None:
    assert group_timeout(torch.distributed.group.WORLD) == timedelta(seconds=50)
    assert not has_ranks()
    assert is_gloo(torch.distributed.group.WORLD, torch.device("cpu"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own modules, which Inductor imports
def test_halves_for_a_budget_of_torchs_draw_each_mask_once() -> None:
    def function(values: torch.Tensor) -> tuple[torch.Tensor]:
        for _ in range(3):
            values = torch.nn.functional.dropout(torch.tanh(values @ values), 0.5)
        return (values,)

    def gradient(share: float | None) -> torch.Tensor:
        compiled = compiled_by_inductor(
            torch.fx.symbolic_trace(function),
            [values := torch.full((8, 8), 0.1, requires_grad=True)],
            partition=lambda _joint, _outputs, as_inductor: as_inductor(share),
            around=lambda _half, call: call,
            keeps_order=lambda: False,
        )
        torch.manual_seed(0)
        compiled(values)[0].sum().backward()
        assert values.grad is not None
        return values.grad

    expected = gradient(None)
    assert expected.any() and gradient(0.3).allclose(expected)
    with pytest.raises(Exception, match="draws the random numbers of inductor_seeds_default twice"):
        gradient(0.0)  # computes everything anew


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own modules, which Inductor imports
def test_inductors_kernels_are_not_timed_in_their_first_call() -> None:
    import torch._inductor.config as config

    def as_it_is(_joint: Any, _outputs: int, as_inductor: Callable[[float | None], ModulePair]) -> ModulePair:
        return as_inductor(None)

    seen: list[bool] = []
    module = torch.fx.symbolic_trace(lambda x: (torch.tanh(x @ x.t()),))
    values = torch.ones(3, 2, requires_grad=True)
    with config.patch(post_grad_custom_post_pass=lambda _graph: seen.append(config.triton.autotune_pointwise)):
        compiled_by_inductor(
            module, [values], partition=as_it_is, around=lambda _half, call: call, keeps_order=lambda: False
        )
    assert seen and not any(seen) and config.triton.autotune_pointwise


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch's own modules, which Inductor imports
@pytest.mark.parametrize("share", [None, LEAN])
def test_inductor_compiles_the_halves_of_a_partition_and_rehearses_them(
    share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.async_compile import AsyncCompile

    halves: list[InductorHalf] = []
    asked: list[int] = []
    built: list[Any] = []
    build = AsyncCompile.cpp_pybinding
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *given: built.append(given) or build(*given))

    def around(half: InductorHalf, call: Any) -> Any:
        halves.append(half)
        return call

    def as_it_is(_joint: Any, outputs: int, as_inductor: Callable[[float | None], ModulePair]) -> ModulePair:
        asked.append(outputs)
        return as_inductor(share)

    values = torch.ones(3, 2, requires_grad=True)
    module = torch.fx.symbolic_trace(lambda x: (torch.tanh(x @ x.t()),))
    functions = [
        compiled_by_inductor(module, [values], partition=as_it_is, around=around, keeps_order=lambda: True)
        for _ in range(2)
    ]
    assert len(asked) == 2, "no cache answers in the place of the partition"
    assert [half.is_backward for half in halves] == [False, True] * 2, "before a backward pass"
    assert not built, "a plan that is not taken has no kernels"
    halves[2].build()  # the kernels of the other half are built when they are called
    assert built
    (result,) = functions[1](values)
    result.sum().backward()
    assert result.allclose(torch.tanh(values @ values.t())) and values.grad is not None
    forward = halves[2]
    assert forward.rehearsed is not None
    with torch.no_grad(), fake_mode_of(tensors_in(forward.arguments)[0]):
        given = list(forward.arguments)
        rehearsed = forward.rehearsed(given)
    assert given == [] and rehearsed[0].shape == (3, 3) and is_fake(rehearsed[0])


def _generated(function: Callable[..., Any], *, keeps_order: bool, held: str = "") -> str:
    """Return what Inductor generates for the forward half of a function, with some results held."""
    halves: list[InductorHalf] = []

    def around(half: InductorHalf, call: Any) -> Any:
        halves.append(half)
        return call

    def marked(_joint: Any, _outputs: int, as_inductor: Callable[[float | None], ModulePair]) -> ModulePair:
        pair = as_inductor(None)
        for node in pair[0].graph.nodes:
            if held and node.name.startswith(held):
                node.meta[HELD] = True
        return pair

    given = [torch.ones(64, 64), torch.ones(64, requires_grad=True)]
    compiled_by_inductor(
        torch.fx.symbolic_trace(function), given, partition=marked, around=around, keeps_order=lambda: keeps_order
    )
    rehearsed: Any = halves[0].rehearsed
    return Path(rehearsed.__code__.co_filename).read_text()


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_inductor_takes_no_memory_that_was_freed_long_before() -> None:
    def four_products(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        second = (x @ x) @ x
        third = second[:8] @ second
        return ((third.t() @ third) * p).amax(0), second

    if not TORCH_2_11:  # which takes none so late
        assert "del buf0  # reuse" in _generated(four_products, keeps_order=False)
    assert "# reuse" not in _generated(four_products, keeps_order=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_inductor_computes_what_a_plan_holds_once() -> None:
    def read_twice(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        positive = x.abs()
        return (((positive * ((positive + 1) @ x)) @ x * p).amax(0),)

    code = [_generated(read_twice, keeps_order=True, held=held) for held in ("", "abs")]  # no cache answers
    assert [len(set(re.findall(r"cpp_fused_\w*abs\w*", each))) for each in code] == [2, 1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
def test_inductor_keeps_the_order_of_a_plan() -> None:
    def sum_first(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = x.sin().sum(0), ((x @ x) @ x).amax(0)
        return (((x.cos() @ x).amin(0) + first + second) * p,)

    code = [_generated(sum_first, keeps_order=keeps).partition("def call(")[2] for keeps in (False, True)]
    assert [each.index("sin_sum") < each.index("extern_kernels.mm") for each in code] == [False, True]


def test_checkpoints_call_some_operators_a_different_number_of_times() -> None:
    assert torch.ops.aten.detach.default in IGNORED_OPS
    assert torch.ops.aten.mm.default not in IGNORED_OPS


def test_casts_that_autocasts_cache_may_hold() -> None:
    weight, twice = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2).double())
    cast, to = torch.ops.aten._to_copy.default, {"dtype": torch.bfloat16}
    assert is_cached_cast(cast, (weight,), to)
    for args, kwargs in (
        ((torch.ones(2),), to),
        ((weight * 2,), to),
        ((twice,), to),
        ((weight,), {"dtype": torch.float64}),
        ((weight,), None),
    ):
        assert not is_cached_cast(cast, args, kwargs)
    assert not is_cached_cast(torch.ops.aten.mul.Tensor, (weight, weight), to)


def test_a_result_is_kept_without_its_history_and_on_its_memory() -> None:
    made = torch.ones(3, requires_grad=True).exp()
    kept = detached(made)
    assert kept.data_ptr() == made.data_ptr() and not kept.requires_grad
    assert detached(3) == 3


def test_schemas_tell_what_an_operator_writes_to() -> None:
    written = [
        a.alias_info is not None and a.alias_info.is_write for a in schema_of(torch.ops.aten.add_.Tensor).arguments
    ]
    assert written[:2] == [True, False]


def test_selective_checkpoints_are_told_in_both_forward_passes() -> None:
    found: list[bool] = []

    def run(given: torch.Tensor) -> torch.Tensor:
        found.append(in_selective_checkpoint())
        return given.exp()

    x = torch.ones(3, requires_grad=True)
    kept = [torch.ops.aten.mm.default]
    contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts
    checkpoint(run, x, use_reentrant=False, context_fn=lambda: contexts(kept)).sum().backward()
    checkpoint(run, x, use_reentrant=False).sum().backward()
    assert found == [True, True, False, False] and not in_selective_checkpoint()


def test_a_second_forward_pass_that_saves_others_raises_what_is_told() -> None:
    x = torch.ones(3, requires_grad=True)
    calls: list[int] = []

    def run(given: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return given.exp() if len(calls) == 1 else given[:2].exp()

    @contextmanager
    def again() -> Iterator[None]:
        tell_mismatch(lambda error: KeyError(f"mine: {error}"))
        yield

    with pytest.raises(KeyError, match="mine"):
        checkpoint(run, x, use_reentrant=False, context_fn=lambda: (nullcontext(), again())).sum().backward()
    tell_mismatch(KeyError)  # outside of a second pass, nothing is to be told


def test_a_second_forward_pass_that_ends_early_raises_no_error_of_the_users() -> None:
    x = torch.ones(3, requires_grad=True)
    ended: list[bool] = []

    @contextmanager
    def again() -> Iterator[None]:
        try:
            yield
        except Exception as error:
            ended.append(ends_early(error))
            raise

    checkpoint(torch.exp, x, use_reentrant=False, context_fn=lambda: (nullcontext(), again())).sum().backward()
    assert ended == [True] and not ends_early(ValueError())


def test_transformations_of_torch_func_are_seen() -> None:
    seen: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(in_transform())
        return x.square().sum()

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(INSTEAD_OF_TRANSFORMS in instead_here())  # the transformation is set aside here
            return function(*args, **(kwargs or {}))

    with Looking():
        torch.func.grad(function)(torch.ones(3))
    seen[:1] = []  # the ones
    assert seen and all(seen) and not in_transform() and not instead_here()


def test_what_a_forward_pass_runs_under_is_there_again() -> None:
    class Doubled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            returned = func(*args, **(kwargs or {}))
            return returned * 2 if func is torch.exp else returned

    x = torch.ones(3)
    torch.set_default_dtype(torch.float64)
    with Doubled():
        ambient = Ambient()
    torch.set_default_dtype(torch.float32)
    with ambient.again():
        assert torch.ones(1).dtype == torch.float64 and torch.equal(torch.exp(x), x.exp() * 2)
    assert torch.ones(1).dtype == torch.float32 and torch.equal(torch.exp(x), x.exp())


def test_what_a_forward_pass_runs_under_is_read_whatever_way_the_user_sets_precision() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        ambient = Ambient()
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        with ambient.again():
            assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


def test_hooks_of_saved_tensors_are_there_again_and_not_for_what_is_saved_as_it_is() -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor.round()

    x = torch.full((3,), 1.25, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ambient = Ambient()
        with saved_as_they_are():
            x.square().sum().backward()
    assert not saved and torch.equal(x.grad, x * 2)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda _: x), ambient.again():
        x.square()
    assert saved and torch.equal(kept[0], x.round())


def test_tables_structure_and_lazy_parameters_of_modules() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LazyLinear(2))
    tables = tables_of(model[0])
    assert any(table.get("weight") is model[0].weight for table in tables) and vars(model[0]) in tables
    assert has_lazy_parameters(model)
    model(torch.ones(1, 2))
    assert not has_lazy_parameters(model)
    structure, former = Structure(model), model[1]
    assert not structure.is_outdated
    for change in (
        lambda: setattr(model, "1", torch.nn.Linear(2, 2)),
        lambda: model[1].add_module("inner", torch.nn.Tanh()),
        lambda: model.append(torch.nn.Tanh()),
        lambda: model.pop(2),
    ):
        structure = Structure(model)
        change()
        assert structure.is_outdated
        structure.refresh()
        assert not structure.is_outdated and structure.modules == list(model.modules())
    model[1] = former
    assert not Structure(model).is_outdated


def test_nodes_of_reentrant_checkpoints_are_found_by_name() -> None:
    x = torch.ones(3, requires_grad=True)
    assert "CheckpointFunctionBackward" in saved_node_names(checkpoint(torch.exp, x, use_reentrant=True).sin(), 100)
    assert saved_node_names(x.exp().sin(), 1) == {"SinBackward0"}


def test_a_cpu_has_no_captured_graphs() -> None:
    assert not has_captured_graphs(torch.device("cpu"))


def test_absent_gradients_reach_a_function_behind_a_view() -> None:
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, x: torch.Tensor) -> Any:
            return x * 2, x * 3

        @staticmethod
        def backward(_ctx: Any, *gradients: Any) -> Any:
            seen.append([each is None for each in gradients])
            return gradients[0] * 2

    seen: list[list[bool]] = []
    for hands_over in (False, True):
        first, _ = Two.apply(torch.ones(3, requires_grad=True))  # pyright: ignore[reportGeneralTypeIssues]
        view = first.view(1, 3)
        if hands_over:
            hand_over_absent(view.grad_fn)
        view.sum().backward()
    assert seen == [[False, False], [False, True]]
    hand_over_absent(torch.ones(3, requires_grad=True).exp().grad_fn)


def test_containers_that_look_at_what_they_are_given() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert [tensor.numel() for tensor in tensors_in((1, {"a": packed}))] == [5, 3]


def test_a_tensor_without_a_base_is_written_to_with_a_trace() -> None:
    own = torch.ones(3, requires_grad=True)
    same = WITHOUT_BASE(own, own.shape)
    assert not same._is_view() and same.data_ptr() == own.data_ptr()
    same.mul_(2).sum().backward()
    assert own.grad is not None and torch.equal(own.grad, torch.full((3,), 2.0))


def test_views_of_fakes_have_the_strides_of_real_ones() -> None:
    view, mode = torch.ops.aten.view.default, FakeTensorMode()
    for shape, stride, wanted in (((24, 1, 64), (64, 1, 1), (24, 1, 64)), ((4, 1, 3), (3, 7, 1), (4, 3, 1))):
        real = torch.empty_strided(shape, stride)
        with mode:
            fake = torch.empty_strided(shape, stride)
            found = strided_as_real(view, (fake, wanted), view(fake, wanted))
        assert found.stride() == real.view(wanted).stride()
    assert strided_as_real(torch.ops.aten.exp.default, (real,), real) is real


@pytest.mark.parametrize("compiles", ["", "compile", "torch.compile"])
def test_calls_of_modules_are_seen_before_their_hooks_and_what_is_compiled_stays_one_graph(compiles: str) -> None:
    torch._dynamo.reset()
    seen: list[object] = []
    inner = torch.nn.Linear(2, 2)

    class Outer(torch.nn.Module):
        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
            return inner(x) * scale

    def look(module: torch.nn.Module) -> Callable[[], None]:
        name = "inner" if module is inner else "outer" if type(module) is Outer else "compiled"
        seen.append(name)
        return lambda: seen.append(f"end of {name}")

    outer = module = Outer()
    outer.register_forward_pre_hook(lambda *_: seen.append("own") if not torch.compiler.is_compiling() else None)
    calls = CallsSeen(look)
    if compiles == "compile":
        outer.compile(backend="eager", fullgraph=True)
    elif compiles:
        module = torch.compile(outer, backend="eager", fullgraph=True)
    module(torch.ones(1, 2), scale=3.0)
    expected = {
        "": ["outer", "own", "inner", "end of inner", "end of outer"],
        "compile": ["outer", "end of outer"],
        "torch.compile": ["compiled", "outer", "end of outer", "end of compiled"],
    }
    assert [name for name in seen if name != "own" or not compiles] == expected[compiles]
    seen.clear()
    calls.remove()
    module(torch.ones(1, 2), scale=2.0)
    assert set(seen) <= {"own"}
    assert "_wrapped_call_impl" in torch.nn.Module.__call__.__name__


def test_modes_of_this_thread_are_seen() -> None:
    assert not has_modes()
    with FakeTensorMode():
        assert has_modes()
    assert not has_modes()
