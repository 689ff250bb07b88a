"""What the config.json of published models holds, but for words and tokens, and the same shrunk.

Shrunk, a config keeps all that is no size: its kinds of layers, rates, switches and ratios.
"""

import json
from collections.abc import Iterator
from math import gcd
from pathlib import Path
from typing import Any

TEXTS = Path(__file__).parents[2] / "data" / "published_configs.json"
PUBLISHED: dict[str, dict[str, Any]] = json.loads(TEXTS.read_text("utf-8"))

# Sizes within a head, numbers of heads, and widths that heads together have.
COMPONENTS = """
head_dim global_head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim d_kv rotary_dim
kv_lora_rank q_lora_rank linear_key_head_dim linear_value_head_dim mamba_head_dim
attention_head_dim ssm_state_size state_size mamba_d_head mamba_d_state""".split()
HEADS = """num_attention_heads num_key_value_heads num_heads n_head linear_num_key_heads
linear_num_value_heads mamba_num_heads mamba_n_heads encoder_attention_heads decoder_attention_heads
num_global_key_value_heads num_kv_heads n_groups""".split()
WIDTHS = "hidden_size n_embd n_embed d_model embed_dim block_dim conv_dim conv_dim_out".split()
# What has no part in attention, and would make whole models large.
BESIDE = {"vocab_size": 99, "intermediate_size": 32, "d_ff": 32, "n_inner": 32, "max_length": 32}
BESIDE |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "intermediate_size_mlp": 32}
BESIDE |= {"block_ff_dim": 32, "moe_intermediate_size": 12, "out_hidden_size": 24}
TABLES = {"vocab_size": 99, "vocab_size_per_layer_input": 99}  # said or not
SMALL = 128  # a width up to which a config is left as it is
TOKENS = "_token_id"  # of fields that name a token, of which there are fewer then


def _sizes(config: dict[str, Any], names: list[str]) -> Iterator[int]:
    for name in names:
        value = config.get(name)
        yield from [value] if isinstance(value, int) else value or []


def _shrunk_size(value: int | None, by: int) -> int | None:
    return value and max(1, value // by)


def shrunk(config: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """The config of one model with heads of a few components, and a few heads.

    Args:
      config: of one model.
      defaults: of its family, for a config that has no sizes.
    """
    if not {*config} & {*WIDTHS}:
        config = {
            **{k: x for k, x in defaults.items() if k in (*COMPONENTS, *HEADS, *WIDTHS)},
            **config,
        }
    # Of a state space without heads the width within is a part of it.
    wide = [*WIDTHS, *(x for x in ("intermediate_size",) if x in defaults)]
    widths = [*_sizes(config, wide)]
    if max(widths) <= SMALL:
        return config
    heads = [x for x in _sizes(config, HEADS) if x > 1]
    fewer = gcd(max(1, gcd(64, *heads) // 2), *widths)
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    inside = [*_sizes(config, COMPONENTS)]
    inside += [4 * (x // max(heads) // 4) for x in widths if heads and x % max(heads) == 0]
    sections = [*_sizes(rope, ["mrope_section"])]
    less = gcd(8, *sections, *(x // 4 for x in inside), *(x // fewer for x in widths))
    result = {k: x for k, x in config.items() if not k.endswith(TOKENS)} | {"pad_token_id": 0}
    result |= {k: x for k, x in BESIDE.items() if k in config and k not in wide} | TABLES
    for names, by in ((COMPONENTS, less), (HEADS, fewer), (wide, less * fewer)):
        result |= {x: _shrunk_size(config[x], by) for x in names if x in config}
    for key in ("rope_scaling", "rope_parameters"):
        if (config.get(key) or {}).get("mrope_section"):
            result[key] = {**config[key], "mrope_section": [x // less for x in sections]}
    return result
