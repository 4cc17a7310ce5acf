"""What torch computes by beside the tensors: settings of the process, modes of the thread, hooks of saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.utils._device
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from memfit.torch_private.autocast import autocast_nesting
from memfit.torch_private.autograd import UnwrappedMode, changing_hooks, default_saved_hooks, no_modes

_C: Any = torch._C
_FUNCTORCH: Any = torch._C._functorch
_CUDA: Any = torch.backends.cuda
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    (_C._get_sdp_priority_order, _C._set_sdp_priority_order),
    *(
        (partial(_C._get_fp32_precision_getter, *where), partial(_C._set_fp32_precision_setter, *where))
        for where in (("cuda", "matmul"), ("cuda", "conv"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
    ),  # the older ways raise once one of these was set
    (
        lambda: (_C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()),
        lambda pair: torch.use_deterministic_algorithms(pair[0], warn_only=pair[1]),
    ),
    (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
)


class Ambient:
    """What a forward pass runs under, so that it can run under the same once more, in backward."""

    __slots__ = ("_dispatch_modes", "_function_modes", "_hooks", "_settings")

    def __init__(self) -> None:
        self._settings = [read() for read, _ in _SETTINGS]
        self._function_modes = _get_current_function_mode_stack() if _C._len_torch_function_stack() else []
        self._dispatch_modes = _get_current_dispatch_mode_stack() if _C._len_torch_dispatch_stack() else []
        self._hooks = default_saved_hooks() if changing_hooks() else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the block run under the same.

        Modes of torch itself are left out: they count and log, and have done so the first time.
        """
        now = [read() for read, _ in _SETTINGS]
        if now == self._settings and not (self._function_modes or self._dispatch_modes or self._hooks):
            yield
            return
        with ExitStack() as stack:
            for (_, write), before, present in zip(_SETTINGS, self._settings, now, strict=True):
                if before != present:
                    write(before)
                    stack.callback(write, present)
            for mode in _missing(self._function_modes, _get_current_function_mode_stack):
                _push_mode(mode)
                stack.callback(_pop_mode)
            for mode in _missing(self._dispatch_modes, _get_current_dispatch_mode_stack):
                _push_dispatch_mode(mode)
                stack.callback(_pop_dispatch_mode)
            inner = default_saved_hooks()
            if self._hooks is not None and inner is not None:
                pack = partial(_packed_and_unpacked, *self._hooks, inner[0])
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, inner[1]))
            yield


@contextmanager
def put_back_after_an_error() -> Iterator[None]:
    """Let an error in the block leave gradients, autocast and transformations of torch.func on or off as they were.

    Code that is traced enters and leaves them by single calls, the second of which an error leaves out. A cache of
    autocast that no `with` block owns any more would then keep what weights were cast to, over all later steps.
    """
    has_gradients, depth = torch.is_grad_enabled(), _FUNCTORCH.get_dynamic_layer_stack_depth()
    casts, keeps_casts, nesting = [*map(_casts, _AUTOCAST)], torch.is_autocast_cache_enabled(), autocast_nesting()
    try:
        yield
    except BaseException:
        while _FUNCTORCH.get_dynamic_layer_stack_depth() > depth:  # all at once ends in an assertion of torch 2.11's
            _LEAVES[_FUNCTORCH.peek_interpreter_stack().key()]()
        for device, (is_on, dtype) in zip(_AUTOCAST, casts, strict=True):
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(keeps_casts)
        if autocast_nesting() > nesting:
            while torch.autocast_decrement_nesting() > nesting:
                pass
            torch.clear_autocast_cache()
        torch.set_grad_enabled(has_gradients)
        raise


_AUTOCAST = ("cpu", "cuda")
_LEAVES: dict[Any, Callable[[], int]] = {
    _FUNCTORCH.TransformType.Grad: _FUNCTORCH._grad_decrement_nesting,
    _FUNCTORCH.TransformType.Jvp: _FUNCTORCH._jvp_decrement_nesting,
    _FUNCTORCH.TransformType.Vmap: _FUNCTORCH._vmap_decrement_nesting,
    _FUNCTORCH.TransformType.Functionalize: _FUNCTORCH._func_decrement_nesting,
}


def _casts(device: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def dispatch_keys_kept() -> AbstractContextManager[Any]:
    """Return a context at whose end the thread calls the kernels that it called before.

    Frames of a failed trace may own guards, which put back what was on inside of the trace when the frames are freed.
    """
    return _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), _C._dispatch_tls_local_exclude_set())


def saved_as_they_are() -> AbstractContextManager[Any]:
    """Return a context in which tensors are saved for backward as they are, whatever hooks of the user's are on."""
    if not changing_hooks():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


def _itself(value: torch.Tensor) -> torch.Tensor:
    return value


def _missing(modes: list[Any], present: Callable[[], list[Any]]) -> list[Any]:
    if not modes:
        return []
    ids = set(map(id, present()))
    return [mode for mode in modes if id(mode) not in ids and _changes_results(mode)]


def _changes_results(mode: Any) -> bool:
    """Return whether a mode is the user's, or says on which device tensors are made."""
    if isinstance(mode, UnwrappedMode):
        return False
    return not type(mode).__module__.startswith("torch.") or isinstance(mode, torch.utils._device.DeviceContext)


def _packed_and_unpacked(
    pack: Callable[..., Any], unpack: Callable[..., Any], inner: Callable[..., Any], tensor: torch.Tensor
) -> Any:
    with no_modes():  # the first forward pass did not see these ops
        back = unpack(pack(tensor))
    return inner(back)
