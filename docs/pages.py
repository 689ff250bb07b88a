"""What the site is made of: the pages of this checkout where they lie, notebooks, the reference.

MkDocs calls these functions while it builds. Every page keeps its own path, so that a link that
works in a checkout works on the site.
"""

import re
from importlib.metadata import version
from pathlib import Path

import formulas
import nbformat
import reference
from cells import prepare
from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
# The pages of each part with a line for each, in the order in which they are read.
GUIDES = {
    "faq": "Eighteen questions: why not jax.nn, which layer for BERT, is 1e-5 a bug.",
    "recipes": "Padding, packed documents, decoding, dropout, saving: blocks that run.",
    "gallery": "Masks and scores, each drawn by the library from one line.",
    "silent": "Twenty mistakes that raise no error, and what happens to them here and elsewhere.",
    "moving": "From flax.nnx, Linen, torch and transformers to these layers.",
    "migrating": "From 0.3.0 to 0.4.0: names, and what computes something else.",
    "porting": "From a torch module that you have never seen to a port that is proven equal.",
    "mistakes": "Forty common mistakes in ports, and what the report says of each.",
    "models": "A published config.json or checkpoint, as a whole model or as layers; and generate.",
    "kernels": "Which backend computes your mask and score on CPU, GPU and TPU.",
    "scale": "Several devices: sharded batches, heads, lengths and weights.",
    "limits": "What does not work, was not tried, or is slower than elsewhere.",
}
EVIDENCE = {
    "certificate": "Every layer, the PyTorch modules that it equals, and the largest errors.",
    "contracts": "What is promised, and for each promise the test that keeps it and its last run.",
    "trial": "Wrong ports made on purpose: how many the judge finds, places and names.",
    "benchmarks": "Time and memory beside jax.nn, flax.nnx, equinox and torch, on CPUs and a GPU.",
    **{f"benchmarks/{name}": "All that was measured there." for name in ("h100", "xeon", "epyc")},
    "benchmarks/notes": "Compile times, and what was tried to make `attend` fast on CPUs.",
}
LANDING = {
    "docs/index.md": ("Guides", "How to use, move to, port to and scale attention.", GUIDES),
    "docs/evidence.md": ("Evidence", "What was proven and measured, with the commands.", EVIDENCE),
}
WORKSHOP = ("docs/way.md", "docs/night.md", "CHANGELOG.md", "SECURITY.md")
LAYERS = "|".join(name for _, names in reference.FAMILIES.values() for name in names.split())
ROW = re.compile(rf"^\| ({LAYERS}) \|", re.MULTILINE)  # of a table, that begins with a layer
COURSE = (ROOT / "docs/course.md").read_text("utf-8")
NOTEBOOKS = [  # in the order of its table
    ROOT / path
    for path in re.findall(r"^\| \[.*\(\.\./(notebooks/\w+\.ipynb)", COURSE, re.MULTILINE)
]
# A cell of a notebook, its code folded where `cells.prepare` says so and its outputs below.
FOLDED = """{% extends "markdown/index.md.j2" %}
{% block input %}
{% set title = cell.metadata.get("folded") %}
{% if title %}<details class="code" markdown="1"><summary>{{ title }}</summary>

{% endif %}{{ super() }}
{% if title %}
</details>
{% endif %}
{% endblock %}"""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The order of the pages."""
    config.nav = [
        {"Start": "README.md"},
        {"Guides": ["docs/index.md", *(f"docs/{name}.md" for name in GUIDES)]},
        {"Course": ["docs/course.md", *(f"notebooks/{path.stem}.md" for path in NOTEBOOKS)]},
        {"Reference": reference.menu()},
        {"Evidence": ["docs/evidence.md", *(f"docs/{name}.md" for name in EVIDENCE)]},
        {"For contributors": ["CONTRIBUTING.md", "AGENTS.md", *WORKSHOP]},
    ]
    config.copyright = f"flax_attn {version('flax_attn')}, Apache-2.0"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All files, under the paths that they have in the checkout."""

    def there(path: str) -> File:
        return File(path, str(ROOT), config.site_dir, config.use_directory_urls)

    own = [file for file in files if file.src_dir == config.docs_dir]
    # layers.md stands in the reference.
    docs = [f"docs/{file.src_uri}" for file in own if file.src_uri != "layers.md"]
    root = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")
    found = [there(path) for path in (*root, *docs)]
    for path in NOTEBOOKS:
        found += _notebook(path, config)
    found.append(File.generated(config, "docs/math.ttf", content=formulas.font()))
    found += [File.generated(config, path, content=_landing(*LANDING[path])) for path in LANDING]
    for name, text in reference.pages().items():
        found.append(File.generated(config, f"reference/{name}.md", content=text))
    return Files([*found, *(file for file in files if file not in own)])


def _landing(title: str, about: str, pages: dict[str, str]) -> str:
    """The first page of a part: each of its pages with a line."""
    titles = {name: (ROOT / f"docs/{name}.md").read_text("utf-8").splitlines()[0] for name in pages}
    lines = [f"- [{titles[n].removeprefix('# ')}]({n}.md): {line}" for n, line in pages.items()]
    return "\n".join([f"# {title}", "", about, "", *lines, ""])


def _notebook(path: Path, config: MkDocsConfig) -> list[File]:
    """A notebook as a page, and its pictures."""
    pictures = {"output_files_dir": f"{path.stem}_files"}
    notebook = nbformat.read(path, as_version=4)
    notebook.metadata["language_info"] = {"name": "python"}
    prepare(notebook)
    text, made = MarkdownExporter(raw_template=FOLDED).from_notebook_node(notebook, pictures)
    page = File.generated(config, f"notebooks/{path.stem}.md", content=_linked(text))
    drawn = made["outputs"].items()
    return [page, *(File.generated(config, f"notebooks/{n}", content=data) for n, data in drawn)]


def _linked(text: str) -> str:
    """A notebook's text with links to pages in place of files, and headings by their names here."""
    text = text.replace("<details>", '<details markdown="1">').replace(".ipynb)", ".md)")
    place = re.compile(r"\]\(([\w./]*)#([^)]+)\)")  # of this site: no other has a colon before it
    text = place.sub(lambda found: f"]({found[1]}#{slugify(found[2], '-')})", text)
    return text.replace(".ipynb#", ".md#")


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to notebooks lead to their pages; files that are no pages are named only.

    A layer at the beginning of a table's row is a link to the reference.
    """
    markdown = ROW.sub(r"| [\1][flax_attn.layers.\1] |", markdown)
    markdown = re.sub(r"\[([^]]+)\]\((?:LICENSE|CITATION\.cff)\)", r"\1", markdown)
    markdown = markdown.replace("](docs/layers.md", "](reference/layers/index.md")
    markdown = markdown.replace("](layers.md", "](../reference/layers/index.md")
    return re.sub(r"\]\(((?:\.\./)?notebooks/\w+)\.ipynb\)", r"](\1.md)", markdown)


def on_page_content(text: str, page: Page, **_: object) -> str:
    r"""Formulas, which the extension leaves as \(...\) and \[...\], as browsers draw them."""
    if not any(heading.children for heading in page.toc):
        page.meta["hide"] = ["toc"]  # leaves the room to what is wide
    text = formulas.drawn(text)
    return re.sub("<td>([^<]+)</td>", _cell, text)


def _cell(found: re.Match[str]) -> str:
    """A cell of a table: a number stays in one line, a long name may break between its words."""
    text = found[1]
    kind = "short" if len(text) < 12 else "name" if text.isidentifier() else "long"
    if kind != "short":
        text = re.sub(r"(?<=\w)(?=\.[A-Za-z_])|(?<=[a-z0-9])(?=[A-Z][a-z]{3})", "<wbr>", text)
        text = text.replace(" / ", "&nbsp;/ ")
        text = re.sub(r"\d[\d.]*e-\d+", r'<span class="short">\g<0></span>', text)
    return f'<td class="{kind}">{text}</td>'
