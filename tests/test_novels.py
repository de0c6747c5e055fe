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
    return tmp_path / "clone"


def called(*words):
    return in_process(novels, *words)


def test_plain_text(clone):
    path = clone / "level1/a.xml"
    path.write_bytes(("\ufeff" + TEI).replace("\n", "\r\n").encode())
    assert (
        novels.plain_text(path)
        == "A Tale\n\nIt was late & dark, so he slept.\n\nA line,\n\nanother.\n\nCaf\u00e9 \u2014 open.\n"
    )


def test_every_16th_novel_is_held_out(clone, tmp_path):
    for i in range(25):
        (clone / f"level1/n{i:02}.xml").write_text(TEI.replace("A line", f"Line {i}"), encoding="utf-8")
    (clone / f"level1/{novels.LEFT_OUT}.xml").write_text(TEI, encoding="utf-8")
    done = called(clone, tmp_path / "out")
    assert done.returncode == 0 and "note: our records come from 99 novels" in done.stdout
    assert sorted(path.stem for path in (tmp_path / "out/val").rglob("*.txt")) == ["n07", "n23"]
    assert len(list((tmp_path / "out/train/eltec").iterdir())) == 23
    assert "Line 7," in (tmp_path / "out/val/eltec/n07.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["hello", "<a>", "<a/>", "", TEI.replace("</teiHeader>", "")])
def test_a_file_that_is_no_tei(text, clone, tmp_path):
    (clone / "level1/a.xml").write_text(TEI, encoding="utf-8")
    (clone / "level1/b.xml").write_text(text)
    refused(called(clone, tmp_path / "out"), "level1/b.xml is damaged or not a novel of the collection, in TEI's XML")
    assert not (tmp_path / "out").exists()


def test_folders_that_are_refused(clone, tmp_path):
    refused(called(clone, tmp_path / "out"), "clone/level1 has no .xml files; clone https://github.com")
    refused(called(tmp_path / "nowhere", tmp_path / "out"), "nowhere/level1 has no .xml files")
    refused(called(clone), "name the clone and a new folder")
    (clone / "level1/a.xml").write_text(TEI, encoding="utf-8")
    refused(called(clone, clone), "clone exists; name a new folder")
