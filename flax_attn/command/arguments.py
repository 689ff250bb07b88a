"""The options of every command except `identify` and `bench`, which have modules of their own."""

from typing import Any


def add_parity(commands: Any) -> None:
    """Adds the command `parity`."""
    parity = commands.add_parser(
        "parity",
        help="prove every variant equal to its PyTorch originals",
        description="Compares outputs, intermediate values and gradients: live where torch is "
        "installed, else against what torch gave when it was recorded. Without names it proves "
        "a fixed set of cases, one of each kind of layer, in float64 under jit, which takes about "
        "a minute; --all proves everything, eagerly and under jit, in float32 and bfloat16 too. "
        "The columns: number of weight tensors copied; largest float64 error of values and of "
        "gradients; error in float32 and bfloat16 divided by torch's own.",
    )
    parity.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="what to prove whole: a variant or its class; a package, a module or a file that "
        "holds CASES; the name of a case, as a report prints it, or a part of that",
    )
    parity.add_argument("--all", action="store_true", help="prove every case of this library whole")
    parity.add_argument("--json", metavar="FILE", help="write every comparison as JSON")
    parity.add_argument("--html", metavar="FILE", help="write one page with every comparison")
    parity.add_argument(
        "--markdown",
        metavar="FILE",
        help="write the table, between the marks if the file has them; a part of the variants "
        "leaves other rows as they are (without names: --all)",
    )
    parity.add_argument(
        "--record",
        action="store_true",
        help="record torch's results first (without names: --all)",
    )
    parity.add_argument("--replay", action="store_true", help="use the record though torch is here")
    parity.add_argument(
        "--strict",
        action="store_true",
        help="what is equal only as far as its input can tell counts as different",
    )
    parity.add_argument("--seed", type=int, metavar="N", help="draw other numbers, in every case")
    parity.add_argument(
        "--real", action="store_true", help="prove trained weights instead (fetches four packages)"
    )
    parity.add_argument(
        "--families",
        action="store_true",
        help="prove the attention of published models instead, in float64 with gradients, and list "
        "the model types that `flax_attn.families` reads; with names, of these model types alone "
        "(needs transformers)",
    )
    parity.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="prove layers with their inputs sharded over as many of N devices as batch and length "
        "allow, against the original on one, in float64: the first case of each, or all of what is "
        "named; a CPU stands for as many as are asked for",
    )
    parity.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="prove N cases at a time, each in a process; default: one a core, one on a GPU",
    )
    parity.add_argument(
        "--no-cache",
        action="store_true",
        help="keep no compiled programs (1 GiB at most, in your cache folder, unless "
        "JAX_COMPILATION_CACHE_DIR says where)",
    )


def add_record(commands: Any) -> None:
    """Adds the command `record`."""
    record = commands.add_parser(
        "record",
        help="record all that PyTorch gives for cases, to prove ports on a machine without it",
        description="Writes one file for each case: inputs, weights, outputs, intermediate values, "
        "gradients, dropout masks and rounding noise. There flax_attn.parity.Recording(file) "
        "stands for the torch module.",
    )
    record.add_argument(
        "names",
        nargs="+",
        metavar="NAME",
        help="as of parity: a variant, a package, a module or a file that holds CASES, and after "
        "it one case; or the Flax class of a case by its import path",
    )
    record.add_argument(
        "--to",
        default=".",
        metavar="FOLDER",
        help="the files' folder, made if missing; default: here",
    )


def add_explain(commands: Any) -> None:
    """Adds the command `explain`."""
    explain = commands.add_parser(
        "explain",
        help="say which backend `attend` takes for a request, and why the others do not serve it",
        description="Prints every backend's verdict on attention over arrays of these shapes; "
        "nothing is computed. Example: flax-attn explain --q 2 5 6 8 --kv 2 9 3 8 --dtype bfloat16 "
        "--mask 'Causal() & Window(3, 0)' --on tpu",
    )
    add, shape = explain.add_argument, {"type": int, "nargs": "+"}
    add("--q", **shape, required=True, metavar="SIZE", help="shape of the queries: B T N H")
    add("--kv", **shape, metavar="SIZE", help="shape of keys and values: B S K H; default: of --q")
    add("--v", **shape, metavar="SIZE", help="shape of the values, where it is another: B S K h")
    add("--dtype", default="float32", metavar="DTYPE", help="float32 (default), bfloat16, ...")
    add("--mask", default="FULL", metavar="MASK", help="of flax_attn's masks, with & | ~")
    add("--score", default="IDENTITY", metavar="SCORE", help="of flax_attn's scores, with >>")
    add("--sinks", action="store_true", help="with a sink logit for each query head")
    add("--dropout", type=float, metavar="RATE", help="with dropout of this rate")
    add("--shards", type=int, metavar="N", help="with the length sharded over N devices")
    add("--strategy", default="all_gather", metavar="NAME", help="all_gather, ring or ulysses")
    add("--layout", default="contiguous", metavar="NAME", help="contiguous, zigzag or striped")
    add("--on", metavar="PLATFORM", help="cpu, gpu or tpu; default: this machine")
    add("--capability", metavar="X.Y", help="of the GPU: 9.0 for an H100; default 8.0")


def add_check_device(commands: Any) -> None:
    """Adds the command `check-device`."""
    check = commands.add_parser(
        "check-device",
        help="prove and time this library on the device at hand, and write a report",
        description="In this order: recorded results of PyTorch for every layer, in float32 and "
        "bfloat16; every backend against the plain formula on 60 requests; `flax-attn bench` for "
        "attention, steps of decoding, and memory at T and 2T tokens. Each part leaves its file in "
        "the folder as soon as it is done. Needs no network and no torch. What does not fit into "
        "the time is listed. Ends with 0 if all that was tried is equal, 1 if something differs, "
        "2 if too little was tried.",
    )
    check.add_argument(
        "--out", required=True, metavar="FOLDER", help="where the files and report.md go"
    )
    check.add_argument(
        "--minutes", type=float, metavar="N", help="about how long; default: 8, with --small 2"
    )
    check.add_argument(
        "--only",
        metavar="PARTS",
        help="of layers, requests, speed, decoding and memory, with commas",
    )
    check.add_argument(
        "--small", action="store_true", help="few and small inputs, to try the command on a CPU"
    )
