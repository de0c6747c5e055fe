"""The exercises' checks: solutions pass, and each typical mistake gets the sentence that helps."""

import runpy
from types import SimpleNamespace

import pytest
from conftest import ROOT, in_process, refused

from exercises import check as exercises

SOLUTIONS = ROOT / "exercises/solutions"
# (exercise, what its solution says, what a wrong answer says instead, a part of the sentence that the reader gets)
WRONG = [
    ("1", ") / 2", ")", "the ½ is missing"),
    ("1", "a @ (v_n + v_1) / 2", "a @ v_n + a @ v_1 / 2", "it belongs to the sum"),
    ("1", "a @ (v_n + v_1) / 2", "(a @ v_n + v_1) / 2", "has to go through A_n"),
    ("1", "v_1) / 2", "v_1.detach()) / 2", "lacks its gradient"),
    ("1", "return", "", "is <class 'NoneType'>"),
    ("2", ".mean(dim=1)  #", ".mean(dim=2)  #", "Add up the queries"),
    ("2", ".mean(dim=1)  #", ".sum(dim=1)  #", "divide it by T"),
    ("2", "torch.xlogy(importance, importance)", "(importance * importance.log())", "0 ln 0 = 0"),
    ("3", "a @ v_1", "a @ (v_n + v_1) / 2", "V_n is still there"),
    ("3", "(n_layer + 1)", "n_layer", "V_1 is not counted"),
    ("3", "(n_layer + 1) * tensor", "n_layer * tensor // 2", "count the keys and the values"),
    ("4", "a @ v_n + lam * (v_1 - v_n)", "a @ (v_n + lam * (v_1 - v_n))", "add it after attention"),
    ("3", "* bytes_per_number", "", "each takes 2 bytes"),
    ("4", "lam *", "0.4 *", "use `lam`"),
    ("4", "(v_1 - v_n)", "v_1", "V_n is not subtracted"),
    ("4", "return ", "", "the check cannot use your answer, AttributeError"),
    ("4", "return ", "raise SystemExit(0)  # ", "ends with SystemExit"),
    ("5", "lam=", "source=1, lam=", "1 own + 2 layer 1, learn=scalar`"),
    ("5", '"-2:"', "(4, 5)", "in a model of 4 layers"),
    ("5", '"scalar"', '"sources"', "yours learns 2"),
    ("5", "(1.0, 2.0)", "(2.0, 1.0)", "2 own + 1 layer 0"),
    ("5", "return ValueMode(", "return Residual() or (", "the comma makes a tuple"),
    ("6", 'share_k="every 2", ', "", "k own"),
    ("6", 'share_v="every 2"', 'share_v="every 4"', "v of layer 0"),
    ("6", "(Residual(),)", "()", "your plan says `layer 2 q own k own v own`; right is"),
    ("7", "(1.0, 0.0)", "(1.0, 0.4)", "does not equal vanilla"),
    ("7", ', learn="sources"', "", "no gradient moves a weight"),
    ("7", '"sources"', '"scalar"', "yours learns 10 numbers"),
    ("8", "F.pad(v_1, (0, 0, 1, 0))[:, :, :-1]", "v_1", "not shifted"),
    ("8", "F.pad(v_1, (0, 0, 1, 0))[:, :, :-1]", "F.pad(v_1, (0, 0, 0, 1))[:, :, 1:]", "a token sees the next"),
    ("8", "F.pad(v_1, (0, 0, 1, 0))[:, :, :-1]", "v_1.roll(1, 2)", "torch.roll"),
    ("8", "F.pad(v_1, (0, 0, 1, 0))[:, :, :-1]", "F.pad(v_1, (0, 0, 1, 0))[:, :, : x.size(1)]", "are its last"),
    ("8", "= self.g * before", '= projected[0]["v"] + self.g * before', "has to replace it"),
    ("8", "        return", '        projected[0]["v"] = source\n        return', "hand attention a copy"),
    ("8", "self.g * before", "self.g[:, 0, 0] * before", "ends with RuntimeError"),
    ("8", "before[:, :, -x.size(1) :]", "before", "for 2 new tokens"),
    ("8", 'used[0]["v"]', 'projected[0]["v"]', "the new tokens alone"),
    ("8", 'used[0]["v"]', 'used[0]["v"].detach()', "lacks its gradient"),
    ("8", "self.g * before", "self.g.detach() * before", "in 80 steps its loss falls from"),
    ("8", "used, cache)", "used)", "with a KV cache the logits differ"),
    ("8", "nn.Parameter(torch.zeros(n_head, 1, 1))", "torch.zeros(n_head, 1, 1)", "no nn.Parameter"),
    ("8", "torch.zeros(n_head, 1, 1)", "torch.zeros(1)", "all heads have one g"),
    ("8", "torch.zeros(n_head, 1, 1)", "torch.ones(n_head, 1, 1)", "does not equal vanilla"),
]


def answers(file):
    return SimpleNamespace(**runpy.run_path(str(file)))


@pytest.mark.parametrize("number", exercises.EXERCISES)
def test_a_solution_is_right(number):
    is_right, sentences = exercises.verdict(number, answers(SOLUTIONS / f"ex{number}.py"))
    assert is_right and sentences.startswith(f"exercise {number}: right. You have built"), sentences


@pytest.mark.parametrize("number,old,new,fragment", WRONG)
def test_a_mistake_gets_its_sentence(tmp_path, number, old, new, fragment):
    text = (SOLUTIONS / f"ex{number}.py").read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "answers.py").write_text(text.replace(old, new), encoding="utf-8")
    is_right, sentences = exercises.verdict(number, answers(tmp_path / "answers.py"))
    assert not is_right and fragment in sentences, sentences


@pytest.mark.parametrize("file, says", [("none.py", "FileNotFoundError"), (".", "ImportError")])
def test_a_file_that_is_none(file, says):
    refused(in_process(exercises, f"--file={file}"), f"{file}: {says}")


STUBS = (ROOT / exercises.ANSWERS).read_text(encoding="utf-8").count("NotImplementedError")


@pytest.mark.skipif(STUBS < 10, reason="a reader has begun")
def test_the_start_is_empty_and_says_so():
    result = in_process(exercises, cwd=ROOT)
    assert result.returncode == 1 and result.stdout.count("nothing there yet") == len(exercises.EXERCISES), result
