"""What the site is made of: the pages of this checkout where they lie, notebooks, the reference.

MkDocs calls these functions while it builds. Every page keeps its own path, so that a link that
works in a checkout works on the site.
"""

import html
import re
from pathlib import Path

import latex2mathml.converter
import nbformat
import reference
from cells import prepare
from markdown.extensions.toc import slugify
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).parents[1]
GUIDES = ("porting", "mistakes", "silent", "faq", "moving", "models", "recipes", "kernels", "scale")
EVIDENCE = ("certificate", "trial", "benchmarks")
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
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
        {"Guides": [f"docs/{name}.md" for name in GUIDES]},
        {"Notebooks": [f"notebooks/{path.stem}.md" for path in NOTEBOOKS]},
        {"Reference": reference.menu()},
        {"Evidence": [f"docs/{name}.md" for name in EVIDENCE]},
        {"Project": ["CHANGELOG.md", "CONTRIBUTING.md", "docs/way.md"]},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """All files, under the paths that they have in the checkout."""

    def there(path: str) -> File:
        return File(path, str(ROOT), config.site_dir, config.use_directory_urls)

    own = [file for file in files if file.src_dir == config.docs_dir]
    docs = [f"docs/{file.src_uri}" for file in own]
    found = [there(path) for path in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", *docs)]
    for path in NOTEBOOKS:
        found += _notebook(path, config)
    for name, text in reference.pages().items():
        found.append(File.generated(config, f"reference/{name}.md", content=text))
    return Files([*found, *(file for file in files if file not in own)])


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
    """Links to notebooks lead to their pages; files that are no pages are named only."""
    markdown = re.sub(r"\[([^]]+)\]\((?:LICENSE|CITATION\.cff)\)", r"\1", markdown)
    return re.sub(r"\]\((notebooks/\w+)\.ipynb\)", r"](\1.md)", markdown)


def on_page_content(text: str, page: Page, **_: object) -> str:
    r"""Formulas, which the extension leaves as \(...\) and \[...\], as browsers draw them."""
    if not any(heading.children for heading in page.toc):
        page.meta["hide"] = ["toc"]  # leaves the room to what is wide
    formula = r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>'
    text = re.sub(formula, _drawn, text, flags=re.DOTALL)
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


def _drawn(found: re.Match[str]) -> str:
    display = "block" if found[1] == "div" else "inline"
    drawn = latex2mathml.converter.convert(html.unescape(found[2]), display=display)
    return re.sub(r"<mi>(log|cos|sin|exp)</mi>(?=<mi>)", r'\g<0><mspace width="0.17em" />', drawn)
