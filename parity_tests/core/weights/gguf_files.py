"""GGUF files made by hand, so that they may be odd, and by the package gguf as its witness."""

import struct

import numpy as np


def text(words):
    """A string with its length."""
    raw = words if isinstance(words, bytes) else words.encode()
    return len(raw).to_bytes(8, "little") + raw


def key(name, kind, value):
    """A key, the number of its value's type, and the value's bytes."""
    return text(name) + struct.pack("<I", kind) + value


def word(name, value):
    return key(name, 4, struct.pack("<I", value))


def info(name="w", dims=(3, 2), kind=0, offset=0):
    """What a header says of a tensor, the innermost axis first."""
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def raw(infos=(), keys=(), data=b"", alignment=32, **changed):
    """A file's bytes; `changed` are magic, version, tensors and number, that of keys."""
    head = {"magic": b"GGUF", "version": 3, "tensors": len(infos), "number": len(keys)} | changed
    header = struct.pack("<4sIQQ", *head.values()) + b"".join([*keys, *infos])
    return header + bytes(-len(header) % alignment) + data


def write(path, values, architecture="llama", keys=(), types=()):
    """A file by the package.

    Args:
      values: tensors by name.
      architecture: of the model.
      keys: "add_uint32" and the like, with the arguments.
      types: the name of ggml's type by the name of the tensor, where it is quantised.
    """
    import gguf

    writer, types = gguf.GGUFWriter(path, architecture), dict(types)
    for method, *given in keys:
        getattr(writer, method)(*given)
    for name, value in values.items():
        if name not in types:
            writer.add_tensor(name, value)
            continue
        kind = gguf.GGMLQuantizationType[types[name]]
        if value.dtype != np.uint8:  # else they are blocks already
            value = gguf.quants.quantize(value, kind)
        writer.add_tensor(name, value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
