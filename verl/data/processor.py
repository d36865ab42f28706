"""The processor of a vision-language model, also without torchvision."""

import logging
import shutil
from pathlib import Path
from typing import Any

from verl.config import schema
from verl.modeling.huggingface import model_source
from verl.utils.paths import read_json

_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")

logger = logging.getLogger("verl.data")


def load_processor(model: schema.ModelConfig, tokenizer: Any) -> Any | None:
    """Load the processor of a model; None for a text-only model.

    Without torchvision, the image processor is the PIL one of transformers, and videos are refused when they are used.

    Args:
        model: a `model` section.
        tokenizer: the tokenizer of the run. It gets the processor's chat template if it has none.

    Raises:
        ValueError: the model reads images, but its processor cannot be loaded.
    """
    from transformers import AutoConfig

    path = model_source(model.path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError):  # reported with the model, which knows more
        return None
    if "vision_config" not in type(config).sub_configs:
        return None
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError(f"{model.path} reads images, which needs Pillow: pip install pillow") from error
    try:
        processor = _load(path, config, tokenizer, model.trust_remote_code)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ValueError(
            f"the processor of {model.path} cannot be loaded: {error}\nExpected preprocessor_config.json beside the "
            "model, and the packages that the processor needs (pip install pillow torchvision; torchvision must be "
            "built for the installed torch)"
        ) from error
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor.chat_template
    return processor


def copy_processor_files(model: schema.ModelConfig, folder: Path) -> None:
    """Copy the files of a model's processor, if it has any, into the folder of a saved model."""
    from huggingface_hub import try_to_load_from_cache

    source = model_source(model.path)
    for name in _FILES:
        file = Path(source) / name if Path(source).is_dir() else try_to_load_from_cache(source, name)
        if isinstance(file, str | Path) and Path(file).is_file():
            shutil.copyfile(file, folder / name)


def media_tokens(processor: Any) -> dict[str, int] | None:
    """Token ids of images and videos and patches per token, for the strict check; None if it cannot count them."""
    if processor is None or "image_grid_thw" not in processor.image_processor.model_input_names:
        return None
    patches = processor.image_processor.merge_size**2
    return {"image": processor.image_token_id, "video": processor.video_token_id, "patches": patches}


def _load(path: str, config: Any, tokenizer: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoImageProcessor, AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
    from transformers.utils import is_torchvision_available

    registered = None if is_torchvision_available() or trust_remote_code else PROCESSOR_MAPPING[type(config)]
    if registered is None or "video_processor" not in registered.get_attributes():
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust_remote_code)
        processor.tokenizer = tokenizer
        return processor
    logger.info("torchvision is not installed: images are read by Pillow, videos are not supported")
    processor_class = type(registered.__name__, (_WithoutVideos, registered), {})
    images = AutoImageProcessor.from_pretrained(path)
    template, file = tokenizer.chat_template, Path(path) / "chat_template.json"
    if template is None and file.is_file():
        template = read_json(file)["chat_template"]
    components = {"image_processor": images, "tokenizer": tokenizer, "video_processor": _NoVideos()}
    return processor_class(**components, chat_template=template)


class _WithoutVideos:
    """Mixin of a processor class: its video processor may be `_NoVideos`."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if isinstance(argument, _NoVideos):
            return _NoVideos
        return super().check_argument_for_proper_class(argument_name, argument)  # type: ignore[misc]


class _NoVideos:
    """The video processor without torchvision."""

    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError(
            "videos need the package torchvision, which the video processors of transformers use: pip install "
            "torchvision (built for the installed torch)"
        )
