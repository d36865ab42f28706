"""Model types whose layers are computed by the fused functions of `layers`, and types of layers."""

#: model types with the norm, MLP and rotary embedding of Llama
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
#: the same with a mixture of experts instead of some MLPs
MIXTURES = ("qwen3_moe", "mixtral")
#: the same as LLAMA_LIKE for the language models of vision-language models
VISION_LIKE = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text")
#: values of `layer_types` of a config whose layers attend to earlier tokens of their sequence and do nothing else
ATTENTION_LAYERS = ("full_attention", "sliding_attention")
