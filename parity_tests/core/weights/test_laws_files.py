"""Laws of reading: odd files are refused and valid files are read."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from flax_attn.weights.entry import entries_of, read_tensor
from flax_attn.weights.gguf import TYPES, read_gguf

from . import test_gguf as gguf
from . import test_gguf_load as keys
from . import test_npz as npz
from . import test_safetensors as one_file
from .gguf_files import write

NEVER_READ = ("Q8_1", "Q8_K", "Q1_0")  # of which the package knows no values


def each(test, *names):
    """Runs a test of a table for each name, else once, in a folder of its own."""
    for given in [(name,) for name in names] or [()]:
        with TemporaryDirectory() as folder:
            test(*given, Path(folder))


def test_odd_files_of_ggml():
    each(gguf.test_an_odd_file_is_refused, *gguf.ODD)


def test_valid_files_of_ggml():
    each(gguf.test_a_valid_file_is_read, *gguf.VALID)
    each(gguf.test_the_values_of_keys)


def test_blocks_of_ggml():
    each(gguf.test_a_block_that_is_not_finite_is_refused_unless_it_is_allowed, 0, 33)
    each(gguf.test_a_file_truncated_after_opening_is_an_error, 0, 3)


def test_types_of_ggml_have_the_sizes_that_the_package_says():
    package = pytest.importorskip("gguf", reason="knows the sizes of blocks")
    sizes = {x: s for x, s in package.GGML_QUANT_SIZES.items() if x.name not in NEVER_READ}
    assert {int(x): (x.name, *s) for x, s in sizes.items()} == {
        number: (kind.name, kind.elements, kind.size) for number, kind in TYPES.items()
    }
    assert {kind.dtype for kind in TYPES.values() if kind.elements > 1} == {"F32"}


def test_a_tensor_of_many_blocks_is_read_in_parts():
    draw = np.random.default_rng(0).integers(0, 256, (3, 2**12, 34), np.uint8)
    draw[..., 1] &= 63  # finite scales
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "m.gguf", {"w": draw.reshape(3, -1)}, types={"w": "Q8_0"})
        found = read_gguf(path).entries["w"].read("w")
    scales = np.ascontiguousarray(draw[..., :2]).view(np.float16).astype(np.float32)
    want = (scales * draw[..., 2:].view(np.int8)).reshape(3, -1)
    assert (found == want).all() and found.shape == (3, 2**17)


def test_plain_types_of_ggml():
    each(gguf.test_what_the_package_writes_is_read_bit_for_bit)


def test_keys_that_are_refused():
    each(keys.test_keys_that_no_config_says_are_refused, *keys.REFUSED)
    each(keys.test_an_architecture_that_is_not_read)


def test_keys_that_are_read():
    each(keys.test_the_config_is_what_was_converted)
    each(keys.test_optional_keys_have_defaults)
    each(keys.test_the_scaling_of_rotary_positions, *keys.SCALINGS)
    each(keys.test_the_scaling_of_llama_3_is_seen_in_its_frequencies)


def test_odd_archives():
    each(npz.test_an_odd_file_is_refused, *npz.ODD)


def test_valid_archives():
    each(npz.test_what_numpy_writes_is_read_bit_for_bit, *(npz.np.savez, npz.np.savez_compressed))
    each(npz.test_a_flipped_byte_is_detected_by_its_checksum)
    each(npz.test_a_file_replaced_after_opening_is_an_error)


def test_safetensors_are_read_by_the_same_steps():
    each(one_file.test_what_is_no_regular_file_is_refused_and_not_waited_for)
    each(one_file.test_a_file_truncated_after_opening_is_an_error)
    each(one_file.test_a_bool_is_0_or_1)
    each(one_file.test_a_nan_in_the_second_million_is_found)
    each(one_file.test_an_odd_file_is_refused, "17 axes", "zero of too many", "a size beyond 2**40")


def test_empty_arrays_are_read_and_odd_ones_are_refused():
    empty = np.zeros((0, 3), bool)
    assert read_tensor("w", entries_of(Path("arrays"), {"w": empty})["w"]).shape == (0, 3)
    for name in npz.ARRAYS:
        npz.test_arrays_that_no_checkpoint_holds(name)
    npz.test_arrays_have_no_manifest_and_no_nan()
