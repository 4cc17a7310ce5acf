"""Code of modules that is replaced after a step was captured: hooks that are added, methods of classes that are set."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import memfit
from memfit.capture.code_reads import is_own
from memfit.errors import UnsupportedStepError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Using `torch.compile.module.` when there are global hooks"),
]


class Layers(nn.Module):
    """Linear layers, and a method of its own between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])
        self.is_broken = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = self.between(layer(inputs))
        if self.is_broken and inputs.sum() > -1e9:
            inputs = inputs * 1.5
        return self.layers[0](inputs)

    def between(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.tanh(inputs)


Undo = Callable[[], object]
Change = Callable[[Layers], Undo]


def _set(owner: Any, name: str, value: Any) -> Undo:
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before) if before is not None else delattr(owner, name)


linear_forward = nn.Linear.forward
CHANGES: dict[str, Change] = {
    "a hook after a module": lambda own: own.layers[1].register_forward_hook(lambda *given: given[-1] * 1.5).remove,
    "a hook before a module": lambda own: (
        own.layers[1].register_forward_pre_hook(lambda _module, given: (given[0] * 1.5,)).remove
    ),
    "a hook on the model": lambda own: own.register_forward_hook(lambda *given: given[-1] * 1.5).remove,
    "a hook after all modules": lambda _own: register_module_forward_hook(lambda *given: given[-1] * 1.1).remove,
    "a hook before all modules": lambda _own: (
        register_module_forward_pre_hook(lambda _module, given: (given[0] * 1.1,)).remove
    ),
    "a method of the model's class": lambda _own: _set(Layers, "between", lambda _self, inputs: torch.relu(inputs)),
    "forward of torch's class": lambda _own: _set(
        nn.Linear, "forward", lambda self, inputs: linear_forward(self, inputs) * 2
    ),
    "forward of one module": lambda own: _set(own.layers[1], "forward", lambda inputs: inputs * 2),
}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _run_eager(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = _loss(model, batch)
    loss.backward()
    return loss.detach()


def _fitted(model: Layers) -> Callable[[torch.Tensor], torch.Tensor]:
    return memfit.fit(model, _loss, torch.randn(16, 32), budget="2GiB", planner="none")


def _broken(model: Layers) -> Callable[[torch.Tensor], torch.Tensor]:
    model.is_broken = True
    return _fitted(model)


def _compiled(model: Layers) -> Callable[[torch.Tensor], torch.Tensor]:
    memfit.compile(model, budget="2GiB", reserve=0, planner="none")
    return lambda batch: _run_eager(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("planned", [_fitted, _broken, _compiled])
def test_steps_follow(planned: Callable[[Layers], Any], name: str) -> None:
    model = Layers()
    eager = copy.deepcopy(model)
    step = planned(model)
    eager.is_broken = model.is_broken
    runs: list[tuple[nn.Module, Any]] = [(eager, lambda batch: _run_eager(eager, batch)), (model, step)]
    torch.manual_seed(1)
    batches = torch.randn(9, 16, 32)
    outcomes: list[list[torch.Tensor]] = []
    for own, run in runs:
        own.zero_grad()
        losses = [run(batch).clone() for batch in batches[:3]]
        undo = CHANGES[name](own)
        try:
            losses += [run(batch).clone() for batch in batches[3:6]]
        finally:
            undo()
        losses += [run(batch).clone() for batch in batches[6:]]
        outcomes.append(losses + [p.grad for p in own.parameters() if p.grad is not None])
    for number, (expected, mine) in enumerate(zip(*outcomes, strict=True)):
        assert torch.equal(mine, expected), number
    assert not torch.equal(outcomes[0][3], _loss(eager, batches[3])), "the change changes nothing"


def test_the_backend_refuses_hooks_on_all_modules_that_come_later() -> None:
    model = Layers()
    compiled = torch.compile(model, backend="memfit", options={"budget": "2GiB", "reserve": 0})
    _loss(compiled, torch.randn(16, 32)).backward()
    hook = register_module_forward_hook(lambda *_given: None)
    try:
        with pytest.raises(UnsupportedStepError, match="hooks on all modules"):
            compiled(torch.randn(16, 32))
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("filename", "own"),
    [
        ("/home/me/project/.venv/lib/python3.11/site-packages/transformers/modeling_utils.py", False),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", False),
        (torch.__file__, False),
        (copy.__file__, False),
        ("/home/me/project/model.py", True),
        ("/home/me/site-packages-of-mine/model.py", True),
        ("<ipython-input-1>", True),
    ],
)
def test_code_of_every_environment_is_a_librarys(filename: str, own: bool) -> None:
    """One that is built on another environment has packages in two folders; those of the second are no user's code."""
    assert is_own(filename) is own


def test_code_in_a_folder_that_an_installer_has_filled_is_a_librarys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `pip install --target`, or a folder that a .pth file names; an editable project's folder is the user's."""
    installed, project = tmp_path / "libs", tmp_path / "src"
    (installed / "transformers-5.0.dist-info").mkdir(parents=True)
    project.mkdir()
    monkeypatch.setattr(sys, "path", [str(installed), str(project), *sys.path])
    assert not is_own(str(installed / "transformers" / "modeling.py"))
    assert is_own(str(project / "model.py")) and is_own(str(tmp_path / "train.py"))
