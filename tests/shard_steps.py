"""What tests of sharded models run on each rank: steps beside stock `fully_shard`, checkpoints, and what is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_steps import SEARCH, digest, furthest, loss, loss_in_bfloat16, message
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import memfit
from memfit.plan import Plan
from memfit.schedule import Compute

STEPS = 20
FEW = 4
Batches = Sequence[tuple[torch.Tensor, torch.Tensor]]


class Block(nn.Module):
    """A residual block whose rows two ranks cannot share evenly."""

    def __init__(self, width: int = 33, inner: int = 65) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.dropout(self.down(self.up(self.norm(inputs)).relu()))


class Blocks(nn.Module):
    """Blocks, and a head; each block is called `times` times, in a region of checkpoint if that is asked for."""

    def __init__(self, width: int = 33, *, inner: int = 65, times: int = 1, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(width, inner) for _ in range(3)])
        self.head = nn.Linear(width, 8)
        self.times, self.is_checkpointed = times, is_checkpointed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            for _ in range(self.times):
                inputs = checkpoint(block, inputs, use_reentrant=False) if self.is_checkpointed else block(inputs)
        return self.head(inputs)


class Tied(nn.Module):
    """Blocks between an embedding and a head with the same weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(8, 33), nn.Linear(33, 8, bias=False)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inputs = self.embedding(tokens)
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


def line() -> DeviceMesh:
    """Return all ranks in a line."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def in_blocks(model: Any, **options: Any) -> Any:
    """Apply `fully_shard` to each block, and to the rest."""
    mesh = line()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def data(rank: int, count: int = STEPS, *, width: int = 33, rows: int = 32) -> Batches:
    """Return batches of this rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        (torch.randn(rows, width, generator=generator), torch.randint(0, 8, (rows,), generator=generator))
        for _ in range(count)
    ]


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer of all that is trained."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-3)


def parts(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return this rank's parts."""
    return {name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in tensors.items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether all parts have the same bits."""
    mine, theirs = parts(one), parts(other)
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def stock(
    model: Any, batches: Batches, optimizer: Any, function: Any = loss, clip_norm: float | None = None
) -> list[float]:
    """Train as any program does; return the losses."""
    losses: list[float] = []
    for batch in batches:
        value = function(model, batch)
        value.backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(value.item())
    return losses


def fitted(model: Any, batch: Any, budget: str | int = "90%", function: Any = loss, **options: Any) -> Any:
    """Return the planned step of a sharded model, or of one that is to be."""
    return memfit.fit(model, function, batch, budget=budget, **SEARCH, **options)


def beside_stock(
    rank: int,
    make: Callable[[], Any],
    batches: Batches | None = None,
    *,
    bare: Callable[[], Any] | None = None,
    make_optimizer: Any = adam,
    function: Any = loss,
    clip_norm: float | None = None,
    budget: str | int = "90%",
    verifies: bool = True,
) -> dict[str, Any]:
    """Train a model by `fit`, and its twin by `fully_shard` with the same seeds; say how they compare.

    Args:
        rank: of this process.
        make: makes a sharded model.
        batches: of this rank; 20 by default.
        bare: makes the same model bare, for `fit` to shard; rank 0's parameters are everybody's.
        make_optimizer: of parameters.
        function, clip_norm, budget: of the step.
        verifies: whether the step is verified by itself, too.
    """
    batches = batches or data(rank)
    mine, twin = (bare or make)(), make()
    if bare is not None:
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.add_(rank)
    one, other = (make_optimizer(model.parameters()) for model in (mine, twin))
    options: Any = {} if bare is None else {"shard": True, "process_group": dist.group.WORLD}
    step = fitted(mine, batches[0], budget, function, optimizer=one, clip_norm=clip_norm, **options)
    torch.manual_seed(7 + rank)
    losses = [step(batch).item() for batch in batches]
    torch.manual_seed(7 + rank)
    expected = stock(twin, batches, other, function, clip_norm)
    if verifies:
        step.verify()
    measured = step.measure(repeats=1)
    return {
        "is_same": losses == expected and same(mine.state_dict(), twin.state_dict()) and same_states(one, other),
        "difference": furthest(parts(mine.state_dict()), parts(twin.state_dict())),
        "digest": digest(parts(mine.state_dict())),
        "budget": step.plan.budget_bytes,
        "predicted": step.plan.predicted.peak_bytes,
        "measured": measured.peak_bytes,
        "stock": measured.baseline_peak_bytes,
        "corrections": len(step.corrections),
        "gathers": [count_of(step.plan, op.id) for op in step.plan.graph.ops if op.is_gather],
        "reductions": [count_of(step.plan, op.id) for op in step.plan.graph.ops if op.group and not op.is_gather],
    }


def same_states(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Return whether two optimizers have the same state."""
    pairs = zip(one.state.values(), other.state.values(), strict=True)
    return all(same(mine, theirs) for mine, theirs in pairs)


def count_of(plan: Plan, op: int) -> int:
    """Return how often a plan computes an op."""
    return sum(isinstance(each, Compute) and each.op == op for each in plan.schedule)


def blocks(rank: int, _count: int) -> dict[str, Any]:
    return beside_stock(rank, lambda: in_blocks(Blocks()))


def blocks_clipped_in_bfloat16(rank: int, _count: int) -> dict[str, Any]:
    return beside_stock(rank, lambda: in_blocks(Blocks()), function=loss_in_bfloat16, clip_norm=0.5, budget="97%")


def mixed_precision(rank: int, _count: int) -> dict[str, Any]:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.bfloat16)
    return beside_stock(rank, lambda: in_blocks(Blocks(), mp_policy=policy), data(rank, FEW))


def bare_model(rank: int, _count: int) -> dict[str, Any]:
    return beside_stock(rank, lambda: in_blocks(Blocks()), data(rank, FEW), bare=Blocks)


def gathers_repeated(rank: int, _count: int) -> dict[str, Any]:
    """Parameters take far more than activations."""
    batches = data(rank, FEW, width=64, rows=4)
    return beside_stock(rank, lambda: in_blocks(Blocks(64, inner=256)), batches, make_optimizer=sgd, budget="70%")


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


def odd_models(rank: int, _count: int) -> dict[str, bool]:
    """Models in which something is shared, frozen, unused, called twice, or recomputed; a few steps of each."""
    tokens = [(labels, labels) for _, labels in data(rank, FEW)]

    def partly_frozen() -> Any:
        model = Blocks()
        model.blocks[0].requires_grad_(False)
        model.blocks[1].up.weight.requires_grad_(False)
        model.unused = nn.Linear(3, 3)
        return in_blocks(model)

    def grouped() -> Any:
        model = Blocks()
        fully_shard([model.blocks[0], model.blocks[1]], mesh=line())  # pyright: ignore[reportArgumentType]
        return fully_shard(model, mesh=line(), reshard_after_forward=False)

    def divided() -> Any:
        model = in_blocks(Blocks())
        model.set_gradient_divide_factor(8.0)
        model.set_force_sum_reduction_for_comms(True)
        return model

    makers: dict[str, tuple[Callable[[], Any], Any]] = {
        "tied": (lambda: in_blocks(Tied()), tokens),
        "twice": (lambda: in_blocks(Blocks(times=2)), None),
        "checkpointed": (lambda: in_blocks(Blocks(is_checkpointed=True)), None),
        "partly frozen": (partly_frozen, None),
        "grouped": (grouped, None),
        "divided": (divided, None),
    }
    found = {
        name: beside_stock(rank, make, given or data(rank, FEW), verifies=False)
        for name, (make, given) in makers.items()
    }
    return {name: each["is_same"] and each["measured"] <= each["budget"] for name, each in found.items()}


def gradients_added(rank: int, _count: int) -> dict[str, Any]:
    """Without an optimizer gradients add up, as parts that `fully_shard` would have."""
    batches, mine, twin = data(rank, FEW), in_blocks(Blocks()), in_blocks(Blocks())
    step = fitted(mine, batches[0])
    torch.manual_seed(rank)
    for batch in batches[:2]:
        step(batch)
    torch.manual_seed(rank)
    stock(twin, batches[:2], None)
    pairs = [(p.grad, q.grad) for p, q in zip(mine.parameters(), twin.parameters(), strict=True)]
    found = {"is_same": all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs), "plans": len(step.plans)}
    for model in (mine, twin):
        optimizer = adam(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    step.verify()
    return found | {"is_same_later": same(mine.state_dict(), twin.state_dict())}


def evaluated(rank: int, _count: int) -> dict[str, Any]:
    """Evaluations before `fit`, and between its steps: each leaves the root's parameters gathered."""
    batches, mine, twin = data(rank, FEW), in_blocks(Blocks()), in_blocks(Blocks())
    one, other = adam(mine.parameters()), adam(twin.parameters())

    def evaluate(model: Any, batch: Any) -> float:
        model.eval()
        with torch.no_grad():
            value = loss(model, batch).item()
        model.train()
        return value

    losses, expected = [evaluate(mine, batches[0])], [evaluate(twin, batches[0])]
    step = fitted(mine, batches[0], optimizer=one)
    torch.manual_seed(rank)
    for batch in batches:
        losses += [step(batch).item(), evaluate(mine, batch)]
    torch.manual_seed(rank)
    for batch in batches:
        expected += [*stock(twin, [batch], other), evaluate(twin, batch)]
    measured = step.measure(repeats=1)
    return {
        "is_same": losses == expected and same(mine.state_dict(), twin.state_dict()) and same_states(one, other),
        "plans": len(step.plans),
        "is_held": measured.peak_bytes <= step.plan.budget_bytes,
    }


def checkpoints(rank: int, _count: int) -> dict[str, bool]:
    """Checkpoints of torch.distributed.checkpoint go from a planned step to a stock one, and back; training goes on."""
    batches = data(rank, 2 * FEW)
    first, later = batches[:FEW], batches[FEW:]

    def trained(*, is_planned: bool, folder: str, loads: bool) -> Any:
        model = in_blocks(Blocks())
        optimizer = adam(model.parameters())
        if loads:
            load(model, optimizer, folder)
        given = later if loads else first
        torch.manual_seed(len(given) + loads)
        if is_planned:
            step = fitted(model, given[0], optimizer=optimizer)
            torch.manual_seed(len(given) + loads)
            for batch in given:
                step(batch)
        else:
            stock(model, given, optimizer)
        if not loads:
            save(model, optimizer, folder)
        return model.state_dict()

    with tempfile.TemporaryDirectory() as own:
        folders: list[Any] = [own]
        dist.broadcast_object_list(folders)
        planned, by_stock = (str(Path(folders[0]) / name) for name in ("planned", "stock"))
        trained(is_planned=True, folder=planned, loads=False)
        trained(is_planned=False, folder=by_stock, loads=False)
        expected = trained(is_planned=False, folder=by_stock, loads=True)
        found = {
            "planned to stock": same(expected, trained(is_planned=False, folder=planned, loads=True)),
            "stock to planned": same(expected, trained(is_planned=True, folder=by_stock, loads=True)),
            "planned to planned": same(expected, trained(is_planned=True, folder=planned, loads=True)),
        }
        whole = Blocks()
        dcp.load({"model": whole.state_dict()}, checkpoint_id=planned)  # as one process or DDP reads it
        found["whole"] = all(
            torch.equal(whole.state_dict()[name], tensor.full_tensor())
            for name, tensor in read(planned)["model"].items()
        )
        dist.barrier()
    return found


def save(model: Any, optimizer: Any, folder: str) -> None:
    """Write a checkpoint, as any program does."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)


def load(model: Any, optimizer: Any, folder: str) -> None:
    """Read a checkpoint."""
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)


def read(folder: str) -> dict[str, Any]:
    """Return what a checkpoint has of a model."""
    found = {"model": in_blocks(Blocks()).state_dict()}
    dcp.load(found, checkpoint_id=folder)
    return found


def refused(rank: int, _count: int) -> list[str]:
    """What a planned step does not carry out, each in a line."""
    batch = data(rank, 1)[0]
    synced, hooked, divided = (in_blocks(Blocks()) for _ in range(3))
    synced.set_requires_gradient_sync(False)
    hooked.set_all_reduce_hook(lambda _gradient: None)
    divided.set_gradient_divide_factor(8.0)
    several = {"mesh": init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("all", "parts"))}
    float64 = Blocks()
    float64.blocks[0].norm.double().requires_grad_(False)
    with torch.device("meta"):
        without_values = in_blocks(Blocks())
    models = [
        without_values,
        synced,
        hooked,
        divided,
        fully_shard(Blocks(), offload_policy=CPUOffloadPolicy(pin_memory=False), mesh=line()),
        fully_shard(Blocks(32, inner=64), mesh=line(), shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 else None),
        fully_shard(Blocks(), **several),
        fully_shard(float64, mesh=line()),
    ]
    found = [message(lambda model=model: fitted(model, batch)) for model in models]
    plain = in_blocks(Blocks())
    found.append(message(lambda: fitted(plain, batch, function=decayed)))
    found.append(message(lambda: fitted(plain, batch, shard=True, process_group=dist.group.WORLD)))
    found.append(message(lambda: fitted(Blocks(), batch, shard=True)))
    other = Blocks()
    stepped = adam(other.parameters())
    stock(other, [batch], stepped)
    found.append(message(lambda: fitted(other, batch, optimizer=stepped, shard=True, process_group=dist.group.WORLD)))
    found.append(message(fitted(plain, batch, budget="95%").no_sync))
    return found


def decayed(model: Any, batch: Any) -> torch.Tensor:
    return loss(model, batch) + sum(parameter.square().sum() for parameter in model.parameters())
