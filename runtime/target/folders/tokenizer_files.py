"""A folder's tokenizer and the ends of its texts as its files say, without torch: what `specctl
show` tells of a model that nobody has loaded. A tokenizer without tokenizer.json is not read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specctl.core.errors import IntegrityError
from specctl.core.messages.foreign_calls import is_panic
from specctl.core.storage.model_folder import refuse_stand_ins
from specctl.runtime.target.folders.checkpoint_folder import read_object
from specctl.runtime.target.templates.ends import EndsOfText, named_ends, united


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """As much of a tokenizer of transformers as tells where texts end. `special`: the names that
    its configuration has for tokens, such as eos_token, and their spellings."""

    backend: Any  # tokenizers.Tokenizer
    special: Mapping[str, str]
    chat_template: str | None

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        return dict(self.backend.get_added_tokens_decoder())

    @property
    def all_special_ids(self) -> list[int]:
        found = (self.backend.token_to_id(token) for token in self.special.values())
        return [number for number in found if number is not None]

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    def _id(self, name: str) -> int | None:
        token = self.special.get(name)
        return None if token is None else self.backend.token_to_id(token)

    def convert_ids_to_tokens(self, number: int) -> str | None:
        found: str | None = self.backend.id_to_token(number)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": self.backend.encode(text, add_special_tokens=add_special_tokens).ids}

    def apply_chat_template(self, turns: Sequence[Mapping[str, Any]], tokenize: bool) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize, "only texts are written"
        written: Any = render_jinja_template(
            [list(turns)], chat_template=self.chat_template, **self.special
        )
        return str(written[0][0])


def read_tokenizer(folder: Path) -> TokenizerFiles | None:
    """The tokenizer of a folder; None without a tokenizer.json that the library reads."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        backend = Tokenizer.from_file(str(file))
    except BaseException as error:  # the library raises plain Exception for whatever it cannot read
        if not (isinstance(error, Exception) or is_panic(error)):
            raise
        return None
    settings = _object(folder / "tokenizer_config.json")
    named = {**_object(folder / "special_tokens_map.json"), **settings}
    spelled = {name: _content(value) for name, value in named.items() if name.endswith("_token")}
    special = {name: token for name, token in spelled.items() if token is not None}
    return TokenizerFiles(backend, special, _template(folder, settings))


def ends_in(folder: Path, config: Mapping[str, Any]) -> EndsOfText:
    """Where the texts of the model in a folder end; `config`: what its config.json holds."""
    refuse_stand_ins(folder)
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    size = text.get("vocab_size")
    generation = _object(folder / "generation_config.json")
    named = named_ends(generation.get, config.get, text.get)
    tokenizer = read_tokenizer(folder)
    return united(named, tokenizer, size if isinstance(size, int) else 1 << 31)


def _object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none, as nothing is decided here."""
    try:
        return read_object(path) if path.is_file() else {}
    except IntegrityError:
        return {}


def _content(value: Any) -> str | None:
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template that transformers takes by default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template") or _object(folder / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(found, list):  # several, each with its name
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None
