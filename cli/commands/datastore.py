"""`specctl datastore`: fill the store that a drafter retrieves from, and package it."""

from __future__ import annotations

import sys
from functools import partial

from specctl.api.preflight import check_run
from specctl.cli.app.console import Console
from specctl.cli.app.follow_up import with_text
from specctl.cli.options.flags import Offline
from specctl.cli.options.recipe_flags import RecipeFlags
from specctl.cli.options.target_choice import TargetChoice, not_in_step
from specctl.core.storage.hub_access import go_offline

REST = RecipeFlags(recipe="rest")


def datastore(console: Console, flags: RecipeFlags = REST, offline: Offline = False) -> None:
    """Build the store of a drafter that learns from texts (rest, suffix-automaton, dresd, rasd,
    hierarchy, token-recycling).

    The texts are the recipe's data: as they are, or with data.regenerate=true what the target
    answers to them. OUT/package is the drafter; it belongs to this target and tokenizer.

    Examples:

      specctl datastore --recipe rest --out runs/store
      specctl datastore --recipe rest --data src/ --set data.limit_tokens=1000000 --out runs/code
      specctl datastore --recipe rest --set data.regenerate=true --set data.prompts=200 -o runs/own
      specctl datastore --recipe rasd --init runs/tiny-rasd/package --out runs/rasd-store
    """
    recipe = flags.load()
    out = flags.folder(recipe.target.name, recipe.name)
    check_run(recipe, out)
    if recipe.target.tensor_parallel:
        raise not_in_step("target.tensor_parallel")
    if offline:
        go_offline()
    from specctl.drafters import family
    from specctl.export.package.folder import load_drafter, save_package
    from specctl.runtime.target.target import load_part
    from specctl.train.assemble import family_options
    from specctl.train.data.prepare import prepare
    from specctl.train.datastore import fill
    from specctl.train.runs.kept import kept_in

    console.kept = partial(kept_in, out)
    part = recipe.target
    target = load_part(part, offline=offline, tensor_parallel=False)
    if recipe.drafter.init is not None:
        drafter = load_drafter(recipe.drafter.init, target)
    else:
        method = family(recipe.drafter.family)
        drafter = method.build(family_options(method, recipe.drafter), target.spec, None)
    num_tokens = fill(drafter, target, partial(prepare, recipe, target, out, console), console)
    manifest = save_package(
        drafter,
        target,
        out / "package",
        serve=recipe.serve.model_dump(mode="json"),
        recipe_digest=recipe.digest,
        acceptance=None,
        command=sys.argv,
    )
    size = sum(record.bytes for record in manifest.files.values())
    console.say(f"{out / 'package'}: {size:,} bytes")
    result = {"package": str(out / "package"), "tokens": num_tokens, "bytes": size}
    words = [*TargetChoice.of_recipe(part).words(), "--draft", out / "package", "--compare"]
    console.done(result, next=[with_text("generate", *words)])
