"""Targets whose templates write tools in each format: the stub's tokenizer with their tokens."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from tokenizers import AddedToken

from specctl.runtime.target.target import Target
from specctl.server.engine_thread.contract import GenerateRequest, Piece
from specctl_testing.runtime.serving import StubService, stub_target, target_around

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather now",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["C", "F"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}

QWEN = """{%- if tools %}<|user|>
# Tools{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
call as <tool_call></tool_call><|end|>
{% endif %}{% for m in messages %}<|{{ 'assistant' if m.role == 'assistant' else 'user' }}|>
{% if m.role == 'tool' %}<tool_response>{{ m.content }}</tool_response>{% else %}{{ m.content }}{%
for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endif %}<|end|>
{% endfor %}<|assistant|>
"""
THINKING = QWEN.replace("{%- if tools %}", "{# </think> #}{%- if tools %}", 1) + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% elif opened %}<think>\n{% endif %}"
)
LLAMA = """{{ bos_token }}{% if tools %}<|user|>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>{% endif %}{% for m in messages %}<|start_header_id|>{{ m.role }}
{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}<|python_tag|>{"name": "{{ f.name }}", \
"parameters": {{ f.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|end|>
{% endfor %}<|assistant|>
"""
MISTRAL = """{% for m in messages %}{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}{%
elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}{%
endfor %}]<|end|>{% elif m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{%
endif %}<|user|>{{ m.content }}<|end|>{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"""
NAMED_ARGS = MISTRAL.replace("[TOOL_CALLS][", "[TOOL_CALLS]").replace(
    "{{ c.function | tojson }}", "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
)
PLAIN_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")  # as Qwen has them
SPECIAL_TOKENS = ("<|python_tag|>", "<|start_header_id|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


@cache
def tool_target(template: str) -> Target:
    """A target with that template; markers are single tokens, as they are in such models."""
    tokenizer = copy.deepcopy(stub_target().tokenizer)
    tokenizer.chat_template = template
    tokenizer.add_tokens([AddedToken(name, special=False) for name in PLAIN_TOKENS])
    special = [AddedToken(name, special=True) for name in SPECIAL_TOKENS]
    tokenizer.add_tokens(special, special_tokens=True)
    return target_around(tokenizer)


PARIS = '{"city": "Paris", "unit": "C"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
CALLS = f"<think>\nlook it up\n</think>\n\n{CALL}"
SAYS = "<think>\nI know now\n</think>\n\nIt is 21 degrees in Paris."


class AgentService(StubService):
    """Replays a thinking model that calls get_weather, and says what it got when it has got it."""

    def __init__(self) -> None:
        super().__init__(text=CALLS, ends=True, target=tool_target(THINKING))

    def _pieces(self, ask: GenerateRequest) -> list[Piece]:
        has_result = "<tool_response>21" in self.target.tokenizer.decode(ask.tokens)
        self.text = SAYS if has_result else CALLS
        return super()._pieces(ask)
