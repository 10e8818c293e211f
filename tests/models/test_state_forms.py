"""Trees read from one state in front of them, against states made token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specctl.models.recurrent.state_forms import (
    DecayedInputs,
    FedTokens,
    SelectiveTokens,
    convolved,
    parents_of,
    read_decayed,
    read_selective,
)

PARENTS = ((-1, 0, 0, 1, 1, 2, 5, 4), (-1, 0, 1, 2, 2, 1, 0, 6))
PATHS = ((0, 1, 4, 7), (0, 6, 7, -1))


def ancestors() -> Tensor:
    found = torch.eye(8, dtype=torch.bool).repeat(2, 1, 1)
    for b, parents in enumerate(PARENTS):
        for t, parent in enumerate(parents):
            if parent >= 0:
                found[b, t] |= found[b, parent]
    return found


def path_to(b: int, t: int) -> list[int]:
    path = [t]
    while PARENTS[b][path[0]] >= 0:
        path.insert(0, PARENTS[b][path[0]])
    return path


def decayed(length: int, num_decays: int, is_delta: bool) -> tuple[DecayedInputs, Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, 3, *shape, generator=draw)

    key = torch.nn.functional.normalize(normal(length, 4), dim=-1)
    beta = torch.rand(2, 3, length, generator=draw) if is_delta else None
    fade = -4 * torch.rand(2, 3, length, num_decays, generator=draw)
    return DecayedInputs(normal(length, 4), key, normal(length, 5), fade, beta), normal(4, 5)


def stepped(given: DecayedInputs, state: Tensor, b: int, path: list[int]) -> tuple[Tensor, Tensor]:
    """The rules as they are published, one token after another: the last output, the last state."""
    state, out = state[b].double(), state.new_zeros(())
    for t in path:
        key, value = given.key_BHTE[b, :, t].double(), given.value_BHTO[b, :, t].double()
        state = given.log_decay_BHTX[b, :, t].double().exp()[..., None] * state
        if given.beta_BHT is not None:
            known = (key[:, None] @ state)[:, 0]
            value = given.beta_BHT[b, :, t, None].double() * (value - known)
        state = state + key[..., None] * value[:, None]
        out = (given.query_BHTE[b, :, t, None].double() @ state)[:, 0]
    return out, state


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.double(), wanted.double(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("num_decays", [1, 4])
def test_a_node_reads_the_state_of_its_own_path(num_decays: int, is_delta: bool) -> None:
    given, state = decayed(8, num_decays, is_delta)
    out, tokens = read_decayed(given, state, FedTokens(ancestors()))
    after = tokens.after(state, torch.tensor(PATHS))
    for b in (0, 1):
        for t in range(8):
            close(out[b, :, t], stepped(given, state, b, path_to(b, t))[0])
        kept = [t for t in PATHS[b] if t >= 0]
        close(after[b], stepped(given, state, b, kept)[1])


@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("num_decays", [1, 4])
def test_a_long_run_is_read_in_blocks_as_token_by_token(num_decays: int, is_delta: bool) -> None:
    given, state = decayed(150, num_decays, is_delta)
    out, tokens = read_decayed(given, state, FedTokens(None))
    lengths = (150, 77)
    path_BP = torch.arange(150).repeat(2, 1)
    path_BP[1, lengths[1] :] = -1
    after = tokens.after(state, path_BP)
    for b, length in enumerate(lengths):
        last, grown = stepped(given, state, b, [*range(length)])
        close(out[b, :, length - 1], last)
        close(after[b], grown)


def test_decays_of_other_branches_do_not_overflow() -> None:
    """Between two branches the difference of sums is positive, and its exponential infinite."""
    given, state = decayed(8, 1, True)
    given.log_decay_BHTX[:, :, 1] = -500.0
    out, tokens = read_decayed(given, state, FedTokens(ancestors()))
    assert torch.isfinite(out).all()
    assert torch.isfinite(tokens.write_BHTO).all()
    close(out[0, :, 5], stepped(given, state, 0, path_to(0, 5))[0])


def test_a_convolution_sees_the_inputs_of_its_own_path() -> None:
    inputs, held, weight, bias = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(i))
        for i, shape in enumerate([(2, 6, 8), (2, 6, 3), (6, 4), (6,)])
    )
    found = convolved(inputs, held, weight, bias, FedTokens(ancestors()))
    for b in (0, 1):
        for t in range(8):
            window = torch.cat([held[b], inputs[b][:, path_to(b, t)]], 1)[:, -4:]
            close(found[b, :, t], (window * weight).sum(1) + bias)
    run = convolved(inputs, held, weight, bias, FedTokens(None))
    close(run[0, :, 5], (inputs[0, :, 2:6] * weight).sum(1) + bias)


@pytest.mark.parametrize("is_tree", [True, False])
def test_mamba_1_makes_each_state_from_its_parents(is_tree: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    T = 8 if is_tree else 40
    step, rate = torch.rand(2, 6, T, generator=draw), -4 * torch.rand(6, 5, generator=draw)
    inputs = torch.randn(2, 6, T, generator=draw)
    key, query = torch.randn(2, 2, T, 5, generator=draw)
    state = torch.randn(2, 6, 5, generator=draw)
    tokens = SelectiveTokens(step, inputs, key, rate)
    fed = FedTokens(ancestors() if is_tree else None)
    out = read_selective(tokens, query, state, fed)
    path_BP = torch.tensor(PATHS) if is_tree else torch.arange(T).repeat(2, 1)
    if not is_tree:
        path_BP[1, 21:] = -1
    after = tokens.after(state, path_BP)

    def stepped_to(b: int, path: list[int]) -> Tensor:
        held = state[b].double()
        for t in path:
            held = (step[b, :, t, None] * rate).double().exp() * held
            held = held + (step[b, :, t] * inputs[b, :, t])[:, None].double() * key[b, t].double()
        return held

    for b in (0, 1):
        for t in range(T):
            path = path_to(b, t) if is_tree else [*range(t + 1)]
            close(out[b, :, t], stepped_to(b, path) @ query[b, t].double())
        close(after[b], stepped_to(b, [t for t in path_BP[b].tolist() if t >= 0]))


def test_parents_are_read_off_ancestors() -> None:
    assert parents_of(ancestors()).tolist() == [list(parents) for parents in PARENTS]
