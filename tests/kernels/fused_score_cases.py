"""What every back end of fused scoring must do, against the loops of `equations` and against the definition."""

from itertools import pairwise
from typing import Any

import equations
import torch
from builders import Dice
from torch import Tensor
from torch.testing import assert_close

from zeromem_torch.bank import axis_of
from zeromem_torch.retrieval.fusion import ViewFusion

OPTIONS: tuple[tuple[str, ...], ...] = (
    (),
    ("bonus",),
    ("graph_there", "hierarchy_there"),
    ("admitted",),
    ("bonus", "graph_there", "hierarchy_there", "admitted"),
)


def views(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu", slots: int = 4
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """Both views, the weights, and everything that may be given beside: with ties, flat views, and nothing returned."""
    dice, units = Dice(sum(sizes)), sum(sizes)
    graph, hierarchy = dice.uniform(slots, units), dice.uniform(slots, units)
    weight = dice.uniform(slots, len(sizes))
    beside = {name: dice.uniform(slots, units) < 0.6 for name in ("graph_there", "hierarchy_there", "admitted")}
    beside["bonus"] = (dice.uniform(slots, units) * 4).round() / 8 - 0.25
    if slots == 4:
        graph[1], hierarchy[1] = (graph[1] * 3).round() / 3, (hierarchy[1] * 2).round() / 2
        hierarchy[2] = 0.25 + 8e-7 * hierarchy[2]  # flat, but for less than a step
        beside["graph_there"][2] = beside["admitted"][2] = False
        graph[3] = hierarchy[3] = 0.0
        beside["bonus"][3] = torch.arange(units) % 5 * 3e-7  # all that tells them apart, in parts of a step
    given = {name: tensor.to(device) for name, tensor in beside.items()}
    given["bonus"] = given["bonus"].to(dtype)
    return graph.to(device, dtype), hierarchy.to(device, dtype), weight.to(device, dtype), given


def check_scores(
    backend: str,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    *,
    contrasts: tuple[float, float] = (4.0, 10.0),
    k: int = 5,
    options: tuple[tuple[str, ...], ...] = OPTIONS,
) -> None:
    graph, hierarchy, weight, given = views(sizes, dtype, device)
    axis = axis_of(sizes, device)
    for names in options:
        some: dict[str, Any] = {name: given[name] for name in names}
        fused, rows = ViewFusion(*contrasts, backend=backend).best(graph, hierarchy, weight, axis, k, **some)
        assert fused.dtype == torch.float32
        assert rows.shape == (4, len(sizes), k)
        of_torch, rows_of_torch = ViewFusion(*contrasts, backend="torch").best(
            graph, hierarchy, weight, axis, k, **some
        )
        assert_close(fused, of_torch, rtol=0, atol=2e-7)
        assert torch.equal(rows, rows_of_torch)
        some = {name: tensor.tolist() for name, tensor in some.items()}
        for s in range(4):
            for m, (first, last) in enumerate(pairwise(axis.ptr)):
                own = {name: lines[s][first:last] for name, lines in some.items()}
                expected = equations.fuse(
                    graph[s, first:last].tolist(),
                    hierarchy[s, first:last].tolist(),
                    float(weight[s, m]),
                    contrasts,
                    returned=(own.get("graph_there"), own.get("hierarchy_there")),
                    bonus=own.get("bonus"),
                )
                scores = fused[s, first:last].tolist()
                assert_close(torch.tensor(scores), torch.tensor(expected), rtol=0, atol=2e-6)
                admitted = [u for u, there in enumerate(own["admitted"]) if there] if "admitted" in own else None
                best = equations.ranking(scores, k, admitted)
                assert rows[s, m].tolist() == [first + unit for unit in best] + [-1] * (k - len(best))
