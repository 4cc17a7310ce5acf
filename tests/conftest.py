"""What all tests share: how random cases are made, the golden files and the command that renews them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
SHARED_GRAPHS = HERE.parent.parent / "shared" / "data" / "graphs"

sys.path.insert(0, str(HERE))  # for `import reference` and `import strategies`: the tests are no package

from browsing import CHROME, FLAGS, Visit  # noqa: E402
from command_line import Run  # noqa: E402

# Deadlines measure the machine; the first example of a test may compile.
settings.register_profile("memfit", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("memfit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write the golden files anew instead of comparing")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs one command and gives exit status, standard output and standard error."""
    from memfit.cli import main

    def run_command(*words: object) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("step.txt", text)` compares text with tests/golden/step.txt; `pytest --renew-golden` writes it."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--renew-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        assert path.exists(), f"{path} does not exist; run pytest --renew-golden and look at what it writes"
        expected = path.read_text(encoding="utf-8")
        assert text + "\n" == expected, f"{path} differs; if that is right, run pytest --renew-golden"

    return compare


@pytest.fixture(scope="session")
def shared_graphs() -> Path:
    """The folder of published graphs beside the checkout; the test is skipped where it is missing."""
    if not SHARED_GRAPHS.is_dir():
        pytest.skip(f"{SHARED_GRAPHS} does not exist: the published graphs are not on this machine")
    return SHARED_GRAPHS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install memfit[dev]")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROME, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def visit(browser: Any) -> Iterator[Visit]:
    context = browser.new_context(viewport={"width": 1200, "height": 900}, color_scheme="light")
    yield Visit(page=context.new_page())
    context.close()
