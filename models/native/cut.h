// Truncation: which tokens of softmax(scores) top-k, top-p and min-p keep, in this order. All that they
// keep reach one score, which is found without sorting the vocabulary.

#pragma once

#include <algorithm>
#include <functional>

// Of one row; what is off: 0, 1 and 0.
struct Truncation {
    int32_t top_k;
    float top_p, min_p;
};

namespace {

inline void keep_best(float *score, int count, int k) {
    std::nth_element(score, score + k - 1, score + count, std::greater<float>());
}

// The k-th best of V scores, by those that reach the k-th best so far; aside [V].
float kth_best(const float *score, int V, int k, float *aside) {
    float floor = -INFINITY;
    int kept = 0;
    for (int first = 0; first < V; first += AT_A_TIME) {
        const int last = V - first < AT_A_TIME ? V : first + AT_A_TIME;
        int found = 0;
#pragma omp simd reduction(| : found)
        for (int v = first; v < last; v++) found |= score[v] > floor;
        if (!found) continue;
        for (int v = first; v < last; v++)
            if (score[v] > floor) aside[kept++] = score[v];
        if (kept < 2 * int64_t(k) + AT_A_TIME) continue;
        keep_best(aside, kept, k);
        floor = aside[k - 1];
        kept = k;
    }
    if (kept < k) return -INFINITY;
    keep_best(aside, kept, k);
    return aside[k - 1];
}

// The sum of e^(score - top).
double mass_of(const float *score, int count, float top) {
    double mass = 0;
    for (int first = 0; first < count; first += AT_A_TIME) {
        const int here = count - first < AT_A_TIME ? count - first : AT_A_TIME;
        float below[AT_A_TIME];
        for (int i = here; i < AT_A_TIME; i++) below[i] = -INFINITY;
#pragma omp simd
        for (int i = 0; i < here; i++) below[i] = score[first + i] - top;
        Lanes sums = {};
        for (int i = 0; i < here; i += LANES) sums += exponential(load(below + i));
        mass += total(sums);
    }
    return mass;
}

// Copies the scores that reach `least`; how many they are.
inline int copied(const float *score, int V, float least, float *to) {
    int count = 0;
    for (int v = 0; v < V; v++) {
        to[count] = score[v];
        count += score[v] >= least;
    }
    return count;
}

// Of scores from `low` to `high` the one at which their sums of e^(score - top), from the best on, reach
// `wanted`; the lowest where none does. They are put in another order.
float reaching(float *score, int count, float low, float high, float top, double wanted) {
    double sum = 0;
    while (count > AT_A_TIME) {
        const float middle = low + (high - low) / 2;
        if (!(low < middle && middle < high)) break;
        const int better = std::partition(score, score + count, [=](float x) { return x >= middle; }) - score;
        const double mass = mass_of(score, better, top);
        if (sum + mass >= wanted) {
            count = better;
            low = middle;
        } else {
            sum += mass;
            score += better;
            count -= better;
            high = middle;
        }
    }
    std::sort(score, score + count, std::greater<float>());
    for (int i = 0; i < count; i++) {
        sum += std::exp(double(score[i]) - top);
        if (sum >= wanted) return score[i];
    }
    return low;
}

// The lowest score in the smallest set of best tokens that has the share p of the mass of those that
// reach `least`; aside [V].
float edge_of_share(const float *score, int V, float top, float least, float p, float *aside) {
    if (least > -INFINITY) {
        const int count = copied(score, V, least, aside);
        return reaching(aside, count, least, top, top, p * mass_of(aside, count, top));
    }
    const double wanted = p * mass_of(score, V, top);
    for (float depth = 4; depth < 64; depth *= 2) {  // few tokens are near the best
        const int near = copied(score, V, top - depth, aside);
        if (mass_of(aside, near, top) >= wanted) return reaching(aside, near, top - depth, top, top, wanted);
    }
    return least;
}

// Scores of tokens that are not kept become -inf; none where a score is no number below infinity. aside [V].
void cut_row(float *score, int V, Truncation how, float *aside) {
    float top;
    if (!best_of(score, V, &top) || top == -INFINITY) return;
    float least = -INFINITY;
    if (how.top_k > 0 && how.top_k < V) least = kth_best(score, V, how.top_k, aside);
    if (how.top_p < 1) least = edge_of_share(score, V, top, least, how.top_p, aside);
    if (how.min_p > 0) least = std::max(least, top + std::log(how.min_p));
#pragma omp simd
    for (int v = 0; v < V; v++) score[v] = score[v] < least ? -INFINITY : score[v];
}

}  // namespace

// Rows of scores [B, X, V] that are cut in place, each of B by its own; aside [V].
struct Cuts {
    int32_t B, X, V;
    const Truncation *of;
    float *score, *aside;
};

extern "C" void cut(const Cuts *cuts) {
    const Cuts &c = *cuts;
    for (int64_t r = 0; r < int64_t(c.B) * c.X; r++) cut_row(c.score + r * c.V, c.V, c.of[r / c.X], c.aside);
}
