"""Whisper: BART's attention without a bias on keys."""

from ._parts import encoder_decoder

DEFAULTS = {
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "decoder_layers": 4,
    "decoder_attention_heads": 6,
    "attention_dropout": 0.0,
}

FAMILY = encoder_decoder(DEFAULTS, key_bias=False)
