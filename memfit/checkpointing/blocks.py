"""Blocks of a model: the modules that are checkpointed whole or in part, found or named."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Sequence

import torch

from memfit.capture.step_check import require_module
from memfit.errors import EAGER_MODE, InvalidOptionError, InvalidTargetError, UnsupportedStepError
from memfit.torch_private.modules import is_compiled

Named = tuple[str, torch.nn.Module]
NO_BLOCKS = (
    "no blocks of the model were found that can be recomputed: name them, as memfit.checkpoint(..., "
    f"blocks=['encoder.layers.*', 'decoder.*']), or use {EAGER_MODE}, which needs none"
)
_LEAST_MEMBERS = 2
_MOST_NAMED = 8  # in a message
_LEAST_PIECES = 2


def together(models: object, chunk_loss: bool | str) -> torch.nn.Module:
    """Return the models of one loop as the parts of one, whose blocks' calls are seen.

    Args:
        models: a list of modules, or what was given in its place.
        chunk_loss: as `memfit.checkpoint` has it.

    Raises:
        InvalidTargetError: no list of modules.
        UnsupportedStepError: one is compiled as a whole, or the loss is to be chunked.
    """
    if isinstance(models, list | tuple) and not models:
        raise InvalidTargetError(
            "memfit.checkpoint: the list of models is empty; give the modules that the loop trains"
        )
    parts = list(models) if isinstance(models, list | tuple) else [models]
    for each in parts:
        require_module(each, "memfit.checkpoint")
    if chunk_loss or any(map(is_compiled, parts)):
        raise UnsupportedStepError(
            "memfit.checkpoint: several models in one call can be neither compiled as a whole nor have chunk_loss: "
            "compile their blocks by themselves, and leave chunk_loss out, or call memfit.checkpoint for each model"
        )
    return torch.nn.ModuleList(parts)


def find_blocks(model: torch.nn.Module, patterns: Sequence[str] | None = None) -> list[Named]:
    """Return the blocks of a model by name, none of them inside of another.

        >>> import torch
        >>> layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()) for _ in range(3)]
        >>> [name for name, _ in find_blocks(torch.nn.Sequential(*layers, torch.nn.Linear(4, 2)))]
        ['0', '1', '2']

    They are, what is found first: layers that transformers checkpoints; modules of the classes in `_no_split_modules`,
    which nobody divides; members of lists, dictionaries and sequences that are of one class; the model's children with
    parameters, of which sequences of single layers are divided.

    Args:
        model: any module; of a ModuleList the blocks of each member.
        patterns: of names, with `*`, in the place of what is found.

    Returns:
        Name and module of each; nothing for a model of one layer, or of parameters alone.

    Raises:
        InvalidOptionError: a pattern that names nothing.
    """
    named = _inside(model)
    if patterns is not None:
        return outermost(_matching(named, patterns))
    if type(model) is torch.nn.ModuleList:  # which nobody calls, as it has no forward: models of one loop
        found = [(f"{n}.{name}", block) for n, part in enumerate(model) for name, block in find_blocks(part)]
        return list({id(block): (name, block) for name, block in reversed(found)}.values())[::-1]  # they may share some
    return outermost(_found(model, named))


def find_rest(model: torch.nn.Module, blocks: Sequence[Named]) -> list[Named]:
    """Return the modules beside the blocks that have modules inside: a stem, embeddings, a head of several layers.

        >>> import torch
        >>> from torch.nn import Linear, ReLU, Sequential
        >>> layers = Sequential(*[Sequential(Linear(4, 4), ReLU()) for _ in range(2)])
        >>> model = Sequential(Sequential(Linear(4, 4), ReLU()), layers, Linear(4, 2))
        >>> [name for name, _ in find_rest(model, find_blocks(model))]
        ['0']

    Args:
        model: any module.
        blocks: that were found in it.
    """
    own = {id(module) for _, block in blocks for module in block.modules()}
    around = {id(module) for module in model.modules() if any(id(inner) in own for inner in module.modules())} - own
    found: list[Named] = []

    def look(name: str, module: torch.nn.Module) -> None:
        for key, child in module.named_children():
            inner = f"{name}.{key}".lstrip(".")
            if id(child) in around or isinstance(child, (torch.nn.ModuleList, torch.nn.ModuleDict)):
                look(inner, child)
            elif id(child) not in own and any(True for _ in child.children()):
                found.append((inner, child))

    look("", model)
    return outermost(found)


def find_all(model: torch.nn.Module, patterns: Sequence[str] | None = None) -> tuple[list[Named], list[Named]]:
    """Return the blocks of a model, and the modules beside them, which are none where blocks are named.

    Args:
        model: any module.
        patterns: see `find_blocks`.

    Raises:
        InvalidOptionError: see `find_blocks`.
    """
    blocks = find_blocks(model, patterns)
    return blocks, find_rest(model, blocks) if patterns is None else []


def _found(model: torch.nn.Module, named: Sequence[Named]) -> list[Named]:
    layers = [pair for pair in named if is_layer(pair[1]) or is_wrapper(pair[1])]
    if layers:
        return layers
    undivided = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    layers = [pair for pair in named if type(pair[1]).__name__ in undivided]
    if layers:
        return layers
    members = [member for name, module in [("", model), *named] for member in _equal_members(name, module)]
    if members:
        return members
    pieces: list[Named] = [*pieces_of("", model)]
    if pieces:
        return pieces
    children = [pair for pair in model.named_children() if any(True for _ in pair[1].parameters())]
    children = [found for pair in children for found in (pieces_of(*pair) or [pair])]
    if len(children) >= _LEAST_MEMBERS:
        return children
    if children and any(True for _ in children[0][1].children()):
        name, child = children[0]
        return [(f"{name}.{inner}", module) for inner, module in _found(child, _inside(child))]
    return []


class Piece(torch.nn.Sequential):
    """Members of a sequence in a row, which stay members of the sequence alone.

    Args:
        whole: the sequence.
        members: of it.
    """

    def __init__(self, whole: torch.nn.Sequential, members: Sequence[torch.nn.Module]) -> None:
        super().__init__(*members)
        vars(self)["whole"] = (whole,)  # no module of this one


def pieces_of(name: str, module: torch.nn.Module) -> list[tuple[str, Piece]]:
    """Return a sequence of single layers (VGG's, an MLP's) in pieces of two layers with matrices, and what follows.

        >>> from torch.nn import Linear, ReLU, Sequential
        >>> layers = [layer for _ in range(6) for layer in (Linear(4, 4), ReLU())]
        >>> [name for name, _ in pieces_of("net", Sequential(*layers))]
        ['net.0-3', 'net.4-7', 'net.8-11']

    Args:
        name: of the module.
        module: any; what is no such sequence has no pieces.
    """
    members = list(module.children())
    if not isinstance(module, torch.nn.Sequential) or type(module).forward is not torch.nn.Sequential.forward:
        return []
    begins = [place for place, each in enumerate(members) if any(p.dim() > 1 for p in each.parameters())][::2]
    if len(begins) < _LEAST_PIECES or any(True for member in members for _ in member.children()):
        return []
    places = [0, *begins[1:], len(members)]
    return [
        (f"{name}.{first}-{stop - 1}".lstrip("."), Piece(module, members[first:stop]))
        for first, stop in itertools.pairwise(places)
    ]


def _inside(module: torch.nn.Module) -> list[Named]:
    return [(name, inner) for name, inner in module.named_modules() if name]


def is_layer(module: torch.nn.Module) -> bool:
    """Return whether a module is a layer that transformers checkpoints."""
    return any(base.__name__ == "GradientCheckpointingLayer" for base in type(module).__mro__)


def is_wrapper(module: torch.nn.Module) -> bool:
    """Return whether a module is one that torch.distributed puts around what is checkpointed."""
    return type(module).__name__ == "CheckpointWrapper"


def _equal_members(name: str, module: torch.nn.Module) -> list[Named]:
    """Return the members of a list, dictionary or sequence whose class two of them have, with modules inside."""
    if not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)):
        return []
    members = [
        (f"{name}.{key}".lstrip("."), m) for key, m in module.named_children() if any(True for _ in m.children())
    ]
    if any(_equal_members(*member) for member in members):  # a sequence of stages: their own members are the blocks
        return []
    kinds = [type(member) for _, member in members]
    return [pair for pair in members if kinds.count(type(pair[1])) >= _LEAST_MEMBERS]


def _matching(named: Sequence[Named], patterns: Sequence[str]) -> list[Named]:
    if isinstance(patterns, str):
        raise InvalidOptionError(
            f"blocks is the text {patterns!r}, expected a list of names or patterns: [{patterns!r}]"
        )
    found: dict[str, torch.nn.Module] = {}
    for pattern in patterns:
        matched = {name: module for name, module in named if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            names = [name for name, _ in named if name]
            some = (
                f"{', '.join(names[:_MOST_NAMED])}{', ...' if len(names) > _MOST_NAMED else ''}" or "no modules inside"
            )
            raise InvalidOptionError(f"blocks: no module is named {pattern!r}; the model has {some}")
        found |= matched
    return [(name, module) for name, module in named if name in found]


def outermost(pairs: Iterable[Named]) -> list[Named]:
    """Return the modules that are inside of none of the others, each module once."""
    pairs = list(pairs)
    names = {name for name, _ in pairs}
    found: dict[int, Named] = {}
    for name, module in pairs:
        parts = name.split(".")
        if not any(".".join(parts[:depth]) in names for depth in range(1, len(parts))):
            found.setdefault(id(module), (name, module))
    return list(found.values())
