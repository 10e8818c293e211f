"""Where a run's features come from: its target source, batch by batch, or shards filled once.

Offline, the source reads every row once, before the first step; each process fills its share of the
shards. Every part of the rows (`rows.py`) has shards of its own, so that those of earlier parts are
kept when more data come. Rows whose shard does not fit under `data.features_gb`, or is damaged, are
read online. At a URL (`data.features_at`) every shard is kept, and `features_gb` is the size of the
cache here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from specctl.core.batch import TrainBatch
from specctl.core.drafter import Needs
from specctl.core.errors import RecipeError, ResourceError
from specctl.core.messages.sizes import size_text
from specctl.core.storage.files import Disk, digest_of
from specctl.recipes.schema import DataPart
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.data.rows.rows import TokenData
from specctl.train.distributed.ranks import Ranks
from specctl.train.features.capture import to_device
from specctl.train.features.kept import Form, decode, encode, read_target, with_features
from specctl.train.features.remote_shards import ObjectStore, RemoteShards, is_url
from specctl.train.features.served_features import ServedFeatures
from specctl.train.features.shards import ShardLayout, Shards, make_room, sweep
from specctl.train.features.target_source import TargetSource, target_source
from specctl.train.step.step_threads import StepThreads

BatchOf = Callable[[list[int]], TrainBatch]
Ahead = Callable[[list[int]], None]
FREE_SHARE = 0.95  # of the free disk that features may take
HEADER_BYTES = 2048  # at most, of a shard's file


@dataclass(frozen=True, slots=True)
class FeaturePart:
    """A part of the rows, by their numbers in the order in which they were packed, and its
    shards."""

    rows: Sequence[int]
    shards: Shards

    def numbers(self, shard: int) -> list[int]:
        """The rows of a shard."""
        return [self.rows[place] for place in self.shards.layout.rows(shard)]


Place = tuple[FeaturePart, int]  # a part and a shard of it


@dataclass(frozen=True, slots=True)
class FeatureSource:
    """The rows' features by row number, read from shards where they are."""

    target: Target
    data: TokenData
    needs: Needs
    form: Form
    parts: Sequence[FeaturePart]
    places: Sequence[tuple[int, int]]  # of each row: its part, and which row of that it is
    source: TargetSource

    def batch(self, rows: list[int]) -> TrainBatch:
        """Those rows with what the target says of them."""
        plain = to_device(self.data.batch(rows), self.target.device)
        stored = self._stored(rows)
        absent = [place for place, found in enumerate(stored) if found is None]
        online = iter(
            read_target(self.target, _rows_of(plain, absent), self.form, self.source)
            if absent
            else ()
        )
        raw = [decode(found, self.form) if found is not None else next(online) for found in stored]
        return with_features(self.target, plain, raw, self.needs, self.form)

    def ahead(self, rows: list[int]) -> None:
        """Begin to read rows that will be asked for next."""
        for number, places in self._by_part(rows).items():
            self.parts[number].shards.ahead([self.places[rows[place]][1] for place in places])

    def _stored(self, rows: Sequence[int]) -> list[dict[str, Tensor] | None]:
        """What is kept of each row."""
        found: list[dict[str, Tensor] | None] = [None] * len(rows)
        for number, places in self._by_part(rows).items():
            read = self.parts[number].shards.read_rows([self.places[rows[i]][1] for i in places])
            for place, kept in zip(places, read, strict=True):
                found[place] = kept
        return found

    def _by_part(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Number of a part -> which of the given rows are its."""
        found: dict[int, list[int]] = {}
        for place, row in enumerate(rows):
            found.setdefault(self.places[row][0], []).append(place)
        return found

    def fill(self, place: Place, group: int, threads: StepThreads) -> None:
        """Let the target read a shard's rows, `group` at a time."""
        part, shard = place
        rows = part.numbers(shard)
        parts: list[dict[str, Tensor]] = []
        for start in range(0, len(rows), group):
            batch = self.data.batch(rows[start : start + group])
            with threads.step():
                read = read_target(self.target, batch, self.form, self.source)
            parts += [encode(raw, self.form) for raw in read]
        tokens = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        lengths = [len(next(iter(part.values()))) for part in parts]
        part.shards.write(shard, tokens, lengths)


@dataclass(frozen=True, slots=True)
class Features:
    """Row numbers -> a batch with the target's features; `ahead` is told what comes next."""

    batch: BatchOf
    ahead: Ahead = lambda rows: None

    def __call__(self, rows: list[int]) -> TrainBatch:
        return self.batch(rows)


def feature_source(
    part: DataPart,
    rows: int,
    target: Target,
    data: TokenData,
    needs: Needs,
    out: Path,
    reporter: Reporter,
    ranks: Ranks,
    disk: Disk | None = None,
) -> Features:
    """Features, the way that the recipe says; `rows` are those of a batch, over all processes, and
    as many of the rows are read at a time."""
    source = target_source(part, target, reporter)
    if part.kept_features is not None and (needs.taps or needs.teacher):
        served = ServedFeatures(target, Path(part.kept_features), needs)
        served.say(data, reporter)
        source = served
    if part.features == "online":
        return Features(lambda rows: source.read(data.batch(rows), needs))
    if not needs.taps and not needs.teacher:
        raise RecipeError(
            "there are no features to keep: this drafter learns from the text alone",
            found="data.features: offline",
            expected="online",
            do="--set data.features=online",
            where="data.features",
        )
    features = _features(part, source, target, data, needs, out, disk)
    todo = _todo(part, features, reporter, ranks)
    group = max(1, rows // ranks.size)
    threads = StepThreads.of(ranks, reporter)
    with ranks.together(), reporter.task("features", len(todo), "shard") as advance:
        for number, shard in todo[ranks.rank :: ranks.size]:
            features.fill((features.parts[number], shard), group, threads)
            advance(min(ranks.size, len(todo)))
    return Features(features.batch, features.ahead)


def _features(
    part: DataPart,
    source: TargetSource,
    target: Target,
    data: TokenData,
    needs: Needs,
    out: Path,
    disk: Disk | None,
) -> FeatureSource:
    form = Form.of(part, target, needs)
    parts: list[FeaturePart] = []
    places = [(0, 0)] * data.num_rows
    for number, (digest, rows) in enumerate(data.parts()):
        layout = ShardLayout.of(len(rows), data.seq_len * form.bytes_per_token)
        key = features_key(part, target, form, digest, layout)
        parts.append(FeaturePart(rows, _shards(part, key, layout, out, disk)))
        for inside, row in enumerate(rows):
            places[row] = (number, inside)
    return FeatureSource(target, data, needs, form, parts, places, source)


def features_key(
    part: DataPart, target: Target, form: Form, digest: str, layout: ShardLayout
) -> str:
    """The folder's name of the features of the rows of that digest."""
    about = {
        "target": target.fingerprint,
        "dtype": str(target.dtype),
        "source": "inprocess" if part.target_source == "inprocess" else "engine",
        "form": asdict(form),
        "data": digest,
        "rows": [layout.num_rows, layout.each],
    }
    return digest_of(about)[:12]


def local_folder(part: DataPart) -> Path | None:
    """The shared folder of a recipe's features; None without one, and at a URL."""
    at = part.features_at
    return None if at is None or is_url(at) else Path(at.partition("://")[2] or at)


def _shards(part: DataPart, key: str, layout: ShardLayout, out: Path, disk: Disk | None) -> Shards:
    """Where the recipe says: in a folder, or at a URL with a cache in the run folder."""
    at = part.features_at
    if at is not None and is_url(at):
        cap = None if part.features_gb is None else int(part.features_gb * 1e9)
        return RemoteShards(ObjectStore(at), out / "features" / key, layout, disk, cap)
    return Shards((local_folder(part) or out / "features") / key, layout, disk)


def _todo(
    part: DataPart, features: FeatureSource, reporter: Reporter, ranks: Ranks
) -> list[tuple[int, int]]:
    """Parts and shards that are missing and fit, in order; decided by the first rank."""
    todo: list[tuple[int, int]] = []
    with ranks.together():
        if ranks.is_main:
            sweep(features.parts[0].shards.folder.parent)
            todo = _fitting(part, features, reporter)
    return ranks.gather(todo)[0]


def _fitting(part: DataPart, features: FeatureSource, reporter: Reporter) -> list[tuple[int, int]]:
    parts, form, data = features.parts, features.form, features.data
    first = parts[0].shards
    root, is_remote = first.folder.parent, isinstance(first, RemoteShards)
    whole = form.bytes_per_token * data.manifest.tokens
    kind = f"{len(form.taps)} taps, teacher {form.teacher}, {form.dtype}"
    reporter.say(
        f"features: {data.manifest.tokens:,} tokens, {kind}: {size_text(whole)} "
        + (f"at {part.features_at}" if is_remote else "on disk")
    )
    sizes = _sizes(features)

    def missing() -> list[tuple[int, int]]:
        return [place for place in sizes if not parts[place[0]].shards.is_there(place[1])]

    todo = missing()
    if part.features_gb is not None and not is_remote:
        cap, own = int(part.features_gb * 1e9), [each.shards.folder for each in parts]
        room = make_room(root, own, sum(sizes[place] for place in todo), cap)
        todo = missing()
        ends = accumulate(sizes[place] for place in todo)
        todo = [place for place, end in zip(todo, ends, strict=True) if end <= room]
    root.mkdir(parents=True, exist_ok=True)
    need, free = sum(sizes[place] for place in todo), int(FREE_SHARE * first.disk.free(root))
    if need > free and not is_remote:
        raise ResourceError(
            "the features do not fit on this disk",
            found=f"{size_text(free)} that may be taken",
            expected=size_text(need),
            do=_smaller(form, free),
            where=str(root),
        )
    there = len(sizes) - len(missing())
    reporter.say(f"features: {there} of {len(sizes)} shards are there, {len(todo)} will be written")
    return todo


def _sizes(features: FeatureSource) -> dict[tuple[int, int], int]:
    """Bytes of the file of each part's shards."""
    lengths = features.data.lengths()
    return {
        (number, shard): features.form.bytes_per_token * sum(lengths[row] for row in rows)
        + 8 * (len(rows) + 1)
        + HEADER_BYTES
        for number, part in enumerate(features.parts)
        for shard in range(part.shards.layout.num_shards)
        for rows in [part.numbers(shard)]
    }


def _smaller(form: Form, free: int) -> str:
    """What to set so that the features fit."""
    choices = [f"--set data.features_gb={max(free / 1e9, 0.01):.2f} (the rest is read online)"]
    if form.teacher == "logits":
        choices.insert(0, "--set data.teacher_topk=64")
    if form.dtype != "fp8":
        choices.insert(0, f"--set data.feature_dtype={'fp8' if form.dtype == 'bf16' else 'bf16'}")
    return ", or ".join(choices)


def _rows_of(batch: TrainBatch, places: Sequence[int]) -> TrainBatch:
    """Some rows of a batch, at its width."""
    index = torch.tensor(list(places), dtype=torch.long, device=batch.ids_BS.device)
    return replace(
        batch,
        ids_BS=batch.ids_BS[index],
        loss_mask_BS=batch.loss_mask_BS[index],
        document_BS=batch.document_BS[index],
        position_BS=batch.position_BS[index],
    )
