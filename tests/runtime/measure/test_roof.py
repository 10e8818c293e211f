"""What reading the weights allows: bytes of a token, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specctl.models.llama.fast_llama import FastLlama
from specctl.runtime.measure.bench import bench, engine_contender
from specctl.runtime.measure.roof import Roof, bandwidth
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target, load_target


@pytest.mark.parametrize("tied", [False, True])
def test_a_token_reads_every_matrix_once_and_an_embedding_only_as_a_head(
    make_model: Any, tied: bool
) -> None:
    model = make_model(tie_word_embeddings=tied)
    target = Target.from_model(model)
    embedding = 0 if tied else model.model.embed_tokens.weight.nbytes
    held = sum(weight.nbytes for weight in model.parameters()) - embedding
    last_norm = model.model.norm.weight.nbytes  # which the compiled step has beside its copies
    assert target.lm.token_bytes in (held, held - last_norm)


def test_fewer_bits_are_fewer_bytes() -> None:
    sizes = {
        dtype: load_target("tiny", dtype=dtype).lm.token_bytes for dtype in ("float32", "int8")
    }
    full, eight = sizes["float32"], sizes["int8"]
    assert full is not None
    assert eight is not None
    assert full / 4 < eight < full / 3, "a quarter, and scales"


def test_what_is_said_of_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    roof = Roof(100_000_000, 10e9, 2)
    assert roof.tokens_per_second == pytest.approx(100)
    text = roof.text(60.0)
    assert "reads 100 MB of weights a token: 6.0 GB/s of the 10.0 GB/s that 2 threads" in text
    assert text.endswith("which would be 100 tokens/s")
    assert "no less than a sum over numbers reads here (10.0)" in roof.text(120.0)
    assert "of the 10.0 GB/s that this device can read here" in replace(roof, threads=None).text(60)
    monkeypatch.setattr(FastLlama, "token_bytes", None)
    assert Roof.of(load_target("tiny")) is None, "nothing is said where the bytes are not known"


@pytest.mark.parametrize("batch", [1, 2])
def test_rows_that_are_decoded_together_have_no_rate_of_one_token_a_pass(batch: int) -> None:
    target = load_target("tiny")
    plain = engine_contender("plain", target, batch=batch)
    prompts = [target.encode(text) for text in ("import os", "def main(")]
    found = bench(target, [plain], prompts, [Sampling(max_new_tokens=4)], repeats=1)
    assert (found.rows[0].decoding_rate is not None) == (batch == 1)
    assert ("of weights a token" in found.table().markdown()) == (batch == 1)


def test_the_bandwidth_is_of_this_device() -> None:
    assert 1e8 < bandwidth(torch.device("cpu")) < 1e13
