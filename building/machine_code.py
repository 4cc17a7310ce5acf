"""Compile memfit's searches and packers into a library for the wheel: run while the wheel is built.

    python building/machine_code.py FOLDER

numba compiles each function that Python calls, for the types that a plan and a layout of a small step call it with.
The modules are linked into one, for any processor of this architecture and for an address anywhere. What calls
these functions from C, with an array of numbers, is written beside it, and the system's C compiler makes one library
of both. It then needs neither numba nor Python (see `memfit.system.shipped`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LETTERS = {"int64": "q", "float64": "d", "bool": "?"}


def main() -> None:
    """Write the library and its description into a folder."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as made:
        # what numba finds on a disk cannot be linked
        os.environ.update(NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="", NUMBA_CACHE_DIR=made, MEMFIT_CACHE=made)
        sys.path.insert(0, str(ROOT))
        from memfit.compile_ahead import compile_ahead
        from memfit.system import compiled, shipped

        shipped.shipped_functions = compiled.shipped_functions = dict  # none
        compile_ahead()
        _compile_the_rest()
        chosen = [(each, _chosen(each)) for each in compiled.ENTRY_POINTS]
        described = [_described(number, *pair) for number, pair in enumerate(chosen)]
        (Path(made) / "code.o").write_bytes(_object([found for _, found in chosen]))
        (Path(made) / "calls.c").write_text("\n".join(_CALLS_HEAD + [_call(*each) for each in enumerate(chosen)]))
        command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-z,defs"]
        inputs = [f"{made}/calls.c", f"{made}/code.o"]
        subprocess.run([*command, "-s", "-o", str(folder / shipped.LIBRARY), *inputs, "-lm"], check=True)
        files = sorted(
            str(Path(module.__file__).relative_to(ROOT / "memfit"))
            for name, module in sys.modules.items()
            if name.split(".")[0] == "memfit" and module.__file__
        )
        description = {"sources": shipped.sources_digest(files), "files": files, "functions": described}
        (folder / shipped.DESCRIPTION).write_text(json.dumps(description))
        print(f"{len(described)} functions, {(folder / shipped.LIBRARY).stat().st_size} bytes")  # noqa: T201


def _compile_the_rest() -> None:
    """Compile what a plan and a layout of a small step do not call: published planners and packers, and rare paths."""
    from memfit.compile_ahead import small_problem
    from memfit.packing import Block, Blocks, pack
    from memfit.packing.improve import ejecting
    from memfit.packing.registry import compile_packers
    from memfit.planners.registry import make_planner

    for name in ("sublinear", "linear_split"):
        make_planner(name).plan(small_problem())
    compile_packers()
    pack(Blocks.of([Block(id=number, bytes=64, start=number, end=number + 2) for number in range(4)]), "tags")
    room = _chosen(ejecting.take_out).signature.args[0]
    ejecting.put_all.dispatcher.compile((room,))


def _chosen(entry: Any) -> Any:
    """Return the compilation of an entry point for the types that Python calls it with.

    Raises:
        LookupError: it was not called.
    """
    from numba.core import types

    found = [
        each
        for each in entry.dispatcher.overloads.values()
        if not any(isinstance(kind, types.Literal | types.Omitted) for kind in each.fndesc.argtypes)
    ]
    if not found:
        raise LookupError(f"{entry.py_func} was not called: let memfit/compile_ahead.py call it")
    return found[0]


def _described(number: int, entry: Any, found: Any) -> dict[str, Any]:
    from numba.core import types

    returned = found.fndesc.restype
    parts = list(returned) if isinstance(returned, types.BaseTuple) else [returned]
    letters = "" if returned == types.none else "".join(LETTERS[str(types.unliteral(part))] for part in parts)
    assert "?" not in letters or letters == "?", f"{entry.py_func} returns a boolean beside others"
    return {
        "name": f"{entry.py_func.__module__}.{entry.py_func.__name__}",
        "symbol": f"memfit_{number}",
        "arguments": [_kind(each) for each in found.fndesc.argtypes],
        "result": letters,
        "is_tuple": isinstance(returned, types.BaseTuple),
    }


def _kind(kind: Any) -> Any:
    """Return the description of a type of numba that `memfit.system.shipped` reads."""
    from numba.core import types
    from numba.np import numpy_support
    from numpy.lib import format as numpy_format

    if isinstance(kind, types.Array):
        assert kind.layout == "C", kind
        dtype = numpy_format.dtype_to_descr(numpy_support.as_dtype(kind.dtype))
        return {"dtype": dtype, "ndim": kind.ndim, "is_written": kind.mutable, "is_aligned": kind.aligned}
    if isinstance(kind, types.BaseTuple):
        return {"parts": [_kind(each) for each in kind]}
    return {types.int64: "whole", types.float64: "real"}[kind]


def _object(compilations: list[Any]) -> bytes:
    """Return one object file of all functions."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    machine = target.create_target_machine(cpu="generic", opt=3, reloc="pic", codemodel="default")
    whole: Any = None
    for each in compilations:
        module = llvm.parse_bitcode(each.library._final_module.as_bitcode())
        if whole is None:
            whole = module
        else:
            whole.link_in(module)
    called = {each.fndesc.llvm_func_name for each in compilations}
    for each in [*whole.functions, *whole.global_variables]:
        if not each.is_declaration and each.name not in called:
            each.linkage = "internal"  # wrappers for Python, which are then removed
    _remove_unused(whole, machine)
    return machine.emit_object(whole)


def _remove_unused(module: Any, machine: Any) -> None:
    import llvmlite.binding

    llvm: Any = llvmlite.binding
    if hasattr(llvm, "create_new_module_pass_manager"):
        passes: Any = llvm.create_new_module_pass_manager()
        getattr(passes, "add_global_dead_code_eliminate_pass", getattr(passes, "add_global_dce_pass", None))()
        passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    else:
        passes = llvm.create_module_pass_manager()
        passes.add_global_dce_pass()
        passes.run(module)


_CALLS_HEAD = [
    "#include <stdint.h>",
    "#include <string.h>",
    "static double real(const int64_t *at) { double value; memcpy(&value, at, sizeof value); return value; }",
]


def _call(number: int, pair: tuple[Any, Any]) -> str:
    """Return a function in C that calls a compiled one with numbers from an array."""
    from numba.core import types

    kinds: list[str] = []

    def flatten(kind: Any) -> None:
        if isinstance(kind, types.Array):
            kinds.extend(["void *"] * 2 + ["int64_t"] * 2 + ["void *"] + ["int64_t"] * (2 * kind.ndim))
        elif isinstance(kind, types.BaseTuple):
            for each in kind:
                flatten(each)
        else:
            kinds.append({types.int64: "int64_t", types.float64: "double"}[kind])

    for each in pair[1].fndesc.argtypes:
        flatten(each)
    values = [f"real(a + {at})" if kind == "double" else f"({kind}) a[{at}]" for at, kind in enumerate(kinds)]
    symbol = pair[1].fndesc.llvm_func_name
    parameters = ", ".join(["void *", "void **", *kinds])
    return f"""extern int f{number}({parameters}) __asm__("{symbol}");
__attribute__((visibility("default"))) int memfit_{number}(const int64_t *a, void *result) {{
    void *error = 0;
    return f{number}({", ".join(["result", "&error", *values])});
}}"""


if __name__ == "__main__":
    main()
