"""derive_recipe(): a recipe for a target that none was made for, within a given time; and how it is
kept, so that a run that goes on has the same one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specctl.api.arguments.initial_shape import following_init
from specctl.api.arguments.progress import Progress, as_reporter
from specctl.api.arguments.recipe import RecipeLike, recipe_of
from specctl.api.failures import raises_user_errors
from specctl.core.errors import FileError, RecipeError, SpecctlError
from specctl.core.storage.files import digest_of, sha256_file, write_json
from specctl.recipes.made_for import DEMONSTRATION, is_same, made_for, target_of
from specctl.recipes.schema import DataPart, DrafterPart, TargetPart
from specctl.recipes.serve import ServePart
from specctl.recipes.targets import resolve
from specctl.train.runs.finished import MARK
from specctl.train.saving.integrity import saved_steps
from specctl.train.saving.run_file import RECORD as RUN_FILE
from specctl.train.saving.run_file import recorded

if TYPE_CHECKING:
    from specctl.train.planning.derive import Derived
    from specctl.train.planning.for_engines import BesideTarget
    from specctl.train.planning.work import Part

DERIVED = "derived"  # the origin of a value that was found here
RECORD = "derived.json"  # in the folder of a run
UNITS = {"s": 1, "m": 60, "h": 3600}
AMOUNTS = ("train.steps", "data.prompts")  # who sets one of these says how long the run is
FOLLOWING = ("train.tau_every", "train.save_every")  # chosen by the number of steps

Choices = Sequence[dict[str, Any]]  # as they are kept: field, value, reason, what it replaces


@raises_user_errors
def derive_recipe(
    target: str | Path | None = None,
    recipe: RecipeLike = "eagle3",
    *,
    time: str | float = "40m",
    processes: int = 1,
    before: Sequence[Part] = (),
    progress: Progress = None,
    **settings: Any,
) -> Derived:
    """The recipe, its numbers found for `target`, the data and this machine: what fits into `time`
    (seconds, or a text such as "40m") beside the parts that are done `before` the run. `settings`
    are those of train(), and are kept as they are. `result.recipe` is what train() takes;
    `result.choices` has each value with its reason."""
    from specctl.train.planning.derive import derive

    reporter = as_reporter(progress)
    made = following_init(recipe_of(recipe, target, settings), reporter.warn)
    return derive(made, seconds_of(time), reporter, processes, before, engines_of)


def engines_of(
    part: DrafterPart, serve: ServePart, size: int | None, beside: BesideTarget
) -> Mapping[str, SpecctlError | None]:
    """What each engine that has a format for the family will say of a drafter of so many ids (None:
    of all) beside such a target: None where it reads it, else why it does not."""
    from specctl.drafters import family
    from specctl.export.foreseen import Foreseen, refusals
    from specctl.train.assemble import family_options
    from specctl.train.init.initial import completed

    drafter = completed(part, beside.spec)
    seen = Foreseen(
        family=drafter.family,
        options=family_options(family(drafter.family), drafter),
        spec=beside.spec,
        kept=size,
        serve=serve.model_dump(mode="json"),
        config=beside.config,
        tokenizer=beside.tokenizer,
        ends=beside.ends,
    )
    return refusals(seen)


def seconds_of(time: str | float) -> float:
    """Seconds of a time such as 40m, 1h30m, 90s."""
    if isinstance(time, (int, float)) and not isinstance(time, bool) and 0 < time < 1e9:
        return float(time)
    found = re.findall(r"(\d+(?:\.\d+)?)([smh])", str(time))
    seconds = sum(float(number) * UNITS[unit] for number, unit in found)
    if "".join(number + unit for number, unit in found) != str(time) or seconds <= 0:
        raise RecipeError(
            "this is no time",
            where="--time",
            found=repr(time),
            expected="a number with s, m or h",
            do="--time 40m",
        )
    return seconds


def is_foreign(part: TargetPart, family: str, given: str, origin: Mapping[str, str]) -> bool:
    """Whether recipe `given` is a demonstration for another target, which is on this machine, and
    nobody has said how long the run shall be: `origin` is what has set each field."""
    if part.inflate is not None or is_same(part.name, DEMONSTRATION):
        return False
    if target_of(given) != DEMONSTRATION or made_for(part.name, (family,)):
        return False
    if resolve(part.name, part.revision).repo is not None:
        return False
    return all(_is_shipped(origin[field]) for field in AMOUNTS)


def _is_shipped(said_by: str) -> bool:
    from specctl.train.data.sources.shipped import is_shipped

    return is_shipped(said_by)


def is_derived(origin: Mapping[str, str]) -> bool:
    """Whether sizes or amounts of a recipe were found for its own target."""
    return DERIVED in origin.values()


def keep(derived: Derived, out: Path, of: str) -> None:
    """Write OUT/derived.json, which the same command reads when the run goes on. `of`: the
    `origin_digest` of the recipe that was derived. What was chosen for a run before and not chosen
    anew stays in it."""
    out.mkdir(parents=True, exist_ok=True)
    record = {"of": of, **derived.to_json()}
    before = _record(out)
    if before is not None and has_learned(out):
        anew = {choice["field"] for choice in record["choices"]}
        stays = [choice for choice in before["choices"] if choice["field"] not in anew]
        record["choices"] = [*stays, *record["choices"]]
    write_json(out / RECORD, record)


def origin_digest(name: str, target: TargetPart, drafter: DrafterPart, data: DataPart) -> str:
    """A digest of what choices are derived from, beside the time: target, the recipe's method with
    its options, and data. Data sets of the hub count by their name."""
    from specctl.train.data.sources.sources import find_source, names_of

    sources = [find_source(name, data.format, data.split) for name in names_of(data.source)]
    files = [[sha256_file(file) for file, _ in source.files] for source in sources]
    return digest_of(
        {
            "target": target.model_dump(mode="json"),
            "method": [name, drafter.model_dump(mode="json")],
            "data": [[source.name for source in sources], files],
        }
    )


def has_learned(out: Path) -> bool:
    """Whether the folder holds what a run has learned: a checkpoint, or its end."""
    return (out / MARK).exists() or bool(saved_steps(out / "checkpoints"))


def longer(out: Path, seconds: float) -> Choices | None:
    """The sizes that were kept in the folder of a run, of which answers and steps are to be derived
    anew; None where `seconds` are not more than the run was derived for."""
    found = _record(out)
    if found is None or seconds <= found["seconds"]:
        return None
    return [one for one in found["choices"] if one["field"] not in (*AMOUNTS, *FOLLOWING)]


def kept(out: Path, seconds: float | None, of: Callable[[], str]) -> Choices | None:
    """The choices that were kept in the folder of a run; None without any. `seconds` as they are
    given now: others than those of the run are refused. Choices of a run that has learned nothing
    yet hold for its own target, method and data alone, whose `origin_digest` is what `of` returns;
    where no run was begun at all, for its own time alone, too."""
    found = _record(out)
    if found is None:
        return None
    if found["of"] is not None and not has_learned(out):
        is_other_time = seconds is not None and seconds != found["seconds"]
        if is_other_time and recorded(out / RUN_FILE) is None:
            return None
        if found["of"] != of():
            return None
    earlier = found["seconds"]
    if seconds is not None and seconds != earlier:
        more = "; --allow data goes on with more answers and steps" if seconds > earlier else ""
        raise RecipeError(
            f"the run in {out} was derived for another time",
            where="--time",
            found=f"{seconds:.0f} s",
            expected=f"{earlier:.0f} s",
            do=f"--time {earlier:.0f}s goes on with it{more}; another --out begins anew",
        )
    choices: Choices = found["choices"]
    return choices


def time_of(out: Path) -> float | None:
    """The seconds for which the run in a folder was derived; None without choices there."""
    found = _record(out)
    return None if found is None else float(found["seconds"])


def read_by(out: Path) -> tuple[str, ...]:
    """The engines that read the drafter of a run, as its plan said; none of a run that was not
    derived, or of a family whose engines the plan does not name."""
    try:
        return tuple(json.loads((out / RECORD).read_text("utf-8"))["engines"]["reads"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def chosen_fields(
    choices: Choices, origin: Mapping[str, str], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Field -> value of the kept choices that hold for a recipe of these values."""
    return {one["field"]: one["value"] for one in choices if _is_theirs(one, origin, values)}


def _record(out: Path) -> dict[str, Any] | None:
    """What OUT/derived.json says; None without one."""
    path = out / RECORD
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        choices = [dict(one, field=one["field"], value=one["value"]) for one in found["choices"]]
        return {"of": found.get("of"), "seconds": float(found["seconds"]), "choices": choices}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileError(
            f"{path} cannot be read",
            found=str(error),
            expected="the choices of a derived recipe",
            do="choose another --out, or remove the folder yourself",
        ) from error


def _is_theirs(
    choice: dict[str, Any], origin: Mapping[str, str], values: Mapping[str, Any]
) -> bool:
    """Whether a choice that was kept holds for a recipe: nobody has set its field, or it is set to
    what the choice adds to."""
    field, replaces = choice["field"], choice.get("replaces")
    if field not in origin or _is_shipped(origin[field]):
        return True
    return replaces is not None and replaces == values[field]
