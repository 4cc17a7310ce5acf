"""The arena at full size, and the tables of what its benchmarks stored."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))  # the scripts import one another as scripts do

import _record
import arena_captured
import arena_growth
import arena_seq2seq
import tables

from memfit import TrainingStep

CASES = [("alexnet", 32), ("alexnet", None), ("googlenet", 32), ("bninception", 32)]


@pytest.mark.parametrize(("name", "batch"), CASES)
def test_the_arena_is_as_low_as_the_peak_of_live_bytes(name: str, batch: int | None) -> None:
    result = arena_captured.figures(name, batch)
    assert result["proven"]
    assert 1.0 <= result["arena_over_peak"] <= arena_captured.MOST_RATIO
    assert result["peak_live_bytes"] <= result["arena_bytes"] < result["apart_bytes"]


def test_sentences_without_padding_are_trained_on_as_one_by_one() -> None:
    lengths = [(3, 2), (1, 4), (4, 1), (3, 3)]
    torch.manual_seed(0)
    model = arena_seq2seq.PapersSeq2seq(vocabulary=11, units=8).double()
    whole = model.loss_of(arena_seq2seq.sorted_words(lengths))
    alone = [model.loss_of(arena_seq2seq.sorted_words([each])) * each[1] for each in lengths]
    torch.testing.assert_close(whole, torch.stack(alone).sum() / sum(target for _, target in lengths))


def test_only_the_arena_takes_no_more_after_steps_of_other_sizes() -> None:
    def step(rows: int) -> TrainingStep:
        model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512))
        return TrainingStep(model=model, loss=lambda model, batch: model(batch).sum(), batch=torch.ones(rows, 512))

    steps = [arena_growth.unplanned(step(rows)) for rows in (2048, 3000, 2500, 3100)]
    highest_bytes = max(arena_growth.laid_out(*each)[0] for each in steps)
    pool, arena = (arena_growth.after_each(steps, None, height) for height in (None, highest_bytes))
    exact = arena_growth.in_exact_pool(steps)
    assert exact == sorted(set(exact)) and len(exact) == len(steps), "no block serves a step of another size"
    assert pool[0] < pool[-1] < exact[-1]
    assert set(arena) == {arena[0]} and arena[0] <= pool[-1]


def result(**figures: Any) -> dict[str, Any]:
    return {
        "blocks": 1234,
        "apart_bytes": 30 << 20,
        "peak_live_bytes": 10 << 20,
        "arena_bytes": 11 << 20,
        "reserved": {"pool": 13 << 20, "expandable": 12 << 20, "arena": 12 << 20},
        "arena_over_peak": 1.1,
        "arena_over_apart": 11 / 30,
        "solver_seconds": 0.25,
        "time_ratio": 0.987,
        "not_served": 3,
        **figures,
    }


def test_tables_of_the_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    requests = {"arena_nanoseconds": 48.4, "plain_nanoseconds": 135.0}
    for path, results in {
        "arena_captured/alexnet": {"training 32": result()},
        "arena/alexnet": {"training 8": result(per_request=requests), "inference": {"error": "too slow"}},
        "arena/seq2seq": {"training 16": {"keyed": result(solver_seconds_all=2.5), "unkeyed": result()}},
        "arena/single_sizes": {"all": {"64": requests, "repeats": 3}},
    }.items():
        _record.store(path, {"results": results}, folder=tmp_path / "here")
    full, small, each = (tables.render(f"arena-{name}", "here") for name in ("captured", "measured", "requests"))
    assert full is not None and small is not None and each is not None
    assert (
        "| alexnet | training 32 | 1,234 | 30.0 | 10.0 | 11.0 | 1.1000 | 0.367 | 13.0 | 12.0 | 12.0 | 0.92 | 0.25 |"
        in full
    )
    assert "| alexnet | training 8 | 30.0 | 10.0 | 11.0 | 1.1000 | 0.987 | 0.25 | 3 |" in small
    assert (
        "| seq2seq | training 16, a key for each pair of lengths | 30.0 | 10.0 | 11.0 | 1.1000 | 0.987 | 2.50 |"
        in small
    )
    assert "inference" not in small
    assert "| of alexnet, training 8 | 48 | 135 |" in each
    assert "| of 64 bytes, ten alive | 48 | 135 |" in each
