"""What eager mode has to know of an operator: looked up once, then read at each call."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import suppress
from typing import Any

import torch

from memfit.capture.batch_norms import BATCH_NORMS, updated_places
from memfit.capture.functionalize import is_cast_inside
from memfit.capture.lines import calling_line
from memfit.capture.traced import mutated_tensors
from memfit.capture.under_modes import UnderModes, is_looked_at, vectors_in
from memfit.eager_mode.needs import Need, key_of
from memfit.eager_mode.sources import tensors_given
from memfit.errors import UnsupportedStepError
from memfit.torch_private.tensors import PLAIN_TYPES, SHORTENS, StorageWeakRef, bare_overload, is_zero_tensor

VIEW, PLAIN, WRITES, DATA_DECIDES, FOREIGN, ONCE = range(6)
"""Kinds of operators: those that move no data; that write to their arguments; whose results have sizes that depend on
data; that memfit does not know; whose results contain arbitrary bytes that differ in each run, that restore gathered
parameters, or that are given code; and all others (PLAIN)."""

_aten = torch.ops.aten
_LIFTED = _aten.lift_fresh.default
_HIDDEN_STATE = (
    _aten._cudnn_rnn,
    _aten.miopen_rnn,
    _aten.batch_norm_gather_stats,
    _aten.batch_norm_gather_stats_with_counts,
)
_PADDED = (_aten.mkldnn_rnn_layer, _aten._ctc_loss)  # parts of what they save for backward are never written
_FULLY_SHARDED = "fsdp"  # the namespace of what `fully_shard` calls
_MOST_NEEDS = 1 << 13  # of an operator that are remembered: the shapes of some loops never repeat


class _WithCode:
    """An operator that is given code (flex attention, `torch.cond`): what it calls is not seen."""

    tags: frozenset[torch.Tag] = frozenset()
    overloadpacket = _overloadpacket = None

    def __init__(self, function: Any) -> None:
        self.function = function

    def __str__(self) -> str:
        return str(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class Operator:
    """An operator overload, or an operator that is given code.

    Attributes:
        function: the overload.
        kind: VIEW, PLAIN, WRITES, DATA_DECIDES, FOREIGN or ONCE.
        draws: whether it draws random numbers.
        is_looked_at: whether PyTorch may compute it otherwise under a mode.
        is_free: whether it is a view, and takes no memory.
        is_cast: whether it has to be called inside of autocast if the code is there.
        may_write: whether it may write to tensors.
    """

    __slots__ = (
        "_has_statistics",
        "_needs",
        "draws",
        "function",
        "is_cast",
        "is_free",
        "is_looked_at",
        "kind",
        "may_write",
    )

    def __init__(self, function: Any) -> None:
        if bare_overload(function) is None:
            function = _WithCode(function)
        self.function, self.kind = function, _kind(function)
        self.draws = torch.Tag.nondeterministic_seeded in function.tags
        self.is_looked_at = is_looked_at(function)
        takes_unseen = function is _LIFTED or torch.Tag.inplace_view in function.tags
        self.is_free, self.is_cast = self.kind == VIEW and not takes_unseen, is_cast_inside(function)
        self._has_statistics = function._overloadpacket in BATCH_NORMS
        self.may_write = self.kind in (WRITES, FOREIGN) or self._has_statistics
        self._needs: dict[Hashable, Need] = {}

    def need(self, args: Any, kwargs: Any) -> Need | None:
        """Return what a call takes, if there was one like it.

        Args:
            args, kwargs: of the call; shapes, dtypes and numbers count.
        """
        try:
            return self._needs.get(key_of(args, kwargs))
        except (TypeError, RuntimeError):  # an argument that has no hash, or a tensor that has no shape
            return None

    def learn(self, args: Any, kwargs: Any, need: Need) -> None:
        """Remember what a call took, for those that are like it.

        Args:
            args, kwargs: of the call.
            need: bytes and seconds that were measured.
        """
        if self.kind == DATA_DECIDES:
            return
        with suppress(TypeError, RuntimeError):
            self._needs[key_of(args, kwargs)] = need
        if len(self._needs) > _MOST_NEEDS:
            del self._needs[next(iter(self._needs))]

    def written(self, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Return the dense tensors that a call writes to, those included that its schema hides.

        Args:
            args, kwargs: of the call.
        """
        function = self.function
        if self.kind == WRITES:
            found = mutated_tensors(function, args, kwargs)
        elif self.kind == FOREIGN:
            found = tensors_given((args, kwargs))
        else:
            found = [args[place] for place in updated_places(function, args)]
        return [tensor for tensor in found if is_dense(tensor)]

    def read_again(self, args: Any) -> Any:
        """Return the arguments as the call is remade with: without the running statistics of a batch normalization in
        training, which it does not read, and must not update again."""
        if not self._has_statistics:
            return args
        updated = updated_places(self.function, args)
        return [None if place in updated else arg for place, arg in enumerate(args)]


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a storage of its own that can be freed and recomputed."""
    is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and not is_zero_tensor(tensor)


class Unread:
    """Decompositions without gradient whose vectors nobody may read: the bare loop would not compute them.

    It would then compute other singular values and eigenvalues. Who reads the vectors holds them after the call.
    """

    def __init__(self) -> None:
        self._line = ""
        self._vectors: list[StorageWeakRef] = []

    def expect(self, func: Any, args: Any) -> bool:
        """Look at a call before it is made, and return whether `note` is to be given what it returns.

        Raises:
            UnsupportedStepError: its gradient is computed in another way than in the bare loop; names the line.
        """
        found, self._line = UnderModes(), calling_line()
        found.look_at(func, args, 0, self._line)
        return bool(found.decomposed)

    def note(self, func: Any, returned: Any) -> None:
        """Remember the vectors that a call has returned.

        Args:
            func: the operator, which says where its vectors stand.
            returned: by it; only weak references to storages are kept.
        """
        self._vectors = [StorageWeakRef(each.untyped_storage()) for each in vectors_in(func, returned)]

    def require_read(self) -> None:
        """Refuse the last decomposition if its vectors are gone.

        Raises:
            UnsupportedStepError: names the line.
        """
        if not self._vectors:
            return
        vectors, self._vectors = self._vectors, []
        if all(each.expired() for each in vectors):
            raise UnsupportedStepError(
                f"{self._line}: PyTorch computes singular values and eigenvalues of a tensor without gradient, of "
                "which nobody reads the vectors, differently in eager mode (svdvals, eigvalsh, cond, matrix norms): "
                "compute them outside of the block, or keep what torch.linalg.eigh or svd returns beside them"
            )


def _kind(func: Any) -> int:
    if isinstance(func, _WithCode):
        return ONCE
    schema = func._schema
    if func.namespace == "profiler":  # a label of the optimizer's step, or the user's
        return VIEW
    if func.namespace == _FULLY_SHARDED:
        return ONCE
    if func.namespace not in ("aten", "prims") or func.overloadpacket in _HIDDEN_STATE:
        return FOREIGN
    if torch.Tag.inplace_view in func.tags:
        return VIEW
    if schema.is_mutable:
        return WRITES
    if schema.returns and all(returned.alias_info is not None for returned in schema.returns):
        return VIEW
    if func.overloadpacket in _PADDED:
        return ONCE
    if torch.Tag.dynamic_output_shape in func.tags or func.overloadpacket in SHORTENS:
        return DATA_DECIDES
    return PLAIN
