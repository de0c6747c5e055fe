"""eval.py --task=copying,repeat: against naive transcriptions, a model that knows nothing, and one that copies."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import in_process, make_data, refused, tiny
from matplotlib.figure import Figure
from test_eval import results, runs  # noqa: F401
from test_train import command, ended, fork

import eval as e
import plot
from common import checkpoint, copying
from common.ranks import Distributed
from common.report import mean_error

RNG = np.random.default_rng(0)


# ---- the kinds of tokens


def naive_kind(window, i):
    """Of the target window[i + 1], by the words of `kinds_of`."""
    seen, previous, target = window[: i + 1], window[i], window[i + 1]
    followers = [window[j + 1] for j in range(i) if window[j] == previous]
    if target in followers:
        return "pair seen"
    if target in seen:
        return "token seen, pair not"
    return "token new, previous seen" if followers else "token new"


@pytest.mark.parametrize("n_vocab", [2, 5, 40])
def test_kinds_equal_a_naive_transcription(n_vocab):
    windows = RNG.integers(n_vocab, size=(20, 33))
    found = copying.kinds_of(windows[:, :-1], windows[:, 1:])
    wanted = [[copying.KINDS.index(naive_kind(w, i)) for i in range(32)] for w in windows.tolist()]
    assert found.tolist() == wanted
    assert n_vocab != 40 or len(np.unique(found)) == 4


def test_kinds_by_hand():
    ids = np.array([[1, 2, 3, 1, 2, 4, 4, 4, 3]])
    kinds = copying.kinds_of(ids[:, :-1], ids[:, 1:])
    assert [copying.KINDS[k].removeprefix("token ") for k in kinds[0]] == [
        "new",  # 2
        "new",  # 3
        "seen, pair not",  # 1
        "pair seen",  # 2 after 1
        "new, previous seen",  # 4 after 2, which 3 followed
        "seen, pair not",  # 4
        "pair seen",  # 4 after 4
        "seen, pair not",  # 3
    ]


# ---- random text that repeats itself

FIRST = [1822, 1271, 1204, 1041, 1822, 1271, 1204]
SECOND = [512, 1633, 1596, 1251, 512, 1633, 1596]


def test_repeated_text():
    x, y = copying.repeated(300, 16, 50, eot=7)
    ids = np.concatenate((x, y[:, -1:]), axis=1)
    assert ids.shape == (300, 16) and (x[:, 1:] == y[:, :-1]).all()
    assert (ids[:, :8] == ids[:, 8:]).all()
    counts = np.bincount(ids[:, :8].ravel(), minlength=50)
    assert counts[7] == 0 and len(counts) == 50
    others = np.delete(counts, 7)
    assert abs(others - 2400 / 49).max() < 5 * math.sqrt(2400 / 49)


def test_repeated_text_is_the_same_everywhere():
    x, _ = copying.repeated(2, 9, 2048, eot=2047)
    assert x.tolist() == [FIRST, SECOND] and copying.repeated(1, 9, 2048, eot=2047)[0].tolist() == [FIRST]


def losses(model, x, y, batch_tokens=100):
    return np.array(e.score_windows(model, "", (x, y), e.EvalConfig(batch_tokens=batch_tokens), Distributed("cpu")))


def test_a_model_that_knows_nothing_scores_ln_v():
    model = tiny()
    model.head.weight.data.zero_()
    windows = copying.repeated(5, 32, 61, eot=0)
    for task, title in (("repeat", "half"), ("copying", "token")):
        for found in copying.record_of(copying.groups_of(task, *windows), *losses(model, *windows))[title].values():
            assert found["loss"] == pytest.approx(math.log(61), rel=1e-6) and found["acc"] < 0.2


class Copier(torch.nn.Module):
    """Says what followed the last earlier occurrence of a token, and knows nothing where there is none."""

    def __init__(self, n_vocab):
        super().__init__()
        self.cfg = tiny().cfg
        self.norm = torch.nn.RMSNorm(1)  # whose device is the model's
        self.head = torch.nn.Identity()
        self.n_vocab = n_vocab

    def hidden(self, idx):
        logits = torch.zeros(*idx.shape, self.n_vocab)  # (B, T, V)
        for b, row in enumerate(idx.tolist()):
            for i, token in enumerate(row):
                followers = [row[j + 1] for j in range(i) if row[j] == token]
                if followers:
                    logits[b, i, followers[-1]] = 50.0
        return logits


def test_a_model_that_copies_scores_0():
    """On the second half of random text with hardly a token twice in a half. On the first half it knows nothing."""
    windows = copying.repeated(6, 40, 10_000, eot=0)
    found = copying.record_of(copying.groups_of("repeat", *windows), *losses(Copier(10_000), *windows))["half"]
    assert found["second half"]["loss"] < 1e-6 and found["second half"]["acc"] == 1
    assert found["first half"]["loss"] == pytest.approx(math.log(10_000), rel=0.01)


@pytest.mark.parametrize(("length", "second"), [(4, [3]), (8, [5, 6, 7]), (9, [5, 6, 7])])
def test_where_the_halves_are(length, second):
    """The first token of the second half is left out there: nobody can know it. An odd window loses its last token."""
    groups = copying.groups_of("repeat", *copying.repeated(2, length, 50, eot=0))["half"]
    places = 1 + np.flatnonzero(groups["second half"][1])  # a target stands one after what is read
    assert places.tolist() == second and (groups["first half"] == ~groups["second half"]).all()


# ---- losses, and the tables


@pytest.mark.parametrize("batch_tokens", [1, 70, 10_000])
def test_losses_equal_the_definition_whatever_the_batch(batch_tokens):
    model = tiny("resformer")
    ids = torch.from_numpy(RNG.integers(61, size=(7, 21)))
    logits = model(ids[:, :-1])[0]
    wanted = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    nats, is_likeliest = losses(model, ids[:, :-1].numpy(), ids[:, 1:].numpy(), batch_tokens)
    np.testing.assert_allclose(nats, wanted.detach(), atol=1e-6)
    assert (is_likeliest == (logits.argmax(-1) == ids[:, 1:]).numpy()).all()


def test_errors_per_token():
    """With equally many tokens in each window, those of the windows' means; else those of 1,000 resampled sets."""
    sums = RNG.normal(3, 1, 50)
    assert copying.per_token(sums, np.full(50, 4)) == pytest.approx(mean_error(sums / 4))
    counts = RNG.integers(0, 9, 400)
    sums = counts * RNG.normal(2, 1, 400)
    draws = RNG.integers(400, size=(1000, 400))
    resampled = sums[draws].sum(1) / counts[draws].sum(1)
    mean, error = copying.per_token(sums, counts)
    assert mean == sums.sum() / counts.sum() and error == pytest.approx(resampled.std(), rel=0.1)


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_tables_by_hand():
    """Two windows of two targets: the second ones repeat a pair. Run b is better there alone, by 1 and 3 nats."""
    groups = {"new": np.array([[True, False]] * 2), "pair": np.array([[False, True]] * 2)}
    a, b = np.array([[4.0, 3], [2, 3]]), np.array([[4.0, 2], [2, 0]])
    table = cells(copying.group_table("loss", groups | {"all": np.ones((2, 2), bool)}, ["a", "b"], [a, b]))
    assert table[0] == ["loss", "tokens", "a", "b", "b − a", "part of it"]
    assert table[2] == ["new", "50.0%", "3.0000", "3.0000", "+0.0000 ± 0.0000", "0%"]
    assert table[3] == ["pair", "50.0%", "3.0000", "1.0000", "-2.0000 ± 1.0000", "100%"]
    assert table[4] == ["all", "100.0%", "3.0000", "2.0000", "-1.0000 ± 0.5000", "100%"]


def test_positions():
    x = RNG.integers(50, size=(3, 20))
    found = copying.groups_of("copying", x, x)["position"]
    assert list(found) == ["1 to 2", "3 to 5", "6 to 7", "8 to 10", "11 to 12", "13 to 15", "16 to 17", "18 to 20"]
    assert (sum(found.values()) == 1).all() and found["3 to 5"][2].nonzero()[0].tolist() == [2, 3, 4]


# ---- the command


def test_two_runs_side_by_side(runs):  # noqa: F811
    words = [runs / "a", runs / "b", "--task=loss,copying,repeat", f"--corpus={runs / 'data'}"]
    done = in_process(e, *words)
    assert done.returncode == 0, done.stderr
    for run in ("a", "b"):
        found = results(runs / run)
        kinds = found["copying"]["token"]
        assert sum(kinds[name]["share"] for name in copying.KINDS) == pytest.approx(1)
        whole = sum(kinds[name]["share"] * kinds[name]["loss"] for name in copying.KINDS)
        assert whole == pytest.approx(kinds["all"]["loss"])
        assert kinds["all"]["loss"] == pytest.approx(found["loss"]["val_mean"], abs=0.01)  # both domains are as long
        assert len(found["copying"]["position"]) == copying.RANGES
        assert f"{kinds['pair seen']['loss']:.4f}" in done.stdout
        assert f" {found['repeat']['half']['second half']['loss']:.4f} " in done.stdout
    assert "svformer − vanilla" in done.stdout


def test_two_ranks_equal_one(runs, tmp_path):  # noqa: F811
    words = [str(runs / "b"), "--task=copying,repeat"]
    assert in_process(e, *words).returncode == 0
    one = results(runs / "b")
    (runs / "b/eval.json").unlink()
    ended(fork(tmp_path, 2, command, "eval", *words), 0, 0)
    two = results(runs / "b")
    for name in ("copying", "repeat"):
        assert two[name] | {"seconds": 0} == approximately(one[name] | {"seconds": 0})


def approximately(found):
    if isinstance(found, dict):
        return {key: approximately(value) for key, value in found.items()}
    return pytest.approx(found, rel=1e-5) if isinstance(found, float) else found


def test_bad_input(runs, tmp_path):  # noqa: F811
    small = checkpoint.save(
        tmp_path, 1, tiny(block_size=3).float(), checkpoint.read_header(checkpoint.find(runs / "a"))["tokenizer"]
    )
    shutil.copy(runs / "a/tokenizer.json", tmp_path)
    refused(
        in_process(e, small, "--task=repeat"), "repeat needs windows of at least 4 tokens, but this model's block has 3"
    )
    (tmp_path / "empty").mkdir()
    refused(in_process(e, tmp_path / "empty", "--task=copying"), "there is no checkpoint")
    short = make_data(tmp_path / "short", n_val=20)
    words = (runs / "a", "--task=copying", f"--corpus={short}")
    refused(in_process(e, *words), "the validation text of", "is shorter than a window of 64 tokens; prepare more")


def test_a_trial_writes_nothing(runs, tmp_path):  # noqa: F811
    run = shutil.copytree(runs / "a", tmp_path / "run", ignore=shutil.ignore_patterns("eval.json"))
    done = in_process(e, run, "--task=copying,repeat", "--limit=2")
    assert done.returncode == 0 and not (run / "eval.json").exists()


def test_the_picture(runs, tmp_path, monkeypatch):  # noqa: F811
    """The bars of a run add up to what its loss differs by; its line has the loss of each checkpoint."""
    without = shutil.ignore_patterns("eval.json")
    folders = [shutil.copytree(runs / name, tmp_path / name, ignore=without) for name in ("a", "b")]
    refused(in_process(plot, "copying", *folders), "a has no results of copying; make them: `python eval.py")
    assert in_process(e, *folders, "--task=copying,repeat").returncode == 0
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda fig, path, **how: (figures.append(fig), Path(path).touch()))
    done = in_process(plot, "copying", *folders)
    assert done.returncode == 0 and f"wrote {tmp_path / 'copying.png'}" in done.stdout
    left, right = figures[0].axes
    a, b = (results(folder) for folder in folders)
    gap = b["copying"]["token"]["all"]["loss"] - a["copying"]["token"]["all"]["loss"]
    assert sum(bar.get_width() for bar in left.patches) == pytest.approx(gap)
    points = [line.get_ydata()[0] for line in right.lines]
    assert points == [*(of["repeat"]["half"]["second half"]["loss"] for of in (a, b)), math.log(257)]
    assert right.lines[0].get_xdata() == [8 * 256]
    refused(in_process(plot, "copying", folders[0]), "name two runs or more: `python plot.py copying")


def test_the_line_has_all_checkpoints_by_their_tokens(runs, tmp_path, monkeypatch):  # noqa: F811
    folder = shutil.copytree(runs / "a", tmp_path / "a", ignore=shutil.ignore_patterns("eval.json"))
    header = checkpoint.read_header(folder / "step_00000008.safetensors")
    early = checkpoint.save(folder, 4, tiny(vocab_size=257, block_size=64).float(), header["tokenizer"], keep=0)
    for path in (folder / "step_00000008.safetensors", early):
        assert in_process(e, path, "--task=copying,repeat", f"--corpus={runs / 'data'}").returncode == 0
    assert [tokens for tokens, *_ in plot.results_of(folder, "repeat")] == [4 * 256, 8 * 256]


def test_losses_on_different_texts_are_not_drawn(runs, tmp_path):  # noqa: F811
    a, b = (shutil.copytree(runs / name, tmp_path / name) for name in ("a", "b"))
    make_data(tmp_path / "other", seed=1)
    assert in_process(e, a, "--task=copying,repeat").returncode == 0
    assert in_process(e, b, "--task=copying,repeat", f"--corpus={tmp_path / 'other'}").returncode == 0
    refused(in_process(plot, "copying", a, b), "these losses are of different texts, windows or lengths of training")
