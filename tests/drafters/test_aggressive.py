"""Aggressive decoding: copying, leaving, coming back; blocks of masks filled in at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Outcome, Space
from specctl.core.errors import RecipeError
from specctl.drafters.training_free.aggressive import (
    Aggressive,
    AggressiveOptions,
    Alignment,
    GuessedBlocks,
)
from specctl.runtime.target.target import Target
from specctl_testing.drafters.parallel_runs import Ran, counting_target, decode

START = 9  # the root: the counting target goes on with 10, 11, ...


@pytest.fixture(scope="module")
def counting(make_model: Any) -> Target:
    return counting_target(make_model)


@pytest.fixture(scope="module")
def target(make_target: Any) -> Target:
    found: Target = make_target(num_layers=3, vocab=24)
    return found


def copied(counting: Target, source: list[int], tokens: int, length: int, **options: Any) -> Ran:
    drafter = Aggressive(AggressiveOptions(tail=1, **options), counting.spec)
    return decode(counting, drafter, [[*source, START]], tokens=tokens, length=length, nodes=length)


def emitted(ran: Ran) -> list[list[int]]:
    return [list(outcome.emitted[0]) for outcome in ran.outcomes]


def test_an_output_equal_to_its_input_takes_a_round_per_longest_copy(counting: Target) -> None:
    for length in (4, 7, 15):
        found = copied(counting, list(range(10, 42)), 32, length)
        assert found.answers == [tuple(range(10, 42))]
        assert len(found.outcomes) == -(-32 // (length + 1))


def test_after_an_edit_copying_goes_on_where_the_output_is_found_again(counting: Target) -> None:
    source = [*range(10, 20), 63, *range(21, 41)]
    found = copied(counting, source, 31, 16)
    assert found.answers == [tuple(range(10, 41))]
    assert emitted(found) == [[*range(10, 21)], [21], [*range(22, 39)], [39, 40]]


def test_an_insertion_and_a_deletion_cost_a_few_single_tokens(counting: Target) -> None:
    inserted = copied(counting, [*range(10, 20), 60, 61, *range(20, 40)], 30, 32)
    assert [len(new) for new in emitted(inserted)] == [11, 19]
    deleted = copied(counting, [*range(10, 20), *range(25, 40)], 30, 32)
    assert [len(new) for new in emitted(deleted)] == [11, 1, 1, 1, 1, 1, 14]


def test_never_coming_back_takes_a_round_per_token(
    counting: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = [*range(10, 20), 63, *range(21, 41)]
    whole = copied(counting, source, 31, 16)

    def start_only(self: Alignment, match: int, length: int) -> list[int]:
        aligned = self.run_R.max() > len(self.source)
        return original(self, match, length) if aligned else []

    original = Alignment.rest
    monkeypatch.setattr(Alignment, "rest", start_only)
    assert len(copied(counting, source, 31, 16).outcomes) > 4 * len(whole.outcomes)


def test_a_token_with_two_places_is_followed_once_its_context_has_one() -> None:
    alignment = Alignment.of([1, 7, 8, 5, 2, 7, 9, 6], written=0)
    alignment.read([3])
    assert alignment.rest(1, 4) == []
    alignment.read([3, 7])
    assert alignment.rest(1, 4) == []
    alignment.read([3, 7, 9])
    assert alignment.rest(1, 4) == [6]
    again = Alignment.of([1, 7, 8, 5, 2, 7, 9, 6], written=0)
    again.read([2, 7])
    assert again.rest(1, 4) == [9, 6]


def test_a_longer_match_may_be_asked_for() -> None:
    alignment = Alignment.of([1, 2, 3, 4], written=0)
    alignment.read([9, 2])
    assert alignment.rest(2, 4) == []
    alignment.read([9, 2, 3])
    assert alignment.rest(2, 4) == [4]


def test_an_instruction_around_the_source_is_left_aside(counting: Target) -> None:
    drafter = Aggressive(AggressiveOptions(skip=3, tail=2), counting.spec)
    prompt = [50, 51, 52, *range(10, 26), 53, START]
    found = decode(counting, drafter, [prompt], tokens=16, length=15, nodes=15)
    assert len(found.outcomes) == 1


def test_rows_keep_their_own_places(counting: Target) -> None:
    drafter = Aggressive(AggressiveOptions(tail=1), counting.spec)
    prompts = [[*range(10, 26), START], [*range(30, 46), 29]]
    found = decode(counting, drafter, prompts, tokens=16, length=15, nodes=15, slots=2)
    assert found.answers == [tuple(range(10, 26)), tuple(range(30, 46))]
    assert len(found.outcomes) == 1


def generalised(target: Target, **options: Any) -> Aggressive:
    return Aggressive(AggressiveOptions(mode="generalised", **options), target.spec)


def test_masks_fill_in_a_block_and_the_targets_token_replaces_the_first_miss(
    target: Target,
) -> None:
    found = decode(target, generalised(target), length=4, nodes=24)
    assert found.answers == decode(target, None).answers
    assert found.tau > 1.15


def test_the_block_behind_the_last_accepted_token_is_what_the_target_says_there(
    target: Target,
) -> None:
    found = decode(target, generalised(target, block=3), length=3, nodes=15)
    for before, after in zip(found.outcomes[2:7], found.outcomes[3:8], strict=True):
        kept = int(after.view.kept_len_B[0])
        text = list(after.view.tokens[0][:kept])  # up to the last accepted token
        for j, drafted in enumerate(after.tree.token_BN[0, :3].tolist()):
            ids_1S = torch.tensor([[*text, *[0] * (j + 1)]])
            masks = target.lm.document_masks(torch.zeros_like(ids_1S))
            with torch.no_grad():
                out = target.lm.dense(ids_1S, torch.arange(ids_1S.shape[1])[None], masks)
            assert out.logits_BTV is not None
            assert drafted == int(out.logits_BTV[0, -1].argmax())
        assert before.tree.num_probes == 12


def test_drafting_the_masks_themselves_is_worse(target: Target) -> None:
    class Unfilled(GuessedBlocks):
        def observe(self, outcome: Outcome) -> None:
            super().observe(outcome)
            self.guess_ZW.fill_(self.blank)

    class Without(Aggressive):
        def open(self, space: Space) -> GuessedBlocks:
            return Unfilled(None, 0, space)

    drafter = Without(AggressiveOptions(mode="generalised"), target.spec)
    unfilled = decode(target, drafter, length=4, nodes=24)
    assert decode(target, generalised(target), length=4, nodes=24).tau > unfilled.tau + 0.1


def test_generalised_rows_are_alike_alone_and_together(target: Target) -> None:
    alone = decode(target, generalised(target), tokens=16, nodes=24)
    together = decode(target, generalised(target), tokens=16, nodes=24, slots=2)
    assert together.answers == alone.answers
    rounds = [[c.stats.rounds for c in ran.completions] for ran in (alone, together)]
    assert rounds[0] == rounds[1]


def test_a_block_that_does_not_fit_is_refused(target: Target) -> None:
    space = Space(1, 64, 24, torch.device("cpu"), torch.float32)
    assert isinstance(generalised(target, block=4).open(space), GuessedBlocks)
    with pytest.raises(RecipeError, match="do not fit"):
        generalised(target, block=5).open(space)


@pytest.mark.parametrize("fields", [{"mode": "nat"}, {"match": 0}, {"tail": -1}, {"block": 0}])
def test_impossible_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(fields))):
        AggressiveOptions(**fields)
