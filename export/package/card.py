"""The model card: README.md of a package, written from its manifest and nothing else."""

from __future__ import annotations

import re
import shlex

from specctl.core.messages.claim import EXACT, meaning, stamp
from specctl.export.package.manifest import LOADABLE, Acceptance, Manifest, TargetRecord

_SECRET = re.compile(r"(hf_|sk-|ghp_|glpat-|xox[bp]-|AKIA)[A-Za-z0-9_-]{8,}")

_TITLES = {
    "specctl": "specctl package",
    "hf": "transformers folder",
}


def render_card(manifest: Manifest) -> str:
    """The whole card; machine paths are cut to their last part and secrets never appear."""
    parts = [_front(manifest), _summary(manifest), _acceptance(manifest)]
    parts += [_load(manifest), *manifest.notes, _identity(manifest), _licence(manifest)]
    return scrub("\n\n".join(parts)) + "\n"


def scrub(text: str) -> str:
    """Text without hub tokens and the like."""
    return _SECRET.sub("***", text)


def shown_target(manifest: Manifest) -> str:
    """The target's public name: its repository, else its name, never a local path."""
    return manifest.target.repo or _last(manifest.target.name)


def given_target(record: TargetRecord) -> str:
    """What a command line takes as --target; a local folder is for the reader to fill in. What is
    published for a model in whatever numbers names it as it was published."""
    if record.sketch is not None:
        return record.name
    return record.repo or (record.name if _last(record.name) == record.name else "TARGET_FOLDER")


def adapter_flags(record: TargetRecord) -> list[str]:
    """The flags that add the target's adapters; of folders, the last part."""
    return [part for word in record.adapter_words() for part in ("--adapter", _last(word))]


def _last(word: str) -> str:
    """A word with an absolute path cut to its last part."""
    absolute = word.startswith(("/", "~", "\\")) or re.match(r"[A-Za-z]:\\", word)
    return re.split(r"[/\\]", word.rstrip("/\\"))[-1] if absolute else word


def shown_command(words: tuple[str, ...]) -> str:
    """A command line for the reader: absolute paths shortened, also behind an equals sign."""
    shown = []
    for word in words:
        name, equals, value = word.partition("=")
        shown.append(f"{name}={_last(value)}" if equals else _last(word))
    return shlex.join(shown)


def _front(manifest: Manifest) -> str:
    lines = ["---", "library_name: " + ("transformers" if manifest.format == "hf" else "specctl")]
    if manifest.target.repo and "/" in manifest.target.repo:
        lines.append(f"base_model: {manifest.target.repo}")
    lines += [
        f"license: {manifest.license or 'other'}",
        "tags:",
        "- speculative-decoding",
        f"- {manifest.family}",
        "---",
    ]
    return "\n".join(lines)


def _summary(manifest: Manifest) -> str:
    vocabulary, size = manifest.vocabulary, _count(manifest.parameters)
    title = _TITLES.get(manifest.format, f"folder in the format {manifest.format}")
    numbers = manifest.dtype if manifest.held_file is None else "as a GGUF file packs them"
    text = (
        f"# Draft model for {shown_target(manifest)}\n\n"
        f"A drafter of family `{manifest.family}` ({size} parameters, {numbers}) for "
        f"speculative decoding, as a {title}. "
    )
    if manifest.verification == "lossless":
        text += _lossless(manifest.target.dtype)
    else:
        text += (
            "Verification is **approximate**: the output distribution differs from the target's."
        )
    changed = manifest.target.changed
    if changed is not None:
        text += (
            f" **The target was changed**: it is not {_last(changed.name)}, which it was made "
            "from, but that model trained together with this drafter. What is generated follows "
            f"the changed model's distribution: KL {changed.kl:.4f} nats a token from the "
            f"original's, the same greedy token in {changed.agreement:.1%} of places, "
            f"perplexity {changed.perplexity_before:.2f} before and {changed.perplexity:.2f} after "
            f"({changed.tokens:,} held-out tokens)."
        )
    if manifest.target.adapters:
        names = ", ".join(f"`{_last(word)}`" for word in manifest.target.adapter_words())
        text += (
            f" **The target has LoRA adapters**: it is {shown_target(manifest)} with {names} "
            "added to its weights, and the drafter is bound to both."
        )
    if vocabulary.digest is not None:
        text += (
            f" It drafts {vocabulary.draft_size:,} of the target's "
            f"{vocabulary.target_size:,} token ids."
        )
    if manifest.target_rows:
        text += (
            " The rows of the target's LM head that it reads with are not stored: they are taken "
            "from the target."
        )
    return text


def _lossless(dtype: str | None) -> str:
    """What is kept of the target in the arithmetic of the package, and in float32."""
    mark, words = stamp("lossless", dtype), meaning("lossless", dtype)
    text = f"Verification is {mark}, whatever is drafted: {words}."
    if dtype is None or dtype in EXACT:
        return text
    return f"{text} In float32 it is {meaning('lossless', 'float32')}."


def _count(number: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= limit:
            return f"{number / limit:.2f}{unit}"
    return str(number)


def _acceptance(manifest: Manifest) -> str:
    measured = manifest.acceptance
    if measured is None:
        return "## Acceptance\n\nNot measured. Measure it on your own prompts with `specctl bench`."
    rates = ", ".join(f"{rate:.3f}" for rate in measured.alpha) or "-"
    lines = [
        "## Acceptance",
        "",
        f"| tau (tokens per target forward, bonus included) | {measured.tau:.3f} |",
        "|---|---|",
        f"| accepted per draft position | {rates} |",
        f"| data | {_last(measured.data)} |",
        f"| temperature | {measured.temperature:g} |",
    ]
    if measured.prompts:
        lines.append(f"| prompts x new tokens | {measured.prompts} x {measured.new_tokens} |")
    is_served = manifest.format in LOADABLE
    what = "Measured by:" if is_served else "Measured, with the package it was exported from, by:"
    return "\n".join([*lines, "", what, "", f"    {shown_command(_words(measured))}"])


def _words(measured: Acceptance) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(measured.command))
    except ValueError:  # what an earlier version joined with blanks
        return tuple(measured.command.split())


def _load(manifest: Manifest) -> str:
    target = given_target(manifest.target)
    more = f" --inflate {manifest.target.inflated}" if manifest.target.inflated else ""
    more += "".join(f" {shlex.quote(word)}" for word in adapter_flags(manifest.target))
    if manifest.format == "hf":
        folder = manifest.target.repo or "TARGET_FOLDER"
        return (
            "## Use\n\n```python\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'target = AutoModelForCausalLM.from_pretrained("{folder}")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{folder}")\n'
            'draft = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")\n'
            'inputs = tokenizer("def main(", return_tensors="pt")\n'
            "out = target.generate(**inputs, assistant_model=draft, max_new_tokens=64)\n"
            "```\n\n"
            f'Or with specctl: `specctl generate --target {target} --draft THIS_FOLDER "def main("`'
            + "".join(f"\n\n    {line}" for line in manifest.served_by)
        )
    if manifest.format != "specctl":
        if not manifest.served_by:
            return "## Use\n\nNo command of a released engine serves this folder."
        lines = "\n".join(f"    {line}" for line in manifest.served_by)
        return f"## Use\n\nWith the paths of your machine filled in:\n\n{lines}"
    return (
        "## Use\n\n"
        f'    specctl generate --target {target}{more} --draft THIS_FOLDER "def main("\n'
        f"    specctl verify THIS_FOLDER --target {target}{more}\n"
        f"    specctl bench --target {target}{more} THIS_FOLDER\n\n"
        "```python\nimport specctl\n\n"
        f'specctl.generate("{target}", "def main(", drafter="THIS_FOLDER")\n```'
    )


def _identity(manifest: Manifest) -> str:
    taps = list(manifest.taps.indices)
    versions = ", ".join(f"{name} {number}" for name, number in sorted(manifest.versions.items()))
    rows = {
        "target revision": manifest.target.revision or "-",
        "target fingerprint": manifest.target.fingerprint,
        **{
            f"adapter {_last(one.name)}": f"weight {one.weight:g}, digest {one.digest}"
            for one in manifest.target.adapters
        },
        "tokenizer fingerprint": manifest.tokenizer or "-",
        "chat template": manifest.chat_template or "-",
        "taps (hidden_states indices)": ", ".join(map(str, taps)) or "none",
        "recipe": manifest.recipe_digest or "-",
        "written": manifest.created,
        "with": versions,
    }
    lines = ["## Identity", "", "| | |", "|---|---|", *(f"| {k} | {v} |" for k, v in rows.items())]
    if manifest.command:
        lines += ["", "Made by:", "", f"    {shown_command(manifest.command)}"]
    return "\n".join(lines)


def _licence(manifest: Manifest) -> str:
    if manifest.license is not None:
        return (
            f"## Licence\n\nThese weights are published under {manifest.license}. They derive from "
            f"{shown_target(manifest)}, on whose outputs or hidden states they were trained; its "
            "licence and notices apply to them, too."
        )
    if manifest.held_file is not None:
        return (
            f"## Licence\n\nThe weights are those of {manifest.held_file}, byte for byte, and "
            "stand under its licence. Set `license` above before you publish."
        )
    return (
        "## Licence\n\n"
        f"The drafter was trained on the outputs or hidden states of {shown_target(manifest)}; "
        "the licence of that model, and of the training data, may bind these weights. "
        "Set `license` above before you publish."
    )
