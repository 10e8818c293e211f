"""The process that compiles grammars first: what hangs or kills it hangs or kills nobody else.

It is run as a file and needs nothing of ours. One JSON object per line: the first one describes
the tokenizer, every other one a grammar; the answer is {"error": text or null}. It ends with its
standard input, and a grammar may not take more memory than `MAX_MEMORY`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MAX_MEMORY = 4 << 30
PROBED, BRANCHES = 16, 8  # tokens followed from the beginning, ways tried at each of them
LIMITS: dict[str, Any] = {
    "max_grammar_size": 100_000,
    "initial_lexer_fuel": 300_000,  # 20 MiB for `a{100000}{100000}`, which takes 130 of 1,000,000
    "max_items_in_row": 1_000,  # an ambiguous grammar needs more and more time for every token
    "verbose_errors": False,
}


def make_tokenizer(backend: str, vocab_size: int, eos_ids: list[int]) -> Any:
    """llguidance's view of a `tokenizers` file."""
    from llguidance import LLTokenizer

    return LLTokenizer(backend, n_vocab=vocab_size, eos_token=eos_ids)


def make_matcher(tokenizer: Any, grammar: str) -> Any:
    """A matcher at the beginning of a text; `get_error()` says what is wrong with the grammar."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()  # some grammars are dear to begin, not to build
    return matcher


def dead_end(matcher: Any) -> str:
    """Why no text of this grammar gets far; empty if one may. Some limits are met by a token, not
    by the grammar: a few of the permitted tokens are tried, then those behind the first one that
    the matcher can follow. What it overlooks is found when the text comes there."""
    for _ in range(PROBED):
        if matcher.is_accepting():
            return ""
        error = "no token of the target spells what must come"
        for token in _permitted(matcher)[:BRANCHES]:
            ahead = matcher.deep_copy()
            if ahead.consume_tokens([token]):
                ahead.compute_bitmask()
            if not ahead.is_error():
                matcher = ahead
                break
            error = ahead.get_error()
        else:
            return error
    return ""


def _permitted(matcher: Any) -> list[int]:
    packed = enumerate(matcher.compute_bitmask())
    return [8 * at + bit for at, byte in packed if byte for bit in range(8) if byte >> bit & 1]


def _bound_memory() -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = MAX_MEMORY if hard == resource.RLIM_INFINITY else min(MAX_MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _answer(error: str | None) -> None:
    sys.stdout.write(json.dumps({"error": error}) + "\n")
    sys.stdout.flush()


def main() -> None:
    _bound_memory()
    try:
        tokenizer = make_tokenizer(**json.loads(sys.stdin.readline()))
    except ValueError as error:
        return _answer(str(error))
    _answer(None)
    for line in sys.stdin:
        matcher = make_matcher(tokenizer, json.loads(line)["grammar"])
        _answer(matcher.get_error() or dead_end(matcher) or None)
    return None


if __name__ == "__main__":
    main()
