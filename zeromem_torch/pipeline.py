"""The whole of retrieval as one module: profiled queries and a bank of memories in, evidence out, no LLM anywhere."""

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor, nn

from zeromem_torch.bank import MemoryBank, member_mask, segment_minmax, segment_topk
from zeromem_torch.calibration.evidence import EvidenceCalibration
from zeromem_torch.closure import Closure, Support
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.retrieval.fusion import ViewFusion
from zeromem_torch.retrieval.graph import GraphView
from zeromem_torch.retrieval.hierarchy import prune_episodes, view_of
from zeromem_torch.retrieval.signals import Signals, UnitSignals
from zeromem_torch.routing import router as routers
from zeromem_torch.routing.features import Asked
from zeromem_torch.routing.queries import QueryBatch
from zeromem_torch.substrate.traces import ZeroMemError

CONFIG, WEIGHTS, ROUTER = "config.json", "model.safetensors", "router.json"
_UNREADABLE = (OSError, ValueError, RuntimeError, TypeError, KeyError, SafetensorError)


@dataclass(frozen=True)
class Views:
    """What both views say of every unit, and the route between them."""

    signals: Signals
    graph: Float[Tensor, "slots units"]  # each brought to [0, 1] over its memory
    hierarchy: Float[Tensor, "slots units"]
    graph_weight: Float[Tensor, "slots memories"]
    reset_reason: Int[Tensor, "slots memories"]
    bonus: Float[Tensor, "slots units"] | None = None  # that a learned router adds to what is fused


@dataclass(frozen=True)
class Selection:
    """Ranked unit rows of the bank, best first, -1 behind the last."""

    fused: Float[Tensor, "slots units"]  # S of Eq. 13
    support: Support
    ranked: Float[Tensor, "slots units"]  # calibrated
    main: Int[Tensor, "slots memories k"]  # M(q)
    closed: Int[Tensor, "slots memories c"]  # C(q)
    result: Int[Tensor, "slots memories r"]  # R(q)


class ZeroMemPipeline(nn.Module):
    """Route, search both views, fuse, close, calibrate (paper Eqs. 7-15), for every query of every memory at once."""

    def __init__(self, config: ZeroMemConfig | None = None) -> None:
        super().__init__()
        config = config or ZeroMemConfig()
        self.config = config
        self.signals = UnitSignals(
            exhaustive=config.signals.exhaustive,
            candidates=config.signals.candidates,
            date_reach=config.signals.date_reach,
            precision=config.compute.states,
            backend=config.compute.backend,
        )
        self.router = routers.made(config.routing.router, {"rho": config.routing.rho})
        self.graph = GraphView(
            config.graph.prior.to_dict(),
            config.graph.exact.to_dict(),
            damping=config.graph.damping,
            sharpness=config.graph.sharpness,
            affinity=config.graph.affinity,
            named=config.graph.named,
            hops=config.graph.hops,
            decay=config.graph.decay,
            backend=config.compute.backend,
        )
        self.hierarchy = view_of(config.hierarchy.view, config.hierarchy.weights.to_dict())
        self.fusion = ViewFusion(config.fusion.graph_contrast, config.fusion.hierarchy_contrast, config.compute.backend)
        self.closure = Closure(config.closure.neighbour, config.closure.graph, config.compute.backend)
        self.calibration = EvidenceCalibration(config.calibration.weights.to_dict())

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json, router.json and model.safetensors: the stages' weights, nothing that is remembered."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        save_file(self._weights(), Path(folder) / WEIGHTS)
        for name, told in zip((CONFIG, ROUTER), self._told(), strict=True):
            (Path(folder) / name).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(cls, folder: str | os.PathLike[str]) -> Self:
        """Read what `save_pretrained` wrote; no network is touched."""
        try:
            config = json.loads((Path(folder) / CONFIG).read_text(encoding="utf-8"))
            there = (Path(folder) / ROUTER).exists()
            router = json.loads((Path(folder) / ROUTER).read_text(encoding="utf-8")) if there else None
            return cls._of(ZeroMemConfig.from_dict(config, CONFIG), router, load_file(Path(folder) / WEIGHTS))
        except _UNREADABLE as error:
            expected = f"a folder with {CONFIG} and {WEIGHTS}, as save_pretrained writes it"
            raise ZeroMemError.of("pipeline", expected, str(folder), f"check it ({error})") from error

    def to_text(self) -> str:
        """The same in one line of JSON, for a record to keep."""
        config, router = self._told()
        weights = base64.b64encode(save(self._weights())).decode("ascii")
        return json.dumps({"config": config, "router": router, "weights": weights})

    @classmethod
    def from_text(cls, text: str) -> Self:
        try:
            told = json.loads(text)
            config = ZeroMemConfig.from_dict(told["config"], CONFIG)
            return cls._of(config, told["router"], load(base64.b64decode(told["weights"])))
        except ZeroMemError:  # a router that nobody has registered here, by its name
            raise
        except _UNREADABLE as error:
            raise ZeroMemError.of("pipeline", "what to_text writes", text, f"check it ({error})") from error

    def within(self, own: ZeroMemConfig) -> Self:
        """These weights, over what another configuration stores, reads and computes, and for as many results."""
        kept = {name: getattr(own, name) for name in ("encoder", "substrate", "signals", "compute")}
        kept["calibration"] = replace(self.config.calibration, top_k=own.calibration.top_k)
        told = {"kind": self.router.kind, **self.router.spec}
        return self._of(replace(self.config, **kept), told, self.state_dict())

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.contiguous() for name, value in self.state_dict().items()}

    def _told(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The configuration, which names the router that is there, and what the router is made from."""
        config = replace(self.config, routing=replace(self.config.routing, router=self.router.kind))
        return config.to_dict(), {"kind": self.router.kind, **self.router.spec}

    @classmethod
    def _of(cls, config: ZeroMemConfig, router: Mapping[str, Any] | None, weights: Mapping[str, Tensor]) -> Self:
        if router is None:
            pipeline = cls(config)
        else:
            kind, spec = router["kind"], {name: value for name, value in router.items() if name != "kind"}
            pipeline = cls(replace(config, routing=replace(config.routing, router=routers.RuleRouter.kind)))
            pipeline.router = routers.made(kind, spec)
            pipeline.config = replace(config, routing=replace(config.routing, router=kind))
        pipeline.load_state_dict(weights)
        return pipeline

    def forward(
        self, batch: QueryBatch, bank: MemoryBank, top_k: int, longest: int | None = None
    ) -> tuple[Views, Selection]:
        views = self.views(batch, bank)
        return views, self.select(views, bank, top_k, longest)

    def views(self, batch: QueryBatch, bank: MemoryBank) -> Views:
        return self.views_of(batch, bank, self.signals(batch, bank))

    def views_of(self, batch: QueryBatch, bank: MemoryBank, signals: Signals) -> Views:
        """The same of signals that are there already."""
        units = bank.axes["units"]
        asked = Asked(batch, bank, signals)
        own = self.router.weighed(asked, self.graph.walk.damping, self.graph.propagate.decay)
        graph = self.graph(own.batch, bank, own.signals, own.damping, own.decay)
        hierarchy = self.hierarchy(own.signals)
        if self.config.hierarchy.keep_episodes:
            hierarchy = prune_episodes(hierarchy, bank, self.config.hierarchy.keep_episodes)
        both = segment_minmax(graph.units, units), segment_minmax(hierarchy, units)
        asked = Asked(batch, bank, signals, *both)
        weight, alone = self.router(asked), {"graph": 1.0, "hierarchy": 0.0}.get(self.config.routing.views)
        if alone is not None:
            weight = torch.full_like(weight, alone)
        return Views(signals, *both, weight, graph.reason, self.router.added(asked))

    def select(
        self,
        views: Views,
        bank: MemoryBank,
        top_k: int,
        longest: int | None = None,
        *,
        close: bool = True,
        calibrate: bool = True,
    ) -> Selection:
        """M(q), C(q) and R(q). R(q) is all of C(q), or the ``longest`` best of all units, for a token budget to cut.

        Without ``close`` or ``calibrate`` that stage passes on what it was given.
        """
        units, backend = bank.axes["units"], self.config.compute.backend
        fused, main = self.fusion.best(
            views.graph, views.hierarchy, views.graph_weight, units, top_k, bonus=views.bonus
        )
        support = self.closure(fused, main, bank) if close else Support.none(fused)
        supported = fused + support.neighbour + support.graph
        in_main = member_mask(main, units.size)
        reached = (support.neighbour + support.graph > 0) & ~in_main
        added = segment_topk(supported, units, self.config.closure.most if close else 0, reached, backend)
        closed = torch.cat([main, added], dim=2)
        admitted = member_mask(closed, units.size) if longest is None else torch.ones_like(in_main)
        length = closed.shape[2] if longest is None else longest
        ranked = self.calibration(supported, views.signals) if calibrate else supported
        return Selection(fused, support, ranked, main, closed, segment_topk(ranked, units, length, admitted, backend))
