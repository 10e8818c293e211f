"""The vision side of a multimodal target: images of a prompt -> rows in front of its first layer.

The target itself stays the language model that it is for text. Beside it the vision tower and the
projector are kept, and the model's own processor. A prompt is read once by the multimodal model
with its language model taken out: what that would have been given, embeddings and positions, is
what prefill feeds. Nothing of it depends on an architecture's name, and every target is tried when
it is loaded: one image, read by transformers' whole model and by us. A target whose language model
is given more than embeddings and positions (masks of its own, features for deeper layers), or that
gives other logits, is refused by name.
Letters: B rows, D hidden width, L positions, T fed tokens, V target vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specctl.core.errors import IncompatibleError, SpecctlError, is_out_of_memory
from specctl.core.forward.prompt_images import ImageSpan, PromptImages
from specctl.core.language_model import Feed, LanguageModel
from specctl.core.messages.installed import library
from specctl.models.axes import RotaryAxes, axis_of_each
from specctl.models.llama.fast_llama import FastLlama

OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids")  # of a processor: not of images
KNOWN = ("inputs_embeds", "position_ids")  # of what a language model is given
DEEPER, WHERE = "deepstack_visual_embeds", "visual_pos_masks"  # given to those of Qwen3-VL as well
WORST = {torch.float32: 1e-3}  # of logits, as a share of their deviation; else 0.5
TRIED = 48  # pixels in each direction
CheckLength = Callable[[int], None]  # raises for a prompt of more tokens than there is room for


def any_length(length: int) -> None:
    """A prompt of any length is read."""


class LanguageGap(nn.Module):
    """Stands where the language model stood: shows what that would have been given."""

    def __init__(self, embed_tokens: nn.Module, config: Any) -> None:
        super().__init__()
        self.embed_tokens, self.config = embed_tokens, config

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(self, *args: Any, **given: Any) -> Any:
        raise _Given({**given, **{str(at): value for at, value in enumerate(args)}})


class _Given(Exception):
    def __init__(self, given: dict[str, Any]) -> None:
        self.given = given
        super().__init__("what a language model was given")


@dataclass(frozen=True, slots=True, eq=False)
class WholeModel:
    """A multimodal model of transformers as it was loaded, and its processor."""

    model: Any
    processor: Any


@dataclass(frozen=True, slots=True, eq=False)
class Vision:
    """The vision tower, the projector and the embeddings (`model`, without language model), and the
    processor. `place`: the token that stands for an image in a prompt, before it is expanded;
    `spelled`: how a text spells an image, with what the model has around it;
    `unsaid`: ids that stand for images alone: never drawn where there are images. `axes`: of
    M-RoPE, None where positions are plain; `is_own`: whether our own forward runs."""

    kind: str
    model: Any
    processor: Any
    embedding: nn.Module
    place: int
    unsaid: tuple[int, ...]
    spelled: str
    axes: RotaryAxes | None = None
    is_own: bool = False

    @classmethod
    def beside(cls, whole: WholeModel, lm: LanguageModel) -> Vision:
        """That of a whole model, beside its language model as it runs here; tried with one image.
        Raises IncompatibleError where ours would read the image in another way."""
        model, processor = whole.model, whole.processor
        inner = getattr(model, "model", model)
        kind, tower = str(model.config.model_type), inner.language_model
        place = _place_of(processor, kind, lm.spec.vocab_size)
        vision = cls(
            kind,
            model,
            processor,
            tower.get_input_embeddings(),
            place,
            _unsaid(processor, model.config, place, lm.spec.vocab_size),
            _spelled(processor, model.config),
            _axes(lm, tower),
            isinstance(lm, FastLlama),
        )
        ids = [token for token in range(8) if token not in vision.unsaid][:3]
        image = _pattern()
        seen = vision.inputs([ids[0], place, *ids[1:]], [image])
        theirs_TV = vision._run(seen).logits[0].float()
        inner.language_model = LanguageGap(vision.embedding, tower.config)
        ours_TV = vision.logits(lm, *vision.read(seen))
        worst = float((ours_TV - theirs_TV).abs().max() / theirs_TV.std().clamp(min=1e-6))
        most = WORST.get(lm.dtype, 0.5)
        if not worst <= most:
            raise vision.refused(
                f"logits that differ by {worst:.2g} of their deviation behind an image",
                "the logits of transformers' whole model",
            )
        return vision

    # -- prompts ----------------------------------------------------------------------------------

    def see(
        self, tokens: Sequence[int], images: Sequence[Any], check: CheckLength = any_length
    ) -> tuple[list[int], PromptImages]:
        """A prompt with one placeholder for each image (PIL, RGB): its expanded tokens, and what
        stands at them. `check` is called with its length as far as that is known, before more is
        made of it. Raises SpecctlError where there are more or fewer placeholders."""
        return self.read(self.inputs(tokens, images, check))

    def inputs(
        self, tokens: Sequence[int], images: Sequence[Any], check: CheckLength = any_length
    ) -> ImageInputs:
        """What the multimodal model is given of a prompt."""
        places = [at for at, token in enumerate(tokens) if token == self.place]
        if len(places) != len(images):
            raise SpecctlError(
                "a prompt has another number of images than of places for them",
                found=f"{len(places)} places and {len(images)} images",
                expected="as many places as images",
                do="leave the marker out: images then stand in front of the prompt; if the chat "
                "template writes no place for an image, give a prompt that is no chat (--raw)",
            )
        if any(token in self.unsaid and token != self.place for token in tokens):
            raise SpecctlError(
                "a prompt spells a placeholder of what it does not hold",
                found="a token of this target that stands for a video",
                expected="text, and places for images",
                do="leave that token out of the text; videos are not read",
            )
        parts, pieces, length = list[Mapping[str, Any]](), list[list[int]](), len(tokens)
        for image in images:
            check(length)
            parts.append(self._processed([image]))
            pieces.append(_ids_of(parts[-1]))
            length += len(pieces[-1]) - 1
        check(length)
        whole = parts[0] if len(parts) == 1 else self._processed(images)
        if _ids_of(whole) != [token for piece in pieces for token in piece]:
            raise self.refused(
                "images that are read together otherwise than one by one", "the same"
            )
        expanded, spans, after = list[int](), list[ImageSpan](), 0
        for at, piece, part in zip(places, pieces, parts, strict=True):
            expanded += tokens[after:at]
            spans.append(ImageSpan(len(expanded), len(expanded) + len(piece), _digest(part)))
            expanded, after = [*expanded, *piece], at + 1
        expanded += tokens[after:]
        return ImageInputs(expanded, tuple(spans), self._given(expanded, whole))

    def read(self, seen: ImageInputs) -> tuple[list[int], PromptImages]:
        """The tower, the projector and the embeddings, run once."""
        try:
            self._run(seen)
        except _Given as caught:
            given = caught.given
        else:
            raise self.refused("a language model that is left out", "one that reads the prompt")
        self._check(given)
        embedded_TD = given["inputs_embeds"][0]
        rows = [embedded_TD[span.first : span.end] for span in seen.spans]
        position_3T, offset = self._positions(given.get("position_ids"), len(seen.tokens))
        row_LD = torch.cat(rows) if rows else embedded_TD[:0]
        deeper = tuple(self._deeper(given, seen.spans))
        return seen.tokens, PromptImages(seen.spans, row_LD.clone(), position_3T, offset, deeper)

    def _run(self, seen: ImageInputs) -> Any:
        """The model's forward; what it raises for inputs of its own processor is a refusal."""
        try:
            with torch.inference_mode():
                return self.model(**seen.given, use_cache=False)
        except _Given:
            raise
        except Exception as error:  # foreign code, which differs by model: any type may come
            if is_out_of_memory(error):
                raise
            why = f"a forward that fails: {type(error).__name__}: {error}".split("\n")[0][:160]
            raise self.refused(why, "one that reads what its processor makes") from error

    # -- prefill ----------------------------------------------------------------------------------

    def feed(
        self, feed: Feed, images: Sequence[PromptImages | None], starts: Sequence[int]
    ) -> Feed:
        """The feed of causal runs that begin at `starts`, with images in the place of ids."""
        T = feed.ids_BT.shape[1]
        residual_BTD = self.embedding(feed.ids_BT)
        position_BT, rows = feed.position_BT.clone(), list[Tensor]()
        for b, (each, start) in enumerate(zip(images, starts, strict=True)):
            position_3T = None
            if each is not None:
                each.put(residual_BTD[b], start)
                position_3T = each.positions(start, T)
            if position_3T is None:
                position_3T = position_BT[b].expand(3, T)
            else:
                position_BT[b] = position_3T[0]
            rows.append(position_3T)
        rope = None
        if any(each is not None and each.position_3T is not None for each in images):
            assert self.axes is not None, "targets of this kind are refused without axes"
            rope = self.axes.at(torch.stack(rows, dim=1), residual_BTD.dtype)
        deeper = list[Tensor]()
        for layer in range(max(0 if each is None else len(each.deeper) for each in images)):
            deeper.append(torch.zeros_like(residual_BTD))
            for b, (each, start) in enumerate(zip(images, starts, strict=True)):
                if each is not None:
                    each.put_deeper(layer, deeper[layer][b], start)
        return replace(
            feed,
            residual_BTD=residual_BTD,
            position_BT=position_BT,
            rope=rope,
            deeper=tuple(deeper),
        )

    def logits(self, lm: LanguageModel, tokens: Sequence[int], images: PromptImages) -> Tensor:
        """[T, V] float32 behind every token of a prompt, without a cache."""
        ids_1T = torch.tensor([tokens], device=lm.device)
        position_1T = torch.arange(len(tokens), device=lm.device)[None]
        feed = Feed(ids_1T, position_1T, lm.document_masks(torch.zeros_like(ids_1T)))
        with torch.inference_mode():
            logits_BTV = lm.run(self.feed(feed, [images], [0]), None).logits_BTV
        assert logits_BTV is not None
        return logits_BTV[0].float()

    # -- what the model is given ------------------------------------------------------------------

    def _processed(self, images: Sequence[Any]) -> Mapping[str, Any]:
        """What the processor makes of images with a placeholder each, and of no other text."""
        spelled, how = self.processor.image_token * len(images), {"add_special_tokens": False}
        try:
            found: Mapping[str, Any] = self.processor(
                text=[spelled], images=list(images), return_tensors="pt", **how
            )
        except Exception as error:  # foreign code, which differs by model: any type may come
            if is_out_of_memory(error):
                raise
            why = f"a processor that fails: {type(error).__name__}: {error}".split("\n")[0][:160]
            raise self.refused(why, "one that takes this image") from error
        return found

    def _given(self, tokens: Sequence[int], processed: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs of the whole model: tokens, and what belongs to the images."""
        device, dtype = self.embedding_weight.device, self.embedding_weight.dtype
        given: dict[str, Any] = {"input_ids": torch.tensor([list(tokens)], device=device)}
        for name, value in processed.items():
            if name in OF_TEXT:
                continue
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.is_floating_point() else value.dtype)
            given[name] = value
        if "mm_token_type_ids" in processed:
            kinds = self.processor.create_mm_token_type_ids([list(tokens)])
            given["mm_token_type_ids"] = torch.tensor(kinds, device=device)
        return given

    @property
    def embedding_weight(self) -> Tensor:
        weight: Tensor = self.embedding.weight  # type: ignore[assignment]
        return weight

    def _check(self, given: Mapping[str, Any]) -> None:
        """Refuse a language model that is given more than embeddings and positions."""
        known = {*KNOWN, DEEPER, WHERE} if self.is_own else {*KNOWN}
        others = [n for n, value in given.items() if n not in known and _holds_tensor(value)]
        if others:
            raise self.refused(
                f"a language model that is given {', '.join(sorted(others))}",
                "embeddings and positions alone",
            )

    def _deeper(self, given: Mapping[str, Any], spans: Sequence[ImageSpan]) -> Iterator[Tensor]:
        """Rows that are added behind the first layers, [L, D] each."""
        for added_RD in given.get(DEEPER) or ():
            whole_TD = torch.zeros_like(given["inputs_embeds"][0])
            whole_TD[given[WHERE][0]] = added_RD.to(whole_TD)
            yield torch.cat([whole_TD[span.first : span.end] for span in spans])

    def _positions(self, found: Tensor | None, length: int) -> tuple[Tensor | None, int]:
        """Axes [3, T] where positions are not the index, and what is left of them behind."""
        if found is None:
            return None, 0
        plain_T = torch.arange(length, device=found.device)
        position = found[:, 0] if found.dim() == 3 else found
        if torch.equal(position, plain_T.expand_as(position)):
            return None, 0
        if found.dim() != 3 or self.axes is None:
            raise self.refused("positions that are not the index", "plain ones, or M-RoPE of Qwen2")
        position_3T = position[-3:].clone()
        return position_3T, int(position_3T.max()) + 1 - length

    def refused(self, found: str, expected: str) -> IncompatibleError:
        """The error for a target whose images would be read otherwise than by transformers."""
        return IncompatibleError(
            f"images for {self.kind} are not supported",
            found=found,
            expected=expected,
            do="leave the images out, or choose a target such as LLaVA or Qwen2-VL",
        )


@dataclass(frozen=True, slots=True, eq=False)
class ImageInputs:
    """A prompt with images as the multimodal model is given it."""

    tokens: list[int]
    spans: tuple[ImageSpan, ...]
    given: dict[str, Any]


def without_video(config: Any) -> Any:
    """The class of the processor for that configuration, which needs no torchvision: that of videos
    does, and is left out."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    found = PROCESSOR_MAPPING[type(config)]
    kept = [name for name in found.get_attributes() if name != "video_processor"]
    return type(found.__name__, (found,), {"get_attributes": classmethod(lambda _: kept)})


def load_processor(folder: Path, config: Any) -> Any:
    """The processor in a folder; IncompatibleError where there is none, or a library is missing."""
    from transformers import AutoProcessor

    kind = str(config.model_type)

    library("PIL.Image", "reading images", "images", kind=IncompatibleError)
    try:
        processors = AutoProcessor if find_spec("torchvision") else without_video(config)
        found = processors.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a foreign folder through a foreign reader: any type may come
        raise IncompatibleError(
            f"the processor that makes images ready for {kind} cannot be read",
            found=f"{type(error).__name__}: {error}".split("\n")[0][:160],
            expected="preprocessor_config.json and processor_config.json beside the weights",
            do="fetch the files of the processor, and the libraries that it names",
            where=str(folder),
        ) from error
    if not (hasattr(found, "tokenizer") and hasattr(found, "image_processor")):
        raise IncompatibleError(
            f"the processor that makes images ready for {kind} cannot be read",
            found=f"{type(found).__name__}, without a tokenizer or an image processor",
            expected="both, in preprocessor_config.json and processor_config.json",
            do="fetch the files of the processor",
            where=str(folder),
        )
    return found


def check_images_alone(
    compile: bool | None,
    inflate: str | None,
    adapters: Sequence[str],
    few_bits: str | None,
    is_spread: bool,
) -> None:
    """Refuse images beside what changes, records or spreads the language model."""
    given = {
        "target.compile": compile,
        "--inflate": inflate,
        "--adapter": adapters,
        f"--dtype {few_bits}": few_bits,
        "a target that is spread": is_spread,
    }
    others = [flag for flag, value in given.items() if value]
    if others:
        raise IncompatibleError(
            "images need the multimodal target as it is published",
            found=f"images and {others[0]}",
            expected="one of the two",
            do=f"leave out {others[0]}, or the images",
        )


def no_vision(name: str, kind: str | None, is_loaded: bool = True) -> IncompatibleError:
    """The error for images without anything that sees them. `kind`: of the model that the target is
    a part of; `is_loaded`: without images."""
    other = "choose a target such as LLaVA or Qwen2-VL"
    if kind is None:
        found, do = "a language model", other
    elif is_loaded:
        found = f"the text side of {kind}"
        do = "specctl.load_target(NAME, images=True); specctl serve --set api.images=true"
    else:
        found, do = f"{kind}, of which transformers' causal class for text is used here", other
    return IncompatibleError(
        f"target {name} reads no images",
        found=found,
        expected="a multimodal target that was loaded with its vision",
        do=do,
    )


def _place_of(processor: Any, kind: str, vocab_size: int) -> int:
    """The id of the processor's image token."""
    token = getattr(processor, "image_token", None)
    found = None if token is None else processor.tokenizer.convert_tokens_to_ids(str(token))
    spelled = processor.tokenizer.encode(str(token), add_special_tokens=False)
    if found is None or spelled != [found] or not 0 <= found < vocab_size:
        raise IncompatibleError(
            f"images for {kind} are not supported",
            found=f"{type(processor).__name__} with image token {token!r}",
            expected=f"a processor with one token, below {vocab_size:,}, that stands for an image",
            do="leave the images out, or choose a target such as LLaVA or Qwen2-VL",
        )
    return int(found)


def _spelled(processor: Any, config: Any) -> str:
    """The image token, between those that begin and end an image where a model has them."""
    names = ("vision_start_token_id", "vision_end_token_id")
    around = [getattr(config, name, None) for name in names]
    if any(token is None for token in around):
        return str(processor.image_token)
    first, last = processor.tokenizer.convert_ids_to_tokens(around)
    return f"{first}{processor.image_token}{last}"


def _unsaid(processor: Any, config: Any, place: int, vocab_size: int) -> tuple[int, ...]:
    """Ids that stand for an image or a video, and for no text."""
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    found = {place, *(getattr(config, name, None) for name in names)}
    found |= {getattr(processor, name, None) for name in names}
    return tuple(sorted(i for i in found if isinstance(i, int) and 0 <= i < vocab_size))


def _axes(lm: LanguageModel, tower: Any) -> RotaryAxes | None:
    """Those of our own forward; None where it has plain positions, or another runs."""
    if not isinstance(lm, FastLlama):
        return None
    rope, theirs = (
        getattr(tower.config, "rope_parameters", None),
        getattr(tower, "rotary_emb", None),
    )
    axis = axis_of_each(theirs, rope, lm.spec.head_dim // 2)
    return None if axis is None else RotaryAxes(lm.module.rotary, axis)


def _ids_of(processed: Mapping[str, Any]) -> list[int]:
    return [int(token) for token in processed["input_ids"][0]]


def _digest(processed: Mapping[str, Any]) -> str:
    """sha256 over all that a model is given of an image."""
    digest = hashlib.sha256()
    for name, value in sorted(processed.items()):
        if name in OF_TEXT:
            continue
        digest.update(f"{name}:{getattr(value, 'shape', '')}:".encode())
        data = value if isinstance(value, Tensor) else torch.tensor(value)
        digest.update(data.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, (list, tuple)) and any(map(_holds_tensor, value))


def _pattern() -> Any:
    """An image on which a target is tried: no two of its patches are alike."""
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (TRIED, TRIED, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())
