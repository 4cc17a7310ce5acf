"""Options: their names, texts and defaults are the same in Python, on the command line and in the docs."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import memfit
from memfit.cli import app
from memfit.errors import InvalidOptionError
from memfit.options import CompileOptions, FitOptions, FunctionOptions, SearchOptions, help_texts, settings_from
from memfit.planning import Settings

DOCS = Path(__file__).parent.parent / "docs"


def table_of(record: type) -> str:
    rows = [f"| `{name}` | {text} |" for name, text in help_texts(record).items()]
    return "\n".join(["| option | meaning |", "| --- | --- |", *rows])


@pytest.mark.parametrize(("page", "record"), [("python.md", FitOptions), ("torch-compile.md", CompileOptions)])
def test_the_tables_in_the_docs_are_made_of_the_help_texts(page: str, record: type) -> None:
    expected = table_of(record)
    assert expected in (DOCS / page).read_text(), f"docs/{page} has to have:\n{expected}"


@pytest.mark.parametrize("record", [SearchOptions, FunctionOptions, FitOptions])
def test_options_of_plans_are_settings(record: type) -> None:
    known = {field.name.removesuffix("_bytes") for field in fields(Settings)}
    assert set(help_texts(record)) <= known


def test_none_is_the_default() -> None:
    given: dict[str, Any] = dict.fromkeys(help_texts(FitOptions))
    assert settings_from("1GiB", given) == Settings(budget="1GiB", stops_on_interrupt=True)


def test_an_option_that_does_not_exist_is_refused_with_the_nearest_one() -> None:
    model, batch = torch.nn.Linear(2, 2), torch.ones(1, 2)
    wrong: dict[str, Any] = {"time_limit_second": 1.0}
    for door, asked in {
        "memfit.fit": lambda: memfit.fit(model, lambda model, batch: model(batch).sum(), batch, budget="1GiB", **wrong),
        "memfit.fit_function": lambda: memfit.fit_function(lambda state, _: state + 1, batch, budget="1GiB", **wrong),
        "memfit.compile": lambda: memfit.compile(model, budget="1GiB", **wrong),
    }.items():
        with pytest.raises(InvalidOptionError, match=f"{door}: option 'time_limit_second' .* mean 'time_limit_sec"):
            asked()


def test_the_command_line_has_the_same_texts() -> None:
    shown = CliRunner().invoke(app, ["fit", "--help"], env={"COLUMNS": "1000", "TERM": "dumb"}).output
    for name in ("seed", "hard", "budget_is", "host_dir", "time_limit_seconds"):
        text = help_texts(FitOptions)[name]
        assert text[1:40] in shown, name
