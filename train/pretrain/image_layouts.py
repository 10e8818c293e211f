"""Layouts of small multimodal models that are made from nothing: LLaVA's (a CLIP tower, a
projector, a Llama; every image has one size) and Qwen2-VL's (a tower for images of several sizes, a
Qwen2 with M-RoPE).

A layout says how a text spells an image, and makes configuration and processor around a tokenizer.
LLaVA: https://arxiv.org/abs/2304.08485. Qwen2-VL: https://arxiv.org/abs/2409.12191.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specctl.images.shapes import SIZE
from specctl.runtime.target.vision import without_video

MARK = "<image>"
PAD, VIDEO = "<|image_pad|>", "<|video_pad|>"
FIRST, LAST = "<|vision_start|>", "<|vision_end|>"


@dataclass(frozen=True, slots=True)
class LayoutParts:
    """What a layout is made of: the sections `text` and `tower` of the configuration as they are,
    and the sides that images have, in pixels."""

    text: Mapping[str, Any]
    tower: Mapping[str, Any]
    sides: Sequence[int]


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """`spelled`: an image in a text; `read`: what of it the tokenizer is trained on; `marks`: the
    tokens that are added for it. `make`: configuration and processor of those parts."""

    spelled: str
    read: str
    marks: tuple[str, ...]
    make: Callable[[LayoutParts, Any, Sequence[int]], tuple[Any, Any]]

    def made(self, parts: LayoutParts, tokenizer: Any) -> tuple[Any, Any]:
        """The configuration, and the processor with that tokenizer."""
        tokenizer.add_special_tokens({"additional_special_tokens": list(self.marks)})
        return self.make(parts, tokenizer, tokenizer.convert_tokens_to_ids(list(self.marks)))


def _llava(parts: LayoutParts, tokenizer: Any, ids: Sequence[int]) -> tuple[Any, Any]:
    from transformers import AutoConfig, CLIPImageProcessor

    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", **parts.text, "vocab_size": len(tokenizer)},
        vision_config={"model_type": "clip_vision_model", **parts.tower, "image_size": SIZE},
        image_token_id=ids[0],
        image_token_index=ids[0],
    )
    size = {"height": SIZE, "width": SIZE}
    processor = without_video(config)(
        CLIPImageProcessor(size=size, crop_size=size), tokenizer,
        patch_size=int(parts.tower["patch_size"]), num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )  # fmt: skip
    return config, processor


def _qwen2_vl(parts: LayoutParts, tokenizer: Any, ids: Sequence[int]) -> tuple[Any, Any]:
    from transformers import AutoConfig
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor

    pad, video, first, last = ids
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config={**parts.text, "vocab_size": len(tokenizer)},
        vision_config=dict(parts.tower),
        image_token_id=pad,
        video_token_id=video,
        vision_start_token_id=first,
        vision_end_token_id=last,
    )
    images = Qwen2VLImageProcessor(
        size={"shortest_edge": min(parts.sides) ** 2, "longest_edge": max(parts.sides) ** 2},
        patch_size=int(parts.tower["patch_size"]),
        merge_size=int(parts.tower["spatial_merge_size"]),
    )
    return config, without_video(config)(images, tokenizer)


LAYOUTS = {
    "llava": ImageLayout(MARK, f"{MARK} ", (MARK,), _llava),
    "qwen2-vl": ImageLayout(f"{FIRST}{PAD}{LAST}", "", (PAD, VIDEO, FIRST, LAST), _qwen2_vl),
}
