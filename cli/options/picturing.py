"""Pictures out of image tokens: settings of `specctl generate` with a target that writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from specctl.cli.app.console import Console
from specctl.cli.app.settings import Setting
from specctl.core.errors import FileError, IncompatibleError, RecipeError

if TYPE_CHECKING:
    from specctl.cli.options.prompts import PromptText
    from specctl.images.codebook import Codebook
    from specctl.runtime.generate import Output
    from specctl.runtime.target.target import Target

COLUMNS, ZOOM = 10, 4  # pictures beside each other in a sheet, and pixels of a sheet for one


@dataclass(frozen=True, slots=True)
class ImageFlags:
    """How pictures are decoded, and where they are written."""

    out: Annotated[
        str | None,
        Setting(
            "picture.out",
            "PNG file of what was written, by a target of image tokens (docs/images-out.md).",
            metavar="FILE",
        ),
    ] = None
    window: Annotated[
        str | None,
        Setting(
            "picture.window",
            "ZipAR: a row of the picture begins this many tokens after the row above; auto:MIN: as "
            "many as a test finds necessary for each row, at least MIN (approximate).",
            metavar="N",
        ),
    ] = None
    passes: Annotated[
        int | None,
        Setting(
            "picture.passes",
            "Passes over a picture of a model that writes patches in any order (default: one for "
            "every patch; fewer are approximate).",
            min=1,
        ),
    ] = None

    def codebook(self, target: str) -> Codebook | None:
        """The codebook of the target; None where no setting wants it. Raises FileError where the
        target has none or `out` is a folder, RecipeError where `out` is no PNG."""
        if self.out is None and self.window is None:
            return None
        from specctl.images.codebook import Codebook
        from specctl.recipes.targets import resolve

        self.check_file()
        return Codebook.load(resolve(target).path or Path(target))

    def check_file(self) -> None:
        """Refuse a file that cannot be written, before anything is decoded."""
        if self.out is not None and not self.out.lower().endswith(".png"):
            raise RecipeError(
                "pictures are written as PNG alone",
                where="picture.out",
                found=self.out,
                expected="a name that ends in .png",
                do="--set picture.out=picture.png",
            )
        if self.out is not None and Path(self.out).is_dir():
            raise FileError(
                "a picture cannot be written in the place of a folder",
                where="picture.out",
                found=self.out,
                expected="the name of a file",
                do=f"--set picture.out={Path(self.out) / 'picture.png'}",
            )

    def check(self, codebook: Codebook, target: Target, prompts: Sequence[PromptText]) -> None:
        """Refuse the codebook of another target, and prompts that are no beginning of a picture:
        what they hold of one is not in what is written, and an unknown word would be padding."""
        codebook.check_target(target.name, target.spec.vocab_size)
        tokenizer = target.tokenizer
        padding = getattr(tokenizer, "pad_token_id", None)
        if padding in (getattr(tokenizer, f"{end}_token_id", None) for end in ("bos", "eos")):
            padding = None  # it stands for something else, too
        for prompt in prompts:
            ids = target.encode(prompt.text)
            codes = sum(0 <= token - codebook.first_id < len(codebook.patch_KX) for token in ids)
            if codes or (padding is not None and padding in ids):
                raise IncompatibleError(
                    "a prompt is none that a picture begins behind",
                    where="the prompts",
                    found=f"{prompt.text[:60]!r}, "
                    + (f"with {codes:,} image tokens" if codes else "with words it does not know"),
                    expected="what the picture shows, in words of the target",
                    do="leave them out: docs/images-out.md",
                )

    def write(self, console: Console, codebook: Codebook | None, outputs: Sequence[Output]) -> None:
        """Write the pictures of all outputs into one file; say what of them is missing."""
        if codebook is None or self.out is None:
            return
        from specctl.images.png import sheet, write_png

        made = [codebook.decode(output.token_ids) for output in outputs]
        if short := sum(missing > 0 for _, missing in made):
            console.warn(
                f"{short:,} of {len(made):,} pictures lack patches, which are black: a whole one "
                f"has {codebook.num_tokens:,} image tokens (--max-new-tokens)"
            )
        write_png(Path(self.out), sheet([pixels for pixels, _ in made], COLUMNS, ZOOM))
        console.say(f"{len(made):,} pictures in {self.out}")
