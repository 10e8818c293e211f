"""What positions by axes bring a drafter on a target with M-RoPE: tau on images of shapes.

Trains a small target in Qwen2-VL's layout on rendered shapes of 24 to 36 pixels a side (16 to 36
placeholders) behind a sentence and in front of a question, then drafters on captions that it
writes, as `images_in.py` does: EAGLE-3 whose rows are rotated by the target's three axes
(`mrope`), or by their index; for each seed of the drafter. Greedy, chains of four tokens; tau with
its standard error over images (jackknife), and the mean difference over the same images. Every
drafted text must be the plain one.

    python benchmarks/images_mrope.py --out runs/images-mrope
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from images_in import Prompt, captions_of, learn, options, run, tau

from specctl.core.drafter import Drafter
from specctl.drafters import family
from specctl.images.shapes import QUESTION, SIZE, Scene, scene
from specctl.runtime.engine.request import Completion
from specctl.runtime.target.target import Target, load_target
from specctl.runtime.target.vision import without_video
from specctl.train.pretrain.data import train_tokenizer

PAD, VIDEO, FIRST, LAST = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
OPENING = f"A picture of a shape follows: {FIRST}{PAD}{LAST} {QUESTION}"
PATCH = 6
TEXT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 16,
        "num_key_value_heads": 2, "intermediate_size": 192, "max_position_embeddings": 256,
        "bos_token_id": None, "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                            "mrope_section": [2, 3, 3]}}  # fmt: skip
TOWER = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2,
         "patch_size": PATCH, "spatial_merge_size": 1}  # fmt: skip


def sized(seed: int) -> Scene:
    """A scene of that seed, each side 24, 30 or 36 pixels long."""
    found, rng = scene(seed), random.Random(seed + 1)
    sides = [SIZE + PATCH * rng.randrange(3) for _ in range(2)]
    return Scene(found.image.resize(sides), found.caption)


def made(scenes: Sequence[Scene]) -> tuple[Any, Any]:
    """A processor whose tokenizer is made of the captions, and a model with random weights."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl import Qwen2VLImageProcessor

    marks = [PAD, VIDEO, FIRST, LAST]
    texts = [f"A picture of a shape follows: {QUESTION} {each.caption}" for each in scenes]
    tokenizer = train_tokenizer(texts, 640, 256)
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    pad, video, first, last = tokenizer.convert_tokens_to_ids(marks)
    config = AutoConfig.for_model(
        "qwen2_vl",
        text_config={**TEXT, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id},
        vision_config=TOWER,
        image_token_id=pad,
        video_token_id=video,
        vision_start_token_id=first,
        vision_end_token_id=last,
    )
    edges = {"shortest_edge": SIZE * SIZE, "longest_edge": 4 * SIZE * SIZE}
    images = Qwen2VLImageProcessor(size=edges, patch_size=PATCH, merge_size=1)
    processor = without_video(config)(images, tokenizer)
    torch.manual_seed(0)
    return processor, AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


def make_target(folder: Path, steps: int, count: int) -> None:
    """Train the target on `count` scenes and save it with its processor."""
    begun, scenes = time.perf_counter(), [sized(seed) for seed in range(count)]
    processor, model = made(scenes)
    end, rows = processor.tokenizer.eos_token_id, []
    for each in scenes:
        said = [f"{OPENING} {each.caption}"]
        found = processor(text=said, images=[each.image], return_tensors="pt")
        rows.append({**found, "input_ids": [*found["input_ids"][0].tolist(), end]})
    opened = processor(text=[OPENING], images=[scenes[0].image], return_tensors="pt")["input_ids"]
    behind = int((opened[0].flip(0) == processor.image_token_id).nonzero()[0])  # of the image
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    rng = random.Random(1)
    for step in range(steps):
        picked = [rows[at] for at in rng.sample(range(count), 32)]
        width = max(len(row["input_ids"]) for row in picked)
        ids_BT = torch.full((32, width), end)
        labels_BT = torch.full((32, width), -100)
        for b, row in enumerate(picked):
            ids = torch.tensor(row["input_ids"])
            ids_BT[b, : len(ids)] = ids
            first = int((ids == processor.image_token_id).nonzero()[-1]) + 1 + behind
            labels_BT[b, first : len(ids)] = ids[first:]
        kinds_BT = (ids_BT == processor.image_token_id).int()
        loss = model(
            input_ids=ids_BT,
            labels=labels_BT,
            mm_token_type_ids=kinds_BT,
            pixel_values=torch.cat([row["pixel_values"] for row in picked]),
            image_grid_thw=torch.cat([row["image_grid_thw"] for row in picked]),
        ).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 30, (steps - step) / (steps / 3))
        optimizer.step()
        if step % 50 == 49:
            spent = time.perf_counter() - begun
            print(
                f"target: step {step + 1}, loss {float(loss.detach()):.3f}, {spent:.0f} s",
                flush=True,
            )
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)


def seen(target: Target, seeds: Sequence[int]) -> list[Prompt]:
    assert target.vision is not None
    ids = target.encode(OPENING)
    return [target.vision.see(ids, [sized(seed).image]) for seed in seeds]


def fresh(target: Target, name: str, mrope: Sequence[int], seed: int) -> Drafter:
    torch.manual_seed(seed)
    more: dict[str, Any] = {"taps": (1, 2, 3)} if name == "eagle3" else {}
    found = family(name)
    options = found.options(intermediate=192, ttt_steps=3, mrope=tuple(mrope), **more)
    return found.build(options, target.spec, None)


def difference(one: Sequence[Completion], two: Sequence[Completion]) -> tuple[float, float]:
    """tau of `one` less that of `two`, and its standard error (jackknife over the images)."""
    without = []
    for at in range(len(one)):
        left = [[c for i, c in enumerate(done) if i != at] for done in (one, two)]
        without.append(tau(left[0])[0] - tau(left[1])[0])
    mean, count = sum(without) / len(without), len(without)
    spread = sum((each - mean) ** 2 for each in without) * (count - 1) / count
    return tau(one)[0] - tau(two)[0], spread**0.5


def main() -> None:
    parser = options(__doc__, target_steps=250, steps=80, train=256)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", default="eagle3", help="drafters, with commas")
    flags = parser.parse_args()
    folder = flags.out / "target"
    if not (folder / "config.json").is_file():
        make_target(folder, flags.target_steps, 4 * flags.train)
    target = load_target(str(folder), dtype="float32", device="cpu", images=True)
    assert target.vision is not None
    assert target.vision.axes is not None
    captions = captions_of(target, seen, flags.test, flags.train)
    prompts, plain = captions.prompts, captions.plain
    rows: list[dict[str, Any]] = []
    for name in flags.only.split(","):
        for seed in range(flags.seeds):
            done: list[list[Completion]] = []
            for mrope in (target.vision.axes.axis, ()):
                drafter = fresh(target, name, mrope, seed)
                learn(target, drafter, captions.lessons, "states", flags.steps)
                done.append(run(target, prompts, drafter))
                assert [c.tokens for c in done[-1]] == [c.tokens for c in plain], "not lossless"
            (axes, error), (index, other) = map(tau, done)
            more, doubt = difference(*done)
            print(f"{name}, seed {seed}: axes {axes:.3f} +- {error:.3f}, index {index:.3f} +- "
                  f"{other:.3f}, difference {more:+.3f} +- {doubt:.3f}", flush=True)  # fmt: skip
            rows.append({"drafter": name, "seed": seed, "axes": axes, "axes_error": error,
                         "index": index, "index_error": other, "difference": more,
                         "difference_error": doubt})  # fmt: skip
    found = {**captions.right, "rows": rows}
    (flags.out / "images_mrope.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
