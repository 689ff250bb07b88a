"""Model types of transformers 5.23: those without a family, and fields of the others."""

# Written by `python -m parity_tests.core.families.published`.
KNOWN = frozenset(
    (
        "EvollaModel aimv2 aimv2_text_model aimv2_vision_model align align_text_model "
        "align_vision_model altclip altclip_text_model altclip_vision_model aria audioflamingo3 "
        "audioflamingo3_encoder autoformer axk2 aya_vision bailing_hybrid bark beam beit "
        "bert-generation big_bird bigbird_pegasus biogpt bit blip blip-2 blip_2_qformer "
        "blip_2_vision_model blip_text_model blip_vision_model blt blt_global_transformer "
        "blt_local_decoder blt_local_encoder blt_patcher bridgetower bridgetower_vision_model "
        "bros canary canary_decoder canine chameleon chameleon_vqgan chinese_clip "
        "chinese_clip_text_model chinese_clip_vision_model chmv2 clap clap_audio_model "
        "clap_text_model clip clipseg clipseg_text_model clipseg_vision_model clvp clvp_decoder "
        "clvp_encoder cohere2_moe cohere2_vision cohere_asr cohere_compass cohere_compass_text "
        "cohere_compass_vision colmodernvbert colpali colqwen2 conditional_detr convbert convnext "
        "convnextv2 cosmos3_edge cosmos3_edge_text cosmos3_edge_vision cosmos3_omni cpmant "
        "csm_depth_decoder_model ctrl cvt d_fine dab-detr dac data2vec-audio data2vec-text "
        "data2vec-vision dbrx decision_transformer deepseek_ocr2 deepseek_ocr2_encoder "
        "deepseek_ocr2_sam_vision_model deepseek_ocr2_text deepseek_ocr2_vision deepseek_v4 "
        "deepseek_vl deepseek_vl_hybrid deformable_detr deimv2 depth_anything depth_pro detr dia "
        "dia_decoder dia_encoder diffusion_gemma diffusion_gemma_text dinat dinov3_convnext doge "
        "donut-swin dots3_note dots3_note_audio_encoder dots3_note_text dots3_note_vision_encoder "
        "dpr dpt edgetam edgetam_mask_decoder edgetam_prompt_encoder edgetam_video "
        "edgetam_video_mask_decoder edgetam_video_prompt_encoder edgetam_vision_model "
        "efficientloftr efficientnet embedding_gemma2 embedding_gemma2_text emu3 emu3_vqgan "
        "encodec encoder-decoder eomt_dinov3 ernie4_5_vl_moe ernie4_5_vl_moe_text "
        "ernie4_5_vl_moe_vision esm esmc esmfold2 evolla exaone4_5 exaone4_5_vision fast_vlm "
        "fastspeech2_conformer fastspeech2_conformer_hifigan fastspeech2_conformer_with_hifigan "
        "flaubert flava flava_image_codebook flava_image_model flava_multimodal_model "
        "flava_text_model flint florence2 florence_vision fnet focalnet fsmt fun_asr_nano "
        "fun_asr_nano_encoder funnel fuyu gemma3 gemma3n gemma3n_audio gemma3n_vision gemma4 "
        "gemma4_assistant gemma4_audio gemma4_unified gemma4_unified_assistant "
        "gemma4_unified_audio gemma4_unified_vision gemma4_vision git git_vision_model glm46v "
        "glm4v glm4v_moe glm5_next glm5_next_text glm5_next_vision glm_image glm_image_text "
        "glm_image_vision glm_image_vqmodel glm_ocr glm_ocr_text glm_ocr_vision glmasr "
        "glmasr_encoder glmga glpn got_ocr2 got_ocr2_vision gpt-sw3 gpt_neox_japanese "
        "gradium_phonon_tts granite4_vision granite_docling granite_docling_vision granite_speech "
        "granite_speech5_ctc granite_speech5_encoder granite_speech_encoder granite_speech_plus "
        "granite_speech_plus_encoder granite_swa granitemoe_swa grounding-dino groupvit "
        "groupvit_text_model groupvit_vision_model gte hgnet_v2 hiera higgs_audio_v2 "
        "higgs_audio_v2_tokenizer hrm_text hunyuan_vl hunyuan_vl_text hunyuan_vl_vision hy_v4 "
        "hyperclovax_vision_v2 ibert idefics idefics2 idefics2_perceiver idefics2_vision idefics3 "
        "idefics_perciever idefics_vision imagegpt informer inkling2 inkling2_text "
        "inkling2_vision inkling_audio inkling_mm_model inkling_text inkling_vision instructblip "
        "instructblip_qformer instructblip_vision_model instructblipvideo "
        "instructblipvideo_qformer instructblipvideo_vision_model internvl janus "
        "janus_vision_model janus_vqgan jetmoe jev jina_embeddings_v3 kimi_k25 kimi_k25_vision "
        "kosmos-2 kosmos-2.5 kosmos_2_5_text_model kosmos_2_5_vision_model kosmos_2_text_model "
        "kosmos_2_vision_model kyutai_speech_to_text lasr_ctc lasr_encoder layoutlm layoutlmv2 "
        "layoutlmv3 layoutxlm led levit lfm2_vl lfm3 lfm3_vl lfm3_vl_vision lightglue lighton_ocr "
        "lilt llama4 llava llava_next llava_next_video llava_onevision longt5 luke lw_detr "
        "lw_detr_vit lxmert markuplm mask2former maskformer maskformer-swin megatron-bert mellum "
        "metaclip_2 metaclip_2_text_model metaclip_2_vision_model mgp-str mimi mimi_decoder "
        "mimi_encoder mimo_v2_flash minicpm_ocr minicpm_ocr_vision minicpmv4_6 minicpmv4_6_vision "
        "minicpmv4_7 minicpmv4_7_vision minimax_m3_vl minimax_m3_vl_text minimax_m3_vl_vision "
        "mistral3 mistral_large4 mistral_large4_text mlcd mlcd_vision_model mllama "
        "mllama_vision_model mm-grounding-dino mobilebert mobilenet_v1 mobilenet_v2 mobilevit "
        "mobilevitv2 modernvbert molmo2 molmo2_adapter molmo2_text molmo2_vision moonshine "
        "moonshine_streaming moonshine_streaming_encoder moshi moshi_depth "
        "moss_transcribe_diarize moss_transcribe_diarize_audio mpnet mra muse_glimmer "
        "muse_glimmer_assistant muse_glimmer_text muse_glimmer_vision muse_spark muse_spark_audio "
        "muse_spark_text muse_spark_vision musicflamingo musicgen musicgen_decoder "
        "musicgen_melody musicgen_melody_decoder mvp nemo_speechlm nemotron3_5_asr "
        "nemotron3_5_transcribe_asr_audio nemotron3_5_transcribe_audio "
        "nemotron3_5_transcribe_word_timestamp nemotron3_diarization nemotron3_diarization_audio "
        "nemotron_asr_streaming nemotron_asr_streaming_encoder nemotron_h_omni neomme neucodec "
        "nllb-moe nougat nystromformer omdet-turbo oneformer openai-gpt openai_privacy_filter "
        "ovis2 ovis2_vision owlv2 owlv2_text_model owlv2_vision_model owlvit owlvit_text_model "
        "owlvit_vision_model paddleocr_vl paddleocr_vl_text paddleocr_vl_vision paligemma "
        "parakeet_ctc parakeet_encoder parakeet_rnnt parakeet_tdt patchtsmixer patchtst pe_audio "
        "pe_audio_encoder pe_audio_video pe_audio_video_encoder pe_video pe_video_encoder "
        "pegasus_x perceiver perception_lm phi4_multimodal phi4_multimodal_audio "
        "phi4_multimodal_vision pi0 pix2struct pix2struct_text_model pix2struct_vision_model "
        "pocket_tts pocket_tts_audio_tokenizer pocket_tts_audio_tokenizer_decoder "
        "pocket_tts_audio_tokenizer_encoder poolformer pop2piano pp_chart2table "
        "pp_chart2table_vision pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 pp_formulanet "
        "pp_formulanet_text pp_formulanet_vision pp_lcnet pp_lcnet_v3 pp_lcnet_v4 "
        "pp_ocrv5_mobile_det pp_ocrv5_mobile_rec pp_ocrv5_server_det pp_ocrv5_server_rec "
        "pp_ocrv6_medium_det pp_ocrv6_small_det pp_ocrv6_small_rec pp_ocrv6_tiny_rec "
        "prompt_depth_anything prophetnet pvt_v2 qianfan_ocr qianfan_ocr_vision qwen2_5_omni "
        "qwen2_5_omni_audio_encoder qwen2_5_omni_bigvgan qwen2_5_omni_dit qwen2_5_omni_talker "
        "qwen2_5_omni_text qwen2_5_omni_thinker qwen2_5_omni_token2wav "
        "qwen2_5_omni_vision_encoder qwen2_5_vl qwen2_audio qwen2_audio_encoder qwen2_vl qwen3_5 "
        "qwen3_5_moe qwen3_asr qwen3_asr_encoder qwen3_omni_moe qwen3_omni_moe_audio_encoder "
        "qwen3_omni_moe_talker_code_predictor qwen3_omni_moe_talker_text qwen3_omni_moe_thinker "
        "qwen3_omni_moe_vision_encoder qwen3_vl qwen3_vl_moe qwen4_exp qwen4_exp_text "
        "qwen4_exp_vision radio rag reformer regnet rembert resnet rf_detr roberta-prelayernorm "
        "roformer rt_detr rt_detr_resnet rt_detr_v2 rwkv sam sam2 sam2_hiera_det_model "
        "sam2_mask_decoder sam2_prompt_encoder sam2_video sam2_video_mask_decoder "
        "sam2_video_prompt_encoder sam2_vision_model sam3 sam3_detr_decoder sam3_detr_encoder "
        "sam3_geometry_encoder sam3_lite_text sam3_lite_text_detr_decoder "
        "sam3_lite_text_detr_encoder sam3_lite_text_geometry_encoder sam3_lite_text_mask_decoder "
        "sam3_mask_decoder sam3_tracker sam3_tracker_mask_decoder sam3_tracker_prompt_encoder "
        "sam3_tracker_video sam3_tracker_video_mask_decoder sam3_tracker_video_prompt_encoder "
        "sam3_video sam3_vision_model sam3_vit_model sam_hq sam_hq_mask_decoder "
        "sam_hq_prompt_encoder sam_mask_decoder sam_prompt_encoder sapiens2 sapiens2_head "
        "seamless_m4t seamless_m4t_v2 seggpt sew sew-d shieldgemma2 siglip siglip2 slanet slanext "
        "slanext_vision smolvlm smolvlm_vision speech-encoder-decoder speech_to_text speecht5 "
        "speecht5_hifigan splinter squeezebert step3p5 step3p5_vision step3p7 superglue "
        "superpoint swiftformer swin2sr t5_gemma_module t5gemma2 t5gemma2_decoder "
        "t5gemma2_encoder t5gemma2_text table-transformer tapas textnet time_series_transformer "
        "timesfm timesfm2_5 timesformer timm_backbone timm_wrapper tipsv2 tipsv2_dpt "
        "tipsv2_text_model trocr tvp udop ultrabert ultravbert unispeech unispeech-sat univnet "
        "unlimited_ocr unlimited_ocr_sam_vision_model unlimited_ocr_text unlimited_ocr_vision "
        "unlimited_ocr_vision_encoder upernet uvdoc uvdoc_backbone vibevoice "
        "vibevoice_acoustic_tokenizer vibevoice_acoustic_tokenizer_decoder "
        "vibevoice_acoustic_tokenizer_encoder vibevoice_asr vibevoice_diffusion video_llama_3 "
        "video_llama_3_vision video_llava videomae videoprism videoprism_text_model "
        "videoprism_vision_model vilt vipllava vision-encoder-decoder vision-text-dual-encoder "
        "visual_bert vitdet vitmatte vitpose vitpose_backbone vits vjepa2 voxtral voxtral_encoder "
        "voxtral_realtime voxtral_realtime_encoder wav2vec2-bert wav2vec2-conformer wavlm xclip "
        "xclip_text_model xclip_vision_model xcodec xcodec2 xglm xlm xlm-roberta-xl xlstm xmod "
        "yolos yoso zamba zamba2 zaya zoedepth"
    ).split()
)
# Fields of their classes that their attention does not read, and that of others does.
CLASS_FIELDS: dict[str, tuple[str, ...]] = {
    "arcee": ("mlp_bias",),
    "aria_text": ("mlp_bias",),
    "axk1": ("qk_head_dim",),
    "bamba": ("layer_types", "mlp_bias"),
    "bart": ("dropout", "is_decoder"),
    "blenderbot": ("dropout", "is_decoder"),
    "blenderbot-small": ("dropout", "is_decoder"),
    "csm": ("mlp_bias",),
    "cwm": ("mlp_bias",),
    "deepseek_v2": ("mlp_bias", "qk_head_dim"),
    "deepseek_v3": ("qk_head_dim",),
    "deepseek_v32": ("mlp_bias", "qk_head_dim"),
    "dinov3_vit": ("mlp_bias",),
    "distilbert": ("dropout",),
    "eurobert": ("mlp_bias",),
    "falcon_h1": ("layer_types", "mlp_bias"),
    "falcon_mamba": ("time_step_min",),
    "gemma2": ("hidden_activation",),
    "gemma3_text": ("attn_logit_softcapping", "hidden_activation"),
    "gemma3n_text": ("hidden_activation",),
    "gemma4_text": ("hidden_activation",),
    "gemma4_unified_text": ("hidden_activation",),
    "glm4_moe_lite": ("qk_head_dim",),
    "glm_moe_dsa": ("mlp_bias", "qk_head_dim"),
    "gpt_bigcode": ("num_key_value_heads",),
    "gpt_neox": ("is_decoder",),
    "granite": ("mlp_bias",),
    "granite4_vision_text": ("mlp_bias",),
    "granite_docling_text": ("mlp_bias",),
    "helium": ("mlp_bias",),
    "hubert": ("conv_bias", "conv_kernel"),
    "hy_v3": ("mlp_bias",),
    "hyperclovax": ("mlp_bias",),
    "iquestcoder": ("mlp_bias",),
    "jais2": ("mlp_bias",),
    "kimi_linear": ("qk_head_dim",),
    "llama": ("mlp_bias",),
    "m2m_100": ("dropout",),
    "mamba": ("time_step_min",),
    "mamba2": ("time_step_min", "time_step_rank"),
    "marian": ("dropout", "is_decoder"),
    "mbart": ("dropout", "is_decoder"),
    "minicpm3": ("mlp_bias", "qk_head_dim"),
    "mistral4": ("qk_head_dim",),
    "modernbert": ("hidden_activation", "mlp_bias"),
    "modernbert-decoder": ("hidden_activation", "mlp_bias"),
    "mt5": ("is_decoder",),
    "nemotron": ("mlp_bias",),
    "nemotron_h": (
        "attention_bias",
        "expand",
        "mamba_proj_bias",
        "mlp_bias",
        "n_group",
        "sliding_window",
        "time_step_limit",
        "time_step_max",
    ),
    "opt": ("dropout",),
    "pegasus": ("dropout", "is_decoder"),
    "plbart": ("dropout", "is_decoder"),
    "qwen2_5_vl_vision": ("window_size",),
    "qwen2_vl_vision": ("hidden_size",),
    "qwen3_omni_moe_text": ("sliding_window",),
    "qwen3_vl_moe_text": ("sliding_window",),
    "recurrent_gemma": ("layer_types",),
    "seed_oss": ("mlp_bias",),
    "smollm3": ("mlp_bias",),
    "switch_transformers": ("is_decoder",),
    "t5": ("is_decoder",),
    "t5gemma": ("dropout_rate",),
    "umt5": ("is_decoder",),
    "vaultgemma": ("hidden_activation",),
    "wav2vec2": ("conv_bias", "conv_kernel"),
    "whisper": ("dropout", "num_key_value_heads"),
    "youtu": ("qk_head_dim",),
}
