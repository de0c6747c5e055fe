"""Preparing data: the same bytes however often killed and however many workers, budgets, and bad input as sentences."""

import bz2
import gzip
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
import zstandard
from conftest import ROOT, InThisProcess, byte_tokenizer, finished, in_process, refused, script

import prepare
from common import texts
from common.data import Corpus, load_manifest
from common.tokenizer import PATTERN, Tokenizer
from configurator import UserError

WORDS = "value|residual|the|attention|layer|of|first|and|é|中文|x = 1\n|\n\n|2024|  ".split("|")
BPE = ("--tokenizer=bpe:300", "--bpe_bytes=100000")
BUDGETS = ("--mixture={'web': 2, 'code': 1}", "--tokens=9000", "--val_tokens=1000", "--val_fraction=0.2")


def files(inputs, out, *more):
    """The words that prepare a folder of texts."""
    return ["files", f"--input_dir={inputs}", f"--out_dir={out}", *BPE, *more]


def call(*words):
    return in_process(prepare, *words)


def make(*words):
    """What a run that succeeds prints."""
    result = call(*words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def sentences(n, seed=0, size=60):
    rng = random.Random(seed)
    return [" ".join([f"{seed}.{i}", *rng.choices(WORDS, k=rng.randint(1, size))]) for i in range(n)]


def write_lines(path, found):
    """A .jsonl file of texts, or a .jsonl.zst file of two frames. A row may be a whole object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row if isinstance(row, dict) else {"text": row} for row in found]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if path.suffix == ".zst":
        lines = zstandard.compress(lines[:999]) + zstandard.compress(lines[999:])
    path.write_bytes(lines)


def write_files(folder, names, content="some text\n"):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def contents(folder):
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    found.pop(".lock", None)
    return found


def decoded(folder, split, domain):
    """The texts of a token file's documents, each of which ends with end-of-text."""
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    ids = np.fromfile(folder / split / f"{domain}.bin", "<u2")
    assert ids[-1] == tokenizer.start
    return [tokenizer.decode(doc[:-1]) for doc in np.split(ids, np.flatnonzero(ids == tokenizer.start) + 1)[:-1]]


def documents(cfg):
    """Yield (Input, [(domain, text), …]) of each item, in order."""
    for source in texts.find_inputs(cfg)[0]:
        for number, raw, _ in texts.raw_items(source, cfg):
            yield source, texts.to_documents(source, number, raw, cfg)


@pytest.fixture(autouse=True)
def no_workers(monkeypatch):
    """Scripts that run in this process start no others. `script` and `finished` start all of them."""
    monkeypatch.setattr(prepare, "ProcessPoolExecutor", InThisProcess)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Texts in all formats, in three domains, and what prepare.py makes of them."""
    folder = tmp_path_factory.mktemp("texts")
    write_lines(folder / "web" / "a.jsonl", sentences(400, 1))
    write_lines(folder / "web" / "deep" / "b.jsonl.zst", [*sentences(400, 2), ""])
    write_lines(folder / "code" / "c.jsonl.zst", sentences(300, 3))
    (folder / "d.txt").write_text("\n".join(sentences(2000, 4)), encoding="utf-8-sig")  # its mark is no text
    result = script("prepare.py", *files(folder, f"{folder}.out"))  # the real start
    assert result.returncode == 0, result.stderr
    return folder, Path(f"{folder}.out")


def test_files_become_documents(corpus):
    folder, out = corpus
    manifest = load_manifest(out)
    assert manifest["tokenizer"]["n_vocab"] == 300
    train = manifest["splits"]["train"]
    size = sum(about["tokens"] for about in train.values())
    assert manifest["mixture"] == pytest.approx({d: train[d]["tokens"] / size for d in ("code", "text", "web")})
    for domain, right in {"web": sentences(400, 1) + sentences(400, 2), "code": sentences(300, 3)}.items():
        val, rest = decoded(out, "val", domain), decoded(out, "train", domain)
        assert sorted(val + rest) == sorted(right) and len(val) == len(right) // 20
    pieces = decoded(out, "train", "text") + decoded(out, "val", "text")
    assert sum(map(len, pieces)) == len((folder / "d.txt").read_text(encoding="utf-8-sig")) and len(pieces) > 4
    length = Tokenizer.load(out / "tokenizer.json").token_bytes()
    for about in (about for split in manifest["splits"].values() for about in split.values()):
        assert about["bytes"] == length[np.fromfile(out / about["file"], "<u2")].sum()
    assert not (out / "parts").exists()


def test_who_is_held_out_and_where_budgets_end(corpus, tmp_path, monkeypatch):
    """Against a loop over the documents in order. code has its train text before its validation text."""
    folder, out = corpus[0], tmp_path / "out"
    monkeypatch.setattr(prepare, "BATCH_BYTES", 500)
    make(*files(folder, out, *BUDGETS, "--workers=1"))
    cfg = prepare.PrepareConfig("files", input_dir=str(folder))
    encode = Tokenizer.load(out / "tokenizer.json").encode
    right, size, n_items = {}, Counter(), Counter()
    budget = {("train", "web"): 6000, ("train", "code"): 3000, ("val", "web"): 1000, ("val", "code"): 1000}
    for _, docs in documents(cfg):
        for domain, text in docs:
            held_out = n_items[domain] % 5 == 1
            n_items[domain] += 1
            to = ("val", domain) if held_out and size["val", domain] < 1000 else ("train", domain)
            if size[to] < budget.get(to, 0):
                right.setdefault(to, []).append(text)
                size[to] += len(encode(text)) + 1
    assert all(size[to] >= budget[to] for to in budget)
    assert right == {to: decoded(out, *to) for to in budget}


DRIVER = """
import os, signal, sys
import prepare
from configurator import load_settings
prepare.BATCH_BYTES, k, add = 5_000, int(sys.argv[1]), prepare.Placement.add
def dying(*args):
    global k
    k -= 1
    if k == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    add(*args)
prepare.Placement.add = dying
prepare.main(load_settings(prepare.PrepareConfig, sys.argv[2:]))
"""


def test_kill_at_any_moment(corpus, tmp_path, monkeypatch):
    """Killed before the k-th part is joined, while workers write the next ones: what is left is used again, and
    three workers make the bytes that this process makes without a kill, budgets included."""

    def run(k):  # a run ends when its last worker has closed its stderr: none stays behind
        words = files(corpus[0], out, *BUDGETS, "--workers=3")
        return finished([sys.executable, "-c", DRIVER, str(k), *words], cwd=ROOT).returncode

    out, before = tmp_path / "out", {}
    for k in (1, 4, 14):
        assert run(k) == -signal.SIGKILL
        parts = {path.name: path.stat().st_mtime_ns for path in out.glob("parts/[tv]*-*")}
        assert before.items() <= parts.items()  # no part is made twice
        before = parts
    assert len(before) > 10
    refused(call(*files(corpus[0], out, *BUDGETS)), "different data (bytes in a batch 5000 there, 1048576 now)")
    monkeypatch.setattr(prepare, "BATCH_BYTES", 5_000)
    first, second, *_ = sorted(out.glob("parts/[tv]*-*"))
    content = first.read_bytes()
    shutil.copy(second, first)
    refused(call(*files(corpus[0], out, *BUDGETS)), f"{first.name} is damaged")
    first.write_bytes(content)
    assert run(10**6) == 0
    make(*files(corpus[0], tmp_path / "whole", *BUDGETS))
    assert contents(out) == contents(tmp_path / "whole")


def test_rerun_and_other_settings(corpus, tmp_path):
    folder, out = corpus
    before = contents(out)
    assert "is already complete" in make(*files(folder, out, "--workers=1"))
    refused(call(*files(folder, out, "--seed=5")), "different data (seed 0 there, 5 now;")
    refused(call(*files(folder / "web", out)), "different data", "input files")
    assert contents(out) == before


@pytest.mark.parametrize("name", ["train/", "parts/thesis.txt", "manifest.json"])
def test_what_is_not_ours_is_not_touched(corpus, tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).mkdir() if name == "train/" else (tmp_path / name).write_text("mine")
    refused(call(*files(corpus[0], tmp_path)), "did not write", "--out_dir")
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("name, says", [
    ("val/web.bin", "is missing"), ("tokenizer.json", "is missing"), ("train/web.bin", "it has 3 bytes instead of"),
])  # fmt: skip
def test_finished_data_that_lacks_something_is_not_complete(name, says, corpus, tmp_path):
    out = shutil.copytree(corpus[1], tmp_path / "out")
    (out / name).write_bytes(b"cut") if name.startswith("train") else (out / name).unlink()
    refused(call(*files(corpus[0], out)), name, says)


def test_a_part_of_the_result_may_be_a_link(corpus, tmp_path, monkeypatch):
    """To another disk: what a stopped run has joined there is replaced, too."""
    write_files(tmp_path / "elsewhere", ["web.bin"], "joined before")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "train").symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(prepare, "check_output", lambda cfg, inputs: {})
    make(*files(corpus[0], tmp_path / "out"))
    assert contents(tmp_path / "elsewhere")["web.bin"] == contents(corpus[1])["train/web.bin"]


def test_what_the_vocabulary_is_trained_on(tmp_path):
    """As many bytes as asked for, of each domain its share, and nothing that is held out."""
    for domain in "abc":
        write_lines(tmp_path / domain / "x.jsonl", [f"{domain}{i:03}" * 20 for i in range(200)])
    cfg = prepare.PrepareConfig("files", input_dir=str(tmp_path), bpe_bytes=9000)
    found = list(prepare.train_texts(InThisProcess(), cfg, texts.find_inputs(cfg)[0]))
    assert Counter(text[0] for text in found) == {"a": 38, "b": 38, "c": 38}  # of 80 bytes
    assert {text[1:4] for text in found}.isdisjoint(["001", "021"])


def test_what_the_input_lacks_is_said(tmp_path):
    write_lines(tmp_path / "in" / "web" / "a.jsonl", sentences(40))
    said = make(*files(tmp_path / "in", tmp_path / "out", "--tokens=1e6", "--val_tokens=1e6", "--tokenizer=bpe:60000"))
    assert "note: the input ended before web's 1,000,000 tokens" in said
    assert re.search("note: web has only [0-9]+ of the 1,000,000 validation tokens", said)
    assert re.search(r"too short for a vocabulary of 60,000; the vocabulary has [0-9,]+\n", said)
    unknown = files(tmp_path / "in", tmp_path / "x", "--mixture={'wep': 1}")
    refused(call(*unknown), "names domain 'wep', but the input has web")


def slimpajama(folder):
    """Both splits of three of SlimPajama's sets, and a document that quotes an end-of-text token."""
    names = [f"RedPajama{name}" for name in ("C4", "Book", "Github")]
    for split, file, n in (("train", "example_train_0", 300), ("validation", "example_holdout_0", 30)):
        for chunk in (1, 2):
            found = ["a<|endoftext|>b", *sentences(n - 1, chunk, 30)]
            rows = [{"text": text, "meta": {"redpajama_set_name": names[i % 3]}} for i, text in enumerate(found)]
            write_lines(folder / split / f"chunk{chunk}" / f"{file}.jsonl.zst", rows)
    write_lines(folder / "test" / "chunk1" / "example_holdout_0.jsonl.zst", ["held out for ever"])
    return folder


def test_slimpajama_layout_budget_and_mixture(tmp_path):
    folder, out = slimpajama(tmp_path / "in"), tmp_path / "out"
    mixture = "--mixture={'C4': 3, 'Book': 1}"
    said = make("slimpajama", f"--input_dir={folder}", f"--out_dir={out}", mixture, "--tokens=8e3", *BPE)
    manifest = load_manifest(out)
    assert manifest["mixture"] == {"C4": 0.75, "Book": 0.25} and "ended" not in said
    train, val = manifest["splits"]["train"], manifest["splits"]["val"]
    assert sorted(train) == sorted(val) == ["Book", "C4"] and val["C4"]["documents"] == 20
    assert 6000 <= train["C4"]["tokens"] < 6200 and 2000 <= train["Book"]["tokens"] < 2200
    assert "a<|endoftext|>b" in decoded(out, "val", "C4")
    said = make("slimpajama", f"--input_dir={folder}", f"--out_dir={tmp_path / 'all'}", "--val_tokens=40", *BPE)
    assert "the input ended" in said and "no training text for domain ArXiv" in said
    manifest = load_manifest(tmp_path / "all")
    assert manifest["mixture"] == pytest.approx({"C4": 0.2 / 0.35, "Github": 0.1 / 0.35, "Book": 0.05 / 0.35})
    assert all(40 <= about["tokens"] < 400 for about in manifest["splits"]["val"].values())


def test_hub_stream_gives_the_same_documents(tmp_path):
    """Without a hub: the library streams a local folder in the same way."""
    folder, found = str(slimpajama(tmp_path / "in")), {}
    for name in ("input_dir", "hub_id"):
        cfg = prepare.PrepareConfig("slimpajama", **{name: folder})
        assert texts.find_inputs(cfg)[1] == 0  # both have a validation split
        found[name] = sorted((source.split, docs) for source, docs in documents(cfg))
    assert found["hub_id"] == found["input_dir"] and len(found["hub_id"]) > 600


def test_hub_out_of_reach(tmp_path, monkeypatch):
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(pytest.importorskip(module), "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for words, says in ((BPE, ["cerebras/SlimPajama-627B", "--input_dir"]), ((), ["neox", "--tokenizer_file"])):
        refused(call("slimpajama", f"--out_dir={tmp_path / 'out'}", *words), *says)
    assert contents(tmp_path / "out") == {}


def test_refusals(tmp_path, monkeypatch):
    for words, fragments in (
        (["files"], ["--input_dir"]),
        (["files", "--input_dir=no/such"], ["no/such does not exist"]),
        (["slimpajama", "--input_dir=tests"], ["no training text in tests", "train/", "validation/", ".jsonl", ".zst"]),
        (["books"], ["'pysource' or 'slimpajama' or 'files'"]),
        (["pysource", "--tokenizer=bpe:70000"], ["unknown tokenizer 'bpe:70000'", "257", "65,536", "uint16"]),
        (["pysource", "--val_fraction=0.7"], ["val_fraction=0.7 must be at most 0.5"]),
        (["pysource", "--mixture={'stdlib': -1}"], ["weights above 0"]),
        (["pysource", "--mixture={'a': 1e308, 'b': 1e308}"], ["weights add up to infinity"]),
        (["pysource", "--domains=one"], ["--domains is for files, so here it would do nothing; leave it out"]),
        (["pysource", "--text_field=body"], ["--text_field is for files and slimpajama"]),
        (["slimpajama", "--input_dir=tests", "--revision=abc"], ["--revision is for slimpajama without --input_dir"]),
        (["pysource", "--tokenizer=gpt2", "--bpe_bytes=3"], ["--bpe_bytes is for --tokenizer=bpe:<size>"]),
        (
            ["pysource", "--packages=rustbpe", "--mixture={'foo': 1}"],
            ["mixture names domain 'foo', but the input has", "prose"],
        ),
        (["pysource", "--bpe_bytes=0"], ["bpe_bytes=0 must be at least 1"]),
        (["--input_dir=tests"], ["pysource reads installed packages", "begin with files"]),
        (["files", "--input_dir=requirements.txt", "--val_fraction=0"], ["train.py needs validation text"]),
    ):
        refused(in_process(prepare, f"--out_dir={tmp_path / 'out'}", *words, cwd=ROOT), *fragments)
        assert not (tmp_path / "out").exists(), words
    write_lines(tmp_path / "in" / "a.jsonl.zst", ["a"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(call(*files(tmp_path / "in", tmp_path / "out")), "pip install pyarrow")


def test_workers_import_nothing_heavy():
    code = "import sys, prepare; print({'torch', 'datasets', 'pyarrow', 'tqdm'} & set(sys.modules))"
    result = finished([sys.executable, "-c", code], cwd=ROOT)
    assert result.stdout == "set()\n", result


def test_docstrings_come_out_of_code(tmp_path):
    source = '"""Módule.\n\n   More."""\nimport os\n\nclass A:\n    "Class é."\n    x = 1\n\ndef f(): "1."; return 2\n'
    source += 'if x:\n    async def g():\n        """Only."""\ny = """no docstring"""\n'
    code, prose = texts.split_docstrings(source)
    assert prose == "Módule.\n\nMore.\n\nClass é.\n\n1.\n\nOnly."
    right = "import os\n\nclass A:\n    x = 1\n\ndef f(): ...; return 2\nif x:\n    async def g():\n        ...\n"
    assert code == right + 'y = """no docstring"""\n'
    assert texts.split_docstrings("def broken(") == ("def broken(", "")
    assert texts.split_docstrings('"""All."""') == ("", "All.")
    (tmp_path / "a.py").write_text("# coding: rot13\n")  # no encoding of text: the file is left out
    assert texts.python_documents(tmp_path / "a.py", "code") == []


def test_pysource(tmp_path, monkeypatch):
    """Of a small environment: what is left out, what the seed orders, and code apart from its docstrings."""
    for name, text in {
        "os.py": '"""Doc."""\nimport sys\n', "test/t.py": "test = 1\n", "site-packages/a/x.py": "x = 1\n",
        "site-packages/b/copy.py": "x = 1\n", "site-packages/b/_vendor/y.py": "y = 1\n",
        "site-packages/torch/z.py": "z = 1\n", "site-packages/none.py": "", "site-packages/table.py": "9" * 1_000_001,
    }.items():  # fmt: skip
        write_files(tmp_path, [name], text)
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site-packages")])

    def names(**settings):
        return [i.name for i in texts.find_inputs(prepare.PrepareConfig("pysource", **settings))[0]]

    orders = {tuple(names(seed=seed)) for seed in range(9)}
    assert len(orders) > 1 and {tuple(sorted(order)) for order in orders} == {("a/x.py", "os.py", "torch/z.py")}
    assert set(names(packages=("b", "torch"))) == {"b/copy.py", "os.py", "torch/z.py"}  # a's copy is out
    with pytest.raises(UserError, match="no package 'os.py' is installed"):  # it is of the standard library
        names(packages=("os.py",))
    found = [doc for _, docs in documents(prepare.PrepareConfig("pysource")) for doc in docs]
    right = [("packages", "x = 1\n"), ("prose", "Doc."), ("stdlib", "import sys\n"), ("torch", "z = 1\n")]
    assert sorted(found) == right


# ---- what users bring


def inputs_of(folder):
    """{name: (split, domain)} of the files that `files` reads."""
    found = texts.find_inputs(prepare.PrepareConfig("files", input_dir=str(folder)))[0]
    return {source.name: (source.split, source.domain) for source in found}


def test_a_users_own_splits(tmp_path, capsys):
    right = {
        "train-00000-of-00001.parquet": ("train", "text"), "validation-00000-of-00001.parquet": ("val", "text"),
        "valentines.txt": ("train", "text"), "web/training.txt": ("train", "web"), "web/VAL/a.txt": ("val", "web"),
        "dev/law/a.txt": ("val", "law"), "train/law/values/a.txt": ("train", "law"), "b/testament.txt": ("train", "b"),
        "c4-validation.00000-of-00008.jsonl": ("val", "text"), "dev-clean/1/a.txt": ("val", "1"),
    }  # fmt: skip
    write_files(tmp_path, [*right, "test-00000-of-00001.parquet", "web/test/a.txt", "ptb.test.txt"])
    assert inputs_of(tmp_path) == right
    assert capsys.readouterr().out.splitlines() == [
        "left out: ptb.test.txt and 2 more (3 in a test split)",
        "held out: c4-validation.00000-of-00008.jsonl and 4 more, the input's own validation split, and nothing else",
    ]


def test_names_that_mean_no_split_where_nothing_is_called_train(tmp_path):
    names = ["dev-notes.txt", "eval/report.txt", "test_of_time.txt", "val-de-loire.txt", "train-spotting.md"]
    write_files(tmp_path, [*names, "val.txt"])
    assert [name for name, (split, _) in inputs_of(tmp_path).items() if split == "val"] == ["val.txt"]


def test_which_files_are_read(tmp_path, capsys):
    read = ["a.txt", "B.TXT", "c.json", "d.ndjson", "e.JSONL.GZ", "poems/f.txt.zst", "g.v2.jsonl.bz2"]
    hidden = ["poems/.ipynb_checkpoints/a.txt", ".git/description.txt", "__MACOSX/a.txt", ".h.txt"]
    write_files(tmp_path / "in", [*read, *hidden, "x.csv", "y.md", "y2.md", "README", "z.tar.gz", "info.json"])
    (tmp_path / "in" / "c.json").write_text('{"id": 1, "text" : "a"}')
    write_lines(tmp_path / "in/poems/f.txt.zst", ["a"])
    (tmp_path / "in" / "info.json").write_text('{"features": {"text": {"dtype": "string"}}}')
    write_files(tmp_path / "elsewhere", ["linked.txt"])
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "up").symlink_to(tmp_path / "in")  # a loop
    assert set(inputs_of(tmp_path / "in")) == {*read, "link/linked.txt"}
    said = "README (1 without a suffix)|info.json (1 .json without 'text')|x.csv (1 .csv)|y.md and 1 more (2 .md)"
    assert capsys.readouterr().out.splitlines() == [
        f"left out: {one}" for one in f"{said}|z.tar.gz (1 .tar.gz)".split("|")
    ]
    (tmp_path / "in" / "broken.txt").symlink_to("nowhere")
    with pytest.raises(UserError, match="broken.txt is a broken link"):
        inputs_of(tmp_path / "in")


@pytest.mark.parametrize("where", ["read_batch", "Placement.add"])
def test_ctrl_c_is_heard_whatever_the_main_process_is_doing(where, tmp_path, monkeypatch):
    said, stopped = [], []

    def stop(*_):
        raise KeyboardInterrupt

    write_files(tmp_path / "in", ["a.txt"])
    monkeypatch.setattr(InThisProcess, "shutdown", lambda self, cancel_futures: stopped.append(cancel_futures))
    monkeypatch.setattr(prepare, "heard", said.append)
    monkeypatch.setattr(f"prepare.{where}", stop)
    result = call(*files(tmp_path / "in", tmp_path / "out"))
    assert result.returncode == 130 and len(said) == 1 and stopped == [True]


def test_workers_leave_ctrl_c_to_the_main_process():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), prepare.start_worker) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN


def lines_of(rows):
    return "".join(json.dumps({"text": row}, ensure_ascii=False).replace(": ", ":\r") + "\n" for row in rows)


def parquet_of(**columns):
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file, row_group_size=40)
    return file.getvalue()


ROWS = [f"{text}, 東京\u2028\ufffd" for text in sentences(90)]
FORMS = {
    "joined.jsonl": b"".join(lines_of([row]).encode("utf-8-sig") for row in ROWS),  # marks in the middle
    "b.jsonl": lines_of(ROWS).replace("\n", "\r\n").encode("utf-16"),
    "c.ndjson.gz": gzip.compress(lines_of(ROWS[:9]).encode()) + gzip.compress(lines_of(ROWS[9:]).encode()),
    "d.json": json.dumps([{"text": row} for row in ROWS], indent=1).encode("utf-32"),
    "e.JSON.bz2": bz2.compress(lines_of([*ROWS, "", None]).encode()),
    "surrogate.jsonl": lines_of(ROWS).replace("\ufffd", "\\ud800").encode(),  # half a pair is no text
    "f.parquet": parquet_of(text=ROWS, id=range(90)),
    "binary.parquet": parquet_of(text=[row.encode() for row in ROWS]),
    "column.parquet": parquet_of(body=ROWS),
}


@pytest.mark.parametrize("name", FORMS)
def test_formats_and_encodings(tmp_path, name):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(FORMS[name])
    make(*files(tmp_path / "in", tmp_path / "out", *["--text_field=body"] * name.startswith("column")))
    found = decoded(tmp_path / "out", "val", "text") + decoded(tmp_path / "out", "train", "text")
    assert sorted(found) == sorted(ROWS)


BAD = {
    "a.txt": ("plain text".encode("utf-16-le"), "a.txt, item 1 is damaged or not UTF-8 (ValueError: it contains NUL"),
    "b.txt": (b"caf\xe9", "b.txt, item 1 is damaged or not UTF-8"),
    "c.jsonl": (b'{"text": "a"}\n{"text": "caf\xe9"}\n', "c.jsonl, line 2 is damaged"),
    "d.jsonl": (b'{"text": ["a"]}', "d.jsonl, line 1 is damaged or not an object with text in 'text'"),
    "e.txt": (b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer, not the file; run `git"),
    "f.jsonl": (b'{"text": "a"}\n{"text": "torn', "f.jsonl, line 2 is damaged"),
    "g.jsonl": (b'{"text": "a"}\n' + b"[" * 100_000, "g.jsonl, line 2 is damaged"),
    "h.jsonl": (b'{"body": "a", "id": 1}', "(ValueError: its fields are body, id); repair it or set --text_field"),
    "i.json": (b'[{"text": "a"}, 2]', "i.json, item 2 is damaged or not an object with text in 'text'"),
    "j.jsonl.gz": (gzip.compress(lines_of(ROWS).encode())[:-20], "j.jsonl.gz is damaged"),
    "k.jsonl.zst": (zstandard.compress(lines_of(ROWS).encode())[:-1], "k.jsonl.zst is damaged"),
    "m.parquet": (b"PAR1 torn", "m.parquet is damaged"),
    "n.jsonl.gz": (b"", "n.jsonl.gz is damaged or not a text file (ValueError: it is empty"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_no_text(tmp_path, name):
    (tmp_path / name).write_bytes(BAD[name][0])
    refused(call(*files(tmp_path, tmp_path / "out")), BAD[name][1])


def test_an_edited_file_is_another_input(tmp_path, monkeypatch):
    """Even of the same size. A copy of the input is the same one. What is too large to read twice has its time."""
    out = tmp_path / "in" / "out"  # the result is no input
    text, words = "\n".join(sentences(300)), files(tmp_path / "in", out)
    write_files(tmp_path, ["in/a.txt", "copy/a.txt"], text)
    make(*words)
    for folder in ("in", "copy"):
        said = make(*files(tmp_path / folder, out))
        assert "is already complete" in said and "left out" not in said
    write_files(tmp_path / "in", ["a.txt"], text.replace("value", "VALUE"))
    refused(call(*words), "holds different data (input files")
    shutil.rmtree(out)
    monkeypatch.setattr(prepare, "CONTENT_BYTES", 0)
    make(*words)
    os.utime(tmp_path / "in" / "a.txt", (0, 0))
    refused(call(*words), "holds different data (input files")


def test_no_document_is_in_both_splits(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(lines_of(sentences(33)))
    assert "2 documents were left out of train" in make(*files(tmp_path, tmp_path / "out"))
    val, train = (decoded(tmp_path / "out", split, "text") for split in ("val", "train"))
    assert len(val) == 2 and not set(val) & set(train) and {*val, *train} == set(sentences(33))


def test_tokens_are_shared_by_the_domains(tmp_path):
    for domain, n in (("law", 500), ("med", 500), ("web", 250)):
        write_lines(tmp_path / domain / "all.jsonl", sentences(n, seed=n))
    assert "split by the sizes of the domains' files" in make(*files(tmp_path, tmp_path / "out", "--tokens=9000"))
    train = load_manifest(tmp_path / "out")["splits"]["train"]
    assert [round(train[domain]["tokens"] / 1800) for domain in ("law", "med", "web")] == [2, 2, 1]


LINES = [f"line {i}" for i in range(500)]
CUTS = {  # a text, and the characters and the end of its pieces: of 100, and what is left of their last line
    "line feed": ("\n".join(LINES), range(101, 110), "\n"),
    "old Mac": ("\r".join(LINES), range(101, 110), "\r"),
    "DOS": ("\r\n".join(LINES), range(101, 111), "\r\n"),
    "no lines": (" ".join(LINES), [100], ""),
    "as long again": (f"{199 * 'x'}\n{50 * 'y'}", [200], "\n"),
    "as long again, old Mac": (f"{199 * 'x'}\r{50 * 'y'}", [200], "\r"),
}


@pytest.mark.parametrize("name", CUTS)
def test_where_a_text_is_cut(name, tmp_path):
    """At the end of a line. Where there is none for as long again, anywhere."""
    text, lengths, end = CUTS[name]
    (tmp_path / "a.txt").write_bytes(text.encode())
    *pieces, last = texts.read_text(texts.Input("a.txt", 0, "train", "text", tmp_path / "a.txt", piece=100))
    assert "".join([*pieces, last]) == text and pieces
    assert all(len(piece) in lengths and piece.endswith(end) for piece in pieces)


SENTENCES = ("It was a dark and stormy night. ", "Ночь была тёмная. ", "那是一个风雨交加的夜晚。")
WRITTEN = {"UTF-8": ("utf-8", ".txt"), "UTF-16": ("utf-16", ".txt"), "packed": ("utf-8", ".txt.gz")}


@pytest.mark.parametrize("lines", [1, 30, 10**9], ids=["short lines", "paragraphs", "one line"])
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("size", [100_000, 400_000, 800_000, 1_400_000, 2_000_000])
@pytest.mark.parametrize("sentence", SENTENCES, ids=["English", "Russian", "Chinese"])
def test_what_is_held_out_does_not_depend_on_the_script(sentence, size, written, lines, tmp_path):
    """Nor on how the text is written, or where its lines end: 4 to 7 %."""
    encoding, suffix = WRITTEN[written]
    n = size // len(sentence.encode())
    text = "".join(f"{i}{sentence}" + "\n" * (i % lines == lines - 1) for i in range(n))
    content = text.encode(encoding)
    (tmp_path / f"a{suffix}").write_bytes(gzip.compress(content, 1) if suffix.endswith("gz") else content)
    cfg = prepare.PrepareConfig("files", input_dir=str(tmp_path))
    placement, found = prepare.Placement(cfg, []), [docs for _, docs in documents(cfg)]
    assert "".join(piece for ((_, piece),) in found) == text
    held_out = sum(len(docs[0][1]) for docs in found if placement.is_held_out(docs))
    assert 0.04 < held_out / len(text) < 0.07


@pytest.mark.parametrize(("size", "fraction"), [(2_000, 0.05), (40_000, 0.05), (100_000, 0.01), (400_000, 0.01)])
def test_the_share_of_a_small_text_that_is_held_out(tmp_path, size, fraction):
    (tmp_path / "a.txt").write_bytes("\n".join(sentences(9000, size=9)).encode()[:size].ljust(size))
    make(*files(tmp_path / "a.txt", tmp_path / "out", f"--val_fraction={fraction}"))
    val = load_manifest(tmp_path / "out")["splits"]["val"]["text"]
    assert 0.9 * fraction < val["bytes"] / size < 2.5 * fraction


def test_pieces_of_a_text_do_not_depend_on_rows_beside_it(tmp_path):
    cfg = prepare.PrepareConfig("files", input_dir=str(tmp_path))
    write_files(tmp_path, ["d/a.txt"], "\n".join(sentences(9000, size=9))[:40_000])
    alone = [source.piece for source in texts.find_inputs(cfg)[0]]
    write_files(tmp_path, ["d/b.jsonl"], lines_of(["م" * 300] * 100))
    assert [source.piece for source in texts.find_inputs(cfg)[0] if source.is_txt] == alone == [2000]


def test_data_that_train_would_refuse_is_not_called_ready(tmp_path):
    """A domain with nothing to hold out leaves the mixture, or the domains become one."""
    for domain, n in (("law", 1), ("web", 20)):
        write_lines(tmp_path / "in" / domain / "all.jsonl", sentences(n))
    said = make(*files(tmp_path / "in", tmp_path / "out"))
    assert "note: no validation text for domain law, so the mixture leaves it out" in said
    assert "note: web is short: train.py needs a --block_size of at most" in said
    assert Corpus(tmp_path / "out", 16).domains == ["web"]
    few = make(*files(tmp_path / "in", tmp_path / "one", "--domains=one", "--val_fraction=0.01"))
    assert "of text is held out: it has few documents" in few
    assert Corpus(tmp_path / "one", 16).domains == ["text"]
    few = files(tmp_path / "in" / "law", tmp_path / "x")
    refused(call(*few), "too few different documents in a domain")


def test_validation_text_of_other_domains_is_refused_at_once(tmp_path):
    write_files(tmp_path / "in", ["web/a.txt", "books/b.txt", "val.txt"])
    words = files(tmp_path / "in", tmp_path / "out")
    refused(call(*words), "the validation text is from text, and the training text from", "web")
    assert not (tmp_path / "out").exists()


def test_input_inside_the_output_is_refused(tmp_path):
    write_files(tmp_path, ["texts/raw/a.txt"])
    for inside in ("texts/raw", "texts", "texts/raw/a.txt"):
        said = call("files", f"--input_dir={tmp_path / inside}", f"--out_dir={tmp_path / 'texts'}", *BPE)
        refused(said, f"{tmp_path / inside} is in --out_dir")


def test_an_empty_validation_split_is_said(tmp_path):
    write_lines(tmp_path / "in" / "a.jsonl", sentences(20))
    write_lines(tmp_path / "in" / "val.jsonl", [])
    refused(call(*files(tmp_path / "in", tmp_path / "out")), "the input has a validation split without text")


def test_files_of_others_stay(tmp_path):
    """Also in a folder whose name begins as ours."""
    write_files(tmp_path / "out", ["vectors/a.bin"])
    write_lines(tmp_path / "in" / "a.jsonl", sentences(20))
    make(*files(tmp_path / "in", tmp_path / "out"))
    assert (tmp_path / "out/vectors/a.bin").exists()


def test_a_packed_parquet_is_left_out(tmp_path):
    write_files(tmp_path / "in", ["b.parquet.gz"])
    write_lines(tmp_path / "in" / "a.jsonl", sentences(20))
    assert "left out: b.parquet.gz (1 .parquet.gz)" in make(*files(tmp_path / "in", tmp_path / "out"))


def test_a_vocabulary_is_used_again(corpus, tmp_path):
    _, out = corpus
    write_files(tmp_path / "in", ["a.txt"], "\n".join(sentences(99, seed=7)))
    words = ["files", f"--input_dir={tmp_path / 'in'}", f"--out_dir={tmp_path / 'out'}"]
    refused(call(*words, f"--tokenizer_file={out}", "--tokenizer=bpe:400"), "is the vocabulary bpe:300, not bpe:400")
    file = shutil.copy(out / "tokenizer.json", tmp_path)
    make(*words, f"--tokenizer_file={file}")
    assert Tokenizer.load(tmp_path / "out/tokenizer.json").hash == Tokenizer.load(out / "tokenizer.json").hash
    byte_tokenizer(PATTERN).save(file)
    prepare.read_vocabulary.cache_clear()
    refused(call(*words, f"--tokenizer_file={file}"), "holds different data (tokenizer_file")
