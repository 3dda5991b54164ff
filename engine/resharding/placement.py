"""Where ranks are and how fast they reach each other, and who fetches a slice from whom. Torch-free."""

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

    A wanter is served from its own node where a holder is there, else from another node; holders take turns, and the
    turn advances with every tensor, so that over a model all replicas send the same amount. Pure arithmetic on the
    two sets of ranks: sender and receiver come to the same answer without talking.
    """

    def __init__(self, holders: Ranks, wanters: Ranks, placement: Placement):
        self._node = placement.node
        has = frozenset(holders)
        lacking = [rank for rank in wanters if rank not in has]
        self._near: dict[int, list[int]] = {}
        for rank in holders:
            self._near.setdefault(placement.node(rank), []).append(rank)
        # Neighbours in this order are on different nodes, so that taking turns spreads over network cards as well.
        ordered = sorted((index, rank) for ranks in self._near.values() for index, rank in enumerate(ranks))
        self._far = [rank for _, rank in ordered]
        self._near_wanters: dict[int, list[int]] = {}
        self._far_wanters: list[int] = []
        for rank in lacking:
            node = placement.node(rank)
            if node in self._near:
                self._near_wanters.setdefault(node, []).append(rank)
            else:
                self._far_wanters.append(rank)

    def pull(self, rank: int) -> tuple[list[int], int, int]:
        """How wanter `rank` finds its sources: (sources, first turn, step): tensor t comes from
        `sources[(first + step * t) % len(sources)]`.
        """
        node = self._node(rank)
        if node in self._near:
            wanters = self._near_wanters[node]
            return self._near[node], wanters.index(rank), len(wanters)
        return self._far, self._far_wanters.index(rank), len(self._far_wanters)

    def push(self, rank: int) -> list[tuple[list[int], int, int]]:
        """Whom holder `rank` serves: (wanters, number of sources, own position) for its node and for the others.

        For tensor t it serves every wanter p with `(p + len(wanters) * t) % sources == position`.
        """
        node = self._node(rank)
        served = []
        if node in self._near_wanters:
            served.append((self._near_wanters[node], len(self._near[node]), self._near[node].index(rank)))
        if self._far_wanters:
            served.append((self._far_wanters, len(self._far), self._far.index(rank)))
        return served


