"""plot.py on made-up numbers, whose pictures can be worked out by hand."""

import matplotlib
import numpy as np
import pytest
from conftest import ROOT, in_process, refused, script
from matplotlib.figure import Figure

import plot
from common.files import write_record
from common.report import markdown
from value_modes import TABLE


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


EFFECTS = [("resformer", "resformer", -0.05, 0.01, [-0.051, -0.049], True)]
EFFECTS += [("svformer", "svformer", 0.02, 0.03, [0.02], False)]
CURVES = {mode: (mode, 1000.0 * np.arange(1, 41), 5 - np.log(np.arange(1.0, 41))) for mode in ("vanilla", "svformer")}


def test_same_bytes_whatever_the_users_matplotlibrc_says(tmp_path, monkeypatch):
    plot.comparison(tmp_path / "a.png", EFFECTS, CURVES, "title")
    for name, value in {"figure.facecolor": "red", "savefig.dpi": 20, "font.size": 20}.items():
        monkeypatch.setitem(matplotlib.rcParams, name, value)
    plot.comparison(tmp_path / "b.png", EFFECTS, CURVES, "title")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_comparison_shows_the_best_on_top_and_greys_what_says_nothing(tmp_path, monkeypatch):
    pages = []
    monkeypatch.setattr(Figure, "savefig", lambda fig, path, **_: (pages.append(fig), path.touch()))
    plot.comparison(tmp_path / "a.png", [*EFFECTS, ("one", "neutreno", 0.1, None, [0.1], True)], CURVES, "title")
    left, right = pages[0].axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["one", "svformer", "resformer"]  # from below
    marks = [line for line in left.lines if line.get_marker() == "o"]
    colors = [(line.get_color(), line.get_markerfacecolor()) for line in marks]
    blue, purple = (plot.style_of(mode)["color"] for mode in ("resformer", "neutreno"))
    assert colors == [(purple, "white"), ("0.5", "0.5"), (blue, blue)]
    assert [line.get_xdata()[0] for line in marks] == [0.1, 0.02, -0.05]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["vanilla", "svformer"]


def test_growing_means():
    """Windows of 3000 steps: the first ones hold one step, the last ends with the run."""
    x = np.arange(1.0, 3001)
    middle, y = plot.growing_means(x, np.stack([2 * x, 3 * x]))
    np.testing.assert_allclose(y, [2 * middle, 3 * middle])
    assert middle[:5].tolist() == [1, 2, 3, 4, 5]
    ends = [3000 / 1.15**k for k in range(20)]
    np.testing.assert_allclose(middle[::-1][:20], [x[(x > end / 1.15) & (x <= end)].mean() for end in ends])


def test_a_line_is_the_mean_of_its_seeds_in_the_band_of_its_interval():
    ax, y = Figure().subplots(), np.array([[1.0, 2.0], [3.0, 8.0], [5.0, 2.0]])
    plot.draw_line(ax, np.array([1, 2]), y, "a", plot.style_of("resformer"))
    assert ax.lines[0].get_ydata().tolist() == [3, 4] and ax.lines[0].get_label() == "a, 3 seeds, 95 %"
    corners = ax.collections[0].get_paths()[0].vertices
    half = 4.302653 * 12**0.5 / 3**0.5  # Student's t; n - 1: sqrt(24 / 2)
    np.testing.assert_allclose(np.ptp(corners[corners[:, 0] == 2][:, 1]), 2 * half, rtol=1e-6)


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
    assert found["a, 2 seeds, 95 %"] == [[2, 3], [2, 3.5]] and found["b, 1 seed"] == [[1, 2, 3], [1, 2, 4]]
    assert found["uniform"][1] == [2.5, 2.5]


def test_names_are_shown_as_they_are():
    ax = Figure().subplots()
    plot.draw_line(ax, np.array([1, 2]), np.ones((1, 2)), "_a$x$", plot.style_of("resformer"))
    assert ax.get_legend_handles_labels()[1] == [r" _a\$x\$, 1 seed"]
    assert markdown(["a|b"], [["c\nd"]]).splitlines() == [r"| a\|b |", "|---|", "| c d |"]


def test_neither_a_notebooks_backend_nor_a_terminal_of_ascii_ends_it(tmp_path):
    make_analysis(tmp_path / "ä", "vanilla", 1.0)
    around = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "PYTHONIOENCODING": "ascii"}
    result = script("plot.py", tmp_path / "ä", f"--out_file={tmp_path}/ä.png", env=around)
    assert "\\xe4.png" in result.stdout and (tmp_path / "ä.png").exists(), result.stderr


def test_bad_calls():
    refused(in_process(plot), "name runs that analyze.py has seen: `python plot.py out/a out/b`")
    refused(in_process(plot, "x", "--out_file=x.pdf"), "must end in .png")
    refused(in_process(plot, "analysis.png"), "name runs")  # the picture of an earlier call
    refused(in_process(plot, ROOT / "README.md"), "README.md/analysis.json is missing")


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
    result = in_process(plot, "a", "s")
    assert result.returncode == 0 and (tmp_path / "analysis.png").exists() and len(panels) == 6, result.stderr
    _, lines, _, _, first = panels["entropy minus uniform attention's (nats)"]
    assert first == 1 and list(lines) == ["a", "s"] and lines["a"].tolist() == [[1, 2]]
    assert panels["norm of the first token's value\nrelative to other tokens"][1]["s"].tolist() == [[2, 2]]
    _, lines, _, _, first = panels["norm of the first token's state\nrelative to other tokens"]
    assert first == 0 and lines["s"].tolist() == [[4, 2, 1]]
