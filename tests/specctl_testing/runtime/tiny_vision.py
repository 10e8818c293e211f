"""Tiny random multimodal models with processors, in folders: LLaVA's layout and Qwen2-VL's."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPImageProcessor
from transformers.models.qwen2_vl import Qwen2VLImageProcessor

from specctl.runtime.target.vision import without_video
from specctl.train.pretrain.data import train_tokenizer

TEXT = {
    "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "initializer_range": 0.25,
    "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 5, "pad_token_id": None,
}  # fmt: skip
CLIP = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "image_size": 16,
        "patch_size": 4, "num_attention_heads": 2, "initializer_range": 0.5}  # fmt: skip
LATER = {"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "patch_size": 4,
         "intermediate_size": 32, "spatial_merge_size": 2, "initializer_range": 0.5}  # fmt: skip
QWEN: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 4,
                 "mlp_ratio": 2, "spatial_merge_size": 2, "initializer_range": 0.5},
    "qwen2_5_vl": {**LATER, "window_size": 16, "fullatt_block_indexes": [1]},
    "qwen3_vl": {**LATER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
MARKS = ["<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}PLACE"
    "{%- else -%}{{ part['text'] }}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "<|end|>{%- endfor -%}<|assistant|>"
)


@cache
def _tokenizer() -> Any:
    words = [f"hello world {i}, how are you?\ndef f{i}(x):\n    return x" for i in range(40)]
    return train_tokenizer(words, 300, 512)


def make_folder(folder: Path, kind: str, seed: int = 0) -> Any:
    """A random model of that kind and its processor, saved; the model."""
    tokenizer = copy.deepcopy(_tokenizer())
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    assert len(tokenizer) <= TEXT["vocab_size"]
    ids = dict(zip(MARKS, tokenizer.convert_tokens_to_ids(MARKS), strict=True))
    template = TEMPLATE.replace("PLACE", "<image>" if kind == "llava" else PLACE)
    fields: dict[str, Any]
    if kind == "llava":
        fields = {"text_config": {"model_type": "llama", **TEXT}, "image_token_id": ids["<image>"],
                  "vision_config": {"model_type": "clip_vision_model", **CLIP}}  # fmt: skip
    else:
        fields = {"text_config": {**TEXT, "rope_parameters": MROPE}, "vision_config": QWEN[kind],
                  "image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"],
                  "vision_start_token_id": ids["<|vision_start|>"],
                  "vision_end_token_id": ids["<|vision_end|>"]}  # fmt: skip
    config = AutoConfig.for_model(kind, **fields)
    made, how = without_video(config), {"chat_template": template}
    if kind == "llava":
        size = {"height": 16, "width": 16}
        images = CLIPImageProcessor(size=size, crop_size=size)
        about = {"patch_size": 4, "num_additional_image_tokens": 1}
        processor = made(
            images, tokenizer, vision_feature_select_strategy="default", **about, **how
        )
    else:
        size = {"shortest_edge": 64, "longest_edge": 1600}
        images = Qwen2VLImageProcessor(size=size, patch_size=4, merge_size=2)
        processor = made(images, tokenizer, **how)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


def picture(seed: int, width: int = 20, height: int = 14) -> Any:
    """A PIL image of noise in large squares."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (3, 3, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy()).resize((width, height), Image.Resampling.NEAREST)
