"""Token Recycling: the matrix, the template tree, cold and warm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specctl.core.drafter import Budget, DraftState, Space
from specctl.core.errors import FileError, RecipeError
from specctl.core.spec import Identity
from specctl.drafters.states.template import greedy_paths
from specctl.drafters.training_free.token_recycling import (
    Pages,
    RecycledStore,
    TokenRecycling,
    TokenRecyclingOptions,
    TokenRecyclingState,
)
from specctl.runtime.engine.engine import Engine
from specctl.runtime.engine.request import Request
from specctl.runtime.policies import make_policy
from specctl.runtime.sampling.sampling import Sampling
from specctl_testing.runtime.states import opened_states

CPU = torch.device("cpu")


def make_state(target: Any, num_slots: int = 1, **options: Any) -> TokenRecyclingState:
    drafter = TokenRecycling(TokenRecyclingOptions(**options), target.spec)
    return drafter.open(Space(num_slots, 64, 32, CPU, torch.float32))


def ranks(first: int) -> list[int]:
    return list(range(first, first + 8))


def teach(state: TokenRecyclingState, slot: int, known: dict[int, list[int]]) -> None:
    """Write those continuations into the slot's matrix."""
    cell_R = torch.tensor(list(known)) + state.first_Z1[slot]
    state.pages.write(cell_R, torch.tensor(list(known.values())))


def test_a_cold_matrix_drafts_nothing(make_target: Any, round_view: Any) -> None:
    state = make_state(make_target())
    assert state.propose(round_view({0: [4, 5]}), Budget(16, 4)).num_nodes == 0


def test_children_are_the_targets_best_after_their_parent(
    make_target: Any, round_view: Any
) -> None:
    state = make_state(make_target())
    teach(state, 0, {5: ranks(40), 40: ranks(60), 41: ranks(20)})
    tree = state.propose(round_view({0: [4, 5]}), Budget(14, 3))
    fitting = [p for p in state.paths if len(p) <= 3][:14]
    paths = sorted(
        (p for p in fitting if len(p) == 1 or (len(p) == 2 and p[0] < 2)),
        key=lambda path: (len(path), path),
    )
    expected = [40 + p[0] if len(p) == 1 else (60, 20)[p[0]] + p[1] for p in paths]
    assert tree.token_BN[0].tolist() == expected
    assert bool(tree.valid_BN.all())
    parents = tree.parent_BN[0].tolist()
    assert all(
        parents[i] == -1 if len(p) == 1 else tree.token_BN[0, parents[i]] == 40 + p[0]
        for i, p in enumerate(paths)
    )


def test_unwritten_rows_have_no_children_and_rows_may_differ(
    make_target: Any, round_view: Any
) -> None:
    state = make_state(make_target(), num_slots=2)
    teach(state, 0, {5: ranks(40), 9: ranks(20)})
    tree = state.propose(round_view({0: [4, 5], 1: [9]}), Budget(14, 3))
    assert tree.depth == 1
    assert bool(tree.valid_BN[0].all())
    assert not bool(tree.valid_BN[1].any())


def test_of_one_token_fed_twice_the_later_ranking_stays(make_target: Any) -> None:
    state = make_state(make_target())
    state.pages.write(torch.tensor([5, 7, 5]), torch.tensor([ranks(1), ranks(2), ranks(3)]))
    assert state.snapshot()[5].tolist() == ranks(3)
    assert state.snapshot()[7].tolist() == ranks(2)


def test_padding_teaches_nothing(make_target: Any) -> None:
    target = make_target()
    state = make_state(target, num_slots=2)
    for slot in (0, 1):
        teach(state, slot, {5: ranks(1), target.spec.vocab_size: ranks(2)})
        written = (state.snapshot(slot) < target.spec.vocab_size).any(-1)
        assert written.nonzero()[:, 0].tolist() == [5]
    assert bool((state.pages.best_ZVC[:, -1] == target.spec.vocab_size).all())


def test_a_page_is_laid_out_when_it_is_first_read_from_what_was_known_as_it_began() -> None:
    pages, store = Pages(2, 90, 8, CPU), RecycledStore(8, 1 << 20)
    store.update(torch.tensor([5, 6]), torch.tensor([ranks(40), ranks(50)]).int())
    for page in (0, 1):
        pages.begin(page, [store])
    store.update(torch.tensor([5]), torch.tensor([ranks(60)]).int())
    assert pages.learned(0)[0].tolist() == []
    assert not pages.is_laid_out
    assert pages.best_ZVC[:, 5].tolist() == [ranks(40)] * 2
    pages.write(torch.tensor([6]), torch.tensor([ranks(70)]))
    assert pages.learned(0)[0].tolist() == [6]
    pages.begin(0, [store])
    assert [pages.best_ZVC[page, 6].tolist() for page in (0, 1)] == [ranks(50)] * 2
    assert pages.best_ZVC[0, 5].tolist() == ranks(60)


def test_a_row_that_nobody_drafts_for_lays_nothing_out(make_target: Any) -> None:
    state = make_state(make_target(), scope="process")
    state.start(0, [1, 2, 3], {})
    state.end(0)
    assert not state.pages.is_laid_out


HERE = Identity("tokenizer", "target")


def in_scope(target: Any, scope: str) -> TokenRecycling:
    return TokenRecycling(TokenRecyclingOptions(scope=scope), target.spec)


def opened(
    drafter: TokenRecycling, num_slots: int = 2, identity: Identity | None = HERE
) -> TokenRecyclingState:
    return drafter.open(Space(num_slots, 64, 32, CPU, torch.float32, identity))


def begin(state: TokenRecyclingState, slot: int, conversation: str | None = None) -> list[int]:
    """A row starts; which tokens it knows at once."""
    state.join(slot, conversation)
    state.start(slot, [5, 6], {})
    return (state.snapshot(slot) < state.V).any(-1).nonzero()[:, 0].tolist()


def test_by_default_no_row_reads_what_another_learned(make_target: Any, round_view: Any) -> None:
    state = opened(TokenRecycling(TokenRecyclingOptions(), make_target().spec))
    assert begin(state, 0, "a") == begin(state, 1, "a") == []
    teach(state, 0, {5: ranks(40)})
    tree = state.propose(round_view({0: [4, 5], 1: [4, 5]}), Budget(14, 3))
    assert tree.valid_BN.any(1).tolist() == [True, False]
    state.end(0)
    assert begin(state, 0, "a") == []


def test_a_conversation_goes_on_with_its_own_matrix_and_no_other(make_target: Any) -> None:
    drafter = in_scope(make_target(), "conversation")
    state = opened(drafter)
    for slot, conversation in ((0, "anna"), (1, "bert")):
        assert begin(state, slot, conversation) == []
        teach(state, slot, {5 + slot: ranks(40)})
    for slot in (0, 1):
        state.end(slot)
    assert begin(state, 1, "anna") == [5]
    assert begin(state, 0) == []
    assert begin(opened(drafter), 1, "bert") == [6]
    assert begin(opened(drafter, identity=Identity("tokenizer", "other")), 1, "bert") == []


def test_rows_of_one_conversation_that_live_at_once_lose_nothing(make_target: Any) -> None:
    state = opened(in_scope(make_target(), "conversation"))
    for slot in (0, 1):
        begin(state, slot, "anna")
        teach(state, slot, {5 + slot: ranks(40)})
    for slot in (0, 1):
        state.end(slot)
    assert begin(state, 0, "anna") == [5, 6]
    begin(state, 1, "anna")
    teach(state, 0, {5: ranks(20)})
    for slot in (0, 1):
        state.end(slot)
    begin(state, 0, "anna")
    assert state.snapshot()[5].tolist() == ranks(20), "a row that did not write it took it back"


def test_a_process_shares_at_once_and_with_its_next_engine(make_target: Any) -> None:
    drafter = in_scope(make_target(), "process")
    state = opened(drafter)
    begin(state, 0)
    teach(state, 0, {5: ranks(40)})
    assert begin(state, 1) == [5]
    state.end(0)
    state.end(1)
    assert begin(state, 0) == [5]
    assert begin(opened(drafter), 1) == [5]
    assert begin(opened(drafter, identity=Identity("other", "target")), 1) == []


def test_a_matrix_from_disk_is_read_by_all_and_written_by_none(
    make_target: Any, round_view: Any
) -> None:
    target = make_target()
    drafter = in_scope(target, "disk")
    drafter.learn([[5, 6, 5, 6, 5, 7], [9]])
    state = opened(drafter)
    assert begin(state, 0) == begin(state, 1) == [5, 6]
    tree = state.propose(round_view({0: [5], 1: [6]}), Budget(2, 1))
    assert tree.token_BN[0, :2].tolist() == [6, 7], "the commonest follower comes first"
    assert tree.token_BN[1, 0] == 5
    before = state.snapshot()
    states = opened_states(drafter)
    engine = Engine(target, drafter, make_policy({"policy": "direct"}), num_slots=1)
    engine.run([Request((3, 1, 4, 1, 5), Sampling(max_new_tokens=20, ignore_eos=True))])
    [state] = states
    assert isinstance(state, TokenRecyclingState)
    assert torch.equal(state.snapshot(), before)


def test_what_is_kept_is_capped_and_the_oldest_goes_first() -> None:
    store = RecycledStore(num_ranks=2, max_bytes=3 * 16)
    for token in (1, 2, 3, 1, 4):
        store.update(torch.tensor([token]), torch.tensor([[token, 9]], dtype=torch.int32))
    assert store.token_R.tolist() == [3, 1, 4]
    assert store.best_RC.tolist() == [[3, 9], [1, 9], [4, 9]]
    store.freeze()
    store.update(torch.tensor([7]), torch.tensor([[7, 9]], dtype=torch.int32))
    assert 7 not in store.token_R


@pytest.mark.parametrize("fields", [{"scope": "everyone"}, {"max_mib": 0}])
def test_impossible_scopes_and_sizes_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=next(iter(fields))):
        TokenRecyclingOptions(**fields)


def run(target: Any, drafter: TokenRecycling, requests: int) -> tuple[DraftState, list[float]]:
    """One engine, the same prompt again and again: its drafter's state, tau of each answer."""
    states = opened_states(drafter)
    engine = Engine(target, drafter, make_policy({"policy": "direct"}), num_slots=1)
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    done = engine.run([Request((3, 1, 4, 1, 5), sampling) for _ in range(requests)])
    return states[-1], [c.stats.tokens / c.stats.rounds for c in done]


def test_acceptance_rises_while_the_matrix_warms(make_target: Any) -> None:
    target = make_target()
    _, taus = run(target, in_scope(target, "process"), 3)
    assert taus[1] > taus[0] + 0.1
    _, alone = run(target, in_scope(target, "request"), 3)
    assert alone == [taus[0]] * 3


def test_a_warm_frozen_matrix_starts_warm_and_never_changes(make_target: Any) -> None:
    target = make_target()
    first = in_scope(target, "process")
    state, cold = run(target, first, 2)
    assert isinstance(state, TokenRecyclingState)
    learned = state.snapshot()
    warm = TokenRecycling(TokenRecyclingOptions(freeze=True), target.spec)
    warm.load_tensors({"matrix": learned})
    state, taus = run(target, warm, 2)
    assert taus[0] > cold[0] + 0.1
    assert isinstance(state, TokenRecyclingState)
    assert torch.equal(state.snapshot(), learned)


@pytest.mark.parametrize("options", [{"freeze": True}, {"scope": "disk"}])
def test_freezing_without_a_matrix_is_refused(make_target: Any, options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="warm matrix"):
        make_state(make_target(), **options)


def test_a_matrix_of_another_vocabulary_is_refused(make_target: Any) -> None:
    drafter = TokenRecycling(TokenRecyclingOptions(), make_target().spec)
    with pytest.raises(FileError, match="matrix"):
        drafter.load_tensors({"matrix": torch.zeros(10, 8, dtype=torch.int32)})


def test_template_paths_are_best_first_with_parents_before_children() -> None:
    paths = greedy_paths([[0.5, 0.2], [0.5, 0.2], [0.5, 0.2]], 6)
    assert paths == ((0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0))
    many = greedy_paths([[0.5, 0.2, 0.1]] * 4, 40)
    for index, path in enumerate(many):
        assert len(path) == 1 or path[:-1] in many[:index]
