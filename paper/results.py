"""What finished runs say: the figures, results/<scale>.json, and the report, results/<scale>/README.md.

Read next: reproduce.py.
"""

import re
from pathlib import Path

from common.files import read_record, write_record, write_text
from common.ranks import environment
from common.report import markdown
from paper.claims import HEADER, claim_cells, claim_rows
from paper.figures import FIGURES
from paper.panels import page_of_panels

RESULTS = "results of paper.reproduce"


def publish(name, figure, cfg, found):
    """Draw a figure or print a table, write its numbers into results/<scale>.json, and the report anew."""
    print(f"{name}: {figure.caption}")
    record = {"caption": figure.caption, "environment": environment()}  # before it changes files of the repository
    record["runs"] = {found.name(job, s): found.loss(job, s) for job in figure.jobs for s in found.seeds(job)}
    if figure.table:
        record["table"] = list(figure.table(found))
        print(markdown(record["table"][0], record["table"][1:]))
    record["rows"] = claim_rows(figure, found)
    if record["rows"]:
        print(markdown(HEADER, map(claim_cells, record["rows"]), left=3), flush=True)
    if figure.panels:  # last, so that an error leaves the old picture beside the old numbers
        page_of_panels(Path(cfg.results_dir, cfg.scale, f"{name}.png"), figure, found)
        record["png"] = f"{cfg.scale}/{name}.png"
    # other figures of this scale keep their records, in the order of figures.py
    path = Path(cfg.results_dir, f"{cfg.scale}.json")
    figures = read_record(path, RESULTS)["figures"] if path.exists() else {}
    figures[name] = record
    figures = {key: figures[key] for key in FIGURES if key in figures}
    results = {"scale": cfg.units.what, "figures": figures}
    write_record(path, RESULTS, results)
    write_text(Path(cfg.results_dir, cfg.scale, "README.md"), report_text(results, cfg.scale))


# -- results/<scale>/README.md

ABOUT = """Losses are in nats per token. "82M" and the like are the paper's sizes; Tables 3 and 4 say what they are.
A claim's runs are the base, if it says nothing else: "82M", the paper's length 2,048, the best rate. "a − b" is a's
validation loss minus b's. ± is half of a 95 % interval (Student's t) over n seeds, which differ in weights and batches.
"here" judges the sign or bound that the paper claims of its own sizes: **confirmed** if the whole interval is on its
side, **contradicted** if all of it is on the other, else **undetermined**; one seed only **agrees** or **differs**.
Nothing is corrected for the number of verdicts. * marks another processor than vanilla's."""


def compact(table):
    """A Markdown table without the spaces around its pipes."""
    return re.sub(r" *\| *", "|", table)


def section(name, record):
    """A figure or table of the report, as Markdown."""
    title = f"{'Table' if name.startswith('tab') else 'Figure'} {name.removeprefix('fig').removeprefix('tab')}"
    parts = [f"## {title}", record["caption"]]
    if "png" in record:
        parts.append(f"![{title}]({Path(record['png']).name})")
    if "table" in record:
        parts.append(compact(markdown(record["table"][0], record["table"][1:])))
    if record["rows"]:
        parts.append(compact(markdown(HEADER, map(claim_cells, record["rows"]), left=3)))
    # the JSON file beside has the runs' losses and the machine
    made = f"{len(record['runs'])} runs; drawn" if record["runs"] else "Drawn"
    return "\n\n".join([*parts, f"<sub>{made} by {(record['environment']['commit'] or 'unknown')[:10]}</sub>"])


def report_text(results, scale):
    """The text of results/<scale>/README.md, from what results/<scale>.json holds."""
    parts = [
        f"# The paper's figures and tables at scale `{scale}`",
        f"Written by `python -m paper.reproduce` with [{scale}.json](../{scale}.json): {results['scale']}. {ABOUT}",
    ]
    parts += [section(name, record) for name, record in results["figures"].items()]
    return "\n\n".join(parts) + "\n"
