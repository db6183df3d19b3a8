"""The study of learned routing in one command: what learning buys, where, and what each weight came to.

    python bench/routing_study.py --locomo PATH --hotpotqa PATH --corpus PATH --hotpotqa-train PATH --musique PATH \
        --musique-train PATH --json OUT --plots FOLDER

Each figure is written as soon as it is there, and what is there is not computed again. With --tables, nothing is
computed: the figures of OUT are printed as Markdown, as docs/routing-study.md has them. Tuning data only.
"""

import argparse
import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zeromem_torch.bank import segment_minmax
from zeromem_torch.cli.options import cached_encoder, encoding_options
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.evaluation.datasets import load_dataset
from zeromem_torch.evaluation.metrics import paired_bootstrap
from zeromem_torch.evaluation.run import provenance
from zeromem_torch.library import ZeroMem
from zeromem_torch.pipeline import ZeroMemPipeline
from zeromem_torch.training.cache import Cached, cached
from zeromem_torch.training.fit import fit
from zeromem_torch.training.ranking import NAMES
from zeromem_torch.training.settings import COMMON, Stage, TrainingSettings
from zeromem_torch.training.validation import (
    MEASURES,
    Rows,
    cross_validate,
    headroom,
    joined,
    measured,
    summary,
    weights_of,
)

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SETS = ("locomo", "hotpotqa", "hotpotqa-train", "musique", "musique-train")
STARTS = {"by hand": ZeroMemConfig(), "equal": ZeroMemConfig.from_toml(CONFIGS / "equal.toml")}
SETTINGS = {
    "by hand": TrainingSettings(),
    "equal": TrainingSettings.from_toml(CONFIGS / "training" / "from-equal.toml"),
}
SHARED, RHO = TrainingSettings().stages
WALK = Stage(("prior", "sharpness", "damping", "decay", "affinity"), epochs=8, rate=0.005, patience=3)
VARIANTS: dict[str, dict[str, Any]] = {
    "mixes alone": {"stages": (SHARED,)},
    "mixes of the views alone": {"stages": (dataclasses.replace(SHARED, learn=COMMON),), "bonus": ()},
    "rho of each query alone": {"stages": (RHO,), "bonus": ()},
    "a bonus of each query, after the mixes": {"stages": (SHARED, dataclasses.replace(RHO, learn=("bonus",)))},
    "listwise loss": {"loss": "listwise", "handed_loss": "listwise"},
    "RankNet loss": {"loss": "ranknet", "handed_loss": "ranknet"},
    "gamma, hop decay and the prior": {"stages": (WALK,), "bonus": ()},
    "gamma and hop decay of each query": {"stages": (dataclasses.replace(WALK, learn=("walk",)),), "walk": True},
}
FAMILIES = {
    "late interaction": ("maxsim_turn", "maxsim_window"),
    "dense": ("dense_turn", "dense_window"),
    "lexical": ("lexical_turn", "lexical_window", "lexical_episode", "phrase"),
    "who speaks": ("subject",),
    "dates": ("date", "spoken_date"),
    "answer types": ("holds_time", "holds_place", "holds_person", "holds_title"),
    "titles": ("title",),
    "questions and answers": ("asks", "answers", "opens"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in (*SETS, "corpus"):
        parser.add_argument(f"--{name}", type=Path, metavar="PATH")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    parts = ("variants", "ceiling", "families", "curve", "transfer", "rho")
    parser.add_argument("--parts", default=",".join(parts), help="some of these (default: all)")
    parser.add_argument("--tables", action="store_true", help="print what is there already")
    encoding_options(parser)
    options = parser.parse_args()
    if options.tables:
        print("\n".join(tables(json.loads(options.json.read_text(encoding="utf-8")))))
        return
    if unknown := set(options.parts.split(",")) - set(parts):
        parser.error(f"--parts: expected some of {', '.join(parts)}, got {', '.join(sorted(unknown))}")
    torch.set_num_threads(options.threads or 1)
    found: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    study = Study(options, found)
    for part in options.parts.split(","):
        getattr(study, part)()
    if options.plots:
        plot(found, options.plots)


class Study:
    def __init__(self, options: argparse.Namespace, found: dict[str, Any]) -> None:
        self.options, self.found = options, found
        self._questions: dict[tuple[str, str], list[Cached]] = {}
        self._fixed: dict[tuple[str, str], Rows] = {}

    def sets(self, *among: str) -> list[str]:
        return [name for name in among or SETS if getattr(self.options, name.replace("-", "_"))]

    def questions(self, name: str, start: str = "by hand") -> list[Cached]:
        if (name, start) not in self._questions:
            self._questions[name, start] = self._walked_of(name, start)
        return self._questions[name, start]

    def _walked_of(self, name: str, start: str) -> list[Cached]:
        if start != "by hand":
            return walked(STARTS[start], self.questions(name))
        corpus = self.options.corpus if name == "hotpotqa" else None
        data = load_dataset(name.removesuffix("-train"), getattr(self.options, name.replace("-", "_")), corpus)
        memory = ZeroMem(STARTS[start], encoder=cached_encoder(self.options, STARTS[start]))
        memory.add(data.traces)
        return cached(memory, data)

    def fixed(self, name: str, start: str) -> Rows:
        """What the start gives, in the order of the groups, as folds have it."""
        if (name, start) not in self._fixed:
            questions = self.questions(name, start)
            pipeline = ZeroMemPipeline(STARTS[start]).eval()
            groups = dict.fromkeys(own.group for own in questions)
            ordered = [own for group in groups for own in questions if own.group == group]
            self._fixed[name, start] = joined([measured(pipeline, own) for own in ordered])
        return self._fixed[name, start]

    def once(self, part: str, make: Callable[[], Any]) -> Any:
        if part not in self.found:
            began = time.perf_counter()
            self.found[part] = make()
            self.found.setdefault("seconds", {})[part] = round(time.perf_counter() - began, 1)
            self.found["made"] = made = provenance()
            self.found.setdefault("commits", {})[part] = made["commit"]
            self.options.json.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")
            print(part, json.dumps(self.found[part])[:300], flush=True)
        return self.found[part]

    def validated(
        self, name: str, start: str, settings: TrainingSettings, without: Sequence[str] = (), control: bool = False
    ) -> dict[str, Any]:
        """Cross-validated; and what was learned against the weights by hand, which these questions helped to choose."""
        if without:
            questions = walked(STARTS[start], [silenced(own, without) for own in self.questions(name)])
        else:
            questions = self.questions(name, start)
        result = cross_validate(STARTS[start], questions, settings, control=control)
        rows, hand = result.pop("rows"), self.fixed(name, "by hand")
        against = {measure: paired_bootstrap(rows["learned"][measure], hand[measure]) for measure in MEASURES}
        return {**result, "against by hand": against}

    def variants(self) -> None:
        for name in self.sets():
            for start, settings in SETTINGS.items():
                own = partial(self.validated, name, start, settings, control=start == "by hand")
                self.once(f"cv {name} from {start}", own)
        for name in self.sets("locomo"):
            for variant, changed in VARIANTS.items():
                settings = dataclasses.replace(SETTINGS["by hand"], **changed)
                self.once(f"cv {name} from by hand: {variant}", partial(self.validated, name, "by hand", settings))

    def ceiling(self) -> None:
        """Learned and measured on the same questions, unheld: what weights of this kind could reach at most, about."""
        for name in self.sets():
            self.once(f"ceiling {name}", partial(self._in_sample, name))

    def _in_sample(self, name: str) -> dict[str, Any]:
        questions = self.questions(name)
        stage = dataclasses.replace(SHARED, rate=0.01, pull=0.0, epochs=80)
        ranking, _ = fit(STARTS["by hand"], questions, (), dataclasses.replace(SETTINGS["by hand"], stages=(stage,)))
        return self.against(ranking.pipeline(), name, "by hand")

    def families(self) -> None:
        """What is lost without a family of signals, all weights being learned anew from equal ones."""
        for name in self.sets("locomo", "hotpotqa-train", "musique-train"):
            for family, signals in FAMILIES.items():
                own = partial(self.validated, name, "equal", SETTINGS["equal"], signals)
                self.once(f"cv {name} without {family}", own)

    def curve(self) -> None:
        """How many conversations it takes: each is left out in turn, the one behind it stops the training."""
        for name in self.sets("locomo"):
            groups = list(dict.fromkeys(own.group for own in self.questions(name)))
            for start in STARTS:
                for many in range(1, len(groups) - 1):
                    self.once(f"curve {name} from {start}: {many}", partial(self._learned_of, name, start, many))

    def _learned_of(self, name: str, start: str, many: int) -> dict[str, Any]:
        questions = self.questions(name, start)
        groups = list(dict.fromkeys(own.group for own in questions))
        parts = []
        for place, group in enumerate(groups):
            stop, *rest = (groups[place + 1 :] + groups[: place + 1])[:-1]
            train = [own for own in questions if own.group in rest[:many]]
            held_out = [own for own in questions if own.group == stop]
            ranking, _ = fit(STARTS[start], train, held_out, SETTINGS[start])
            parts += [measured(ranking.pipeline(), own) for own in questions if own.group == group]
        return summary({"fixed": self.fixed(name, start), "learned": joined(parts)})

    def transfer(self) -> None:
        """Learned on one set, measured on another; of a set in two parts, learned on the one for training."""
        for start in STARTS:
            for source in self.sets("locomo", "hotpotqa-train", "musique-train"):
                pipeline = self.trained(source, start)
                for target in self.sets("locomo", "hotpotqa", "musique"):
                    if target != source:
                        own = partial(self.against, pipeline, target, start)
                        self.once(f"transfer from {start}: {source} to {target}", own)

    def trained(self, name: str, start: str) -> ZeroMemPipeline:
        folder = self.options.json.with_suffix("") / f"{name} from {start}".replace(" ", "-")

        def train() -> dict[str, Any]:
            questions = self.questions(name, start)
            last = questions[-1].group
            rest, held_out = ([own for own in questions if (own.group == last) == kept] for kept in (False, True))
            ranking, epochs = fit(STARTS[start], rest, held_out, SETTINGS[start])
            pipeline = ranking.pipeline()
            pipeline.save_pretrained(folder)
            return {"epochs": epochs, "weights": weights_of(pipeline.config), "level": level_of(pipeline)}

        self.once(f"weights {name} from {start}", train)
        return ZeroMemPipeline.from_pretrained(folder).eval()

    def against(self, pipeline: ZeroMemPipeline, name: str, start: str) -> dict[str, Any]:
        rows = {"fixed": self.fixed(name, start)}
        questions = self.questions(name, start)
        groups = dict.fromkeys(own.group for own in questions)
        ordered = [own for group in groups for own in questions if own.group == group]
        rows["learned"] = joined([measured(pipeline, own) for own in ordered])
        return summary(rows)

    def rho(self) -> None:
        """The graph's weight that a trained router gives, by category, and what choosing it could gain."""
        for name in self.sets("locomo", "hotpotqa-train", "musique-train"):
            pipeline = self.trained(name, "by hand")
            self.once(f"rho {name}", partial(self._given, name, pipeline))
        for name in self.sets():
            self.once(f"headroom {name}", partial(self._headroom, name))

    @torch.no_grad()
    def _given(self, name: str, pipeline: ZeroMemPipeline) -> dict[str, list[float]]:
        by: dict[str, list[float]] = {}
        for own in self.questions(name):
            weight = pipeline.views_of(own.batch, own.bank, own.signals).graph_weight[:, 0].tolist()
            for question, value in zip(own.questions, weight, strict=True):
                by.setdefault(question.category or "all", []).append(round(value, 4))
        return by

    def _headroom(self, name: str) -> dict[str, Any]:
        fixed = ZeroMemPipeline(STARTS["by hand"]).eval()
        parts = [headroom(fixed, own) for own in self.questions(name)]
        rows = {kind: joined([part[kind] for part in parts]) for kind in parts[0]} | {
            "fixed": joined([measured(fixed, own) for own in self.questions(name)])
        }
        return {m: {kind: float(np.mean(own[m])) for kind, own in rows.items()} for m in MEASURES}


@torch.no_grad()
def walked(config: ZeroMemConfig, questions: Sequence[Cached]) -> list[Cached]:
    """The same with the graph view of another configuration."""
    pipeline = ZeroMemPipeline(config).eval()

    def graph(own: Cached) -> torch.Tensor:
        view = pipeline.graph(own.batch, own.bank, own.signals)
        return segment_minmax(view.units, own.bank.axes["units"])

    return [dataclasses.replace(own, graph=graph(own)) for own in questions]


def silenced(own: Cached, names: Sequence[str]) -> Cached:
    """The same, as if some signals said nothing."""
    signals = {k: torch.zeros_like(v) if k in names else v for k, v in own.signals.items()}
    return dataclasses.replace(own, signals=signals)


def level_of(pipeline: ZeroMemPipeline) -> dict[str, float]:
    """The bonus that every question gets."""
    router: Any = pipeline.router
    return dict(zip(router.bonus_names, [round(float(w), 4) for w in router.level], strict=True))


def tables(found: Mapping[str, Any]) -> Iterator[str]:
    """All figures but the weights, as Markdown."""
    made, spent = found["made"], sum(found["seconds"].values()) / 60
    commits = Counter(commit[:9] for commit in found["commits"].values())
    by = ", ".join(f"{commit} ({many} parts)" for commit, many in commits.items())
    yield f"Commit {by}; torch {made['versions']['torch']}, {made['threads']} thread, {spent:.0f} minutes."
    yield ""
    starts = [(name, start) for name in SETS for start in STARTS]
    rows = {f"{name}, from {start}": found.get(f"cv {name} from {start}") for name, start in starts}
    yield from _compared("Questions that were left out", rows)
    unseen = {name: found.get(f"cv {name} from equal") for name in SETS}
    pairs = {name: (own, found.get(f"cv {name} from by hand")) for name, own in unseen.items()}
    against = {
        name: {
            m: {**own["against by hand"][m], "fixed": hand[m]["fixed"], "learned": own[m]["learned"]} for m in MEASURES
        }
        for name, (own, hand) in pairs.items()
        if own and hand
    }
    yield from _compared("Weights by hand (fixed), against learned from equal ones without them", against)
    rows = {"all, by default": found.get("cv locomo from by hand")}
    rows |= {variant: found.get(f"cv locomo from by hand: {variant}") for variant in VARIANTS}
    yield from _compared("LoCoMo from the weights by hand, other things learned", rows)
    yield from _compared("Learned and measured on the same questions", {n: found.get(f"ceiling {n}") for n in SETS})
    yield from _compared(
        "Learned on one set, measured on another",
        {f"{part.removeprefix('transfer ')}": own for part, own in found.items() if part.startswith("transfer ")},
    )
    curve = {f"from {s}, {many}": found.get(f"curve locomo from {s}: {many}") for s in STARTS for many in range(1, 9)}
    yield from _compared("LoCoMo, learned from so many conversations", curve)
    for name in SETS:
        whole = found.get(f"cv {name} from equal")
        without = {family: found.get(f"cv {name} without {family}") for family in FAMILIES}
        if whole and any(without.values()):
            yield f"{name}, learned from equal weights without a family of signals (what it costs):"
            yield ""
            yield f"| without | {' | '.join(MEASURES)} |"
            yield "|---|---|---|"
            for family, own in without.items():
                if own:
                    cells = [
                        f"{own[m]['learned']:.3f} ({own[m]['learned'] - whole[m]['learned']:+.3f})" for m in MEASURES
                    ]
                    yield f"| {family} | {' | '.join(cells)} |"
            yield ""


def _compared(title: str, rows: Mapping[str, Any]) -> Iterator[str]:
    """What each start gives, what was learned, and the paired bootstrap; the controls where they were run."""
    there = {name: own for name, own in rows.items() if own}
    if not there:
        return
    controls = [name for name in ("oracle_rho", "jitter") if any(name in own[MEASURES[0]] for own in there.values())]
    yield f"{title}:"
    yield ""
    yield f"| | | fixed | learned | difference [95%] | p |{''.join(f' {name} |' for name in controls)}"
    yield "|---" * (6 + len(controls)) + "|"
    for name, own in there.items():
        for measure in MEASURES:
            m = own[measure]
            interval = f"{m['diff']:+.3f} [{m['low']:+.3f}, {m['high']:+.3f}]"
            more = "".join(f" {m[control]:.3f} |" if control in m else " |" for control in controls)
            yield f"| {name} | {measure} | {m['fixed']:.3f} | {m['learned']:.3f} | {interval} | {m['p']:.4f} |{more}"
            name = ""
    yield ""


def plot(found: Mapping[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    learned = {part.removeprefix("weights "): own for part, own in found.items() if part.startswith("weights ")}
    shown = {"by hand": STARTS["by hand"].hierarchy.weights.to_dict()}
    shown |= {name: own["weights"]["hierarchy"] for name, own in learned.items() if name.endswith("from equal")}
    if learned:
        figure, axes = pyplot.subplots(figsize=(9, 3.4), layout="constrained")
        step = 0.8 / len(shown)
        for k, (label, own) in enumerate(shown.items()):
            axes.bar([i + k * step for i in range(len(NAMES))], [own.get(n, 0.0) for n in NAMES], step, label=label)
        axes.set_xticks([i + 0.3 for i in range(len(NAMES))], NAMES, rotation=60, ha="right", fontsize=7)
        axes.axhline(0.2, color="grey", linewidth=0.5)
        axes.set_ylabel("weight in the hierarchy view")
        axes.legend(fontsize=7)
        figure.savefig(folder / "routing-weights.png", dpi=90)
    given = {part.removeprefix("rho "): own for part, own in found.items() if part.startswith("rho ")}
    if given:
        widths = [len(by) + 1 for by in given.values()]
        figure, places = pyplot.subplots(
            1, len(given), figsize=(9, 2.8), layout="constrained", squeeze=False, width_ratios=widths
        )
        for axes, (label, by) in zip(places[0], given.items(), strict=True):
            kinds = sorted(by)
            axes.boxplot([by[kind] for kind in kinds], tick_labels=kinds, showfliers=False)
            axes.set_title(label, fontsize=8)
            axes.tick_params(labelsize=7)
            axes.set_ylim(0, 1)
        places[0][0].set_ylabel("weight of the graph view")
        figure.savefig(folder / "routing-rho.png", dpi=90)
    curves = {part.removeprefix("curve "): own for part, own in found.items() if part.startswith("curve ")}
    if curves:
        figure, places = pyplot.subplots(1, 2, figsize=(7, 2.8), layout="constrained")
        for axes, measure in zip(places, MEASURES, strict=True):
            for start in STARTS:
                points = {int(k.split(": ")[1]): own[measure] for k, own in curves.items() if f"from {start}:" in k}
                many = sorted(points)
                means = [next(iter(points.values()))["fixed"], *(points[k]["learned"] for k in many)]
                axes.plot([0, *many], means, marker="o", label=f"from {start}")
            axes.set_title(measure, fontsize=8)
            axes.set_xticks(range(len(means)))
            axes.set_xlabel("conversations learned from", fontsize=8)
            axes.tick_params(labelsize=7)
        places[0].legend(fontsize=7)
        figure.savefig(folder / "routing-curve.png", dpi=90)
    pyplot.close("all")


if __name__ == "__main__":
    main()
