"""What is said behind generated text: why it ended, and what the run counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specctl.cli.app.console import Console

if TYPE_CHECKING:
    from specctl.runtime.generate import Output
    from specctl.runtime.measure.stats import Stats
    from specctl.runtime.sampling.sampling import Sampling
    from specctl.runtime.target.target import Target

WORDS = {
    "eos": "the end of the text",
    "stop": "a stop string",
    "length": "--max-new-tokens {limit:,}",
    "context": "the full context of {target}",
    "grammar": "a grammar that could not be followed further",
}


def tell_ends(
    console: Console, outputs: Sequence[Output], sampling: Sampling, target: Target
) -> None:
    """Say what ended the texts; a context that was full before the limit is a warning."""
    limit = sampling.max_new_tokens
    counts = Counter(output.finish_reason for output in outputs)
    parts = [
        WORDS[reason].format(limit=limit, target=target.name)
        + (f" ({count:,})" if len(outputs) > 1 else "")
        for reason, count in counts.most_common()
    ]
    console.say("ended by " + ", ".join(parts))
    shortest = min((len(o.token_ids) for o in outputs if o.finish_reason == "context"), default=0)
    if counts["context"]:
        console.warn(
            f"{target.name} reads {target.spec.max_positions:,} tokens at most, prompt included: "
            f"after {shortest:,} of {limit:,} new tokens there was no room for more"
        )


def check_forms(outputs: Sequence[Output]) -> None:
    """Refuses to call a run done in which a text broke off inside its grammar."""
    broken = sum(output.finish_reason == "grammar" for output in outputs)
    if not broken:
        return
    from specctl.runtime.sampling.grammar import GrammarError

    raise GrammarError(
        f"{broken:,} of {len(outputs):,} texts broke off inside their grammar",
        found="the grammar could not be followed further within its limits",
        expected="a grammar that is small at every token",
        do="make it smaller: fewer optional properties, less repetition, less ambiguity",
    )


def show_stats(console: Console, stats: Stats) -> None:
    """The counts of a run, in the words that every report uses."""
    import torch

    from specctl.models.native.threads import threads_used
    from specctl.runtime.measure.stats import busy_note

    for line in stats.lines():
        console.out(line)
    threads = torch.get_num_threads()
    if (used := threads_used(threads)) < threads:
        console.say(busy_note(used, threads))
