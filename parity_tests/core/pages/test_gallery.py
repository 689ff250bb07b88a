"""docs/gallery.md and its pictures are what the library draws now."""

import importlib.util

import pytest

from parity_tests.core.pages.pages import ROOT, text_of

pytestmark = pytest.mark.nightly


def test_the_page_and_every_picture_are_as_the_library_draws_them():
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs/gallery.py")
    gallery = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gallery)
    made = gallery.files()
    here = {f"gallery/{path.name}" for path in (ROOT / "docs/gallery").iterdir()}
    assert {*made} == {*here, "gallery.md"} and len(here) > 15
    other = [path for path, text in made.items() if text != text_of(f"docs/{path}")]
    assert not other, "python docs/gallery.py writes them anew"
