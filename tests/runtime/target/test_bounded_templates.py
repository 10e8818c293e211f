"""A chat template that loops, or makes more than a conversation can be, is a typed error soon."""

from __future__ import annotations

import copy
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils import chat_template_utils

from specctl.core.errors import SpecctlError
from specctl.runtime.target.target import Target
from specctl.runtime.target.templates import bounded_templates
from specctl.runtime.target.templates.bounded_templates import EndlessTemplateError, written

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}] * 3
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROW = "{% set ns = namespace(x=START) %}{% for i in range(40) %}{% set ns.x = STEP %}{% endfor %}"
ENDLESS = {
    "a loop in a loop": LOOP,
    "a macro of itself": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "a gigabyte by *": "{{ 'x' * 1000000000 }}",
    "a gigabyte that is not written": "{% set x = 'x' * 1000000000 %}",
    "a gigabyte in pieces": "{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}",
    "a gigabyte in a block": "{% set b %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}"
    "{% endset %}",
    "twice as much by +": GROW.replace("START", "'x'").replace("STEP", "ns.x + ns.x"),
    "twice as much by ~": GROW.replace("START", "'x'").replace("STEP", "ns.x ~ ns.x"),
    "twice as much by a list": GROW.replace("START", "'x'").replace("STEP", "[ns.x, ns.x]"),
    "twice as much by a mapping": GROW.replace("START", "'x'").replace(
        "STEP", "{'a': ns.x, 'b': ns.x}"
    ),
    "twice as much by replace": GROW.replace("START", "'xx'").replace(
        "STEP", "ns.x.replace('x', 'xx')"
    ),
    "twice as much by a filter": GROW.replace("START", "'xx'").replace(
        "STEP", "ns.x|replace('x', 'xx')"
    ),
    "twice as much by join": GROW.replace("START", "'xx'").replace("STEP", "ns.x.join(ns.x)"),
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "center": "{{ 'x'|center(1000000000) }}",
    "indent": "{{ 'x\n\n\n\nx'|indent(1000000000) }}",
    "a format": "{{ '%1000000000d' % 1 }}",
    "a format's width": "{{ '%*d' % (1000000000, 1) }}",
    "str.format": "{{ '{:1000000000}'.format(1) }}",
    "the width of str.format": "{{ '{:{}}'.format(1, 1000000000) }}",
    "a power": "{{ 10 ** (10 ** 9) }}",
    "squares": GROW.replace("START", "3").replace("STEP", "ns.x * ns.x"),
    "bytes": "{{ (1).to_bytes(1000000000, 'big')|length }}",
    "a date": "{{ strftime_now('%1000000000d') }}",
}


@pytest.fixture
def with_template(tiny_target: Target) -> Any:
    def make(template: str) -> Any:
        made = copy.copy(tiny_target.tokenizer)
        made.chat_template = template
        return made

    return make


@pytest.mark.parametrize("case", ENDLESS)
def test_a_template_without_end_is_ended(
    case: str, with_template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_templates, "SECONDS", 0.3)
    began = time.thread_time()
    with pytest.raises(EndlessTemplateError, match="does not end, or makes too much"):
        written(with_template(ENDLESS[case]), TURNS, tokenize=False)
    assert time.thread_time() - began < 3


BROKEN = {
    "a type": "{{ 1 + 'a' }}",
    "a key": "{{ {}['a']['b'] }}",
    "nothing": "{{ nobody.name }}",
    "a zero": "{{ 1 // 0 }}",
    "a refusal": "{{ raise_exception('no') }}",
    "a recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "a syntax": "{% for %}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "an include": "{% include 'a' %}",
}


@pytest.mark.parametrize("case", BROKEN)
def test_whatever_a_template_raises_is_an_error_of_the_template(
    case: str, with_template: Any
) -> None:
    with pytest.raises(TemplateError):
        written(with_template(BROKEN[case]), TURNS, tokenize=False)


def test_a_panic_of_a_tokenizer_is_an_error_of_the_template() -> None:
    class PanicException(BaseException):
        pass

    class Panicking:
        chat_template = None

        def apply_chat_template(self, turns: Any) -> str:
            raise PanicException("index out of bounds")

    with pytest.raises(TemplateError, match="PanicException: index out of bounds"):
        written(Panicking(), TURNS)


PLAIN = (
    "{% macro turn(m) %}<{{ m.role }}>{{ m['content'] | trim }}{% if loop_last %}!{% endif %}"
    "{% endmacro %}{% set ns = namespace(seen=[], n=0) %}"
    "{% for message in messages[:4] + messages[4:] %}{{ turn(message) }}"
    "{% set ns.seen = ns.seen + [message.role] %}{% set ns.n = ns.n + 1 %}"
    "{{ loop.index ~ '/' ~ loop.length }}{{ '' if loop.last else ', ' }}{% endfor %}"
    "{{ ns.seen | unique | list | tojson }}{{ '%s=%03d' % ('n', ns.n) }}{{ '=' * 3 }}"
    "{{ '{:>5}|'.format(ns.n) }}{{ ', '.join(ns.seen) }}{% for k, v in {'a': 1}.items() %}"
    "{{ k }}{{ v }}{% endfor %}{{ {'a': [1, (2, 3)]} | tojson(indent=1) }}"
    "{{ 'a-b'.split('-') | join('+') | replace('a', 'c') | indent(2) }}"
)


def test_what_ends_is_written_as_transformers_writes_it(with_template: Any) -> None:
    tokenizer = with_template(PLAIN)
    chat_template_utils._compile_jinja_template.cache_clear()
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False)
    assert written(tokenizer, TURNS, tokenize=False) == expected
    assert "6/6" in expected
    assert tokenizer.apply_chat_template(TURNS, tokenize=False) == expected


def test_a_template_is_ended_in_any_thread(
    with_template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_templates, "SECONDS", 0.2)
    found: list[BaseException] = []

    def work() -> None:
        try:
            written(with_template(LOOP), TURNS, tokenize=False)
        except SpecctlError as error:
            found.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 3


def test_a_target_says_what_its_template_does(
    tiny_target: Target, with_template: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_templates, "SECONDS", 0.2)
    target = replace(tiny_target, tokenizer=with_template(LOOP), template_digest="x")
    with pytest.raises(EndlessTemplateError):
        target.encode_chat([{"role": "user", "content": "hi"}])
    target = replace(target, tokenizer=with_template(BROKEN["a type"]))
    with pytest.raises(SpecctlError, match="does not take this conversation"):
        target.encode_chat([{"role": "user", "content": "hi"}])
