"""The study of learned routing in one command: what learning buys, where, and what each weight came to.

    python bench/routing_study.py --locomo PATH --hotpotqa PATH --corpus PATH --musique PATH --json OUT --plots FOLDER

Each part is written as soon as it is there, and a part that is there is not computed again. docs/routing-study.md reads
the figures. Tuning data only.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zeromem_torch.cli.options import cached_encoder, encoding_options
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.evaluation.datasets import load_dataset
from zeromem_torch.evaluation.run import provenance
from zeromem_torch.library import ZeroMem
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.training.cache import Cached, cached
from zeromem_torch.training.fit import fit
from zeromem_torch.training.settings import COMMON, Stage, TrainingSettings
from zeromem_torch.training.validation import Rows, cross_validate, headroom, measured, summary, weights_of

SHARED, RHO = TrainingSettings().stages
WALK = Stage(("prior", "sharpness", "damping", "decay", "affinity"), epochs=8, rate=0.005, pull=0.03, patience=3)
VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "mixes alone": {"stages": (SHARED,)},
    "mixes of the views alone": {"stages": (dataclasses.replace(SHARED, learn=COMMON),), "bonus": ()},
    "rho of each query alone": {"stages": (RHO,), "bonus": ()},
    "a bonus of each query, after the mixes": {
        "stages": (SHARED, dataclasses.replace(RHO, learn=("bonus",), rate=0.003, pull=0.5))
    },
    "listwise loss": {"loss": "listwise", "handed_loss": "listwise"},
    "RankNet loss": {"loss": "ranknet", "handed_loss": "ranknet"},
}
SLOW: dict[str, dict[str, Any]] = {"gamma, hop decay and the prior": {"stages": (WALK,), "bonus": (), "refit": False}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("locomo", "hotpotqa", "corpus", "musique"):
        parser.add_argument(f"--{name}", type=Path, metavar="PATH")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parser.add_argument("--parts", default="variants,walk,curve,transfer,rho", help="some of these (default: all)")
    parser.add_argument(
        "--refit", action="store_true", help="train again with what stopped the training: twice as long"
    )
    encoding_options(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads or 1)
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    study = Study(options, found)
    for part in options.parts.split(","):
        getattr(study, part)()
    if options.plots:
        plot(found, options.plots)


class Study:
    def __init__(self, options: argparse.Namespace, found: dict[str, Any]) -> None:
        self.options, self.found, self.config = options, found, ZeroMemConfig()
        self._questions: dict[str, list[Cached]] = {}

    def questions(self, name: str) -> list[Cached]:
        if name not in self._questions:
            corpus = self.options.corpus if name == "hotpotqa" else None
            data = load_dataset(name, getattr(self.options, name), corpus)
            memory = ZeroMem(self.config, encoder=cached_encoder(self.options, self.config))
            memory.add(data.traces)
            self._questions[name] = cached(memory, data)
        return self._questions[name]

    def sets(self) -> list[str]:
        return [name for name in ("locomo", "hotpotqa", "musique") if getattr(self.options, name)]

    def once(self, part: str, make: Callable[[], Any]) -> Any:
        if part not in self.found:
            began = time.perf_counter()
            self.found[part] = make()
            self.found.setdefault("seconds", {})[part] = round(time.perf_counter() - began, 1)
            self.found["made"] = provenance()
            self.options.json.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
            print(part, json.dumps(self.found[part])[:400], flush=True)
        return self.found[part]

    def variants(self, variants: dict[str, dict[str, Any]] = VARIANTS) -> None:
        for name in self.sets():
            for variant, changed in variants.items():
                self.once(f"cv {name}: {variant}", partial(self._validated, name, changed))

    def walk(self) -> None:
        for variant, changed in SLOW.items():
            self.once(f"cv locomo: {variant}", partial(self._validated, "locomo", changed))

    def _validated(self, name: str, changed: dict[str, Any]) -> dict[str, Any]:
        settings = dataclasses.replace(TrainingSettings(refit=self.options.refit), **changed)
        result = cross_validate(self.config, self.questions(name), settings)
        result.pop("rows")
        return result

    def curve(self) -> None:
        """How many conversations it takes: the last one is left out, the one before it stops the training."""
        questions = self.questions("locomo")
        groups = list(dict.fromkeys(own.group for own in questions))
        last = [own for own in questions if own.group == groups[-1]]
        held_out = [own for own in questions if own.group == groups[-2]]

        def learned(many: int) -> dict[str, Any]:
            train = [own for own in questions if own.group in groups[:many]]
            ranking, _ = fit(self.config, train, held_out, dataclasses.replace(TrainingSettings(), refit=False))
            return self._against(ranking.pipeline(), last)

        for many in range(1, len(groups) - 1):
            self.once(f"curve: {many} conversations", partial(learned, many))

    def transfer(self) -> None:
        """Learned on one set, measured on another."""
        for source in self.sets():
            self.once(f"weights: {source}", partial(self._trained, source))
            pipeline = ZeroMemPipeline.from_pretrained(self._checkpoint(source))
            for target in self.sets():
                if target != source:
                    part = f"transfer: {source} to {target}"
                    self.once(part, partial(self._transferred, pipeline, target))

    def _trained(self, name: str) -> dict[str, Any]:
        questions = self.questions(name)
        last = questions[-1].group
        train, held_out = ([own for own in questions if (own.group == last) == kept] for kept in (False, True))
        ranking, epochs = fit(self.config, train, held_out, TrainingSettings())
        pipeline = ranking.pipeline()
        pipeline.save_pretrained(self._checkpoint(name))
        return {"epochs": epochs, "weights": weights_of(pipeline.config)}

    def _checkpoint(self, name: str) -> Path:
        folder: Path = self.options.json.with_suffix("") / name
        return folder

    def _transferred(self, pipeline: ZeroMemPipeline, target: str) -> dict[str, Any]:
        return self._against(pipeline, self.questions(target))

    def _against(self, pipeline: ZeroMemPipeline, questions: list[Cached]) -> dict[str, Any]:
        fixed, own = ZeroMemPipeline(self.config).eval(), pipeline.eval()
        rows = {"fixed": _joined([measured(fixed, one) for one in questions])}
        rows["learned"] = _joined([measured(own, one) for one in questions])
        return summary(rows)

    def rho(self) -> None:
        """The graph's weight that a trained router gives, by category, and the headroom of every set."""
        for name in self.sets():
            self.once(f"weights: {name}", partial(self._trained, name))

            def given(name: str = name) -> dict[str, Any]:
                pipeline = ZeroMemPipeline.from_pretrained(self._checkpoint(name)).eval()
                by: dict[str, list[float]] = {}
                with torch.no_grad():
                    for own in self.questions(name):
                        weight = pipeline.views_of(own.batch, own.bank, own.signals).graph_weight[:, 0].tolist()
                        for question, value in zip(own.questions, weight, strict=True):
                            by.setdefault(question.category or "all", []).append(round(value, 4))
                return by

            self.once(f"rho: {name}", given)
            fixed = ZeroMemPipeline(self.config).eval()

            def room(name: str = name, fixed: ZeroMemPipeline = fixed) -> dict[str, Any]:
                parts = [headroom(fixed, own) for own in self.questions(name)]
                own = _joined([measured(fixed, one) for one in self.questions(name)])
                joined = {kind: _joined([part[kind] for part in parts]) for kind in parts[0]}
                return {m: {"fixed": _mean(own[m]), **{k: _mean(r[m]) for k, r in joined.items()}} for m in own}

            self.once(f"headroom: {name}", room)


def _joined(parts: list[Rows]) -> Rows:
    return {measure: [value for part in parts for value in part[measure]] for measure in parts[0]}


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


def plot(found: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    weights = {part.split(": ")[1]: own["weights"] for part, own in found.items() if part.startswith("weights: ")}
    fixed = weights_of(ZeroMemConfig())
    if weights:
        names = sorted({name for own in (fixed, *weights.values()) for name in own["hierarchy"]})
        figure, axes = pyplot.subplots(figsize=(8, 3.2), layout="constrained")
        step = 0.8 / (1 + len(weights))
        for k, (label, own) in enumerate({"by hand": fixed, **weights}.items()):
            values = [own["hierarchy"].get(name, 0.0) for name in names]
            axes.bar([i + k * step for i in range(len(names))], values, step, label=label)
        axes.set_xticks([i + 0.3 for i in range(len(names))], names, rotation=60, ha="right", fontsize=7)
        axes.set_ylabel("weight in the hierarchy view")
        axes.legend(fontsize=7)
        figure.savefig(folder / "routing-weights.png", dpi=90)
    given = {part.split(": ")[1]: own for part, own in found.items() if part.startswith("rho: ")}
    if given:
        figure, places = pyplot.subplots(1, len(given), figsize=(2.8 * len(given), 2.8), layout="constrained")
        for axes, (label, by) in zip(np.atleast_1d(places), given.items(), strict=True):
            kinds = sorted(by)
            axes.boxplot([by[kind] for kind in kinds], tick_labels=kinds, showfliers=False)
            axes.set_title(label, fontsize=8)
            axes.tick_params(labelsize=7)
            axes.set_ylim(0, 1)
        np.atleast_1d(places)[0].set_ylabel("weight of the graph view")
        figure.savefig(folder / "routing-rho.png", dpi=90)
    pyplot.close("all")


if __name__ == "__main__":
    main()
