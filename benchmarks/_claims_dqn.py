"""The claims of the paper on a deep Q-network of 2020, and what the stored results say of each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from _claim import (
    BASELINES,
    DQN,
    H100,
    PLANNERS,
    TFLMS,
    TITAN,
    Claim,
    Found,
    Measure,
    Results,
    Verdict,
    only,
    planned,
    span,
    tested,
)
from offloading_planners import SHARES

AT = 0.45  # the share at which docs/offloading.md compares planners
_EQUAL = 1e-9  # of an overhead
SIMULATED = "simulated, by a roofline of the GPU; the paper gives its curves as pictures only"


def lowest(workloads: Sequence[str], machine: str, *, against: Iterable[str] = BASELINES) -> Measure:
    """Figure 5: at how many budgets `dqn` has the lowest overhead of the paper's planners, of those where one has."""
    others = tuple(against)

    def measure(results: Results) -> Found:
        won, budgets = 0, 0
        for workload in workloads:
            for share in SHARES:
                mine = _overhead(results, workload, machine, "dqn", share)
                theirs = [_overhead(results, workload, machine, other, share) for other in others]
                known = [each for each in theirs if each is not None]
                if mine is None and not known:
                    continue
                budgets += 1
                won += mine is not None and all(mine <= each + _EQUAL for each in known)
        return Found(text=f"`dqn` is lowest at {won} of {budgets} budgets", holds=won == budgets > 0)

    return measure


def harder(workload: str, than: Sequence[str]) -> Measure:
    """Section 5.2: the overhead of `dqn` on a workload beside others, at one budget."""

    def measure(results: Results) -> Found:
        found = {name: _overhead(results, name, TITAN, "dqn", AT) for name in (workload, *than)}
        text = ", ".join(f"{name} {'no plan' if value is None else f'{value:.1%}'}" for name, value in found.items())
        known = [value for name, value in found.items() if name != workload and value is not None]
        mine = found[workload]
        return Found(text=f"{text} (at {AT:.0%})", holds=mine is not None and mine > max(known))

    return measure


def utilization(results: Results) -> Found:
    """Section 5.1: the share of the step in which compute works, beside SuperNeurons with both means."""
    found: dict[str, list[float]] = {"dqn": [], "superneurons_both": []}
    for name, payload in results("offloading_planners").items():
        points = {curve: payload["points"].get(f"{curve}@{AT}", {}) for curve in found}
        if name.endswith(TITAN) and all("utilization" in point for point in points.values()):
            for curve, point in points.items():
                found[curve].append(point["utilization"])
    means = {curve: statistics.mean(each) for curve, each in found.items()}
    text = f"{means['dqn']:.0%}; SuperNeurons {means['superneurons_both']:.0%}, where both have plans"
    return Found(text=text, holds=means["dqn"] > means["superneurons_both"])


def lstm_planners(results: Results) -> Found:
    """Section 5.1: which of the paper's planners have a plan for an LSTM."""
    found = [
        curve
        for curve in ("dqn", *BASELINES)
        if any(_overhead(results, "char_lstm", TITAN, curve, share) is not None for share in SHARES)
    ]
    text = f"plans by {', '.join(f'`{curve}`' for curve in found)}"
    return Found(text=text, holds=set(found) == {"dqn", TFLMS})


def kmeans_planners(results: Results) -> Found:
    """Figure 5: whether `dqn` has a plan for k-means below its peak; what memfit's own planner has."""
    plans = sum(_overhead(results, "kmeans", TITAN, "dqn", share) is not None for share in SHARES)
    ours = _overhead(results, "kmeans", TITAN, "auto", AT)
    mine = "none" if ours is None else f"{ours:.1%} more time at {AT:.0%}"
    return Found(text=f"`dqn`: plans at {plans} of {len(SHARES)} budgets; `auto`: {mine}", holds=plans > 0)


def transfer(results: Results) -> Found:
    """Section 4.4.2: what a network that was trained on a smaller graph ends with, beside one trained afresh."""
    runs = only(results, "dqn_curves")["runs"]
    afresh = [run["overhead"] for run in runs if run["trained"] == "afresh"]
    carried = [run["overhead"] for run in runs if run["trained"] != "afresh"]
    ours, usual = statistics.median(carried), statistics.median(afresh)
    text = f"{ours:.1%} from ResNet-18 ({span(carried, '.1%')}), {usual:.1%} afresh ({span(afresh, '.1%')})"
    return Found(text=f"{text}, medians of {len(afresh)} seeds", holds=ours < 0.9 * usual)


def freed_run(within: float) -> Measure:
    """Section 4.7: how far the seconds of a run that frees what is big are from the step's."""

    def measure(results: Results) -> Found:
        rows = only(results, "profile_without_memory")["workloads"]
        apart = [row["freed_run_seconds"] / row["eager_seconds"] - 1 for row in rows]
        return Found(text=f"{span(apart, '+.0%')} against the step's seconds", holds=max(map(abs, apart)) <= within)

    return measure


def _overhead(results: Results, workload: str, machine: str, curve: str, share: float) -> float | None:
    points = results("offloading_planners")[f"{workload}_{machine}"]["points"]
    return points.get(f"{curve}@{share}", {}).get("overhead")


CLAIMS: tuple[Claim, ...] = (
    Claim(
        row="dqn-figure-1",
        paper=DQN,
        claim="Figure 1: a variable is copied to the host beside compute, freed, and copied back before its use",
        module="memfit/simulate/simulator.py",
        command=tested("test_simulate", "test_an_offload_overlaps_and_wait_stalls_for_the_rest"),
        against="times computed by hand",
    ),
    Claim(
        row="dqn-figure-2",
        paper=DQN,
        claim="Figures 2, 3: recomputation and copies planned within a limit that the user sets",
        module="memfit/papers/dqn/planner.py",
        command=tested("test_dqn", "test_plans_are_legal_and_within_their_budgets"),
        against="the checker and the simulator, on random graphs",
    ),
    Claim(
        row="dqn-figure-4",
        paper=DQN,
        claim="Section 4.6, Figure 4: after an offload of 1.5 s the agent is at the fifth node",
        module="memfit/papers/dqn/environment.py",
        command=tested("test_dqn", "test_an_offload_takes_the_agent_to_the_next_node_after_its_copy"),
        against="the paper's example",
    ),
    Claim(
        row="dqn-figure-4-limit",
        paper=DQN,
        claim="Sections 4.6, 4.7: at the limit the next malloc waits, and the reward loses 0.5 s",
        module="memfit/papers/dqn/copies.py",
        command=tested("test_dqn", "test_at_the_limit_the_next_malloc_waits_for_the_copy"),
        against="the paper's example",
    ),
    Claim(
        row="dqn-equations-1-to-3",
        paper=DQN,
        claim="Equations 1 to 3: node states, graph state and Q values",
        module="memfit/papers/dqn/network.py",
        command=tested("test_dqn", "test_states_and_q_values_are_those_of_plain_loops"),
        against="the equations in plain loops",
    ),
    Claim(
        row="dqn-equations-4-5",
        paper=DQN,
        claim="Equations 4 and 5: the loss, with a constant y",
        module="memfit/papers/dqn/training.py",
        command=tested("test_dqn", "test_the_loss_is_equation_four_with_a_constant_y"),
        against="the equations",
    ),
    Claim(
        row="dqn-algorithm-1",
        paper=DQN,
        claim="Algorithm 1, section 4.5: episodes of valid actions, one at most for each node",
        module="memfit/papers/dqn/environment.py",
        command=tested("test_dqn", "test_every_episode_keeps_to_the_rules"),
        against="the rules of sections 4.5 to 4.8, on random graphs",
    ),
    Claim(
        row="dqn-transfer",
        paper=DQN,
        claim="Section 4.4.2: a network may be trained on a small graph and tuned on a large one",
        module="memfit/papers/dqn/planner.py",
        command=("benchmarks/dqn_curves.py",),
        against="no figure in the paper",
        measure=transfer,
        verdict=Verdict.NOT,
        why="it goes on on the larger graph; over the seeds it neither helps nor harms",
    ),
    Claim(
        row="dqn-section-4-7",
        paper=DQN,
        claim="Section 4.7: a run that frees big results has roughly the right times",
        module="memfit/step/freed_run.py",
        command=("benchmarks/profile_without_memory.py",),
        against='"roughly correct"',
        measure=freed_run(within=0.15),
        verdict=Verdict.NOT,
        why="on a CPU it takes fewer new pages from the system than eager does; not measured on a GPU",
    ),
    Claim(
        row="dqn-figure-5-vgg",
        paper=DQN,
        claim="Figure 5: on VGG, less overhead than MXNet-memonger, SuperNeurons and TFLMS at each reduction",
        module="memfit/papers/dqn/planner.py",
        command=planned("vgg16", "vgg19", "vgg16_cifar"),
        against="the lowest curve",
        measure=lowest(("vgg16", "vgg19", "vgg16_cifar"), TITAN),
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-figure-5-resnet",
        paper=DQN,
        claim="Figure 5: on ResNet, less overhead than the three at each reduction",
        module="memfit/papers/dqn/planner.py",
        command=planned("resnet50", "resnet101", "resnet50_cifar"),
        against="the lowest curve",
        measure=lowest(("resnet50", "resnet101", "resnet50_cifar"), TITAN),
        verdict=Verdict.NOT,
        why="at the tightest budgets it finds no plan in its seconds; elsewhere it is the lowest; simulated",
    ),
    Claim(
        row="dqn-figure-5-unet",
        paper=DQN,
        claim="Figure 5: on U-Net, less overhead than the three at each reduction",
        module="memfit/papers/dqn/planner.py",
        command=planned("unet"),
        against="the lowest curve",
        measure=lowest(("unet",), TITAN),
        verdict=Verdict.NOT,
        why="at the tightest budget it finds no plan in its seconds; elsewhere it is the lowest; simulated",
    ),
    Claim(
        row="dqn-figure-5-lstm",
        paper=DQN,
        claim="Figure 5: on the LSTM, less overhead than TFLMS at each reduction",
        module="memfit/papers/dqn/planner.py",
        command=planned("char_lstm"),
        against="the lowest curve",
        measure=lowest(("char_lstm",), TITAN),
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-figure-5-stochastic-depth",
        paper=DQN,
        claim="Figure 5: plans for a ResNet of stochastic depth, which the others do not have",
        module="memfit/papers/dqn/planner.py",
        command=planned("stochastic_depth"),
        against="the only curve",
        measure=lowest(("stochastic_depth",), TITAN),
        verdict=Verdict.NOT,
        why="one draw stands for all, so that the others plan it too; at tight budgets it has no plan or a worse one",
    ),
    Claim(
        row="dqn-figure-5-kmeans",
        paper=DQN,
        claim="Figure 5: plans for k-means, which the others do not have",
        module="memfit/capture/row_chunks.py",
        command=planned("kmeans", more=("auto",)),
        against="the only curve",
        measure=kmeans_planners,
        verdict=Verdict.NOT,
        why="its one large storage is read as soon as it is written; only chunks of rows, `auto`'s, go below the peak",
    ),
    Claim(
        row="dqn-figure-5-h100",
        paper=DQN,
        claim="Figure 5, on a newer machine: less overhead than the three",
        module="memfit/papers/dqn/planner.py",
        command=planned("vgg16", "vgg19", "resnet50", "resnet101", "unet", machine=H100),
        against="not in the paper, whose machine is a GTX 1080 Ti",
        measure=lowest(("vgg16", "vgg19", "resnet50", "resnet101", "unet"), H100),
        verdict=Verdict.NOT,
        why="compute is faster there, so that copies hide less, and `sublinear` is better at tight budgets; simulated",
    ),
    Claim(
        row="dqn-utilization",
        paper=DQN,
        claim="Section 5.1: the GPU works for more of the time than with SuperNeurons",
        module="memfit/papers/dqn/planner.py",
        command=planned(),
        against="much higher; no figure in the paper",
        measure=utilization,
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-lstm-others",
        paper=DQN,
        claim="Section 5.1: of the four, only TFLMS and this planner work on the LSTM",
        module=f"{PLANNERS}/superneurons.py",
        command=planned("char_lstm"),
        against="two of four",
        measure=lstm_planners,
        verdict=Verdict.NOT,
        why="the planners here take any graph of ops; the paper's limits are those of the systems' programs",
    ),
    Claim(
        row="dqn-unet-harder",
        paper=DQN,
        claim="Section 5.2: U-Net has more overhead than ResNet and VGG",
        module="memfit/papers/dqn/planner.py",
        command=planned("unet", "resnet50", "vgg16"),
        against="more than both",
        measure=harder("unet", ("resnet50", "vgg16")),
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-lstm-harder",
        paper=DQN,
        claim="Section 5.2: the LSTM has more overhead than ResNet and VGG",
        module="memfit/papers/dqn/planner.py",
        command=planned("char_lstm", "resnet50", "vgg16"),
        against="more than both",
        measure=harder("char_lstm", ("resnet50", "vgg16")),
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-stochastic-depth-harder",
        paper=DQN,
        claim="Section 5.2: stochastic depth has more overhead than all others",
        module="memfit/papers/dqn/planner.py",
        command=planned("stochastic_depth", "resnet50", "vgg16", "unet", "char_lstm"),
        against="more than all",
        measure=harder("stochastic_depth", ("resnet50", "vgg16", "unet", "char_lstm")),
        verdict=Verdict.OTHER,
        why=SIMULATED,
    ),
    Claim(
        row="dqn-accuracy",
        paper=DQN,
        claim="Abstract: swapping and recomputation leave the results as they are",
        module="memfit/step/verify.py",
        command=tested("test_offload_step", "test_a_plan_that_offloads_gives_the_same_bits"),
        against="eager's bits",
    ),
)
