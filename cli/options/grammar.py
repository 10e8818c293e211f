"""The flags that hold an answer to a grammar, as one group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specctl.cli.options.flags import SAMPLING
from specctl.core.errors import SpecctlError

if TYPE_CHECKING:
    from specctl.runtime.sampling.grammar import Grammar
    from specctl.runtime.target.target import Target


@dataclass(frozen=True, slots=True)
class GrammarFlags:
    """What an answer must look like; at most one of them."""

    json_schema: Annotated[
        Path | None,
        typer.Option(
            "--json-schema", help="Hold answers to this JSON schema.", rich_help_panel=SAMPLING
        ),
    ] = None
    file: Annotated[
        Path | None,
        typer.Option(
            "--grammar", help="Hold answers to this .lark or .regex file.", rich_help_panel=SAMPLING
        ),
    ] = None

    def load(self, target: Target) -> Grammar | None:
        """The grammar, ready for that target; None if none was named."""
        if self.json_schema is None and self.file is None:
            return None
        if self.json_schema is not None and self.file is not None:
            raise SpecctlError(
                "two grammars for one answer",
                found=f"--json-schema {self.json_schema} and --grammar {self.file}",
                expected="one of them",
                do="leave one out",
            )
        from specctl.runtime.sampling.grammar import GrammarSpec, compile_grammar

        if self.json_schema is not None:
            return compile_grammar(GrammarSpec.read(self.json_schema, "json_schema"), target)
        assert self.file is not None
        return compile_grammar(GrammarSpec.read(self.file), target)
