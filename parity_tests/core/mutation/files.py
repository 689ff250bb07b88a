"""Which files are changed, which laws judge them, and which functions nobody needs to judge."""

from collections.abc import Iterable

# Modules of parity_tests.core whose functions `test_...` take no arguments and no torch.
ENTRIES = "masks.test_laws_entries"
RANGES = "backends.test_laws_blockwise_ranges"
MASKS = (
    *(f"masks.test_laws_masks{part}" for part in ("", "_ranges", "_answers", "_known")),
    *(ENTRIES, RANGES),
)
POSITIONS = ("masks.test_laws_positions",)
JUDGE = tuple(f"parity.test_laws_judge{part}" for part in ("", "_no_worse", "_groups", "_shows"))
PLAIN = tuple(f"attend.test_laws_{part}" for part in ("reference", "hidden", "hidden_gradients"))
CHECKPOINTS = ("weights.test_laws_files",)
LOOPS = ("backends.test_laws_block_loops",)

FILES: dict[str, tuple[str, ...]] = {
    "reference": tuple(
        f"attend.test_laws_{x}" for x in ("reference", "hidden", "hidden_gradients")
    ),
    "masks/algebra": MASKS,
    "masks/ranges": MASKS,
    "masks/nodes": MASKS,
    "masks/runs": MASKS,
    "masks/at_positions": POSITIONS,
    "scores": ("attend.test_laws_scores", ENTRIES),
    "parity/judge": JUDGE,
    "parity/groups": ("parity.test_laws_judge_groups",),
    "backends/blockwise/__init__": (
        "backends.test_laws_blockwise_layouts",
        "backends.test_laws_blockwise",
    ),
    "backends/blockwise/block": ("backends.test_laws_blockwise_block",),
    "backends/blockwise/plan": (*LOOPS, RANGES),
    "backends/blockwise/block_loops": LOOPS,
    "backends/blockwise/lanes": ("backends.test_laws_lanes",),
    "backends/blockwise/online_softmax": ("backends.test_laws_blockwise",),
    "backends/hoist": ("backends.test_laws_hoist",),
    "backends/protocol": ("backends.test_laws_protocol", "backends.test_laws_kernels"),
    "attend": ("attend.test_laws_attend",),
    "drop_in/jax_nn": ("attend.test_laws_drop_in",),
    "weights/entry": CHECKPOINTS,
    "weights/gguf": CHECKPOINTS,
    "weights/gguf_keys": CHECKPOINTS,
    "weights/npz": CHECKPOINTS,
}
WITH_LAWS = [file for file, laws in FILES.items() if laws]
# CI draws of these.
LIGHT = ("reference", "masks/algebra", "masks/runs", "scores", "parity/judge", "parity/groups")

# "function", or "function: name" for what is assigned to a name there or handed on by that keyword.
CHOOSES_SIZES: dict[str, dict[str, str]] = {
    "backends/blockwise/__init__": {
        "module: MAX_REFERENCE_PAIRS": "Up to so many weights the plain formula is quicker.",
        "module: MAX_DECODE_COPIED_BYTES": "Up to so many bytes the plain formula is quicker.",
        "passed_over": "Either way gives the same result; which is quicker is measured.",
    },
    "backends/blockwise/lanes": {
        "_Loop.start: shared": "What two threads share only keeps the loops together.",
        "_Loop.iteration: shared": "What two threads share only keeps the loops together.",
    },
    "backends/protocol": {
        "module: MAX_REFERENCE_PAIRS": "Up to so many weights the plain formula is quicker.",
        "module: MAX_COPIED_BYTES": "Up to so many bytes the plain formula is quicker.",
        "module: MAX_DECODE_ROWS": "Up to so many queries another loop over the keys is quicker.",
        "module: MASK_ROWS": "Any number of rows asked at once gives the same result.",
        "passed_over": "Either way gives the same result; which is quicker is measured.",
        "is_long_cache": "Either way gives the same result; which is quicker is measured.",
        "is_decode_step": "Either way gives the same result; which is quicker is measured.",
    },
    "backends/blockwise/plan": {
        "make_plan": "Any block size gives the same result; which is quickest is measured.",
        "_query_block": "Chooses the rows of a block by what is quickest.",
        "_has_dynamic_ranges": "Chooses the size of a block by what is quickest.",
        "_plan: most": "Bounds the size of a block by what is quickest.",
        "_plan: rows": "Any number of rows gives the same result.",
        "_plan: cols": "Any number of columns gives the same result.",
    },
}


def path_of(file: str) -> str:
    """`flax_attn/masks/nodes.py` of "masks/nodes"."""
    return f"flax_attn/{file}.py"


def module_of(file: str) -> str:
    """`flax_attn.masks.nodes` of "masks/nodes"."""
    return "flax_attn." + file.removesuffix("/__init__").replace("/", ".")


def books_of(laws: Iterable[str]) -> tuple[str, ...]:
    """The full names of law books, which are given from parity_tests.core on."""
    return tuple(f"parity_tests.core.{book}" for book in laws)


def chosen(given: Iterable[str]) -> list[str]:
    """Files by name, by path, or all of a folder that are listed: keys of FILES, or new ones."""
    found: dict[str, None] = {}
    for path in given:
        file = path.removeprefix("./").removeprefix("flax_attn/").removesuffix(".py").rstrip("/")
        inside = [name for name in FILES if name.startswith(f"{file}/")]
        found |= dict.fromkeys(inside or [file])
    return list(found)
