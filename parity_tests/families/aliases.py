"""Where the classes of aliases are."""

from .place import Model, Place

# Written by `python -m parity_tests.core.families.aliases`.
PLACES = {
    "arcee": Place(
        folder="arcee", prefix="Arcee", text="", block="DecoderLayer", gives="tensor", whole=True
    ),
    "aria_text": Place(
        folder="aria", prefix="AriaText", text="", block="DecoderLayer", gives="tensor", whole=True
    ),
    "audio-spectrogram-transformer": Place(
        folder="audio_spectrogram_transformer",
        prefix="AST",
        text="",
        block="Layer",
        gives="tensor",
        whole=False,
    ),
    "bridgetower_text_model": Place(
        folder="bridgetower",
        prefix="BridgeTower",
        text="Text",
        block="TextLayer",
        gives="tensor",
        whole=True,
    ),
    "camembert": Place(
        folder="camembert", prefix="Camembert", text="", block="Layer", gives="tensor", whole=True
    ),
    "deit": Place(
        folder="deit", prefix="DeiT", text="", block="Layer", gives="tensor", whole=False
    ),
    "dinov2": Place(
        folder="dinov2", prefix="Dinov2", text="", block="Layer", gives="tensor", whole=False
    ),
    "dinov2_with_registers": Place(
        folder="dinov2_with_registers",
        prefix="Dinov2WithRegisters",
        text="",
        block="Layer",
        gives="tensor",
        whole=False,
    ),
    "dots1": Place(
        folder="dots1", prefix="Dots1", text="", block="DecoderLayer", gives="tensor", whole=True
    ),
    "electra": Place(
        folder="electra", prefix="Electra", text="", block="Layer", gives="tensor", whole=True
    ),
    "emu3_text_model": Place(
        folder="emu3", prefix="Emu3", text="Text", block="DecoderLayer", gives="tensor", whole=True
    ),
    "eomt": Place(
        folder="eomt", prefix="Eomt", text="", block="Layer", gives="tensor", whole=False
    ),
    "ernie": Place(
        folder="ernie", prefix="Ernie", text="", block="Layer", gives="tensor", whole=True
    ),
    "flex_olmo": Place(
        folder="flex_olmo",
        prefix="FlexOlmo",
        text="",
        block="DecoderLayer",
        gives="tensor",
        whole=True,
    ),
    "glm": Place(
        folder="glm", prefix="Glm", text="", block="DecoderLayer", gives="tensor", whole=True
    ),
    "granite4_vision_text": Place(
        folder="granite4_vision",
        prefix="Granite4VisionText",
        text="",
        block="DecoderLayer",
        gives="tensor",
        whole=True,
    ),
    "granite_docling_text": Place(
        folder="granite_docling",
        prefix="GraniteDoclingText",
        text="",
        block="DecoderLayer",
        gives="tensor",
        whole=True,
    ),
    "ijepa": Place(
        folder="ijepa", prefix="IJepa", text="", block="Layer", gives="tensor", whole=False
    ),
    "jais2": Place(
        folder="jais2", prefix="Jais2", text="", block="DecoderLayer", gives="tensor", whole=True
    ),
    "mixtral": Place(
        folder="mixtral",
        prefix="Mixtral",
        text="",
        block="DecoderLayer",
        gives="tensor",
        whole=True,
    ),
    "pixio": Place(
        folder="pixio", prefix="Pixio", text="", block="Layer", gives="tensor", whole=False
    ),
    "qwen2_vl_text": Place(
        folder="qwen2_vl",
        prefix="Qwen2VL",
        text="Text",
        block="DecoderLayer",
        gives="tensor",
        whole=True,
    ),
    "rf_detr_dinov2": Place(
        folder="rf_detr", prefix="RfDetrDinov2", text="", block="Layer", gives="tensor", whole=False
    ),
    "roberta": Place(
        folder="roberta", prefix="Roberta", text="", block="Layer", gives="tensor", whole=True
    ),
    "roc_bert": Place(
        folder="roc_bert", prefix="RoCBert", text="", block="Layer", gives="tensor", whole=True
    ),
    "siglip2_text_model": Place(
        folder="siglip2",
        prefix="Siglip2",
        text="Text",
        block="EncoderLayer",
        gives="tensor",
        whole=False,
    ),
    "siglip2_vision_model": Place(
        folder="siglip2",
        prefix="Siglip2",
        text="Vision",
        block="EncoderLayer",
        gives="tensor",
        whole=False,
    ),
    "tipsv2_vision_model": Place(
        folder="tipsv2", prefix="Tipsv2Vision", text="", block="Layer", gives="tensor", whole=False
    ),
    "videomt": Place(
        folder="videomt", prefix="Videomt", text="", block="Layer", gives="tensor", whole=False
    ),
    "vit_mae": Place(
        folder="vit_mae", prefix="ViTMAE", text="", block="Layer", gives="tensor", whole=False
    ),
    "vit_msn": Place(
        folder="vit_msn", prefix="ViTMSN", text="", block="Layer", gives="tensor", whole=False
    ),
    "vivit": Place(
        folder="vivit", prefix="Vivit", text="", block="Layer", gives="tensor", whole=False
    ),
    "voxtral_realtime_text": Place(
        folder="voxtral_realtime",
        prefix="VoxtralRealtimeText",
        text="",
        block="DecoderLayer",
        gives="tensor",
        whole=True,
    ),
    "xlm-roberta": Place(
        folder="xlm_roberta",
        prefix="XLMRoberta",
        text="",
        block="Layer",
        gives="tensor",
        whole=True,
    ),
}
MODELS = {
    "blenderbot": Model(folder="blenderbot", prefix="Blenderbot"),
    "blenderbot-small": Model(folder="blenderbot_small", prefix="BlenderbotSmall"),
    "m2m_100": Model(folder="m2m_100", prefix="M2M100"),
    "marian": Model(folder="marian", prefix="Marian"),
    "mbart": Model(folder="mbart", prefix="MBart"),
    "mt5": Model(folder="mt5", prefix="MT5"),
    "pegasus": Model(folder="pegasus", prefix="Pegasus"),
    "plbart": Model(folder="plbart", prefix="PLBart"),
    "switch_transformers": Model(folder="switch_transformers", prefix="SwitchTransformers"),
}
