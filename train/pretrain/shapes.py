"""A small multimodal target from nothing: LLaVA's layout (a CLIP tower, a projector, a Llama),
trained on rendered shapes and their captions (images/shapes.py).

It answers one question of an image, as a chat model (`chat`) or as a text that goes on behind
`<image> What is this?`. OUT/export is a folder of transformers with its processor, which
`specctl generate --image` reads. A run of some minutes, which is not continued: it begins anew.
LLaVA: https://arxiv.org/abs/2304.08485. Letters: B rows, T tokens.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from specctl.core.errors import DivergedError, FileError
from specctl.core.messages.installed import library
from specctl.core.storage.files import write_json
from specctl.core.storage.model_folder import CONFIG
from specctl.images.shapes import QUESTION, SIZE, Scene, named, scene
from specctl.recipes.section import Positive, Section, SeedNumber
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.vision import without_video
from specctl.train.pretrain.data import END, train_tokenizer
from specctl.train.pretrain.own_section import own_section

EXPORT, REPORT = "export", "shapes.json"
MARK = "<image>"
HELDOUT_SEED = 1_000_000  # added to the seed of what is learned from
IGNORED = -100  # the label of a token that is not learned
CHAT = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|user|>\\n' }}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


class ShapesRecipe(Section):
    """What decides such a target: `scenes` to learn from and `heldout` others; the tokenizer's
    `words`; `text` and `tower`, handed to the configurations of a Llama and of CLIP's vision tower
    as they are; whether it is a `chat` model; its training by AdamW, whose rate rises over `warmup`
    steps and falls over the last third."""

    scenes: Positive
    heldout: Positive
    words: Positive
    text: dict[str, Any]
    tower: dict[str, Any]
    chat: bool
    steps: Positive
    rows: Positive
    warmup: Positive
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)]
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)]
    seed: SeedNumber


@dataclass(frozen=True, slots=True)
class ShapesReport:
    """On held-out scenes: the loss of their captions in nats a token, the share of the words by
    which captions differ that greedy captions name, and of captions that name all of them and no
    other."""

    path: Path
    loss: float
    words: float
    right: float
    seconds: float


def shapes_recipe(path: Path) -> ShapesRecipe | None:
    """The recipe of such a target in a YAML file; None where the file is another recipe."""
    return own_section(path, "shapes", ShapesRecipe, "tiny-shapes")


def train_shapes(recipe: ShapesRecipe, out: Path, reporter: Reporter | None = None) -> ShapesReport:
    """Train the target and write OUT/export and OUT/shapes.json with the figures. Raises FileError
    where OUT holds another model, DivergedError where the loss is not finite."""
    reporter, begun = reporter or SilentReporter(), time.perf_counter()
    library("PIL.Image", "drawing shapes", "images")
    _check_export(out)
    scenes = [scene(recipe.seed + each) for each in range(recipe.scenes)]
    processor, model = made(recipe, scenes)
    rows = Captions.of(recipe, processor, scenes)
    picks = _picks(len(scenes), recipe.rows, recipe.steps, recipe.seed + 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    with reporter.task("learn captions", recipe.steps, "steps") as advance:
        for step, picked in enumerate(picks):
            loss = _loss(model, rows, picked)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            _check_finite(float(loss.detach()), recipe.learning_rate)
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate * _rate(recipe, step)
            optimizer.step()
            advance(1, f"loss {float(loss.detach()):.3f}")
    model.eval()
    first = recipe.seed + HELDOUT_SEED
    others = [scene(first + each) for each in range(recipe.heldout)]
    found = _measured(recipe, model, processor, others)
    report = ShapesReport(out / EXPORT, *found, time.perf_counter() - begun)
    figures = {name: getattr(report, name) for name in ("loss", "words", "right", "seconds")}
    model.save_pretrained(out / EXPORT)
    processor.save_pretrained(out / EXPORT)
    write_json(out / REPORT, {"recipe": recipe.model_dump(), **figures})
    return report


def made(recipe: ShapesRecipe, scenes: Sequence[Scene]) -> tuple[Any, Any]:
    """A processor whose tokenizer is made of the captions, and a model with random weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText, CLIPImageProcessor

    positions = int(recipe.text["max_position_embeddings"])
    texts = [f"{MARK} {QUESTION} {each.caption}" for each in scenes]
    tokenizer = train_tokenizer(texts, recipe.words, positions)
    tokenizer.add_special_tokens({"additional_special_tokens": [MARK]})
    if recipe.chat:
        tokenizer.chat_template = CHAT
    place, patch = tokenizer.convert_tokens_to_ids(MARK), int(recipe.tower["patch_size"])
    ends = {"bos_token_id": None, "eos_token_id": _end(recipe, tokenizer), "pad_token_id": None}
    config = AutoConfig.for_model(
        "llava",
        text_config={"model_type": "llama", "vocab_size": len(tokenizer), **recipe.text, **ends},
        vision_config={"model_type": "clip_vision_model", **recipe.tower, "image_size": SIZE},
        image_token_id=place,
        image_token_index=place,
    )
    size = {"height": SIZE, "width": SIZE}
    processor = without_video(config)(
        CLIPImageProcessor(size=size, crop_size=size), tokenizer, patch_size=patch,
        num_additional_image_tokens=1, vision_feature_select_strategy="default",
        **({"chat_template": CHAT} if recipe.chat else {}),
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return processor, AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def _end(recipe: ShapesRecipe, tokenizer: Any) -> int:
    """The token that ends a caption."""
    end = tokenizer.convert_tokens_to_ids(END) if recipe.chat else tokenizer.eos_token_id
    return int(end)


@dataclass(frozen=True, slots=True)
class Captions:
    """Scenes as the model reads them: ids of prompt and caption, of which the first `prompt` are
    not learned, and what the processor makes of the images."""

    ids: Sequence[Sequence[int]]
    prompt: int
    pixels: Tensor

    @classmethod
    def of(cls, recipe: ShapesRecipe, processor: Any, scenes: Sequence[Scene]) -> Captions:
        opening, between = f"{MARK} {QUESTION}", " "
        if recipe.chat:
            question = [{"type": "image"}, {"type": "text", "text": QUESTION}]
            opening, between = (
                processor.tokenizer.apply_chat_template(
                    [{"role": "user", "content": question}],
                    add_generation_prompt=True,
                    tokenize=False,
                ),
                "",
            )
        end = _end(recipe, processor.tokenizer)

        def ids_of(each: Scene, text: str) -> list[int]:
            found = processor(text=[opening + text], images=[each.image], return_tensors="pt")
            return [int(token) for token in found["input_ids"][0]]

        pixels = processor.image_processor(images=[s.image for s in scenes], return_tensors="pt")
        ids = [[*ids_of(each, between + each.caption), end] for each in scenes]
        return cls(ids, len(ids_of(scenes[0], "")), pixels["pixel_values"])


def _picks(count: int, rows: int, steps: int, seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    for _ in range(steps):
        yield rng.sample(range(count), min(rows, count))


def _loss(model: Any, rows: Captions, picked: Sequence[int]) -> Tensor:
    """The mean loss of those captions in nats a token."""
    ids_BT, labels_BT = _padded([rows.ids[i] for i in picked], rows.prompt)
    found: Tensor = model(
        input_ids=ids_BT, pixel_values=rows.pixels[list(picked)], labels=labels_BT
    ).loss
    return found


def _padded(rows: Sequence[Sequence[int]], prompt: int) -> tuple[Tensor, Tensor]:
    """Ids padded on the right, and labels of what stands behind the prompt."""
    width = max(map(len, rows))
    ids_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    labels_BT = torch.tensor([[*row, *[IGNORED] * (width - len(row))] for row in rows])
    labels_BT[:, :prompt] = IGNORED
    return ids_BT, labels_BT


def _rate(recipe: ShapesRecipe, step: int) -> float:
    """The factor on the learning rate of that step."""
    left = (recipe.steps - step) / (recipe.steps / 3)
    return min(1.0, (step + 1) / recipe.warmup, left)


@torch.no_grad()
def _measured(
    recipe: ShapesRecipe, model: Any, processor: Any, scenes: Sequence[Scene]
) -> tuple[float, float, float]:
    """The figures of a report, on these scenes."""
    rows, whole, shares, right = Captions.of(recipe, processor, scenes), 0.0, 0.0, 0
    end = _end(recipe, processor.tokenizer)
    for at, each in enumerate(scenes):
        whole += float(_loss(model, rows, [at]))
        prompt_1T = torch.tensor([list(rows.ids[at][: rows.prompt])])
        written_1T = model.generate(
            input_ids=prompt_1T, attention_mask=torch.ones_like(prompt_1T), do_sample=False,
            pixel_values=rows.pixels[at : at + 1], max_new_tokens=64, eos_token_id=end,
            pad_token_id=end,
        )  # fmt: skip
        text = processor.tokenizer.decode(written_1T[0, rows.prompt :], skip_special_tokens=True)
        true, said = named(each.caption), named(text)
        shares, right = shares + len(true & said) / len(true), right + (true == said)
    count = len(scenes)
    return whole / count, shares / count, right / count


def _check_finite(loss: float, rate: float) -> None:
    if not math.isfinite(loss):
        raise DivergedError(
            "the loss is not finite; nothing was written",
            where="shapes.learning_rate",
            found=f"loss {loss}",
            expected="a finite number",
            do=f"lower the rate: learning_rate: {rate / 3:.2g}",
        )


def _check_export(out: Path) -> None:
    """Refuse a folder that holds another model, which would be overwritten."""
    if (out / EXPORT / CONFIG).is_file() and not (out / REPORT).is_file():
        raise FileError(
            "the output folder holds another model",
            where=str(out / EXPORT),
            found=f"{CONFIG}, and no {REPORT}",
            expected="a new folder, or one that tiny-shapes wrote",
            do="give another folder: --out runs/tiny-shapes",
        )
