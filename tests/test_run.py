"""`memfit run`: a script's own arguments, prints, traceback, exit status and signals; its models within the budget."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from checkpoint_models import Outside
from torch import nn
from torch.nn.utils import parametrizations

from memfit.commands.run import main
from memfit.errors import BudgetNotHeldError, OverBudgetError, UnsupportedStepError
from memfit.integrations.found_models import HeldReport, Running
from memfit.system.recorder import allocated_bytes, record
from memfit.system.script import Script

_ODD = """
import os, signal, sys

class Own:
    pass

print(__name__, __file__, sys.argv, sys.path[0], __spec__ and __spec__.name, sys.modules["__main__"].Own is Own)
print("warned", file=sys.stderr)
how = sys.argv[1]
if how == "status":
    sys.exit(3)
if how == "text":
    sys.exit("no data")
if how == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
if how == "terminate":
    os.kill(os.getpid(), signal.SIGTERM)
if how == "hook":
    sys.excepthook = lambda kind, error, traceback: print(kind, error, traceback.tb_lineno)
if how != "end":
    try:
        [][1]
    except IndexError as error:
        raise ValueError(how) from error
"""
_TRAIN = """
import sys
import torch
from torch import nn
from torch.nn.utils import parametrizations

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16)) for _ in range(6)]
model = nn.Sequential(*layers)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(512, 16)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
print([parameter.sum().item() for parameter in model.parameters()])
"""


def _python(*words: str, folder: Path) -> tuple[int, str, list[str]]:
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, [line for line in done.stderr.splitlines() if not line.startswith("memfit: ")]


@pytest.mark.parametrize("how", ["end", "status", "text", "interrupt", "terminate", "hook", "raise"])
def test_a_script_cannot_tell_memfit_run_from_python(tmp_path: Path, how: str) -> None:
    (tmp_path / "odd.py").write_text(_ODD)
    bare = _python("odd.py", how, "--json", "-m", folder=tmp_path)
    held = _python("-m", "memfit", "run", "--budget", "6GiB", "odd.py", "--", how, "--json", "-m", folder=tmp_path)
    assert held == bare


def test_a_module_is_run_as_python_does(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text("from package import __name__ as own\n" + _ODD)
    bare = _python("-m", "package", "status", folder=tmp_path)
    assert _python("-m", "memfit", "run", "--budget", "6GiB", "-m", "package", "status", folder=tmp_path) == bare
    assert bare[0] == 3


def test_what_a_script_sets_before_it_imports_torch_counts(tmp_path: Path) -> None:
    """memfit imports neither torch nor NumPy before the script does: threads and the like are read then."""
    (tmp_path / "early.py").write_text(
        "import sys\nprint([name for name in ('torch', 'numpy', 'numba') if name in sys.modules])\n"
    )
    assert _python("-m", "memfit", "run", "--budget", "6GiB", "early.py", folder=tmp_path)[1] == "[]\n"


def test_a_script_trains_within_its_budget_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_TRAIN)
    words = ("-m", "memfit", "run", "--budget", "9MiB", "--report", "run.html", "train.py", "6")
    assert _python(*words, folder=tmp_path) == _python("train.py", "6", folder=tmp_path)
    page = (tmp_path / "run.html").read_text()
    assert "No step took more than the budget" in page
    assert "<svg" in page


def test_logits_of_a_script_are_computed_by_rows(tmp_path: Path) -> None:
    large = _TRAIN.replace("nn.Sequential(*layers)", "nn.Sequential(*layers, nn.Linear(16, 20_000))")
    (tmp_path / "train.py").write_text(large.replace(".square().mean()", ".logsumexp(-1).mean()"))
    words = ("-m", "memfit", "run", "--budget", "32MiB", "--chunk-loss", "train.py", "4")
    status, printed, _ = _python(*words, folder=tmp_path)
    assert status == 0, "512 rows of 20,000 logits alone are 39 MiB"
    assert printed.count("\n") == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--budget", "6GiB", "missing.py"], "there is no such script"),
        (["--budget", "6GiB", "-m", "no.such.module"], "no.such.module"),
        (["--budget", "much", "x.py"], "not a size"),
        (["--budget", "6GiB", "--door", "front", "x.py"], "expected one of auto, checkpoint, eager"),
        (["--budget", "6GiB", "--report", "no/such/folder.html", "x.py"], "there is no folder"),
        (["x.py"], "--budget"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert said in shown.err
    assert shown.err.count("\n") == 1


def test_a_script_that_is_no_python_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = (\n")
    assert main(["--budget", "6GiB", str(path)]) == 2
    assert f"{path}:1: SyntaxError" in capsys.readouterr().err


def test_modules_are_left_as_they_were_by_the_preparation() -> None:
    before = sys.modules["__main__"], sys.argv[:]
    Script.of_file(__file__, ["--lr", "1"])
    assert (sys.modules["__main__"], sys.argv) == before


class _Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 16 * width), nn.Linear(16 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.relu(self.inner(x)))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(6))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * scale

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def running() -> Iterator[Running]:
    made = Running("20MiB")
    made.begin()
    yield made
    made.end(SystemExit())


def _train(model: nn.Module, call: str = "__call__", steps: int = 4, **given: float) -> list[torch.Tensor]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        getattr(model, call)(torch.randn(512, 16), **given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def _by(found: list[HeldReport]) -> list[tuple[str, bool, str]]:
    return [(each.name, each.history is None, each.why) for each in found]


def test_a_model_with_blocks_is_held_from_within_its_first_call() -> None:
    model = _Model()
    bare = _train(copy.deepcopy(model), scale=0.5)
    running = Running("20MiB")
    running.begin()
    held = _train(model, scale=0.5)
    found = running.end()
    assert _equal(bare, held)
    assert _by(found) == [("_Model", False, "")]
    assert found[0].history is not None
    windows = found[0].history.latest
    assert len(windows) == 4
    assert windows[0].plan == 0  # its blocks were recomputed in the first step already
    assert len({window.numel for window in windows}) == 1  # arguments by name are seen in the first call, too
    assert "forward" not in vars(model.blocks[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch.compile looks at it
@pytest.mark.parametrize("compiles", ["model", "model in place", "blocks", "blocks in place"])
def test_models_that_a_script_compiles_are_held_from_their_first_call_on_and_stay_compiled(compiles: str) -> None:
    def made(model: _Model) -> nn.Module:
        torch._dynamo.reset()
        graphs.clear()
        how: Any = {"backend": counting, "fullgraph": True}
        if compiles.endswith("in place"):
            for each in (model,) if compiles.startswith("model") else model.blocks:
                each.compile(**how)
        elif compiles == "model":
            return torch.compile(model, **how)
        else:
            model.blocks = nn.ModuleList(torch.compile(block, **how) for block in model.blocks)
        return model

    def counting(module: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    graphs: list[torch.fx.GraphModule] = []
    model = _Model()
    bare, of_bare = _train(made(copy.deepcopy(model))), len(graphs)
    running = Running("20MiB")
    running.begin()
    held = _train(made(model))
    found = running.end()
    assert _equal(bare, held)
    assert [(each.history is None, each.shown().steps, each.shown().over) for each in found] == [(False, 4, 0)]
    assert len(graphs) == of_bare if compiles.startswith("blocks") else len(graphs) <= of_bare


def test_a_model_that_the_script_compiles_with_memfits_backend_is_left_alone(running: Running) -> None:
    model = _Model()
    model.compile(backend="memfit", options={"budget": "20MiB", "time_limit_seconds": 1})
    _train(model, steps=2)
    assert running.end() == []
    assert running.has_left


@pytest.mark.parametrize("kind", ["sequence", "one layer", "eval", "parts"])
def test_what_checkpoints_cannot_hold_is_held_in_eager_mode(running: Running, kind: str) -> None:
    model = {
        "sequence": nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 16)),
        "one layer": nn.Linear(16, 16),
    }.get(kind) or _Model()
    model.train(kind != "eval")
    call = "parts" if kind == "parts" else "__call__"
    held = _train(copied := copy.deepcopy(model), call)
    found = running.end()
    assert _equal(held, _train(model, call))
    assert len(found) == 1
    assert found[0].history is None
    assert found[0].why
    assert "forward" not in vars(copied)


@pytest.mark.parametrize("kind", ["alone", "in turns", "evaluated"])
def test_a_step_that_checkpoints_cannot_hold_goes_on_in_eager_mode(running: Running, kind: str) -> None:
    def train(models: list[nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
        for _ in range(6):
            for model, optimizer in zip(models, optimizers, strict=True):
                model(torch.randn(512, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if kind == "evaluated":
                    with torch.no_grad():
                        model.eval()(torch.randn(16, 16))
                    model.train()
        return [parameter.detach().clone() for model in models for parameter in model.parameters()]

    models = [Outside() for _ in range(2 if kind == "in turns" else 1)]
    held = train(copied := copy.deepcopy(models))
    found = running.end()
    assert _equal(held, train(models))
    assert [each.history is None for each in found] == [False] * len(models) + [True]
    last = found[-1].shown()
    assert last.steps >= 2
    assert last.over == 0
    assert "with all checkpoints" in found[-1].why
    assert not [name for model in copied for each in model.modules() for name in vars(each) if name == "forward"]


def test_two_models_with_optimizers_of_their_own_share_the_budget(running: Running) -> None:
    _train(one := _Model())
    _train(other := _Model())
    assert [each.name for each in running.end()] == ["_Model", "_Model"]
    assert one is not other


def test_models_of_one_step_share_a_plan() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(_Block(64) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def train(models: list[nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
        for _ in range(6):
            data = torch.randn(2048, 64)
            (models[1](models[0](data).tanh()) - data).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().clone() for model in models for parameter in model.parameters()]

    models: list[nn.Module] = [Blocks(), Blocks()]
    before_bytes = allocated_bytes("cpu")
    with record("cpu") as usage:
        bare = train(copied := copy.deepcopy(models))
    budget = before_bytes + int(0.7 * (usage.start_bytes + usage.peak_bytes - before_bytes))
    del copied
    gc.collect()
    running = Running(budget)
    running.begin()
    held = train(models)
    found = running.end()
    assert _equal(bare, held)
    assert _by(found) == [("Blocks and Blocks", False, "")]
    assert found[0].history is not None
    assert found[0].history.over == 0


def test_a_layer_that_is_added_to_a_model_is_held_with_it(running: Running) -> None:
    model = _Model()
    _train(model, steps=2)
    model.blocks.append(_Block())
    bare = _train(copy.deepcopy(model), steps=2)
    held = _train(model, steps=2)
    assert _equal(bare, held)
    assert "_Block" not in [each.name for each in running.end()]


def test_layers_of_a_model_that_are_called_in_a_row_are_no_model(running: Running) -> None:
    """Memfit calls pieces of a sequence of single layers, and code may make a sequence in each call."""

    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[each for _ in range(4) for each in (nn.Linear(16, 16), nn.Tanh())])
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.Sequential(self.first, nn.ReLU(), self.second)(self.layers(x))

    model = Rows()
    bare = _train(copy.deepcopy(model))
    running.end()
    again = Running("20MiB")
    again.begin()
    held = _train(model)
    assert _by(again.end()) == [("Rows", False, "")]
    assert _equal(bare, held)


def test_parameters_that_are_computed_from_others_are_no_models(running: Running) -> None:
    model = _Model()
    for block in model.blocks:
        parametrizations.weight_norm(cast("_Block", block).inner)
        parametrizations.spectral_norm(cast("_Block", block).outer)  # which computes it once
    penalty = cast("_Block", model.blocks[0]).inner.weight.square().sum()
    penalty.backward()
    _train(model, steps=2)
    assert _by(running.end()) == [("_Model", False, "")]


def test_teachers_evaluations_and_losses_are_not_held(running: Running) -> None:
    teacher = _Model().requires_grad_(requires_grad=False)
    teacher(torch.randn(2, 16))
    with torch.no_grad():
        _Model()(torch.randn(2, 16))
    nn.CrossEntropyLoss()(torch.randn(2, 4, requires_grad=True), torch.tensor([0, 1]))
    assert running.end() == []


def test_an_evaluation_before_training_that_takes_more_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = _Model()
    running = Running(budget="64MiB")
    running.begin()
    try:
        with torch.no_grad():
            model(torch.randn(2, 16))
            assert not caplog.records
            model(torch.randn(1 << 20, 16))
            with pytest.raises(RuntimeError, match="shapes"):
                model(torch.randn(1 << 15, 15))  # it ends as it would
            with torch.inference_mode():
                model(torch.randn(1 << 20, 16))
    finally:
        assert running.end() == []
    (said,) = (record.getMessage() for record in caplog.records)
    assert "_Model: a call without gradients took" in said
    assert "the budget of 64 MiB" in said
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_evaluation_before_training_may_have_a_share_of_the_card(caplog: pytest.LogCaptureFixture) -> None:
    running = Running(budget="90% of the card")
    running.begin()
    try:
        with torch.no_grad():
            _Model()(torch.randn(2, 16))
    finally:
        assert running.end() == []
    assert not caplog.records


def test_a_model_that_the_script_is_done_with_is_not_kept_alive(running: Running) -> None:
    import gc
    import weakref

    model = _Model()
    _train(model, steps=2)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    (found,) = running.end()
    assert found.report is None
    assert found.shown().steps == 1


def test_an_update_that_no_call_was_seen_for_is_refused(running: Running) -> None:
    alone = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([alone], lr=0.1)
    alone.square().sum().backward()
    with pytest.raises(UnsupportedStepError, match="no call of a module was seen"):
        optimizer.step()
    assert running.end() == []


@pytest.mark.parametrize(("door", "refusal"), [("checkpoint", BudgetNotHeldError), ("auto", OverBudgetError)])
def test_a_budget_that_no_plan_keeps_is_refused(door: str, refusal: type[OverBudgetError]) -> None:
    running = Running("1MiB", door=door)
    running.begin()
    with pytest.raises(refusal) as raised:
        _train(_Model(), steps=3)
        running.end()
    found, *_ = running.end(raised.value)
    assert found.shown().over == found.shown().steps


@pytest.mark.slow
@pytest.mark.parametrize("script", ["gpt2", "resnet", "accumulation", "trainer", "lightning_fit", "gan", "ddp"])
def test_scripts_of_the_usual_kinds(script: str) -> None:
    folder = Path(__file__).parents[1] / "benchmarks"
    done = subprocess.run(
        [sys.executable, "run_scripts.py", script, "--shares", "90"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(folder.parent)},
    )
    assert ", same; ['memfit" in done.stdout
    assert "OTHER" not in done.stdout
