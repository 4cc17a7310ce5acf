"""A short run of the fuzzer of training steps; `benchmarks/fuzz_steps.py` runs longer ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import _fuzz_cases
import _fuzz_worlds
import fuzz_steps

# Changes and blocks that once gave other numbers without a word: a replaced layer, tied, flattened and restrided
# parameters, a hook, a cleared group, Dropout's p, and a generator of the user's in a step that is no graph.
SEEDS = (5, 17, 18, 25, 90, 235)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_keeps_eagers_bits_and_its_budget_or_is_refused(seed: int) -> None:
    outcome = fuzz_steps.run_case(_fuzz_cases.case_of(seed))
    assert outcome.kind in (fuzz_steps.SAME, fuzz_steps.REFUSED), outcome


@pytest.mark.slow
def test_a_difference_is_found_and_shrunk_to_what_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that only one of the two worlds sees is a difference, and the rest of the case is left out."""
    case = _fuzz_cases.Case(
        seed=1, blocks=("gelu", "linear"), loss="cross_entropy", optimizer="adam", clip_norm=1.0, budget="100%",
        batch=8, steps=4, changes=((1, "scale_weights"), (2, "learning_rate")),
    )  # fmt: skip
    change = fuzz_steps.change

    def unfair(name: str, *worlds: _fuzz_worlds.World) -> None:
        change(name, *(worlds[:1] if name == "scale_weights" else worlds))

    monkeypatch.setattr(fuzz_steps, "change", unfair)
    outcome = fuzz_steps.run_case(case)
    assert outcome.kind == fuzz_steps.DIFFERENT
    smallest, found = fuzz_steps.shrunk(case, outcome)
    assert found.kind == fuzz_steps.DIFFERENT
    assert smallest.changes == ((1, "scale_weights"),)
    assert smallest.blocks == ()
    assert smallest.optimizer == "sgd"
