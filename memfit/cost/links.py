"""Links between ranks, and the seconds of collectives over them: a ring is as fast as its slowest link.

An all-gather or a reduce-scatter of n bytes over r ranks sends (r - 1) / r of them over each link of the ring, and an
all-reduce twice as many. Latencies are those of NCCL's own model. A real link does not reach its rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.cost.collectives import CollectiveRates, kinds_of, with_collectives
from memfit.device import Device
from memfit.errors import InvalidOptionError
from memfit.graph import Graph
from memfit.options import INFINIBAND, NVLINK
from memfit.system.budget import parse_rate

_RANKS_PER_NODE = 8  # NVIDIA DGX H100 datasheet, as the next two
_INFINIBAND_BYTES_PER_SECOND = 50e9  # of a rank, one direction: a link of 400 Gb/s for each GPU of a node
_NVLINK_BYTES_PER_SECOND = {"h100": 450e9, "h200": 450e9, "a100-80": 300e9, "a100-40": 300e9}  # one direction
# NCCL, src/graph/tuning.cc, ring and protocol Simple: of a collective, of a hop within a node, of a hop between nodes
_BASE_SECONDS, _NVLINK_HOP_SECONDS, _NETWORK_HOP_SECONDS = 8.4e-6, 3.4e-6, 9.6e-6
_SUM = "start_sum"  # the kind of collective that is an all-reduce: it goes around twice


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins ranks: nodes of so many ranks, with one rate within and one between them.

        >>> from memfit.cost.device_profiles import load_device
        >>> round(Link.parse("25GB/s", load_device("h100")).rates("start_gather", range(4)).bytes_per_second / 1e9, 1)
        33.3

    Attributes:
        node_ranks: of a node; 1 if all ranks are joined by the network.
        node_bytes_per_second: that a rank sends to another one of its node.
        network_bytes_per_second: that a rank sends to another node.
    """

    node_ranks: int
    node_bytes_per_second: float
    network_bytes_per_second: float

    @staticmethod
    def parse(text: str | None, device: Device) -> Link:
        """Return the link that a text stands for.

        Args:
            text: `nvlink`, `ib`, or the bytes per second that a rank sends, such as `25GB/s`. None is NVLink where the
                device has it, and else InfiniBand.
            device: whose NVLink it is.

        Raises:
            InvalidOptionError: a device without NVLink.
            InvalidBudgetError: another text.
        """
        own = _NVLINK_BYTES_PER_SECOND.get(device.name)
        network = Link(
            node_ranks=1,
            node_bytes_per_second=_INFINIBAND_BYTES_PER_SECOND,
            network_bytes_per_second=_INFINIBAND_BYTES_PER_SECOND,
        )
        if text == INFINIBAND or (text is None and own is None):
            return network
        if text is None or text == NVLINK:
            if own is None:
                raise InvalidOptionError(
                    f"link {NVLINK!r}: its rate is not known for device {device.name!r}, only for "
                    f"{', '.join(_NVLINK_BYTES_PER_SECOND)}; give {INFINIBAND!r}, or a rate such as 25GB/s"
                )
            return Link(
                node_ranks=_RANKS_PER_NODE,
                node_bytes_per_second=own,
                network_bytes_per_second=_INFINIBAND_BYTES_PER_SECOND,
            )
        rate = parse_rate(text)
        return Link(node_ranks=1, node_bytes_per_second=rate, network_bytes_per_second=rate)

    def rates(self, kind: str, ranks: Sequence[int]) -> CollectiveRates:
        """Return latency and rate of a kind of collectives over a ring of ranks.

        Args:
            kind: as `kinds_of` names it.
            ranks: of the group, by their numbers; nodes have consecutive ones.
        """
        size, nodes = len(ranks), len({rank // self.node_ranks for rank in ranks})
        if size == 1:
            return CollectiveRates(latency_seconds=0.0, bytes_per_second=math.inf)
        if nodes == 1:
            rate = self.node_bytes_per_second
        else:  # several rings, each over another link of a node to the network
            rate = self.network_bytes_per_second * max(1, size // nodes)
            rate = rate if self.node_ranks == 1 else min(rate, self.node_bytes_per_second)
        hops = (size - nodes) * _NVLINK_HOP_SECONDS + (nodes - 1) * _NETWORK_HOP_SECONDS
        turns = 2 if kind == _SUM else 1
        return CollectiveRates(
            latency_seconds=_BASE_SECONDS + turns * hops, bytes_per_second=rate * size / (size - 1) / turns
        )


def with_links(graph: Graph, ring_of: Callable[[str], Sequence[int]], link: Link) -> Graph:
    """Return `graph` with the seconds of its collectives over rings of ranks.

    Args:
        graph: a captured graph.
        ring_of: returns the ranks that a kind of collectives runs between.
        link: joins them.
    """
    rates = {kind: link.rates(kind, ring_of(kind)) for kind in kinds_of(graph)}
    return with_collectives(graph, lambda kind, size_bytes: rates[kind].seconds(size_bytes))
