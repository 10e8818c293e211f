"""Which targets are spoken to as chat models, and which continue texts."""

from __future__ import annotations

from importlib.resources import files

import pytest

from specctl.runtime.target.target import Target
from specctl.runtime.target.templates.ends import TEMPLATE, EndOfText, EndsOfText
from specctl.runtime.target.templates.spoken_to import (
    NO_TEMPLATE,
    OF_PRETRAINING,
    PRETRAINED_TEMPLATE,
    why_text,
)
from specctl_testing.runtime.chat_targets import spoken_with


class Tokenizer:
    """A tokenizer as far as its template goes."""

    def __init__(self, template: object) -> None:
        self.chat_template = template


def ends(*sources: str, of_turn: int | None = 7) -> EndsOfText:
    return EndsOfText((EndOfText(7, "<|im_end|>", sources),), of_turn)


def test_a_template_whose_end_the_checkpoint_names_makes_a_chat_model() -> None:
    assert why_text(Tokenizer("x"), ends("generation_config", TEMPLATE)) is None
    assert why_text(Tokenizer("x"), ends("tokenizer", TEMPLATE)) is None


def test_a_template_without_an_end_of_its_own_makes_a_chat_model() -> None:
    assert why_text(Tokenizer("### User:"), ends("config", of_turn=None)) is None


def test_a_base_model_with_the_template_of_its_siblings_continues_texts() -> None:
    """Qwen's base checkpoints end with <|endoftext|> alone, and carry ChatML."""
    found = why_text(Tokenizer("x"), ends(TEMPLATE))
    assert found is not None
    assert "<|im_end|>" in found
    assert "base models" in found


@pytest.mark.parametrize("template", [None, "", {}])
def test_without_a_template_texts_are_continued(template: object) -> None:
    assert why_text(Tokenizer(template), ends("tokenizer")) == NO_TEMPLATE


def test_a_target_without_a_tokenizer_continues_texts() -> None:
    assert why_text(None, EndsOfText()) == NO_TEMPLATE


def test_what_was_pretrained_here_continues_texts(tiny_target: Target) -> None:
    assert tiny_target.why_text == OF_PRETRAINING
    assert not tiny_target.is_chat
    file = files("specctl.recipes") / "tiny" / "chat_template.jinja"
    assert file.read_text(encoding="utf-8") == PRETRAINED_TEMPLATE


def test_the_same_weights_under_a_template_of_their_own_are_a_chat_model(
    tiny_target: Target,
) -> None:
    assert spoken_with(tiny_target).is_chat
    assert spoken_with(tiny_target, None).why_text == NO_TEMPLATE


def test_several_templates_by_name_are_templates() -> None:
    named = {"default": "x", "tool_use": "y"}
    assert why_text(Tokenizer(named), ends("tokenizer", TEMPLATE)) is None
