"""BASS's length against the best fixed one, where it is known which must be ahead."""

import pytest

from specctl.runtime.batching.fixed import Bass, Fixed
from specctl_testing.runtime.loads import LONGEST, Load

ROUNDS = 1600


def ahead(users: int) -> float:
    """Times the speed of the best fixed length. All users' texts are easy (.97 of the drafted
    tokens accepted), then all are hard (.05), in turn."""
    load = Load(users, (0.97,) * users + (0.05,) * users, text=200)
    best, _ = max(load.run(Fixed(length), ROUNDS) for length in range(LONGEST + 1))
    found, _ = load.run(Bass(most=LONGEST), ROUNDS)
    return found / best


@pytest.mark.parametrize("users", [2, 4])
def test_one_length_that_follows_the_batch_beats_every_fixed_one_where_texts_change(users):
    """So few rows are verified in the time that the weights take to be read."""
    assert ahead(users) > 1.05


def test_it_does_not_ask_what_verification_costs():
    """With eight users every token costs, and the best of them decides how many all draft."""
    assert ahead(8) < 1.0
