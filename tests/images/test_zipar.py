"""ZipAR: what each token attends to and when it is drawn, against a dense reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specctl.core.errors import RecipeError
from specctl.core.language_model import Masks
from specctl.images.zipar import FirstToken, RowWindow, zip_grids
from specctl.runtime.generate import generate
from specctl.runtime.sampling.sampling import Sampling
from specctl.runtime.target.target import Target

GRID, VOCAB = 4, 24
PROMPTS = ([5, 9], [7, 3])


@pytest.fixture(scope="module")
def target(make_target: Callable[..., Target]) -> Target:
    return make_target(num_layers=2, vocab=VOCAB, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_window_of_a_row_is_plain_decoding(target: Target, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, seed=11, max_new_tokens=GRID**2, ignore_eos=True)
    plain = generate(target, [list(p) for p in PROMPTS], sampling=sampling)
    made = zip_grids(
        target.lm, PROMPTS, GRID, RowWindow(GRID), temperature=temperature, seeds=[11, 12]
    )
    assert made.ids_BL.tolist() == [list(output.token_ids) for output in plain.outputs]
    assert made.passes == GRID**2


def dense_choice(target: Target, prompt: list[int], ids: list[int], window: int) -> list[int]:
    """The likeliest token of every place, given the tokens there are, from one forward without a
    cache: real tokens in raster order, then what stands in for the ends of rows."""
    start, places = len(prompt), GRID**2
    drawn = [row * window + column for row in range(GRID) for column in range(GRID)]
    tokens, at, read = [*prompt, *ids], list(range(start + places)), [0] * start
    read += [step + 1 for step in drawn]
    real, source = len(tokens), [start + place - 1 for place in range(places)]
    for row in range(1, GRID if window < GRID else 1):
        source[row * GRID] = len(tokens)
        newest = [place for place, step in enumerate(drawn) if step < drawn[row * GRID]]
        before = [place for place in newest if place // GRID == max(row - 2, 0)]
        tokens.append(ids[before[-1]])
        at.append(start + row * GRID - 1)
        read.append(drawn[row * GRID])

    def sees(i: int, j: int) -> bool:
        return i == j or (j < real and at[j] <= at[i] and read[j] <= read[i])

    count = range(len(tokens))
    mask = torch.tensor([[sees(i, j) for j in count] for i in count])
    logits = target.lm.dense(
        torch.tensor([tokens]), torch.tensor([at]), Masks(mask[None, None])
    ).logits_BTV
    assert isinstance(logits, Tensor)
    best: list[int] = logits[0, source].argmax(-1).tolist()
    return best


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_tokens_see_what_is_there_and_no_more(target: Target, window: int) -> None:
    made = zip_grids(target.lm, PROMPTS, GRID, RowWindow(window), seeds=[0, 1])
    assert made.passes == (GRID - 1) * window + GRID
    for prompt, ids in zip(PROMPTS, made.ids_BL.tolist(), strict=True):
        assert ids == dense_choice(target, prompt, ids, window)


def test_windows_and_prompts_that_do_not_fit_are_refused(target: Target) -> None:
    with pytest.raises(RecipeError, match=r"expected: 1 to 4"):
        zip_grids(target.lm, PROMPTS, GRID, RowWindow(5), seeds=[0, 1])
    with pytest.raises(RecipeError, match="prompts of one length"):
        zip_grids(target.lm, [[1], [1, 2]], GRID, RowWindow(2), seeds=[0, 1])
    for word in ("0", "auto", "auto:", "auto:0", "-3", "auto:x"):
        with pytest.raises(RecipeError, match=r"or auto:MIN"):
            RowWindow.read(word)
    assert RowWindow.read("auto:3") == RowWindow(3, is_adaptive=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_adaptive_window_lies_between_the_least_and_the_row(
    target: Target, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    settled = FirstToken.settled

    def kept(self: FirstToken, logits_V: Tensor, drawn: int, is_whole: bool) -> int | None:
        token = settled(self, logits_V, drawn, is_whole)
        begun.extend([] if token is None else [token])
        return token

    monkeypatch.setattr(FirstToken, "settled", kept)
    plain = zip_grids(
        target.lm, PROMPTS[:1], GRID, RowWindow(GRID), temperature=temperature, seeds=[11]
    )
    passes = set()
    for seed in (11, 12, 13, 14):
        made = zip_grids(
            target.lm, PROMPTS[:1], GRID, RowWindow(1, True), temperature=temperature, seeds=[seed]
        )
        passes.add(made.passes)
        assert made.ids_BL[0, GRID::GRID].tolist() == begun, "rows begin with what was tested"
        begun.clear()
    least = (GRID - 1) * 2 + GRID  # a window of 1 and a pass that tests it
    assert least <= min(passes) <= max(passes) < GRID**2
    whole = zip_grids(
        target.lm, PROMPTS[:1], GRID, RowWindow(GRID, True), temperature=temperature, seeds=[11]
    )
    assert whole.ids_BL.tolist() == plain.ids_BL.tolist()


def test_a_first_token_that_is_kept_or_drawn_anew_follows_the_larger_window() -> None:
    before = torch.tensor([0.6, 0.3, 0.1]).log()
    after = torch.tensor([0.2, 0.3, 0.5]).log()
    counts, stood, tries = torch.zeros(3), 0, 4000
    random = torch.Generator().manual_seed(0)
    for attempt in range(tries):
        first, is_whole = FirstToken(random, 1.0), attempt % 2 == 1
        drawn = int(torch.multinomial(before.exp(), 1, generator=random))
        assert first.settled(before, drawn, False) is None
        token = first.settled(after, 0, is_whole)
        stood += token is not None and not is_whole
        kept = first.token if token is None else token
        assert token is not None or not is_whole
        assert kept is not None
        counts[kept] += 1
    assert stood / tries * 2 == pytest.approx(0.6, abs=0.03), "the sum of min(p, q)"
    assert torch.allclose(counts / tries, after.exp(), atol=0.03)
    greedy = FirstToken(random, 0.0)
    said = [greedy.settled(row, int(row.argmax()), False) for row in (before, after, after)]
    assert said == [None, None, 2]
