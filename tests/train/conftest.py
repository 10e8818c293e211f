"""A target that can read and chat: a random model under a tiny byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from specctl.runtime.target.target import Target
from specctl.train.pretrain.data import EOS, train_tokenizer

TEXTS = [f"def f{i}(x):\n    return x + {i}\n\nhello world, how are you {i}?\n" for i in range(40)]

# The same words as the embedded template, without markers: <|assistant|> NL answer <|end|> NL
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module", autouse=True)
def unplotted() -> Iterator[None]:
    """Nobody looks at the curve of a run, but for test_run.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specctl.train.run.save_learning_curve", lambda log, path: None)
        yield


@pytest.fixture(scope="session")
def marked_tokenizer() -> Any:
    """Its chat template has {% generation %} markers."""
    return train_tokenizer(TEXTS, 300, 256)


@pytest.fixture(scope="session")
def plain_tokenizer() -> Any:
    """The same tokenizer under a template without markers."""
    tokenizer = train_tokenizer(TEXTS, 300, 256)
    tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def chat_target(make_model: Callable[..., Any], marked_tokenizer: Any) -> Target:
    """A random 2-layer model of 300 ids that ends with <|end|> or <|eos|>."""
    ends = marked_tokenizer.convert_tokens_to_ids(["<|end|>", EOS])
    model = make_model(num_layers=2, vocab=len(marked_tokenizer), eos_token_id=ends, bos_token_id=0)
    return Target.from_model(model, marked_tokenizer, name="chatty")
