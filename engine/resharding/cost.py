"""What a transition costs: bytes per rank and link, the lower bound, seconds. Pure; torch-free."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine.resharding.boxes import intersect, volume
from engine.resharding.placement import Placement
from engine.resharding.plan import RankPlan


@dataclass(frozen=True)
class RankCost:
    """Bytes one rank moves in one transition."""

    rank: int
    copied: int
    """Kept on the rank: a copy in its own memory, or nothing where the memory is shared."""
    received_near: int
    """From ranks of the same node."""
    received_far: int
    """From other nodes."""
    sent_near: int
    sent_far: int
    relayed_in: int
    """From a rank of the same node that fetched it from another node."""
    relayed_out: int

    @property
    def received(self) -> int:
        return self.received_near + self.received_far + self.relayed_in

    @property
    def sent(self) -> int:
        return self.sent_near + self.sent_far + self.relayed_out


def rank_cost(plan: RankPlan, bytes_per_element: int) -> RankCost:
    """The bytes of one rank's plan, with elements of the width that travels."""
    node, counts = plan.placement.node, dict.fromkeys(("recv", "send", "far recv", "far send", "in", "out"), 0)
    ways = (("recv", plan.recvs), ("send", plan.sends), ("in", plan.relayed), ("out", plan.forwards))
    for way, transfers in ways:
        for transfer in transfers:
            far = "" if node(transfer.src) == node(transfer.dst) else "far "
            counts[far + way] += volume(transfer.box)
    copied = sum(volume(box) for _, box in plan.local)
    return RankCost(plan.rank, *(elements * bytes_per_element for elements in (
        copied, counts["recv"], counts["far recv"], counts["send"], counts["far send"], counts["in"], counts["out"])))


def lower_bound(plan: RankPlan, bytes_per_element: int) -> int:
    """Bytes no plan can avoid: what the rank needs minus what it has. Counted box by box, apart from the planner."""
    has: dict[str, list] = {}
    for tensor, box in plan.src.held(plan.rank) if plan.rank in plan.src.ranks else ():
        has.setdefault(tensor.name, []).append(box)
    missing = 0
    for tensor, box in plan.dst.held(plan.rank) if plan.rank in plan.dst.ranks else ():
        own = [common for held in has.get(tensor.name, ()) if (common := intersect(held, box))]
        missing += volume(box) - sum(volume(common) for common in own)
    return missing * bytes_per_element


def transition_seconds(costs: Iterable[RankCost], placement: Placement) -> float:
    """Estimated time of a transition: the busiest link, each direction on its own, at its nominal speed; then relays.

    `costs` are all ranks of the nodes that matter: of all nodes, or of those thought to be the busiest.
    """
    far_in: dict[int, int] = {}
    far_out: dict[int, int] = {}
    near = relays = 0
    for cost in costs:
        node = placement.node(cost.rank)
        near = max(near, cost.received_near, cost.sent_near)
        relays = max(relays, cost.relayed_in, cost.relayed_out)
        far_in[node] = far_in.get(node, 0) + cost.received_far
        far_out[node] = far_out.get(node, 0) + cost.sent_far
    far = max([*far_in.values(), *far_out.values()], default=0)
    first = max(near / placement.node_bytes_per_s, far / placement.network_bytes_per_s)
    return first + relays / placement.node_bytes_per_s
