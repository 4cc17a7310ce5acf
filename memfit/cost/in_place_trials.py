"""Trials of forms of calls that write over an input: whether this device gives the bits of the plain call.

Torch's schemas promise the same result for pointwise operators only. Other forms (`InPlaceForm.promised` is False: the
softmax family) are run on inputs of the call's own shapes, strides and dtype, and compared bit by bit.
"""

from __future__ import annotations

import torch

from memfit.binding import Call, values_in
from memfit.cost.op_inputs import InputMaker
from memfit.graph import Storage
from memfit.memory.place import bytes_of
from memfit.torch_private.tensors import tensors_in

RUNS = 3  # a result that depends on the order of threads differs between runs


def forms_to_try(call: Call) -> dict[int, int]:
    """Return the storages that an unpromised form of `call` writes over, each with its position among the tensors that
    the call takes: equal calls share the positions, not the storages.
    """
    places = {value.storage: place for place, value in enumerate(values_in((call.args, call.kwargs)))}
    return {read: places[read] for read, form in call.in_place_forms.items() if not form.promised}


def gives_same_bits(call: Call, read: int, inputs: InputMaker, storages: tuple[Storage, ...], runs: int = RUNS) -> bool:
    """Return whether the form of `call` that writes over storage `read` gives the bits of the plain call, every time.

    The trial takes the memory of the call's inputs and result, as measuring the call does. A kernel that refuses to
    write over its input gives False.

    Args:
        call: a call that has such a form.
        read: id of the storage that is written over.
        inputs: makes the inputs, equal ones for each run.
        storages: those of the graph.
        runs: how many are compared with the plain call's.
    """
    form = call.in_place_forms[read]
    place = next(n for n, value in enumerate(values_in((call.args, call.kwargs))) if value.storage == read)
    args, kwargs = inputs.make(call, storages)
    expected = call.target(*args, **kwargs)
    del args, kwargs
    for _ in range(runs):
        args, kwargs = inputs.make(call, storages)
        over = tensors_in((args, kwargs))[place]
        try:
            returned = form.target(*args, **kwargs, **dict.fromkeys(form.extra, over))
        except RuntimeError:
            return False
        if returned.untyped_storage().data_ptr() != over.untyped_storage().data_ptr():
            return False
        if not torch.equal(bytes_of(returned), bytes_of(expected)):
            return False
        del args, kwargs, over, returned
    return True
