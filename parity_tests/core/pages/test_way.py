"""docs/way.md lists the functions between a layer and the softmax as they are, and they are few."""

import os
import re
import subprocess
import sys

import pytest

from parity_tests.core.pages.pages import text_of

PAGE = "docs/way.md"
MOST = {  # functions and files
    "The plain formula": (43, 13),
    "With rotary and padding": (78, 18),
    "With a cache": (88, 23),
    "One token on a long cache": (142, 29),
    "In blocks with gradients": (101, 21),
}
TITLES = re.compile(r"^## (.*?), .*: (\d+) functions in (\d+) files$", re.MULTILINE)


@pytest.mark.nightly
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the way is counted on Python 3.11")
def test_the_page_lists_what_is_entered():
    command = [sys.executable, "-m", "parity_tests.core.pages.way"]
    alone = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}  # one device
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text_of(PAGE), "python -m parity_tests.core.pages.way --write renews it"


def test_the_call_path_has_few_functions():
    counts = {what: (int(n), int(files)) for what, n, files in TITLES.findall(text_of(PAGE))}
    assert counts.keys() == MOST.keys()
    for what, (functions, files) in MOST.items():
        assert counts[what][0] <= functions and counts[what][1] <= files, what
