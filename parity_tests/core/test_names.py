"""The names of the library: nouns that say what a value is, and one job for each private name."""

import ast
import re

from parity_tests.core.sources import ROOT, tree_of
from parity_tests.tables import each

SOURCES = sorted((ROOT / "flax_attn").rglob("*.py"))
BANNED = {"found", "told", "held", "given", "there", "own"}
# Words of a private language, with which a reader from outside cannot guess what a value is.
DIALECT = set(
    "how said says turn turns turned seen unseen heard unheard met laid lies house asked told tell "
    "held kept near far alike beside again torchs flaxs theirs ours lacks meant tried tries "
    "otherwise stays innocent sight there apart".split()
)
# Names that users' classes define, or that a page of the reference shows: they stay.
EXCEPTIONS = {"seen_range", "holds_beside"}
MOST_PRIVATE = 40  # bindings in all; equinox has 12 and flax.nnx 13
# Private functions of one name that do the same in each file of their room: what they do.
LIKE_JOBS = {
    "drop_in": {"_mask": "what a library's arguments hide", "_score": "what a library's bias adds"},
    "backends": {
        "_kernel_module": "a kernel's module",
        "_of_version": "why a version does not serve",
    },
    "backends/blockwise": {"_logits": "`scale * q.k`"},
    "bench": {
        "_equinox": "equinox's competitor",
        "_flax": "a program of a Flax module",
        "_jax_nn": "jax.nn's competitor",
        "_nnx": "flax.nnx's competitor",
        "_torch": "torch's competitor",
        "_flax_attn": "this library's competitor",
        "_sdpa": "the competitor by torch's fused function",
        "_book": "a layer of the book",
        "_prove": "what is proven first",
    },
    "layers": {"_check": "arguments of a constructor", "_check_sizes": "its sizes"},
    "recurrence": {
        "_forward": "of a custom_vjp",
        "_backward": "of a custom_vjp",
        "_recur": "the recurrence",
        "_check": "arguments",
    },
    "sharding": dict.fromkeys(("_attend", "_forward", "_backward"), "of a custom_vjp"),
    "weights": {
        "_check_contiguous": "of a file's tensors",
        "_entry": "of a file's header",
    },
}


@each("path", SOURCES)
def test_names_are_nouns(path):
    """Six words that say nothing of a value are no names of variables, parameters or functions."""
    bound = {
        *(x.id for x in ast.walk(tree_of(path)) if isinstance(x, ast.Name)),
        *(x.arg for x in ast.walk(tree_of(path)) if isinstance(x, ast.arg)),
        *(x.name.strip("_") for x in ast.walk(tree_of(path)) if isinstance(x, ast.FunctionDef)),
    }
    assert not bound & BANNED, f"names {', '.join(sorted(bound & BANNED))}: take the noun."


def bindings(tree):
    """Every name that a file binds: functions, classes, arguments, variables, attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def is_private_speech(name):
    words = re.split(r"_+|(?<=[a-z])(?=[A-Z])", name)
    return name not in EXCEPTIONS and any(word.lower() in DIALECT for word in words)


def test_names_are_words_of_the_field():
    """A thermometer: a synonym that is as private is no better, but these words may not return."""
    found = [
        name for path in SOURCES for name in bindings(tree_of(path)) if is_private_speech(name)
    ]
    assert len(found) <= MOST_PRIVATE, f"{len(found)} names of a private language: {sorted(found)}"
    assert is_private_speech("kept_rows") and is_private_speech("TurnedPair")
    assert not is_private_speech("seen_range") and not is_private_speech("returned")


@each("room", sorted({path.parent for path in SOURCES}))
def test_a_private_name_has_one_job_in_its_room(room):
    """Else a reader who looks for it finds another; what is alike everywhere says its job above."""
    files = {}
    for path in room.glob("*.py"):
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("_") and node.name != "_":
                files.setdefault(node.name, []).append(path.name)
    several = {name: there for name, there in files.items() if len(there) > 1}
    here = str(room.relative_to(ROOT / "flax_attn"))
    assert several.keys() == LIKE_JOBS.get(here, {}).keys(), several
