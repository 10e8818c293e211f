"""Images in a prompt: the text of transformers' own `generate`, with and without drafts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from specctl.core.errors import SpecctlError
from specctl.core.forward.prompt_images import PromptImages
from specctl.drafters import family
from specctl.drafters.states.lm_state import LmState
from specctl.drafters.training_free.prompt_lookup import PromptLookup, PromptLookupOptions
from specctl.runtime.engine import prefill
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.image_rows import with_images
from specctl.runtime.engine.request import Request
from specctl.runtime.generate import generate
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target
from specctl_testing.runtime.knowing import Knowing
from specctl_testing.runtime.tiny_vision import make_folder, picture

NEW = 24
EAGLE3 = family("eagle3").options(intermediate=32, taps=(0, 1, 2))
MSD = family("msd").options(intermediate=32)
FLASH = family("flash").options(intermediate=32, latents=2, stride=3)
PLAIN, HEADS = ("plain", "prompt-lookup", "chain", "tree"), ("eagle3", "msd", "flash")
PROMPTS = (("hello ", (1,)), ("def f3(x): ", (2, 3)), ("how are you? world 7", (4,)))


@dataclass(frozen=True)
class Case:
    """A tiny multimodal target, transformers' model of the same weights, and what that writes."""

    target: Target
    full: Any
    prompts: list[list[int]]
    images: list[PromptImages]
    texts: list[tuple[int, ...]]


def prompt(target: Target, text: str, seeds: tuple[int, ...]) -> tuple[list[int], PromptImages]:
    assert target.vision is not None
    mark = target.vision.processor.image_token
    tokens = target.encode(text + f"{mark} and ".join(["", *[""] * len(seeds)]) + "so")
    return target.vision.see(tokens, [picture(s, 12 + 9 * s, 20) for s in seeds])


def written(case_target: Target, full: Any, text: str, seeds: tuple[int, ...]) -> tuple[int, ...]:
    """What transformers' `generate` writes, from its own processor on."""
    vision = case_target.vision
    assert vision is not None
    mark = vision.processor.image_token
    spelled = text + f"{mark} and ".join(["", *[""] * len(seeds)]) + "so"
    shown = [picture(s, 12 + 9 * s, 20) for s in seeds]
    given = vision.processor(text=[spelled], images=shown, return_tensors="pt")
    how = {"do_sample": False, "max_new_tokens": NEW, "suppress_tokens": list(vision.unsaid)}
    with torch.no_grad():
        out = full.generate(**given, eos_token_id=list(case_target.eos_ids), **how)
    return tuple(out[0, given["input_ids"].shape[1] :].tolist())


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def case(request: Any, tmp_path_factory: Any) -> Case:
    folder: Path = tmp_path_factory.mktemp(request.param)
    full = make_folder(folder, request.param)
    target = load_target(str(folder), dtype="float32", device="cpu", images=True)
    both = [prompt(target, *each) for each in PROMPTS]
    texts = [written(target, full, *each) for each in PROMPTS]
    return Case(target, full, [ids for ids, _ in both], [seen for _, seen in both], texts)


def drafting(case: Case, how: str) -> dict[str, Any]:
    """A drafter and its policy."""
    spec = case.target.spec
    texts = [[*ids, *text] for ids, text in zip(case.prompts, case.texts, strict=True)]
    tree = {"policy": "dynamic-tree", "nodes": 9, "length": 4, "beam": 3}
    return {
        "plain": lambda: {},
        "prompt-lookup": lambda: {"drafter": PromptLookup(PromptLookupOptions(), spec)},
        "chain": lambda: {
            "drafter": Knowing(texts, spec),
            "policy": make_policy({"policy": "chain", "length": 4}),
        },
        "tree": lambda: {"drafter": Knowing(texts, spec), "policy": make_policy(tree)},
        "eagle3": lambda: {"drafter": family("eagle3").build(EAGLE3, spec, None)},
        "msd": lambda: {"drafter": family("msd").build(MSD, spec, None)},
        "flash": lambda: {"drafter": family("flash").build(FLASH, spec, None)},
    }[how]()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("how", [*PLAIN, *HEADS])
def test_the_text_is_that_of_transformers(case: Case, how: str, batch: int) -> None:
    torch.manual_seed(0)
    made = generate(
        case.target, case.prompts, images=case.images, batch=batch,
        sampling=Sampling(max_new_tokens=NEW), **drafting(case, how),
    )  # fmt: skip
    assert [o.token_ids for o in made.outputs] == case.texts
    if how in ("chain", "tree"):
        assert made.stats.accepted > 10
    if how in HEADS:
        assert made.stats.drafted > 0


def test_prompts_are_read_in_chunks_that_cut_through_images(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "CHUNK", 5)
    engine = Engine(case.target, num_slots=4, prefill_chunk=7)
    sampling = Sampling(max_new_tokens=NEW)
    words = case.target.encode("def f1(x):\n    return x and hello world 3")
    alone = generate(case.target, [words], sampling=sampling).outputs[0].token_ids
    rows = zip(case.prompts, case.images, strict=True)
    requests = [with_images(case.target, Request(tuple(p), sampling), seen) for p, seen in rows]
    requests.insert(1, Request(tuple(words), sampling))  # read in the same forwards
    texts = [c.tokens for c in engine.run(requests)]
    assert texts == [case.texts[0], alone, *case.texts[1:]]


def test_another_image_makes_another_text(case: Case) -> None:
    text, _ = PROMPTS[0]
    ids, images = prompt(case.target, text, (9,))
    made = generate(case.target, [ids], images=[images], sampling=Sampling(max_new_tokens=NEW))
    assert made.outputs[0].token_ids != case.texts[0]


def test_a_kept_beginning_is_that_of_the_same_image(case: Case) -> None:
    target, sampling, vision = case.target, Sampling(max_new_tokens=8), case.target.vision
    assert vision is not None
    mark, engine = vision.processor.image_token, Engine(target)
    engine.open(300)

    def run(index: int, seed: int) -> tuple[int, tuple[int, ...]]:
        ids, images = vision.see(target.encode(f"hello {mark} so"), [picture(seed)])
        request = Request(tuple(ids), sampling, conversation="one")
        engine.submit(index, with_images(target, request, images))
        done: list[Any] = []
        while engine.is_busy:
            done += [each.row for each in engine.step() if each.row.finished]
        return done[0].reused_len, tuple(done[0].tokens[done[0].prompt_len :])

    first, text = run(0, 1)
    again, same = run(1, 1)
    reused, other = run(2, 5)
    before = len(target.encode("hello "))
    assert (first, same) == (0, text)
    assert again > before + 3
    assert reused <= before
    assert other != text


def test_what_cannot_be_is_refused(case: Case) -> None:
    assert case.target.vision is not None
    with pytest.raises(SpecctlError, match="another number of images"):
        case.target.vision.see(case.target.encode("no place"), [picture(1)])
    with pytest.raises(SpecctlError, match="drafting beside the target"):
        generate(case.target, case.prompts, images=case.images, parallel=True)


def test_a_target_that_would_be_read_otherwise_is_refused(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vision = case.target.vision
    assert vision is not None
    given = {"inputs_embeds": torch.zeros(1, 3, 4), "cross_states": [torch.zeros(1)]}
    with pytest.raises(SpecctlError, match="cross_states"):
        vision._check(given)
    make_folder(tmp_path, vision.kind)
    monkeypatch.setattr(PromptImages, "put", lambda *_: None)
    with pytest.raises(SpecctlError, match="are not supported"):
        load_target(str(tmp_path), dtype="float32", device="cpu", images=True)


def test_a_text_only_draft_reads_no_placeholder(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, read = family("small-lm"), list[list[int]]()
    drafter = found.build(found.options(layers=1, width=16), case.target.spec, None)
    start = LmState.start

    def kept(self: Any, slot: int, tokens: Any, taps: Any) -> None:
        read.append(list(tokens))
        start(self, slot, tokens, taps)

    monkeypatch.setattr(LmState, "start", kept)
    chain = make_policy({"policy": "chain", "length": 3})
    made = generate(
        case.target, case.prompts, images=case.images, drafter=drafter, policy=chain,
        sampling=Sampling(max_new_tokens=NEW), batch=3,
    )  # fmt: skip
    assert [o.token_ids for o in made.outputs] == case.texts
    assert made.stats.drafted > 0
    vision = case.target.vision
    assert vision is not None
    unsaid = set(vision.unsaid)
    expected = [[t for t in ids if t not in unsaid] for ids in case.prompts]
    assert sorted(read) == sorted(expected)
    assert all(len(short) < len(ids) for short, ids in zip(expected, case.prompts, strict=True))


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_relatives_are_read_as_well(kind: str, tmp_path: Path) -> None:
    text, seeds = PROMPTS[1]
    full = make_folder(tmp_path, kind)
    target = load_target(str(tmp_path), dtype="float32", device="cpu", images=True)
    ids, images = prompt(target, text, seeds)
    made = generate(target, [ids], images=[images], sampling=Sampling(max_new_tokens=NEW))
    assert made.outputs[0].token_ids == written(target, full, text, seeds)
    assert bool(images.deeper) == (kind == "qwen3_vl")
