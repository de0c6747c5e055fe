"""English novels as plain text, from a clone of COST-ELTeC/ELTeC-eng: 93 to train on, 6 held out.

    git clone https://github.com/COST-ELTeC/ELTeC-eng && git -C ELTeC-eng checkout 3db3b67
    python -m examples.novels ELTeC-eng texts
    python prepare.py files --input_dir=texts --tokenizer=bpe:2048 --out_dir=data/english

The European Literary Text Collection, 1840 to 1920: its texts are in the public domain, its markup is CC BY 4.0
(https://doi.org/10.5281/zenodo.4662490). Our English runs depend on this exact text, so leave the extraction as it is.
"""

import html
import re
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from common.files import reading, write_text
from common.report import progress
from configurator import UserError, check_fields, run, setting

LEFT_OUT = "ENG18460_Reynolds"  # the copy that we trained on lacked it: a file of over 4 MB


@dataclass
class NovelsConfig:
    folders: tuple[str, ...] = setting((), "the clone, and a new folder for the texts", positional=True)

    def __post_init__(self):
        check_fields(self)
        if len(self.folders) != 2:
            raise UserError("name the clone and a new folder: `python -m examples.novels ELTeC-eng texts`")


def plain_text(path):
    """The paragraphs, headings and lines of verse in the <text> of a TEI file, with an empty line between them.

    Where one of them is inside another, the first end tag closes both, and the outer one's text after it is dropped.
    That is 0.05 % of the collection, mostly what follows a letter that somebody quotes.
    """
    with reading(path, "a novel of the collection, in TEI XML", "clone it again"):
        xml = path.read_text(encoding="utf-8-sig")
        ElementTree.fromstring(xml)
        body = re.search(r"<text\b.*</text>", xml, re.DOTALL)[0]
        body = re.sub(r"<(pb|lb|milestone|gap)\b[^>]*>", " ", body)  # a break becomes a space
        parts = re.findall(r"<(?:p|head|l)\b[^>]*>(.*?)</(?:p|head|l)>", body, re.DOTALL)
        words = (html.unescape(re.sub(r"<[^>]+>", "", part)).split() for part in parts)
        return "\n\n".join(" ".join(part) for part in words).strip() + "\n"


def main(cfg: NovelsConfig):
    clone, out = map(Path, cfg.folders)
    files = [path for path in sorted(clone.glob("level1/*.xml")) if path.stem != LEFT_OUT]
    if not files:
        raise UserError(f"{clone}/level1 has no .xml files; clone https://github.com/COST-ELTeC/ELTeC-eng")
    if out.exists():
        raise UserError(f"{out} exists; name a new folder, because prepare.py would also read what is there")
    with progress("novels", len(files), "novel") as bar:
        texts = {}
        for path in files:
            texts[path.stem] = plain_text(path)
            bar.update()
    sizes = {"train": [], "val": []}
    for i, (name, text) in enumerate(texts.items()):
        split = "val" if i % 16 == 7 else "train"
        write_text(out / split / "eltec" / f"{name}.txt", text)
        sizes[split].append(len(text.encode()))
    for split, n_bytes in sizes.items():
        print(f"{out}/{split}: {len(n_bytes)} novels, {sum(n_bytes):,} bytes")
    if len(texts) != 99:
        print("note: our records come from 99 novels, so these texts are not the same")


if __name__ == "__main__":
    run(main, __doc__)
