"""What rows of ranks train in the loops of Accelerate and Lightning."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _rank_kit import (
    LEARNING_RATE,
    MANY,
    Transformer,
    Way,
    loss_of,
    read,
    shorter,
    stored,
    tokens_of,
)


def as_torchrun_starts() -> None:
    """Set the variables by which libraries learn of ranks."""
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "TORCHELASTIC_RUN_ID": "checkpoint-ranks"}


@contextmanager
def fsdp_as_on_gpus() -> Iterator[None]:
    """Let Accelerate take an FSDP plugin on CPUs as it does on GPUs, and forget what it was set to before."""
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DistributedType

    real = AcceleratorState.__init__

    def init(self: Any, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        real(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]
    AcceleratorState.__init__ = init
    try:
        yield
    finally:
        AcceleratorState.__init__ = real


@contextmanager
def one_folder() -> Iterator[str]:
    """Make a folder of the first rank's that all ranks know."""
    with tempfile.TemporaryDirectory() as mine:
        folder = [mine]
        dist.broadcast_object_list(folder)
        yield folder[0]


# Accelerate


def accelerate(way: Way, turns: Any, *, plugin: str = "", **habits: Any) -> Iterable[torch.Tensor]:
    """Accelerate's loop: DDP, or FSDP2 as its plugin has it.

    Args:
        way: holds it.
        turns: that time it.
        plugin: `fsdp2`, or none.
        habits: `micro_batches`, `precision`, `lengths`, `evaluates`, `saves`.
    """
    from accelerate import Accelerator

    as_torchrun_starts()
    given: dict[str, Any] = {"gradient_accumulation_steps": habits.get("micro_batches", 1)}
    if habits.get("precision"):
        given["mixed_precision"] = habits["precision"]
    with fsdp_as_on_gpus():
        if plugin:
            given["fsdp_plugin"] = _fsdp2_plugin()
        accelerator = Accelerator(cpu=True, **given)

    model, optimizer = _prepared(way, accelerator)
    torch.manual_seed(1 + dist.get_rank())
    while not turns.are_over:
        is_short = bool(habits.get("lengths")) and bool((turns.step + dist.get_rank()) % 2)
        tokens = shorter(turns.tokens) if is_short else turns.tokens
        numbers = range(habits.get("micro_batches", 1))
        batches = [tokens_of(turns.step, 8 * dist.get_rank() + number, tokens) for number in numbers]
        turns.begin()
        losses: list[torch.Tensor] = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = loss_of(model(batch), batch)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        del loss
        if habits.get("evaluates"):
            model.eval()
            with torch.no_grad():
                losses.append(accelerator.reduce(loss_of(model(batches[0]), batches[0])))
            model.train()
        turns.end(losses, is_largest=not is_short)
        if habits.get("saves") and turns.step == turns.half and plugin:
            read(model, optimizer, stored(model, optimizer))
        elif habits.get("saves") and turns.step == turns.half:
            with one_folder() as folder:
                accelerator.save_state(folder)
                dist.barrier()
                for parameter in model.parameters():
                    parameter.data.zero_()
                accelerator.load_state(folder)
                dist.barrier()
    return model.parameters()


def _prepared(way: Way, accelerator: Any) -> tuple[Any, Any]:
    """Return the model and its optimizer, as the loop is given them."""
    model = Transformer(way.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    if not way.has_budget:
        way.by_hand(model)
        return accelerator.prepare(model, optimizer)
    from memfit.integrations.accelerate import prepare

    found = prepare(accelerator, model, optimizer, **way.options())
    way.handle = accelerator.memfit[0]  # pyright: ignore
    return found


def _fsdp2_plugin() -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )


# Lightning


def lightning(way: Way, turns: Any, *, strategy: str = "ddp", **habits: Any) -> Iterable[torch.Tensor]:
    """Lightning's Trainer.

    Args:
        way: holds it.
        turns: that time it.
        strategy: `ddp`, or `fsdp2`: ModelParallelStrategy with `fully_shard` in `configure_model`.
        habits: options of the Trainer; `evaluates`: whether it evaluates between.
    """
    import pytorch_lightning as library
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

    as_torchrun_starts()
    evaluates, saves = habits.pop("evaluates", False), habits.pop("saves", False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    given: dict[str, Any] = {"max_steps": MANY, "use_distributed_sampler": False, "accelerator": "cpu"}
    given |= quiet | habits
    if evaluates:
        given |= {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1}
    path = None
    with one_folder() as folder:
        while True:
            module, timed = _timed_module(way, turns, is_sharded=strategy == "fsdp2", stops_half_way=saves)
            callbacks: list[Any] = [timed]
            if way.has_budget:
                from memfit.integrations.lightning import MemfitCallback

                way.handle = MemfitCallback(module="net", **way.options())
                callbacks.append(way.handle)
            way.by_hand(module.net)
            by: Any = DDPStrategy(process_group_backend="gloo")
            if strategy == "fsdp2":
                by = ModelParallelStrategy(
                    data_parallel_size=dist.get_world_size(), tensor_parallel_size=1, process_group_backend="gloo"
                )
            trainer = library.Trainer(devices=dist.get_world_size(), strategy=by, callbacks=callbacks, **given)
            torch.manual_seed(1 + dist.get_rank())
            loaders: Any = [torch.utils.data.DataLoader(_Texts(turns.tokens), batch_size=None)]
            if evaluates:
                loaders.append(torch.utils.data.DataLoader(_Texts(turns.tokens), batch_size=None))
            trainer.fit(module, *loaders, ckpt_path=path)
            if turns.are_over:
                return module.parameters()
            path = str(Path(folder) / "stored.ckpt")
            trainer.save_checkpoint(path)
            dist.barrier()


def _timed_module(way: Way, turns: Any, *, is_sharded: bool, stops_half_way: bool) -> tuple[Any, Any]:
    """Return a module, and a callback by which the turns time its steps.

    Args:
        way: says how wide it is.
        turns: that time it.
        is_sharded: by `fully_shard` in `configure_model`.
        stops_half_way: whether the Trainer stops after half of the steps, too.
    """
    import pytorch_lightning as library

    class Module(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = Transformer(way.width), list[torch.Tensor]()

        def configure_model(self) -> None:
            from torch.distributed.fsdp import FSDPModule, fully_shard

            if is_sharded and not isinstance(self.net, FSDPModule):
                mesh: Any = self.device_mesh["data_parallel"]  # pyright: ignore
                for layer in self.net.layers:
                    fully_shard(layer, mesh=mesh)
                fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: Any, _number: int) -> Any:
            loss = loss_of(self.net(batch), batch)
            self.losses.append(loss.detach())
            return loss

        def validation_step(self, batch: Any, _number: int) -> None:
            self.losses.append(loss_of(self.net(batch), batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    class Timed(library.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            turns.begin()

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            turns.end(module.losses)
            module.losses.clear()
            trainer.should_stop = turns.are_over or (stops_half_way and turns.step == turns.half)

    module = Module()
    return module, Timed()


class _Texts(torch.utils.data.IterableDataset[Any]):
    """Batches without an end."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (tokens_of(step, dist.get_rank(), self._tokens) for step in range(MANY))
