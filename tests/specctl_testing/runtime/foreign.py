"""Pairs whose tokenizers differ: made tokenizers, and drafters that write for another one."""

from __future__ import annotations

import json

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specctl.runtime.cross_vocab.translate import translated

LETTERS = "abcde"


def words(seed):
    """Words of one language: both tokenizers learn common merges and merges of their own."""
    rng = np.random.default_rng(seed)
    common = ["ab", "cad", "dee", "abc"]
    own = ["".join(rng.choice(list(LETTERS), 4)) for _ in range(6)]
    return " ".join(rng.choice(common + own, 400))


def make_tokenizer(seed, size, specials=("<eos>",)):
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = [*LETTERS, *pre_tokenizers.ByteLevel.alphabet()[:0], "\u0120"]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(specials),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    bpe.train_from_iterator([words(seed)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=specials[0])


def renumbered(tokenizer, seed):
    """The same tokenizer with other ids, and new id by old id."""
    order = np.random.default_rng(seed).permutation(len(tokenizer)).tolist()
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    vocab = {token: order[i] for token, i in parts["model"]["vocab"].items()}
    parts["model"]["vocab"] = dict(sorted(vocab.items(), key=lambda item: item[1]))
    for token in parts["added_tokens"]:
        token["id"] = order[token["id"]]
    other = Tokenizer.from_str(json.dumps(parts))
    return PreTrainedTokenizerFast(tokenizer_object=other, eos_token=tokenizer.eos_token), order


def drafter_of(draft, target, method):
    eos = draft.tokenizer.eos_token_id
    return translated(draft.lm, draft.tokenizer, eos, target, method)
