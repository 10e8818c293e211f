"""lm-evaluation-harness with a drafter: the answers of its own `hf`."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None


@pytest.mark.skipif(not HAS_HARNESS, reason="lm_eval is not installed: make lm-eval")
def test_answers_likelihoods_and_what_results_say() -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from specctl.api.lm_eval_model import DraftedLM

    given: dict[str, Any] = {"pretrained": "recipes/tiny", "dtype": "float32", "device": "cpu"}
    plain, drafted = HFLM(**given), DraftedLM(**given, draft="prompt-lookup", batch_size=2)
    until = {"until": ["\n\n"], "max_gen_toks": 24}

    def of(kind: str, *rows: tuple[Any, ...]) -> list[Instance]:
        return [Instance(kind, {}, row, i) for i, row in enumerate(rows)]

    texts = of("generate_until", ("import os\n", until), ("class Tree:\n", until))
    assert drafted.generate_until(texts) == plain.generate_until(texts)
    pairs = of("loglikelihood", ("import os\n", "import sys"))
    assert drafted.loglikelihood(pairs) == plain.loglikelihood(pairs)
    info = drafted.get_model_info()
    assert (info["draft"], info["tau"] > 1) == ("prompt-lookup", True)
