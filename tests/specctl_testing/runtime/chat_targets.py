"""The embedded target as a chat model: its own weights under a template that is not that of
`specctl pretrain`."""

from __future__ import annotations

import copy
from dataclasses import replace

from specctl.runtime.target.target import Target, template_digest

TEMPLATE = (
    "{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>\n"
    "{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def spoken_with(target: Target, template: str | None = TEMPLATE) -> Target:
    """The target with that chat template; None takes it away."""
    tokenizer = copy.deepcopy(target.tokenizer)
    tokenizer.chat_template = template
    return replace(target, tokenizer=tokenizer, template_digest=template_digest(tokenizer))
