// Attention of a head: positions are read in their order, whichever tokens read them together.

#pragma once

namespace {

// Queries that read keys and values together: a key that is loaded once is multiplied with all. The
// registers hold so many sums at once.
constexpr int TOGETHER = 4;
constexpr int COMING = 16;  // keys are prefetched so many positions ahead
#ifdef __AVX512F__
constexpr int SUMS = 16;
#else
constexpr int SUMS = 4;
#endif
// Of those N queries have so many each, at most four.
inline constexpr int sums_of(int N) { return SUMS / N < 1 ? 1 : SUMS / N > 4 ? 4 : SUMS / N; }

// A head of one token: bias is in it; normed if the model does so, then rotated.
template <class W>
inline void rotated(float *head, const W *norm, float eps, const float *table, int E, float *aside) {
    if (norm) normed(head, norm, E, eps, head);
    const int half = E / 2;
    const float *cos = table, *sin = table + E;
    memcpy(aside, head, E * sizeof(float));
    for (int e = 0; e < half; e++) head[e] = aside[e] * cos[e] + aside[e + half] * sin[e];
    for (int e = half; e < E; e++) head[e] = aside[e] * cos[e] + aside[e - half] * sin[e];
}

// A query, the positions that it sees, what it makes of them and where it puts what it reads.
struct Reading {
    const float *query;
    const int32_t *visible;
    int count;
    float *scores, *out;
};

// The dot products of N queries with the keys at P positions, as scores from `at` on.
template <int N, int P, class W>
inline void dots(const Reading *reads, const W *keys, const int32_t *visible, int at, int E) {
    Lanes sum[(N * P + 3) / 4 * 4] = {};
    const int whole = E / LANES * LANES;
    const W *key[P];
    for (int i = 0; i < P; i++) key[i] = keys + size_t(visible[at + i]) * E;
    for (int e = 0; e < whole; e += LANES) {
        Lanes wide[P];
#pragma GCC unroll 4
        for (int i = 0; i < P; i++) wide[i] = load(key[i] + e);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) {
            const Lanes part = load(reads[n].query + e);
#pragma GCC unroll 4
            for (int i = 0; i < P; i++) sum[n * P + i] = fused(part, wide[i], sum[n * P + i]);
        }
    }
    float found[(N * P + 3) / 4 * 4];
#pragma GCC unroll 4
    for (int s = 0; s < N * P; s += 4) {
        const f4 four = totals(sum[s], sum[s + 1], sum[s + 2], sum[s + 3]);
        memcpy(found + s, &four, sizeof four);
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int i = 0; i < P; i++) {
            float &score = reads[n].scores[at + i];
            score = found[n * P + i];
            for (int e = whole; e < E; e++)
                score = fused(reads[n].query[e], widened(key[i][e]), score);
        }
}

template <int N, class W>
inline void all_dots(const Reading *reads, const W *keys, int from, int to, int E) {
    const int32_t *visible = reads[0].visible;
    constexpr int P = sums_of(N);
    for (; from + P <= to; from += P) {
        for (int i = from + COMING; i < from + COMING + P && i < to; i++) {
            const char *next = reinterpret_cast<const char *>(keys + size_t(visible[i]) * E);
            for (size_t at = 0; at < E * sizeof(W); at += LINE) __builtin_prefetch(next + at);
        }
        dots<N, P>(reads, keys, visible, from, E);
    }
    for (; from < to; from++) dots<N, 1>(reads, keys, visible, from, E);
}

// Scores become weights that are still to be multiplied with what is returned.
inline float weighted(float *scores, int count, float scale) {
    float most = -INFINITY;
    int i = 0;
    for (; i < count; i++) {
        scores[i] *= scale;
        most = scores[i] > most ? scores[i] : most;
    }
    for (; i < count + LANES; i++) scores[i] = -INFINITY;
    Lanes sums = {};
    for (i = 0; i < count; i += LANES) {
        store(scores + i, exponential(load(scores + i) - most));
        for (int rest = count; rest < i + LANES; rest++) scores[rest] = 0;
        sums += load(scores + i);
    }
    return count ? 1.0f / total(sums) : 0.0f;
}

// M times 16 numbers, from `e` on, of the sum of the weighted values; the first `shared` of all N at
// once.
template <int N, int M, class W>
inline void mixture(const Reading *reads, const W *values, int shared, int E, int e, const float *scale) {
    Lanes sum[N][M] = {};
    for (int i = 0; i < shared; i++) {
        const W *value = values + size_t(reads[0].visible[i]) * E + e;
        Lanes wide[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) wide[m] = load(value + m * LANES);
#pragma GCC unroll 4
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) sum[n][m] = fused(reads[n].scores[i], wide[m], sum[n][m]);
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
        for (int i = shared; i < reads[n].count; i++) {
            const W *value = values + size_t(reads[n].visible[i]) * E + e;
#pragma GCC unroll 4
            for (int m = 0; m < M; m++)
                sum[n][m] = fused(reads[n].scores[i], load(value + m * LANES), sum[n][m]);
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) store(reads[n].out + e + m * LANES, sum[n][m] * scale[n]);
    }
}

// What N tokens read, each into its `out` [E]. They see the same `shared` positions first.
template <int N, class W>
inline void attend(const Reading *reads, const W *keys, const W *values, int shared, int E, float scale) {
    float weight[N];
    all_dots<N>(reads, keys, 0, shared, E);
    for (int n = 0; n < N; n++) {
        all_dots<1>(reads + n, keys, shared, reads[n].count, E);
        weight[n] = weighted(reads[n].scores, reads[n].count, scale);
    }
    const int whole = E / LANES * LANES;
    int e = 0;
    constexpr int M = sums_of(N);
    for (; e + M * LANES <= whole; e += M * LANES) mixture<N, M>(reads, values, shared, E, e, weight);
    for (; e < whole; e += LANES) mixture<N, 1>(reads, values, shared, E, e, weight);
    for (; e < E; e++)
        for (int n = 0; n < N; n++) {
            const Reading &own = reads[n];
            float sum = 0;
            for (int i = 0; i < own.count; i++)
                sum = fused(own.scores[i], widened(values[size_t(own.visible[i]) * E + e]), sum);
            own.out[e] = sum * weight[n];
        }
}

}  // namespace
