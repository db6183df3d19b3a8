"""Soft gates in place of hard pruning (paper Eq. 11), so that a gradient passes to what is pruned as well."""

import torch
from jaxtyping import Float
from torch import Tensor

from zeromem_torch.bank import MemoryBank, segment_max, segment_topk


def gate_episodes(
    scores: Float[Tensor, "slots units"], bank: MemoryBank, keep: int, temperature: float
) -> Float[Tensor, "slots units"]:
    """`prune_episodes`, softly: a unit keeps of its height above the memory's lowest score

        sigma((best(episode) - threshold) / temperature),

    the threshold lying midway between the last episode that stays and the first that goes. As the temperature is
    annealed to 0 it is the hard pruning, unless those two are equally good. A memory of fewer episodes keeps all.
    """
    units, episodes = bank.axes["units"], bank.axes["episodes"]
    best = segment_max(scores, bank.unit_episode, episodes.size)
    edge = segment_topk(best, episodes, keep + 1)[..., keep - 1 :]  # [slots, memories, 2]
    value = best.gather(1, edge.clamp(min=0).flatten(1)).view(edge.shape)
    threshold = torch.where((edge >= 0).all(-1), value.mean(-1), -torch.inf)
    height = best.index_select(1, bank.unit_episode) - units.spread(threshold)
    lowest = units.spread(-segment_max(-scores, units.segment, units.segments))
    return lowest + torch.sigmoid(height / temperature) * (scores - lowest)
