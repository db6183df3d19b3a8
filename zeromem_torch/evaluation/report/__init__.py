"""One HTML page of runs of `zeromem eval qa`: tables, figures, misses and every question, readable without a network.

Texts of a run are hostile until shown otherwise: a memory can hold markup. Those in the page's own HTML are escaped,
those of the questions travel as data and become text nodes, and the page's policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    sections = [_section(name, content) for name, content in body.items()]
    links = [f'<a href="#{name}">{SECTIONS[name]}</a>' for name in body]
    about = ", ".join(dict.fromkeys(str(run.result["dataset"]) for run in known))
    parts = {
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "title": text(f"zeromem_torch: {about}"),
        "nav": "".join(links),
        "head": _head(known, about),
        "body": "\n".join(sections),
        "data": packed(known),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], page)  # once: what is put in is not read again


def _section(name: str, content: str) -> str:
    heading = f'<h2 id="{name}-title">{SECTIONS[name]}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">\n{heading}\n{content}\n</section>'


def _sections(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    contexts: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.context:
            contexts.setdefault((run.result["dataset"], run.result["reader"]), []).append(run)
    quality = [tables.by_category(run) for run in runs if not run.context and run.result["categories"]]
    quality += [tables.by_context(group) for group in contexts.values()]
    others = "".join(tables.conventions(run) for run in runs)
    note = (
        f"<p class=soft>In percent, under the convention {CONVENTION}. An average is the mean over questions; small "
        "figures are 95% intervals of it (bootstrap over questions). The best of a column is bold.</p>"
    )
    yield "quality", f"{note}{''.join(quality)}<details><summary>Every convention</summary>{others}</details>"
    yield "cost", "".join(map(tables.costs, runs)) + _COST
    yield "ablations", _figures(drawn for run in runs for drawn in _ablations(run))
    yield "budget", _figures(drawn for run in runs for drawn in _budget(run)) + _numbers(runs)
    yield "compared", "".join(tables.comparisons(run) + tables.calibration(run) for run in runs)
    yield "misses", "".join(tables.misses(run, number) for number, run in enumerate(runs))
    yield "provenance", "".join(map(_provenance, runs))


_COST = (
    "<p class=note>Evidence tokens are the mean of a question, by the encoder's tokenizer; reader tokens are prompt "
    "and completion. Memory seconds are building and searching, before the reader. Answer in evidence at 512 tokens "
    "compares systems that hand over units of different sizes.</p>"
)


def _ablations(run: Run) -> Iterator[tuple[str, str]]:
    """Figure 3: the drawing and its caption."""
    overall = {name: run.systems[name]["overall"] for name in (MAIN, *tables.ABLATIONS) if name in run.systems}
    scored = {name: part for name, part in overall.items() if part["n"]}
    if len(scored) < 2:
        return
    values = {
        run.short[name]: (float(part["f1"][CONVENTION]), part.get("interval", {}).get("f1"))
        for name, part in scored.items()
    }
    said = "; ".join(f"{label} {100 * value:.1f}" for label, (value, _) in values.items())
    drawn = figures.bars(
        values, run.short.get(MAIN, ""), "F1, with 95% intervals", f"F1 of zeromem and its ablations: {said}"
    )
    yield drawn, f"Figure 3. F1 of zeromem and its ablations. {run.name}"


def _budget(run: Run) -> Iterator[tuple[str, str]]:
    """Figure 4: answer in evidence by k, of every system; the answers, where zeromem ran with several caps."""
    if found := _found_by_k(run):
        about = "Share of answers that stand in the evidence, by k"
        drawn = figures.lines(found, run.short.get(MAIN, ""), "answer in evidence, %", f"{about}: {', '.join(found)}")
        yield drawn, f"Figure 4. {about}. {run.name}"
    if answered := _answers_by_k(run):
        about = "F1 and BLEU-1 of zeromem's answers by k"
        yield figures.lines(answered, "F1", "F1 and BLEU-1, %", about), f"Figure 4. {about}. {run.name}"


def _found_by_k(run: Run) -> dict[str, dict[int, float]]:
    series = {name: system["overall"].get("answer_in_evidence_k") for name, system in run.systems.items()}
    plain = [name for name, values in series.items() if values and name not in tables.ABLATIONS][:MOST_LINES]
    return {run.short[name]: dict(enumerate(series[name] or (), start=1)) for name in plain}


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


def _figures(drawn: Iterable[tuple[str, str]]) -> str:
    shown = [f"<figure>{svg}<figcaption>{text(caption)}</figcaption></figure>" for svg, caption in drawn]
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
        counts = f"{run.result['questions']:,} questions over {run.result['traces']:,} traces"
        said = f"{counts}, encoder {run.result['encoder']}"
        lines.append(f"<li><b>{text(run.name)}</b> <span class=soft>{text(said)}</span></li>")
    return f"<h1>{text(about)}: answers from memory</h1>\n<ul class=plain>{''.join(lines)}</ul>"


def _provenance(run: Run) -> str:
    result = run.result
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    facts: dict[str, Any] = {
        "Command": result.get("command"),
        "Commit": result["commit"],
        "Device": f"{result['device']}, {result['threads']} threads",
        "Versions": versions,
        "Data": f"{result['dataset']} ({result['split']})",
        "Data SHA-256": result["sha256"],
        "Reader": result["reader"],
        "Encoder": result["encoder"],
        "Items": f"at most {result['top_k']}",
        "Token budget": result["token_budget"],
        "Seed": result["seed"],
        "Limit": result.get("limit"),
        "File": run.file + ("" if run.lines else "; its lines were not found, so its questions are not listed"),
    }
    known = {name: value for name, value in facts.items() if value is not None}
    cells = {name: f"<code>{text(value)}</code>" if name in _CODE else text(value) for name, value in known.items()}
    shown = "".join(f"<dt>{name}</dt><dd>{cell}</dd>" for name, cell in cells.items())
    notes = [*result["notes"], *(f"{name} was not run: {why}" for name, why in result.get("unavailable", {}).items())]
    listed = f"<ul class=note>{''.join(f'<li>{text(note)}</li>' for note in notes)}</ul>" if notes else ""
    return f"<h3>{text(run.name)}</h3><dl>{shown}</dl>{listed}{_settings(result['config'])}"


_CODE = ("Command", "Commit", "Data SHA-256")


def _settings(config: Mapping[str, Any]) -> str:
    def flat(part: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in part.items():
            if isinstance(value, Mapping):
                yield from flat(value, f"{path}{name}.")
            else:
                yield f"{path}{name}", value

    lines = "".join(f"<dt><code>{text(name)}</code></dt><dd>{text(value)}</dd>" for name, value in flat(config, ""))
    return f"<details><summary>Configuration</summary><dl>{lines}</dl></details>" if lines else ""
