"""The pages of the reference: which public names stand on each, and what a page says.

`python docs/reference.py` writes docs/layers.md, the page with a line for each layer.
"""

import inspect
import re
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import ModuleType

import flax_attn
from flax_attn.parity.cases import markdown

DOCS = Path(__file__).parent
# Families of layers: the page, its title, and the layers in the order in which one reads them.
FAMILIES = {
    "one-head": (
        "One head, step by step",
        "SimplifiedSelfAttention SelfAttentionV1 SelfAttentionV2 UniformCausalAverage "
        "SingleHeadAttention CausalAttention CausalRenormalisedAttention",
    ),
    "multi-head": (
        "Multi-head attention",
        "MultiHeadAttention TransformerMultiHeadAttention MultiHeadAttentionWrapper "
        "MultiHeadAttentionCombined MultiHeadAttentionEinsum",
    ),
    "cross": (
        "Cross-attention and pooling",
        "CrossAttention BahdanauAttention LuongAttention PerceiverAttention AttentionPool",
    ),
    "grouped-query": (
        "Grouped-query attention and its kin",
        "GroupedQueryAttention GatedQueryAttention ExclusiveAttention ValueResidualAttention "
        "SharedKeyValueAttention CrossLayerAttention",
    ),
    "latent-and-sparse": (
        "Latent and sparse attention",
        "LatentAttention IndexedSparseAttention LongformerAttention",
    ),
    "weights": (
        "Other weights than softmax's",
        "DifferentialAttention TalkingHeadsAttention SelectiveAttention EntmaxAttention "
        "SigmoidAttention",
    ),
    "positions": (
        "Positions inside attention",
        "T5Attention RelativeShiftAttention DisentangledAttention",
    ),
    "images": (
        "Images",
        "WindowAttention AxialAttention SpatialReductionAttention DecomposedRelativeAttention "
        "CrossCovarianceAttention ClassAttention",
    ),
    "linear": (
        "Linear attention and delta rules",
        "LinearAttention LightningAttention GatedDeltaAttention KimiDeltaAttention",
    ),
    "state-space": (
        "State spaces and convolutions",
        "Mamba Mamba2 RGLRU GatedShortConvolution",
    ),
}
# Other pages about names of `flax_attn` itself.
FUNCTIONS = {
    "attend": "attend attention_weights explain use_backend use_device_file attend_by_weights "
    "Dropout DropoutMask Places Rules",
    "drop-in": "dot_product_attention flax_attention",
    "masks": "CAUSAL FULL Causal Full Window Band Chunked Prefix Documents Segments Lengths Dense "
    "Mask MaskFn",
    "scores": "IDENTITY Additive Alibi Score ScoreFn Softcap T5Bias entmax sigmoid softmax",
    "caches": "Cache PagedCache attend_cached Float8 Int8 Quantized",
    "memories-and-states": "Memory attend_memory State",
    "positions": "Rotary rotary_angles rotate alibi_slopes Axial Sections LinearScaling "
    "DynamicScaling Llama3Scaling Yarn LongRope Proportional Frequencies",
    "norms": "LayerNorm RMSNorm",
    "more": "frozen assume_platform merge_heads split_heads",
}
# Pages about names of other modules: some of them, or all.
MODULES = {
    "parity/comparing": (
        "parity",
        "compare assert_parity ParityError Report Row Divergence report_schema judge",
    ),
    "parity/cases": ("parity", "Case Decode record Recording"),
    "parity/porting": ("parity", "identify Identified port plan suggest Plan Rule"),
    **{name: (name, "") for name in ("weights", "families", "sharding", "recurrence", "taps")},
}
INTRODUCTION = """# Layers

All {} layers, by family. Each is a Flax (nnx) module of `flax_attn`, and equals the PyTorch
modules that its row of [the certificate](certificate.md) names; `torch_ref` is plain PyTorch that
comes with this library. In a decoder like Llama take `GroupedQueryAttention`, in place of
`torch.nn.MultiheadAttention` take `TransformerMultiHeadAttention`, in an encoder-decoder
`CrossAttention`. The layers of the first family are for learning.

*Takes*: of the call, `mask`, `valid` (which tokens are real), `positions` and `cache`; of the
constructor, `rules` (ALiBi, a softcap, the scale) and `dropout`. Where there is a `mask` and no
`valid`, the keys of padding are hidden by `mask=real[:, None, None]`, `real` of shape (B, S);
`BahdanauAttention`, `LuongAttention` and `LinearAttention` take `mask=real`.
"""
BARS = r"<code>\1&#124;\2&#124;\3</code>"  # which would end a cell of a table
# Methods of layers that users call.
CALLED = ("__call__", "init_cache", "remember", "step", "initial_state", "recurrent")
CALLED += ("with_keys_and_values", "keys_and_values_of", "values", "position_bias")
INHERITED = {"Mask": "draw", "Score": "draw"}  # methods that are shown though a base has them


def pages() -> dict[str, str]:
    """The text of each page, by its path below reference/, in the order of the menu."""
    layers = {f"layers/{page}": _page(*family) for page, family in FAMILIES.items()}
    others = {page: _page(_title(page), names) for page, names in FUNCTIONS.items()}
    for page, (module, names) in MODULES.items():
        names = names or " ".join(public(f"flax_attn.{module}"))
        others[page] = _page(_title(page), names, f"flax_attn.{module}")
    return {"layers/index": _on_the_site(layers_page()), **layers, **others}


def menu() -> list[str | dict[str, list[str]]]:
    """The same pages as a menu: those of a folder under its name."""
    folders: dict[str, list[str]] = {}
    for page in pages():
        folder = page.rpartition("/")[0]
        folders.setdefault(folder, []).append(f"reference/{page}.md")
    others = folders.pop("")
    layers, parity = ({_title(folder): paths} for folder, paths in folders.items())
    return [layers, *others, parity]


def public(module: str) -> list[str]:
    """The names of a module that say themselves where they come from, or are made in it."""
    home = import_module(module)
    if hasattr(home, "_HOMES"):
        return [*home.__all__]
    made = {n: getattr(x, "__module__", module) for n, x in vars(home).items() if n[0] != "_"}
    return [n for n, place in made.items() if place.startswith(module) and not _is_module(home, n)]


def _is_module(package: ModuleType, name: str) -> bool:
    return isinstance(getattr(package, name), ModuleType)


def _title(page: str) -> str:
    return page.rpartition("/")[2].replace("-", " ").capitalize()


def _page(title: str, names: str, module: str = "flax_attn") -> str:
    """One page of the reference: under each public name what its docstring says."""
    lines = [f"# {title}", ""]
    for name in names.split():
        lines += [
            f"::: {_path(name, module)}",
            "    options:",
            f"      heading: {module}.{name}",
            *([f"      inherited_members: [{INHERITED[name]}]"] if name in INHERITED else []),
            "",
        ]
    return "\n".join(lines)


def _path(name: str, module: str = "flax_attn") -> str:
    """Where a name is documented: in its own module, if that is of `flax_attn` or has its name."""
    home = getattr(import_module(module), "_HOMES", {}).get(name, ".")
    if home != "." and (module == "flax_attn" or find_spec(f"{module}.{name}")):
        module = resolve_name(home, module)
    return f"{module}.{name}"


def layers_page() -> str:
    """The page with a line for each layer: what it computes, and whose module it equals."""
    certificate = (DOCS / "certificate.md").read_text("utf-8")
    rows = markdown.rows(markdown.MARKS.search(certificate)["table"])
    lines = [INTRODUCTION.format(len(rows))]
    for title, names in FAMILIES.values():
        lines += [
            f"## {title}",
            "",
            "| layer | what it is | takes | equal to modules of |",
            "| --- | --- | --- | --- |",
        ]
        for name in names.split():
            packages = dict.fromkeys(x.partition(".")[0] for x in rows[name][1].split("; "))
            about = re.sub(r"`([^`|]*)\|([^`|]*)\|([^`]*)`", BARS, _summary(name))
            lines += [f"| {name} | {about} | {_takes(name)} | {', '.join(packages)} |"]
        lines += [""]
    return "\n".join(lines)


def _takes(name: str) -> str:
    """Which of the keywords that users look for a layer has, when called and when built."""
    layer = getattr(flax_attn, name)
    call, built = (inspect.signature(x).parameters for x in (layer.__call__, layer.__init__))
    words = [word for word in ("mask", "valid", "positions", "cache") if word in call]
    return ", ".join(words + [word for word in ("rules", "dropout") if word in built])


def _on_the_site(text: str) -> str:
    """The same page among those of the reference, with links to theirs."""
    for page, (title, _) in FAMILIES.items():
        text = text.replace(f"## {title}\n", f"## [{title}]({page}.md)\n")
    return text.replace("](certificate.md", "](../../docs/certificate.md")


def _summary(name: str) -> str:
    """The first line of a docstring, and the other names of what it is about."""
    text = inspect.getdoc(getattr(flax_attn, name)) or ""
    others = re.search(r"^Also called: .*?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return " ".join([text.partition("\n")[0], *(others[0].split() if others else ())])


if __name__ == "__main__":
    (DOCS / "layers.md").write_text(layers_page(), "utf-8")
