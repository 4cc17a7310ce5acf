"""Shared by all tests: a cache and a number of threads that no other process changes, fixtures, golden files."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

HERE = Path(__file__).parent
GOLDEN = HERE / "golden"
GRAPHS = HERE / "data" / "graphs"  # published by others; see the README there
THAWED = ("test_eager_mode",)  # files whose tests leave freezing to memfit


def _own_cache() -> tempfile.TemporaryDirectory[str]:
    """Set MEMFIT_CACHE, for this process and its children, to a folder that is deleted at the end.

    Costs that another process measured, and plans that it kept, would otherwise change what a test runs. Compiled
    libraries are shared: they are found by a hash of their source.
    """
    shared = Path(os.environ.get("MEMFIT_CACHE") or Path.home() / ".cache" / "memfit")
    folder = tempfile.TemporaryDirectory(prefix="memfit-tests-", ignore_cleanup_errors=True)
    for built in shared.glob("torch-*"):
        (Path(folder.name) / built.name).symlink_to(built.resolve())
    os.environ["MEMFIT_CACHE"] = folder.name
    return folder


_cache = _own_cache()
# Before torch is imported. Threads that wait for one another take many times as long beside other processes, and some
# libraries choose kernels by the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"

sys.path.insert(0, str(HERE))  # for `import reference` and `import strategies`: the tests are no package

from browsing import CHROME, FLAGS, Visit  # noqa: E402
from command_line import Run, without_progress  # noqa: E402
from durations import Durations, fixture_key  # noqa: E402
from frozen import FROZEN  # noqa: E402

# Deadlines measure the machine; the first example of a test may compile.
settings.register_profile("memfit", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("memfit")


_FIRST = {"test_rank_loops.py"}  # few tests that take long: in the end other workers would wait for them
_durations = Durations()
_measured: dict[str, float] = {}  # in this process, or of all that ended


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="write the golden files anew instead of comparing")
    parser.addoption("--store-durations", action="store_true", help="write tests/durations.json anew")
    parser.addoption(
        "--slow-fifth", type=int, help="of the tests marked slow, run those of this fifth only (any number)"
    )


@pytest.hookimpl(tryfirst=True)  # before marks select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none, and slow tests that another run takes."""
    _durations.mark(items)
    fifth = config.getoption("--slow-fifth")
    if fifth is not None:
        slow = [item for item in items if item.get_closest_marker("slow")]
        others = {item for item in slow if not _durations.is_of_fifth(item, fifth)}
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    counts = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path.name not in _FIRST, -counts[item.path], item.path))
    on_device = [item for item in items if item.get_closest_marker("gpu")]
    if on_device and not _has_cuda():
        for item in on_device:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any]) -> Any:
    """Measure a fixture that tests share."""
    began = time.monotonic()
    result = yield
    if fixturedef.scope == "module":
        _measured[fixture_key(fixturedef.baseid, fixturedef.argname)] = time.monotonic() - began
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what a test took."""
    if report.when == "call":
        _measured[report.nodeid] = report.duration


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process of the tests has measured."""
    _measured.update(getattr(node, "workeroutput", {}).get("memfit_fixtures", {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand on what was measured, or store it."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["memfit_fixtures"] = {name: seconds for name, seconds in _measured.items() if "::fixture " in name}
    elif session.config.getoption("--store-durations"):
        _durations.store(_measured)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="module")
def _little_to_collect(request: pytest.FixtureRequest) -> None:
    """Keep what was imported out of garbage collections, which memfit asks for before it measures.

    What a first collection finalizes, as torch.compile's caches, a second one frees: frozen, it would count as memory
    of the process. Eager mode freezes objects itself where nobody else does, which some of its tests leave to it.
    """
    if request.path.stem in THAWED:
        FROZEN.thaw()
    else:
        FROZEN.freeze()


@pytest.fixture(autouse=True)
def _checks_of_distributions() -> Iterator[None]:
    """Give each test the default of `torch.distributions`: the first use of torch.compile in a process turns it off."""
    yield
    if "torch.distributions" in sys.modules:
        sys.modules["torch.distributions"].Distribution.set_default_validate_args(True)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs one command and gives exit status, standard output and standard error."""
    from memfit.cli import main

    def run_command(*words: object) -> tuple[int, str, str]:
        status = main([str(word) for word in words])
        captured = capsys.readouterr()
        return status, captured.out, without_progress(captured.err)

    return run_command


@pytest.fixture
def workspace() -> Iterator[Any]:
    """Return what the steps of `hungry_pair` take beside their ops: set its bytes once a step is planned."""
    from workspace import WORKSPACE

    yield WORKSPACE
    WORKSPACE.bytes = 0
    WORKSPACE.close()


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
    """Return the folder of the graphs that others published."""
    return GRAPHS


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
