"""Whether a target is spoken to as a chat model: a prompt is then a user's turn, not a text that
goes on.

That is so where its tokenizer has a chat template, but for two kinds. Tokenizers of base models
often carry the template of their chat siblings (Qwen's do); such a model was never taught to end
its answers as the template ends them, and none of its files names that end: a token that is only
spelled like one says nothing, as base models have it, too. And what `specctl pretrain` makes has a
template, so that conversations can be written for it, but has read nothing but text.
"""

from __future__ import annotations

from specctl.runtime.target.templates.chat_turns import template_text
from specctl.runtime.target.templates.ends import SPELLING, TEMPLATE, EndsOfText

PRETRAINED_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>\\n' }}"
    "{% generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ '<|user|>\\n' + message['content'] + '<|end|>\\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
NO_TEMPLATE = "its tokenizer has no chat template"
OF_PRETRAINING = "it was trained on text alone, as specctl pretrain does"


def why_text(tokenizer: object, ends: EndsOfText) -> str | None:
    """Why prompts are continued as texts where nobody says otherwise; None for a chat model."""
    template = template_text(tokenizer)
    if not template:
        return NO_TEMPLATE
    if template == PRETRAINED_TEMPLATE:
        return OF_PRETRAINING
    turn = next((end for end in ends.each if end.token_id == ends.of_turn), None)
    if turn is None or any(source not in (TEMPLATE, SPELLING) for source in turn.sources):
        return None
    return (
        f"its chat template ends answers with {turn.token or turn.token_id}, which none of its "
        "other files names as an end, as in base models"
    )
