"""Random steps against eager: every bit of twenty steps, and every step's bytes against the budget.

A seed is a module of random blocks, a loss, an optimizer, a budget, and changes between steps (`_fuzz_cases.py`). Two
worlds are built from it. One trains in eager, the other by `memfit.fit`; after every step all that training leaves is
compared. A case ends as:

    same        all bits are equal, and every step kept its budget or was reported and corrected
    refused     memfit said in an error of its own why it will not, as its page on limits has it; messages are counted
    unexpected  it refused for another reason, ran a step as no graph that has no branch on a value, or did not compare
    false bound a step of eager took less than what is said to be proved that every plan takes
    different   a bit differs, and nobody was told
    over        a step took more than its budget, and nobody was told
    traceback   an error that is not memfit's, where eager has none
    eager       eager itself cannot run the case

What fails is shrunk: a case with one thing less that fails alike takes its place, until there is none.

    python benchmarks/fuzz_steps.py                        # seeds 0 to 1,999, stored: about two hours of two cores
    python benchmarks/fuzz_steps.py --seeds 40 --no-store  # a short run
    python benchmarks/fuzz_steps.py --first 17 --seeds 1 --show
    python benchmarks/fuzz_steps.py --first 21000 --seeds 500   # later seeds, added to those that are stored
    python benchmarks/fuzz_steps.py --again                # what failed among the later seeds, with the code of now
    python benchmarks/fuzz_steps.py --put-back             # each known defect, put back, is found; stored
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from _fuzz_blocks import BLOCKS, NO_GRAPH
from _fuzz_cases import Case, case_of, world_of
from _fuzz_changes import CHANGES, GLOBAL_CHANGES, reset
from _fuzz_defects import DEFECTS
from _fuzz_observed import first_difference, observed, seeded
from _fuzz_worlds import LOSSES, OPTIMIZERS, World
from _record import load, result_path, store

import memfit
from memfit.errors import InfeasibleBudgetError, MemfitError, NoPlanError, TimeLimitError
from memfit.step.measure import resident_bytes
from memfit.system.recorder import record

SAME, REFUSED, DIFFERENT, OVER, TRACEBACK, EAGER = "same", "refused", "different", "over", "traceback", "eager"
UNEXPECTED, FALSE_BOUND = "unexpected", "false bound"
FAILURES = (DIFFERENT, OVER, TRACEBACK, UNEXPECTED, FALSE_BOUND)
EXPECTED = re.compile(  # what `docs/limits.md` says is refused, as far as a seed can ask for it
    r"the step draws from|reads it in the next step|inside torch\.autocast|calls backward\(\) itself|retain_graph"
    "|which eager casts under|compiles around that line give other bits|with use_reentrant=True, which runs"
)
NOT_COMPARED = re.compile(r"not compared(?!.*takes more than)")  # with eager's calls, for another reason than bytes
MOVES = 500  # of one search: plans need not be good here
CASES_PER_PROCESS = 25  # then a fresh one takes over


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a case ended: one of the words above, at which step, with what to say; and the ops of its graph."""

    kind: str
    step: int
    text: str = ""
    ops: tuple[str, ...] = ()


def run_case(case: Case) -> Outcome:
    """Train both worlds of a case and compare them after every step."""
    reset()
    try:
        with torch.random.fork_rng(devices=[]):
            return _compare(case, world_of(case), world_of(case))
    finally:
        reset()


class _Said(logging.Handler):
    """Keeps what memfit has said in the case that runs; nothing is printed."""

    texts: ClassVar[list[str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _compare(case: Case, eager: World, planned: World) -> Outcome:
    ops: tuple[str, ...] = ()
    number = -1
    _Said.texts.clear()
    try:
        with seeded(case, number):
            step = fitted(case, planned, eager.batch())
        if isinstance(step, memfit.PlannedStep):
            ops = tuple(sorted({op.target for op in step.captured.graph.ops}))
        elif NO_GRAPH.isdisjoint((*case.blocks, case.loss)):
            return Outcome(kind=UNEXPECTED, step=number, text="run without a graph")
        for number in range(case.steps):
            for at, name in case.changes:
                if at == number:
                    try:
                        change(name, eager, planned)
                    except Exception as error:  # noqa: BLE001 - as in eager: torch cannot make this change
                        return Outcome(kind=EAGER, step=number, text=_line(error), ops=ops)
            batch = eager.batch()
            # In the second step the optimizer's state is there.
            is_first_plan = number == 1 and case.optimizer != "none" and all(at > number for at, _ in case.changes)
            held_bytes = _resident_bytes(step, batch) if is_first_plan else 0
            try:
                with record("cpu") as usage:
                    wanted = observed(case, number, eager, partial(eager_step, eager, batch))
            except Exception as error:  # noqa: BLE001 - the case itself is at fault, whatever it is
                return Outcome(kind=EAGER, step=number, text=_line(error), ops=ops)
            if held_bytes and held_bytes + usage.peak_bytes < step.plan.bounds.least_budget_bound_bytes:
                text = f"{held_bytes + usage.peak_bytes} bytes, {step.plan.bounds.least_budget_bound_bytes} proved"
                return Outcome(kind=FALSE_BOUND, step=number, text=text, ops=ops)
            over_bytes, got = _measured(case, number, planned, step, batch)
            different = first_difference(wanted, got)
            if different:
                told = next((text for text in _Said.texts if "last bits may differ from eager's" in text), "")
                return Outcome(kind=REFUSED if told else DIFFERENT, step=number, text=told or different, ops=ops)
            if over_bytes > 0:
                return Outcome(kind=OVER, step=number, text=f"{over_bytes} bytes", ops=ops)
    except MemfitError as error:
        is_expected = EXPECTED.search(str(error)) or (number >= 0 and _nothing_takes_less(error))  # it grew since
        kind = REFUSED if is_expected else UNEXPECTED
        return Outcome(kind=kind, step=number, text=_line(error), ops=ops)
    except Exception as error:  # noqa: BLE001 - it is counted
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(kind=TRACEBACK, step=number, text=f"{_line(error)} ({frame.filename}:{frame.lineno})", ops=ops)
    skipped = next((text for text in _Said.texts if NOT_COMPARED.search(text)), "")
    return Outcome(kind=UNEXPECTED if skipped else SAME, step=case.steps, text=skipped, ops=ops)


def _nothing_takes_less(error: MemfitError) -> bool:
    """Return whether an error says that nothing takes less: what is recomputed, or any plan, as is proved."""
    says = "keeps as little as can be", "and no plan fits"
    return isinstance(error, NoPlanError) or any(words in str(error) for words in says)


def _resident_bytes(step: Any, batch: Any) -> int:
    """Return the bytes of what a whole planned step finds on the device; the eager world holds as much. Else 0."""
    return resident_bytes(step, batch) if isinstance(step, memfit.PlannedStep) else 0


def fitted(case: Case, world: World, batch: Any) -> Any:
    """Return the planned step of a world: within the case's budget, or else within the least that is said to work."""
    fit = partial(
        memfit.fit,
        world.model,
        world.loss,
        batch,
        optimizer=world.optimizer,
        clip_norm=world.clip_norm,
        options={"iterations": MOVES},
    )
    try:
        return fit(budget=case.budget)
    except (InfeasibleBudgetError, TimeLimitError) as error:
        if error.least_budget_found_bytes is None:
            raise
        return fit(budget=error.least_budget_found_bytes)


def _measured(case: Case, number: int, world: World, step: Any, batch: Any) -> tuple[int, dict[str, Any]]:
    """Run a planned step; return by how many bytes it was over its budget without saying so, and what it left."""
    if not isinstance(step, memfit.PlannedStep):  # under checkpoints: its reports tell
        return 0, observed(case, number, world, lambda: step(batch))
    corrections, plans, bytes_before = len(step.corrections), step.plans, _resident_bytes(step, batch)
    peaks_bytes: list[int] = []

    def recorded() -> torch.Tensor:
        with record("cpu") as usage:
            loss = step(batch)
        peaks_bytes.append(bytes_before + usage.peak_bytes)
        return loss

    got = observed(case, number, world, recorded)
    is_new = any(all(plan is not known for known in plans) for plan in step.plans)
    if len(step.corrections) > corrections or is_new:  # a new plan's ops were measured in the call
        return 0, got
    told_bytes = [each.measured_bytes for each in step.corrections if each.aim_bytes is None]  # once; no plan mends it
    allowed_bytes = [int(step.settings.budget), *(plan.budget_bytes for plan in step.plans)]
    return peaks_bytes[0] - max(*told_bytes, *allowed_bytes), got


def eager_step(world: World, batch: Any) -> torch.Tensor:
    """Train as users do without memfit."""
    loss = world.loss(world.model, batch)
    loss.backward()
    if world.clip_norm is not None and world.optimizer is not None:
        optimized = {each for group in world.optimizer.param_groups for each in group["params"]}
        mine = [each for each in world.model.parameters() if each in optimized]
        torch.nn.utils.clip_grad_norm_(mine, world.clip_norm)
    if world.optimizer is not None:
        world.optimizer.step()
        world.optimizer.zero_grad()
    return loss.detach()


def change(name: str, *worlds: World) -> None:
    """Make a change: in each world, or once where the process shares it."""
    if name in GLOBAL_CHANGES:
        GLOBAL_CHANGES[name]()
        return
    for world in worlds:
        with torch.random.fork_rng(devices=[]):
            CHANGES[name](world)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def shrunk(case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
    """Return the smallest case found that fails as this one does."""
    for smaller in case.smaller():
        found = run_case(smaller)
        if found.kind == outcome.kind:
            return shrunk(smaller, found)
    return case, outcome


def run_seed(seed: int) -> tuple[Case, Outcome]:
    """Run the case of a seed; shrink it if it fails."""
    logging.getLogger("memfit").handlers[:] = [_Said()]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    case = case_of(seed)
    outcome = run_case(case)
    return shrunk(case, outcome) if outcome.kind in FAILURES else (case, outcome)


def find_defect(name: str, seeds: int) -> dict[str, Any]:
    """Put a defect back and run the seeds that may show it until one fails, or is refused only then; return which."""
    logging.getLogger("memfit").handlers[:] = [_Said()]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    defect, tried = DEFECTS[name], 0
    for case in map(case_of, range(seeds)):
        if not defect.concerns(case):
            continue
        tried += 1
        with defect.put_back():
            outcome = run_case(case)
        if outcome.kind in FAILURES or (outcome.kind == REFUSED and run_case(case).kind == SAME):
            return {"defect": name, "seed": case.seed, "tried": tried, "kind": outcome.kind, "text": outcome.text}
    return {"defect": name, "seed": None, "tried": tried}


def find_defects(options: argparse.Namespace) -> None:
    """Put back one defect after the other, print and store which seed finds it, and exit 1 if one is not found."""
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        found: list[dict[str, Any]] = []
        for row in pool.imap(partial(find_defect, seeds=options.seeds), DEFECTS, chunksize=1):
            found.append(row)
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    if not options.no_store:
        print(store("fuzz_defects", {"seeds": options.seeds, "defects": found}))
    sys.exit(any(row["seed"] is None for row in found))


def summary(results: list[tuple[Case, Outcome]]) -> dict[str, Any]:
    """Return what is stored: counts of outcomes, refusals by message, failures in full, and what was covered."""
    refusals = Counter(re.sub(r"\d[\d,.]*", "#", outcome.text) for _, outcome in results if outcome.kind == REFUSED)
    tried = [case_of(case.seed) for case, _ in results]
    return {
        "seeds": [[results[0][0].seed, len(results)]],
        "outcomes": dict(Counter(outcome.kind for _, outcome in results)),
        "refusals": dict(refusals.most_common()),
        "eager_errors": dict(Counter(outcome.text for _, outcome in results if outcome.kind == EAGER)),
        "failures": [
            {"case": asdict(case), "outcome": asdict(outcome)} for case, outcome in results if outcome.kind in FAILURES
        ],
        "blocks": {name: sum(name in case.blocks for case in tried) for name in BLOCKS},
        "losses": {name: sum(case.loss == name for case in tried) for name in LOSSES},
        "optimizers": {name: sum(case.optimizer == name for case in tried) for name in OPTIMIZERS},
        "changes": {
            name: sum(name == each for case in tried for _, each in case.changes)
            for name in (*CHANGES, *GLOBAL_CHANGES)
        },
        "ops": dict(Counter(op for _, outcome in results for op in outcome.ops).most_common()),
    }


def together(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored of two runs: lists in turn, and sums of counts."""
    return {
        name: value + other[name]
        if isinstance(value, list)
        else dict((Counter(value) + Counter(other[name])).most_common())
        for name, value in one.items()
    }


def run_again(stored: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored with the outcomes of now in the places of failures; `ops` stay as they were."""
    outcomes, refusals, failures = Counter(stored["outcomes"]), Counter(stored["refusals"]), list[dict[str, Any]]()
    for failure in stored["failures"]:
        result = run_seed(failure["case"]["seed"])
        now = summary([result])
        print(f"{result[0].seed}: {failure['outcome']['kind']}, now {result[1].kind} {result[1].text}", flush=True)
        outcomes += Counter({result[1].kind: 1})
        outcomes -= Counter({failure["outcome"]["kind"]: 1})
        refusals += Counter(now["refusals"])
        failures += now["failures"]
    return {**stored, "outcomes": dict(outcomes), "refusals": dict(refusals.most_common()), "failures": failures}


def main() -> None:
    """Run seeds, print what failed and the counts, and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=2_000, help="how many seeds")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end with what was run by then, and store it")
    parser.add_argument("--show", action="store_true", help="print every case")
    parser.add_argument("--again", action="store_true", help="run again what failed among the stored later seeds")
    parser.add_argument("--put-back", action="store_true", help="put known defects back, one at a time, and find them")
    parser.add_argument("--no-store", action="store_true", help="store nothing")
    options = parser.parse_args()
    if options.put_back:
        find_defects(options)
    later = result_path("fuzz_steps_later")
    if options.again:
        print(store("fuzz_steps_later", run_again(load(later)["payload"])))
        return
    results: list[tuple[Case, Outcome]] = []
    end_seconds = time.monotonic() + 60 * options.minutes
    pool = multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=CASES_PER_PROCESS)
    with pool:
        seeds = range(options.first, options.first + options.seeds)
        for case, outcome in pool.imap(run_seed, seeds):
            results.append((case, outcome))
            if options.show or outcome.kind in FAILURES:
                print(f"{case.seed} {outcome.kind} at step {outcome.step}: {outcome.text}\n  {case}", flush=True)
            if len(results) % 50 == 0:
                print(len(results), dict(Counter(each.kind for _, each in results)), file=sys.stderr, flush=True)
            if time.monotonic() > end_seconds:
                break
    found = summary(results)
    for name in ("outcomes", "refusals", "eager_errors"):
        print(f"{name}: {found[name]}")
    if not options.no_store:
        known = options.first and later.exists()
        found = together(load(later)["payload"], found) if known else found
        print(store("fuzz_steps_later" if options.first else "fuzz_steps", found))
    sys.exit(any(outcome.kind in FAILURES for _, outcome in results))


if __name__ == "__main__":
    main()
