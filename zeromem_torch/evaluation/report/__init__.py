"""One HTML page of runs of `zeromem eval qa`: tables, figures, misses and every question, readable without a network.

Texts of a run are hostile until shown otherwise: a memory can hold markup. Those in the page's own HTML are escaped,
those of the questions travel as data and become text nodes, and the page's policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from zeromem_torch.evaluation.report import figures, tables
from zeromem_torch.evaluation.report.drill import packed
from zeromem_torch.evaluation.report.runs import CONVENTION, MAIN, Run, read_runs
from zeromem_torch.evaluation.report.tables import text

__all__ = ["build_report"]

SECTIONS = {
    "quality": "Quality",
    "cost": "Cost",
    "ablations": "Ablations",
    "budget": "Budget",
    "compared": "Differences",
    "misses": "Misses",
    "provenance": "Provenance",
}
MOST_LINES = 6  # of Figure 4; more cannot be told apart


def build_report(runs: Sequence[Path]) -> str:
    """The page, for files that `run_qa`'s callers wrote; the lines of a run are found beside its JSON.

    Runs of one data set and reader over contexts of several lengths share Table 3. Needs matplotlib. Raises
    ZeroMemError where a file is not what it should be.
    """
    page = (files(__package__) / "page.html").read_text(encoding="utf-8")
    script = page.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    known = read_runs(runs)
    body = {name: content for name, content in _sections(known) if content}
    about = ", ".join(dict.fromkeys(str(run.result["dataset"]) for run in known))
    parts = {
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "title": text(f"zeromem_torch: {about}"),
        "nav": "".join(f'<a href="#{name}">{SECTIONS[name]}</a>' for name in body) + '<a href="#questions">Questions</a>',
        "head": _head(known, about),
        "body": "\n".join(_section(name, content) for name, content in body.items()),
        "data": packed(known),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)  # once: what is put in is not read again


def _section(name: str, content: str) -> str:
    return f'<section id="{name}" aria-labelledby="{name}-title">\n<h2 id="{name}-title">{SECTIONS[name]}</h2>\n{content}\n</section>'


def _sections(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    contexts: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.context:
            contexts.setdefault((run.result["dataset"], run.result["reader"]), []).append(run)
    quality = [tables.by_category(run) for run in runs if not run.context and run.result["categories"]]
    quality += [tables.by_context(group) for group in contexts.values()]
    others = "".join(tables.conventions(run) for run in runs)
    note = (
        f"<p class=soft>In percent, under the convention {CONVENTION}. An average is the mean over questions; small figures are "
        "95% intervals of it (bootstrap over questions). The best of a column is bold.</p>"
    )
    yield "quality", f"{note}{''.join(quality)}<details><summary>Every convention</summary>{others}</details>"
    yield "cost", "".join(map(tables.costs, runs)) + _COST
    yield "ablations", _figures("Figure 3", [(run, _ablations(run)) for run in runs])
    yield "budget", _figures("Figure 4", [(run, drawn) for run in runs for drawn in _budget(run)]) + _numbers(runs)
    compared = "".join(tables.comparisons(run) + tables.calibration(run) for run in runs)
    yield "compared", compared
    yield "misses", "".join(tables.misses(run, number) for number, run in enumerate(runs))
    yield "provenance", "".join(map(_provenance, runs))


_COST = (
    "<p class=note>Evidence tokens are the mean of a question, by the encoder's tokenizer; reader tokens are prompt and completion. "
    "Memory seconds are building and searching, before the reader. Answer in evidence at 512 tokens compares systems that hand over "
    "units of different sizes.</p>"
)


def _ablations(run: Run) -> str:
    names = [name for name in (MAIN, *tables.ABLATIONS) if name in run.systems]
    if len(names) < 2:
        return ""
    overall = {name: run.systems[name]["overall"] for name in names}
    values = {
        run.label(name): (float(part["f1"][CONVENTION]), part.get("interval", {}).get("f1")) for name, part in overall.items()
    }
    said = "; ".join(f"{label} {100 * value:.1f}" for label, (value, _) in values.items())
    return figures.bars(values, run.label(MAIN), "F1, with 95% intervals", f"F1 of each ablation: {said}")


def _budget(run: Run) -> Iterator[str]:
    """Answer in evidence by k, of every system; then the answers' F1 and BLEU-1, where zeromem ran with several caps."""
    if found := _found_by_k(run):
        yield figures.lines(found, run.label(MAIN), "answer in evidence, %", f"Answer in evidence by k, {', '.join(found)}")
    if answered := _answers_by_k(run):
        yield figures.lines(answered, "F1", "F1 and BLEU-1, %", "F1 and BLEU-1 of zeromem's answers by k")


def _found_by_k(run: Run) -> dict[str, dict[int, float]]:
    series = {name: system["overall"].get("answer_in_evidence_k") for name, system in run.systems.items()}
    plain = [name for name, values in series.items() if values and name not in tables.ABLATIONS][:MOST_LINES]
    return {run.label(name): dict(enumerate(series[name] or (), start=1)) for name in plain}


def _answers_by_k(run: Run) -> dict[str, dict[int, float]]:
    systems: Mapping[str, Any] = run.result["systems"]
    caps = {int(name.partition("@")[2]): system for name, system in systems.items() if name.startswith(f"{MAIN}@")}
    if not caps:
        return {}
    if MAIN in systems:
        caps.setdefault(run.result["top_k"], systems[MAIN])
    ordered = sorted(caps.items())
    kinds = {"F1": "f1", "BLEU-1": "bleu1"}
    return {label: {k: float(s["overall"][kind][CONVENTION]) for k, s in ordered} for label, kind in kinds.items()}


def _figures(name: str, drawn: Sequence[tuple[Run, str]]) -> str:
    shown = [
        f"<figure>{svg}<figcaption>{name}. {text(run.name)}</figcaption></figure>" for run, svg in drawn if svg
    ]
    return f'<div class="figures">{"".join(shown)}</div>' if shown else ""


def _numbers(runs: Sequence[Run]) -> str:
    """Figure 4 for those who read it as numbers."""
    whole = "".join(
        tables.by_k(run, series) for run in runs for series in (_found_by_k(run), _answers_by_k(run)) if series
    )
    return f"<details><summary>The numbers</summary>{whole}</details>" if whole else ""


def _head(runs: Sequence[Run], about: str) -> str:
    lines = []
    for run in runs:
        said = f"{run.result['questions']:,} questions over {run.result['traces']:,} traces, encoder {run.result['encoder']}"
        lines.append(f"<p><b>{text(run.name)}</b><br><span class=soft>{text(said)}</span></p>")
    return f"<h1>{text(about)}: answers from memory</h1>\n{''.join(lines)}"


def _provenance(run: Run) -> str:
    result = run.result
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    facts: dict[str, Any] = {
        "Command": result.get("command"),
        "Commit": result["commit"],
        "Device": f"{result['device']}, {result['threads']} threads",
        "Versions": versions,
        "Data": f"{result['dataset']} ({result['split']}), SHA-256 {result['sha256']}",
        "Reader": result["reader"],
        "Encoder": result["encoder"],
        "Evidence": f"at most {result['top_k']} items" + _budget_words(result["token_budget"]),
        "Seed": result["seed"],
        "Limit": result.get("limit"),
        "File": run.file + ("" if run.lines else "; its lines were not found, so its questions are not listed"),
    }
    shown = "".join(
        f"<dt>{name}</dt><dd>{_code(value) if name in _CODE else text(value)}</dd>" for name, value in facts.items() if value is not None
    )
    notes = [*result["notes"], *(f"{name} was not run: {why}" for name, why in result.get("unavailable", {}).items())]
    listed = f"<ul class=note>{''.join(f'<li>{text(note)}</li>' for note in notes)}</ul>" if notes else ""
    return f"<h3>{text(run.name)}</h3><dl>{shown}</dl>{listed}{_settings(result['config'])}"


_CODE = ("Command", "Commit")


def _code(value: object) -> str:
    return f"<code>{text(value)}</code>"


def _budget_words(budget: int | None) -> str:
    return f", {budget} tokens" if budget else ""


def _settings(config: Mapping[str, Any]) -> str:
    def flat(part: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in part.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{path}{name}.")
            else:
                yield f"{path}{name}", value

    lines = "".join(f"<dt><code>{text(name)}</code></dt><dd>{text(value)}</dd>" for name, value in flat(config, ""))
    return f"<details><summary>Configuration</summary><dl>{lines}</dl></details>" if lines else ""
