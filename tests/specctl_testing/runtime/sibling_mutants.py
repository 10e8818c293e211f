"""Seeded bugs of the rules of several drafts, and the checks that kill them.

Rules are written out once with exchangeable parts; with nothing exchanged they are right.
"""

import dataclasses

import numpy as np

from specctl.core.tree import NodeKind
from specctl.runtime.proof.cases import make_case
from specctl.runtime.proof.enumerate import all_drafts, enumerate_case, fixed_siblings
from specctl.runtime.verify.scalar import block
from specctl.runtime.verify.scalar_parts import norm, point, positive, without
from specctl.runtime.verify.scalar_siblings import rounds, smallest_rho
from specctl_testing.runtime.mutants import Mutant, as_drafts, as_rule, is_exact, ratio

IID, PATHS, REFILLED, PLUS = (
    NodeKind.IID,
    NodeKind.PATHS,
    NodeKind.REFILLED,
    NodeKind.TOP_PLUS_ONE,
)


# -- K-SEQ ----------------------------------------------------------------------------------------


def right_left(p, q, rho, num):
    taken = np.minimum(p / rho, q)
    beta = taken.sum()
    return positive(p - taken * ((1 - (1 - beta) ** num) / beta if beta > 0 else 0.0))


def k_seq(rho_of=smallest_rho, left=right_left, children=lambda tree, at: tree.children[at]):
    def rule(tree, chooser):
        at = 0
        while True:
            p, q, drafted = tree.p[at], tree.q[at], children(tree, at)
            rho = rho_of(p, q, len(drafted))
            for child in drafted:
                x = tree.token[child]
                if chooser.flip(child, ratio(p[x], rho * q[x])):
                    at = child
                    break
            else:
                return at, norm(left(p, q, rho, len(drafted)), p)

    return rule


def unique(tree, at):
    found = {tree.token[child]: child for child in reversed(tree.children[at])}
    return sorted(found.values())


rho_is_one = k_seq(rho_of=lambda p, q, num: 1.0)
rho_is_k = k_seq(rho_of=lambda p, q, num: float(max(num, 1)))
rho_rounded_down = k_seq(rho_of=lambda p, q, num: 1 + 0.98 * (smallest_rho(p, q, num) - 1))
plain_residual = k_seq(left=lambda p, q, rho, num: positive(p - q))
one_draft_residual = k_seq(left=lambda p, q, rho, num: right_left(p, q, rho, 1))
duplicates_dropped = k_seq(children=unique)
one_more_counted = k_seq(rho_of=lambda p, q, num: smallest_rho(p, q, num + 1), left=right_left)


def distinct_siblings(case):
    yield from all_drafts(dataclasses.replace(case, kind=NodeKind.WITHOUT_REPLACEMENT))


def sorted_by_ratio(case):
    """i.i.d. siblings of the root, the ones the target likes best first."""
    p, q = case.p[()], case.q[()]
    for weight, tokens in all_drafts(case):
        yield weight, sorted(tokens, key=lambda x: -p[x] / q[x])


def withdrawn_if_unlikely(case):
    """A sampled token that turns out unlikely gives way to the likeliest."""
    q = case.q[()]
    for weight, tokens in all_drafts(case):
        yield weight, [x if q[x] > 0.3 else int(np.argmax(q)) for x in tokens]


# -- Sequoia --------------------------------------------------------------------------------------


def refills(next_distribution):
    return lambda tree, chooser: rounds(tree, chooser, next_distribution)


def right_refill(s, tried):
    rest = without(s, tried[-1])
    fresh = np.array([float(x not in tried) for x in range(len(s))])
    return rest if rest.sum() > 0 else norm(fresh, fresh)


def uniform_over_all(s, tried):
    rest = without(s, tried[-1])
    return rest if rest.sum() > 0 else np.full(len(s), 1 / len(s))


def surely_the_draft(s, tried):
    rest = without(s, tried[-1])
    return rest if rest.sum() > 0 else np.full(len(s), 1e-9)


def uniform_too_early(s, tried):
    fresh = np.array([float(x not in tried) for x in range(len(s))])
    return norm(fresh, fresh)


def lowest_id_refill(case):
    """Fillers are no draws but the lowest untried id."""
    for weight, tokens in all_drafts(dataclasses.replace(case, kind=NodeKind.WITHOUT_REPLACEMENT)):
        seen = []
        for x in tokens:
            support = [t for t in np.flatnonzero(case.q[()]) if t not in seen]
            free = [t for t in range(case.vocab_size) if t not in seen]
            seen.append(x if support else free[0])
        yield weight, seen


# -- top (k - 1) and one --------------------------------------------------------------------------


def plus_one(distribution=None, left=lambda p, q: positive(p - q), follows=True):
    def rule(tree, chooser):
        at = 0
        while True:
            p, drafted = tree.p[at], tree.children[at]
            q = (distribution or rest_of)(tree, at) if drafted else np.zeros_like(p)
            if drafted and chooser.flip(
                drafted[0], ratio(p[tree.token[drafted[0]]], q[tree.token[drafted[0]]])
            ):
                at = drafted[0]
                continue
            token = chooser.pick(at, norm(left(p, q), p))
            hits = [child for child in drafted if tree.token[child] == token]
            if not hits or not follows:
                return at, point(token, len(p))
            at = hits[0]

    return rule


def rest_of(tree, at):
    q = tree.q[at]
    for child in tree.children[at][1:]:
        q = without(q, tree.token[child])
    return q


def rest_not_scaled(tree, at):
    gone = [tree.token[child] for child in tree.children[at][1:]]
    return np.where(np.isin(np.arange(len(tree.q[at])), gone), 0.0, tree.q[at])


def second_best(case):
    """The last sibling is no sample but the best of the rest."""
    q, num = case.q[()], len(case.shape)
    fixed = fixed_siblings(q, num - 1)
    yield 1.0, [int(np.argmax(np.where(np.isin(np.arange(len(q)), fixed), 0, q))), *fixed]


# -- whole paths ----------------------------------------------------------------------------------


def best_path(
    key=lambda p, q: p / q if q > 0 else -1.0,
    pick=max,
    power=lambda num: num,
    told="skewed",
    starts_anew=False,
):
    def rule(tree, chooser):
        num = power(len(tree.children[0]))
        line, alive, distributions, below, here = [0], list(tree.children[0]), [], 0.0, 1.0
        while alive:
            p, q = tree.p[line[-1]], tree.q[line[-1]]
            order = sorted(range(len(p)), key=lambda x: (key(p[x], q[x]), x))
            edge = below + here * np.cumsum(q[order])
            skewed = np.zeros_like(q)
            skewed[order] = edge**num - (edge - here * q[order]) ** num
            distributions.append(norm(skewed, skewed) if told == "skewed" else q)
            best = pick(alive, key=lambda fed: order.index(tree.token[fed]))
            x = tree.token[best]
            if not starts_anew:
                below, here = (edge - here * q[order])[order.index(x)], here * q[x]
            alive = [c for fed in alive if tree.token[fed] == x for c in tree.children[fed]]
            line.append(best)
        chained = dataclasses.replace(
            tree,
            token=[tree.token[fed] for fed in line],
            p=[tree.p[fed] for fed in line],
            q=[*distributions, tree.q[line[-1]]],
        )
        end, distribution = block(chained, chooser)
        return line[end], distribution

    return rule


# -- the table ------------------------------------------------------------------------------------

THREE, PAIR = is_exact("spectr", IID, "three"), is_exact("spectr", IID, "two")
ROUNDS = is_exact("multi-round", IID, "two")
NARROW = is_exact("sequoia", REFILLED, "two", "greedy-q")
TOPS = is_exact("top-plus-one", PLUS, "two")
DEEP_TOPS = is_exact("top-plus-one", PLUS, "two-uneven")
TWO_PATHS = is_exact("multi-path", PATHS, "two-paths")


def accepts_as_much(rule, kind, shape, family="random"):
    """A rule that is lossless but slow shows in what it accepts."""
    case = make_case(rule, kind, shape, family, 3)
    wanted = enumerate_case(case).accepted
    return lambda mutant: enumerate_case(case, **mutant(case)).accepted >= wanted - 1e-9


MUTANTS = {
    "k-seq with rho = 1": Mutant(PAIR, as_rule(rho_is_one)),
    "k-seq with rho rounded down": Mutant(THREE, as_rule(rho_rounded_down)),
    "k-seq with rho = k": Mutant(accepts_as_much("spectr", IID, "three"), as_rule(rho_is_k)),
    "k-seq counts a sibling too many": Mutant(
        accepts_as_much("spectr", IID, "two"), as_rule(one_more_counted)
    ),
    "k-seq with the plain residual": Mutant(PAIR, as_rule(plain_residual)),
    "k-seq with the residual of one draft": Mutant(THREE, as_rule(one_draft_residual)),
    "k-seq without duplicates": Mutant(THREE, as_rule(duplicates_dropped)),
    "k-seq on distinct siblings": Mutant(PAIR, as_drafts(distinct_siblings)),
    "multi-round on distinct siblings": Mutant(ROUNDS, as_drafts(distinct_siblings)),
    "multi-round on siblings sorted by p/q": Mutant(ROUNDS, as_drafts(sorted_by_ratio)),
    "multi-round, a draft dropped by its own value": Mutant(
        ROUNDS, as_drafts(withdrawn_if_unlikely)
    ),
    "traversal, a draft dropped by its own value": Mutant(
        is_exact("traversal", IID, "two"), as_drafts(withdrawn_if_unlikely)
    ),
    "refill over tried tokens too": Mutant(NARROW, as_rule(refills(uniform_over_all))),
    "refills are always taken": Mutant(NARROW, as_rule(refills(surely_the_draft))),
    "refill before q is used up": Mutant(
        is_exact("sequoia", REFILLED, "three"), as_rule(refills(uniform_too_early))
    ),
    "refill with the lowest id": Mutant(NARROW, as_drafts(lowest_id_refill)),
    "z tested with the whole q": Mutant(TOPS, as_rule(plus_one(lambda tree, at: tree.q[at]))),
    "z tested with an unscaled q": Mutant(TOPS, as_rule(plus_one(rest_not_scaled))),
    "y drawn from p": Mutant(TOPS, as_rule(plus_one(left=lambda p, q: p))),
    "z is the best of the rest": Mutant(TOPS, as_drafts(second_best)),
    "fixed siblings are not followed": Mutant(
        accepts_as_much("top-plus-one", PLUS, "two"), as_rule(plus_one(follows=False))
    ),
    "best path told q": Mutant(TWO_PATHS, as_rule(best_path(told="q"))),
    "worst path told the best's distribution": Mutant(TWO_PATHS, as_rule(best_path(pick=min))),
    "best path with one path too many": Mutant(
        TWO_PATHS, as_rule(best_path(power=lambda num: num + 1))
    ),
    "best path forgets what lies below": Mutant(TWO_PATHS, as_rule(best_path(starts_anew=True))),
    "best path by p alone": Mutant(
        accepts_as_much("multi-path", PATHS, "two-paths", "zeros-in-p"),
        as_rule(best_path(key=lambda p, q: q)),
    ),
}

# The exchangeable parts with nothing exchanged, and a check that they pass.
RIGHT = (
    (THREE, k_seq()),
    (NARROW, refills(right_refill)),
    (DEEP_TOPS, plus_one()),
    (TWO_PATHS, best_path()),
)
