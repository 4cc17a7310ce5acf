"""Targets: what each kind gives, and the one line that each bad one answers with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from command_line import without_progress

import memfit
from memfit import Graph, TrainingStep
from memfit.capture.placement import step_device
from memfit.capture.step_check import check_step
from memfit.commands.targets import resolve
from memfit.errors import (
    InvalidDeviceError,
    InvalidFileError,
    InvalidOptionError,
    InvalidTargetError,
    MemfitError,
    UnsupportedStepError,
)
from memfit.graph import Op, Phase, Role, Storage

GOOD = """
import torch
from memfit import TrainingStep

def step():
    model = torch.nn.Linear(4, 2)
    batch = (torch.randn(3, 4), torch.tensor([0, 1, 1]))
    return TrainingStep(model=model, loss=torch.nn.CrossEntropyLoss(), batch=batch)

def with_defaults(width=4, *args, **kwargs):
    return step()

def needs(width, *, depth):
    return step()

def raises():
    return deeper()

def deeper():
    raise ValueError("no such\\nlayer")

def leaves():
    raise SystemExit(3)

def other():
    return torch.nn.Linear(4, 2)

def nothing():
    pass

def interrupted():
    raise KeyboardInterrupt

number = 7
"""

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """`write(source)` makes a target file of it."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write_file(source: str) -> Path:
        path = tmp_path / "my_step.py"
        path.write_text(source)
        return path

    yield write_file
    sys.modules.pop("memfit_target_my_step", None)


def _one_line(error: pytest.ExceptionInfo[MemfitError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert error.value.exit_status == 2
    return text


@pytest.mark.parametrize("function", ["step", "with_defaults"])
def test_a_function_in_a_file(write: Write, function: str) -> None:
    step = resolve(f"{write(GOOD)}:{function}")
    assert isinstance(step, TrainingStep)
    assert step.compute_loss(step.model, step.batch).requires_grad


def test_a_file_may_import_its_neighbours(write: Write) -> None:
    path = write("import neighbour_of_my_step as n\ndef step():\n    return n.step()")
    (path.parent / "neighbour_of_my_step.py").write_text(GOOD)
    assert isinstance(resolve(f"{path}:step"), TrainingStep)
    sys.modules.pop("neighbour_of_my_step")


def test_a_built_in_workload_with_options() -> None:
    step = resolve("lstm", {"batch": "3", "steps": "2", "width": "4"})
    assert isinstance(step, TrainingStep)
    assert step.batch[0].shape == (3, 2, 4)


@pytest.mark.parametrize("ending", [".graph.json", ".graph.json.gz"])
def test_a_graph_file_needs_no_torch(tmp_path: Path, ending: str) -> None:
    graph = Graph.build(
        name="double",
        storages=[
            Storage(id=0, name="x", bytes=8, role=Role.INPUT),
            Storage(id=1, name="y", bytes=8, role=Role.OUTPUT),
        ],
        ops=[Op(id=0, name="mul", phase=Phase.FORWARD, reads=(0,), writes=(1,), seconds=1e-6)],
    )
    path = tmp_path / f"double{ending}"
    graph.save(path)
    assert resolve(str(path)) == graph
    code = (
        "import sys; from memfit.commands.targets import resolve; "
        f"resolve({str(path)!r}); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("resnet5", r"target 'resnet5' is none of: a built-in workload \(resnet50, .*; did you mean 'resnet50'\?"),
        ("", "target '' is none of"),
        ("model.py", r"model.py: which function\? write model.py:FUNCTION"),
        ("nowhere.py:step", "nowhere.py: there is no such file"),
        ("nowhere.graph.json", "nowhere.graph.json: there is no such graph file"),
        ("plan.json", r"plan.json: a graph file's name ends in .graph.json or .graph.json.gz"),
        ("package.module:step", "is none of"),
    ],
)
def test_targets_that_are_not_there(target: str, message: str) -> None:
    with pytest.raises(InvalidTargetError, match=message) as error:
        resolve(target)
    _one_line(error)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", r"my_step.py has no function 'absent'; it has step, with_defaults, needs, raises"),
        ("number", r"my_step.py:number is a int, expected a function without arguments"),
        ("needs", r"my_step.py:needs needs arguments \(width, depth\), expected a function that is called without any"),
        ("raises", r"my_step.py:20: raises\(\) raised ValueError: no such layer"),
        ("leaves", r"my_step.py:23: leaves\(\) raised SystemExit: 3"),
        ("other", r"my_step.py:other\(\) returned a Linear, expected memfit.TrainingStep\(model="),
        ("nothing", r"my_step.py:nothing\(\) returned nothing, expected memfit.TrainingStep"),
        ("", r"my_step.py has no function ''"),
    ],
)
def test_functions_that_give_no_step(write: Write, function: str, message: str) -> None:
    with pytest.raises(InvalidTargetError, match=message) as error:
        resolve(f"{write(GOOD)}:{function}")
    _one_line(error)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import torch\nimport a_module_that_is_not_there", r"my_step.py:2: importing it raised ModuleNotFoundError"),
        ("def step(:\n    pass", r"my_step.py:1: importing it raised SyntaxError"),
        ("\n\n1 / 0", r"my_step.py:3: importing it raised ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit('bye')", r"my_step.py:2: importing it raised SystemExit: bye"),
    ],
)
def test_files_that_cannot_be_imported(write: Write, source: str, message: str) -> None:
    with pytest.raises(InvalidTargetError, match=message) as error:
        resolve(f"{write(source)}:step")
    _one_line(error)


def test_ctrl_c_in_a_users_function_is_no_bad_target(write: Write) -> None:
    with pytest.raises(KeyboardInterrupt):
        resolve(f"{write(GOOD)}:interrupted")


def test_a_memfit_error_of_the_users_function_passes(write: Write) -> None:
    source = "from memfit.workloads import build\ndef step():\n    return build('unet', width=0)"
    with pytest.raises(InvalidOptionError, match="option width is 0"):
        resolve(f"{write(source)}:step")


def test_arguments_of_a_function_are_set_by_name(write: Write) -> None:
    source = (
        "import torch, memfit\n"
        "def step(rows=2, scale=1.0, bias=True, kind=None):\n"
        "    model = torch.nn.Linear(3, 3, bias=bias)\n"
        "    return memfit.TrainingStep(model=model, loss=torch.nn.MSELoss(),\n"
        "        batch=(scale * torch.ones(rows, 3), torch.ones(rows, 3)), name=kind or 'own')\n"
    )
    step = resolve(f"{write(source)}:step", {"rows": "5", "scale": "2", "bias": "false", "kind": "text"})
    assert isinstance(step, TrainingStep)
    assert step.batch[0].tolist() == [[2.0] * 3] * 5
    assert step.model.bias is None
    assert step.name == "text"
    with pytest.raises(InvalidOptionError, match=r"has no parameter 'row'; did you mean 'rows'\?; it has rows, scale"):
        resolve(f"{write(source)}:step", {"row": "5"})
    with pytest.raises(InvalidOptionError, match="parameter rows='many'"):
        resolve(f"{write(source)}:step", {"rows": "many"})
    with pytest.raises(InvalidOptionError, match="has no parameter 'batch'; it has none"):
        resolve(f"{write(GOOD)}:step", {"batch": "2"})


def test_a_truncated_graph_file(tmp_path: Path) -> None:
    path = tmp_path / "cut.graph.json"
    path.write_text('{"format": "memfit-graph", "ver')
    with pytest.raises(InvalidFileError, match=r"cut.graph.json: "):
        resolve(str(path))


MODEL = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
BATCH = (torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))
LOSS = torch.nn.CrossEntropyLoss()
STRANGER = torch.optim.SGD([*MODEL.parameters(), torch.nn.Parameter(torch.zeros(5, 6))], lr=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": torch.nn.Linear}, "model is a class Linear, expected a torch.nn.Module"),
        ({"model": lambda x: x}, "model is a function, expected a torch.nn.Module"),
        ({"model": torch.nn.Identity()}, "no parameter of the model requires a gradient"),
        ({"loss": "cross_entropy"}, r"loss is a str, expected a function loss\(model, batch\) or a loss module"),
        ({"optimizer": torch.optim.SGD}, "optimizer is a class SGD, expected a torch.optim.Optimizer or None"),
        ({"optimizer": [STRANGER]}, "optimizer is a list, expected a torch.optim.Optimizer or None"),
        ({"optimizer": STRANGER}, r"parameter 4 of the optimizer's group 0, of shape \(5, 6\), is not the model's"),
        ({"scaler": 2.0}, "scaler is a float, expected a torch.amp.GradScaler or None"),
        ({"clip_norm": -1.0}, "clip_norm is -1.0, expected a number above 0, or None"),
        ({"clip_norm": float("nan")}, "clip_norm is nan, expected a number above 0, or None"),
    ],
)
def test_parts_of_the_wrong_kind(changes: dict[str, object], message: str) -> None:
    step = TrainingStep(**({"model": MODEL, "loss": LOSS, "batch": BATCH} | changes))  # type: ignore[arg-type]
    with pytest.raises(InvalidTargetError, match=f"^here: {message}"):
        check_step(step, "here")


def test_a_right_step_passes() -> None:
    optimizer = torch.optim.SGD(MODEL[0].parameters(), lr=0.1)
    check_step(TrainingStep(model=MODEL, loss=LOSS, batch=BATCH, optimizer=optimizer, clip_norm=1), "here")


def test_tensors_on_several_devices() -> None:
    batch = {"images": [torch.zeros(3, 4, device="meta")], "labels": BATCH[1]}
    step = TrainingStep(model=MODEL, loss=LOSS, batch=batch)
    with pytest.raises(
        InvalidDeviceError, match=r"here: batch\['images'\]\[0\] is on meta and the model on cpu; move the batch"
    ):
        check_step(step, "here")
    split = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2, device="meta"))
    with pytest.raises(InvalidDeviceError, match=r"parameter '1.weight' is on meta and '0.weight' on cpu"):
        check_step(TrainingStep(model=split, loss=LOSS, batch=BATCH), "here")


def test_a_number_on_the_cpu_goes_with_every_device() -> None:
    model = torch.nn.Linear(4, 2, device="meta")
    batch = (torch.zeros(3, 4, device="meta"), torch.tensor(0.5))
    check_step(TrainingStep(model=model, loss=LOSS, batch=batch), "here")
    assert step_device(model, batch) == torch.device("meta")


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_models_across_ranks_are_refused() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    inner = torch.nn.Linear(4, 2)
    sharded = fully_shard(torch.nn.Linear(4, 2), mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    for model, message in (
        (DistributedDataParallel(inner), "the model is wrapped in DDP"),
        (torch.nn.Sequential(DistributedDataParallel(inner)), "module '0' of the model is wrapped in DDP"),
        (sharded, r"the model is wrapped in FSDP \(fully_shard\)"),
        (torch.nn.DataParallel(inner), "the model is wrapped in DataParallel"),
    ):
        step = TrainingStep(model=model, loss=LOSS, batch=BATCH)
        with pytest.raises(UnsupportedStepError, match=f"here: {message}; memfit plans only bare models"):
            check_step(step, "here")


@pytest.mark.parametrize("door", ["checkpoint", "compile", "eager"])
def test_each_door_says_that_what_it_is_given_is_no_model(door: str) -> None:
    call: Callable[..., object] = getattr(memfit, door)
    with pytest.raises(InvalidTargetError, match=f"memfit.{door}: model is a str, expected a torch.nn.Module"):
        call("model.pt", budget="1GiB")


@pytest.mark.parametrize("door", ["checkpoint", "compile", "eager"])
def test_a_model_without_memory_is_refused_with_the_place_of_the_line(door: str) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 2) for _ in range(3)]).to("meta")
    call: Callable[..., object] = getattr(memfit, door)

    def run() -> object:
        call(model, budget="1GiB")
        return model(torch.ones(1, 4, device="meta"))

    with pytest.raises(InvalidDeviceError, match=r"'meta'.* after model.to_empty\(device=...\)"):
        run()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_fsdps_first_version_is_refused_by_each_door_with_the_second_one_as_the_remedy() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = torch.nn.Sequential(FullyShardedDataParallel(torch.nn.Linear(4, 2), device_id=torch.device("cpu")))
    doors: list[Callable[[], object]] = [
        lambda: memfit.checkpoint(model, "1GiB"),
        lambda: memfit.compile(model, budget="1GiB"),
        lambda: memfit.fit(model, LOSS, BATCH, budget="1GiB"),
    ]
    for door in doors:
        with pytest.raises(UnsupportedStepError, match=r"FSDP.* apply fully_shard \(FSDP2\) in its place"):
            door()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("keeps", [True, False])
def test_fsdps_first_version_after_the_line_is_refused_before_a_block_runs(*, keeps: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()) for _ in range(3)])
    handle = memfit.checkpoint(model, "1GiB")
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=keeps)
    with pytest.raises(UnsupportedStepError, match=r"FSDP.* apply fully_shard \(FSDP2\) in its place"):
        wrapped(torch.ones(2, 4))
    handle.close()


def test_importing_a_target_that_trains_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trains.py"
    path.write_text(
        "import torch\n"
        "alone = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = torch.optim.SGD([alone], lr=0.1)\n"
        "while True:\n"
        "    alone.sum().backward()\n"
        "    optimizer.step()\n"
    )
    with pytest.raises(InvalidTargetError, match=r"trains.py:6: importing it trains: .* memfit run --budget B"):
        resolve(f"{path}:step")
    other = torch.nn.Parameter(torch.ones(2))
    other.sum().backward()
    torch.optim.SGD([other], lr=0.1).step()  # as before


def test_a_target_sees_no_arguments_of_memfits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["memfit", "fit", "--budget", "6GiB"]
    monkeypatch.setattr(sys, "argv", given)
    path = tmp_path / "reads.py"
    body = GOOD.replace("def step():\n", "def step():\n    assert sys.argv == seen\n")
    path.write_text(f"import sys\nseen = list(sys.argv)\n{body}")
    assert isinstance(resolve(f"{path}:step"), TrainingStep)
    assert sys.modules["memfit_target_reads"].seen == [str(path)]
    assert sys.argv is given


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_is_all_of_standard_output_whatever_a_target_prints(tmp_path: Path, encoding: str) -> None:
    prints = "print('from Python')\n    os.write(1, b'from C\\n')\n    subprocess.run(['echo', 'from a child'])\n"
    path = tmp_path / "prints.py"
    path.write_text("import os, subprocess\n" + GOOD.replace("def step():\n", f"def step():\n    {prints}"))
    answered = subprocess.run(
        [sys.executable, "-m", "memfit", "estimate", f"{path}:step", "--json"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
    )
    assert json.loads(answered.stdout)["peak_bytes"] > 0
    assert without_progress(answered.stderr).split("\n")[:3] == ["from Python", "from C", "from a child"]


def test_ctrl_c_is_one_line_whenever_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "waits.py"
    path.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "estimate", f"{path}:step"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.startswith("memfit: error: interrupted")
    assert done.stderr.count("\n") == 1


def test_a_package_that_is_missing_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "estimate", "unet"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    assert done.returncode == 2
    assert (
        done.stderr
        == "memfit: error: this command needs the package torch, which is not installed: pip install torch\n"
    )
