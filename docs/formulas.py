"""Formulas as MathML, and the font that draws their brackets, arrows and primes everywhere.

Browsers draw MathML well with a font that has a MATH table, which many systems lack: brackets then
do not grow and arrows fall on their letters. The site brings the signs that it needs of STIX Two
Math (SIL Open Font License), from the package ziamath.
"""

import html
import re
from importlib.resources import files
from io import BytesIO

import latex2mathml.converter
from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont

RANGES = (  # of Unicode
    (0x20, 0x7E),  # digits, Latin letters and signs
    (0x300, 0x30C),  # accents
    (0x391, 0x3F5),  # Greek
    (0x2010, 0x2034),  # punctuation and primes
    (0x2102, 0x2124),  # double-struck letters
    (0x2190, 0x22FF),  # arrows and operators
    (0x2308, 0x230B),  # floor and ceiling
    (0x239B, 0x23B3),  # pieces of high brackets
    (0x27E8, 0x27FA),
    (0x1D434, 0x1D467),  # italic Latin
    (0x1D6E2, 0x1D71B),  # italic Greek
)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
NAME = "<mi>(?:log|exp|cos|sin|tanh)</mi>"
SPACE = '<mspace width="0.17em" />'


def drawn(text: str) -> str:
    r"""A page's text with its formulas, \(...\) and \[...\], as browsers draw them."""
    return FORMULA.sub(_formula, text)


def _formula(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    text = latex2mathml.converter.convert(html.unescape(found[2]), display=display)
    text = text.replace("<mi>&#x02032;</mi>", "<mo>&#x02032;</mo>")
    text = re.sub(rf"(?<=</mi>)(?={NAME})", SPACE, text)
    return re.sub(rf"{NAME}(?=<m[in]>)", rf"\g<0>{SPACE}", text)


def font() -> bytes:
    """The font, reduced to `RANGES`."""
    whole = BytesIO((files("ziamath.fonts") / "STIXTwoMath-Regular.ttf").read_bytes())
    reduced = TTFont(whole)
    options = Options(layout_features=["ssty", "dtls"], name_IDs=["*"])
    subsetter = Subsetter(options)
    subsetter.populate(unicodes=[code for low, high in RANGES for code in range(low, high + 1)])
    subsetter.subset(reduced)
    written = BytesIO()
    reduced.save(written)
    return written.getvalue()
