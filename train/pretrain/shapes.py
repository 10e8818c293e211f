"""A small multimodal target from nothing, in LLaVA's layout or in Qwen2-VL's (image_layouts.py),
trained on rendered shapes and digits with captions (images/shapes.py).

It answers one question of an image, as a chat model (`chat`) or as a text that goes on behind
`<image> What is this?`. OUT/export is a folder of transformers with its processor, which
`specctl generate --image` reads; OUT/heldout.jsonl lists images that it has not seen. A run of some
minutes, which is not continued: it begins anew.
Letters: B rows, T tokens.
"""

from __future__ import annotations

import io
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from specctl.core.errors import DivergedError, FileError
from specctl.core.messages.installed import library
from specctl.core.storage.files import write_bytes, write_json
from specctl.core.storage.model_folder import CONFIG
from specctl.images.shapes import QUESTION, Scene, named, scene
from specctl.models.hf.quiet import quietly, without_bars
from specctl.recipes.section import Positive, Section, SeedNumber
from specctl.runtime.measure.reporter import Reporter, SilentReporter
from specctl.runtime.target.vision import OF_TEXT
from specctl.train.pretrain.data import END, train_tokenizer
from specctl.train.pretrain.image_layouts import LAYOUTS, MARK, ImageLayout, LayoutParts
from specctl.train.pretrain.own_section import own_section

EXPORT, REPORT, HELDOUT = "export", "shapes.json", "heldout"
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
    """What decides such a target: its `layout`; `what` images show, and `sides`: what their width
    and their height may be, in pixels; `scenes` to learn from and `heldout` others; the tokenizer's
    `words`; `text` and `tower`, handed to the configurations of the language model and of the
    vision tower as they are; whether it is a `chat` model, and the `lead` of a text in front of its
    image where it is none; its training by AdamW, whose rate rises over `warmup` steps and falls
    over the last third."""

    layout: Literal["llava", "qwen2-vl"]
    what: Annotated[tuple[Literal["shapes", "digits"], ...], Field(min_length=1, max_length=2)]
    sides: Annotated[tuple[Annotated[int, Field(ge=8, le=96)], ...], Field(min_length=1)]
    scenes: Positive
    heldout: Positive
    words: Positive
    text: dict[str, Any]
    tower: dict[str, Any]
    chat: bool
    lead: str
    steps: Positive
    rows: Positive
    warmup: Positive
    learning_rate: Annotated[float, Field(gt=0.0, le=1.0)]
    weight_decay: Annotated[float, Field(ge=0.0, le=1.0)]
    seed: SeedNumber

    def scene(self, seed: int) -> Scene:
        """One of the scenes that images of this recipe show."""
        return scene(seed, self.what, self.sides)

    def prompt(self, image: str) -> str:
        """What stands in front of a caption where the target is no chat model; `image`: how it is
        spelled there."""
        return f"{self.lead}{image}{QUESTION}"

    @field_validator("lead")
    @classmethod
    def _only_without_chat(cls, lead: str, info: ValidationInfo) -> str:
        if lead and info.data.get("chat"):
            raise ValueError("empty: only a target that is no chat model (chat: false) has one")
        return lead


@dataclass(frozen=True, slots=True)
class Share:
    """A mean over images, and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Share:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
        return cls(statistics.fmean(values), error)

    def __str__(self) -> str:
        return f"{self.mean:.3f} +- {self.error:.3f}"


@dataclass(frozen=True, slots=True)
class Named:
    """How many `images` show one kind of thing; of the words by which their captions differ, the
    share that greedy captions name; the share of captions that name all of them and no other."""

    images: int
    words: Share
    right: Share


@dataclass(frozen=True, slots=True)
class ShapesReport:
    """On held-out scenes: the loss of their captions in nats a token, and what greedy captions
    name, of images of `shapes` and of `digits` apart."""

    path: Path
    loss: float
    named: Mapping[str, Named]
    seconds: float

    def figures(self) -> dict[str, Any]:
        """All but the path, as plain values."""
        what = {name: asdict(found) for name, found in self.named.items()}
        return {"loss": self.loss, "named": what, "seconds": self.seconds}


def shapes_recipe(path: Path) -> ShapesRecipe | None:
    """The recipe of such a target in a YAML file; None where the file is another recipe."""
    return own_section(path, "shapes", ShapesRecipe, "tiny-shapes")


def train_shapes(recipe: ShapesRecipe, out: Path, reporter: Reporter | None = None) -> ShapesReport:
    """Train the target and write OUT/export, OUT/shapes.json with the figures, and OUT/heldout with
    OUT/heldout.jsonl. Raises FileError where OUT holds another model, DivergedError where the loss
    is not finite."""
    reporter, begun = reporter or SilentReporter(), time.perf_counter()
    library("PIL.Image", "drawing shapes", "images")
    _check_export(out)
    scenes = [recipe.scene(recipe.seed + each) for each in range(recipe.scenes)]
    processor, model = made(recipe, scenes)
    rows = Captions.of(recipe, processor, scenes)
    picks = _picks(len(scenes), recipe.rows, recipe.steps, recipe.seed + 1)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    with reporter.task("learn captions", recipe.steps, "steps") as advance:
        for step, picked in enumerate(picks):
            loss = rows.loss(model, picked)
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
    others = [recipe.scene(first + each) for each in range(recipe.heldout)]
    heldout_loss, names = _measured(recipe, model, processor, others)
    report = ShapesReport(out / EXPORT, heldout_loss, names, time.perf_counter() - begun)
    with without_bars():
        model.save_pretrained(out / EXPORT)
    processor.save_pretrained(out / EXPORT)
    _write_scenes(out, others)
    write_json(out / REPORT, {"recipe": recipe.model_dump(), **report.figures()})
    return report


def made(recipe: ShapesRecipe, scenes: Sequence[Scene]) -> tuple[Any, Any]:
    """A processor whose tokenizer is made of the captions, and a model with random weights."""
    from transformers import AutoModelForImageTextToText

    layout = LAYOUTS[recipe.layout]
    texts = [f"{recipe.prompt(layout.read)} {each.caption}" for each in scenes]
    positions = int(recipe.text["max_position_embeddings"])
    tokenizer = train_tokenizer(texts, recipe.words, positions)
    ends = {"bos_token_id": None, "eos_token_id": _end(recipe, tokenizer), "pad_token_id": None}
    parts = LayoutParts({**recipe.text, **ends}, recipe.tower, recipe.sides)
    with quietly():  # it remarks that torchvision is not here, which nothing needs
        config, processor = layout.made(parts, tokenizer)
    if recipe.chat:
        template = CHAT.replace(MARK, layout.spelled)
        tokenizer.chat_template = processor.chat_template = template
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        return processor, AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def _end(recipe: ShapesRecipe, tokenizer: Any) -> int:
    """The token that ends a caption."""
    end = tokenizer.convert_tokens_to_ids(END) if recipe.chat else tokenizer.eos_token_id
    return int(end)


@dataclass(frozen=True, slots=True)
class Captions:
    """Scenes as the model reads them, a row each: ids of prompt and caption; how many of these, the
    `prompts`, are not learned; what the processor makes of the image; `place`: the token that
    stands for a piece of an image."""

    ids: Sequence[Sequence[int]]
    prompts: Sequence[int]
    images: Sequence[Mapping[str, Tensor]]
    place: int

    @classmethod
    def of(cls, recipe: ShapesRecipe, processor: Any, scenes: Sequence[Scene]) -> Captions:
        layout, place = LAYOUTS[recipe.layout], int(processor.image_token_id)
        opening, between = _opening(recipe, processor.tokenizer, layout)
        end = _end(recipe, processor.tokenizer)

        def read(each: Scene, text: str) -> tuple[list[int], Mapping[str, Tensor]]:
            seen = processor(text=[opening + text], images=[each.image], return_tensors="pt")
            ids = [int(token) for token in seen["input_ids"][0]]
            return ids, {name: value for name, value in seen.items() if name not in OF_TEXT}

        def last(ids: Sequence[int]) -> int:  # of what stands for the image, whose size may differ
            return max(at for at, token in enumerate(ids) if token == place)

        alone, _ = read(scenes[0], "")
        behind = len(alone) - last(alone)
        rows = [read(each, between + each.caption) for each in scenes]
        ids = [[*ids, end] for ids, _ in rows]
        return cls(ids, [last(row) + behind for row in ids], [image for _, image in rows], place)

    def loss(self, model: Any, picked: Sequence[int]) -> Tensor:
        """The mean loss of those captions in nats a token."""
        rows = [self.ids[at] for at in picked]
        ids_BT, labels_BT = _padded(rows, [self.prompts[at] for at in picked])
        found: Tensor = model(**self.given(ids_BT, picked), labels=labels_BT).loss
        return found

    def given(self, ids_BT: Tensor, picked: Sequence[int]) -> dict[str, Tensor]:
        """What the model is given of those rows: ids, and their images."""
        names = self.images[picked[0]]
        given = {name: torch.cat([self.images[at][name] for at in picked]) for name in names}
        if "image_grid_thw" in given:  # positions by axes follow from where images stand
            given["mm_token_type_ids"] = (ids_BT == self.place).int()
        return {"input_ids": ids_BT, **given}


def _opening(recipe: ShapesRecipe, tokenizer: Any, layout: ImageLayout) -> tuple[str, str]:
    """What stands in front of a caption, and between the two."""
    if not recipe.chat:
        return recipe.prompt(f"{layout.spelled} "), " "
    question = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    messages = [{"role": "user", "content": question}]
    written = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return str(written), ""


def _picks(count: int, rows: int, steps: int, seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    for _ in range(steps):
        yield rng.sample(range(count), min(rows, count))


def _padded(rows: Sequence[Sequence[int]], prompts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Ids padded on the right, and labels of what stands behind the prompts."""
    width = max(map(len, rows))
    ids_BT = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    labels_BT = torch.tensor([[*row, *[IGNORED] * (width - len(row))] for row in rows])
    for row, prompt in enumerate(prompts):
        labels_BT[row, :prompt] = IGNORED
    return ids_BT, labels_BT


def _rate(recipe: ShapesRecipe, step: int) -> float:
    """The factor on the learning rate of that step."""
    left = (recipe.steps - step) / (recipe.steps / 3)
    return min(1.0, (step + 1) / recipe.warmup, left)


@torch.no_grad()
def _measured(
    recipe: ShapesRecipe, model: Any, processor: Any, scenes: Sequence[Scene]
) -> tuple[float, dict[str, Named]]:
    """The figures of a report, on these scenes."""
    rows, end = Captions.of(recipe, processor, scenes), _end(recipe, processor.tokenizer)
    words: dict[str, list[float]] = {what: [] for what in recipe.what}
    right: dict[str, list[float]] = {what: [] for what in recipe.what}
    losses = 0.0
    for picked in _alike(rows.prompts, recipe.rows):  # prompts of one length need no padding
        prompt = rows.prompts[picked[0]]
        ids_BT = torch.tensor([rows.ids[at][:prompt] for at in picked])
        written_BT = model.generate(
            **rows.given(ids_BT, picked), attention_mask=torch.ones_like(ids_BT), do_sample=False,
            max_new_tokens=64, eos_token_id=end, pad_token_id=end,
        )  # fmt: skip
        losses += float(rows.loss(model, picked)) * len(picked)
        texts = processor.tokenizer.batch_decode(written_BT[:, prompt:], skip_special_tokens=True)
        for at, text in zip(picked, texts, strict=True):
            true, said = named(scenes[at].caption), named(text)
            words[scenes[at].what].append(len(true & said) / len(true))
            right[scenes[at].what].append(float(true == said))
    found: dict[str, Named] = {
        what: Named(len(words[what]), Share.of(words[what]), Share.of(right[what]))
        for what in recipe.what
        if words[what]
    }
    return losses / len(scenes), found


def _alike(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places of equal lengths, at most so many at once."""
    for length in sorted(set(lengths)):
        places = [at for at, each in enumerate(lengths) if each == length]
        yield from (places[first : first + most] for first in range(0, len(places), most))


def _write_scenes(out: Path, scenes: Sequence[Scene]) -> None:
    """Their images, and records with question and caption of each, for `train-draft --data`."""
    (out / HELDOUT).mkdir(parents=True, exist_ok=True)
    records = list[str]()
    for at, each in enumerate(scenes):
        held = io.BytesIO()
        each.image.save(held, "PNG")
        write_bytes(out / HELDOUT / f"{at}.png", held.getvalue())
        row = {"prompt": QUESTION, "images": [f"{HELDOUT}/{at}.png"], "response": each.caption}
        records.append(json.dumps(row) + "\n")
    write_bytes(out / f"{HELDOUT}.jsonl", "".join(records).encode())


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
            expected="a new folder, or one that a recipe of shapes wrote",
            do="give another folder: --out runs/tiny-shapes",
        )
