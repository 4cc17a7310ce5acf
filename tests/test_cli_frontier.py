"""`memfit frontier` and `memfit.frontier`: what fits a budget, at which sizes and at what price."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import MOVES

import memfit
from memfit.cli import main
from memfit.report.frontier_page import BatchPoint, FrontierRow, winners

UNET = ("--set", "width=4", "--device-profile", "t4", "--largest", "64", *MOVES)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    status = main(["frontier", *arguments, "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out), err


@pytest.mark.slow
def test_larger_sizes_leave_room_for_smaller_batches(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "frontier.html"
    arguments = ("unet", "--budget", "4MiB", "--set", "size=16,32,256", *UNET, "--report", str(page))
    status, found, _ = answer(capsys, *arguments)
    assert status == 0
    assert [row["options"] for row in found["rows"]] == [{"size": each, "width": "4"} for each in ("16", "32", "256")]
    batches = [row["largest_batch"] for row in found["rows"]]
    assert batches[0] > batches[1] >= 1
    assert batches[2] == 0
    for row in found["rows"]:
        assert all(point["peak_bytes"] <= found["budget_bytes"] == 4 << 20 for point in row["points"])
    text = page.read_text()
    assert "size 32, width 4" in text and "a batch of 1 takes" in text


@pytest.mark.slow
def test_the_table_names_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["frontier", "unet", "--budget", "4MiB", "--set", "size=16,256", *UNET]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:4] == ["size", "width", "largest", "batch"]
    assert "a batch of 1 takes" in lines[3]


def test_a_function_of_ones_own_is_called_with_each_combination() -> None:
    seen: list[tuple[int, bool]] = []

    def make_step(width: int, bias: bool = True) -> memfit.TrainingStep:
        seen.append((width, bias))
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=bias) for _ in range(4)))
        batch = (torch.randn(4, width), torch.randn(4, width))
        return memfit.TrainingStep(model=model, loss=torch.nn.MSELoss(), batch=batch, name="unet")

    over = {"width": [32, 64], "bias": [True, False]}
    rows = memfit.frontier(make_step, budget="1MiB", over=over, device_profile="t4", planner="none", largest=64)
    assert seen == [(32, True), (32, False), (64, True), (64, False)]
    assert [row.options for row in rows] == [{"width": width, "bias": bias} for width, bias in seen]
    for row in rows:
        assert row.largest is not None and row.fastest is not None
        assert row.largest.overhead == 0.0
        assert row.largest.batch == row.largest_batch >= row.fastest.batch


@pytest.mark.slow
def test_without_options_there_is_one_row(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch, memfit\n"
        "def make_step(width=8):\n"
        "    batch = (torch.randn(4, width), torch.randn(4, width))\n"
        "    return memfit.TrainingStep(model=torch.nn.Linear(width, width), loss=torch.nn.MSELoss(), batch=batch)\n"
    )
    target = f"{path}:make_step"
    (row,) = memfit.frontier(target, budget="1MiB", device_profile="t4", planner="none", largest=8)
    assert row.options == {}
    assert row.largest_batch == 8
    rows = memfit.frontier(target, budget="1MiB", over={"width": ["8", "1000"]}, device_profile="t4", planner="none")
    assert rows[0].largest_batch > rows[1].largest_batch == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("unet", "--budget", "60%"), "is a share of a peak that grows with the batch"),
        (("unet", "--budget", "1GiB", "--set", "size=16,,32"), "expected values with commas between them"),
        (("unet", "--budget", "1GiB", "--set", "size=16,16"), "each once"),
        (("unet", "--budget", "1GiB", "--set", "sizes=16"), "did you mean 'size'"),
        (("unet", "--budget", "1GiB", "--set", "size"), "expected NAME=VALUE"),
        (("nothing", "--budget", "1GiB"), "is none of: a built-in workload"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str) -> None:
    status, document, err = answer(capsys, *arguments)
    assert status == document["exit_status"] == 2
    assert words in err


def test_the_page_names_the_winner_among_combinations() -> None:
    def row(width: int, largest: int, speeds: dict[int, float]) -> FrontierRow:
        points = [
            BatchPoint(batch=batch, least_bytes=1, peak_bytes=1, overhead=0.0, samples_per_second=speed)
            for batch, speed in speeds.items()
        ]
        return FrontierRow(options={"width": width}, largest_batch=largest, points=points)

    rows = [
        row(128, 8, {4: 50.0, 8: 40.0}),
        row(256, 2, {2: 20.0}),
        FrontierRow(options={}, largest_batch=0, points=[]),
    ]
    assert winners(rows) == (
        "The most samples a second, 50.0, are those of width 128 at a batch of 4; "
        "the largest batch, 8, fits with width 128."
    )
    assert winners(rows[1:2]).endswith("at a batch of 2, the largest batch.")
    assert winners(rows[2:]) == "No plan was found for any combination."
