"""Trace: the calls of one step in execution order, over storages in single-assignment form where mutation allows it.

Both ways in (the whole step and the joint graph) feed tensors and calls to a `Trace`; `memfit.capture.build` turns it
into a Graph and a Binding. Three things happen here and nowhere else:

- Aliasing collapses: a tensor becomes a `Value`, a window on a storage, and a call that only makes views leaves no
  trace.
- In-place calls are functionalized: `relu_` over the whole of a storage becomes `relu` into a new one, so that it can
  be computed again. What cannot be (part of a storage, a resident) stays a mutation, which a schedule computes once.
- Training batch normalization, which updates its running statistics without saying so in its schema, returns them as
  new storages, copied back once. Its other results do not depend on the statistics, so it does not count as reading
  them while they are the buffers' own: rematerializing it after the copy is right, and what it then returns for the
  statistics is read by nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.binding import Origin, Resident, Value
from memfit.capture.functionalize import (
    BATCH_NORMS,
    FUNCTIONAL_BATCH_NORMS,
    BatchNorm,
    WithGradients,
    functional_variant,
    overwrite_like,
    without_idle_statistics,
)
from memfit.capture.torch_private import is_fake, storage_key, tree_flatten, tree_map
from memfit.errors import CaptureError
from memfit.graph import Phase, Role


@dataclass(slots=True, kw_only=True)
class TracedStorage:
    """A storage while it is traced; `bytes` are its bytes on the step's device, 0 when it lives elsewhere."""

    name: str
    bytes: int
    role: Role
    resident: bool = False


@dataclass(slots=True, kw_only=True)
class TracedCall:
    """A call while it is traced: the fields of `Call`, and what `Op` needs beside them."""

    name: str
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Value | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    mutates: tuple[int, ...]
    phase: Phase
    module: str
    random: str | None = None
    recomputable: bool = True
    workspace_bytes: int | None = None
    generator_state: int | None = None


@dataclass(kw_only=True)
class Trace:
    """Collects the calls of a step that runs on `device`. Feed residents first, then calls as they happen."""

    device: torch.device
    scope: Callable[[], tuple[Phase, str]]
    storages: list[TracedStorage] = field(default_factory=list[TracedStorage])
    calls: list[TracedCall] = field(default_factory=list[TracedCall])
    residents: list[Resident] = field(default_factory=list[Resident])
    arrivals: list[int] = field(default_factory=list[int])
    _storage_of: dict[int, int] = field(default_factory=dict[int, int])
    _kept_alive: list[Any] = field(default_factory=list[Any])  # a storage's key is good only while the storage lives
    _write_backs: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict[int, tuple[torch.Tensor, int]])

    def add_resident(self, tensor: torch.Tensor, *, role: Role, origin: Origin, key: str | int, name: str) -> Value:
        """Enter a tensor that is there before the step; two that share a storage (tied parameters) give one storage."""
        if storage_key(tensor) not in self._storage_of:
            self._new_storage(tensor, name=name, role=role, resident=True)
        value = self.value(tensor)
        constant = tensor if origin is Origin.CONSTANT else None
        self.residents.append(Resident(value=value, origin=origin, key=key, constant=constant))
        return value

    def add_arrival(self, tensor: torch.Tensor, *, key: int, name: str) -> Value:
        """Enter a tensor that comes at the boundary: a gradient that autograd hands to the backward half."""
        if storage_key(tensor) not in self._storage_of:
            self.arrivals.append(self._new_storage(tensor, name=name, role=Role.GRADIENT))
        value = self.value(tensor)
        self.residents.append(Resident(value=value, origin=Origin.TANGENT, key=key))
        return value

    def value(self, tensor: torch.Tensor) -> Value:
        """Return `tensor` as a window on its storage as it is now; a real tensor never seen before is a constant."""
        check_dense(tensor)
        key = storage_key(tensor)
        if key not in self._storage_of:
            if is_fake(tensor):
                raise CaptureError(f"a tensor of shape {tuple(tensor.shape)} came from outside of the captured step")
            number = sum(resident.origin is Origin.CONSTANT for resident in self.residents)
            name = f"constant_{number}"
            return self.add_resident(tensor, role=Role.CONSTANT, origin=Origin.CONSTANT, key=name, name=name)
        return Value(
            storage=self._storage_of[key],
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            offset=int(tensor.storage_offset()),
            conjugated=tensor.is_conj(),
            negated=tensor.is_neg(),
        )

    def forward_is_as(self, other: Trace) -> bool:
        """Whether both forward passes make the same calls of the same values; closures are the same by their names.

        Not the backward passes: whether autograd copies a gradient to a parameter hangs on who else holds it.
        """
        ours, theirs = ([_described(call) for call in t.calls if call.phase is Phase.FORWARD] for t in (self, other))
        return ours == theirs

    def add_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        """Enter one operator call and what it returned; the fakes it ran on are already mutated, their Values not
        yet.
        """
        outputs = tree_flatten(returned)[0]
        args = without_idle_statistics(func, args)
        mutated = _mutated_tensors(func, args, kwargs)
        if func._overloadpacket in BATCH_NORMS and self._add_batch_norm(func, args, kwargs, outputs):
            return
        if not mutated and all(self._is_alias(output) for output in outputs):
            return
        traced_args, traced_kwargs = self._values_of((args, kwargs))
        target: Callable[..., Any] = func
        if func is torch.ops.aten.copy.default:
            # The real kernel keeps its first argument's place in a larger storage, the fake one does not.
            target = overwrite_like(returned, torch.ops.aten.copy_.default)
            traced_args = traced_args[1:]
        elif func is torch.ops.aten.mkldnn_rnn_layer.default:
            target = WithGradients(func)
        if len(mutated) == 1 and not self.storages[self.value(mutated[0]).storage].resident:
            variant = functional_variant(func, args, kwargs, mutated[0])
            if variant is not None:
                target, keeps_input = variant
                self._rename(mutated[0], func)
                if not keeps_input:
                    traced_args = traced_args[1:]
                outputs, mutated = [mutated[0]], []
        self._append(func, target, traced_args, traced_kwargs, outputs, mutated)
        if func._overloadpacket in FUNCTIONAL_BATCH_NORMS:
            mean, variance, training = FUNCTIONAL_BATCH_NORMS[func._overloadpacket]
            if training is None or args[training]:
                self._hide_buffers([traced_args[mean], traced_args[variance]])

    def write_back(self) -> None:
        """Copy the running statistics to their buffers: once a step, when the forward pass is done."""
        for key, (tensor, resident) in self._write_backs.items():
            newest = self.value(tensor)
            self._storage_of[key] = resident
            buffer = self.value(tensor)
            self.calls.append(
                TracedCall(
                    name="copy_",
                    target=torch.ops.aten.copy_.default,
                    args=(buffer, newest),
                    kwargs={},
                    results=(None,),
                    reads=(newest.storage,),
                    writes=(),
                    mutates=(resident,),
                    phase=Phase.FORWARD,
                    module=self.storages[resident].name.rpartition(".")[0],
                )
            )
        self._write_backs.clear()

    def _append(
        self,
        func: Any,
        target: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: list[Any],
        mutated: list[torch.Tensor],
    ) -> None:
        phase, module = self.scope()
        mutates = tuple(dict.fromkeys(self.value(tensor).storage for tensor in mutated))
        reads = dict.fromkeys(v.storage for v in tree_flatten((args, kwargs))[0] if isinstance(v, Value))
        for storage in mutates:
            reads.pop(storage, None)
        written: list[int] = []
        results: list[Value | None] = []
        for output in outputs:
            if not isinstance(output, torch.Tensor):
                results.append(None)
                continue
            if storage_key(output) not in self._storage_of:
                role = Role.ACTIVATION if phase is Phase.FORWARD else Role.GRADIENT
                suffix = f".{len(results)}" if len(outputs) > 1 else ""
                self._new_storage(output, name=_short_name(func) + suffix, role=role)
            value = self.value(output)
            is_new = value.storage not in reads and value.storage not in mutates
            if is_new and value.storage not in written:
                written.append(value.storage)
            results.append(value if is_new else None)
        self.calls.append(
            TracedCall(
                name=_short_name(func),
                target=target,
                args=args,
                kwargs=kwargs,
                results=tuple(results),
                reads=tuple(reads),
                writes=tuple(written),
                mutates=mutates,
                phase=phase,
                module=module,
                random=_generator_name(func, args, kwargs, self.device),
                recomputable=kwargs.get("generator") is None and "c10d" not in func.namespace,
            )
        )

    def _add_batch_norm(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Any]) -> bool:
        """Enter training batch normalization with running statistics as a call that returns new ones; else False."""
        norm = BatchNorm.of(func, args, kwargs)
        if norm is None:
            return False
        traced_args, traced_kwargs = self._values_of((args, kwargs))
        statistics = [args[norm.mean_position], args[norm.variance_position]]
        buffers = [self.value(tensor).storage for tensor in statistics]
        for tensor, storage in zip(statistics, buffers, strict=True):
            if self.storages[storage].resident:
                self._write_backs[storage_key(tensor)] = (tensor, storage)
            self._rename(tensor, func)
        self._append(func, norm, traced_args, traced_kwargs, [*outputs, *statistics], [])
        self._hide_buffers([traced_args[norm.mean_position], traced_args[norm.variance_position]])
        return True

    def _hide_buffers(self, statistics: list[Any]) -> None:
        """Training batch normalization does not count as reading its running statistics while they are buffers."""
        call = self.calls[-1]
        hidden = {v.storage for v in statistics if isinstance(v, Value) and self.storages[v.storage].resident}
        call.reads = tuple(storage for storage in call.reads if storage not in hidden)

    def _rename(self, tensor: torch.Tensor, func: Any) -> None:
        """From here on, what the tensor's storage holds is another storage of the graph, of the same bytes."""
        phase, _ = self.scope()
        role = Role.ACTIVATION if phase is Phase.FORWARD else Role.GRADIENT
        self._new_storage(tensor, name=_short_name(func), role=role)

    def _new_storage(self, tensor: torch.Tensor, *, name: str, role: Role, resident: bool = False) -> int:
        check_dense(tensor)
        storage = tensor.untyped_storage()
        on_device = tensor.device.type == self.device.type
        self.storages.append(
            TracedStorage(name=name, bytes=int(storage.nbytes()) if on_device else 0, role=role, resident=resident)
        )
        self._kept_alive.append(storage)
        self._storage_of[storage_key(tensor)] = len(self.storages) - 1
        return len(self.storages) - 1

    def _is_alias(self, output: Any) -> bool:
        if not isinstance(output, torch.Tensor):
            return True
        check_dense(output)
        return storage_key(output) in self._storage_of

    def _values_of(self, tree: Any) -> Any:
        return tree_map(lambda leaf: self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def _described(call: TracedCall) -> tuple[Any, ...]:
    return call.name, str(getattr(call.target, "__name__", call.target)), call.args, call.kwargs, call.mutates


def check_dense(tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no storage of its own.

    Raises:
        CaptureError: it is sparse, or of another layout that is not strided.
    """
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"a tensor of shape {list(tensor.shape)} has layout {tensor.layout}, expected a dense one; an embedding "
            "with sparse=True makes such gradients: make it with sparse=False"
        )


def _mutated_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that the operator's schema says it writes to."""
    mutated: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            mutated += [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, torch.Tensor)]
    return mutated


def _generator_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> str | None:
    """The generator that a call draws from, or None; attention with dropout_p = 0 draws nothing though its tag
    says so.
    """
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    for position, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            if given == 0:
                return None
    if kwargs.get("generator") is not None:
        return "the user's"
    return "cpu" if device.type == "cpu" else str(device)


def _short_name(func: Any) -> str:
    return func._schema.name.split("::")[-1].rstrip("_")
