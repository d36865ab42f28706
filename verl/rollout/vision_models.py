"""The models with images that vLLM and SGLang compute as training does."""

from typing import Any

from verl.modeling.vision import BIDIRECTIONAL, is_vision_config

#: model types whose log-probs have been compared with those of training
VISION_MODELS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def check_images(engine: str, hf_config: Any) -> None:
    """Raise ValueError for a model with images that this engine does not compute as training does.

    Args:
        engine: vllm or sglang.
        hf_config: HuggingFace config of the model.
    """
    kind = hf_config.model_type
    if not is_vision_config(hf_config) or kind in VISION_MODELS:
        return
    if kind in BIDIRECTIONAL:
        reason, others = (
            f"the tokens of an image attend to each other in both directions, which {engine} computes with some of its "
            "attention kernels only; with others the log-probs are not those of training",
            "native or hf",
        )
    else:
        reason, others = "its weights and positions have not been compared with those of training", "hf"
    raise ValueError(
        f"rollout.name={engine}: expected a vision-language model of {', '.join(VISION_MODELS)}, found {kind}: "
        f"{reason}. Use rollout.name={others} (docs/vlm.md)"
    )
