"""`memfit batch`: the largest batch that fits, the next size that does not, and bad input as one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import MOVES

from memfit.cli import main

UNET = ("--set", "size=32", "--set", "width=4", "--device-profile", "t4", *MOVES)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    status = main(["batch", *arguments, "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out), err


@pytest.mark.slow
def test_the_largest_batch_fits_and_costs_more_than_the_smallest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "batch.html"
    status, found, _ = answer(capsys, "unet", "--budget", "4MiB", *UNET, "--report", str(page))
    assert status == 0
    points = {point["batch"]: point for point in found["points"]}
    assert max(points) == found["largest_batch"] >= 2
    assert all(point["peak_bytes"] <= 4 << 20 for point in points.values())
    assert min(found["infeasible"] + found["timed_out"]) > found["largest_batch"]
    assert points[max(points)]["overhead"] >= points[min(points)]["overhead"]
    assert "samples a second" in page.read_text()


@pytest.mark.slow
def test_a_file_of_the_users_own_is_tried_with_other_batches(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch, memfit\n"
        "def make_step():\n"
        "    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))\n"
        "    batch = (torch.randn(4, 64), torch.randn(4, 64))\n"
        "    return memfit.TrainingStep(model=model, loss=torch.nn.MSELoss(), batch=batch)\n"
    )
    options = ("--device-profile", "t4", *MOVES, "--largest", "100")
    status, found, _ = answer(capsys, f"{path}:make_step", "--budget", "100MiB", *options)
    assert (status, found["largest_batch"]) == (0, 100)
    assert main(["batch", f"{path}:make_step", "--budget", "100MiB", *options]) == 0
    assert f"{path}:make_step: the largest batch within 100 MiB is 100" in "".join(capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("unet", "--budget", "60%", *UNET), 2, "is a share of a peak that grows with the batch"),
        (("unet", "--budget", "200KiB", *UNET), 3, "not even a batch of 1 fits"),
        (("unet", "--budget", "1GiB", "--largest", "0", *UNET), 2, "--largest"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, words: str) -> None:
    found_status, document, err = answer(capsys, *arguments)
    assert found_status == status
    assert words in err
    assert document["exit_status"] == status
