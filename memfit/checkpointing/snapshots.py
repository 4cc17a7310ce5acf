"""What a block's forward pass reads that is no tensor of its graph, held as it was for the second forward pass.

The first forward pass may change it, and so may the loop, until backward computes the block again.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from memfit.capture.copies import ATOMS
from memfit.capture.discovery import MODULE_NAMES
from memfit.checkpointing.reached import OR_EAGER_MODE, FoundInValues, Reach, may_change, needs_a_look
from memfit.checkpointing.tables import of_tables
from memfit.errors import UnsupportedStepError
from memfit.memory.bits import as_integers
from memfit.memory.place import Place
from memfit.memory.snapshot import Snapshot
from memfit.torch_private.ambient import Ambient
from memfit.torch_private.sharding import is_sharded, key_of
from memfit.torch_private.tensors import is_freed, is_plain_dense, tensors_in

_SMALL_NUMEL = 256  # a buffer of so many elements that is copied although it was not seen to be written to
_LARGE_BYTES = 1 << 16  # a buffer whose copy is not kept unless the forward pass writes to it
_MOST_LOOKED_AT = 1000  # entries of a container, for new ones in it
_GIVEN = "an argument"
_ATOMS = frozenset(ATOMS)
_AWAITED: dict[int, WeakSet[CallSnapshot]] = {}  # by the id of a parameter: calls that have yet to be recomputed


def is_awaited(parameter: torch.Tensor) -> bool:
    """Return whether a block that reads a parameter has yet to be recomputed."""
    return bool(_AWAITED.get(id(parameter)))


@dataclass(slots=True)
class _Buffer:
    """A tensor without a gradient in a table, or a parameter that the block writes to, as it was.

    Attributes:
        tensor: itself.
        table, key: where it is.
        version: the number of writes to it.
        copy: None if none was made.
        memory: the key of its storage.
        storage: the same; 0 if it is a small part of it.
        is_statistic: whether it is one of batch normalization's.
        needs_gradient: whether it is a parameter that needs one.
    """

    tensor: torch.Tensor
    table: dict[str, Any]
    key: str
    version: int
    copy: torch.Tensor | None
    memory: int
    storage: int
    is_statistic: bool
    needs_gradient: bool

    @property
    def is_written(self) -> bool:
        """Whether it was written to, or was given other memory, since."""
        return self.tensor._version != self.version or key_of(self.tensor) != self.memory

    def again(self, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """Return a tensor for the second forward pass, which may write to it.

        Args:
            storages: by key, of those that are there by now; those of tensors that share memory do so.
        """
        assert self.copy is not None
        if not self.storage:
            tensor = self.copy.clone()
        else:
            storages.setdefault(self.storage, self.copy.untyped_storage().clone())
            tensor = Place.of(self.copy).on(storages[self.storage])
        return torch.nn.Parameter(tensor, self.needs_gradient) if type(self.tensor) is torch.nn.Parameter else tensor


class CallSnapshot:
    """All that a call of a block can read, as it is before the first forward pass.

    Args:
        reach: what the block reaches.
        args, kwargs: of the call.
        copies_all: whether tensors are copied that a forward pass, or the loop after it, may write to.
    """

    def __init__(
        self, reach: Reach, args: tuple[Any, ...], kwargs: dict[str, Any], *, copies_all: bool = False
    ) -> None:
        self._reach, self._copies_all = reach, copies_all
        self._ambient = Ambient()
        reach.free_replaced()
        self._held = Snapshot([of_tables(reach.tables)])
        ((_, self._own),) = self._held.held
        self._parameters: list[tuple[torch.Tensor, int, bool, int]] = []  # with version, needs grad, storage
        self._buffers: list[_Buffer] = []
        self._digests: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._is_overwritten = False  # by another call, while this one has yet to be recomputed
        self._before: dict[int, torch.Tensor] = {}  # parameters by their ids, on the memory that they had
        self._frozen = [(count, count._version) for count in reach.frozen_counts()]
        self._statistics = reach.statistics.copy()
        new = [(f"argument {key} of {reach.name}", value) for key, value in (*enumerate(args), *kwargs.items())]
        new = [each for each in new if needs_a_look(type(each[1])) and may_change(each[1])]
        new += self._look_at_own()
        self._lost = [(each, each.read()) for each in reach.lost]
        self._held.add(reach.places)
        positional = {id(value) for value in args}  # whose versions the checkpoint compares itself
        watched = [(_GIVEN, each) for each in tensors_in((args, kwargs)) if id(each) not in positional]
        for _, held in self._held.held[1:]:
            self._look_into(held, new, watched)
        if new:
            found = FoundInValues(new)
            watched += found.tensors.values()
            self._held.add(found.places(reach.tables))
            self._lost += [(each, each.before) for each in found.lost()]
        self._given = [(path, tensor, tensor._version) for path, tensor in watched if not tensor.is_inference()]
        self._drawn = Snapshot(reach.generators if copies_all else ())
        for tensor, *_ in self._parameters:
            _AWAITED.setdefault(id(tensor), WeakSet()).add(self)

    def _look_at_own(self) -> list[tuple[str, Any]]:
        """Note the tensors in the module's tables, and return the containers and objects that were not looked into."""
        new: list[tuple[str, Any]] = []
        reach = self._reach
        for number, copy in self._own.items():
            table = reach.tables[number]
            for key in copy.keys() - MODULE_NAMES:
                value = copy[key]
                kind = type(value)
                if kind in _ATOMS:
                    continue
                if kind is torch.nn.Parameter and (id(table), key) not in reach.written:
                    storage = key_of(value) if reach.has_storages else 0
                    self._parameters.append((value, value._version, value.requires_grad, storage))
                    if self._copies_all and storage:
                        self._before[id(value)] = value.detach()
                elif isinstance(value, torch.Tensor):
                    self._note_tensor(table, copy, key, value)
                elif needs_a_look(kind) and reach.is_new(id(table), key, value) and may_change(value):
                    new.append((f"{reach.name}.{key}", value))
        return new

    def _note_tensor(self, table: dict[str, Any], copy: dict[str, Any], key: str, value: torch.Tensor) -> None:
        where = id(table), key
        is_statistic = where in self._statistics
        if (is_statistic and not self._copies_all) or is_sharded(value) or value.is_inference():
            return
        if value.requires_grad and type(value) is not torch.nn.Parameter:
            self._parameters.append((value, value._version, True, 0))
            if value.grad_fn is not None:  # the graph of an earlier step is not to be held
                copy[key] = value.detach().requires_grad_()
            return
        is_copied = self._copies_all or where in self._reach.written or value.numel() <= _SMALL_NUMEL
        was = self._before.get(id(value), value)
        storage = key_of(was) if _is_most_of_its_storage(was) else 0
        kept = self._copy(was, storage) if is_copied and not is_freed(was) else None
        needs_gradient = value.requires_grad
        self._buffers.append(
            _Buffer(value, table, key, value._version, kept, key_of(was), storage, is_statistic, needs_gradient)
        )

    def before_write(self, storages: Set[int]) -> None:
        """Copy the parameters that an operator of the forward pass is about to write to.

        Args:
            storages: keys of those that it writes to.
        """
        written = {id(tensor) for tensor, *_, storage in self._parameters if storage in storages}
        for other in [each for key in written for each in _AWAITED.get(key, ()) if each is not self]:
            other._is_overwritten = True
        self._keep(written)

    def _keep(self, parameters: Set[int]) -> None:
        """Copy parameters as they were, now and in later passes.

        Args:
            parameters: their ids.
        """
        self._parameters = [each for each in self._parameters if id(each[0]) not in parameters]
        for number, copy in self._own.items() if parameters else ():
            table = self._reach.tables[number]
            for key in [key for key, value in copy.items() if id(value) in parameters]:
                self._reach.written.add((id(table), key))
                self._note_tensor(table, copy, key, copy[key])

    def _copy(self, tensor: torch.Tensor, storage: int) -> torch.Tensor:
        """Return a copy of a buffer; those of buffers that share memory do so."""
        if not storage:
            return tensor.detach().clone()
        if storage not in self._copies:
            self._copies[storage] = tensor.untyped_storage().clone()
        return Place.of(tensor).on(self._copies[storage])

    def _look_into(self, held: Any, new: list[tuple[str, Any]], watched: list[tuple[str, torch.Tensor]]) -> None:
        """Note the tensors that a place holds, and objects in it that were not there before."""
        reach, values = self._reach, held if isinstance(held, list) else [held]
        if isinstance(held, dict):
            values = held.values()
        if len(values) > _MOST_LOOKED_AT:
            return
        path = "a container or a variable"
        for value in values:
            if isinstance(value, torch.Tensor):
                watched.append((path, value))
            elif needs_a_look(type(value)) and id(value) not in reach.seen and may_change(value):
                new.append((path, value))

    @property
    def why_never_again(self) -> str:
        """Why the forward pass since cannot be run again; empty if it can."""
        path = next((each.path for each, before in self._lost if each.read() != before), "")
        return path and (
            f"takes values from {path}, an iterator: recomputed, it would take others. Take the value outside of "
            "the block, and pass it, or name other blocks: memfit.checkpoint(..., blocks=[...])"
        )

    def end_of_forward(self, read: Set[int], wrote: Set[int]) -> str:
        """Note the tensors that the forward pass has written to, and free large copies of all others.

        Args:
            read, wrote: keys of storages that its operators read and wrote to; version counters miss `.data`.

        Returns:
            Why the forward pass cannot be run again, and what to do, as a clause; empty if it can.
        """
        reach = self._reach
        self._keep({id(tensor) for tensor, *_, storage in self._parameters if storage and key_of(tensor) != storage})
        self._before.clear()
        for each in self._buffers:
            where = id(each.table), each.key
            if each.is_statistic and each.storage in read:
                reach.is_read(where)
                del self._statistics[where]
                each.is_statistic = False
            if each.is_statistic:
                each.copy = None
            elif each.is_written or each.memory in wrote:
                reach.written.add(where)
            elif each.copy is not None and each.copy.nbytes > _LARGE_BYTES and where not in reach.written:
                each.copy = None
                self._digest(each.tensor)
        for each in self._buffers:
            if type(each.tensor) is torch.nn.Parameter:  # what is written from here on, PyTorch's own backward reads
                now = each.tensor._version, each.needs_gradient, key_of(each.tensor)
                self._parameters.append((each.tensor, *now))
        kept = {each.storage for each in self._buffers if each.copy is not None}
        self._copies = {key: storage for key, storage in self._copies.items() if key in kept}
        for tensor, *_ in self._parameters:
            self._digest(tensor)
        self._note_draws()
        return self.why_never_again

    def _key_of(self, tensor: torch.Tensor) -> str:
        pairs = [pair for table in self._own.values() for pair in table.items()]
        return next((key for key, value in pairs if value is tensor), "a tensor")

    def _digest(self, tensor: torch.Tensor) -> None:
        """Note a number by which it is seen in a lean pass that the loop has written to a tensor's `.data`.

        On a CPU alone: elsewhere the host would wait for the device.
        """
        if tensor.device.type != "cpu":
            return
        if is_plain_dense(tensor) and tensor.is_contiguous() and not is_freed(tensor) and self._reach.has_storages:
            self._digests.append((tensor, as_integers(tensor.detach()).sum()))

    def _note_draws(self) -> None:
        reach = self._reach
        changed = self._drawn.changed()
        if changed:
            reach.places = [*reach.places, *changed]
            reach.generators = [place for place in reach.generators if place not in changed]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the block run once more as if nothing had been changed since, and change nothing itself.

        Raises:
            UnsupportedStepError: a tensor was written to, of which there is no copy.
        """
        if self._copies_all:
            self._note_draws()
            for each in self._buffers:
                if each.is_written or _differs(each):
                    self._reach.written.add((id(each.table), each.key))
        self._require_there()
        try:
            with self._ambient.again(), self._held.again(), self._drawn.again(), self._flags_again():
                self._lay_out_copies()  # in the tables, which hold at the end what they do now
                yield
        finally:  # torch ends a second forward pass by an error, as soon as it has all that was saved
            for tensor, *_ in self._parameters:
                calls = _AWAITED.get(id(tensor), set())
                calls.discard(self)
                if not calls:
                    _AWAITED.pop(id(tensor), None)

    def _require_there(self) -> None:
        name = self._reach.name
        for path, tensor, version in self._given:
            if tensor._version != version:
                what = "given to it" if path is _GIVEN else f"that it reaches ({path})"
                raise UnsupportedStepError(
                    f"a tensor of shape {tuple(tensor.shape)} {what} was written to after block {name!r} began its "
                    "forward pass, and the block is recomputed from it for backward: write to it after backward, "
                    f"give the block a copy, x.clone(){OR_EAGER_MODE}"
                )
        if any(count._version != version for count, version in self._frozen):
            raise UnsupportedStepError(
                f"block {name!r} ran a batch normalization in evaluation, and another call has brought its running "
                "statistics up to date before backward: PyTorch's own backward pass reads the later ones, and a block "
                f"that is recomputed the earlier ones. Call backward before the statistics change{OR_EAGER_MODE}"
            )
        for each in self._buffers:
            if each.copy is None and each.is_written and not each.is_statistic:
                raise self._written(each.key)
        if self._is_overwritten:
            raise self._written("a parameter")
        for tensor, version, _, storage in self._parameters:
            if tensor._version != version or (storage and key_of(tensor) != storage):
                raise self._written(self._key_of(tensor))
        for tensor, digest in self._digests:
            if not torch.equal(as_integers(tensor.detach()).sum(), digest):
                raise self._written(self._key_of(tensor))
        if self.why_never_again:
            raise UnsupportedStepError(f"block {name!r} {self.why_never_again}{OR_EAGER_MODE}")

    def _written(self, key: str) -> UnsupportedStepError:
        return UnsupportedStepError(
            f"{key!r} of a module in block {self._reach.name!r} was written to, or was given other memory, by the "
            "block or by the loop, after the block began its forward pass, and it is recomputed for backward: "
            "write to it before the model is called or after backward, put a new tensor in its place, name other "
            f"blocks: memfit.checkpoint(..., blocks=[...]){OR_EAGER_MODE}"
        )

    @contextmanager
    def _flags_again(self) -> Iterator[None]:
        """Let leaves need a gradient that did, and others not."""
        changed = [(each, needs) for each, _, needs, _ in self._parameters if each.requires_grad != needs]
        changed = [pair for pair in changed if pair[0].is_leaf]
        for each, needs in changed:
            each.requires_grad_(needs)
        try:
            yield
        finally:
            for each, needs in changed:
                each.requires_grad_(not needs)

    def _lay_out_copies(self) -> None:
        """Let the tables hold buffers with the values that they had, and statistics that may be written to."""
        storages: dict[int, torch.UntypedStorage] = {}
        for each in self._buffers:
            if each.copy is not None and (each.is_written or not self._reach.is_compiled):
                each.table[each.key] = each.again(storages)
        for (_, key), table in self._statistics.items():
            buffer = table.get(key)
            if buffer is not None:
                table[key] = buffer.detach().clone()


def _is_most_of_its_storage(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a tensor may be copied for it: it is small, or holds little else."""
    return is_plain_dense(tensor) and tensor.untyped_storage().nbytes() <= max(_LARGE_BYTES, 2 * tensor.nbytes)


def _differs(each: _Buffer) -> bool:
    """Return whether a buffer on a CPU holds other values than its copy."""
    is_read = each.copy is not None and each.storage and each.copy.device.type == "cpu"
    return bool(is_read) and not torch.equal(each.copy, each.tensor)  # pyright: ignore[reportArgumentType]
