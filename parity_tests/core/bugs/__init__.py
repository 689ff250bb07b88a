"""Bugs planted in the library's own code, and the trial that shows which tests see them.

Every room of the library has a list of bugs, `ROOM.toml`. A bug is an id, which stays when the code
is rewritten, a behaviour in words, and a patch: a text that stands once in a file, and what takes
its place. A patched library is imported and answers; the answer is wrong, or a refusal is lost.

    pytest -p parity_tests.core.bugs.entered --entered FILE
    python -m parity_tests.core.bugs [ID ...] --entered FILE [--record PATH]

The first command records which functions and branches each test enters. The second plants one bug
after the other in a copy of the checkout and runs the tests that enter the patched lines, cheapest
first, until five have failed. A bug that no test sees is a hole in the tests; a test that sees no
bug buys nothing.
"""
