"""BART: `self_attn` of encoder and decoder, and the decoder's `encoder_attn`."""

from ._parts import encoder_decoder

DEFAULTS = {
    "d_model": 1024,
    "encoder_layers": 12,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_attention_heads": 16,
    "attention_dropout": 0.0,
}

FAMILY = encoder_decoder(DEFAULTS, key_bias=True)
