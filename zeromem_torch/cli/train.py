"""`zeromem train`: weights of routing and ranking, learned from questions whose evidence is known."""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeromem_torch.cli.options import (
    cached_encoder,
    check_writable,
    command_line,
    config_of,
    dataset_arguments,
    describe,
    encoding_options,
    positive,
    say,
    use_threads_and_device,
)
from zeromem_torch.config import ZeroMemConfig

ABOUT = """\
Learns what retrieval weighs from questions whose evidence is known: first the mixing weights that all questions share,
then, for each question, how much the graph view counts and which signals help (the router). It starts at the rules and
weights of the configuration, and is held near them.

Signals of all questions are computed once; then an epoch over a thousand of them takes seconds. Training stops when
the loss on a conversation that is held out stops falling.

  --cross-validate  leaves out one conversation after the other (of a single pool, a fifth of its questions), learns on
                    the rest, and measures on what was left out: recall@5 of M(q), recall at 512 tokens of R(q), beside
                    the weights of the configuration, the best weight of the graph view for each question (oracle_rho,
                    which no router can beat), and the best of as many random disturbances of the same size (jitter)
  --out             learns on all conversations but the last, which stops it, and writes a folder that
                    `zeromem eval retrieval --router FOLDER` and `ZeroMem.use(FOLDER)` take; run again, it goes on
                    where it was stopped\
"""


def train_command(parser: argparse.ArgumentParser) -> None:
    parser.description = "Learns the weights of routing and ranking."
    kinds = parser.add_subparsers(required=True, metavar="WHAT", title="commands")
    own: Any = {"fill": _router_command}  # our Parser's, which argparse's own types do not know
    kinds.add_parser("router", help="mixing weights, and what the router gives each query", **own)


def _router_command(parser: argparse.ArgumentParser) -> None:
    from zeromem_torch.training.losses import LOSSES

    describe(
        parser,
        _train_router,
        ABOUT,
        "zeromem train router locomo --data locomo10.json --cross-validate --json out.json",
        "zeromem train router locomo --data locomo10.json --out checkpoint",
        "zeromem eval retrieval locomo --data other.json --systems zeromem,context --router checkpoint",
    )
    dataset_arguments(parser)
    parser.add_argument("--cross-validate", action="store_true", help="measure on what each fold leaves out")
    parser.add_argument("--out", type=Path, metavar="CHECKPOINT", help="folder for what is learned on all questions")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all figures there")
    parser.add_argument("--settings", type=Path, metavar="TOML", help="what differs from the default training settings")
    parser.add_argument(
        "--loss", choices=list(LOSSES), help="what is made small (default: recall@5, and for R(q) recall@10)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of the order of training (default: 0)")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N questions")
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="log of each fold (TensorBoard's too, if installed)")
    encoding_options(parser)


def _train_router(options: argparse.Namespace) -> int:
    from zeromem_torch.evaluation.datasets import load_dataset
    from zeromem_torch.evaluation.run import provenance
    from zeromem_torch.library import ZeroMem
    from zeromem_torch.training.cache import cached
    from zeromem_torch.training.fit import fit
    from zeromem_torch.training.settings import TrainingSettings
    from zeromem_torch.training.validation import cross_validate, weights_of

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
        last = questions[-1].group
        train = [own for own in questions if own.group != last]
        held_out = [own for own in questions if own.group == last]
        ranking, epochs = fit(config, train, held_out, settings, options.out)
        pipeline = ranking.pipeline()
        pipeline.save_pretrained(options.out)
        result["trained"] = {"epochs": epochs, "weights": weights_of(pipeline.config)}
        say(f"wrote {options.out}; measure it with `zeromem eval retrieval ... --router {options.out}`")
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
