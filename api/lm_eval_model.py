"""lm-evaluation-harness with a drafter: its model `specctl` is its model `hf`, whose answers are
drafted. Likelihoods are the model's own; answers are lossless, so scores are those of `hf`.

    python -m specctl.api.lm_eval_model --model specctl \\
        --model_args pretrained=MODEL,draft=runs/eagle3 --tasks gsm8k --batch_size 4

`draft` is whatever `specctl generate --draft` takes, `allow` what of its package may differ from
the model (`target+tokenizer`); every further argument is of `hf`. The results name the drafter and
its tokens per pass beside the model's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from specctl.api.in_transformers.drafted import custom_generate


@register_model("specctl")
class DraftedLM(HFLM):  # type: ignore[misc]
    """`hf` of lm-evaluation-harness, with the drafter of that name."""

    def __init__(self, *given: Any, draft: str = "auto", allow: str = "", **settings: Any) -> None:
        super().__init__(*given, **settings)
        self._draft, self._num_rounds, self._num_tokens = draft, 0, 0
        self._drafted = custom_generate(
            draft, tokenizer=self.tokenizer, allow=tuple(filter(None, allow.split("+")))
        )

    def _model_generate(
        self, context: Tensor, max_length: int, stop: Sequence[str], **settings: Any
    ) -> Tensor:
        """[B, T]: prompts and answers. Without a temperature it is greedy, as for `hf`."""
        if not settings.get("temperature") and not settings.get("do_sample"):
            settings = {**settings, "do_sample": False}
            settings.pop("temperature", None)
        self._drafted.stop = tuple(stop)
        made: Tensor = self.model.generate(
            input_ids=context,
            max_length=max_length,
            pad_token_id=self.tokenizer.pad_token_id,
            custom_generate=self._drafted,
            **settings,
        )
        if (stats := self._drafted.stats) is not None:
            self._num_rounds += stats.rounds
            self._num_tokens += stats.tokens
        return made

    def get_model_info(self) -> dict[str, Any]:
        """What results say of the model, and of its drafter after the evaluation."""
        tau = self._num_tokens / max(1, self._num_rounds)
        return {**super().get_model_info(), "draft": self._draft, "tau": round(tau, 3)}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
