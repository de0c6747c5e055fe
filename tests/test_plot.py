"""plot.py on made-up runs, whose pictures and table can be worked out by hand."""

import matplotlib
import numpy as np
import pytest
from conftest import ROOT, in_process, refused, script
from matplotlib.figure import Figure

import plot
from common.files import record_line, write_record
from common.report import markdown
from configurator import UserError, load_settings
from value_modes import TABLE


def make_run(folder, mode, seed, losses, val=None, batch=512, parameters=1000, rate=100.0, lr=1e-3, **changed):
    """A run's metrics.jsonl; val: {step: validation loss}, by default one at the end; returns the folder's name."""
    n, kv = len(losses), 2048 if mode == "svformer" else 4096
    start = {"event": "start", "step": 0, "value_mode": mode, "seed": seed, "parameters": parameters, "bos": False}
    start |= {"kv_bytes_per_token": kv, "data": "d", "block_size": 64, "max_steps": n, "learning_rate": lr}
    start |= {"val_hash": "v", "eval_tokens": 64} | changed
    records = [{name: value for name, value in start.items() if value is not None}]
    for i, loss in enumerate(losses, 1):
        records.append({"step": i, "loss": float(loss), "lr": lr, "tokens": i * batch})
        records[-1]["tokens_per_s"] = rate if i > 1 else 1.0  # the first step is slow
    for step, mean in ({n: losses[-1]} if val is None else val).items():
        records.append({"event": "eval", "step": step, "val": {"a": float(mean)}, "val_mean": float(mean)})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(record_line("train.py's metrics", r) for r in records))
    return str(folder)


def drawn(monkeypatch, *words):
    """{label: (x, y)} of the lines that `plot.py compare` draws."""
    seen, draw_line = [], plot.draw_line
    monkeypatch.setattr(plot, "draw_line", lambda ax, *given: (seen.append(given), draw_line(ax, *given)))
    plot.main(load_settings(plot.PlotConfig, ["compare", *map(str, words)]))
    return {label: (x, y) for x, y, label, _ in seen}


def test_headline_modes_have_colours_of_their_own_and_lines_of_one_colour_differ_in_dash():
    styles = plot.styles_of({mode: mode for mode in TABLE})
    assert len({styles[mode]["color"] for mode in plot.HEADLINE}) == 7
    assert [mode for mode in TABLE if styles[mode]["color"] == "#000000"] == ["vanilla"]
    nine = list(TABLE)[:9]
    assert len({str(plot.styles_of({mode: mode for mode in nine})[mode]["color"]) for mode in nine}) == 7
    two = plot.styles_of({"a": "neutreno", "b": "neutreno"})
    assert two["a"]["color"] == two["b"]["color"] and two["a"]["linestyle"] != two["b"]["linestyle"]


def test_short_counts():
    counts = [plot.short_count(n) for n in (738_368, 999_999, 2_951_296, 2e10, 512)]
    assert counts == ["738k", "1M", "2.95M", "20B", "512"] and plot.count_range([7000, 512]) == "512–7k"


def test_same_bytes_whatever_the_users_matplotlibrc_says(tmp_path, monkeypatch):
    runs = [make_run(tmp_path / mode, mode, 1, np.arange(40.0)[::-1]) for mode in ("vanilla", "resformer")]
    in_process(plot, "compare", *runs, f"--out_file={tmp_path}/a.png")
    for name, value in {"figure.facecolor": "red", "savefig.dpi": 20, "font.size": 20}.items():
        monkeypatch.setitem(matplotlib.rcParams, name, value)
    in_process(plot, "compare", *runs, f"--out_file={tmp_path}/b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_growing_means():
    """Windows of 3000 steps: the first ones hold one step, the last ends with the run."""
    x = np.arange(1.0, 3001)
    middle, y = plot.growing_means(x, np.stack([2 * x, 3 * x]))
    np.testing.assert_allclose(y, [2 * middle, 3 * middle])
    assert middle[:5].tolist() == [1, 2, 3, 4, 5]
    ends = [3000 / 1.15**k for k in range(20)]
    np.testing.assert_allclose(middle[::-1][:20], [x[(x > end / 1.15) & (x <= end)].mean() for end in ends])


def test_a_line_is_the_mean_of_its_seeds_in_a_band_of_one_deviation():
    ax, y = Figure().subplots(), np.array([[1.0, 2.0], [3.0, 8.0], [5.0, 2.0]])
    plot.draw_line(ax, np.array([1, 2]), y, "a", plot.style_of("resformer"))
    assert ax.lines[0].get_ydata().tolist() == [3, 4] and ax.lines[0].get_label() == "a, 3 seeds ± std"
    corners = ax.collections[0].get_paths()[0].vertices
    np.testing.assert_allclose(np.ptp(corners[corners[:, 0] == 2][:, 1]), 2 * 12**0.5)  # n - 1: sqrt(24 / 2)


@pytest.mark.parametrize("first, is_inside", [(1e3, False), (3.5, True)])
def test_the_first_losses_leave_the_axis_only_where_they_would_squash_the_rest(first, is_inside):
    ax, x = Figure().subplots(), np.arange(1.0, 101)
    plot.draw_line(ax, x, np.where(x < 5, first, 1.0)[None], "a", plot.style_of("resformer"))
    plot.token_axis(ax)
    low, high = ax.get_ylim()
    assert low < 0 and high > 1 and (high > first) == is_inside and ax.get_xlim() == (2.5, 100)


def test_layers_without_a_quantity_are_left_out():
    ax = Figure().subplots()
    rows = {"a": [[None, 1.0, 2.0], [None, 3.0, 5.0]], "b": [[1.0, 2.0, 4.0]]}
    plot.layer_panel(ax, rows, plot.styles_of({"a": "vanilla", "b": "resformer"}), "height", 1, (2.5, "uniform"))
    found = {line.get_label(): line.get_xydata().T.tolist() for line in ax.lines}
    assert found["a, 2 seeds ± std"] == [[2, 3], [2, 3.5]] and found["b, 1 seed"] == [[1, 2, 3], [1, 2, 4]]
    assert found["uniform"][1] == [2.5, 2.5]


def test_relative_loss_is_paired_by_seed(tmp_path, monkeypatch):
    """The seeds' own levels, 0 and 5, cancel only if each run meets the baseline of its seed, whatever the order."""
    losses = {("resformer", 2): [6, 8, 7, 5], ("vanilla", 1): [4, 3, 2, 1]}
    losses |= {("resformer", 1): [3, 2, 2, 0], ("vanilla", 2): [9, 8, 7, 6]}
    runs = [make_run(tmp_path / f"{mode}{seed}", mode, seed, y) for (mode, seed), y in losses.items()]
    x, y = drawn(monkeypatch, *runs, f"--out_file={tmp_path}/deep/r.png")["resformer"]
    assert x.tolist() == [512, 1024, 1536, 2048] and (tmp_path / "deep" / "r.png").exists()  # tokens
    np.testing.assert_allclose(y, [[-3, 0, 0, -1], [-1, -1, 0, -1]])  # seed 2, seed 1


def table(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[0] == "|"]


def test_the_table_has_losses_of_finished_runs_and_the_gap_by_seed(tmp_path):
    five = np.full(20, 5.0)
    runs = [make_run(tmp_path / f"v{s}", "vanilla", s, five, {20: 4.0 + s}) for s in (1, 2)]
    runs += [make_run(tmp_path / f"r{s}", "resformer", s, five, {20: 4.0 + 0.5 * s}) for s in (1, 2)]
    runs.append(make_run(tmp_path / "s", "svformer", 1, five[:12], {12: 1.0}, parameters=900, rate=2500, max_steps=20))
    head, _, *rows = table(in_process(plot, "compare", *runs).stdout)
    assert head == ["mode", "parameters", "val loss", "vs vanilla", "tokens/s", "KV bytes/token", "runs"]
    assert rows[0] == ["vanilla", "1,000", "5.5000 ± 0.7071", "-", "100", "4,096", "2"]
    assert rows[1] == ["resformer", "1,000", "4.7500 ± 0.3536", "-0.7500 ± 0.3536", "100", "4,096", "2"]
    assert rows[2] == ["svformer", "900", "-", "-", "2,500", "2,048", "0"]  # 1.0 at step 12 is no result


@pytest.mark.parametrize("says, mode, seed, changed", [
    ("for each of them vanilla's with its seed", "resformer", 2, {}),
    ("new had length 64, 9 steps of 64 tokens .*base had length 64, 9 steps of 512", "svformer", 1, {"batch": 64}),
    ("new had length 64, end-of-text first, 9 steps", "svformer", 1, {"bos": True}),
    ("new had length 64, 9 steps of 512 tokens of data e", "svformer", 1, {"data": "e"}),
    ("new are both vanilla, but do not differ in the seed alone", "vanilla", 1, {}),
    ("new are both vanilla, but do not differ in the seed alone", "vanilla", 3, {"lr": 2e-3, "learning_rate": None}),
    ("new are both vanilla, but do not differ in the seed alone", "vanilla", 3, {"definition": "another"}),
    ("new and .*base were validated on different tokens; compare them by", "svformer", 1, {"val_hash": "w"}),
    ("new and .*base were validated on different tokens; compare them by", "svformer", 1, {"eval_tokens": 0}),
    ("new are both vanilla, but do not differ in the seed alone", "vanilla", 3, {"parameters": 7}),
    ("name runs of vanilla and of other modes", "vanilla", 2, {}),
])  # fmt: skip
def test_runs_that_cannot_be_compared(tmp_path, says, mode, seed, changed):
    folders = [make_run(tmp_path / "base", "vanilla", 1, np.ones(9))]
    folders.append(make_run(tmp_path / "new", mode, seed, np.ones(9), **changed))
    with pytest.raises(UserError, match=says):
        plot.pair(plot.by_mode([plot.read_run(folder) for folder in folders]))


def test_the_last_start_of_a_resumed_run_counts(tmp_path):
    """It was set to 10 steps, then to 12."""
    make_run(tmp_path / "r", "vanilla", 1, np.ones(12), {10: 2.0, 12: 1.5}, max_steps=10)
    make_run(tmp_path / "again", "vanilla", 1, [], {}, max_steps=12)
    with open(tmp_path / "r" / "metrics.jsonl", "a") as f:
        f.write((tmp_path / "again" / "metrics.jsonl").read_text())
    assert plot.read_run(tmp_path / "r").final_loss == 1.5
    refused(in_process(plot, "compare", tmp_path / "again"), "has no steps yet; wait")


def test_what_else_differs_is_named(tmp_path):
    """Also of a run that was extended from step 5, and of one whose record is older and which began elsewhere."""
    a = make_run(tmp_path / "a", "vanilla", 1, np.ones(5), lr=2e-3)
    b = make_run(tmp_path / "b", "resformer", 1, np.ones(9), val_hash=None, eval_tokens=None, step=2)
    make_run(tmp_path / "more", "vanilla", 1, [], {}, lr=2e-3, max_steps=9, step=5)
    with open(tmp_path / "a" / "metrics.jsonl", "a") as f:
        f.write((tmp_path / "more" / "metrics.jsonl").read_text())
    result = in_process(plot, "compare", a, b)
    notes = [line for line in result.stdout.splitlines() if line.startswith("note: ")]
    histories = [f"note: {a} had max_steps=5 until step 5", f"note: {b} goes on from step 2 of another run"]
    assert notes == ["note: the runs differ in learning_rate", *histories], result.stderr


def test_a_sweep_of_one_mode_is_lines_of_their_own(tmp_path, monkeypatch, capsys):
    runs = [make_run(tmp_path / f"{lr}", "svformer", 1, lr * np.ones(9), lr=lr) for lr in (1.0, 2.0, 3.0)]
    found = drawn(monkeypatch, *runs)
    assert list(found) == ["svformer learning_rate=2.0", "svformer learning_rate=3.0"]
    assert (found["svformer learning_rate=3.0"][1] == 2).all()
    head, _, *rows = table(capsys.readouterr().out)
    assert head[3] == "vs svformer learning_rate=1.0" and [row[3] for row in rows] == ["-", "+1.0000", "+2.0000"]


def test_names_are_shown_as_they_are():
    ax = Figure().subplots()
    plot.draw_line(ax, np.array([1, 2]), np.ones((1, 2)), "_a$x$", plot.style_of("resformer"))
    assert ax.get_legend_handles_labels()[1] == [r" _a\$x\$, 1 seed"]
    assert markdown(["a|b"], [["c\nd"]]).splitlines() == [r"| a\|b |", "|---|", "| c d |"]


def test_neither_a_notebooks_backend_nor_a_terminal_of_ascii_ends_it(tmp_path):
    runs = [make_run(tmp_path / mode, mode, 1, np.ones(9)) for mode in ("vanilla", "resformer")]
    around = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTHONIOENCODING": "ascii"}
    result = script("plot.py", "compare", *runs, env=around)
    assert "per token \\xb1 standard" in result.stdout and (tmp_path / "compare.png").exists(), result.stderr


def test_bad_calls():
    refused(in_process(plot), "say compare or analysis, then name runs: `python plot.py compare")
    refused(in_process(plot, "compare", "x", "--out_file=x.pdf"), "must end in .png")
    refused(in_process(plot, "compare", "compare.png"), "then name runs")  # the picture of an earlier call
    refused(in_process(plot, "compare", ROOT / "README.md"), "README.md/metrics.jsonl is missing")


# ---- what analyze.py found


def make_analysis(folder, mode, level):
    """What analyze.py leaves of a model of two layers, whose quantities are level, level + 1."""
    layers = {key: {"mean": [level, level + 1]} for key in ("entropy_minus_uniform", "first", "value_rank")}
    layers |= {"value_norm_first": {"mean": [level, 2 * level]}, "value_norm_rest": {"mean": [2.0, 4.0]}}
    states = {"hidden_norm_first": {"mean": [level] * 3}, "hidden_norm_rest": {"mean": [1.0, 2.0, 4.0]}}
    states |= {"hidden_similarity": {"mean": [0.0, 0.5, level]}}
    found = {"mode": mode, "parameters": 7, "length": 64, "layers": layers, "states": states}
    write_record(folder / "analysis.json", "analyze.py's numbers", found)


def test_analyses_are_lines_over_layers(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, mode, level in (("a", "vanilla", 1.0), ("s", "svformer", 4.0)):
        make_analysis(tmp_path / name, mode, level)
    panels, draw = {}, plot.layer_panel
    monkeypatch.setattr(plot, "layer_panel", lambda *given: (draw(*given), panels.update({given[3]: given})))
    result = in_process(plot, "analysis", "a", "s")
    assert result.returncode == 0 and (tmp_path / "analysis.png").exists() and len(panels) == 6, result.stderr
    _, lines, _, _, first = panels["entropy minus uniform attention's (nats)"]
    assert first == 1 and list(lines) == ["a", "s"] and lines["a"].tolist() == [[1, 2]]
    assert panels["norm of the first token's value\nrelative to other tokens"][1]["s"].tolist() == [[2, 2]]
    _, lines, _, _, first = panels["norm of the first token's state\nrelative to other tokens"]
    assert first == 0 and lines["s"].tolist() == [[4, 2, 1]]
