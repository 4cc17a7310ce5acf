"""The tables of a model's parameters and buffers during capture: fakes in them, what the step replaces, and back.

Python code runs once, at capture; later steps run the recorded ops alone. Fakes stand in the tables meanwhile.
Buffers that a step replaces, and tensors whose memory it replaces (`.data = ...`), are written back: eager's next
step reads the new tensor, or the new memory. A planned step keeps both, so that an op at the end of the backward pass
writes the new values into them; the optimizer updates a parameter after that. What else the step sets in Python is
found and reset by `memfit.capture.reads`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memfit.capture.gradient_use import GradientUse
from memfit.capture.trace import Trace
from memfit.errors import NoGraphError, UnsupportedStepError
from memfit.memory.place import Place
from memfit.torch_private.modules import module_tables, submodules_table
from memfit.torch_private.patching import replaced
from memfit.torch_private.tensors import BatchNormBase, is_fake, storage_key

Tables = tuple[tuple[dict[str, Any], dict[str, Any]], ...]
"""Tables of modules, each with a copy of what it held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The entry of a parameter or a buffer in its module's table.

    Attributes:
        module: dotted name of the module.
        table: the dictionary in which the module keeps it.
        name: its key there.
        tensor: the parameter or buffer itself.
    """

    module: str
    table: dict[str, torch.Tensor | None]
    name: str
    tensor: torch.Tensor

    @property
    def path(self) -> str:
        """The dotted name from the model down."""
        return f"{self.module}.{self.name}" if self.module else self.name


@contextmanager
def swapped(model: torch.nn.Module, fakes: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[list[Entry]]:
    """Replace the model's parameters and buffers by their fakes inside the block, and restore its tables at the end.

    Args:
        model: its modules' tables are written to.
        fakes: of each parameter and buffer of it; what has none stays in its place.
    """
    kept = tables_now(model)
    entries = [
        Entry(module=module_name, table=table, name=name, tensor=tensor)
        for module_name, module in model.named_modules()
        for table in module_tables(module)
        for name, tensor in table.items()
        if tensor is not None and tensor in fakes
    ]
    for entry in entries:
        entry.table[entry.name] = fakes[entry.tensor]
    try:
        yield entries
    finally:
        put_tables_back(kept)


def tables_now(model: torch.nn.Module) -> Tables:
    """Return the tables of parameters, buffers and modules of all of a model's modules, each with a copy of it."""
    tables = (each for module in model.modules() for each in (*module_tables(module), submodules_table(module)))
    return tuple((table, dict(table)) for table in tables)


def put_tables_back(kept: Tables) -> None:
    """Let tables that hold something else than their copies hold what these do, in their order."""
    for table, before in kept:
        if len(table) != len(before) or any(table.get(key, before) is not value for key, value in before.items()):
            table.clear()
            table.update(before)


@contextmanager
def with_a_momentum(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Give each batch normalization with momentum=None a momentum inside the block, so that it reads no number.

    It would compute the momentum from its count of steps, which is a fake there; the recorded op does so in each step.

    Returns:
        name of the module -> its count of steps, a fake.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, BatchNormBase) and module.momentum is None and module.num_batches_tracked is not None
    }
    for module in modules.values():
        module.momentum = 0.0
    try:
        yield {name: module.num_batches_tracked for name, module in modules.items()}
    finally:
        for module in modules.values():
            module.momentum = None


def write_replaced(
    entries: list[Entry],
    fakes: Mapping[torch.Tensor, torch.Tensor],
    memory: Mapping[torch.Tensor, torch.Tensor],
    trace: Trace,
    gradients: GradientUse,
) -> None:
    """Write the values of replaced buffers, and of tensors with replaced memory, to where the next step reads them.

    Args:
        entries: as `swapped` gives them, inside its block.
        fakes: as `swapped` was given them.
        memory: an alias of each fake from before the step, by the fake's tensor.
        trace: of the step, after its backward pass.
        gradients: tells which parameters were updated before.

    Raises:
        NoGraphError: a buffer gets another size.
        UnsupportedStepError: the values cannot be written there, or the step lets two tensors share memory.
    """
    with torch.no_grad():
        for fake, values in _values_of_replaced(entries, fakes):
            fake.copy_(values)
        shared = {storage_key(each) for each in memory.values()}
        for entry in _with_replaced_memory(entries, fakes, memory):
            fake, own = fakes[entry.tensor], memory[entry.tensor]
            if storage_key(fake) in shared or trace.storages[trace.value(fake).storage].resident:
                raise UnsupportedStepError(
                    f"the step lets {entry.path!r} share memory with another tensor (`.data = ...`), which a planned "
                    "step would not: copy the values (`.data.copy_(...)`), or do it between steps"
                )
            if gradients.is_updated_early(fake):
                raise UnsupportedStepError(
                    f"the step replaces the values of {entry.path!r} in backward (`.data = ...`), and a planned step "
                    "may have updated it by then: replace them in forward, or after the step"
                )
            own.copy_(fake)
            shared.add(storage_key(fake))
            fake.data = own


def entries_of_model(model: torch.nn.Module) -> dict[torch.nn.Module, set[tuple[int, str]]]:
    """Return for each module of a model the parameters and buffers that it has, as (id of the table, name)."""
    return {
        module: {
            (id(table), name) for table in module_tables(module) for name, each in table.items() if each is not None
        }
        for module in model.modules()
    }


def require_none_made(model: torch.nn.Module, known: Mapping[torch.nn.Module, set[tuple[int, str]]]) -> None:
    """Refuse a step that gives the model a parameter, buffer or module that it had not: later steps would find none.

    Args:
        model: with what the step has put into it.
        known: as `entries_of_model` gave it before the step.

    Raises:
        NoGraphError: a parameter or buffer; names it.
        UnsupportedStepError: a module, whose parameters no optimizer has; names it.
    """
    require_no_module_made(model, known)
    for module_name, module in model.named_modules():
        for table in module_tables(module) if module in known else ():
            for name, tensor in table.items():
                if tensor is not None and is_fake(tensor) and (id(table), name) not in known[module]:
                    path = f"{module_name}.{name}" if module_name else name
                    raise NoGraphError(
                        f"the step makes {path!r} of shape {tuple(tensor.shape)}, which the model had not before, and "
                        "a planned step runs no Python",
                        "register it before memfit.fit, at its largest size, or run one eager forward first",
                    )


def require_no_module_made(model: torch.nn.Module, known: Collection[torch.nn.Module]) -> None:
    """Refuse a step that gives the model a module with parameters or buffers that it had not.

    Args:
        model: with what the step has put into it.
        known: its modules before the step.

    Raises:
        UnsupportedStepError: names the module, whose parameters no optimizer has.
    """
    for name, module in model.named_modules():
        if module not in known and any(map(any, module_tables(module))):
            raise UnsupportedStepError(
                f"the step makes the module {name!r}, which the model had not before, and whose parameters the "
                "optimizer does not have: make it before memfit.fit, or run one eager forward first"
            )


def _replaced(entries: list[Entry], fakes: Mapping[torch.Tensor, torch.Tensor]) -> list[tuple[Entry, torch.Tensor]]:
    """Return the entries whose tensor the step replaced, each with the new tensor.

    Args:
        entries: as `swapped` gives them, inside its block.
        fakes: as `swapped` was given them.

    Raises:
        NoGraphError: the new tensor cannot be written into the old one.
    """
    found: list[tuple[Entry, torch.Tensor]] = []
    for entry in entries:
        before, after = fakes[entry.tensor], entry.table.get(entry.name)
        if after is before:
            continue
        like_before = after is not None and after.shape == before.shape and after.dtype == before.dtype
        if not like_before or isinstance(entry.tensor, torch.nn.Parameter):
            now = "nothing" if after is None else f"a tensor of shape {tuple(after.shape)} and {after.dtype}"
            raise NoGraphError(
                f"the step replaces {entry.path!r}, of shape {tuple(before.shape)} and {before.dtype}, by {now}, and "
                "a planned step keeps parameters, and the sizes of buffers",
                "write into it in place, or replace it between steps",
            )
        assert after is not None
        found.append((entry, after))
    return found


def _values_of_replaced(
    entries: list[Entry], fakes: Mapping[torch.Tensor, torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the fake of each buffer that the step replaced, with its new values: copies, if they are another buffer's.

    Args:
        entries, fakes: as `_replaced` takes them.

    Raises:
        UnsupportedStepError: the new tensor cannot be written into the old one, or is a tensor of the model that
            stays in its place.
    """
    found = _replaced(entries, fakes)
    written = {storage_key(fakes[entry.tensor]) for entry, _ in found}
    for entry, after in found:
        for other in entries:
            if other.table.get(other.name) is fakes[other.tensor] and fakes[other.tensor] is after:
                raise UnsupportedStepError(
                    f"the step lets {entry.path!r} be the tensor {other.path!r}, and a planned step would keep two: "
                    "assign a clone, or do it between steps"
                )
    return [(fakes[entry.tensor], after.clone() if storage_key(after) in written else after) for entry, after in found]


def _with_replaced_memory(
    entries: list[Entry], fakes: Mapping[torch.Tensor, torch.Tensor], memory: Mapping[torch.Tensor, torch.Tensor]
) -> list[Entry]:
    """Return the entries of tensors that the step has given other memory, by `tensor.data = ...`, each tensor once.

    Args:
        entries: as `swapped` gives them, inside its block.
        fakes: as `swapped` was given them.
        memory: of each fake's memory as it was before the step, by the fake's tensor.

    Raises:
        UnsupportedStepError: the new values cannot be written into the old memory.
    """
    found: dict[torch.Tensor, Entry] = {}
    for entry in entries:
        before, after = memory[entry.tensor], fakes[entry.tensor]
        if _place(after) == _place(before):
            continue
        is_alike = (after.shape, after.stride(), after.dtype) == (before.shape, before.stride(), before.dtype)
        if storage_key(after) == storage_key(before) or not is_alike:
            raise UnsupportedStepError(
                f"the step changes the shape, strides, dtype or place in memory of {entry.path!r} (`.data = ...`) from "
                f"{tuple(before.shape)} and {before.dtype} to {tuple(after.shape)} and {after.dtype}, which a planned "
                "step would not: do it between steps"
            )
        found.setdefault(entry.tensor, entry)
    return list(found.values())


@contextmanager
def memory_kept_real() -> Iterator[None]:
    """Refuse `.data = ...` inside the block where a real tensor would be given a fake's memory, which ends its own.

    Raises:
        UnsupportedStepError: gives the tensor's shape.
    """
    own: Any = torch.Tensor.data

    def replace(tensor: torch.Tensor, values: torch.Tensor) -> None:
        if is_fake(values) and not is_fake(tensor):
            raise UnsupportedStepError(
                f"the step replaces the values of a tensor of shape {tuple(tensor.shape)} that is no parameter or "
                "buffer of the model (`.data = ...`), and a planned step would not: write in place "
                "(`.data.copy_(...)`), or put it into a module that holds the model too"
            )
        own.__set__(tensor, values)

    with replaced(torch.Tensor, "data", property(own.__get__, replace)):
        yield


@contextmanager
def memory_put_back(model: torch.nn.Module) -> Iterator[None]:
    """Give each parameter and buffer the memory that it has now at the end of the block, where a step replaces it.

    Args:
        model: whose tensors are meant.
    """
    kept = [(tensor, tensor.detach()) for tensor in (*model.parameters(), *model.buffers())]
    try:
        yield
    finally:
        for tensor, before in kept:
            if _place(tensor) != _place(before):
                tensor.data = before


def _place(tensor: torch.Tensor) -> Place:
    return Place.of(tensor, storage_key(tensor))
