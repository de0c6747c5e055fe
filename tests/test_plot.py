"""plot.py on made-up metrics.jsonl files, whose figures and table can be worked out by hand."""

import json
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from conftest import ROOT, change, in_process, refused, script

import plot
from oldconfig import UserError, load_settings
from value_modes import TABLE


def make_run(
    folder, mode, seed, losses, val=None, batch=512, max_steps=None, parameters=1000, rate=100.0, block_size=64,
    domains=("a",)
):  # fmt: skip
    """A run's metrics.jsonl; val: {step: validation loss}, by default one at the end, 0.1 higher in each further domain
    than in the one before; returns the folder's name."""
    n, kv = len(losses), 2048 if mode == "svformer" else 4096
    start = {"event": "start", "step": 0, "value_mode": mode, "seed": seed, "parameters": parameters, "ranks": 1}
    start |= {"kv_bytes_per_token": kv, "data": "d", "block_size": block_size, "dtype": "float32", "device": "cpu"}
    start["max_steps"] = max_steps or n
    records = [start]
    for i, loss in enumerate(losses, 1):
        records.append({"step": i, "loss": float(loss), "lr": 1e-3, "grad_norm": 1.0, "tokens": i * batch})
        records[-1] |= {"seconds": 1.0, "tokens_per_s": rate if i > 1 else 1.0, "mfu": None}  # the first step is slow
    for step, mean in ({n: losses[-1]} if val is None else val).items():
        losses = {domain: float(mean) + 0.1 * i for i, domain in enumerate(domains)}
        records.append({"event": "eval", "step": step, "val": losses, "val_mean": float(mean)})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(folder)


def curve(n, gain=0.0, seed=0):
    t = np.arange(n)
    return 4 + 6.8 * np.exp(-t / 40) - gain * (1 - np.exp(-t / 50)) + np.random.default_rng(seed).normal(0, 0.05, n)


def drawn(monkeypatch, *words):
    """{label: (x, y, points)} and the axes of what plot.py's figure of `words` draws."""
    seen, draw_line = {}, plot.draw_line

    def spy(ax, x, y, label, style, points=None):
        seen[label], seen["axes"] = (x, y, points), ax
        draw_line(ax, x, y, label, style, points)

    monkeypatch.setattr(plot, "draw_line", spy)
    plot.main(load_settings(plot.PlotConfig, list(map(str, words))))
    return seen


def test_looks_of_modes():
    """Each row of the table has a combination of its own, black is vanilla's; weights and sizes of one mode share its
    colour."""
    looks_of = {}
    for mode in TABLE:
        style = plot.style_of(mode)
        look = style["color"], style["linestyle"], style["marker"]
        assert look not in looks_of, (mode, looks_of.get(look))
        looks_of[look] = mode
        assert (style["color"] == plot.COLORS[0]) == (mode == "vanilla"), mode
    headline = [plot.style_of(mode)["color"] for mode in plot.HEADLINE]
    assert len(set(headline)) == len(headline)
    assert plot.style_of("neutreno_0.6") == plot.style_of("neutreno")
    assert plot.style_of("mine_1a2b3c") == plot.style_of("mine_1a2b3c") != plot.style_of("mine_4d5e6f")
    styles = plot.styles_of({"long": "resformer", "longer": "resformer", "other": "svformer"})
    assert styles["other"] == plot.style_of("svformer")
    full = plot.style_of("resformer")["color"]
    assert styles["long"]["color"] == plot.shade(full, 0.4)
    assert styles["longer"]["color"] == plot.shade(full, 0.4 - 0.7)
    assert styles["long"]["linestyle"] != styles["longer"]["linestyle"]
    assert plot.shade("#000000", 0.5) == "#808080" and plot.shade("#0072B2", 0) == "#0072B2"
    assert plot.shade("#806040", -0.5) == "#403020"


def test_short_counts():
    for n, text in ((738_368, "738k"), (999_999, "1M"), (2_951_296, "2.95M"), (467_921_920, "468M"), (2e10, "20B")):
        assert plot.short_count(n) == text
    assert plot.short_count(512) == "512" and plot.count_range([738_368, 706_112]) == "706k–738k"
    assert plot.count_range([64, 64], str) == "64"


def test_relative_loss_is_paired_by_seed(tmp_path, monkeypatch):
    """The seeds' own levels, 0 and 5, cancel only if each run meets the baseline of its seed, whatever the order."""
    runs = [make_run(tmp_path / f"{mode}{seed}", mode, seed, losses) for mode, seed, losses in (
        ("resformer", 2, [6.0, 8, 7, 5]),
        ("vanilla", 1, [4, 3, 2, 1]),
        ("resformer", 1, [3.0, 2, 2, 0]),
        ("vanilla", 2, [9, 8, 7, 6]),
    )]  # fmt: skip
    out = tmp_path / "deep" / "r.png"
    x, y, points = drawn(monkeypatch, "relative", *runs, f"--out_file={out}")["resformer"]
    assert x.tolist() == [512, 1024, 1536, 2048] and points is None  # tokens
    np.testing.assert_allclose(y, [[-3, 0, 0, -1], [-1, -1, 0, -1]])  # seed 2, seed 1
    assert out.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and not list(tmp_path.rglob("*.tmp"))


def test_runs_of_different_length_share_their_steps(tmp_path, monkeypatch, capsys):
    base = make_run(tmp_path / "b", "vanilla", 1, np.arange(30.0))
    short = make_run(tmp_path / "r", "resformer", 1, np.arange(12.0) + 3, val={}, max_steps=30)
    with open(short + "/metrics.jsonl", "a") as f:
        f.write('{"step": 13, "lo')  # it still runs, and its last line is half written
    seen = drawn(monkeypatch, "relative", base, short, f"--out_file={tmp_path}/r.png")
    x, y, _ = seen["resformer"]
    assert seen["axes"].get_xlim()[1] == x[-1]  # the axis ends with the data
    np.testing.assert_allclose(y, [[3] * len(x)])
    assert seen["axes"].get_ylim()[0] < 0  # a difference is shown with its 0
    assert "r is not finished: step 12/30\n" in capsys.readouterr().out
    seen = drawn(monkeypatch, "loss", base, short, f"--out_file={tmp_path}/l.png")
    assert [seen[mode][0][-1] / 512 for mode in ("vanilla", "resformer")] == [
        28.5,
        11.5,
    ]  # of steps 27 to 30, 11 and 12


def test_growing_means():
    """Windows of 3000 steps: the first ones hold one step, the last ends with the run."""
    x = np.arange(1.0, 3001)
    middle, y = plot.growing_means(x, np.stack([2 * x, 3 * x]))
    np.testing.assert_allclose(y, [2 * middle, 3 * middle])
    assert middle[:5].tolist() == [1, 2, 3, 4, 5] and np.all(np.diff(middle) > 0)
    ends = [3000 / 1.15**k for k in range(20)]
    whole = [x[(x > end / 1.15) & (x <= end)].mean() for end in ends]
    np.testing.assert_allclose(middle[::-1][:20], whole)
    for last, first in ((116, 101), (115, 101), (92, 81), (93, 81)):  # 116 / 1.15 = 100.9, 92 / 1.15 = 80
        assert plot.growing_means(x[:last], x[None, :last])[0][-1] == (first + last) / 2
    assert [part.tolist() for part in plot.growing_means(x[:1], x[None, :1])] == [[1], [[1]]]
    np.testing.assert_allclose(
        plot.growing_means(2048 * x, x[None])[1], [middle]
    )  # over tokens the windows are the same


def test_band():
    y = np.array([[1.0, 2.0], [3.0, 8.0], [5.0, 2.0]])
    mean, low, high, what = plot.band(y)
    assert mean.tolist() == [3, 4] and what == "3 seeds ± std"
    np.testing.assert_allclose([low, high], [[1, 4 - 12**0.5], [5, 4 + 12**0.5]])  # n - 1: sqrt(8/2), sqrt(24/2)
    assert plot.band(y[:1])[3] == "1 seed"


def axes():
    from matplotlib.figure import Figure

    return Figure(layout="constrained").subplots()


def test_band_and_axis():
    ax, x = axes(), np.arange(1.0, 101)
    late = np.stack([np.full(100, 1.0), np.full(100, 2.0), np.full(100, 3.0)])
    plot.draw_line(ax, x, np.where(x < 5, 1e3, late), "resformer", plot.style_of("resformer"))
    plot.fit_axes(ax, zero=True)
    assert ax.lines[0].get_ydata()[50] == 2 and ax.lines[0].get_color() == plot.COLORS[1]
    corners = ax.collections[0].get_paths()[0].vertices
    assert set(corners[corners[:, 0] == 50][:, 1]) == {1, 3}
    low, high = ax.get_ylim()
    assert -0.5 < low < 0 and 3 < high < 3.5  # 0 is shown, and the first steps do not squash the rest
    mild = axes()
    plot.draw_line(mild, x, np.where(x < 5, 9.5, late), "resformer", plot.style_of("resformer"))
    plot.fit_axes(mild, zero=True)
    assert mild.get_ylim()[1] > 9.5 and mild.get_xlim() == (2.5, 100)  # what would not squash it stays in


def test_legend_is_above_the_axes_with_the_title():
    ax = axes()
    ax.plot([0, 1], [0, 1], label="a")
    ax.set_title("738k parameters", loc="left")
    plot.legend(ax)
    ax.figure.canvas.draw()
    assert ax.get_legend().get_title().get_text() == "738k parameters" and ax.get_title(loc="left") == ""
    assert ax.get_legend().get_window_extent().y0 >= ax.get_window_extent().y1


def test_nothing_is_cut_off(tmp_path):
    with plot.page(tmp_path / "x.png", (4, 3)) as fig:
        fig.text(0.98, 0.5, "a text beyond the edge")
    image = matplotlib.image.imread(tmp_path / "x.png")[:, :, :3]
    right = image[:, -5:]  # the margin; where a letter is cut it is not white
    assert right.min() == 1 and image.min() < 0.5


def test_layer_panel():
    ax = axes()
    rows = {"a": [[None, 1.0, 2.0], [None, 3.0, 5.0]], "b": [[1.0, 2.0, 4.0]]}
    styles = plot.styles_of({"a": "vanilla", "b": "resformer"})
    plot.layer_panel(ax, rows, styles, "height", 1, (2.5, "uniform"))
    found = {line.get_label(): line.get_xydata().T.tolist() for line in ax.lines}
    assert found["a, 2 seeds ± std"] == [[2, 3], [2, 3.5]] and found["b, 1 seed"] == [[1, 2, 3], [1, 2, 4]]
    assert found["uniform"][1] == [2.5, 2.5]
    markers = [line for line in ax.lines if line.get_linestyle() == "None"]
    np.testing.assert_array_equal(markers[0].get_xydata(), [[2, 2], [3, 3.5]])
    corners = ax.collections[0].get_paths()[0].vertices
    assert set(corners[corners[:, 0] == 3][:, 1]) == {3.5 - 4.5**0.5, 3.5 + 4.5**0.5}
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("layer", "height")
    other = axes()
    plot.layer_panel(other, {"a": [[1.0, 2.0]]}, styles, "norm", 0)
    assert other.lines[1].get_xdata().tolist() == [0, 1] and other.get_xlabel() == "state (0 = embedding)"


def test_loss_figure(tmp_path, monkeypatch, capsys):
    runs = [make_run(tmp_path / f"b{s}", "vanilla", s, np.arange(6.0) * s, {3: s, 6: 2.0 * s}) for s in (1, 2)]
    runs.append(make_run(tmp_path / "r", "resformer", 1, np.ones(6), val={}))  # killed in its last evaluation
    seen = drawn(monkeypatch, "loss", *runs, f"--out_file={tmp_path}/l.png")
    assert "step 6/6, not evaluated" in capsys.readouterr().out and seen["resformer"][2][0].size == 0
    x, y, points = seen["vanilla"]
    assert x.tolist() == [512 * step for step in range(1, 7)]  # tokens; each of so few steps has its own window
    np.testing.assert_allclose(y, [[0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10]])
    np.testing.assert_allclose(points, [[3 * 512, 6 * 512], [1.5, 3]])


def test_two_weights_of_one_mode_look_different(tmp_path, monkeypatch):
    modes = ("vanilla", "neutreno_0.2", "neutreno_0.6")
    runs = [make_run(tmp_path / mode, mode, 1, np.ones(6)) for mode in modes]
    for kind in ("relative", "loss"):
        lines = drawn(monkeypatch, kind, *runs, f"--out_file={tmp_path}/x.png")["axes"].lines
        looks = {
            str(line.get_label()): (line.get_color(), line.get_linestyle()) for line in lines if "," in line.get_label()
        }
        assert len(set(looks.values())) == len(looks) == (3 if kind == "loss" else 2), kind


def test_same_bytes_and_small(tmp_path):
    """3 modes of 3 seeds, 400 steps: two processes write the same file, whatever the user's matplotlibrc says."""
    gains = {"vanilla": 0, "resformer": 0.04, "svformer": -0.03}
    runs = [make_run(tmp_path / f"{m}_{s}", m, s, curve(400, g, s)) for m, g in gains.items() for s in (1, 2, 3)]
    (tmp_path / "matplotlibrc").write_text("figure.facecolor: red\nsavefig.dpi: 20\nfont.size: 20\n")
    for kind in ("relative", "loss"):  # one as a user starts it, one in here
        env = {"MATPLOTLIBRC": str(tmp_path / "matplotlibrc")}
        results = [
            in_process(plot, kind, *runs, f"--out_file={tmp_path}/a.png"),
            script("plot.py", kind, *runs, f"--out_file={tmp_path}/b.png", env=env),
        ]
        assert all(result.returncode == 0 and not result.stderr for result in results), results
        one, two = ((tmp_path / f"{name}.png").read_bytes() for name in "ab")
        assert one == two and len(one) < 250_000


def table(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[0] == "|"]


def test_compare(tmp_path):
    vanilla = [make_run(tmp_path / f"v{s}", "vanilla", s, np.full(20, 5.0), {20: 4.0 + s}) for s in (1, 2)]
    res = [make_run(tmp_path / f"r{s}", "resformer", s, np.full(20, 5.0), {20: 4.0 + 0.5 * s}) for s in (1, 2)]
    sv = make_run(tmp_path / "s", "svformer", 1, np.full(12, 5.0), {12: 1.0}, max_steps=20, parameters=900, rate=2500)
    words = [*vanilla, *res, sv, f"--out_file={tmp_path}/c.png"]
    result = in_process(plot, "compare", *words)
    assert result.returncode == 0, result.stderr
    head, rule, *rows = table(result.stdout)
    assert head == ["mode", "parameters", "val loss", "vs vanilla", "tokens/s", "KV bytes/token", "runs"]
    assert rule[0].strip("-") == "" and all(r.endswith("-:") for r in rule[1:])
    assert rows[0] == ["vanilla", "1,000", "5.5000 ± 0.7071", "-", "100", "4,096", "2"]
    assert rows[1] == ["resformer", "1,000", "4.7500 ± 0.3536", "-0.7500 ± 0.3536", "100", "4,096", "2"]
    # its validation loss of 1.0 at step 12 is not a result
    assert rows[2] == ["svformer", "900", "-", "-", "2,500", "2,048", "0 of 1 (step 12/20)"]
    assert (tmp_path / "c.png").exists()
    head, _, base, other = table(in_process(plot, "compare", vanilla[0], res[0], "--baseline=resformer").stdout)
    assert head[3] == "vs resformer" and base[:2] == ["resformer", "1,000"] and other[2:4] == ["5.0000", "+0.5000"]
    assert (tmp_path / "compare.png").exists()  # beside the runs


def test_what_is_not_a_run_is_left_out(tmp_path):
    """`plot.py compare out/demo/*` meets the tables and pictures beside the runs; the figure goes there too."""
    for mode in ("vanilla", "resformer"):
        make_run(tmp_path / "demo" / mode, mode, 1, np.full(20, 4.0))
    (tmp_path / "demo" / "compare.json").write_text("{}")
    (tmp_path / "demo" / "notes").mkdir()
    result = in_process(plot, "compare", *sorted((tmp_path / "demo").iterdir()))
    assert result.returncode == 0, result.stderr
    for name in ("compare.json", "notes"):
        assert f"demo/{name} is left out: it has no metrics.jsonl" in result.stdout
    assert (tmp_path / "demo" / "compare.png").exists()
    refused(in_process(plot, "loss", tmp_path / "demo" / "notes"), "none of", "is a run")


def test_resumed_run(tmp_path):
    """The last start record counts: the run was set to 10 steps, then to 12."""
    path = make_run(tmp_path / "r", "vanilla", 1, np.ones(12), {10: 2.0, 12: 1.5}, max_steps=10)
    file = tmp_path / "r" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    lines.insert(11, lines[0].replace('"max_steps": 10', '"max_steps": 12').replace('"step": 0', '"step": 10'))
    file.write_text("".join(lines))
    run = plot.read_run(path)
    assert run.max_steps == 12 and run.finished and run.val == {10: 2.0, 12: 1.5}


def test_refused_pairs(tmp_path):
    def make(name, *args, **kw):
        return plot.read_run(make_run(tmp_path / name, *args, **kw))

    base, res = make("base", "vanilla", 1, np.ones(9)), make("res", "resformer", 2, np.ones(9))
    batch = make("batch", "svformer", 1, np.ones(9), batch=64)
    steps = make("steps", "svformer", 1, np.ones(9), max_steps=99)
    make("bos", "svformer", 1, np.ones(9))
    metrics = tmp_path / "bos" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"event": "start",', '"event": "start", "bos": true,'))
    bos = plot.read_run(tmp_path / "bos")
    make("fast", "vanilla", 3, np.ones(9))
    metrics = tmp_path / "fast" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"lr": 0.001', '"lr": 0.002'))
    fast = plot.read_run(tmp_path / "fast")
    again, wide = make("again", "vanilla", 1, np.ones(9)), make("wide", "vanilla", 3, np.ones(9), parameters=7)
    for runs, message in (
        ([base, res], r"res \(resformer\) needs a vanilla run with its seed, 2; .* --value_mode=vanilla"),
        ([res], "needs a vanilla run"),
        ([base], "all runs are vanilla"),
        ([base, batch], "batch had 9 steps of 64 tokens, 64 at a time, of data d, .*base had 9 steps of 512 tokens"),
        ([base, steps], "steps had 99 steps of 512"),
        ([base, bos], "bos had 9 steps of 512 tokens, 64 at a time with end-of-text first, of data d"),
        ([base, again], "are both vanilla, but do not differ in the seed alone"),
        ([base, fast], "are both vanilla, but do not differ in the seed alone"),
        ([base, wide], "are both vanilla, but do not differ in the seed alone"),
    ):
        with pytest.raises(UserError, match=message):
            plot.pair(plot.by_mode(runs, "vanilla"), "vanilla")


def test_refused_files(tmp_path):
    started = make_run(tmp_path / "started", "vanilla", 1, [], val={})
    empty, odd = tmp_path / "empty", tmp_path / "odd"
    empty.mkdir()
    few = make_eval(tmp_path / "few", "vanilla", {"hellaswag limit=5": {"acc": 0.2}})
    odd.mkdir()
    (odd / "eval.json").write_text("{}")
    (odd / "analysis.json").write_text("[]")
    for kind, folder, says in (
        ("loss", tmp_path / "nowhere", ["nowhere/metrics.jsonl does not exist"]),
        ("loss", started, ["started/metrics.jsonl has no steps yet"]),
        ("eval", empty, ["eval.json is missing", "python eval.py"]),
        ("eval", odd, ["eval.json lacks the field"]),
        ("eval", few, ["no result of a whole task"]),
        ("analysis", empty, ["analysis.json is missing", "`python analyze.py"]),
        ("analysis", odd, ["analysis.json takes object, not []", "`python analyze.py"]),
    ):
        refused(in_process(plot, kind, folder), *says)


def test_refused_settings():
    for words, message in (
        ([], r"say what to draw \(relative, .*, then of which runs: `python plot.py relative out/demo/"),
        (["relativ", "out/vanilla"], "say what to draw"),
        (["loss"], "then of which runs"),
        (["loss", "x", "--out_file=x.pdf"], "must end in .png"),
    ):
        with pytest.raises(UserError, match=message):
            load_settings(plot.PlotConfig, words)


def test_the_table_needs_no_matplotlib(tmp_path, monkeypatch):
    runs = [make_run(tmp_path / m, m, 1, np.ones(12)) for m in ("vanilla", "resformer")]
    monkeypatch.setitem(sys.modules, "matplotlib.style", None)
    result = in_process(plot, "compare", *runs)
    refused(result, "matplotlib")
    assert table(result.stdout)[2][0] == "vanilla"


def test_no_torch():
    code = "import sys, plot; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


# ---- what eval.py and analyze.py found


def make_eval(folder, mode, results, step=8):
    folder.mkdir()
    old = {"mode": mode, "step": 1, "results": {}}
    found = {"step_00000001.safetensors": old, "step_x.safetensors": old | {"step": step, "results": results}}
    (folder / "eval.json").write_text(json.dumps({"format": "nanoresformer-eval/1", "checkpoints": found}))
    return folder


def test_evaluations(tmp_path, monkeypatch):
    """Each run's accuracies with their errors over the chance of the task, and its losses by domain."""
    record = {"acc": 0.3, "acc_stderr": 0.02, "acc_norm": 0.4, "acc_norm_stderr": 0.03, "chance": 0.25}
    loss = {"val": {"C4": 3.0, "Book": 4.0}, "val_mean": 3.5}
    wino = {"acc": 0.5, "acc_stderr": 0.01, "chance": 0.5}
    a = make_eval(tmp_path / "a", "vanilla", {"hellaswag": record, "winogrande": wino, "loss": loss})
    b = make_eval(tmp_path / "b", "resformer", {"hellaswag": record | {"acc": 0.35, "acc_stderr": None}})
    seen, left, right = {}, plot.accuracies, plot.losses_by_domain
    monkeypatch.setattr(plot, "accuracies", lambda ax, *given: (left(ax, *given), seen.update(accuracies=ax)))
    monkeypatch.setattr(plot, "losses_by_domain", lambda ax, *given: (right(ax, *given), seen.update(losses=ax)))
    assert in_process(plot, "eval", a, b, f"--out_file={tmp_path}/e.png").returncode == 0
    ax = seen["accuracies"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["hellaswag", "winogrande"]
    assert [c.get_label() for c in ax.containers] == ["vanilla", "resformer"]
    assert [c.lines[0].get_color() for c in ax.containers] == list(plot.COLORS[:2])
    ys = [line.get_ydata().tolist() for line in (c.lines[0] for c in ax.containers)]
    assert ys == [[0.3, 0.5], [0.35]]
    low, high = ax.containers[0].lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == pytest.approx((0.28, 0.32))
    assert {path.vertices[0, 1] for c in ax.collections for path in c.get_paths()} >= {0.25}
    (legend,) = ax.figure.legends
    assert legend.get_title().get_text() == "step 8"
    ax = seen["losses"]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["mean", "Book", "C4"]
    assert ax.lines[0].get_xdata().tolist() == [3.5, 4.0, 3.0] and (tmp_path / "e.png").stat().st_size > 5000
    other = {"loss": loss | {"data": "x"}}
    refused(in_process(plot, "eval", a, make_eval(tmp_path / "c", "cla2", other)), "these losses are on different data")
    change(a / "eval.json", checkpoints={"folder": {"step": None, "mode": "vanilla", "results": {"winogrande": wino}}})
    assert in_process(plot, "eval", a).returncode == 0  # of an exported folder, which has no step
    assert in_process(plot, "eval", b, "--metric=acc_norm").returncode == 0
    assert [t.get_text() for t in seen["accuracies"].get_xticklabels()] == ["hellaswag"]


def make_analysis(folder, mode, level, **config):
    """A folder with what analyze.py leaves of a model of two layers, whose quantities are level, level + 1, …"""
    folder.mkdir()
    both = {key: {"mean": [level, level + 1]} for key in ("entropy_minus_uniform", "first", "value_rank")}
    both |= {"value_norm_first": {"mean": [level, 2 * level]}, "value_norm_rest": {"mean": [2.0, 4.0]}}
    states = {"hidden_norm_first": {"mean": [level] * 3}, "hidden_norm_rest": {"mean": [1.0, 2.0, 4.0]}}
    states |= {"hidden_similarity": {"mean": [0.0, 0.5, level]}}
    found = {"mode": mode, "parameters": 7, "length": 64, "entropy_uniform": 3.8, "layers": both, "states": states}
    (folder / "analysis.json").write_text(json.dumps(found))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_analyses(tmp_path, monkeypatch):
    """Quantities by layer or state, norms by those of the other tokens; runs that differ in their seed are one line."""
    train = {"max_steps": 9, "value_mode": "vanilla"}
    names = [
        make_analysis(tmp_path / f"v{s}", "vanilla", float(s), **train, seed=s, out_dir=f"v{s}") for s in (1, 2, 6)
    ]
    names.append(make_analysis(tmp_path / "r", "resformer", 8.0, max_steps=9, seed=1))
    names.append(make_analysis(tmp_path / "s", "svformer", 4.0, max_steps=9, learning_rate=1e-3))
    names.append(make_analysis(tmp_path / "fast", "svformer", 4.0, max_steps=9, learning_rate=1e-2))
    names += [make_analysis(tmp_path / name, "vanilla", 1.0, model_type="llama") for name in ("Llama-8B", "Llama-1B")]
    panels, draw = [], plot.layer_panel
    monkeypatch.setattr(plot, "layer_panel", lambda ax, *given: (draw(ax, *given), panels.append(given)))
    monkeypatch.chdir(tmp_path)
    result = in_process(plot, "analysis", *[name.name for name in names])
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "analysis.png").stat().st_size > 5000 and len(panels) == 6
    found = {}
    for lines, _, title, first in panels:
        lines = {label.removesuffix(" (7, length 64)"): np.array(y).tolist() for label, y in lines.items()}
        found[title] = lines, first
    lines, first = found["entropy minus uniform attention's (nats)"]
    assert first == 1 and list(lines) == ["v1", "resformer", "s", "fast", "Llama-8B", "Llama-1B"]
    assert lines["v1"] == [[1, 2], [2, 3], [6, 7]] and lines["resformer"] == [[8, 9]]
    assert found["norm of the first token's value\nrelative to other tokens"][0]["resformer"] == [[4, 4]]
    lines, first = found["norm of the first token's state\nrelative to other tokens"]
    assert first == 0 and lines["s"] == [[4, 2, 1]]
    assert found["token similarity of the states"][0]["Llama-1B"] == [[0, 0.5, 1]]


def test_results_in_bf16_are_found_and_fp32_goes_first(tmp_path):
    """eval.py names a dtype that is not fp32 in the key of a result; on GPUs it takes bf16 by itself."""
    scores = {"acc": 0.5, "acc_stderr": 0.1, "acc_norm": 0.5, "acc_norm_stderr": 0.1, "chance": 0.25}
    of = {
        "piqa dtype=bfloat16": scores | {"acc": 0.7},
        "piqa": scores,
        "arc_easy dtype=bfloat16": scores | {"acc": 0.6},
    }
    results = plot.read_eval(make_eval(tmp_path / "run", "vanilla", of))["results"]
    assert {task: record["acc"] for task, record in results.items()} == {"piqa": 0.5, "arc_easy": 0.6}
