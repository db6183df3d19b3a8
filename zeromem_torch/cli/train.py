"""`zeromem train` and `zeromem use`: weights learned from questions whose evidence is known, and searched by."""

from __future__ import annotations

import argparse
import dataclasses
import json
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeromem_torch.cli import show
from zeromem_torch.cli.options import (
    cached_encoder,
    check_writable,
    command_line,
    config_of,
    dataset_arguments,
    describe,
    encoding_options,
    memory_options,
    opened,
    positive,
    say,
    use_threads_and_device,
)
from zeromem_torch.config import ZeroMemConfig
from zeromem_torch.errors import ZeroMemError

if TYPE_CHECKING:
    from zeromem_torch.evaluation.datasets import Dataset
    from zeromem_torch.training.cache import Cached
    from zeromem_torch.training.settings import TrainingSettings

ABOUT = """\
Learns what retrieval weighs from questions whose evidence is known: first the mixing weights that all questions share,
then, for each question, how much the graph view counts and which signals help (the router). It starts at the rules and
weights of the configuration, and is held near them.

Signals of all questions are computed once; then an epoch over a thousand of them takes seconds. Training stops when
the loss on a conversation that is held out stops falling.

  --cross-validate  leaves out one conversation after the other, learns on the rest, and measures on what was left out:
                    recall@5 of M(q), recall at 512 tokens of R(q). Beside what was learned stand
                    fixed       the weights of the configuration
                    oracle_rho  those, with the best of seven weights of the graph view for each question (it looks at
                                the evidence; learned weights change more than this one, and may beat it)
                    jitter      the best of seven random disturbances of the same size for each question
                    It needs 3 conversations (boundaries); a single one is split into fifths of its questions.
  --out             learns on all conversations but the last, which stops the training, and writes a folder that
                    `zeromem use FOLDER`, `zeromem eval retrieval --router FOLDER` and, in Python,
                    `memory.use("FOLDER")` take. Run again, it goes on where it was stopped

data of your own is a JSONL file (`zeromem train router jsonl --data mine.jsonl`), a trace or a question a line:

  {"id": "a/1", "boundary": "alice", "speaker": "Alice", "text": "I sold the car."}
  {"id": "q1", "boundary": "alice", "question": "What did Alice sell?", "evidence": ["a/1"]}

  A question needs question, boundary and evidence: ids of traces of its boundary. id, answers, category and time may be
  there. On data of one's own it gained most from weights that are all equal:

  --config configs/equal.toml --settings configs/training/from-equal.toml

keys of --settings, a TOML file of what differs from the defaults:

  [[stages]]            one after the other, each a table of
    learn               names of what is learned together: {learnable}
    epochs, patience    most epochs (40), and epochs without a better loss on what is held out (8)
    rate, pull          of Adam (0.01), and how strongly it is held where the stage began (20; 0: not at all)
  loss, handed_loss     what is made small for M(q) and for R(q): {losses}
  features              what the router knows of a query
  bonus, mixes          signals whose weight the router may shift for a query: in the sum, and inside both views
  walk                  true: the router gives each query its gamma and hop decay too (learn = ["walk"])
  refit                 true: once the epochs are known, train again with what was held out
  router, gate, seed    the router's name, first temperature of soft pruning, order of training

  Gamma is learned for all questions together with  learn = ["damping", "decay"]\
"""


def train_command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Learns the weights of routing and ranking."
    kinds = parser.add_subparsers(required=True, metavar="WHAT", title="commands")
    own: Any = {"fill": _router_command}  # our Parser's, which argparse's own types do not know
    kinds.add_parser("router", help="mixing weights, and what the router gives each query", **own)


def _router_command(parser: argparse.ArgumentParser) -> None:
    from zeromem_torch.training.losses import LOSSES
    from zeromem_torch.training.ranking import LEARNABLE

    learnable = textwrap.fill(", ".join(LEARNABLE), 70).replace("\n", "\n" + 24 * " ")
    describe(
        parser,
        _train_router,
        ABOUT.replace("{learnable}", learnable).replace("{losses}", ", ".join(LOSSES)),
        "zeromem train router locomo --data locomo10.json --cross-validate --json out.json",
        "zeromem train router locomo --data locomo10.json --out checkpoint",
        "zeromem train router jsonl --data mine.jsonl --config configs/equal.toml "
        "--settings configs/training/from-equal.toml --out checkpoint",
        "zeromem eval retrieval locomo --data other.json --systems zeromem,context --router checkpoint",
        "zeromem use checkpoint",
    )
    dataset_arguments(parser)
    parser.add_argument("--cross-validate", action="store_true", help="measure on what each fold leaves out")
    parser.add_argument("--out", type=Path, metavar="CHECKPOINT", help="folder for what is learned on all but the last")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    parser.add_argument("--settings", type=Path, metavar="TOML", help="what differs from the default training settings")
    parser.add_argument(
        "--loss",
        choices=list(LOSSES),
        help="what is made small, for M(q) and R(q) both (default: recall@5 for M(q), recall@512tok for R(q))",
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the order of training (default: 0)")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions")
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="log of each fold (TensorBoard's too, if installed)")
    encoding_options(parser)


def _train_router(options: argparse.Namespace) -> int:
    from zeromem_torch.evaluation.datasets import load_dataset
    from zeromem_torch.evaluation.run import provenance
    from zeromem_torch.library import ZeroMem
    from zeromem_torch.training.cache import cached, grouped, usable
    from zeromem_torch.training.settings import TrainingSettings
    from zeromem_torch.training.validation import check_folds, cross_validate

    if not options.cross_validate and not options.out:
        options.fail("nothing to do: name --cross-validate, --out CHECKPOINT, or both")
    use_threads_and_device(options)
    settings = TrainingSettings.from_toml(options.settings) if options.settings else TrainingSettings()
    given = {name: getattr(options, name) for name in ("loss", "seed") if getattr(options, name) is not None}
    given |= {"handed_loss": given["loss"]} if "loss" in given else {}
    settings = dataclasses.replace(settings, **given)
    config = config_of(options) or ZeroMemConfig()
    if options.json:
        check_writable(options.json)
    data = load_dataset(options.dataset, options.data, options.corpus, limit=options.limit)
    groups = grouped(usable(data), settings.seed)
    if options.cross_validate:
        check_folds(len(groups))
    for option in ("out", "log"):
        _check_folder(option, getattr(options, option))
    memory = ZeroMem(config, encoder=cached_encoder(options, config), device=options.device)
    memory.add(data.traces)
    began = time.perf_counter()
    questions = cached(memory, data, seed=settings.seed)
    result: dict[str, Any] = {}
    if options.cross_validate:
        say("fold: recall@5 and recall@512tok, fixed -> learned, of what was left out")
        result = cross_validate(config, questions, settings, folder=options.log, told=_tell)
        result.pop("rows")
        for measure in ("recall@5", "recall@512tok"):
            print(line_of(measure, result[measure]))
    if options.out:
        result["trained"] = _trained(options.out, config, questions, settings, data)
    if options.json:
        about = {
            "dataset": data.name,
            "split": data.split,
            "command": command_line(),
            "sha256": data.sha256,
            "questions": sum(len(own.questions) for own in questions),
            "encoder": memory.encoder.fingerprint,
            "settings": settings.to_dict(),
            "seconds": round(time.perf_counter() - began, 1),
            **provenance(),
        }
        options.json.write_text(json.dumps({**result, **about}, indent=1) + "\n", encoding="utf-8")
    return 0


def _trained(
    folder: Path, config: ZeroMemConfig, questions: Sequence[Cached], settings: TrainingSettings, data: Dataset
) -> dict[str, Any]:
    """Learn on all groups but the last, write the folder, and tell what was gained."""
    from zeromem_torch.pipeline import ZeroMemPipeline
    from zeromem_torch.training.about import write_about
    from zeromem_torch.training.fit import fit
    from zeromem_torch.training.validation import MEASURES, means_of, weights_of

    last = questions[-1].group
    train = [own for own in questions if own.group != last]
    held_out = [own for own in questions if own.group == last]
    ranking, epochs = fit(config, train, held_out, settings, folder, told=lambda line: say(f"{folder}: {line}"))
    pipeline = ranking.pipeline()
    pipeline.save_pretrained(folder)
    learned_from = train + held_out if settings.refit else train
    counts = [sum(len(own.questions) for own in part) for part in (learned_from, held_out)]
    # what `zeromem eval` warns by, where it is given the same questions again
    about = {"dataset": data.name, "split": data.split, "sha256": data.sha256, "questions": counts[0]}
    write_about(folder, {**about, "held_out": last, "epochs": epochs, "settings": settings.to_dict()})
    device = questions[0].bank.device
    fixed = means_of(ZeroMemPipeline(config).to(device).eval(), held_out)
    learned = means_of(pipeline.to(device), held_out)
    say(f"learned from {counts[0]} questions; epochs of each stage: {', '.join(map(str, epochs))}")
    if not any(epochs):
        say("no epoch was better than none on what is held out: these are the weights of the configuration")
    shown = ", ".join(f"{name} {fixed[name]:.3f} -> {learned[name]:.3f}" for name in MEASURES)
    why = "which it learned from too" if settings.refit else "which stopped the training"
    say(f"fixed -> learned, on {last} ({counts[1]} questions), {why}: {shown}")
    say(f"wrote {folder}; search by it with `zeromem use {folder}`, measure it with")
    say(f"  zeromem eval retrieval ... --router {folder}")
    own = {"group": last, "questions": counts[1], "fixed": fixed, "learned": learned}
    return {"epochs": epochs, "held_out": own, "weights": weights_of(pipeline.config)}


def _check_folder(option: str, path: Path | None) -> None:
    """What cannot be written should not cost a run."""
    try:
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expected = "a folder that can be written to"
        raise ZeroMemError.of(option, expected, str(path), f"name another ({error})") from error


def use_command(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        _use,
        "Has a memory search by the weights that `zeromem train router --out CHECKPOINT` learned. The memory keeps a "
        "copy of them and uses it from then on, in every command, server and program that opens it without a "
        "configuration of its own. Nothing that is stored changes. `zeromem stats` shows what is in use.",
        "zeromem use checkpoint",
        "zeromem use checkpoint --memory ~/memories/work --json",
        "zeromem use --default",
    )
    parser.add_argument("checkpoint", type=Path, nargs="?", metavar="CHECKPOINT", help="folder of what was learned")
    parser.add_argument(
        "--default", action="store_true", help="back to the rule and the weights of the memory's configuration"
    )
    memory_options(parser)


def _use(options: argparse.Namespace) -> int:
    if bool(options.checkpoint) == options.default:
        options.fail("name a CHECKPOINT, or --default, and not both")
    with opened(options) as memory:
        memory.use(options.checkpoint)
        now = {name: memory.stats()[name] for name in ("router", "checkpoint")}
    if options.json:
        show.as_json(now)
    elif options.default:
        show.lines("searches by the rule and its configuration from now on")
    else:
        show.lines(f"searches by what {options.checkpoint} learned from now on (router: {now['router']})")
    return 0


def line_of(measure: str, found: Mapping[str, float]) -> str:
    """One measure for a terminal."""
    means = ", ".join(f"{name} {found[name]:.3f}" for name in ("fixed", "learned", "oracle_rho", "jitter"))
    return (
        f"{measure}: {means}; learned - fixed {found['diff']:+.4f} "
        f"[{found['low']:+.4f}, {found['high']:+.4f}] (p {found['p']:.4f})"
    )


def _tell(fold: Mapping[str, Any]) -> None:
    fixed, learned = fold["fixed"], fold["learned"]
    shown = ", ".join(f"{fixed[name]:.3f} -> {learned[name]:.3f}" for name in fixed)
    say(f"{fold['left_out']} ({fold['questions']} questions): {shown}; epochs {fold['epochs']}, {fold['seconds']} s")
