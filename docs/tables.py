"""The tables of modes in docs/modes.md, and pictures of modes.

    python -m docs.tables            write the tables into the page, and draw docs/pictures/

The page holds each table between `<!--table:FIRST-->`, its first mode, and `<!--end-->`.
"""

import json
import re
from pathlib import Path

from PIL import Image

from common.files import write_text
from common.report import compact
from common.sizes import mode_table
from plot import plans
from value_modes import TABLE, ModelConfig

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/modes.md"
PLACE = re.compile(r"<!--table:([\w.]+)-->")


def with_tables(text):
    """The text of a page with its tables: each from the mode that it names to the one before the next table's, at the
    paper's 82M shape. The last column is what our small models lost or gained, "-" if we did not train that."""
    header, line, *rows = compact(mode_table(ModelConfig())).splitlines()
    row_of = dict(zip(TABLE, rows, strict=True))
    gaps = json.loads((ROOT / "results/night/gaps.json").read_text(encoding="utf-8"))
    modes, (before, *parts) = list(TABLE), PLACE.split(text)
    firsts = parts[::2]
    ends = [*map(modes.index, firsts[1:]), len(modes)]
    for first, part, end in zip(firsts, parts[1::2], ends, strict=True):
        shown = modes[modes.index(first) : end]
        table = [f"{header}our loss|", f"{line}---:|", *(f"{row_of[mode]}{gaps.get(mode, '-')}|" for mode in shown)]
        before += f"<!--table:{first}-->\n\n" + "\n".join(table) + "\n\n<!--end-->" + part.split("<!--end-->", 1)[1]
    return before


PICTURES = {  # docs/pictures/NAME.png: the modes that it shows
    "plan": "vanilla resformer svformer neutreno",
    "resformer": "resformer_lambda resformer_learned resformer_prev resformer_all identity cross query hidden",
    "sharing": "svformer svformer_2anchors share_k cla2 cla2_svformer gqa2 svformer_gqa4 mlkv",
    "neutreno": "resformer_neutreno denseformer denseformer_2x2 resformer_denseformer",
    "other": "resformer_head hidden_learned value_embed value_embed_unet",
    "successors": "skipv1 fusedkv_lite share_last value_embed_shared",
}


def draw_picture(name, path):
    """Draw the plans of PICTURES[name], with 4 layers."""
    plans(path, [ModelConfig(n_layer=4, value_mode=mode) for mode in PICTURES[name].split()])
    # so few colours take a third of the bytes
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
    for picture in PICTURES:
        draw_picture(picture, ROOT / f"docs/pictures/{picture}.png")
