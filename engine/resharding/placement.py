"""Where ranks are and how fast they reach each other, and who fetches a slice from whom. Torch-free."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.resharding.sharding import Ranks


@dataclass(frozen=True)
class Placement:
    """Nodes of consecutive ranks, and the speed of the links.

    The defaults are the machines of the HybridFlow paper (sec. 8.1): 8 GPUs a node, NVLink 600 GB/s, 200 Gb/s a node.
    """

    ranks_per_node: int = 8
    node_bytes_per_s: float = 600e9
    """What one rank moves to and from others of its node."""
    network_bytes_per_s: float = 25e9
    """What one node moves to and from all others."""

    def node(self, rank: int) -> int:
        """The node of a global rank."""
        return rank // self.ranks_per_node


PAPER_CLUSTER = Placement()


class Exchange:
    """Who sends a slice that `holders` have to the `wanters` that lack it.

    A wanter is served from its own node where a holder is there. Otherwise one wanter of its node fetches the slice
    from another node and relays it to the rest, so that a slice crosses the network once per node. Holders and fetchers
    take turns, and the turn advances with every tensor: over a model all replicas send, and all ranks of a node fetch,
    the same amount. Pure arithmetic on the two sets of ranks: both ends come to the same answer without talking.
    """

    def __init__(self, holders: Ranks, wanters: Ranks, placement: Placement):
        self._node = placement.node
        has = frozenset(holders)
        self._near = _by_node(holders, placement)
        # Neighbours in this order are on different nodes, so that taking turns spreads over network cards as well.
        ordered = sorted((index, rank) for ranks in self._near.values() for index, rank in enumerate(ranks))
        self._far = [rank for _, rank in ordered]
        self._far_position = {rank: position for position, rank in enumerate(self._far)}
        self._wanters = _by_node((rank for rank in wanters if rank not in has), placement)
        self._far_nodes = [node for node in self._wanters if node not in self._near]
        self._far_turn = {node: position for position, node in enumerate(self._far_nodes)}

    def source(self, rank: int, turn: int) -> tuple[int, bool]:
        """Where wanter `rank` gets tensor number `turn` from, and whether that rank only relays it."""
        node = self._node(rank)
        wanters = self._wanters[node]
        if node in self._near:
            sources = self._near[node]
            return sources[(wanters.index(rank) + len(wanters) * turn) % len(sources)], False
        fetcher = self._fetcher(node, turn)
        if fetcher != rank:
            return fetcher, True
        return self._far[(self._far_turn[node] + len(self._far_nodes) * turn) % len(self._far)], False

    def served(self, rank: int, turn: int) -> Iterator[int]:
        """Whom holder `rank` sends tensor number `turn`."""
        node = self._node(rank)
        wanters, sources = self._wanters.get(node, ()), self._near[node]
        first = sources.index(rank) - len(wanters) * turn
        for position in range(first % len(sources), len(wanters), len(sources)):
            yield wanters[position]
        first = self._far_position[rank] - len(self._far_nodes) * turn
        for position in range(first % len(self._far), len(self._far_nodes), len(self._far)):
            yield self._fetcher(self._far_nodes[position], turn)

    def relayed(self, rank: int, turn: int) -> list[int]:
        """Whom wanter `rank` passes tensor number `turn` on to, once it has it."""
        node = self._node(rank)
        if node in self._near or self._fetcher(node, turn) != rank:
            return []
        return [other for other in self._wanters[node] if other != rank]

    def _fetcher(self, node: int, turn: int) -> int:
        wanters = self._wanters[node]
        return wanters[turn % len(wanters)]


def _by_node(ranks: Iterable[int], placement: Placement) -> dict[int, list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(placement.node(rank), []).append(rank)
    return nodes
