"""Make the carried fonts: a subset of Noto Sans CJK SC with the glyphs that the project's words use.

    python tools/font.py NotoSansCJK-Regular.ttc NotoSansCJK-Bold.ttc

The two collections are in Debian's package fonts-noto-cjk and at github.com/notofonts/noto-cjk (OFL 1.1).
Needed after a change of pdlib/words that brings a new character; a test says when.
"""

from __future__ import annotations

import sys

from fontTools import subset
from fontTools.ttLib import TTCollection

from pdlib import paths, words

FAMILY = "pdlib Sans"  # a name of its own: a Noto installed on the system must never stand in for it
LATIN = "".join(map(chr, [*range(0x20, 0x7F), *range(0xA0, 0x180)])) + "–—‘’“”…‰†•−×÷·≤≥≈→←↑↓αβκλμπσΔΣ®™"


def main(collections: list[str]) -> None:
    text = LATIN + "".join(en + zh for en, zh in words.WORDS.values())
    for collection in collections:
        font = next(f for f in TTCollection(collection).fonts if f["name"].getDebugName(1) == "Noto Sans CJK SC")
        options = subset.Options(layout_features=["kern", "mark"], name_IDs=[0, 1, 2, 7, 13, 14], hinting=False)
        options.notdef_outline = True
        options.desubroutinize = True
        subsetter = subset.Subsetter(options)
        subsetter.populate(text=text)
        subsetter.subset(font)
        style = "Bold" if "Bold" in collection else "Regular"
        for record in list(font["name"].names):
            if record.nameID in (1, 2):
                record.string = FAMILY if record.nameID == 1 else style
        font["CFF "].cff.fontNames[0] = f"pdlibSans-{style}"
        top = font["CFF "].cff.topDictIndex[0]
        top.FamilyName, top.FullName = FAMILY, f"{FAMILY} {style}"
        font["head"].modified = font["head"].created  # the same bytes whenever it is made
        font.recalcTimestamp = False
        font.flavor = None
        path = paths.DATA / "fonts" / f"pdlibSans-{style}.otf"
        font.save(path)
        print(path.name, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
