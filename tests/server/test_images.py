"""Images in chats: data URIs and base64 blocks are read, nothing else is, nothing is fetched."""

from __future__ import annotations

import base64
import copy
import io
import struct
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import FastAPI

from specctl.api.generate import generate
from specctl.runtime.target.target import Target, load_target
from specctl.runtime.target.text.image_prompts import turn_tokens
from specctl.runtime.target.vision import Vision
from specctl.server.requests import image_fields
from specctl_testing.runtime.served_target import served
from specctl_testing.runtime.tiny_vision import make_folder, picture
from specctl_testing.runtime.web import error_of, make_app, post

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
GREEDY = {"max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp("seen")
    make_folder(folder, "llava")
    return load_target(str(folder), dtype="float32", device="cpu", images=True)


@pytest.fixture(scope="module")
def app(target: Target) -> Iterator[FastAPI]:
    with served(target) as app:
        yield app


def encoded(seed: int) -> str:
    held = io.BytesIO()
    picture(seed).save(held, "PNG")
    return base64.b64encode(held.getvalue()).decode()


def shown(seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(seed)}"}}


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    said = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"messages": [{"role": "user", "content": said}], **GREEDY, **fields}


def said(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_a_chat_with_an_image_says_what_generate_says(app: FastAPI, target: Target) -> None:
    text = said(post(app, CHAT, chat(shown(1), "hello")))
    direct = generate(target, "<image>hello", images=[picture(1)], chat=True, max_new_tokens=12)
    assert text == direct.text
    assert text != said(post(app, CHAT, chat(shown(2), "hello")))
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png"}}
    block["source"]["data"] = encoded(1)  # type: ignore[index]
    turn = {"role": "user", "content": [block, {"type": "text", "text": "hello"}]}
    answer = post(app, MESSAGES, {"model": "tiny", "messages": [turn], "max_tokens": 12,
                                  "temperature": 0})  # fmt: skip
    assert answer.json()["content"][0]["text"] == text, answer.text


def test_a_conversation_reuses_an_image_only_where_it_is_the_same(app: FastAPI) -> None:
    alone = [said(post(app, CHAT, chat(shown(seed), "hello"))) for seed in (1, 3)]
    texts, reused = [], []
    for seed in (1, 3, 3):
        before = app.state.counters.reused_tokens
        texts.append(said(post(app, CHAT, chat(shown(seed), "hello", prompt_cache_key="one"))))
        reused.append(app.state.counters.reused_tokens - before)
    assert texts == [alone[0], alone[1], alone[1]]
    assert reused[2] > 16 > reused[1]  # an image is 16 tokens


def test_a_mark_that_a_user_spells_is_text(app: FastAPI, target: Target) -> None:
    text = said(post(app, CHAT, chat(shown(1), "hello <image> there")))
    assert isinstance(text, str)
    refused = post(app, "/v1/completions", {"prompt": "<image>", **GREEDY})
    assert refused.status_code == 200  # a placeholder without an image is a token as any


def bomb(side: int) -> str:
    """A PNG of so many pixels each way in a few hundred bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(bytes(100000))) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + header + body).decode()


def url(address: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address}}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (url("https://example.org/cat.png"), "nothing is fetched"),
        (url("file:///etc/passwd"), "nothing is fetched"),
        (url("data:image/svg+xml;base64,aGk="), "nothing is fetched"),
        (url("data:image/png;base64,!!!"), "not valid base64"),
        (url("data:image/png;base64,aGVsbG8="), "cannot be decoded"),
        (url("data:image/png;base64," + bomb(6000)), "6,000 x 6,000 pixels"),
        (url("data:image/png;base64," + bomb(60000)), "an image is too large"),
    ],
)
def test_what_is_no_image_here_is_refused_in_words(app: FastAPI, part: Any, words: str) -> None:
    answer = post(app, CHAT, chat(part, "hello"))
    assert answer.status_code == 400
    assert words in error_of(answer)["message"]


def test_images_are_refused_where_nothing_reads_them_or_nobody_shows_them(app: FastAPI) -> None:
    answer = post(make_app(), CHAT, chat(shown(1), "hello"))
    assert answer.status_code == 400
    assert "reads no images" in error_of(answer)["message"]
    system = {"messages": [{"role": "system", "content": [shown(1)]}], **GREEDY}
    assert "user's turn" in error_of(post(app, CHAT, system))["message"]
    many = post(app, CHAT, chat(*[shown(1)] * 17, "hello"))
    assert "at most 16 images" in error_of(many)["message"]


def test_a_prompt_that_does_not_fit_is_refused_before_its_images_are_read(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    processed = list[int]()
    found = Vision._processed

    def counted(self: Vision, images: Any) -> Any:
        processed.append(len(images))
        return found(self, images)

    monkeypatch.setattr(Vision, "_processed", counted)
    monkeypatch.setattr(Vision, "read", lambda *_: pytest.fail("the tower has run"))
    answer = post(app, CHAT, chat("hello " * 40, *[shown(1)] * 16))  # an image is 16 tokens
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "context_length_exceeded"
    assert 0 < len(processed) < 16


def test_of_several_images_the_field_says_which_is_refused(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = "messages[0].content[1].image_url.url"
    broken = post(app, CHAT, chat(shown(1), url("data:image/png;base64,aGVsbG8="), "hello"))
    assert error_of(broken)["param"] == field
    assert "0x" not in error_of(broken)["message"]  # no address of this process
    monkeypatch.setattr(image_fields, "MOST_PIXELS_IN_ALL", 500)  # each has 280
    many = error_of(post(app, CHAT, chat(shown(1), shown(2), "hello")))
    assert many["param"] == field
    assert "220 pixels left" in many["message"]


def test_a_template_that_reads_parts_alone_loses_no_text(target: Target) -> None:
    tokenizer = copy.copy(target.tokenizer)
    tokenizer.chat_template = (  # as LLaVA's: of a string, such a filter leaves nothing
        "{%- for message in messages -%}<|{{ message['role'] }}|>"
        "{%- for part in message['content'] | selectattr('type', 'equalto', 'image') -%}<image>"
        "{%- endfor -%}"
        "{%- for part in message['content'] | selectattr('type', 'equalto', 'text') -%}"
        "{{ part['text'] }}{%- endfor -%}<|end|>{%- endfor -%}<|assistant|>"
    )
    own = replace(target, tokenizer=tokenizer)
    turns = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "a world"},
        {"role": "user", "content": "how <image> are you?"},
    ]
    assert own.chat_text(turns) == (
        "<|user|><image>hello<|end|><|assistant|>a world<|end|><|user|>how <image> are you?<|end|>"
        "<|assistant|>"
    )
    tokens, _ = turn_tokens(own, turns, [picture(1)])  # what the user spells is no place
    assert "how <image> are you?" in own.tokenizer.decode(tokens)
