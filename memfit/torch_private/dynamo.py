"""Models compiled by Dynamo."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from traceback import walk_tb
from types import CodeType, FunctionType
from typing import Any

import torch
import torch._guards
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack as dp_knapsack
from torch._functorch._activation_checkpointing.knapsack import greedy_knapsack as greedy_knapsack
from torch._functorch._activation_checkpointing.knapsack import ilp_knapsack as ilp_knapsack

from memfit.errors import MemfitError
from memfit.torch_private.ambient import put_back_after_an_error
from memfit.torch_private.aot import boxed
from memfit.torch_private.modules import hooks_on_all_modules, own_call
from memfit.torch_private.patching import Inside, replaced


def _note_questions(patches: ExitStack) -> None:
    """Say where the code that Dynamo captures asks whether it is being compiled, and may take another way then."""
    from torch._dynamo.variables import torch as handlers

    answers = {**handlers.tracing_state_functions(), torch.compiler.is_exporting: False}  # older torch says True
    patches.enter_context(replaced(handlers, "tracing_state_functions", lambda: _Answers(answers)))


class _Answers(dict[Any, Any]):
    """Dynamo's answers to code that asks whether it is traced; code that gets True is noted."""

    def __getitem__(self, asked: Any) -> Any:
        answer = super().__getitem__(asked)
        tracer = sys._getframe(1).f_locals.get("tx")
        if asked in (torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._utils.is_compiling):
            while tracer is not None and tracer.f_code.co_name.startswith("is_"):  # functions that only pass it on
                tracer = tracer.parent
            if tracer is not None:
                _questions.append(tracer.f_code)
        return answer


_numbers = itertools.count()  # of functions that were compiled
_questions: list[CodeType] = []  # code that has asked and was not named since


def _name_questions(named: set[CodeType]) -> None:
    """Warn of code that has asked, but for what was named of this model before."""
    asked = [code for code in dict.fromkeys(_questions) if code not in named]
    _questions.clear()
    named.update(asked)
    if asked:
        where = (f"{code.co_name} in {code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" for code in asked)
        logging.getLogger("memfit").warning(
            "memfit: code asks whether it is being compiled (%s): where it then computes something else, so do "
            "planned steps; memfit.fit runs it as eager does",
            ", ".join(where),
        )


_questions_noted = Inside(_note_questions)


def compiled_calls(
    model: torch.nn.Module, function: Callable[..., Any], backend: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `function` compiled by `backend`, also where all of its own code is torch's, as in `nn.Sequential`.

    However many shapes there are, no call falls back to eager silently, and one that breaks into several graphs is an
    error, before anything of it has run. Messages that the code logs break no graph:
    they are left out.

    Args:
        model: what the function calls.
        function: a function or a bound method.
        backend: as torch.compile takes it. Dynamo keeps it for good, with all that it refers to.
    """
    import torch._dynamo  # takes seconds to import

    def call(*args: Any, **kwargs: Any) -> Any:  # no code of torch's, so that Dynamo enters it
        return function(*args, **kwargs)

    name = f"{call.__name__}_{next(_numbers)}"  # by file, line and name Dynamo keeps which sizes have changed

    def compile_anew() -> Callable[..., Any]:  # Dynamo keeps what it compiled by the code object
        own = FunctionType(call.__code__.replace(co_name=name), call.__globals__, name, None, call.__closure__)
        return torch.compile(own, backend=backend, fullgraph=True)

    _patch_torch_for_dynamo()
    compiled, code, named = compile_anew(), _CodeOfModules(model), set[CodeType]()
    settings = {**_SOUND, "ignore_logger_methods": _logging_methods("", "_once")}

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        if code.has_changed():
            compiled = compile_anew()
        try:
            with torch._dynamo.config.patch(settings), _questions_noted, put_back_after_an_error():
                return compiled(*args, **kwargs)
        finally:
            _name_questions(named)

    return run


def _logging_methods(*suffixes: str) -> _Functions:
    """Return the methods of loggers whose names are those that write, with one of some suffixes."""
    names = {f"{name}{suffix}" for name in _LOGGING for suffix in suffixes}
    return _Functions(method for name, method in vars(logging.Logger).items() if name in names)


class _Functions(set[Any]):
    """A set of functions that lists their names, in its copies too: torch 2.11 sorts them for its log."""

    def __iter__(self) -> Iterator[str]:
        return (str(getattr(each, "__name__", each)) for each in super().__iter__())


class _CodeOfModules:
    """What Dynamo reads of a model's classes, and of hooks on all modules, and does not guard: code that is replaced.

    Args:
        model: any module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        kinds = {base for module in model.modules() for base in type(module).__mro__}
        self._tables = [kind.__dict__ for kind in kinds if issubclass(kind, torch.nn.Module)]
        self._look_again()

    def has_changed(self) -> bool:
        """Return whether something is not as it was at the last time."""
        is_as_before = list(map(len, self._tables)) == self._sizes and self._hooks == hooks_on_all_modules()
        if is_as_before and all(table.get(name) is code for table, name, code in self._code):
            return False
        self._look_again()
        return True

    def _look_again(self) -> None:
        self._hooks = hooks_on_all_modules()
        self._sizes = list(map(len, self._tables))
        self._code: list[tuple[Any, str, Any]] = []
        for table in self._tables:
            is_torchs = str(table["__module__"]).startswith("torch.")
            names = ("forward", "__call__") if is_torchs else tuple(table)
            self._code += [(table, name, table[name]) for name in names if isinstance(table.get(name), _CODE)]


_CODE = (FunctionType, staticmethod, classmethod, property)


def ends_in_break(module: torch.fx.GraphModule) -> bool:
    """Return whether Dynamo ended a graph that it gave a backend because it could not take in what follows."""
    reason = getattr(module, "compile_subgraph_reason", None)
    return reason is not None and reason.graph_break


def is_between_breaks(module: torch.fx.GraphModule) -> bool:
    """Return whether a graph that Dynamo gives a backend now ends in a break, or goes on after one."""
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
    from torch._dynamo.symbolic_convert import tls

    tracer = getattr(tls, "current_tx", None)
    goes_on = tracer is not None and tracer.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)
    return goes_on or ends_in_break(module)


def times_compiled() -> int:
    """Return how often the code that Dynamo compiles now was compiled before."""
    now = torch._guards.CompileContext.current_compile_id()
    return (now.frame_compile_id or 0) if now is not None else 0


def is_compilers(error: BaseException) -> bool:
    """Return whether PyTorch's compiler has raised an error, and no code that it ran."""
    from torch._dynamo import convert_frame  # takes seconds to import
    from torch._dynamo.exc import TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    if isinstance(error, (MemfitError, torch.OutOfMemoryError, MemoryError)):
        return False
    if isinstance(error, (TorchDynamoException, GuardOnDataDependentSymNode)):
        return True
    is_refused = isinstance(error, RuntimeError) and "fullgraph=True found no compiled frames" in str(error)
    return is_refused or any(
        frame.f_code.co_filename == convert_frame.__file__ for frame, _ in walk_tb(error.__traceback__)
    )


_LOGGING = {"debug", "info", "warning", "warn", "error", "exception", "critical", "log"}


# Dynamo would take a model that is compiled too often to eager, and does not look whether hooks of modules were added
# or removed, and functions given other code or defaults. Below DistributedDataParallel it would divide a model at its
# buckets into independent graphs.
_GUARDED = {"skip_nnmodule_hook_guards": False, "assume_dunder_attributes_remain_unchanged": False}
_SOUND = {
    "recompile_limit": sys.maxsize,
    "accumulated_recompile_limit": sys.maxsize,
    "optimize_ddp": False,
    **_GUARDED,
}


def compile_soundly(backend: Callable[..., Any], asked: Callable[[object], Callable[[], Callable[[], None]]]) -> None:
    """Let Dynamo compile for a backend as memfit needs it, from now on, and for others as before.

    It captures `module.compile()` where all code of the module is torch's, as in `nn.Sequential`. It looks at the hooks
    of modules at each call, and takes no model to eager, however often it is compiled. `torch.compile` does not pass on
    what Dynamo has for this, the attribute `backend_ctx_ctor` of a backend.

    Args:
        backend: as torch.compile takes it.
        asked: called with what is compiled, for each `torch.compile` of this backend; returns what is called before
            each call of it, which returns what is called after that.
    """
    import torch._dynamo  # takes seconds to import
    from torch._dynamo.eval_frame import OptimizeContext, innermost_backend

    sound, compiled = torch._dynamo.config._make_closure_patcher(**_SOUND), OptimizeContext.__call__

    def compiled_soundly(context: Any, function: Any) -> Any:
        given = innermost_backend(context.callback)
        if getattr(given, "compiler_fn", given) is not backend:
            return compiled(context, function)
        if not hasattr(given, "watched_by_memfit"):  # what is compiled once is called by a context several times
            given.watched_by_memfit = asked(function)
        if sound not in context.enter_exit_hooks:  # of each call of what is compiled
            context.enter_exit_hooks += [sound, given.watched_by_memfit]
        with torch._dynamo.config.patch(wrap_top_frame=True):
            made = compiled(context, function)
        vars(made)[_SOUNDLY] = True
        return made

    OptimizeContext.__call__ = compiled_soundly


_SOUNDLY = "_is_compiled_soundly"


def is_compiled_soundly(module: torch.nn.Module) -> bool:
    """Return whether `torch.compile` or `module.compile()` made the calls of a module for memfit's backend."""
    return _SOUNDLY in vars(module) or hasattr(own_call(module), _SOUNDLY)


def is_compiled_by_aot(module: torch.nn.Module) -> bool:
    """Return whether a backend that is known to use AOTAutograd compiles a module's calls.

    Under others, such as `"eager"`, a checkpoint inside of compiled code keeps no random state for its second forward
    pass.

    Args:
        module: that `torch.compile` returned, or whose `compile()` was called.
    """
    from torch._dynamo.backends.common import AotAutograd  # takes seconds to import
    from torch._dynamo.eval_frame import OptimizeContext, innermost_backend

    cells = getattr(own_call(module), "__closure__", None) or ()
    contexts = [getattr(module, "dynamo_ctx", None), *(cell.cell_contents for cell in cells)]
    (context,) = [each for each in contexts if isinstance(each, OptimizeContext)] or [None]
    given = None if context is None else innermost_backend(context.callback)
    compiler = getattr(given, "compiler_fn", given)
    name = getattr(given, "compiler_name", getattr(compiler, "__name__", ""))
    return isinstance(compiler, AotAutograd) or name == "inductor" or name.startswith("aot_eager")


def _patch_torch_for_dynamo() -> None:
    """Let Dynamo patch torch, as it does once in a process, but leave `torch.distributions` to check its arguments."""
    from torch._dynamo.eval_frame import TorchPatcher

    checked = torch.distributions.Distribution._validate_args
    TorchPatcher.patch()
    torch.distributions.Distribution.set_default_validate_args(checked)


def compile_with_budget(model: torch.nn.Module, share: float, solver: str) -> Callable[..., Any]:
    """Return `model` compiled under torch's own activation memory budget, with eager's kernels in place of Inductor's.

    Args:
        model: any module.
        share: torch's `activation_memory_budget`, from 0 to 1, in force only while the model runs.
        solver: torch's `activation_memory_budget_solver`.
    """
    import torch._dynamo  # takes seconds to import, and only a comparison with torch needs it
    import torch._functorch.config

    torch._dynamo.reset()
    _patch_torch_for_dynamo()
    compiled = torch.compile(model, backend=_partitioned_eager)

    def run(*args: Any, **kwargs: Any) -> Any:
        settings = {"activation_memory_budget": share, "activation_memory_budget_solver": solver}
        with torch._functorch.config.patch(settings):
            return compiled(*args, **kwargs)

    return run


def _partitioned_eager(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch.fx.graph import _BoxedCodeGen

    def compile_half(half: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        half.graph.set_codegen(_BoxedCodeGen())  # takes its arguments in a list, and empties it
        half.recompile()
        return boxed(half.forward)

    return aot_autograd(
        fw_compiler=compile_half,
        bw_compiler=compile_half,
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )(module, inputs)
