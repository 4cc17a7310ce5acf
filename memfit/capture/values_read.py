"""Values of tensors beside the model that a step's Python code reads as lists, arrays or texts.

What is made of them is frozen in the captured step: guards hold the tensors against later steps. Values of the batch,
of parameters and buffers, and of what the step computes are read from fakes, which break the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.capture.lines import calling_line
from memfit.errors import GraphBreakError, NoGraphError
from memfit.memory.bits import same_bits
from memfit.torch_private.tensors import is_fake, real_tensors, tensors_in

_Tensor: Any = torch.Tensor
_READERS = frozenset(
    getattr(_Tensor, name)
    for name in ("tolist", "numpy", "__array__", "__dlpack__", "__reduce_ex__", "__repr__", "__format__")
)
_NUMBERS = frozenset(  # which legacy constructors read beside the dispatcher
    getattr(_Tensor, name) for name in ("item", "__float__", "__int__", "__index__", "__bool__", "__complex__")
)
_MAKERS = frozenset((torch.tensor, torch.as_tensor, torch.asarray, _Tensor.new_tensor))
_WITHOUT_FAKES = frozenset((_Tensor.apply_, _Tensor.map_, _Tensor.map2_, _Tensor.__deepcopy__))


class ValuesRead(TorchFunctionMode):
    """Notes the real tensors whose values become Python's while a step runs on fakes.

    Attributes:
        tensors: those tensors, each once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._lines: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READERS and not is_fake(args[0]):
            self._note(args[0])
            with real_tensors():
                return func(*args, **kwargs)
        if func in _NUMBERS and not is_fake(args[0]):
            self._note(args[0])
        if func in _MAKERS:
            given = args[-1] if func is _Tensor.new_tensor else (args or (None,))[0]
            data = kwargs.get("data", kwargs.get("obj", given))
            if not isinstance(data, torch.Tensor):  # its items are read, beside the dispatcher
                for tensor in tensors_in(data):
                    self._note(tensor)
        if func in _WITHOUT_FAKES:  # torch does not say that fakes have no values
            line = calling_line()
            raise GraphBreakError(f"{line}: the step calls {func.__name__} of a tensor", line=line)
        return func(*args, **kwargs)

    def _note(self, tensor: torch.Tensor) -> None:
        line = calling_line()
        if is_fake(tensor):
            raise GraphBreakError(f"{line}: the step depends on the value of a tensor", line=line)
        if not any(tensor is known for known in self.tensors):
            self.tensors.append(tensor)
            self._lines.append(line)
            with real_tensors():
                self._before.append(tensor.detach().clone())

    def require_unwritten(self, is_written: Any) -> None:
        """Refuse a step that writes to what it reads: its next run would read the new values.

        Args:
            is_written: whether a call of the step writes to a tensor.

        Raises:
            NoGraphError: names the line that reads.
        """
        for tensor, before, line in zip(self.tensors, self._before, self._lines, strict=True):
            with real_tensors():
                is_same = same_bits(tensor, before)
                if not is_same:  # by NumPy
                    tensor.detach().copy_(before)
            if is_written(tensor) or not is_same:
                raise NoGraphError(
                    f"{line}: the step reads values of a tensor of shape {tuple(tensor.shape)} into Python, and writes "
                    "to it, but a planned step runs no Python",
                    "compute with the tensor itself",
                )
