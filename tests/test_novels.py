"""examples/novels.py: text from a small TEI file of our own making, and which novels are held out."""

import pytest
from conftest import in_process, refused

from examples import novels

TEI = """<?xml version="1.0"?>
<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><p>About the file.</p></teiHeader>
<text><front><head>A  <hi rend="b">Tale</hi></head></front><body><pb n="1"/>
<div><p>It was<pb n="2"/>late &amp; dark,
   so he s<emph>lep</emph>t.</p><label>not this</label><l>A line,</l><l>another.</l><lg><head/></lg>
<p>Caf\u00e9 &#8212; open.</p></div></body></text></TEI>
"""


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "clone/level1").mkdir(parents=True)
    (tmp_path / "clone/level1/a.xml").write_text(TEI, encoding="utf-8")
    return tmp_path / "clone"


def test_plain_text(clone):
    path = clone / "level1/a.xml"
    path.write_bytes(("\ufeff" + TEI).replace("\n", "\r\n").encode())
    paragraphs = ["A Tale", "It was late & dark, so he slept.", "A line,", "another.", "Caf\u00e9 \u2014 open.\n"]
    assert novels.plain_text(path) == "\n\n".join(paragraphs)


def test_every_16th_novel_is_held_out(clone, tmp_path):
    for i in range(24):
        (clone / f"level1/n{i:02}.xml").write_text(TEI.replace("A line", f"Line {i}"), encoding="utf-8")
    (clone / f"level1/{novels.LEFT_OUT}.xml").write_text(TEI, encoding="utf-8")
    done = in_process(novels, clone, tmp_path / "out")
    assert done.returncode == 0 and "note: our records come from 99 novels" in done.stdout
    assert sorted(path.stem for path in (tmp_path / "out/val").rglob("*.txt")) == ["n06", "n22"]
    assert len(list((tmp_path / "out/train/eltec").iterdir())) == 23
    assert "Line 6," in (tmp_path / "out/val/eltec/n06.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["hello", "<a>", "<a/>", "", TEI.replace("</teiHeader>", "")])
def test_a_file_that_is_no_tei(text, clone, tmp_path):
    (clone / "level1/b.xml").write_text(text)
    what = "damaged or not a novel of the collection, in TEI XML"
    refused(in_process(novels, clone, tmp_path / "out"), f"level1/b.xml is {what}")
    assert not (tmp_path / "out").exists()


def test_folders_that_are_refused(clone, tmp_path):
    for words, says in (
        ([tmp_path, tmp_path / "out"], "level1 has no .xml files; clone https://github.com"),
        ([clone], "name the clone and a new folder"),
        ([clone, clone], "clone exists; name a new folder"),
    ):
        refused(in_process(novels, *words), says)
