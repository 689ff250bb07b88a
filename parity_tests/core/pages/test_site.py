"""The site builds without a warning, every link of it arrives, and no public name is left out."""

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import flax_attn
import flax_attn.parity
import flax_attn.weights
from parity_tests.core.pages.pages import ROOT

pytest.importorskip("mkdocs", reason='the site is built with the extra "docs"')
pytest.importorskip("quickjs", reason="the theme's search runs in quickjs-ng")
from parity_tests.core.pages.typed import Search

pytestmark = pytest.mark.nightly

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
READ = ("", "docs/recipes/", "docs/certificate/", "notebooks/03_looking_back_only/")
READ += ("reference/attend/", "reference/layers/", "reference/layers/state-space/")
EXPECTED = ("INFO    -  Cleaning", "INFO    -  Building", "INFO    -  Documentation built")
# Names by which people look for what this library calls otherwise.
OTHER_NAMES = {
    "SDPA": "attend",
    "MHA": "MultiHeadAttention",
    "nn.MultiheadAttention": "TransformerMultiHeadAttention",
    "MLA": "LatentAttention",
    "DSA": "IndexedSparseAttention",
    "XSA": "ExclusiveAttention",
    "CLA": "CrossLayerAttention",
    "encoder-decoder attention": "CrossAttention",
    "additive attention": "BahdanauAttention",
    "Swin attention": "WindowAttention",
    "XCA": "CrossCovarianceAttention",
    "Transformer-XL attention": "RelativeShiftAttention",
    "kernelized attention": "LinearAttention",
    "DeltaNet": "GatedDeltaAttention",
    "KDA": "KimiDeltaAttention",
    "SSM": "Mamba",
    "SSD": "Mamba2",
    "RG-LRU": "RGLRU",
    "FP8 KV cache": "Quantized",
    "M-RoPE": "Sections",
    "dynamic NTK": "DynamicScaling",
    "soft-capping": "Softcap",
}
# The pages that may come first, and what people type.
TYPED = {
    "#use-a-layer-in-a-training-step": "train; training loop",
    "docs/benchmarks/": "speed; compile time",
    "docs/certificate/": "certificate",
    "docs/course/": "exercises; solutions",
    "docs/faq/": "BERT; whisper; vision transformer",
    "docs/faq/ reference/layers/multi-head/": "encoder",
    "docs/kernels/": "GPU; TPU; cuDNN; splash attention",
    "docs/kernels/ reference/attend/": "flash attention",
    "docs/limits/": "limits",
    "docs/models/": "Hugging Face; Llama; Qwen; save model; checkpoint; attention mask",
    "docs/models/ reference/layers/latent-and-sparse/": "deepseek",
    "docs/models/ reference/weights/": "convert weights; LoRA; load model",
    "docs/moving/ docs/faq/": "torchax; equinox; Linen",
    "docs/moving/ reference/layers/multi-head/": "torch.nn.MultiheadAttention",
    "docs/moving/#from-a-torch": "state_dict",
    "docs/porting/": "port a module",
    "docs/recipes/#a-decoder": "scan; decoder",
    "docs/recipes/#attention-weights": "attention maps; visualize attention",
    "docs/recipes/#beam-search": "beam search",
    "docs/recipes/#derivatives": "jvp; Hessian; forward mode; second derivatives",
    "docs/recipes/#dropout": "dropout",
    "docs/recipes/#export": "export; ONNX",
    "docs/recipes/#generate reference/families/#flax_attn.families.generate": "generate; sampling",
    "docs/recipes/#mixed-precision": "mixed precision; bfloat16; fp16; half precision",
    "docs/recipes/#orbax": "orbax",
    "docs/recipes/#order-and-position": "position ids",
    "docs/recipes/#packed-documents reference/masks/": "packing; packed sequences; segment ids",
    "docs/recipes/#padding-masks": "padding; padding mask; left padding; key_padding_mask",
    "docs/recipes/#remat": "remat; gradient checkpointing",
    "docs/recipes/#safetensors": "safetensors",
    "docs/recipes/#speculative-rollback": "speculative decoding",
    "docs/scale/": "ring attention; tensor parallel; data parallel; shard_map; multi host; FSDP",
    "docs/silent/": "NaN; wrong output",
    "notebooks/positions/": "positional encoding; sinusoidal; learned positions",
    "reference/attend/": "attention weights; logsumexp; scaled_dot_product_attention; sink",
    "reference/caches/": "KV cache; paged attention",
    "reference/caches/#flax_attn.quantized": "quantization",
    "reference/layers/cross/": "cross attention",
    "reference/layers/grouped-query/": "GQA; multi-query attention",
    "reference/layers/linear/": "linear attention",
    "reference/masks/#flax_attn.masks.Causal": "causal mask",
    "reference/masks/#flax_attn.masks.MaskFn": "mask_mod; custom mask",
    "reference/masks/#flax_attn.masks.Window": "sliding window; local attention",
    "reference/norms/": "layernorm",
    "reference/positions/": "RoPE; YaRN; rotary embedding",
    "reference/scores/#flax_attn.scores.Alibi": "ALiBi",
    "reference/scores/#flax_attn.scores.ScoreFn": "score_mod",
    "reference/scores/#flax_attn.scores.Softcap": "softcap",
}
# Loads pages of the site in frames of two widths and says by how much they are wider. On a
# narrow one a table may be moved sideways.
PROBE = """<!doctype html><title>probe</title><pre id="said"></pre><script>
const pages = {pages}, said = document.getElementById("said");
for (const width of [480, 1280]) for (const page of pages) {{
  const frame = document.createElement("iframe");
  frame.width = width; frame.height = 900; frame.src = "/" + page;
  frame.onload = () => {{
    const tables = width < 1280 ? "html" : "html, .md-typeset__scrollwrap";
    const parts = [...frame.contentDocument.querySelectorAll(tables)];
    const beyond = parts.map(part => part.scrollWidth - part.clientWidth);
    said.append(`${{page}} ${{width}} ${{Math.max(...beyond)}}\\n`);
  }};
  document.body.append(frame);
}}
</script>"""


class Page(HTMLParser):
    """The links of a page, and the places on it that a link may name."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.places |= {known.get(name) or "" for name in ("id", "name")}
        self.links += [known[n] or "" for n in ("href", "src") if known.get(n) is not None]


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing of it."""

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(made)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # of the theme's news about itself
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith(EXPECTED)]
    assert not lines and not done.stdout, done.stderr
    return made


@pytest.fixture(scope="module")
def search(site) -> Search:
    return Search(site)


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    found = {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}
    found.pop((site / "404.html").resolve())  # its links begin with a slash, for any depth
    return found


def test_every_link_arrives_at_a_page_and_a_place_on_it(pages):
    lost, tried = [], 0
    for path, page in pages.items():
        for link in page.links:
            to, place = urldefrag(unquote(link))
            if urlsplit(link).scheme or link.startswith("//"):
                continue
            target = (path.parent / to).resolve() if to else path
            target = target / "index.html" if target.is_dir() else target
            tried += 1
            if not target.exists() or (target in pages and place not in pages[target].places):
                lost.append(f"{path}: {link}")
    assert tried > 1000 and not lost, "\n".join(lost[:20])


def test_each_part_begins_with_a_page_that_leads_to_all_of_its_pages(site):
    start = (site / "index.html").read_text()
    tabs = re.findall(r'<li class="md-tabs__item.*?<a href="([^"]+)"', start, re.DOTALL)
    assert tabs[1:] == [
        "docs/",
        "docs/course/",
        "reference/layers/",
        "docs/evidence/",
        "CONTRIBUTING/",
    ]
    for part, names in {"docs/": "faq recipes silent porting", "docs/evidence/": "trial"}.items():
        text = (site / part / "index.html").read_text()
        article = text.partition("<article")[2]
        depth = "../" * (part.count("/") - 1)
        assert all(re.search(rf'<a href="{depth}{n}/">.*?</a>: \w', article) for n in names.split())
    lessons = (site / "docs/course/index.html").read_text().partition("<article")[2]
    books = [path.parent.name for path in site.glob("notebooks/*/index.html")]
    assert len(books) == 14 and all(f"notebooks/{book}/" in lessons for book in books)
    assert f"flax_attn {flax_attn.__version__}" in start.partition("<footer")[2]


def test_the_certificates_layers_lead_to_the_reference(site):
    page = (site / "docs/certificate/index.html").read_text()
    rows = re.findall(
        r'<a [^>]*href="\.\./\.\./reference/layers/[\w-]+/#flax_attn\.layers\.(\w+)"', page
    )
    assert sorted(rows) == sorted(n for n, home in flax_attn._HOMES.items() if home == ".layers")
    assert page.index("what it holds") < page.index("AttentionPool")


def test_formulas_are_drawn_with_a_font_of_the_site(site):
    tables = pytest.importorskip("fontTools.ttLib")
    font = tables.TTFont(site / "docs/math.ttf")
    styles = (site / "docs/site.css").read_text()
    assert "MATH" in font and 'url("math.ttf")' in styles
    assert {0x2192, 0x2190, 0x2032, 0x28, 0x2211, 0x1D44E} <= {*font.getBestCmap()}


def headings(page: Path) -> list[str]:
    """The names that a page of the reference is about."""
    heading = r'<h2 [^>]*class="doc doc-heading">\s*(?:<[^>]*>)*([\w.]+)\b'
    return re.findall(heading, page.read_text())


def test_every_public_name_is_in_the_reference_once(site):
    names = {f"flax_attn.{n}" for n in flax_attn.__all__ if flax_attn._HOMES[n] != "."}
    names |= {f"flax_attn.parity.{n}" for n, x in flax_attn.parity._HOMES.items() if x != "."}
    names |= {f"flax_attn.weights.{n}" for n in flax_attn.weights._HOMES}
    pages = [*(site / "reference").rglob("index.html")]
    times = Counter(name for page in pages for name in headings(page))
    assert not names - {*times}, "docs/reference.py has a page for every public name."
    assert not [name for name, count in times.items() if count > 1]
    module = r'doc-module">\s*<h2 id="([\w.]+)"'  # not a module that has the name of its function
    modules = [name for page in pages for name in re.findall(module, page.read_text())]
    assert modules == ["flax_attn.parity.judge"]


def test_a_family_of_layers_is_a_short_page_and_the_first_page_names_each_layer(site):
    folder = site / "reference/layers"
    families = [headings(page) for page in folder.glob("*/index.html")]
    assert all(3 <= len(family) <= 8 for family in families)
    layers = {name for family in families for name in family}
    assert layers == {f"flax_attn.{n}" for n, home in flax_attn._HOMES.items() if home == ".layers"}
    row = r'<tr>\s*<td[^>]*><a [^>]*href="[\w-]+/#flax_attn\.layers\.(\w+)">'
    named = re.findall(row, (folder / "index.html").read_text())
    assert sorted(f"flax_attn.{name}" for name in named) == sorted(layers)


def test_a_layers_page_shows_its_whole_constructor_and_its_call(site):
    pages = "".join(x.read_text() for x in (site / "reference/layers").glob("*/index.html"))
    text = re.sub(r"<[^>]+>", "", pages)
    for name in [n for n, home in flax_attn._HOMES.items() if home == ".layers"]:
        layer = getattr(flax_attn, name)
        (shown,) = re.findall(rf"(?<![\w.]){name}\((\n.*?)\n\)", text, re.DOTALL)
        keywords = [*inspect.signature(layer.__init__).parameters][1:]
        assert [
            x for x in re.findall(r"^    (\w+)", shown, re.MULTILINE) if x in keywords
        ] == keywords
        assert f'id="flax_attn.layers.{name}.__call__"' in pages
        assert (f'id="flax_attn.layers.{name}.init_cache"' in pages) == hasattr(layer, "init_cache")
    hooks = re.findall(r'id="flax_attn\.layers\.\w+\.(project|forward|recur|attend_kwargs)"', pages)
    assert not hooks and "**more" not in text and "**options" not in text


def test_what_is_read_is_drawn_here(pages, site):
    for path in pages:
        text = path.read_text()
        assert not re.search(
            r"\\\(|\\\[|arithmatex", re.sub(r"<(pre|code).*?</\1>", "", text, flags=re.S)
        )
        from_elsewhere = re.findall(
            r'<(?:script|link|img)[^>]*(?:src|href)="(https?://[^"]+)', text
        )
        assert not from_elsewhere
    notebook = (site / "notebooks/03_looking_back_only/index.html").read_text()
    assert notebook.count("<math") > 10 and notebook.count("<details") > 1
    assert "&gt;&gt;&gt;" in (site / "reference/layers/grouped-query/index.html").read_text()


def test_the_search_finds_a_class_by_its_other_names(site):
    sections = json.loads((site / "search/search_index.json").read_text())["docs"]
    for other, name in OTHER_NAMES.items():
        word = re.compile(rf"Also called:[^<]*(<code>[^<]*)*(?<!\w){re.escape(other)}(?!\w)")
        hits = [section for section in sections if word.search(section["text"])]
        places = [hit["location"] for hit in hits if hit["title"] == f"flax_attn.{name}"]
        assert len(places) == 1, f"{other} should lead to {name}."
        page, place = places[0].split("#")
        assert f'id="{place}"' in (site / page / "index.html").read_text()


def test_what_people_type_leads_to_the_right_page_first(search):
    places = {words: place for place, all in TYPED.items() for words in all.split("; ")}
    first = {words: search.pages(words)[:1] for words in places}
    wrong = {w: p for w, p in first.items() if not p or not p[0].startswith((*places[w].split(),))}
    assert not wrong


def test_a_layer_is_first_for_its_name_unless_it_is_for_learning(search, site):
    folder, lost = site / "reference/layers", []
    for page in sorted(folder.glob("*/index.html")):
        for name in (heading.rpartition(".")[2] for heading in headings(page)):
            place = f"reference/layers/{page.parent.name}/#flax_attn.layers.{name}"
            if search.rank[place] < 1:
                continue
            lost += [n for n in (name, name.lower()) if search.pages(n)[:1] != [place]]
    assert not lost


def test_a_notebook_shows_text_and_no_terminal(site):
    rubbish = r"\x1b|\[\d+(;\d+)*m|\r|━|&lt;Figure|Traceback|object at 0x|it/s\]"
    for path in site.glob("notebooks/*/index.html"):
        seen = re.search(rubbish, path.read_text())
        assert not seen, f"{path.parent.name} shows {seen[0]!r}."


def test_imports_and_drawings_are_folded_and_pictures_are_not(site):
    folded = re.compile(r'<details class="code">\s*<summary>(\w+)</summary>(.*?)</details>', re.S)
    books = [path.read_text() for path in site.glob("notebooks/*/index.html")]
    cells = [
        (title, re.sub("<[^>]*>", "", cell)) for b in books for title, cell in folded.findall(b)
    ]
    assert len(cells) > 60
    for title, code in cells:
        kind = "Imports" if re.search(r"^\s*(import|from) ", code, re.MULTILINE) else "Drawing"
        assert title == kind, code
        if kind == "Drawing":
            assert re.search(r"\b(plt\.\w+|diagram|heat|looks|draw)\(", code), code
            assert not re.search(r"^(assert|print|same)\b", code, re.MULTILINE), code
    assert sum(book.count("<img") for book in books) > 50
    assert not any("<img" in cell for book in books for _, cell in folded.findall(book))
    assert all("<summary>Imports" in book for book in books)


@pytest.mark.skipif(BROWSER is None, reason="no chromium on the PATH: pages are not looked at")
def test_a_browser_reads_it_at_two_widths(site):
    (site / "probe.html").write_text(PROBE.format(pages=list(READ)))
    handler = partial(Quiet, directory=str(site))
    with ThreadingHTTPServer(("localhost", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        done = _browse(f"http://localhost:{server.server_port}/probe.html")
        server.shutdown()
    said = [
        line.rsplit(" ", 2) for line in re.findall(r"^(.* \d+ \d+)$", done.stdout, re.MULTILINE)
    ]
    assert len(said) == 2 * len(READ), done.stdout
    assert not [line for line in said if int(line[2]) > 0]
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _browse(address: str) -> subprocess.CompletedProcess[str]:
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    options += ["--virtual-time-budget=20000", "--dump-dom", address]
    return subprocess.run([BROWSER, *options], capture_output=True, text=True, timeout=120)
