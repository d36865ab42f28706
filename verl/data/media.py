"""Prompts with images and videos: media columns and chat messages -> token ids and the tensors of the processor."""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.columns import strict_check_enabled
from verl.config import schema
from verl.data.images import MediaError
from verl.data.messages import Message, read_message, with_settings
from verl.data.tokenization import check_encodable, check_rendering, encode, render_chats

if TYPE_CHECKING:
    from verl.data.images import RowImage
    from verl.data.videos import Video

logger = logging.getLogger("verl.data")

_PLACEHOLDER = re.compile(r"(<image>|<video>)")
_PART_KEYS = {"type", "text", "image", "image_url", "video", "bytes", "path", "url", "fps"}
#: outputs of the processor that are not tensors of images or videos
_TEXT_OUTPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
_MODALITIES = ("image", "video")
_DECODED = 128  # rows at the start of the data, and as many evenly spaced, whose images are decoded at the start
_SIZES = 4096  # sizes of images whose placeholders are kept


@dataclass(frozen=True)
class MediaPrompt:
    """A chat with its images and videos, which are not decoded yet.

    Attributes:
        messages: chat messages; the content is text or a list of parts {"type": "text" | "image" | "video", ...}.
        images, videos: in the order of their parts.
        location: names the row in errors.
    """

    messages: list[Message]
    images: "tuple[RowImage, ...]"
    videos: "tuple[Video, ...]"
    location: str

    def decode(self) -> None:
        """Decode all images and videos. Raises MediaError for one that cannot be used."""
        for media in (*self.images, *self.videos):
            media.decode()

    def describe(self) -> list[str]:
        """A line about the images, with the size of each, and one about the videos; none without any."""
        sizes = ", ".join("{} x {}".format(*image.size()) for image in self.images)
        lines = [f"images: {len(self.images)}, {sizes}"] if self.images else []
        return [*lines, f"videos: {len(self.videos)}"] if self.videos else lines

    def texts(self) -> list[str]:
        """The texts of all messages."""
        return [text for message in self.messages for text in _texts(message["content"])]


class MediaReader:
    """Reads prompts with images and videos for one model.

    Args:
        processor: the model's processor (`load_processor`).
        tokenizer: its tokenizer.
        data: the section with image_key, video_key, the limits and mm_processor_kwargs.
        template_kwargs: arguments of the chat template.
        chat_template: Jinja text that replaces the tokenizer's template.
        tools: schemas of the tools that the prompts describe.
    """

    def __init__(
        self,
        processor: Any,
        tokenizer: Any,
        data: schema.MediaSection,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ):
        from verl.data.images import ImageLimits

        self.processor, self.tokenizer, self.data = processor, tokenizer, data
        self.limits = ImageLimits(data.min_pixels, data.max_pixels)
        self._rendering = {"chat_template": chat_template, "tools": tools, "template_kwargs": template_kwargs}
        self._placeholder = functools.lru_cache(_SIZES)(self._placeholder_for_size)
        ids = [getattr(processor, f"{modality}_token_id", None) for modality in _MODALITIES]
        tokens = {self._token(modality) for modality in _MODALITIES}
        tokens |= {tokenizer.convert_ids_to_tokens(i) for i in ids if i}
        # the token of LLaVA is the placeholder of data files
        tokens -= {None, *(f"<{modality}>" for modality in _MODALITIES)}
        self._media_token = re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    # ---- reading ----------------------------------------------------------------------------------------------------

    def read(self, row: Mapping[str, Any], prompt: Any, folder: Path, location: str) -> MediaPrompt | None:
        """The prompt of a row with images or videos; None for a text-only row.

        Args:
            row: its media columns are read.
            prompt: text or messages, with `<image>` and `<video>` where the media are, or with typed parts.
            folder: where relative paths start.
            location: names the row in errors.

        Raises:
            MediaError: another number of placeholders than of images or videos, or text with the
                model's own token of an image or video.
        """
        from verl.data.images import RowImage
        from verl.data.videos import Video

        keys = {"image": self.data.image_key, "video": self.data.video_key}
        entries = {modality: _as_list(row.get(key)) for modality, key in keys.items()}
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        parts = _content_parts(messages)
        self._check_texts(parts, location)
        is_chat = isinstance(messages, Sequence | np.ndarray)
        has_parts = any(isinstance(part, Mapping) and part.get("type", "image") != "text" for part in parts)
        if not is_chat or not (any(entries.values()) or has_parts):
            self._check_no_placeholders(row, keys, messages, location)
            return None
        sources: dict[str, list[Any]] = {"image": [], "video": []}
        unread = {modality: iter(values) for modality, values in entries.items()}
        typed = [_typed_message(message, sources, unread, location) for message in messages]
        for modality, key in keys.items():
            has_missing = any(source is _MISSING for source in sources[modality])
            if has_missing or next(unread[modality], _MISSING) is not _MISSING:
                raise MediaError(
                    f"{location}: expected one <{modality}> in the prompt for each entry of the column {key!r}, found "
                    f"{len(sources[modality])} in the prompt and {len(entries[modality])} in the column: add or remove "
                    f"<{modality}>"
                )
        limits, frames = self.limits, self.data.max_video_frames
        images = (RowImage(s, f"{location}, image {i}", folder, limits) for i, s in enumerate(sources["image"]))
        videos = (Video(s, f"{location}, video {i}", folder, limits, frames) for i, s in enumerate(sources["video"]))
        chat = with_settings(typed, row, location, self._rendering["tools"])
        return MediaPrompt(chat, tuple(images), tuple(videos), location)

    def _check_texts(self, parts: Sequence[Any], location: str) -> None:
        """Raise MediaError if a text has a token of the model that stands for an image or video."""
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
        for text in texts:
            if isinstance(text, str) and (match := self._media_token.search(text)):
                raise MediaError(
                    f"{location}: expected text without {match[0]}, which the model reads as an image or video, found "
                    f"{text[max(match.start() - 20, 0) : match.end() + 20]!r}: remove it, or write <image> or <video> "
                    "with an entry in the column of images or videos"
                )

    def _check_no_placeholders(
        self, row: Mapping[str, Any], keys: Mapping[str, str], messages: Any, location: str
    ) -> None:
        """Raise MediaError if a text-only row has placeholders."""
        if not isinstance(messages, Sequence):
            return
        for modality, key in keys.items():
            texts = [m["content"] for m in messages if isinstance(m, Mapping) and isinstance(m.get("content"), str)]
            count = sum(text.count(f"<{modality}>") for text in texts)
            if count and key not in row:
                raise MediaError(
                    f"{location}: the prompt has <{modality}>, but there is no column {key!r} among "
                    f"{', '.join(map(repr, row))}: set data.{modality}_key, or remove <{modality}>"
                )
            if count:
                raise MediaError(
                    f"{location}: expected one entry in the column {key!r} for each <{modality}> of the prompt, "
                    f"found {count} in the prompt and none in the column: add the {modality}, or remove <{modality}>"
                )

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def token_ids(self, prompt: MediaPrompt) -> list[int]:
        """Token ids with expanded placeholders. Of images only the headers are read; videos are decoded. Raises
        MediaError for an image that cannot be used, or a chat template without placeholders."""
        text, settings = self.render(prompt), {**self._rendering, "add_generation_prompt": True}
        check_rendering(self.tokenizer, [prompt.messages], [text], lambda _: prompt.location, **settings)
        return encode(self.tokenizer, [self.expander(prompt)(text)], add_special_tokens=False)[0]

    def expander(self, prompt: MediaPrompt) -> Callable[[str], str]:
        """A function that expands the placeholders of the rendered prompt, or of its parts one after the other."""
        media = {"image": iter(prompt.images), "video": iter(prompt.videos)}
        modalities = {token: modality for modality in media if (token := self._token(modality)) is not None}

        def expanded(match: re.Match[str]) -> str:
            modality = modalities[match[0]]
            medium = next(media[modality])
            with _locate_errors(medium.location):
                if modality == "video":
                    return self._expanded(match[0], **_video_inputs([medium]))
                return self._placeholder(*medium.size())

        pattern = re.compile("|".join(map(re.escape, modalities)))
        return lambda text: pattern.sub(expanded, text)

    def process(self, prompt: MediaPrompt) -> dict[str, Any]:
        """Decode the images and videos, and run the processor.

        Returns:
            The columns prompt_ids, raw_prompt_ids, multi_modal_data and multi_modal_inputs.

        Raises:
            MediaError: an image or video that cannot be used, or that the processor refuses.
        """
        text = self.render(prompt)
        media = _video_inputs(prompt.videos)
        if prompt.images:
            media["images"] = [image.decode() for image in prompt.images]
        with _locate_errors(prompt.location):
            outputs = self._processed(text, return_tensors="pt", **media)
        inputs = {name: value for name, value in outputs.items() if name not in _TEXT_OUTPUTS}
        raw = encode(self.tokenizer, [text], add_special_tokens=False)[0]
        data = {"images": media["images"]} if "images" in media else {}
        if prompt.videos:  # engines need the times of the frames, and must not choose among them
            metadata = ({**entry, "do_sample_frames": False} for entry in media["video_metadata"])
            data["videos"] = list(zip(media["videos"], metadata))
        ids = outputs["input_ids"][0].tolist()
        return {"prompt_ids": ids, "raw_prompt_ids": raw, "multi_modal_data": data, "multi_modal_inputs": inputs}

    def columns(self, prompt: Any, prompt_ids: list[int]) -> dict[str, Any]:
        """The columns of media of an item, decoded if the prompt is a MediaPrompt.

        Args:
            prompt: a MediaPrompt, or the prompt of a text-only row.
            prompt_ids: its token ids.

        Raises:
            MediaError: as `process`, and if the processor returns other tokens than `prompt_ids`.
        """
        if not isinstance(prompt, MediaPrompt):
            return {"raw_prompt_ids": prompt_ids, "multi_modal_data": None, "multi_modal_inputs": None}
        columns = self.process(prompt)
        if (ids := columns.pop("prompt_ids")) != prompt_ids:
            raise MediaError(
                f"{prompt.location}: expected the {len(prompt_ids):,} tokens that the prompt had when the data was "
                f"read, found {len(ids):,}: the files of the images or videos have changed"
            )
        return columns

    def tensors(self, example: Any, ids: Sequence[int]) -> dict[str, Any] | None:
        """The processor's tensors of an SFT example; None for a text-only one.

        Args:
            example: a MediaPrompt, or an example of text.
            ids: its token ids, which are tokenized turn by turn.

        Raises:
            MediaError: as `process`, and for images that have changed.
        """
        if not isinstance(example, MediaPrompt):
            return None
        processed = self.process(example)
        tokens = filter(None, map(self._token, _MODALITIES))
        special = {self.tokenizer.convert_tokens_to_ids(token) for token in tokens}
        expected, count = (sum(token in special for token in tokens) for tokens in (ids, processed["prompt_ids"]))
        if count != expected:
            raise MediaError(
                f"{example.location}: expected {expected:,} image and video tokens, found {count:,}: the files of the "
                "images or videos have changed"
            )
        return processed["multi_modal_inputs"]

    def render(self, prompt: MediaPrompt) -> str:
        """The rendered chat. Raises MediaError if it has not one placeholder for each image and video."""
        if self._rendering["chat_template"] is None and self.tokenizer.chat_template is None:
            raise MediaError(f"{prompt.location}: images need a chat template: set model.custom_chat_template")
        (text,) = render_chats(
            self.tokenizer,
            [prompt.messages],
            add_generation_prompt=prompt.messages[-1]["role"] != "assistant",
            location=lambda _: prompt.location,
            **self._rendering,
        )
        for modality, media in (("image", prompt.images), ("video", prompt.videos)):
            token = self._token(modality)
            if token is None and media:
                raise MediaError(f"{prompt.location}: {type(self.processor).__name__} does not support {modality}s")
            count = text.count(token) if token is not None else 0
            if count != len(media):
                raise MediaError(
                    f"{prompt.location}: expected {len(media)} placeholders {token} in the rendered chat, found "
                    f"{count}: the text must not contain {token}, and the chat template must write it for every part "
                    f'{{"type": "{modality}"}}'
                )
        return text

    def _token(self, modality: str) -> str | None:
        """The placeholder of an image or video in a rendered chat; None if the model does not read any."""
        return getattr(self.processor, f"{modality}_token", None)  # Gemma 3 has no video token

    def _placeholder_for_size(self, width: int, height: int) -> str:
        """The expanded placeholder of an image of this size."""
        from PIL import Image

        images, token = self.processor.image_processor, self._token("image")
        replace = getattr(self.processor, "replace_image_token", None)  # processors of custom code may lack it
        if self.data.mm_processor_kwargs or replace is None:
            return self._expanded(token, images=[Image.new("RGB", (width, height))])
        if "image_grid_thw" in images.model_input_names:  # Qwen-VL: no pixels are needed
            patches = images.get_number_of_image_patches(height, width)
            return replace({"image_grid_thw": np.array([[1, 1, patches]])}, 0)
        return replace(images([Image.new("RGB", (width, height))], return_tensors="pt"), 0)

    def _expanded(self, token: str, **media: Any) -> str:
        """The text that the processor writes for one placeholder."""
        outputs = self._processed(token, **media)
        return self.tokenizer.decode(outputs["input_ids"][0], skip_special_tokens=False)

    def _processed(self, text: str, **media: Any) -> Any:
        """The outputs of the processor for one text. Padding would set the tokenizer, which other threads use."""
        kwargs = {"add_special_tokens": False, "padding": False, **media, **self.data.mm_processor_kwargs}
        return self.processor(text=[text], **kwargs)


def prompt_texts(prompt: str | Sequence[Message] | MediaPrompt) -> list[str]:
    """The texts of a prompt of any form."""
    if isinstance(prompt, MediaPrompt):
        return prompt.texts()
    return [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]


def media_columns(data: schema.MediaSection) -> tuple[str, str]:
    """The columns of images and videos."""
    return data.image_key, data.video_key


def rows_to_decode(count: int) -> Collection[int]:
    """The rows whose images are decoded when the data is read: evenly spaced ones; all in a strict check."""
    if strict_check_enabled():
        return range(count)
    return {*range(min(_DECODED, count)), *range(0, count, max(count // _DECODED, 1))}


def note_unused_media_keys(data: schema.MediaSection, processor: Any) -> None:
    """Warn of settings of images that are set for a text-only model."""
    changed = [name for name, _ in data.__repr_args__() if name in schema.MediaSection.model_fields]
    if processor is None and changed:
        logger.warning("no effect, because the model reads no images: %s", ", ".join(f"data.{n}" for n in changed))


# ---- messages -------------------------------------------------------------------------------------------------------

_MISSING = object()


def _typed_message(
    message: Any, sources: dict[str, list[Any]], columns: Mapping[str, Iterator[Any]], location: str
) -> Message:
    """A message whose content has typed parts; the sources of its images and videos are appended to `sources`."""
    message = read_message(message, location) if isinstance(message, Mapping) else message
    if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
        example = '{"role": "user", "content": ...}'
        raise MediaError(f"{location}: expected messages like {example}, found {message!r:.200}")
    content = message["content"]
    if isinstance(content, str):
        fragments = [fragment for fragment in _PLACEHOLDER.split(content) if fragment]
        parts = [{"type": p[1:-1]} if _PLACEHOLDER.fullmatch(p) else {"type": "text", "text": p} for p in fragments]
    else:
        parts = [_content_part(part, location) for part in _as_list(content)]
    kept: list[dict[str, Any]] = []
    for part in parts:
        modality = part["type"]
        if modality == "text":
            check_encodable(part["text"], location)
            kept.append({"type": "text", "text": part["text"]})
            continue
        source = part["source"] if "source" in part else next(columns[modality], _MISSING)
        sources[modality].append(source)
        kept.append({"type": modality})
    has_media = any(part["type"] != "text" for part in kept)
    return {**message, "content": kept if has_media else "".join(part["text"] for part in kept)}


def _content_part(part: Any, location: str) -> dict[str, Any]:
    """A content part of a message as {"type": "text", "text": ...} or {"type": "image" | "video", "source": ...}."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    fields = {key: value for key, value in part.items() if value is not None} if isinstance(part, Mapping) else {}
    modality = fields.get("type") or next((k for k in ("text", "image", "video", "image_url") if k in fields), None)
    modality = "image" if modality == "image_url" else modality
    if modality == "text" and isinstance(fields.get("text"), str):
        return {"type": "text", "text": fields["text"]}
    if modality not in ("image", "video") or set(fields) - _PART_KEYS:
        keys = ", ".join(sorted(_PART_KEYS))
        raise MediaError(
            f'{location}: expected parts like {{"type": "text", "text": ...}}, {{"type": "image"}} or '
            f'{{"type": "video"}} with the keys {keys}, found {str(part)[:200]}'
        )
    if modality == "video":
        source = fields if "fps" in fields else fields.get("video", fields)
    else:
        source = fields.get("image", fields)
    inline = set(fields) - {"type", "text", "fps"}
    return {"type": modality, "source": source} if inline else {"type": modality}


def _content_parts(messages: Any) -> list[Any]:
    """The parts of the contents of all messages; a text is one part."""
    chat = messages if isinstance(messages, Sequence | np.ndarray) else ()
    contents = [message.get("content") for message in chat if isinstance(message, Mapping)]
    return [part for content in contents for part in _as_list(content)]


def _texts(content: Any) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]


def _as_list(value: Any) -> list[Any]:
    """The entries of a media column: a list of them, or one."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [entry for entry in value if entry is not None]
    if isinstance(value, np.ndarray) and value.dtype == object:
        return list(value)
    return [value] if not isinstance(value, str) or value else []


def _video_inputs(videos: "Sequence[Video]") -> dict[str, Any]:
    """Arguments of a processor for decoded videos, whose frames are chosen already."""
    if not videos:
        return {}
    decoded = [video.decode() for video in videos]
    return {
        "videos": [video.frames for video in decoded],
        "video_metadata": [video.metadata for video in decoded],
        "do_sample_frames": False,
    }


@contextlib.contextmanager
def _locate_errors(location: str) -> Iterator[None]:
    """Name the row in errors of the processor."""
    try:
        yield
    except MediaError:
        raise
    except (ValueError, TypeError, RuntimeError, ImportError) as error:
        raise MediaError(f"{location}: the model's processor rejects it: {error}") from error
