"""Planner `dqn`: its equations against plain loops, the paper's worked example, and legal plans."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from chains import chain
from command_line import Run
from devices import LINKED, linked
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import graphs

from memfit.checker import check
from memfit.device import GENERIC, Device
from memfit.errors import InvalidFileError, InvalidOptionError
from memfit.graph import Graph, Op, Phase, Role, Storage
from memfit.papers.dqn.environment import NOTHING, Environment
from memfit.papers.dqn.network import ROUNDS, Network, RowTensors
from memfit.papers.dqn.planner import DqnPlanner
from memfit.papers.dqn.recomputations import moved_ahead
from memfit.papers.dqn.rows import VALID, Act, Kind
from memfit.papers.dqn.training import Agent, Learning
from memfit.plan import Problem, Progress, Status
from memfit.plan_cache import plan_or_kept
from memfit.planners import make_planner
from memfit.planners.engine.order import original_order
from memfit.planners.engine.results import unplanned_peak_bytes
from memfit.planners.engine.retention.decisions import evaluate, keep_only, simulated
from memfit.planners.engine.retention.emit import emit
from memfit.planners.engine.retention.instance import build_instance
from memfit.schedule import Code
from memfit.simulate import simulate

FAST = Device(name="fast", to_host_bytes_per_second=400.0, to_device_bytes_per_second=400.0)
PLENTY = 1 << 40
LEARNING = Learning(learning_rate=1e-3, gamma=0.99, batch=4, replay=100)


def tight(graph: Graph, budget_bytes: int, **fields: object) -> Problem:
    host = {"device": FAST, "host_budget_bytes": PLENTY, **fields}
    return Problem(graph=graph, budget_bytes=budget_bytes, **host)  # type: ignore[arg-type]


def with_backward(graph: Graph, start: int) -> Graph:
    """The same graph, in which backward begins at an op."""
    phases = [Phase.FORWARD if op.id < start else Phase.BACKWARD for op in graph.ops]
    ops = [msgspec.structs.replace(op, phase=phase) for op, phase in zip(graph.ops, phases, strict=True)]
    return Graph.build(name=graph.name, storages=graph.storages, ops=ops, boundaries=graph.boundaries)


def act_at_random(environment: Environment, seed: int) -> None:
    random_numbers = np.random.default_rng(seed)
    environment.reset()
    while not environment.is_terminal:
        environment.step(int(random_numbers.choice(np.flatnonzero(environment.state.valid))))


# -- equations 1 to 3 -------------------------------------------------------------------------------------------------


def neighbours(environment: Environment, v: int) -> list[int]:
    """N(v) as the paper has it: rows that are consecutive or of one storage, and v itself."""
    storage = environment.rows.storage
    return [u for u in range(len(storage)) if abs(u - v) <= 1 or storage[u] == storage[v]]


def plain_states(environment: Environment, network: Network, valid: np.ndarray) -> list[torch.Tensor]:
    rows = environment.rows
    features = torch.from_numpy(rows.features.copy())
    features[torch.from_numpy(environment.actions), VALID] = torch.from_numpy(valid.astype(np.float32))
    step_seconds = environment.unplanned.seconds
    states = [torch.zeros(network[1].shape[0]) for _ in range(len(rows))]
    for _ in range(ROUNDS):
        after: list[torch.Tensor] = []
        for v in range(len(rows)):
            near = neighbours(environment, v)
            lags = [abs(float(rows.seconds[u] - rows.seconds[v])) / step_seconds for u in near]
            edges = torch.stack([torch.relu(network[4] @ torch.tensor([lag])) for lag in lags]).sum(0)
            summed = torch.stack([states[u] for u in near]).sum(0)
            after.append(torch.relu(network[1] @ features[v] + network[2] @ summed + network[3] @ edges))
        states = after
    return states


def test_states_and_q_values_are_those_of_plain_loops() -> None:
    environment = Environment(tight(chain(5), 500))
    rows = RowTensors.of(environment.rows, environment.actions)
    network = Network(6, rows, seed=1)
    with torch.no_grad():
        for parameter in network.parameters():  # large enough that every term matters
            parameter *= 2.0
        pick = np.random.default_rng(0)
        valid = pick.random((len(environment.actions), 3)) < 0.5
        executing = [0, 7, len(environment.rows) - 1]
        batched = network.q_values(rows, torch.from_numpy(valid.astype(np.float32)), torch.tensor(executing))
        for number, current in enumerate(executing):
            states = plain_states(environment, network, valid[:, number])
            graph = torch.cat([network[5] @ torch.stack(states).sum(0), network[6] @ states[current]])
            for action, row in enumerate(environment.actions):
                value = network[7] @ torch.relu(torch.cat([graph, network[8] @ states[row]]))
                assert float(batched[action, number]) == pytest.approx(float(value), rel=1e-4, abs=1e-5)


def test_gradients_of_replayed_states_reach_every_parameter() -> None:
    environment = Environment(tight(chain(8), 500))
    network = Network(8, RowTensors.of(environment.rows, environment.actions), seed=0)
    agent = Agent(environment, network, LEARNING, seed=0)
    agent.episode(0.0, lambda: True)
    network.zero_grad()
    agent.loss(list(agent.replay)).backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None and float(parameter.grad.abs().sum()) > 0, name


def test_the_loss_is_equation_four_with_a_constant_y() -> None:
    environment = Environment(tight(chain(8), 500))
    network = Network(8, RowTensors.of(environment.rows, environment.actions), seed=0)
    agent = Agent(environment, network, LEARNING, seed=0)
    agent.episode(0.0, lambda: True)
    count = len(environment.actions)

    def value(packed: bytes, row: int) -> tuple[np.ndarray, torch.Tensor]:
        valid = np.unpackbits(np.frombuffer(packed, np.uint8), count=count).astype(bool)
        floats = torch.from_numpy(valid.astype(np.float32))[:, None]
        return valid, network.q_values(agent.rows, floats, torch.tensor([row]))[:, 0].detach()

    for step in agent.replay:
        valid, after = value(step.next_valid, step.next_row)
        y = step.reward + (0.0 if step.is_terminal else 0.99 * float(after[torch.from_numpy(valid)].max()))
        q = float(value(step.valid, step.row)[1][step.action])
        assert float(agent.loss([step]).detach()) == pytest.approx((y - q) ** 2, rel=1e-4, abs=1e-7)
    assert [step.is_terminal for step in agent.replay] == [False] * (len(agent.replay) - 1) + [True]


# -- the worked example of section 4.6 --------------------------------------------------------------------------------


def worked_example() -> Graph:
    """X_0 is read at op 3, and by the last op; every op takes a second; op 7 writes far more than the others."""
    sizes = {0: 100, 1: 10, 2: 10, 4: 10, 5: 10, 6: 10, 7: 200}
    number = {op: storage for storage, op in enumerate(sizes)}
    ops = [
        Op(
            id=op,
            name=f"f{op}",
            phase=Phase.FORWARD,
            reads=(0,) if op == 3 else (),
            writes=(number[op],) if op in number else (),
            seconds=1.0,
        )
        for op in range(8)
    ]
    for op in reversed(sizes):
        ops.append(Op(id=len(ops), name=f"b{op}", phase=Phase.BACKWARD, reads=(number[op],), writes=(), seconds=1.0))
    return Graph.build(
        name="worked example",
        storages=[Storage(id=number[op], name=f"X{op}", bytes=sizes[op], role=Role.ACTIVATION) for op in sizes],
        ops=ops,
    )


def at_op_three(budget_bytes: int) -> Environment:
    """The agent at the row in which op 3 reads X_0, after doing nothing."""
    device = linked(100 / 1.5, 100 / 1.5)  # offloading X_0 takes 1.5 seconds
    environment = Environment(tight(worked_example(), budget_bytes, device=device))
    while int(environment.rows.position[environment.state.row]) < 3:
        environment.step(NOTHING)
    assert environment.rows.kind[environment.state.row] == Kind.READ
    assert environment.outcome.begins[3] == 3.0
    return environment


def action_on_first(environment: Environment, act: Act) -> int:
    rows, at = environment.rows, environment.actions
    wanted = (rows.action[at] == act) & (rows.storage[at] == 0) & environment.state.valid
    return int(np.flatnonzero(wanted)[0])


@pytest.mark.parametrize("act", [Act.NOTHING, Act.REMOVE])
def test_after_doing_nothing_or_a_removal_the_agent_is_at_the_next_node(act: Act) -> None:
    environment = at_op_three(200)
    reward = environment.step(NOTHING if act is Act.NOTHING else action_on_first(environment, act))
    assert environment.rows.position[environment.state.row] == 4
    assert reward == (0.0 if act is Act.NOTHING else -1.0 / 15.0)  # X_0 is recomputed in a second


def test_an_offload_takes_the_agent_to_the_next_node_after_its_copy() -> None:
    environment = at_op_three(200)
    environment.step(action_on_first(environment, Act.OFFLOAD))
    assert environment.outcome.carried.trips[0].ends_seconds == 4.5
    assert environment.rows.position[environment.state.row] == 5
    assert environment.outcome.begins[5] == 5.0  # forward has not waited


def test_at_the_limit_the_next_malloc_waits_for_the_copy() -> None:
    environment = at_op_three(120)  # X_0, X_1 and X_2
    reward = environment.step(action_on_first(environment, Act.OFFLOAD))
    assert environment.rows.position[environment.state.row] == 4
    assert environment.rows.kind[environment.state.row] == Kind.MALLOC
    assert environment.outcome.begins[4] == 4.5  # the forward overhead is half a second
    backward = environment.outcome.seconds - environment.unplanned.seconds - 0.5
    assert backward >= 0.0
    assert reward == pytest.approx(-(0.5 + backward) / 15.0)


def test_the_episode_ends_when_the_plan_fits() -> None:
    environment = at_op_three(250)
    environment.step(action_on_first(environment, Act.OFFLOAD))
    assert environment.fits and environment.is_terminal
    assert environment.outcome.peak_bytes == 250
    assert environment.outcome.seconds == environment.unplanned.seconds


def test_a_step_that_cannot_fit_ends_with_the_penalty() -> None:
    environment = at_op_three(120)
    rewards = []
    while not environment.is_terminal:
        rewards.append(environment.step(int(np.flatnonzero(environment.state.valid)[-1])))
    assert not environment.fits
    assert rewards[-1] <= -1.0


# -- actions ----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=14), seed=st.integers(0, 1 << 30))
def test_every_episode_keeps_to_the_rules(graph: Graph, seed: int) -> None:
    pick = random.Random(seed)
    graph = with_backward(graph, pick.randint(0, len(graph.ops)))
    outside = pick.choice((0, 300))
    budget = int(unplanned_peak_bytes(graph, LINKED, outside) * pick.uniform(0.3, 1.0))
    host = pick.choice((0, 200, PLENTY))
    task = tight(graph, budget, device=LINKED, host_budget_bytes=host, bytes_outside=outside)
    environment, numbers = Environment(task), np.random.default_rng(seed)
    rows = environment.rows
    while not environment.is_terminal:
        action = int(numbers.choice(np.flatnonzero(environment.state.valid)))
        row = environment.actions[action]
        if rows.action[row] == Act.REMOVE:
            assert rows.position[environment.state.row] < environment.instance.backward_start
        environment.step(action)
        outcome = environment.outcome
        check(graph, outcome.schedule)
        timeline = simulate(graph, outcome.schedule, LINKED)
        assert outcome.seconds == timeline.makespan_seconds
        assert outcome.carried.held_bytes.max() == outcome.peak_bytes
        assert timeline.host_peak_bytes <= host
        copies = outcome.schedule.codes == Code.OFFLOAD
        ends = {trip.ends_seconds for trip in outcome.carried.trips if trip.copied}
        assert sorted(ends) == pytest.approx(sorted(set(timeline.end_seconds[copies].tolist())))
        taken = environment.actions[list(environment.decided)]
        removed = set(rows.storage[taken[rows.action[taken] == Act.REMOVE]].tolist())
        assert not removed & set(rows.storage[taken[rows.action[taken] == Act.OFFLOAD]].tolist())
        assert environment.is_terminal or environment.state.valid.any()
        assert environment.is_terminal or not environment.fits


def test_each_row_represents_one_action_and_the_first_none() -> None:
    environment = Environment(tight(chain(10), 600))
    rows = environment.rows
    assert environment.actions[0] == 0 and rows.action[0] == Act.NOTHING and rows.kind[0] == Kind.MALLOC
    assert len(set(environment.actions.tolist())) == len(environment.actions)
    gaps = rows.gap[environment.actions[1:]]
    assert {int(g) for g in gaps[rows.action[environment.actions[1:]] == Act.REMOVE]} <= set(gaps.tolist())


def test_recomputation_moves_ahead_to_where_compute_waits() -> None:
    graph = chain(6)  # position p of forward writes f_p, which the gradient at 11 - p reads
    instance = build_instance(tight(graph, 700), original_order(graph))
    kept = {op.writes[0] for op in graph.ops[:6] if op.id not in (1, 2)}
    sequence = np.array(evaluate(instance, simulated(instance, keep_only(instance, kept))).sequence)
    again = [place for place, position in enumerate(sequence) if position in sequence[:place]]
    stop = int(np.flatnonzero(sequence == instance.backward_start)[0])
    assert again and again[0] > stop + 1
    waits, held = np.zeros(len(sequence)), np.zeros(len(sequence), np.int64)
    assert moved_ahead(instance, sequence, waits, held, PLENTY) is None
    waits[stop] = 0.5
    moved = moved_ahead(instance, sequence, waits, held, PLENTY)
    assert moved is not None
    assert sorted(moved) == sorted(sequence)
    assert moved[stop] == sequence[again[0]] and moved[:stop].tolist() == sequence[:stop].tolist()
    check(graph, emit(instance, moved.tolist()))
    assert moved_ahead(instance, sequence, waits, held, 50) is None, "it would exceed the limit"


# -- the planner ------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(graph=graphs(most_ops=10), seed=st.integers(0, 1 << 30))
def test_plans_are_legal_and_within_their_budgets(graph: Graph, seed: int) -> None:
    pick = random.Random(seed)
    graph = with_backward(graph, pick.randint(0, len(graph.ops)))
    budget = max(1, int(unplanned_peak_bytes(graph, LINKED) * pick.uniform(0.4, 1.1)))
    task = tight(graph, budget, device=LINKED, host_budget_bytes=pick.choice((0, 300)), seed=seed)
    result = DqnPlanner(episodes=2, hidden=4, batch=2).plan(task)
    plan = result.plan or result.leanest
    if result.plan is None:
        assert result.status in (Status.INFEASIBLE, Status.TIMED_OUT)
    if plan is not None:
        check(graph, plan.schedule)
        timeline = simulate(graph, plan.schedule, LINKED)
        assert plan.predicted.peak_bytes == timeline.peak_bytes <= plan.budget_bytes
        assert plan.predicted.host_peak_bytes == timeline.host_peak_bytes <= task.host_budget_bytes
        assert plan.predicted.seconds == timeline.makespan_seconds


def test_a_plan_is_found_with_and_without_a_host() -> None:
    for problem in (tight(chain(12), 1100), tight(chain(12), 1100, device=GENERIC, host_budget_bytes=0)):
        plan = DqnPlanner(episodes=20, hidden=8).plan(problem).plan
        assert plan is not None
        assert plan.predicted.peak_bytes <= 1100
        assert (plan.offloaded_bytes > 0) <= (problem.host_budget_bytes > 0)


def test_pins_are_honoured() -> None:
    problem = tight(chain(8), 700, device=GENERIC, host_budget_bytes=0, pinned={0: True, 1: True})
    result = DqnPlanner(episodes=4, hidden=8).plan(problem)
    plan = result.plan or result.leanest
    assert plan is not None
    computed = plan.schedule.operands[plan.schedule.codes == Code.COMPUTE].tolist()
    assert computed.count(0) == computed.count(1) == 1


def test_the_same_seed_and_episodes_give_the_same_plan_and_network(tmp_path: Path) -> None:
    found = []
    for name in ("first", "second"):
        planner = DqnPlanner(episodes=4, hidden=8, save_to=str(tmp_path / f"{name}.safetensors"))
        found.append(planner.plan(tight(chain(12), 700, seed=3)))
    assert found[0].plan is not None and found[1].plan is not None
    assert found[0].plan.schedule == found[1].plan.schedule
    assert found[0].stats == found[1].stats
    assert (tmp_path / "first.safetensors").read_bytes() == (tmp_path / "second.safetensors").read_bytes()


def test_a_trained_network_goes_on_on_a_larger_graph(tmp_path: Path) -> None:
    small, large = tmp_path / "small.safetensors", tmp_path / "large.safetensors"
    DqnPlanner(episodes=3, hidden=8, save_to=str(small)).plan(tight(chain(6), 500))
    environment = Environment(tight(chain(20), 1500))
    rows = RowTensors.of(environment.rows, environment.actions)
    network = Network(32, rows, seed=5).load(small)
    assert network[1].shape[0] == 8, "p is the file's"
    result = DqnPlanner(episodes=2, start_from=str(small), save_to=str(large)).plan(tight(chain(20), 1500))
    assert result.stats["episodes"] == 2
    trained = Network(32, rows, seed=5).load(large)
    assert trained[1].shape == network[1].shape
    assert not torch.equal(trained[2], network[2])


def test_budgets_are_drawn_between_the_budget_and_the_unplanned_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []
    reset = Environment.reset

    def noted(self: Environment, limit_bytes: int | None = None) -> None:
        limits.append(limit_bytes)
        reset(self, limit_bytes)

    monkeypatch.setattr(Environment, "reset", noted)
    problem = tight(chain(12), 700)
    unplanned_bytes = Environment(problem).unplanned.peak_bytes
    result = DqnPlanner(episodes=12, hidden=8, draw_budgets=True).plan(problem)
    drawn = [limit for limit in limits if limit is not None]
    assert len(set(drawn)) > 6 and all(problem.budget_bytes <= limit < unplanned_bytes for limit in drawn)
    assert result.plan is None or result.plan.predicted.peak_bytes <= problem.budget_bytes


def test_a_file_that_is_no_network_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save

    path = tmp_path / "other.safetensors"
    for content in (b"nothing", save({"W1": torch.zeros(3, 3)})):
        path.write_bytes(content)
        with pytest.raises(InvalidFileError, match=r"other\.safetensors"):
            DqnPlanner(episodes=1, start_from=str(path)).plan(tight(chain(6), 500))


def test_a_kept_plan_does_not_stand_in_for_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path))
    path = tmp_path / "kept.safetensors"
    for _ in range(2):
        plan_or_kept(tight(chain(6), 500), DqnPlanner(episodes=1, hidden=4, save_to=str(path)))
        assert path.is_file()
        path.unlink()
    assert not list(tmp_path.rglob("*.plan.json.gz"))


def test_the_command_trains_saves_and_goes_on(run: Run, tmp_path: Path) -> None:
    graph, network = tmp_path / "chain.graph.json", tmp_path / "net.safetensors"
    chain(12, 4096).save(graph)
    asked = ("plan", graph, "--budget", "80%", "--planner", "dqn", "--option", "episodes=6", "--json")
    status, out, _ = run(*asked, "--option", f"save_to={network}")
    assert status == 0 and network.is_file()
    assert json.loads(out)["planner"] == "dqn"
    status, _, _ = run(*asked, "--option", f"start_from={network}")
    assert status == 0
    status, _, err = run(*asked, "--option", f"start_from={graph}")
    assert status == 2 and "is no safetensors file" in err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[(option, 0) for option in ("episodes", "hidden", "batch", "replay", "threads")],
        *[("gamma", 1.5), ("gamma", -0.1), ("learning_rate", 0.0), ("learning_rate", float("nan"))],
        *[("start_from", "nowhere/net.safetensors"), ("save_to", "nowhere/net.safetensors")],
    ],
)
def test_an_option_out_of_range_is_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidOptionError, match=rf"planner 'dqn': option {option} is .*, expected"):
        make_planner("dqn", **{option: value})


def test_without_safetensors_its_options_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(InvalidOptionError, match=r"pip install 'memfit\[dqn\]'"):
        DqnPlanner(save_to=str(tmp_path / "net.safetensors"))
    DqnPlanner()


def test_the_time_limit_ends_training_with_the_best_plan() -> None:
    ticks = iter(range(1 << 30))
    problem = tight(chain(12), 800, time_limit_seconds=200.0, clock=lambda: float(next(ticks)))
    result = DqnPlanner(hidden=4, batch=2).plan(problem)
    assert result.plan is not None and not result.interrupted
    assert 1 <= result.stats["steps"] <= 200


@pytest.mark.parametrize("reports", [1, 4, 7])
def test_an_interrupted_training_answers_with_its_best(reports: int) -> None:
    heard: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        heard.append(progress)
        assert torch.get_num_threads() == 3
        if len(heard) >= reports:
            raise KeyboardInterrupt

    threads = torch.get_num_threads()
    planner = DqnPlanner(episodes=30, hidden=4, batch=2, threads=3)
    result = planner.plan(tight(chain(12), 800, progress=interrupt))
    assert result.interrupted
    assert torch.get_num_threads() == threads
    assert result.plan is not None or reports < 4


def test_progress_says_the_best_reward_so_far() -> None:
    heard: list[Progress] = []
    problem = tight(chain(12), 800, device=linked(50.0, 50.0), progress=heard.append)
    result = DqnPlanner(episodes=5, hidden=4, batch=2).plan(problem)
    assert result.plan is not None
    assert heard[0].message == "episode 0, best reward none yet"
    assert heard[-1].message.startswith("episode ") and "best reward -0." in heard[-1].message
    overheads = [each.best_overhead for each in heard if each.best_overhead is not None]
    assert overheads == sorted(overheads, reverse=True)
    assert overheads[-1] == pytest.approx(result.plan.overhead)


def test_a_step_that_fits_is_not_planned() -> None:
    result = DqnPlanner().plan(tight(chain(6), 1 << 20))
    assert result.status is Status.OPTIMAL and result.stats["episodes"] == 0


def test_below_the_least_budget_nothing_is_found_and_the_leanest_is_told() -> None:
    problem = tight(chain(8), 50)
    result = DqnPlanner(episodes=3, hidden=4, batch=2).plan(problem)
    assert result.status is Status.INFEASIBLE and result.leanest is not None
    assert result.leanest.predicted.peak_bytes < unplanned_peak_bytes(problem.graph, FAST)
