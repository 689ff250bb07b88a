"""Where the classes of aliases are, if not where transformers' own tables say."""

from .place import Model, Place

# Written by `python -m parity_tests.core.families.aliases`.
PLACES = {
    "audio-spectrogram-transformer": Place(
        "audio_spectrogram_transformer", "AST", block="Layer", whole=False
    ),
    "bridgetower_text_model": Place("bridgetower", "BridgeTower", text="Text", block="TextLayer"),
    "camembert": Place("camembert", "Camembert", block="Layer"),
    "csm": Place("csm", "Csm", text="Backbone"),
    "deit": Place("deit", "DeiT", block="Layer", whole=False),
    "dinov2": Place("dinov2", "Dinov2", block="Layer", whole=False),
    "dinov2_with_registers": Place(
        "dinov2_with_registers", "Dinov2WithRegisters", block="Layer", whole=False
    ),
    "electra": Place("electra", "Electra", block="Layer"),
    "emu3_text_model": Place("emu3", "Emu3", text="Text"),
    "eomt": Place("eomt", "Eomt", block="Layer", whole=False),
    "ernie": Place("ernie", "Ernie", block="Layer"),
    "exaone": Place("llama", "Llama", config="exaone.Exaone"),
    "ijepa": Place("ijepa", "IJepa", block="Layer", whole=False),
    "iquestcoder": Place("llama", "Llama", config="iquestcoder.IQuestCoder"),
    "omniasr_audio": Place(
        "omniasr",
        "OmniASR",
        text="Audio",
        block="EncoderLayer",
        whole=False,
        path="layers.{}.attention",
    ),
    "pixio": Place("pixio", "Pixio", block="Layer", whole=False),
    "qwen2_vl_text": Place("qwen2_vl", "Qwen2VL", text="Text"),
    "rf_detr_dinov2": Place("rf_detr", "RfDetrDinov2", block="Layer", whole=False),
    "roberta": Place("roberta", "Roberta", block="Layer"),
    "roc_bert": Place("roc_bert", "RoCBert", block="Layer"),
    "sarvam_mla": Place("deepseek_v3", "DeepseekV3", config="sarvam_mla.SarvamMLA"),
    "sarvam_moe": Place("glm4_moe", "Glm4Moe", config="sarvam_moe.SarvamMoE"),
    "siglip2_text_model": Place(
        "siglip2", "Siglip2", text="Text", block="EncoderLayer", whole=False
    ),
    "siglip2_vision_model": Place(
        "siglip2", "Siglip2", text="Vision", block="EncoderLayer", whole=False
    ),
    "tipsv2_vision_model": Place("tipsv2", "Tipsv2Vision", block="Layer", whole=False),
    "videomt": Place("videomt", "Videomt", block="Layer", whole=False),
    "vit_mae": Place("vit_mae", "ViTMAE", block="Layer", whole=False),
    "vit_msn": Place("vit_msn", "ViTMSN", block="Layer", whole=False),
    "vivit": Place("vivit", "Vivit", block="Layer", whole=False),
    "xlm-roberta": Place("xlm_roberta", "XLMRoberta", block="Layer"),
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
