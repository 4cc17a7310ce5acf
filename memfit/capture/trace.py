"""Trace: the calls of one step in execution order, over storages in single-assignment form where mutation allows it.

The captures of a whole step and of a joint graph feed tensors and calls to a `Trace`; `memfit.capture.build` turns it
into a Graph and a Binding. Three things are done here alone:

- Aliasing is removed: a tensor becomes a `Value`, a view of a storage. A call that only makes views is not entered.
- In-place calls are functionalized: `relu_` over the whole of a storage becomes `relu` into a new one, so that it can
  be rematerialized. A write to a part of a storage, or to a resident, stays a mutation, which is computed once.
- Some operators are entered in another way than their schemas say: see `memfit.capture.special_calls`, and
  `memfit.capture.batch_norms` for the running statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from memfit.binding import Call, Origin, Resident, Value, values_in
from memfit.capture.corrected_fakes import as_corrected
from memfit.capture.hidden_state import refuse_hidden_state
from memfit.capture.special_calls import SPECIAL_CASES, functionalize
from memfit.capture.traced import Entry, TracedCall, TracedStorage, are_alike, mutated_tensors, short_name
from memfit.cost.observations import Corrections, RealResult, call_key
from memfit.errors import BY_CHECKPOINT, CaptureError, NotOneGraphError
from memfit.graph import Phase, Role
from memfit.torch_private.absent import has_no_memory
from memfit.torch_private.tensors import draws, is_fake, is_view, storage_key, tensors_in, tree_flatten, tree_map


@dataclass(kw_only=True)
class Trace:
    """Collects the calls of a step: first its residents, then its calls in execution order.

    Attributes:
        device: where the step runs.
        scope: returns the phase and the module's name of the call at hand.
        step_count: returns the buffer that counts the steps of a batch normalization with momentum=None, if such a
            module is at hand.
        has_autocast: says whether the step has autocast on for a device type.
        corrections: what real kernels return in the place of their fakes' results.
        replays_draws: whether a random call may be made again with the same draws.
        storages, calls, residents: what was entered.
        arrivals: the storages that arrive at the boundary.
        stands_for: the real tensor for which a fake stands, by the key of the fake's storage: one that the step closes
            over. Views of it and writes to it are those of its memory.
    """

    device: torch.device
    scope: Callable[[], tuple[Phase, str]]
    step_count: Callable[[], torch.Tensor | None] = lambda: None
    has_autocast: Callable[[str], bool] = lambda _device_type: False
    corrections: Corrections = field(default_factory=dict[str, Mapping[int, RealResult | None]])
    replays_draws: bool = True
    storages: list[TracedStorage] = field(default_factory=list[TracedStorage])
    calls: list[TracedCall] = field(default_factory=list[TracedCall])
    residents: list[Resident] = field(default_factory=list[Resident])
    arrivals: list[int] = field(default_factory=list[int])
    stands_for: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    _storage_of: dict[int, int] = field(default_factory=dict[int, int])
    _kept_alive: list[Any] = field(default_factory=list[Any])  # a storage's key is good only while the storage lives
    _sparse: dict[int, tuple[Value, Value]] = field(default_factory=dict[int, tuple[Value, Value]])
    write_backs: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict[int, tuple[torch.Tensor, int]])
    # new running statistics -> the call that returns them, and the buffer that it does not count as reading
    _statistics: dict[int, tuple[TracedCall, int]] = field(default_factory=dict[int, tuple[TracedCall, int]])

    def add_resident(
        self,
        tensor: torch.Tensor,
        *,
        role: Role,
        origin: Origin,
        key: str | int,
        name: str,
        constant: torch.Tensor | None = None,
    ) -> Value:
        """Enter a tensor that exists before the step, and return its Value.

        Args:
            tensor: a fake or, for a constant, a real tensor. Tensors that share a storage (tied parameters) give one.
            role: of its storage.
            origin, key: where the runtime finds it; see `memfit.binding.Resident`.
            name: of its storage.
            constant: the real tensor of a constant.
        """
        if storage_key(tensor) not in self._storage_of:
            self._new_storage(tensor, name=name, role=role, resident=True)
        value = self.value(tensor)
        self.residents.append(Resident(value=value, origin=origin, key=key, constant=constant))
        return value

    def add_arrival(self, tensor: torch.Tensor, *, key: int, name: str) -> Value:
        """Enter a tangent, which autograd passes to the backward half at the boundary, and return its Value.

        Args:
            tensor: the fake of the tangent.
            key: its position among the tangents.
            name: of its storage.
        """
        if storage_key(tensor) not in self._storage_of:
            self.arrivals.append(self._new_storage(tensor, name=name, role=Role.GRADIENT))
        value = self.value(tensor)
        self.residents.append(Resident(value=value, origin=Origin.TANGENT, key=key))
        return value

    def value(self, tensor: torch.Tensor) -> Value:
        """Return `tensor` as a view of its storage as it is now; an unknown real tensor is entered as a constant."""
        check_dense(tensor)
        key = storage_key(tensor)
        if key not in self._storage_of:
            real = self.stands_for.get(key, tensor)
            if is_fake(real) and not has_no_memory(real):
                raise CaptureError(f"a tensor of shape {tuple(tensor.shape)} came from outside of the captured step")
            number = sum(resident.origin is Origin.CONSTANT for resident in self.residents)
            name = f"constant_{number}"
            return self.add_resident(
                tensor, role=Role.CONSTANT, origin=Origin.CONSTANT, key=name, name=name, constant=real
            )
        return Value.of(tensor, self._storage_of[key])

    def maker_of(self, tensor: torch.Tensor) -> TracedCall | None:
        """Return the call that wrote a tensor last, or None for one from outside of the step."""
        storage = self._storage_of.get(storage_key(tensor))
        return next((call for call in reversed(self.calls) if storage in (*call.writes, *call.mutates)), None)

    def gradient(self, tensor: torch.Tensor) -> Value | tuple[Value, Value]:
        """Return a gradient's Value, or those of the indices and of the values of a sparse one.

        Raises:
            CaptureError: a sparse gradient that is more than one embedding's.
        """
        sparse = self._sparse.get(id(tensor))
        return self.value(tensor) if sparse is None else sparse

    def _makes_or_opens_sparse(self, func: Any, args: tuple[Any, ...], returned: Any) -> bool:
        """Return whether a call puts a sparse tensor together, or takes it apart, which leaves no trace.

        A sparse gradient of an embedding is its indices and values. Nothing writes to them before the update, so that
        no copy is made where eager makes one.
        """
        packet = func._overloadpacket
        if packet in _SPARSE_MAKERS:
            indices, values = tensors_in(args)
            self._sparse[id(returned)] = self.value(indices), self.value(values)
        elif args and id(args[0]) in self._sparse and packet in _SPARSE_VIEWS:
            self._sparse[id(returned)] = self._sparse[id(args[0])]
        elif args and id(args[0]) in self._sparse and packet in _SPARSE_OPENERS:
            opened = self._sparse[id(args[0])][_SPARSE_OPENERS.index(packet)]
            self._storage_of[storage_key(returned)] = opened.storage
            self._kept_alive.append(returned.untyped_storage())
        else:
            return False
        self._kept_alive.append(returned)
        return True

    def is_as(self, other: Trace) -> bool:
        """Return whether both forward passes make the same calls of the same Values. Closures are compared by name.

        Of backward passes operators and numbers are compared: whether a gradient is copied depends on who holds it.
        """
        ours, theirs = ([call.described() for call in t.calls if call.phase is Phase.FORWARD] for t in (self, other))
        return ours == theirs and are_alike(self.calls, other.calls)

    def add_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
        """Enter one operator call, after it ran on fakes; calls that only make views leave no trace.

        Returns:
            `returned`, with corrections where the real kernel is known to return something else.

        Args:
            func: the operator overload.
            args, kwargs: its arguments, with tensors; those that it mutates still have their old Values here.
            returned: what it returned.

        Raises:
            CaptureError: a tensor that is sparse, or from outside of the captured step.
            UnsupportedStepError: a collective (NotOneGraphError), or dropout in a recurrent layer of a GPU.
        """
        if func.namespace == "profiler":  # the label of a region: of this run
            return returned
        refuse_hidden_state(func, args, kwargs)
        if self._makes_or_opens_sparse(func, args, returned):
            return returned
        if "c10d" in func.namespace:
            raise NotOneGraphError(
                f"{self.scope()[1] or 'the step'} runs the collective {func}; a planned step runs no "
                f"collectives but its own (process_group): {BY_CHECKPOINT}"
            )
        outputs = [returned] if isinstance(returned, torch.Tensor) else tree_flatten(returned)[0]
        mutated = mutated_tensors(func, args, kwargs)
        if not mutated and func._schema.returns and all(self._is_alias(output) for output in outputs):
            return returned
        traced_args, traced_kwargs = tree_map(
            lambda leaf: self.value(leaf) if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs)
        )
        if args and is_fake(args[0]) and is_view(func) and func._overloadpacket not in SPECIAL_CASES:
            if all(self._is_alias(output) for output in outputs):  # of a constant that came with this call
                return returned
            raise CaptureError(
                f"{self.scope()[1] or 'the step'} calls {func}, and the result shares no memory with what it is a view "
                "of: the call's fake kernel is wrong, or the graph was changed"
            )
        entry = Entry(
            func=func, given=args, target=func, args=traced_args, kwargs=traced_kwargs, outputs=outputs, mutated=mutated
        )
        enter = SPECIAL_CASES.get(func._overloadpacket, functionalize)
        enter(self, entry, kwargs)
        returned = self.corrected(entry, returned)
        self._append(entry)
        return returned

    def corrected(self, entry: Entry, returned: Any) -> Any:
        """Return `returned` as the real kernel returns it; the outputs of the entry are corrected too.

        Args:
            entry: the call.
            returned: by the fake kernel, nested as the call returns it.
        """
        if not self.corrections:
            return returned
        call = Call(op=0, target=entry.target, args=entry.args, kwargs=entry.kwargs)
        real = self.corrections.get(call_key(call) or "", {})
        if real:
            returned = as_corrected(returned, real, self._is_alias)
            leaves = tree_flatten(returned)[0]
            entry.outputs[: len(leaves)] = leaves
        return returned

    def add_storage(self, tensor: torch.Tensor, *, name: str, role: Role) -> Value:
        """Enter a storage for calls that are not dispatched, and return the tensor's Value.

        Args:
            tensor: a fake over the whole of the storage.
            name, role: of the storage.
        """
        self._new_storage(tensor, name=name, role=role)
        return self.value(tensor)

    def insert(self, calls: Sequence[tuple[int, TracedCall]]) -> None:
        """Insert calls, each before the call that stands at its position now.

        Args:
            calls: positions and calls, in order.
        """
        before: dict[int, list[TracedCall]] = {}
        for position, call in calls:
            before.setdefault(position, []).append(call)
        present = [*self.calls, None]
        self.calls[:] = [
            each for number, call in enumerate(present) for each in (*before.get(number, ()), call) if each is not None
        ]

    def add_check(self, name: str, target: Callable[..., Any], values: Sequence[Value]) -> None:
        """Enter a call that only reads, and is made once.

        Args:
            name: of the op.
            target: takes the tensors, and raises an error or returns None.
            values: the tensors.
        """
        phase, module = self.scope()
        self.calls.append(
            TracedCall.of(name, target, tuple(values), phase=phase, module=module, recomputable=False, is_check=True)
        )

    def write_back(self) -> None:
        """Enter the copies of the running statistics to their buffers: once a step, after the forward pass."""
        for key, (tensor, resident) in self.write_backs.items():
            newest = self.value(tensor)
            self._storage_of[key] = resident
            buffer = self.value(tensor)
            module, copy = self.storages[resident].name.rpartition(".")[0], torch.ops.aten.copy_.default
            args = buffer, newest
            self.calls.append(TracedCall.of("copy_", copy, args, mutated=buffer, phase=Phase.FORWARD, module=module))
        self.write_backs.clear()

    def _append(self, entry: Entry) -> None:
        phase, module = self.scope()
        mutates = tuple(dict.fromkeys(self.value(tensor).storage for tensor in entry.mutated))
        used = (v.storage for v in values_in((entry.args, entry.kwargs)))
        reads = [storage for storage in dict.fromkeys(used) if storage not in mutates]
        results = self._results(entry, {*reads, *mutates}, phase)
        is_check = not mutates and not entry.func._schema.returns
        random = _generator_name(entry.func, entry.args, entry.kwargs, self.device)
        call = TracedCall(
            name=short_name(entry.func),
            target=entry.target,
            args=entry.args,
            kwargs=entry.kwargs,
            results=results,
            reads=tuple(storage for storage in reads if storage not in entry.hidden),
            writes=tuple(dict.fromkeys(value.storage for value in results if value is not None)),
            mutates=mutates,
            phase=phase,
            module=module,
            random=random,
            recomputable=entry.kwargs.get("generator") is None
            and (random is None or self.replays_draws)
            and not is_check,
            is_check=is_check,
        )
        self._follow_statistics(call, entry)
        self.calls.append(call)

    def _follow_statistics(self, call: TracedCall, entry: Entry) -> None:
        """Let a batch normalization count as reading the buffers if a call uses the new statistics that it returns.

        The first update of the buffer does not count, nor does another normalization that makes newer ones of them.
        """
        for storage in {*call.reads, *call.mutates} & self._statistics.keys():
            maker, buffer = self._statistics[storage]
            is_update = buffer in call.mutates and not self.is_mutated(buffer)
            if not is_update and storage not in entry.statistics and buffer not in maker.reads:
                maker.reads = (*maker.reads, buffer)
        for result, before in zip(call.results[-len(entry.statistics) :], entry.statistics, strict=False):
            _, buffer = self._statistics.get(before, (call, before))
            if result is not None and (before in entry.hidden or before in self._statistics):
                self._statistics[result.storage] = call, buffer

    def is_mutated(self, storage: int) -> bool:
        """Return whether a call has written to a storage so far."""
        return any(storage in call.mutates for call in self.calls)

    def _results(self, entry: Entry, aliased: set[int], phase: Phase) -> tuple[Value | None, ...]:
        """Return the Values of the outputs, None for one that is no tensor or is on a storage in `aliased`."""
        results: list[Value | None] = []
        for output in entry.outputs:
            if not isinstance(output, torch.Tensor):
                results.append(None)
                continue
            if storage_key(output) not in self._storage_of:
                suffix = f".{len(results)}" if len(entry.outputs) > 1 else ""
                self._new_storage(output, name=short_name(entry.func) + suffix, role=_result_role(phase))
            value = self.value(output)
            results.append(None if value.storage in aliased else value)
        return tuple(results)

    def rename(self, tensor: torch.Tensor, func: Any) -> None:
        """Enter a new storage of the graph, of the same bytes, for what the tensor's storage holds from now on.

        Args:
            tensor: has to be dense.
            func: the operator overload that has written to it; names the new storage.
        """
        phase, _ = self.scope()
        self._new_storage(tensor, name=short_name(func), role=_result_role(phase))

    def _new_storage(self, tensor: torch.Tensor, *, name: str, role: Role, resident: bool = False) -> int:
        check_dense(tensor)
        storage = tensor.untyped_storage()
        on_device = tensor.device.type == self.device.type
        self.storages.append(
            TracedStorage(name=name, bytes=storage.nbytes() if on_device else 0, role=role, resident=resident)
        )
        self._kept_alive.append(storage)
        self._storage_of[storage_key(tensor)] = len(self.storages) - 1
        return len(self.storages) - 1

    def _is_alias(self, output: Any) -> bool:
        if not isinstance(output, torch.Tensor):
            return True
        check_dense(output)
        return storage_key(output) in self._storage_of


_aten = torch.ops.aten
_SPARSE_MAKERS = (_aten._sparse_coo_tensor_with_dims_and_tensors, _aten._sparse_coo_tensor_unsafe)
_SPARSE_VIEWS = (_aten.detach, _aten.alias, _aten.clone)
_SPARSE_OPENERS = (_aten._indices, _aten._values)


def _result_role(phase: Phase) -> Role:
    return Role.ACTIVATION if phase is Phase.FORWARD else Role.GRADIENT


def check_dense(tensor: torch.Tensor) -> None:
    """Refuse a tensor that has no storage of its own.

    Raises:
        CaptureError: it is sparse, or of another layout that is not strided.
    """
    if tensor.layout is not torch.strided:
        raise CaptureError(
            f"a tensor of shape {list(tensor.shape)} has layout {tensor.layout}, expected a dense one; of sparse "
            "tensors only the gradients of nn.Embedding are planned, with an optimizer, and if each embedding is "
            "called once in a step: make the others with sparse=False, or train under memfit.checkpoint or memfit.eager"
        )


def _generator_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> str | None:
    """Return the generator that a call draws from, or None."""
    if not draws(func, args, kwargs):
        return None
    if kwargs.get("generator") is not None:
        return "the user's"
    return "cpu" if device.type == "cpu" else str(device)
