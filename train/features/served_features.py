"""Features that a server kept while it verified (`data.kept_features`); the target reads the rest.

A document has the states of the kept text that begins with it: states look back only. The last
token of a kept text was never fed, so it has none; nothing in a loss reads the state behind the end
of a document, and zeros stand there. Files of another target, of too few layers, or damaged are
left out, and counted. Letters: B rows, D hidden width, L positions, S sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specctl.core.batch import HeadRows, TrainBatch
from specctl.core.drafter import Needs
from specctl.core.messages.printable import counted
from specctl.core.storage.kept_features import FeatureFile, feature_files
from specctl.runtime.measure.reporter import Reporter
from specctl.runtime.target.target import Target
from specctl.train.data.rows.rows import TokenData
from specctl.train.features.capture import capture, has_plain_head, head_logits, to_device
from specctl.train.features.target_source import documents

ROWS_READ = 64  # of the data at once, where documents are counted

Text = tuple[int, ...]
Span = tuple[int, int, int]  # row, first and last + 1 place of a document


class ServedFeatures:
    """Batches as `capture` makes them, by the files of a folder as far as they go."""

    def __init__(self, target: Target, folder: Path, needs: Needs) -> None:
        self.target, self.needs = target, needs
        last = {target.spec.num_layers} if needs.teacher else set()
        self.layers = tuple(sorted({*needs.taps} | last))
        self.left_out = Counter[str]()
        self._files: dict[Text, FeatureFile] = {}  # the newest of each text
        usable = has_plain_head(target.lm) or not needs.teacher
        for path in reversed(feature_files(folder) if usable and folder.is_dir() else []):
            file = FeatureFile.open(path)
            if file is None:
                self.left_out["damaged"] += 1
            elif file.fingerprint != target.fingerprint:
                self.left_out["of another target"] += 1
            elif not file.layers.issuperset(self.layers):
                self.left_out["of other layers"] += 1
            else:
                self._files.setdefault(file.ids, file)
        self._texts = sorted(self._files)

    def find(self, text: Text) -> FeatureFile | None:
        """The file with the states of a text, but perhaps for its last token."""
        at = bisect_left(self._texts, text)  # what begins with a text stands behind it, in order
        found = self._texts[at : at + 1]
        return self._files[found[0]] if found and found[0][: len(text)] == text else None

    def say(self, data: TokenData, reporter: Reporter) -> None:
        """How many documents of the data are the server's, and how many the target reads."""
        texts = kept = 0
        for start in range(0, data.num_rows, ROWS_READ):
            batch = data.batch(range(start, min(data.num_rows, start + ROWS_READ)))
            for text in texts_of(batch, documents(batch)):
                texts, kept = texts + 1, kept + (self.find(text) is not None)
        why = "".join(f"; {counted(n, 'file')} {what}" for what, n in self.left_out.items())
        reporter.say(
            f"features: the server kept those of {kept:,} of {counted(texts, 'text')}, the target "
            f"reads {texts - kept:,}{why}"
        )

    def read(self, batch: TrainBatch, needs: Needs) -> TrainBatch:
        """The batch with taps and teacher."""
        assert needs == self.needs, "the folder was read for other layers"
        batch = to_device(batch, self.target.device)
        spans = documents(batch)
        texts = texts_of(batch, spans)
        files = [self.find(text) for text in texts]
        if not any(files):
            return capture(self.target, batch, needs)
        shape = (*batch.ids_BS.shape, self.target.spec.hidden_size)
        laid = {layer: self._zeros(shape) for layer in self.layers}
        missing: list[tuple[Span, Text]] = []
        for (row, start, end), text, file in zip(spans, texts, files, strict=True):
            if file is None:
                missing.append(((row, start, end), text))
                continue
            for layer, state_LD in file.states(end - start, self.layers).items():
                laid[layer][row, start : start + len(state_LD)] = state_LD.to(laid[layer])
        self._read_missing(missing, laid)
        return self._with_states(batch, laid)

    def _read_missing(self, missing: Sequence[tuple[Span, Text]], laid: dict[int, Tensor]) -> None:
        """What the target says of the other documents, each in a row of its own."""
        if not missing:
            return
        longest = max(len(text) for _, text in missing)
        ids = [[*text, *(0,) * (longest - len(text))] for _, text in missing]
        ids_BS = torch.tensor(ids, device=self.target.device)
        place_S = torch.arange(longest, device=self.target.device)
        length_B1 = torch.tensor([[len(text)] for _, text in missing], device=self.target.device)
        is_real_BS = place_S < length_B1
        own_B1 = torch.arange(len(missing), device=self.target.device)[:, None]
        alone = TrainBatch(
            ids_BS,
            is_real_BS,
            torch.where(is_real_BS, own_B1, -1),
            torch.where(is_real_BS, place_S, 0),
        )
        found = capture(self.target, alone, Needs(taps=self.layers))
        for b, ((row, start, end), _) in enumerate(missing):
            for layer, state_BSD in found.taps.items():
                laid[layer][row, start:end] = state_BSD[b, : end - start]

    def _with_states(self, batch: TrainBatch, laid: dict[int, Tensor]) -> TrainBatch:
        needs = self.needs
        made = replace(batch, taps={tap: laid[tap] for tap in needs.taps})
        if not needs.teacher:
            return made
        state_BSD = laid[self.target.spec.num_layers]
        if needs.teacher_rows:
            head = self.target.borrowed()
            rows = HeadRows(state_BSD.flatten(0, 1), head.head_VD, head.head_bias_V)
            return replace(made, teacher_rows=rows)
        with torch.no_grad():
            return replace(made, teacher_BSV=head_logits(self.target.lm, state_BSD))

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.target.dtype, device=self.target.device)


def texts_of(batch: TrainBatch, spans: Sequence[Span]) -> list[Text]:
    """The ids of each."""
    ids = batch.ids_BS.tolist()
    return [tuple(ids[row][start:end]) for row, start, end in spans]
