"""Manifest: everything a loader must know about a package, and proof that the package is whole.

Torch is not imported here. `manifest.json` lists the size and sha256 of every other file; its own
`digest` covers its fields, and its bytes must equal the canonical spelling of those fields, so that
no byte of a package can change unseen. This finds damage and mix-ups; it is not a signature.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

import specctl
from specctl.core.errors import FileError, IncompatibleError, IntegrityError
from specctl.core.messages.installed import way_to_newer
from specctl.core.spec import ModelSpec, check_spec
from specctl.core.storage.files import sha256_file
from specctl.core.storage.model_folder import CONFIG, is_hub_link, refuse_pointer
from specctl.export.package.files import (
    check_name,
    is_inert,
    list_files,
    open_folder,
    parse_json,
    read_bounded,
    reading,
)
from specctl.recipes.serve import check_serve, is_relaxed

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
WEIGHTS = "model.safetensors"
CARD = "README.md"
MODEL = "model"  # of a GGUF file in place of weights, or its parts
_HELD = re.compile(rf"{MODEL}(-\d{{5}}-of-\d{{5}})?\.gguf")
LOADABLE = ("specctl", "hf")  # formats that specctl itself drafts with

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Dtype = Literal["float16", "bfloat16", "float32", "float64"]
Count = Annotated[int, Field(ge=0)]


class Record(BaseModel):
    """A frozen part of a manifest: unknown keys refused, nothing coerced, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FileRecord(Record):
    sha256: Sha256
    bytes: Count


class ChangeRecord(Record):
    """What joint training made the target from, and how far it moved it: KL(original || changed) in
    nats per token, share of equal greedy tokens, perplexities, over so many held-out tokens."""

    name: str
    fingerprint: str
    kl: float
    agreement: Annotated[float, Field(ge=0.0, le=1.0)]
    perplexity_before: Annotated[float, Field(ge=1.0)]
    perplexity: Annotated[float, Field(ge=1.0)]
    tokens: Count


class AdapterRecord(Record):
    """A LoRA adapter that was added to the target's weights, `weight` times."""

    name: str
    weight: Annotated[float, Field(gt=0.0)]
    digest: Sha256


class SketchRecord(Record):
    """What tells a model in other numbers from another model: `vectors` is a digest of its norms
    and biases, which quantisation leaves alone, `signs` the signs of evenly spaced numbers of its
    embedding, in hexadecimal."""

    vectors: Sha256
    signs: Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,4096}$")]


class TargetRecord(Record):
    """The model the drafter was made for. `inflated` is the size it was grown to, or null; `dtype`
    is what it computed in then (packages of before do not say); `changed` stands only where joint
    training made that model, `adapters` only where some were added (`fingerprint` covers them),
    `sketch` where the package is published for that model in whatever numbers."""

    name: str
    repo: str | None
    revision: str | None
    fingerprint: str
    inflated: str | None
    dtype: str | None = None
    changed: ChangeRecord | None = None
    adapters: tuple[AdapterRecord, ...] = ()
    sketch: SketchRecord | None = None

    def adapter_words(self) -> list[str]:
        """The adapters as --adapter takes them."""
        return [a.name if a.weight == 1.0 else f"{a.name}@{a.weight:g}" for a in self.adapters]


class TapsRecord(Record):
    """Taps as transformers hidden_states indices (0 = embedding output, k = output of layer k-1),
    and what else the drafter takes from the target."""

    convention: Literal["hidden_states"]
    indices: tuple[Count, ...]
    topk: Count
    borrow: bool


class VocabRecord(Record):
    """`draft_size` ids of `target_size` can be drafted; `digest` names them (null = all)."""

    target_size: Annotated[int, Field(ge=1)]
    draft_size: Annotated[int, Field(ge=1)]
    digest: Sha256 | None

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        full = self.draft_size == self.target_size
        if self.draft_size > self.target_size or (self.digest is None and not full):
            raise ValueError(f"{self.draft_size} draft ids for {self.target_size} target ids")
        return self


class Acceptance(Record):
    """tau (with the bonus token) and the acceptance rate per draft position, as measured."""

    tau: Annotated[float, Field(ge=1.0)]
    alpha: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...]
    command: str
    data: str
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    prompts: Count = 0
    new_tokens: Count = 0


class Manifest(Record):
    """See docs/package-format.md for every field; `target_rows` names tensors that are the target's
    own and not stored, `license` stands where the package was published, `served_by` and `notes` in
    exports."""

    format_version: Literal[1]
    format: Annotated[str, Field(min_length=1)]
    digest: Sha256
    created: str
    family: Annotated[str, Field(min_length=1)]
    options: dict[str, JsonValue]
    spec: dict[str, JsonValue]
    dtype: Dtype
    parameters: Count
    files: dict[str, FileRecord]
    target: TargetRecord
    tokenizer: str | None
    chat_template: str | None
    taps: TapsRecord
    vocabulary: VocabRecord
    verification: Literal["lossless", "approximate"]
    serve: dict[str, JsonValue]
    recipe_digest: str
    acceptance: Acceptance | None
    versions: dict[str, str]
    command: tuple[str, ...]
    target_rows: tuple[str, ...] = ()
    license: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,39}$")] | None = None
    served_by: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @field_validator("spec")
    @classmethod
    def _spec_is_whole(cls, spec: dict[str, JsonValue]) -> dict[str, JsonValue]:
        wanted = {field.name for field in dataclass_fields(ModelSpec)}
        if set(spec) != wanted:
            raise ValueError(f"missing or unknown: {', '.join(sorted(wanted ^ set(spec)))}")
        check_spec(_SPEC.validate_json(json.dumps(spec), strict=True))
        return spec

    @field_validator("serve")
    @classmethod
    def _serve_is_a_recipe_s(cls, serve: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """A package has no other freedom than a recipe, and names no file outside of itself."""
        check_serve(serve)
        if serve.get("stop_file") is not None:
            raise ValueError(
                "stop_file is no part of a package; give it with --set serve.stop=FILE"
            )
        return serve

    @model_validator(mode="after")
    def _a_relaxed_rule_is_marked(self) -> Self:
        if self.verification == "lossless" and is_relaxed(self.serve.get("rule")):
            raise ValueError(f"rule {self.serve['rule']} is approximate, not lossless")
        return self

    @property
    def is_loadable(self) -> bool:
        """Whether specctl itself loads the folder; exports for engines are theirs."""
        return self.format in LOADABLE

    @property
    def held_file(self) -> str | None:
        """The GGUF file that the package holds in place of weights, or its first part."""
        return min(filter(is_held_name, self.files), default=None)

    @property
    def model_spec(self) -> ModelSpec:
        """The shape of the target for which the drafter was built."""
        return ModelSpec.from_json(dict(self.spec))

    def to_json(self) -> dict[str, Any]:
        body = self.model_dump(mode="json")
        for name in ("dtype", "changed", "sketch"):
            if body["target"][name] is None:
                del body["target"][name]
        if not body["target"]["adapters"]:
            del body["target"]["adapters"]
        for name in ("target_rows", "license", "served_by", "notes"):
            if not body[name]:
                del body[name]
        return body

    def render(self) -> bytes:
        """The one spelling of this manifest on disk."""
        return _spell(self.to_json())

    @classmethod
    def seal(cls, fields: Mapping[str, Any]) -> Manifest:
        """A manifest of these fields (all but `digest`, which is computed)."""
        body = {**fields, "digest": "0" * 64}
        draft = cls.model_validate_json(json.dumps(body))
        return draft.model_copy(update={"digest": draft.expected_digest()})

    def expected_digest(self) -> str:
        body = self.to_json()
        del body["digest"]
        return hashlib.sha256(_spell(body)).hexdigest()


def is_held_name(name: str) -> bool:
    """Whether a package may hold a GGUF file, or a part of one, under that name."""
    return _HELD.fullmatch(name) is not None


_SPEC = TypeAdapter(ModelSpec)


def _spell(body: Mapping[str, Any]) -> bytes:
    return (json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True) + "\n").encode()


def read_manifest(path: Path | str) -> Manifest:
    """The manifest of a package folder (or of a manifest.json), its own digest verified."""
    with reading(path):
        return _read(Path(path))


def _read(path: Path) -> Manifest:
    file = path if path.name == MANIFEST and not path.is_dir() else open_folder(path) / MANIFEST
    if not file.is_file() or (file.is_symlink() and not is_hub_link(file)):
        raise _no_package(file.parent)
    raw = read_bounded(file)
    _check_version(parse_json(raw, MANIFEST))
    try:
        manifest = Manifest.model_validate_json(raw)
    except ValidationError as error:
        raise _invalid(error) from error
    expected = manifest.expected_digest()
    if manifest.digest != expected or manifest.render() != raw:
        raise IntegrityError(
            f"{MANIFEST} was changed after it was written",
            found=f"digest {manifest.digest[:12]}",
            expected=f"digest {expected[:12]} and the spelling that specctl writes",
            do="get the package again, or export it again from its run",
        )
    return manifest


def _no_package(folder: Path) -> FileError:
    """The error for a folder without a manifest, by what lies there instead."""
    do = "give the package folder of a run, such as runs/NAME/package"
    found = f"no regular {MANIFEST}"
    if (folder / CONFIG).is_file():
        found += f", but {CONFIG}: a model"
        do = f"a whole model is no package, and drafts as it is: --draft {folder}; a published "
        do += f"head becomes a package by: specctl import {folder} --target NAME --out FOLDER"
    elif (folder / "run.yaml").is_file():
        found += ", but a run.yaml: a run that has written no package yet"
        do = (
            f"let the run finish: give its command again (specctl show {folder} says how far it is)"
        )
    return FileError(
        "the folder is not a specctl package",
        found=found,
        expected=f"a folder written by specctl, with {MANIFEST} in it",
        do=do,
        where=str(folder),
    )


def _check_version(body: Mapping[str, Any]) -> None:
    version = body.get("format_version")
    if isinstance(version, int) and not isinstance(version, bool) and version > FORMAT_VERSION:
        raise IncompatibleError(
            "format_version: the package was written by a newer specctl",
            found=str(version)[:40],
            expected=f"at most {FORMAT_VERSION}",
            do=way_to_newer(written_by(body.get("versions")))
            + "; or ask its author for one of this format",
            where=f"{MANIFEST}:format_version",
        )


def written_by(versions: object) -> str:
    """The other version of specctl that a manifest's `versions` name; empty where they do not."""
    version = versions.get("specctl") if isinstance(versions, Mapping) else None
    is_version = isinstance(version, str) and re.fullmatch(r"[0-9][0-9A-Za-z.+]{0,30}", version)
    return str(version) if is_version and version != specctl.__version__ else ""


def _invalid(error: ValidationError) -> IntegrityError:
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part) for part in first["loc"]) or "(root)"
    return IntegrityError(
        f"{MANIFEST} is not a valid manifest: {ascii(field)[1:-1][:100]}",
        found=ascii(first["msg"])[1:-1][:200],
        expected=f"every field of format {FORMAT_VERSION} and no other",
        do="get the package again, or export it again from its run",
        where=f"{MANIFEST}:{ascii(field)[1:-1][:100]}",
    )


def package_in(folder: Path) -> Path:
    """The folder, or the package inside where it is the folder of a run."""
    inside = folder / "package"
    return inside if (inside / MANIFEST).is_file() and not (folder / MANIFEST).exists() else folder


def refuse_export(manifest: Manifest, where: Path | str, readable: Sequence[str]) -> None:
    """Refuse a folder in another format than those `readable` here."""
    if manifest.format in readable:
        return
    others = "".join(f", or an export in the format {n}" for n in readable if n != "specctl")
    raise FileError(
        "the folder is an export" + ("" if manifest.is_loadable else " for serving engines"),
        found=f"format {manifest.format}",
        expected="a package" + others,
        do="give the package that it was exported from; README.md says who serves this one",
        where=str(where),
    )


def file_records(folder: Path) -> dict[str, FileRecord]:
    """Size and sha256 of every file of a folder, the manifest itself left out."""
    return {
        name: FileRecord(sha256=sha256_file(path), bytes=path.stat().st_size)
        for name, path in list_files(folder).items()
        if name != MANIFEST
    }


def check_files(path: Path | str) -> Manifest:
    """Verify every byte of a package; raises IntegrityError naming the first file at fault."""
    with reading(path):
        return _check(Path(path))


def _check(path: Path) -> Manifest:
    folder = open_folder(path)
    manifest = read_manifest(folder)
    listed = manifest.files.keys()
    present = {n: p for n, p in list_files(folder).items() if n in listed or not is_inert(n)}
    for name in (*manifest.files, *present):
        check_name(name)
    if len({name.casefold() for name in manifest.files} | {MANIFEST}) != len(manifest.files) + 1:
        raise _fault("two file names differ only in case", MANIFEST, "distinct names")
    for name, record in manifest.files.items():
        if (folder / name).is_dir():
            raise _fault("a file of the package is not a regular file", name, "the file")
        if name not in present:
            raise _fault("a file of the package is missing", name, "the file")
        refuse_pointer(present[name])
        size = present[name].stat().st_size
        if size != record.bytes:
            raise _fault("a file has another size", f"{name}: {size:,}", f"{record.bytes:,} bytes")
        digest = sha256_file(present[name])
        if digest != record.sha256:
            raise _fault(
                "a file was changed after it was written",
                f"{name}: sha256 {digest[:12]}",
                f"sha256 {record.sha256[:12]}",
            )
    extra = sorted(set(present) - set(manifest.files) - {MANIFEST})
    if extra:
        raise _fault("the package contains files it does not list", extra[0], "listed files only")
    return manifest


def _fault(what: str, found: str, expected: str) -> IntegrityError:
    return IntegrityError(
        what,
        found=found,
        expected=expected,
        do="get the package again, or export it again from its run",
    )
