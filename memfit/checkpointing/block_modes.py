"""What the forward pass of one call of a block does: its operators, the storages they make, what autograd saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from memfit.capture.functionalize import as_cast
from memfit.capture.traced import given_to_write
from memfit.checkpointing.seen import CACHED_CAST, NEVER, CallSeen, OpSeen, SpanSeen, StorageSeen
from memfit.cost.stopwatch import Stopwatch
from memfit.system.recorder import taken_bytes
from memfit.torch_private.autograd import UnwrappedMode, default_saved_hooks, in_backward, no_modes, saved_with
from memfit.torch_private.checkpoints import IGNORED_OPS, detached, is_cached_cast, schema_of
from memfit.torch_private.ranks import groups_inside, groups_of, groups_talked_to
from memfit.torch_private.sharding import is_sharded, key_of, local
from memfit.torch_private.tensors import StorageWeakRef, draws, is_of_array, tensors_in

if TYPE_CHECKING:
    from memfit.checkpointing.recording import LeanRecorder

_LIFTED = torch.ops.aten.lift_fresh.default
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")
_OF_RANKS = (*_COLLECTIVES, "fsdp")  # write to memory of their own


class BlockMode(UnwrappedMode):
    """Notes the operators of a block's forward pass, the storages that they make, and what autograd saves.

    Attributes:
        read: keys of the model's own storages that operators read, other than those that only bring statistics of
            batch normalization up to date.
        wrote: keys of all storages that operators write to, or may write to in other passes.
        calls_compiled: whether compiled code was called, whose operators are not seen.
        before_write: called with the keys of the model's own storages that an operator is about to write to.

    Args:
        recorder: of the pass.
        number: of the call in the pass.
        call: takes what is noted.
        given: tensors that the call was given.
    """

    def __init__(self, recorder: LeanRecorder, number: int, call: CallSeen, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.number, self.call = number, call
        self.of: dict[int, int] = {}
        self._recorder = recorder
        self._given = {key_of(tensor) for tensor in given}
        self.read, self.wrote = set[int](), set[int]()
        self._made_beside: list[tuple[int, set[int]]] = []  # storages, with what of the model was written beside them
        self._unsaved: dict[int, int] = {}  # key -> bytes, of what autograd has not saved
        self._nth: Counter[str] = Counter()
        self._alive: list[tuple[int, StorageWeakRef]] = []
        self._moment = 0
        self._hooks: Any = None
        self.calls_compiled = False
        self.before_write: Callable[[set[int]], None] = _nothing

    def __enter__(self) -> BlockMode:
        pack, unpack = default_saved_hooks() or (detached, _same)  # the checkpoint's own
        if self.call.is_kept:
            pack, unpack = self._told(pack, unpack)

        @wraps(pack)  # keeps `__module__`, by which a user's own hooks are recognized
        def note(tensor: torch.Tensor) -> Any:
            moment = self._tick()
            self.call.saves.append(moment)
            storage = self._saved(tensor)
            if storage is not None:
                self.call.storages[storage].saves.append(moment)
                self.call.storages[storage].unsaved_bytes -= self._unsaved.pop(key_of(tensor), 0)
            with no_modes():  # hooks of the user's may call operators
                return pack(tensor)

        self._hooks = saved_with(self._as_hook(note), unpack)
        self._hooks.__enter__()
        self._begin()
        return self

    def _as_hook(self, note: Callable[..., Any]) -> Callable[..., Any]:
        return note

    def _begin(self) -> None:
        self._recorder.inside = self
        super().__enter__()

    def _end(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._recorder.inside = None

    def compiled_code_begins(self) -> None:
        """Let the block be looked at anew, as one that is compiled."""
        self.calls_compiled = self._recorder.is_incomplete = True

    def noting_groups(self) -> AbstractContextManager[Any]:
        """Return the context of what a plan may repeat: the second forward pass, or the first one of a kept call."""
        return nullcontext()

    def _saved(self, tensor: torch.Tensor) -> int | None:
        """Return the block's storage of a tensor that autograd saves; None if it is not the block's."""
        return self.of.get(key_of(tensor))

    def __exit__(self, *raised: Any) -> None:
        self._end(*raised)
        self._hooks.__exit__(*raised)
        self._hooks = None  # a cycle would hold the frame, and with it the block's inputs

    def _told(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> tuple[Any, Any]:
        """Return hooks that say when the backward pass comes to what was saved."""
        recorder, number = self._recorder, self.number

        def told(packed: Any) -> Any:
            recorder.again(number)
            return unpack(packed)

        return pack, told

    @contextmanager
    def span(self, name: str, args: Any, kwargs: Any) -> Any:
        """Note the call of a module inside the block that runs in the context.

        Args:
            name: of the module, in the model.
            args, kwargs: of the call; those of their tensors count whose storages the block has made.
        """
        given = {self.of.get(key_of(tensor)) for tensor in tensors_in((args, kwargs))} - {None}
        first = self._tick()
        yield
        self.call.spans.append(SpanSeen(name=name, first=first, last=self._tick(), given=frozenset(given)))  # pyright: ignore

    def end_of_forward(self) -> None:
        """Let what is made beside a write to a tensor of the model that the block reads be recomputed, always."""
        for storage, written in self._made_beside:
            if written & self.read:
                self._compute_always(storage)

    def _compute_always(self, storage: int) -> None:
        self.call.storages[storage].first_read, self.call.storages[storage].last_write = 0, NEVER

    def _tick(self) -> int:
        self._moment += 1
        return self._moment

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in IGNORED_OPS:
            return func(*args, **kwargs)
        self.call.differentiates |= in_backward()
        given = {key_of(tensor) for tensor in tensors_in((args, kwargs))}
        if func is _LIFTED and not is_of_array(args[0]):  # made of numbers in the block
            given = set[int]()
        written = self._written(func, args, kwargs)
        running, is_training = _running(func, args, kwargs)
        self.wrote |= written | running
        self.before_write(written & self._recorder.own)
        updated = running if is_training else set[int]()
        self.read |= (given - updated) & self._recorder.own
        moment = self._tick()
        watch = Stopwatch(self._recorder.device)
        with groups_inside(func, self._recorder.device) as groups:
            returned = as_cast(func, args, self.has_autocast)(*args, **kwargs)
        watch.stop()
        storage = self._storage_of(returned, given, written)
        beside = (written | updated) & self._recorder.own
        if storage is not None and beside:
            self._made_beside.append((storage, beside))
        touched = {storage, *(self.of.get(key) for key in written)} - {None}
        if len(touched) > 1:  # one kept without the other would lack what the call writes, or have it twice
            self._refuse_early_saves(func, written)
            for each in touched:
                self._compute_always(each)  # pyright: ignore[reportArgumentType]
        for key in given:
            read = self.of.get(key)
            if read is not None and read != storage:
                self.call.storages[read].first_read = min(self.call.storages[read].first_read, len(self.call.ops))
        name = CACHED_CAST if is_cached_cast(func, args, kwargs) else str(func)
        if name == CACHED_CAST and storage is not None:
            self._compute_always(storage)
        self._recorder.overloads[name] = func
        tensors = tensors_in((args, kwargs))
        if groups or func.namespace in _COLLECTIVES or any(map(is_sharded, tensors)):
            self.call.has_collectives = True
            self._recorder.note_groups(groups or groups_of(func, args, kwargs, tensors))
        does_draw = draws(func, args, kwargs)
        op = OpSeen(name=name, nth=self._nth[name], storage=storage, seconds=0.0, draws=does_draw, moment=moment)
        self._recorder.time(op, watch)
        self._note_dropped()
        self.call.ops.append(op)
        self._nth[name] += 1
        return returned

    def _refuse_early_saves(self, func: Any, written: set[int]) -> None:
        """Refuse a call that writes to what autograd has saved for it: torch's checkpoints may end before the write."""
        before = self.call.ops[-1].moment if self.call.ops else 0
        own = (self.call.storages[self.of[key]] for key in written if key in self.of)
        if any(storage.saves and storage.saves[-1] > before for storage in own):
            self._recorder.refuse(
                self.call,
                f"block {self.call.block!r} calls {func}, of which autograd saves a tensor before it is written "
                "(as the noise of torch.nn.RReLU), and torch's checkpoints may stop there: take another operator, or "
                f"name other blocks: memfit.checkpoint(..., blocks=[...]) without {self.call.block!r}",
            )

    def _note_dropped(self) -> None:
        """Note which of the block's storages are gone after the operator that was called."""
        number = len(self.call.ops)
        for storage, reference in self._alive:
            if reference.expired():
                self.call.storages[storage].dropped = number
        self._alive = [each for each in self._alive if not each[1].expired()]

    def _written(self, func: Any, args: Any, kwargs: Any) -> set[int]:
        """Return the keys of the storages that a call writes to; those from outside of the block are refused."""
        schema = schema_of(func)
        if not schema.is_mutable or func.namespace in _OF_RANKS:
            return set()
        written = {key_of(tensor) for tensor in tensors_in(given_to_write(schema, args, kwargs))}
        foreign = {key for key in written if key not in self.of and key not in self._recorder.own}
        if foreign:
            whose = "its input" if foreign & self._given else "a tensor from outside of it"
            self._recorder.refuse(
                self.call,
                f"block {self.call.block!r} writes to {whose} ({func}): recomputed, it would read what it wrote. "
                "Write a new tensor there (relu in the place of relu_, x = x + y in the place of x += y), or name "
                f"other blocks: memfit.checkpoint(..., blocks=[...]) without {self.call.block!r}",
            )
        return written

    def _storage_of(self, returned: Any, given: set[int], written: set[int]) -> int | None:
        """Return the block's storage that a call makes, views, or writes to; what one call makes is one."""
        storages, number = self.call.storages, len(self.call.ops)
        made: int | None = None
        for tensor in tensors_in(returned):
            key = key_of(tensor)
            if key in given or not key:
                continue
            if made is None:
                made = len(storages)
                storages.append(StorageSeen(size_bytes=0, last_write=number, made=number))
            if self.of.get(key) != made:
                storage = local(tensor).untyped_storage()
                size_bytes = taken_bytes(storage.nbytes(), self._recorder.device)
                storages[made].size_bytes += size_bytes
                storages[made].unsaved_bytes += size_bytes
                self._unsaved[key] = size_bytes
                self._alive.append((made, StorageWeakRef(storage)))
            self.of[key] = made
        for key in written:
            if key in self.of:
                storages[self.of[key]].last_write = number
        if made is not None:
            return made
        touched = [self.of[key] for key in (*written, *map(key_of, tensors_in(returned))) if key in self.of]
        return touched[0] if touched else None


class CompiledMode(BlockMode):
    """As BlockMode, of a block that is compiled: its operators, which would then run one by one, are one.

    Storages are those that autograd saves, which were not given to the block and are not the model's.
    """

    def _begin(self) -> None:
        self._op = OpSeen(name="compiled", nth=0, storage=None, seconds=0.0, draws=False, moment=self._tick())
        self.call.ops.append(self._op)
        self._seen: dict[int, StorageWeakRef] = {}  # by key
        self._watch = Stopwatch(self._recorder.device)

    def _end(self, *raised: Any) -> None:  # noqa: ARG002
        self._watch.stop()
        self._recorder.time(self._op, self._watch)

    def _as_hook(self, note: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compiler.disable(note)  # or it would be compiled, too, where the block breaks into several graphs

    def end_of_forward(self) -> None:
        """Forget the places of what is gone, which the outputs may have."""
        self.of = {key: storage for key, storage in self.of.items() if not self._seen[key].expired()}

    @contextmanager
    def noting_groups(self) -> Iterator[None]:
        """Note the collectives of compiled code, and not those by which `fully_shard` gathers before it."""
        groups = list[Any]()
        try:
            with groups_talked_to(self._recorder.device) as groups:
                yield
        finally:
            self.call.has_collectives |= bool(groups)
            self._recorder.note_groups(groups)

    def _saved(self, tensor: torch.Tensor) -> int | None:
        key = key_of(tensor)
        if not key or key in self._given or key in self._recorder.own:
            return None
        if key not in self._seen or self._seen[key].expired():  # else its place may be that of one that is gone
            storage = local(tensor).untyped_storage()
            size_bytes = taken_bytes(storage.nbytes(), self._recorder.device)
            self.of[key], self._seen[key] = len(self.call.storages), StorageWeakRef(storage)
            self.call.storages.append(StorageSeen(size_bytes=size_bytes, last_write=0, dropped=0))
        return self.of[key]


def _running(func: Any, args: Any, kwargs: Any) -> tuple[set[int], bool]:
    """Return the keys of running statistics of batch normalization, and of the number of its batches.

    PyTorch does not count the kernel's writes to them, so that it is not seen in which passes it writes.

    Returns:
        The keys, and whether it brings them up to date and does not read them for its results, as in training.
    """
    schema = schema_of(func)
    if schema.name == "aten::add_":
        return (set() if isinstance(args[1], torch.Tensor) else {key_of(args[0])}), True
    if "batch_norm" not in schema.name or "backward" in schema.name:
        return set(), False
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    keys = {key_of(each) for name, each in given.items() if name.startswith("running_") and each is not None}
    return keys, bool(given.get("training", given.get("train", True)))


def _nothing(_: Any) -> None:
    pass


def _same(value: Any) -> Any:
    return value
