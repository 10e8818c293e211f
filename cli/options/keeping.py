"""What `specctl serve` keeps of its traffic, and where; torch comes late."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specctl.core.errors import SpecctlError, one_of_two
from specctl.core.messages.sizes import GB
from specctl.core.storage.traffic_files import Writer

if TYPE_CHECKING:
    from specctl.core.drafter import Drafter
    from specctl.runtime.target.target import Target
    from specctl.server.record import Recorder


def recorder_for(
    record: Path | None, folder: Path | None, limit: float | None, keeps_features: bool = False
) -> Recorder | None:
    """Where prompts and answers go; nowhere unless one of the two is named."""
    from specctl.server.record import Recorder
    from specctl.server.traffic import TrafficKeeper

    if record is not None and folder is not None:
        found = f"--record {record} and --keep-traffic {folder}"
        raise one_of_two("traffic is kept in one place", found, "leave out one of the two")
    if limit is not None and folder is None:
        raise SpecctlError(
            "limits.keep_traffic bounds a folder that was not named",
            where="the command line",
            found=f"limits.keep_traffic={limit:g}",
            expected="--keep-traffic DIR",
            do="add --keep-traffic DIR, or leave it out",
        )
    if keeps_features and folder is None:
        raise SpecctlError(
            "features are kept beside the texts of the traffic",
            where="the command line",
            found="traffic.features=true without a folder",
            expected="--keep-traffic DIR",
            do="add --keep-traffic DIR, or leave it out",
        )
    if folder is not None:
        most = int((limit or 1.0) * GB)
        if not keeps_features:
            return TrafficKeeper(folder, most)
        from specctl.server.feature_keeper import FeatureKeeper

        return FeatureKeeper(folder, most)
    return Recorder(record) if record is not None else None


def begin_traffic(recorder: Recorder | None, target: Target) -> None:
    """Where traffic is kept, note whose it is."""
    from specctl.server.traffic import TrafficKeeper

    if isinstance(recorder, TrafficKeeper):
        recorder.begin(Writer(target.name, target.fingerprint, target.tokenizer_fingerprint))


def check_features(target: Target, drafter: Drafter | None, name: str) -> None:
    """Refuse to keep features that nothing would learn from."""
    from specctl.runtime.engine.row_features import layers_kept
    from specctl.train.features.capture import has_plain_head

    do = "leave out --set traffic.features=true: the texts alone are kept"
    if not layers_kept(drafter):
        raise SpecctlError(
            "no features can be kept for this drafter",
            where="traffic.features",
            found=f"{name}, which does not learn from the target's hidden states",
            expected="a trained drafter that reads them, such as eagle3 or dflash",
            do=do,
        )
    if drafter is not None and drafter.needs().teacher and not has_plain_head(target.lm):
        raise SpecctlError(
            "the target's logits are more than a product of its last state and its head",
            where="traffic.features",
            found=target.name,
            expected="a target with a plain head, whose logits follow from the states",
            do=do,
        )
