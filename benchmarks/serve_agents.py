"""Agents that people use, unchanged, against the server: LiteLLM and openai-agents.

Both are no dependencies of the project; run this in an environment that has them beside it:
    pip install litellm openai-agents
    PYTHONPATH=src python benchmarks/serve_agents.py
A stand-in replays a thinking model that calls a tool and speaks when it has the result; the
embedded target is held to the schema of a strict tool. Exits with 8 if a flow fails.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from serve_common import NAME, Server, Service, running, tiny_target

from specctl.server.requests.chat_template import ChatStyle
from specctl.server.requests.limits import Limits
from specctl_testing.runtime.tool_targets import PARIS, WEATHER, AgentService

ASKED: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
ANSWER = "It is 21 degrees in Paris."
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


def litellm_tools(server: Server) -> str:
    """A call, its result, and the answer; the thoughts are told apart."""
    import litellm

    asked: dict[str, Any] = {"model": f"openai/{NAME}", "api_base": f"{server.url}/v1"}
    asked |= {"api_key": "none", "tools": [WEATHER]}
    message = litellm.completion(messages=ASKED, **asked).choices[0].message
    [call] = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", PARIS), call
    assert message.reasoning_content == "look it up", message
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    turns = [*ASKED, message, result]
    return str(litellm.completion(messages=turns, **asked).choices[0].message.content)


def litellm_stream(server: Server) -> str:
    """LiteLLM's own builder puts the same call together."""
    import litellm

    asked: dict[str, Any] = {"model": f"openai/{NAME}", "api_base": f"{server.url}/v1"}
    stream = litellm.completion(
        messages=ASKED, api_key="none", tools=[WEATHER], stream=True, **asked
    )
    built = litellm.stream_chunk_builder(list(stream), messages=ASKED)
    [call] = built.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", PARIS), call
    assert built.choices[0].finish_reason == "tool_calls", built
    return ANSWER


def _agent(server: Server, makes_responses: bool, streams: bool) -> str:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    seen: list[tuple[str, str]] = []

    @agents.function_tool
    def get_weather(city: str, unit: str) -> str:
        """The weather now."""
        seen.append((city, unit))
        return "21 degrees"

    kind = agents.OpenAIResponsesModel if makes_responses else agents.OpenAIChatCompletionsModel

    async def run() -> str:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0) as client:
            agent = agents.Agent(
                name="helper",
                instructions="Answer with the tool.",
                tools=[get_weather],
                model=kind(model=NAME, openai_client=client),
            )
            if not streams:
                return str((await agents.Runner.run(agent, ASKED[0]["content"])).final_output)
            result = agents.Runner.run_streamed(agent, ASKED[0]["content"])
            async for _ in result.stream_events():
                pass
            return str(result.final_output)

    found = asyncio.run(run())
    assert seen == [("Paris", "C")], seen
    return found


def agents_chat(server: Server) -> str:
    return _agent(server, makes_responses=False, streams=False)


def agents_chat_stream(server: Server) -> str:
    return _agent(server, makes_responses=False, streams=True)


def agents_responses(server: Server) -> str:
    return _agent(server, makes_responses=True, streams=False)


def agents_responses_stream(server: Server) -> str:
    return _agent(server, makes_responses=True, streams=True)


def openai_strict(server: Server) -> str:
    """Whatever the embedded target draws is a call that its schema takes."""
    import openai

    client = openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0)
    for seed in range(8):
        choice = client.chat.completions.create(
            model=NAME, messages=ASKED, tools=[STRICT], tool_choice="required", seed=seed,
            temperature=1.3, max_tokens=800,
        ).choices[0]  # fmt: skip
        assert choice.finish_reason == "tool_calls", choice
        for call in choice.message.tool_calls:
            arguments = json.loads(call.function.arguments)
            assert set(arguments) == {"city", "unit"}, arguments
            assert arguments["unit"] in ("C", "F"), arguments
    return ANSWER


STAND_IN: tuple[Callable[[Server], str], ...] = (
    litellm_tools, litellm_stream, agents_chat, agents_chat_stream, agents_responses,
    agents_responses_stream,
)  # fmt: skip


def main() -> int:
    """Runs all flows; says what each did."""
    for name in ("openai", "litellm", "openai-agents"):
        print(f"{name} {importlib.metadata.version(name)}")
    with running(AgentService()) as found:
        failed = [flow for flow in STAND_IN if not _tried(flow, Server(found.url, 0))]
    target = tiny_target()
    service = Service(target, limits=Limits(max_batch=4, max_len=1024))
    with running(service, style=ChatStyle.of(target, "hermes")) as found:
        failed += [] if _tried(openai_strict, Server(found.url, 0)) else [openai_strict]
    print(f"{len(STAND_IN) + 1 - len(failed)} of {len(STAND_IN) + 1} flows work")
    return 8 if failed else 0


def _tried(flow: Callable[[Server], str], server: Server) -> bool:
    began = time.monotonic()
    try:
        found = flow(server)
        assert found == ANSWER, found
    except Exception as error:  # the report says which flow failed, and how
        print(f"FAILED  {flow.__name__}: {type(error).__name__}: {error}")
        return False
    print(f"ok      {flow.__name__}  {time.monotonic() - began:.1f} s")
    return True


if __name__ == "__main__":
    sys.exit(main())
