"""The claims of Sekiyama et al. 2018, and what the stored results say of each."""

from __future__ import annotations

from collections.abc import Sequence

from _claim import (
    CNNS,
    GIB,
    NO_GPU_RUN,
    ON_A_CPU,
    ON_CPU,
    PACKERS,
    SEKIYAMA,
    Claim,
    Found,
    Measure,
    Payload,
    Results,
    Verdict,
    arena,
    captured,
    captured_steps,
    measured_steps,
    only,
    span,
    tested,
)

BY_THE_MODEL = "by memfit's model of torch's allocator; the pool of the paper's framework is another"
CAPTURED = ("benchmarks/arena_captured.py", "--again")
GROWTH = ("benchmarks/arena_growth.py", "seq2seq", "--again")


def pool_reduction(models: Sequence[str], kind: str, *, least: float, each: bool = False) -> Measure:
    """What the arena takes less of a GPU than the pool of torch's allocator; at best, or on each model."""

    def measure(results: Results) -> Found:
        steps = captured_steps(results, models, kind)
        found = [step["reserved"]["arena"] / step["reserved"]["pool"] - 1 for _, _, step in steps]
        said = ", ".join(f"{model} {share:+.1%}" for (model, _, _), share in zip(steps, found, strict=True))
        text = f"{said if each else span(found, '+.0%')} memory against torch's pool"
        return Found(text=text, holds=-(max(found) if each else min(found)) >= least)

    return measure


def most_effective(results: Results) -> Found:
    """Figure 2a: on which network the arena saves most."""
    found = {
        (model, step): 1 - each["reserved"]["arena"] / each["reserved"]["pool"]
        for model, step, each in captured_steps(results, CNNS, "training")
    }
    model, step = max(found, key=lambda each: found[each])
    return Found(text=f"most on {model}, {step}: {found[model, step]:.0%}", holds=model == "inception_resnet_v2")


def fits_with_the_arena(gib: float) -> Measure:
    """Figure 2a: Inception-ResNet at batch 64 is within the device with the arena, and beyond it with the pool."""

    def measure(results: Results) -> Found:
        taken = results("arena_captured")["inception_resnet_v2"]["results"]["training 64"]["reserved"]
        pool, arena = (taken[name] / GIB for name in ("pool", "arena"))
        return Found(text=f"pool {pool:.1f} GiB, arena {arena:.1f} GiB", holds=arena <= gib < pool)

    return measure


def arena_times(models: Sequence[str], kind: str, *, keys: str = "keyed") -> Measure:
    """Figure 3: the time of a step in the arena over that of the same step outside; it holds if each is faster."""

    def measure(results: Results) -> Found:
        steps = [ON_CPU.get(model, model) for model in models]
        times = [step["time_ratio"] for _, _, step in measured_steps(results, steps, kind, keys)]
        text = f"{span(times, '.2f')} of the time with torch's allocator"
        return Found(text=text, holds=max(times) < 1)

    return measure


def at_the_bound(results: Results) -> Found:
    """Section 5.2: how many layouts of the captured steps are as low as is proved."""
    steps = [each for _, _, each in captured_steps(results, (*CNNS, "bninception", "seq2seq"), "")]
    proven = sum(each["arena_bytes"] == each["lower_bound_bytes"] for each in steps)
    return Found(
        text=f"{proven} of {len(steps)} captured steps are packed at the lower bound", holds=proven == len(steps)
    )


def solver_times(models: Sequence[str], most_seconds: float) -> Measure:
    """Figure 4: seconds of the solver."""

    def measure(results: Results) -> Found:
        seconds = [each["solver_seconds"] for _, _, each in captured_steps(results, models, "")]
        return Found(text=f"{max(seconds):.2f} s at most", holds=max(seconds) <= most_seconds)

    return measure


def growth_over_mini_batches(gib: float) -> Measure:
    """Figure 2c: what a process takes after mini-batches of sentences: the pool the device, the arena the same."""

    def measure(results: Results) -> Found:
        after = [each["after_bytes"] for each in _growth(results).values() if "after_bytes" in each]
        grown = {way: [each[way][-1] / each[way][0] - 1 for each in after] for way in ("exact", "pool", "arena")}
        most = max(each["exact"][-1] for each in after) / GIB
        text = f"in 10 mini-batches a pool of exact sizes grows by {span(grown['exact'], '.0%')}, to {most:.1f} GiB at "
        text += f"most; torch's by {span(grown['pool'], '.0%')}; the arena by {span(grown['arena'], '.0%')}"
        return Found(text=text, holds=most > gib and max(grown["arena"]) <= 0)

    return measure


def generation(results: Results) -> Found:
    """Figure 2d: what the arena takes less of a GPU where sentences are generated."""
    taken = _growth(results)["inference"]
    share = taken["arena"] / taken["pool"] - 1
    return Found(text=f"{share:+.1%} memory against torch's pool", holds=share < 0)


def inference_is_dearer(results: Results) -> Found:
    """Figure 4b: whether there are more blocks to place where sentences are generated than in training."""
    steps = _growth(results)
    training = [count for each in steps.values() if "after_bytes" in each for count in each["blocks"]]
    blocks = steps["inference"]["blocks"]
    text = f"{blocks:,} blocks in inference, {span(training, ',')} in training"
    return Found(text=text, holds=blocks > max(training))


def wider_batches(results: Results) -> Found:
    """Section 5.2: the largest batches that fit 16 GiB, with the arena and with the pool."""
    found = {name: each["batches"] for name, each in _growth(results).items() if "batches" in each}
    text = ", ".join(
        f"{name.removeprefix('widest ')} {each['arena']} for {each['pool']}" for name, each in found.items()
    )
    return Found(text=text, holds=all(each["arena"] > each["pool"] for each in found.values()))


def _growth(results: Results) -> dict[str, Payload]:
    return only(results, "arena_growth")["results"]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        row="sekiyama-dsa",
        paper=SEKIYAMA,
        claim="Equations 1 to 6: storage allocation as a mixed-integer program",
        module=f"{PACKERS}/mip.py",
        command=tested("test_packing", "test_exact_packers_prove_the_least_height"),
        against="brute force on random blocks",
    ),
    Claim(
        row="sekiyama-figure-1",
        paper=SEKIYAMA,
        claim="Section 3.2, Figure 1: the best-fit heuristic",
        module="memfit/packing/best_fit.py",
        command=tested("test_packing", "test_best_fit_is_the_papers_example"),
        against="the figure's moves, by hand",
    ),
    Claim(
        row="sekiyama-section-4-2",
        paper=SEKIYAMA,
        claim="Sections 4.1, 4.2: one recorded step; then the n-th request gets the n-th address",
        module="memfit/memory/arena/arena.py",
        command=tested("test_arena", "test_steady_state_serves_everything"),
        against="requests served of all, on a training network",
    ),
    Claim(
        row="sekiyama-interrupt",
        paper=SEKIYAMA,
        claim="Section 4.3: interrupt and resume leave a part out",
        module="memfit/memory/arena/arena.py",
        command=tested("test_arena", "test_interrupt_and_resume"),
        against="what is served around parts of changing length",
    ),
    Claim(
        row="sekiyama-reoptimization",
        paper=SEKIYAMA,
        claim="Section 4.3: a larger request makes a new layout, a smaller one does not",
        module="memfit/memory/arena/arena.py",
        command=tested("test_arena", "test_a_larger_request_makes_a_new_layout"),
        against="the count of new layouts",
    ),
    Claim(
        row="sekiyama-settling",
        paper=SEKIYAMA,
        claim="Section 5.3: new layouts become rare as training with sentences proceeds",
        module="memfit/memory/arena/arena.py",
        command=tested("test_arena", "test_sequences_of_changing_length_settle_without_keys"),
        against="new layouts, early and late",
    ),
    Claim(
        row="sekiyama-profile",
        paper=SEKIYAMA,
        claim="Section 1: a step beyond the device is recorded by keeping memory elsewhere",
        module="memfit/memory/arena/spilling.py",
        command=tested("test_arena_spilling", "test_the_recording_and_the_bits_are_those_of_a_step_with_its_memory"),
        against="the recording and the bits of a step with its memory",
    ),
    Claim(
        row="sekiyama-workspace",
        paper=SEKIYAMA,
        claim="Sections 2, 5.1: workspaces of convolutions are packed too",
        module="memfit/memory/placed_plans.py",
        against="8 MB of workspace a convolution",
        verdict=Verdict.NOT,
        why="the captured steps of these tables have none, as no kernel ran; planned steps have addresses for theirs",
    ),
    Claim(
        row="sekiyama-figure-2a",
        paper=SEKIYAMA,
        claim="Figure 2a: training takes up to 49.5% less memory than with a pool",
        module="memfit/packing/portfolio.py",
        command=captured(*CNNS),
        against="up to 49.5%",
        measure=pool_reduction(CNNS, "training", least=0.495),
        verdict=Verdict.NOT,
        why=f"less on each network; {BY_THE_MODEL}",
    ),
    Claim(
        row="sekiyama-figure-2a-most",
        paper=SEKIYAMA,
        claim="Figure 2a: it is the most effective for Inception-ResNet",
        module="memfit/packing/portfolio.py",
        command=captured(*CNNS),
        against="Inception-ResNet",
        measure=most_effective,
        verdict=Verdict.NOT,
        why=f"another network; {BY_THE_MODEL}",
    ),
    Claim(
        row="sekiyama-figure-2a-fits",
        paper=SEKIYAMA,
        claim="Figure 2a: Inception-ResNet at batch 64 fits 16 GB, and does not with the pool",
        module="memfit/packing/portfolio.py",
        command=captured("inception_resnet_v2"),
        against="16 GB between the two",
        measure=fits_with_the_arena(gib=16),
        verdict=Verdict.NOT,
        why="both fit by the model, in which kernels take no workspaces",
    ),
    Claim(
        row="sekiyama-figure-2b",
        paper=SEKIYAMA,
        claim="Figure 2b: inference of GoogLeNet and ResNet-50 takes 12.6 and 10.0% less",
        module="memfit/packing/portfolio.py",
        command=captured("googlenet", "resnet50"),
        against="12.6 and 10.0%",
        measure=pool_reduction(("googlenet", "resnet50"), "inference", least=0.0, each=True),
        verdict=Verdict.OTHER,
        why=f"less of the one, more of the other; {BY_THE_MODEL}",
    ),
    Claim(
        row="sekiyama-figure-2c",
        paper=SEKIYAMA,
        claim="Figure 2c: the pool grows over mini-batches of sentences to the device's capacity, the arena does not",
        module="memfit/packing/portfolio.py",
        command=GROWTH,
        against="a pool at the capacity of 16 GB",
        measure=growth_over_mini_batches(gib=16),
        verdict=Verdict.OTHER,
        why="predicted, with drawn lengths of sentences; a pool of exact sizes, as the paper does not describe its own",
    ),
    Claim(
        row="sekiyama-figure-2d",
        paper=SEKIYAMA,
        claim="Figure 2d: inference of seq2seq takes 14.6% less",
        module="memfit/packing/portfolio.py",
        command=GROWTH,
        against="14.6%",
        measure=generation,
        verdict=Verdict.NOT,
        why=f"parameters are nearly all of it; {BY_THE_MODEL}",
    ),
    Claim(
        row="sekiyama-figure-3a",
        paper=SEKIYAMA,
        claim="Figure 3a: training of CNNs is faster, Inception-ResNet 2.19 times",
        module="memfit/memory/arena/arena.py",
        command=arena(*CNNS),
        against="as fast, or up to 2.19 times as fast",
        measure=arena_times(CNNS, "training"),
        verdict=Verdict.OTHER,
        why=f"{ON_A_CPU}; BN-Inception for GoogLeNet",
    ),
    Claim(
        row="sekiyama-figure-3b",
        paper=SEKIYAMA,
        claim="Figure 3b: inference is faster on all CNNs",
        module="memfit/memory/arena/arena.py",
        command=arena(*CNNS),
        against="faster on four of four",
        measure=arena_times(CNNS, "inference"),
        verdict=Verdict.OTHER,
        why=f"{ON_A_CPU}; BN-Inception for GoogLeNet",
    ),
    Claim(
        row="sekiyama-wider-batches",
        paper=SEKIYAMA,
        claim="Section 5.2: a larger mini-batch fits the same device",
        module="memfit/packing/portfolio.py",
        command=("benchmarks/arena_growth.py", "widest", "--again"),
        against="64 images of Inception-ResNet in place of 32, in 16 GB",
        measure=wider_batches,
        verdict=Verdict.OTHER,
        why=f"less is gained; {BY_THE_MODEL}",
    ),
    Claim(
        row="sekiyama-larger-batch",
        paper=SEKIYAMA,
        claim="Section 5.2: the larger batch that fits trains 3.95 times as many images in a second",
        module="memfit/memory/arena/arena.py",
        against="3.95 times",
        verdict=Verdict.NOT,
        why=NO_GPU_RUN,
    ),
    Claim(
        row="sekiyama-figure-3c",
        paper=SEKIYAMA,
        claim="Figure 3c: training of seq2seq is as fast or faster",
        module="memfit/memory/arena/arena.py",
        command=arena("seq2seq"),
        against="faster at batches of 32, 128 and 256, equal at 64",
        measure=arena_times(("seq2seq",), "training"),
        verdict=Verdict.NOT,
        why=f"slower at a batch of 16, faster at 32 and 64; {ON_A_CPU}, with a key for each pair of lengths",
    ),
    Claim(
        row="sekiyama-figure-3c-no-keys",
        paper=SEKIYAMA,
        claim="Sections 4.3, 5.3: the cost of new layouts is low where lengths change",
        module="memfit/memory/arena/arena.py",
        command=arena("seq2seq"),
        against='"the recomputation cost in the training is low"',
        measure=arena_times(("seq2seq",), "training", keys="unkeyed"),
        verdict=Verdict.OTHER,
        why=f"{ON_A_CPU}; few requests are in the arena where steps of all lengths share one layout",
    ),
    Claim(
        row="sekiyama-figure-3d",
        paper=SEKIYAMA,
        claim="Figure 3d: inference of seq2seq takes 23.8% less time",
        module="memfit/memory/arena/arena.py",
        command=arena("seq2seq"),
        against="23.8% less",
        measure=arena_times(("seq2seq",), "inference"),
        verdict=Verdict.NOT,
        why=f"as long, within the spread of the pairs; {ON_A_CPU}",
    ),
    Claim(
        row="sekiyama-optimal",
        paper=SEKIYAMA,
        claim="Section 5.2: the heuristic is optimal where the solver could tell (10,169,344 and 12,202,496 bytes)",
        module="memfit/packing/portfolio.py",
        command=CAPTURED,
        against="two inferences, by CPLEX in an hour",
        measure=at_the_bound,
        verdict=Verdict.OTHER,
        why="packer `auto`, on all steps; other networks' bytes, as kernels are torch's",
    ),
    Claim(
        row="sekiyama-figure-4a",
        paper=SEKIYAMA,
        claim="Figure 4a: the heuristic is quick enough on CNNs",
        module="memfit/packing/portfolio.py",
        command=captured(*CNNS),
        against="the paper's picture; Python",
        measure=solver_times(CNNS, most_seconds=1),
        verdict=Verdict.OTHER,
        why="packer `auto`, which begins with `best_fit`, in compiled code",
    ),
    Claim(
        row="sekiyama-figure-4b",
        paper=SEKIYAMA,
        claim="Figure 4b: for seq2seq the heuristic takes much longer in inference, as 100 words are generated",
        module="memfit/packing/portfolio.py",
        command=GROWTH,
        against="more blocks in inference than in training",
        measure=inference_is_dearer,
        verdict=Verdict.NOT,
        why="layers are unrolled into kernels of single words here, also in training, which has the more blocks",
    ),
)
