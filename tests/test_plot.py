"""plot.py on made-up numbers, whose pictures can be worked out by hand, and on the plans of all modes."""

import io
import itertools

import matplotlib
import numpy as np
import pytest
from conftest import MODES, ROOT, config, in_process, refused, script
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import plot
from common import picture
from common.files import record_line, write_record
from common.report import markdown
from value_modes import TABLE, kv_floats_per_token, plan_layers, stored_tensors


def test_headline_modes_have_colours_of_their_own_and_lines_of_one_colour_differ_in_dash():
    styles = plot.styles_of({mode: mode for mode in TABLE})
    assert len({styles[mode]["color"] for mode in plot.HEADLINE}) == 7
    assert [mode for mode in TABLE if styles[mode]["color"] == "#000000"] == ["vanilla"]
    two = plot.styles_of({"a": "neutreno", "b": "neutreno"})
    assert two["a"]["color"] == two["b"]["color"] and two["a"]["linestyle"] != two["b"]["linestyle"]


def test_short_counts():
    counts = [plot.short_count(n) for n in (738_368, 999_999, 2_951_296, 2e10, 512)]
    assert counts == ["738k", "1M", "2.95M", "20B", "512"] and plot.count_range([7000, 512]) == "512–7k"


EFFECTS = [plot.Effect("resformer", -0.05, 0.01, [-0.051, -0.049], differs=True)]
EFFECTS += [plot.Effect("svformer", 0.02, 0.03, [0.02], differs=False)]
CURVES = {mode: (1000.0 * np.arange(1, 41), 5 - np.log(np.arange(1.0, 41))) for mode in ("vanilla", "svformer")}


def test_same_bytes_whatever_the_users_matplotlibrc_says(tmp_path, monkeypatch):
    plot.comparison(tmp_path / "a.png", EFFECTS, CURVES, "title", "vanilla")
    for name, value in {"figure.facecolor": "red", "savefig.dpi": 20, "font.size": 20}.items():
        monkeypatch.setitem(matplotlib.rcParams, name, value)
    plot.comparison(tmp_path / "b.png", EFFECTS, CURVES, "title", "vanilla")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_a_plan_takes_the_shape_of_a_config_file(tmp_path):
    """Which also sets what only train.py has."""
    words = ["plan", *["vanilla"] * 176, ROOT / "config/tiny.py", f"--out_file={tmp_path / 'a.png'}"]
    refused(script("plot.py", *words), "176 modes of 4 layers do not fit into one picture")


def test_a_mode_has_one_colour_in_both_halves(tmp_path, monkeypatch):
    """Also one of your own beside ResFormer, which has the colour that yours would have alone."""
    pages = []
    monkeypatch.setattr(Figure, "savefig", lambda fig, path, **_: (pages.append(fig), path.touch()))
    of = {mode: plot.Effect(mode, 0.1, 0.01, [0.1], differs=True) for mode in ("resformer", "mine")}
    plot.comparison(
        tmp_path / "a.png", of.values(), dict.fromkeys(("vanilla", *of), CURVES["vanilla"]), "title", "vanilla"
    )
    left, right = pages[0].axes
    marks = [line.get_color() for line in left.lines if line.get_marker() == "o"]
    assert marks == [line.get_color() for line in right.lines[1:]] and marks[0] != marks[1]


def test_a_comparison_shows_the_best_on_top_and_greys_what_says_nothing(tmp_path, monkeypatch):
    pages = []
    monkeypatch.setattr(Figure, "savefig", lambda fig, path, **_: (pages.append(fig), path.touch()))
    one_seed = plot.Effect("neutreno", 0.1, None, [0.1], differs=True)
    plot.comparison(tmp_path / "a.png", [*EFFECTS, one_seed], CURVES, "title", "vanilla")
    left, right = pages[0].axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["neutreno", "svformer", "resformer"]  # from below
    marks = [line for line in left.lines if line.get_marker() == "o"]
    colors = [(line.get_color(), line.get_markerfacecolor()) for line in marks]
    blue, purple = (plot.style_of(mode)["color"] for mode in ("resformer", "neutreno"))
    assert colors == [(purple, "white"), ("0.5", "0.5"), (blue, blue)]
    assert [line.get_xdata()[0] for line in marks] == [0.1, 0.02, -0.05]
    assert [list(line.get_xdata()) for line in left.lines if line.get_marker() == "|"] == [[-0.051, -0.049]]
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
    assert ax.lines[0].get_ydata().tolist() == [3, 4] and ax.lines[0].get_label() == "a, 3 seeds, 95%"
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
    assert found["a, 2 seeds, 95%"] == [[2, 3], [2, 3.5]] and found["b, 1 seed"] == [[1, 2, 3], [1, 2, 4]]
    assert found["uniform"][1] == [2.5, 2.5]
    assert ax.get_ylim()[0] == 0  # no number is below it, whatever the band says


def test_names_are_shown_as_they_are():
    ax = Figure().subplots()
    plot.draw_line(ax, np.array([1, 2]), np.ones((1, 2)), "_a$x$", plot.style_of("resformer"))
    assert ax.get_legend_handles_labels()[1] == [r" _a\$x\$, 1 seed"]
    assert markdown(["a|b"], [["c\nd"]]).splitlines() == [r"| a\|b |", "|---|", "| c d |"]


def test_neither_a_notebooks_backend_nor_a_terminal_of_ascii_ends_it(tmp_path):
    make_analysis(tmp_path / "ä", "vanilla", 1.0)
    around = {"MPLBACKEND": "a_notebooks", "PYTHONIOENCODING": "ascii"}
    result = script("plot.py", tmp_path / "ä", f"--out_file={tmp_path}/ä.png", env=around)
    assert "\\xe4.png" in result.stdout and (tmp_path / "ä.png").exists(), result.stderr


@pytest.mark.parametrize("words,says", [
    ((), "name runs that analyze.py has analysed: `python plot.py out/a out/b`"),
    (("x", "--out_file=x.pdf"), "must end in .png"),
    (("analysis.png",), "name runs"),  # the picture of an earlier call
    ((ROOT / "README.md",), "README.md has no analysis.json; make it"),
    (("plan",), "name modes: `python plot.py plan vanilla resformer`"),
    (("plan", "svformr"), "did you mean 'svformer'?"),
    (("plan", "vanilla", "resformer_v3", "--n_layer=2"), "resformer_v3: value_mode names layers [2]"),
    (("plan", *["vanilla"] * 40, "--n_layer=40"), "40 modes of 40 layers do not fit into one picture"),
])  # fmt: skip
def test_bad_calls(words, says):
    refused(in_process(plot, *words), says)


# ---- relative losses


def make_metrics(folder, mode, losses, **changed):
    """What train.py leaves of a run: a start, and a loss a step."""
    start = {"event": "start", "step": 0, "value_mode": mode, "data": "d", "mixture": {}, "seed": 42, "bos": False}
    start |= {"batch_tokens": 100, "block_size": 10, "max_steps": len(losses)} | changed
    numbered = enumerate(losses, start["step"] + 1)
    records = [{"step": n, "loss": x, "tokens": 100 * n, "tokens_per_s": 1.0} for n, x in numbered]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(record_line("train.py's metrics", r) for r in (start, *records)))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_relative_losses_are_minus_vanillas_wherever_it_is_named(tmp_path, monkeypatch):
    make_metrics(tmp_path / "r", "resformer", [4.0, 3.0, 2.0], max_steps=4)  # not finished
    make_metrics(tmp_path / "v", "vanilla", [5.0, 3.5, 2.0, 1.0])
    drawn, draw = [], plot.draw_line
    monkeypatch.setattr(plot, "draw_line", lambda *given: (draw(*given), drawn.append(given[1:4])))
    done = in_process(plot, "relative", "r", "v")
    assert done.returncode == 0 and (tmp_path / "relative.png").exists(), done.stderr
    ((x, y, label),) = drawn
    means_x, means_y = plot.growing_means(np.array([100.0, 200, 300]), np.array([[-1.0, -0.5, 0.0]]))
    assert label == "r" and x.tolist() == means_x.tolist() and y.tolist() == means_y.tolist()


@pytest.mark.parametrize("what,own,bases", [
    ("data", "e", "d"), ("seed", 1, 42),
    ("batch_tokens", 200, 100), ("block_size", 20, 10), ("bos", True, False),
    ("max_steps", 2, 1),
])  # fmt: skip
def test_losses_on_other_tokens_are_not_subtracted(what, own, bases, tmp_path):
    make_metrics(tmp_path / "r", "resformer", [4.0], **{what: own})
    make_metrics(tmp_path / "v", "vanilla", [5.0])
    says = f"r has {what}={own} and v has {bases}, so their losses can't be subtracted"
    refused(in_process(plot, "relative", "r", "v"), says)


def test_what_relative_needs(tmp_path):
    make_metrics(tmp_path / "v", "vanilla", [5.0])
    make_metrics(tmp_path / "n", "svformer", [])
    make_metrics(tmp_path / "late", "resformer", [3.0], step=7)  # it went on from a checkpoint elsewhere
    for names, says in (
        (("v",), "name two runs or more"),
        (("v", "n"), "n has no training losses yet"),
        (("v", "nowhere"), "nowhere/metrics.jsonl is missing"),
        (("v", "v/"), "name each run once"),
        (("v", "late"), "late and v have no step in common"),
    ):
        refused(in_process(plot, "relative", *names), says)
    start = (tmp_path / "late/metrics.jsonl").read_text().splitlines()[0]
    record = {"step": 7, "loss": 3.0, "tokens": 700, "tokens_per_s": 1.0}  # a step that the start had already
    (tmp_path / "late/metrics.jsonl").write_text(start + "\n" + record_line("train.py's metrics", record))
    refused(in_process(plot, "relative", "v", "late"), "it lacks steps, or has some twice")
    (tmp_path / "n/metrics.jsonl").write_text("")
    refused(in_process(plot, "relative", "v", "n"), "n has no training losses yet")
    diverged = record_line("train.py's metrics", {"event": "diverged", "step": 1, "why": "the loss is nan"})
    (tmp_path / "n/metrics.jsonl").write_text(start + "\n" + diverged)
    refused(in_process(plot, "relative", "v", "n"), "n diverged at once; leave it out")


def test_files_beside_the_runs_are_no_runs():
    words = ("relative", "o/compare.png", "o/report.md", "o/runs.jsonl", "o/answers.json", "o/a", "o/b")
    assert plot.PlotConfig(words=words).words == ("relative", "o/a", "o/b")


def test_runs_of_one_name_are_told_apart():
    assert plot.short_names(("a/x", "b/y")) == {"a/x": "x", "b/y": "y"}
    assert plot.short_names(("a/x", "b/x")) == {"a/x": "a/x", "b/x": "b/x"}


# ---- what analyze.py found


def make_analysis(folder, mode, level, length=64):
    """What analyze.py leaves of a model of two layers, whose quantities are level, level + 1."""
    layers = {key: {"mean": [level, level + 1]} for key in ("entropy_minus_uniform", "first", "value_rank")}
    layers |= {"value_norm_first": {"mean": [level, 2 * level]}, "value_norm_rest": {"mean": [2.0, 4.0]}}
    states = {"hidden_norm_first": {"mean": [level] * 3}, "hidden_norm_rest": {"mean": [1.0, 2.0, 4.0]}}
    states |= {"hidden_similarity": {"mean": [0.0, 0.5, level]}}
    found = {"mode": mode, "parameters": 7, "length": length, "layers": layers, "states": states}
    write_record(folder / "analysis.json", "analyze.py's numbers", found)


def test_analyses_of_other_lengths_are_not_drawn_together(tmp_path):
    make_analysis(tmp_path / "a", "vanilla", 1.0)
    make_analysis(tmp_path / "b", "svformer", 1.0, length=8)
    refused(in_process(plot, "a", "b"), "these analyses are of chunks of 8 and 64 tokens; run analyze.py on all")


def test_analyses_are_lines_over_layers(tmp_path, monkeypatch):
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


# ---- plans


FIRST = [(0, 1), (0, 2), (0, 3)]  # layer 0, read by all later ones
BELOW = [(j, n) for n in range(4) for j in range(n)]


@pytest.mark.parametrize("mode,boxes,place,arrows", [
    ("vanilla", "", "", []),
    ("resformer", "v", "before", FIRST), ("resformer_prev", "v", "before", [(0, 1), (1, 2), (2, 3)]),
    ("resformer_all", "v", "before", BELOW), ("value_embed_shared", "v", "before", [("table 0", 0), ("table 0", 3)]),
    ("query", "q", "before", FIRST), ("neutreno", "v", "after", FIRST), ("cross", "kv", "softmax", FIRST),
    ("svformer", "v", "instead", FIRST), ("skipv1", "v", "instead", FIRST), ("share_k", "k", "instead", FIRST),
    ("hidden", ["input"], "input", FIRST), ("scores", ["attention"], "softmax", FIRST),
    ("denseformer", ["input"], "input", [*BELOW, *((j, 4) for j in range(4))]),
    ("denseformer_2x2", ["input"], "input", [(0, 2), (0, 4), (2, 4)]),
])  # fmt: skip
def test_arrows(mode, boxes, place, arrows):
    found = set()
    for line in picture.lines_of(config(mode)):  # each reader takes what lies below it
        pairs = itertools.product(line.sources, line.readers)
        found |= {(line.of, line.place, i, n) for i, n in pairs if isinstance(i, str) or i < n}
    assert found == {(box, place, *arrow) for box in boxes for arrow in arrows}


@pytest.mark.parametrize("mode,weights,word", [
    ("resformer", [("½", "½"), ("½", "½")], ""), ("resformer_all", [("½", "½"), ("⅓", "⅓")], ""),
    ("resformer_lambda_0.5", [("", "0.5"), ("", "0.5")], ""),
    ("neutreno", [("", "0.4 (V_1−V_2)"), ("", "0.4 (V_1−V_3)")], ""),
    ("resformer_plus", [("", ""), ("", "")], "learned"), ("resformer_head", [("", ""), ("", "")], "gate"),
])  # fmt: skip
def test_weights_are_the_equations(mode, weights, word):
    (line,) = picture.lines_of(config(mode, n_layer=3))
    assert line.readers == dict(enumerate(weights, 1)) and line.word == word


def test_what_neutreno_subtracts_is_what_is_cached():
    """V' where the values were mixed before, unless the mode says V_n."""
    modes = ("resformer_neutreno", "resformer_neutreno_literal")
    lines = [picture.lines_of(config(mode, n_layer=2))[1] for mode in modes]
    assert [line.readers[1] for line in lines] == [("", "0.2 (V_1−V_2′)"), ("", "0.2 (V_1−V_2)")]


def test_all_that_is_below_comes_on_one_line():
    assert [len(picture.lines_of(config(mode, n_layer=8))) for mode in ("resformer_all", "resformer_prev")] == [1, 7]


@pytest.mark.parametrize("mode", MODES)
def test_no_line_lies_on_another(mode):
    cfg = config(mode, n_layer=8)
    placed = picture.lanes_of(picture.lines_of(cfg))
    assert len(placed) == len(picture.lines_of(cfg))
    for (one, *lane), (other, *its_lane) in itertools.combinations(placed, 2):
        ends = [{*line.readers, *(i for i in line.sources if isinstance(i, int))} for line in (one, other)]
        assert lane != its_lane or max(ends[0]) < min(ends[1]) or max(ends[1]) < min(ends[0])


@pytest.fixture(scope="module", params=[4, pytest.param(8, marks=pytest.mark.slow)])
def panels(request):
    """{mode: (its config, its axes)}: a picture of all modes."""
    configs = [config(mode, n_layer=request.param) for mode in TABLE]
    fig = Figure(figsize=picture.size_of(configs), dpi=20)
    picture.draw(fig, configs)
    if request.param == 4:
        fig.savefig(io.BytesIO())  # only now matplotlib reads what it writes
    return dict(zip(TABLE, zip(configs, fig.axes, strict=True), strict=True))


def test_boxes_are_what_is_stored_and_what_a_layer_owns(panels):
    for mode, (cfg, ax) in panels.items():
        cached, owned, missing = {}, 0, 0.0
        for box in ax.patches:
            x, n = box.get_x() + box.get_width() / 2, int(box.get_y() // picture.ROW)
            t = next((t for t, middle in picture.CACHE.items() if abs(x - middle) < 1e-6), None)
            if t:
                cached[t, n] = round(box.get_width() / 0.17 * cfg.n_head, 6)
            elif picture.LEFT < box.get_x() < picture.RIGHT and box.get_height() == picture.HEIGHT:
                is_solid = box.get_facecolor()[3] > 0
                owned += is_solid
                missing += box.get_width() * (not is_solid)
        assert cached == stored_tensors(cfg), mode
        heads = [heads for layer in plan_layers(cfg) for heads in layer.heads.values()]
        all_heads = cfg.n_layer * (cfg.n_head + 2 * cfg.n_kv_head)
        assert owned == len(heads), mode
        assert missing == pytest.approx(picture.FULL * (all_heads - sum(heads)) / cfg.n_head), mode


def test_panels_lie_side_by_side(panels):
    assert len({ax.get_position().bounds for _, ax in panels.values()}) == len(panels)


def test_dark_boxes_are_what_later_layers_read(panels):
    dark = [box for box in panels["resformer"][1].patches if box.get_facecolor() == to_rgba(picture.BLUE)]
    assert len(dark) == 2 and max(box.get_y() for box in dark) < picture.ROW  # V_1, and V_1 in the cache
    for mode, height in (("resformer", picture.LEAVE), ("svformer", picture.USED)):  # as projected, as used
        lines = [list(line.get_ydata()) for line in panels[mode][1].lines]
        assert [picture.BOXES + picture.HEIGHT, height, height] in lines


def test_the_cache_marks_what_is_mixed(panels):
    for mode, letter in {"resformer": "V", "key": "K", "neutreno": "", "query": "", "svformer": ""}.items():
        cfg, ax = panels[mode]
        marked = [text.get_text()[0] for text in ax.texts if text.get_text().endswith("′")]
        assert marked == [letter] * (cfg.n_layer - 1) * bool(letter), mode


def test_words_are_the_models(panels):
    """The bytes of its cache, the source's weight beside the line, and what a plan leaves out."""
    for mode, (cfg, ax) in panels.items():
        words = [text.get_text() for text in ax.texts]
        kv = kv_floats_per_token(cfg)
        share = kv / kv_floats_per_token(config(n_layer=cfg.n_layer))
        assert f"{2 * kv:,} bytes per token\n{share:.3g} × full attention's" in words and mode in words
    weights = [text for text in panels["resformer_lambda"][1].texts if text.get_text() == "2"]
    assert weights and {text.get_position()[0] > picture.RIGHT for text in weights} == {True}
    for mode, note in {
        "skipv1": "heads_from_layer_0 = 0.5", "k_eq_v": "values = keys", "cut": "cut_first = True",
        "denseformer": "weights: learned, dense = (1, 1)",
    }.items():  # fmt: skip
        assert note in [text.get_text() for text in panels[mode][1].texts]


def test_modes_in_files_and_with_numbers(tmp_path, monkeypatch):
    mode = 'ValueMode((Residual(source=2, layers="-1:"),), name="somebodys")'
    (tmp_path / "mine.py").write_text(f"from value_modes import Residual, ValueMode\n\nvalue_mode = {mode}\n")
    (tmp_path / "none.py").write_text("mode = 3\n")
    drawn, draw = [], picture.draw
    monkeypatch.setattr(picture, "draw", lambda fig, configs: (draw(fig, configs), drawn.extend(configs)))
    result = in_process(plot, "plan", "vanilla", "mine.py", "neutreno_0.6", "--n_layer=5", "--n_head=4")
    assert result.returncode == 0 and (tmp_path / "plan.png").exists(), result.stderr
    assert [cfg.value_mode.name for cfg in drawn] == ["vanilla", "somebodys", "neutreno_0.6"]
    assert {(cfg.n_layer, cfg.n_head, cfg.n_embd) for cfg in drawn} == {(5, 4, 512)}
    refused(in_process(plot, "plan", "none.py"), "none.py sets none of this script's settings")
