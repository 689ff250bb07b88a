"""Model types whose classes make a config by themselves that no layer fits, and what is said."""

FAULTY = {
    "deberta": "relative_attention=False is not served",
    "deberta-v2": "relative_attention=False is not served",
    "glm4_moe": "num_attention_heads must divide hidden_size",
    "glm4v_moe_text": "num_attention_heads must divide hidden_size",
    "glm4v_text": "mrope_section must be 3 whole numbers",
    "qwen3_omni_moe_text": "num_attention_heads must divide hidden_size",
    "sam3_lite_text_text_model": "has a convolution",  # its first layer
}
