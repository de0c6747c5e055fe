"""What finished runs say: the figures, results/<scale>.json, and the report, results/<scale>/README.md.

Read next: reproduce.py.
"""

import math
from pathlib import Path

from common.files import read_record, write_record, write_text
from common.ranks import environment
from common.report import markdown
from paper.claims import HEADER, claim_cells, claim_rows, tally
from paper.figures import FIGURES
from paper.runs import units_in_words

RESULTS = "results of paper.reproduce"


def publish(name, figure, cfg, found):
    """Draw a figure or print a table, and write its numbers into results/<scale>.json."""
    print(f"{name}: {figure.caption}")
    record = {"caption": figure.caption, "environment": environment()}  # before it changes files of the repository
    record |= about_runs(figure, found)
    if figure.table:
        record["table"] = list(figure.table(found))
        print(markdown(record["table"][0], record["table"][1:]))
    record["rows"] = claim_rows(figure, found)
    if record["rows"]:
        print(markdown(HEADER, map(claim_cells, record["rows"]), left=3), flush=True)
    if figure.panels:  # last, so that an error leaves the old picture beside the old numbers
        figure.page(Path(cfg.results_dir, cfg.scale, f"{name}.png"), figure, found)
        record["png"] = f"{cfg.scale}/{name}.png"
    path = Path(cfg.results_dir, f"{cfg.scale}.json")
    figures = read_record(path, RESULTS)["figures"] if path.exists() else {}
    figures[name] = record
    figures = {key: figures[key] for key in FIGURES if key in figures}
    about = {"scale": cfg.units.what, "units": units_in_words(cfg.units)}
    write_record(path, RESULTS, about | {"figures": figures})


def about_runs(figure, found):
    """What we note of a figure's runs: losses, commits, how many are timed, and their hours."""
    losses, made = {}, {}
    for job in figure.jobs:
        for seed in found.seeds(job):
            name = found.name(job, seed)  # some Jobs are one run
            losses[name], made[name] = found.loss(job, seed), found.record(job, seed)
    commits = sorted({run["commit"] or "unknown" for run in made.values()})
    seconds = [run["seconds"] for run in made.values() if run["seconds"] is not None]
    return {"runs": losses, "commits": commits, "timed": len(seconds), "hours": round(math.fsum(seconds) / 3600, 2)}


# -- results/<scale>/README.md


def section(name, record):
    """A figure or table of the report, as Markdown."""
    kind = "Figure" if name.startswith("fig") else "Table"
    title = FIGURES[name].title or f"{kind} {name[3:]}"
    parts = [f"## {title}", record["caption"]]
    if "png" in record:
        parts.append(f"![{title}]({Path(record['png']).name})")
    if "table" in record:
        parts.append(markdown(record["table"][0], record["table"][1:]))
    if record["rows"]:
        parts.append(markdown(HEADER, map(claim_cells, record["rows"]), left=3))
    return "\n\n".join([*parts, f"<sub>{how_made(record)}</sub>"])


def how_made(record):
    """Sentences on the runs of a figure and the commits that made them and it."""
    text, drawn = "", record["environment"]
    if record["runs"]:
        text += f"{len(record['runs'])} runs, by commit {', '.join(commit[:10] for commit in record['commits'])}. "
    if record["timed"]:
        text += f"{record['timed']} of them are timed: {record['hours']:.1f} hours of training. "
    has_changes = any(" results/" not in line for line in (drawn["changed_files"] or "").splitlines())
    commit = (drawn["commit"] or "unknown")[:10] + (" with changes" if has_changes else "")
    return f"{text}Drawn by commit {commit}, on {drawn['machine']}."


def report_text(results, scale):
    """The text of results/<scale>/README.md, from what results/<scale>.json holds."""
    figures = {name: record for name, record in results["figures"].items() if name in FIGURES}
    parts = [
        f"# The paper's figures and tables at scale `{scale}`",
        f"Written by `python -m paper.reproduce report --scale={scale}` from [{scale}.json](../{scale}.json).",
        f"This scale: {results['scale']}. {results['units']} Losses are in nats per token.",
        f"{tally(figures)} ± is half of the mean's 95 % interval over seeds, which differ in initial weights and "
        "batches. It leaves out the error from the choice of validation text, which is the same for all. A claim is "
        "confirmed if the whole interval goes the paper's way, contradicted if none of it does, else undetermined; so "
        "too if a seed's value is undefined, or all are equal. Verdicts are on the sign or the bound, not on the "
        "paper's number. They are not corrected for how many they are, and many share runs. * marks a run on another "
        "processor than vanilla's.",
    ]
    parts += [section(name, record) for name, record in figures.items()]
    return "\n\n".join(parts) + "\n"


def write_report(cfg):
    """Write results/<scale>/README.md."""
    path = Path(cfg.results_dir, cfg.scale, "README.md")
    results = read_record(Path(cfg.results_dir, f"{cfg.scale}.json"), RESULTS)
    write_text(path, report_text(results, cfg.scale))
    print(f"wrote {path}: {len(results['figures'])} figures and tables")
