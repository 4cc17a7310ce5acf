"""A cluster on any machine: the step of one rank of so many, none of which is there, and nothing allocated."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Unpack

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from memfit.capture import TrainingStep
from memfit.capture.fully_sharded import across_ranks
from memfit.capture.lines import user_line
from memfit.capture.placement import require_dense
from memfit.errors import InvalidOptionError, MemfitError, UnsupportedStepError
from memfit.options import Cluster, ClusterOptions, require_options
from memfit.step.distributed.sharding import require_bare, shard_blocks
from memfit.torch_private.absent import DevicesHere, WithoutMemory, absent_ranks
from memfit.torch_private.sharding import is_fully_sharded
from memfit.torch_private.tensors import is_data_dependent

_DDP_FILE = inspect.getfile(torch.nn.parallel.DistributedDataParallel)


@contextmanager
def across(ranks: int, **options: Unpack[ClusterOptions]) -> Iterator[AbsentRanks]:
    """Let this process be the first of so many ranks inside the block, the others of which are not there.

        with memfit.across(64, shard=True) as there:
            step = there.step(make_step)  # a TrainingStep of one rank; nothing is allocated
            graph = memfit.capture.capture(step).graph

    torch's `fake` backend stands for the other ranks, which all do the same. Inside the block `torch.distributed`
    is initialized: code that reads the world's size, makes meshes, or calls `fully_shard` runs as under torchrun.

    Args:
        ranks: how many; 1 is this process alone.
        options: `shard`, `replicas`, `link`; see `memfit.options.ClusterOptions`.

    Raises:
        InvalidOptionError: numbers that do not fit together, or a process group that is there already.
    """
    require_options(options, ClusterOptions, "memfit.across")
    with on_cluster(Cluster(ranks=ranks, **options)) as there:
        yield there


@contextmanager
def on_cluster(cluster: Cluster) -> Iterator[AbsentRanks]:
    """Let this process be the first rank of a cluster inside the block, as `across` does."""
    if not dist.is_available():
        raise InvalidOptionError("this torch has no torch.distributed, which plans across ranks are made with")
    if dist.is_initialized():
        raise InvalidOptionError(
            "this process has a process group already, and a cluster is planned as rank 0 of another one: plan in a "
            "process without init_process_group, such as `memfit plan --ranks`"
        )
    with absent_ranks(cluster.ranks):
        yield AbsentRanks(cluster)


@dataclass(frozen=True, slots=True)
class AbsentRanks:
    """So many ranks, none of which is there: what `across` gives its block.

    Args:
        cluster: how many, and how they share a model.
    """

    cluster: Cluster

    def step(self, make: Callable[[], TrainingStep]) -> TrainingStep:
        """Return the step of one rank that a function makes, its model sharded or replicated over the ranks.

        Tensors of more than 1 MiB that are made in it have no memory. Where there is no CUDA, `cuda` is the CPU. A
        model may come bare, with `fully_shard` applied to it or, a small one, in `DistributedDataParallel`.

        Args:
            make: makes a training step with the batch of one rank.

        Raises:
            UnsupportedStepError: it reads values of tensors without memory, or is no step of training.
            InvalidOptionError: the model is sharded already, and is to be sharded.
            MemfitError: as `memfit.fit` for models that cannot be trained across ranks.
        """
        with DevicesHere(), WithoutMemory():
            try:
                step = make()
            except Exception as raised:
                error = raised.__cause__ if isinstance(raised, MemfitError) else raised
                if isinstance(error, Exception) and _is_in_ddp(error):
                    raise UnsupportedStepError(
                        f"{user_line(error)}: the model is wrapped in DistributedDataParallel, which needs the memory "
                        "of its parameters: give the bare model, which is planned as in DDP unless it is to be sharded"
                    ) from raised
                if not isinstance(error, Exception) or not is_data_dependent(error):
                    raise
                raise UnsupportedStepError(
                    f"{user_line(error)}: the values of a large tensor are read while the step is made, and tensors of "
                    "more than 1 MiB have no memory where ranks are planned before they are there: leave that out"
                ) from raised
            if not isinstance(step, TrainingStep):
                return step
            return self._spread(step)

    def _spread(self, step: TrainingStep) -> TrainingStep:
        if not step.has_backward:
            raise UnsupportedStepError(f"{step.name or 'the step'} has no backward pass, and is not trained on ranks")
        require_dense(step.batch, "batch")
        model, is_wrapped = step.model, isinstance(step.model, torch.nn.parallel.DistributedDataParallel)
        if self.cluster.shard and (is_wrapped or is_fully_sharded(model)):
            raise InvalidOptionError(
                f"{step.name or type(model).__name__}: the model is sharded, or in DistributedDataParallel, already: "
                "leave out shard (--shard), or give the bare model"
            )
        if self.cluster.ranks == 1 and not is_wrapped and not is_fully_sharded(model):
            return step
        if self.cluster.shard:
            require_bare(model, step.optimizer, "shard")
            shard_blocks(model, _mesh(self.cluster, model), step.optimizer)
        is_left = is_wrapped or is_fully_sharded(model)  # the model says how it is shared
        bare, found = across_ranks(model, None if is_left else dist.group.WORLD)
        assert found is not None
        found.absent_link = self.cluster.link
        return replace(step, model=bare, across=found)


def _is_in_ddp(error: Exception) -> bool:
    return any(frame.filename == _DDP_FILE for frame in traceback.extract_tb(error.__traceback__))


def _mesh(cluster: Cluster, model: torch.nn.Module) -> DeviceMesh:
    device_type = next(model.parameters()).device.type
    if cluster.replicas == 1:
        return init_device_mesh(device_type, (cluster.ranks,))
    return init_device_mesh(device_type, (cluster.replicas, cluster.shards), mesh_dim_names=("replicas", "shards"))
