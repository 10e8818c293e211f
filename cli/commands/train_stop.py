"""`specctl train-stop`: train a stop rule for a drafter that is already there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.api.arguments.outputs import check_file
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import with_text
from specctl.cli.options.loading import DraftChoice
from specctl.cli.options.names import check_drafter
from specctl.cli.options.positional import DraftFlag, Word, one_drafter
from specctl.cli.options.target_choice import OWN_TARGET, TargetChoice
from specctl.core.errors import SpecctlError

if TYPE_CHECKING:
    from specctl.train.stop_rules import Learning


def train_stop(
    console: Console,
    package: Word = None,
    draft: DraftFlag = None,
    rule: Annotated[
        str, typer.Option("--stop-rule", help="Trained stop rule, such as disco.")
    ] = "specdec-pp",
    out: Annotated[Path, typer.Option("--out", "-o", help="File to write.")] = Path(
        "stop.safetensors"
    ),
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of prompts to learn from.")] = 64,
    length: Annotated[int, typer.Option(min=2, max=64, help="Draft length while learning.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the small network.")] = 600,
    target: TargetChoice = OWN_TARGET,
) -> None:
    """Train a stop rule for a drafter: SpecDec++, DISCO or AdaEAGLE.

    The drafter decodes prompts with chains of full length, and a small network learns to predict
    which tokens are accepted. A stop rule never changes the text.

    Example:

      specctl train-stop runs/distill --stop-rule disco --out runs/disco.safetensors
    """
    draft = one_drafter(package, draft, "specctl train-stop runs/NAME")
    check_drafter(draft)
    from specctl.runtime.stops.learned import write_stop
    from specctl.train.data.prompts.heldout import heldout_prompts
    from specctl.train.stop_rules import collect, fit, learned_rule

    wanted = learned_rule(rule)
    check_file(out)
    target = target.or_own(draft)
    choice = DraftChoice(draft=draft)
    model = target.load(console, wanted=choice.wanted(draft))
    loaded = choice.load(model)
    if loaded.drafter is None:
        raise SpecctlError(
            "there is no drafter to learn from", where="--draft", found=draft,
            expected="a package", do="specctl train-draft --recipe distill",
        )  # fmt: skip
    prompts = [prompt.ids for prompt in heldout_prompts(model, num_prompts)]
    found = collect(model, loaded.drafter, wanted, prompts, length)
    learning = fit(wanted, found, steps, reporter=console)
    write_stop(out, wanted.name, learning.net, {"drafter": loaded.drafter.family})
    _show(console, learning)
    done = {"rule": rule, "file": str(out), **learning.to_json()}
    words = [*target.words(), "--draft", draft, "--set", f"serve.stop={out}", "--length", 16]
    console.done(done, next=[with_text("generate", *words, "--stats")])


def _show(console: Console, learning: Learning) -> None:
    auc = "" if learning.auc is None else f", area under the ROC curve {learning.auc:.3f}"
    console.out(
        f"{learning.examples:,} tested tokens; on those kept back: loss {learning.loss:.3f}, "
        f"always saying the mean {learning.constant:.3f}{auc}"
    )
