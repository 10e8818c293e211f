// Attention of a head: positions are read in their order, whichever tokens read them together.

#pragma once

namespace {

// Queries that read keys and values together: a key that is loaded once is multiplied with all. The
// registers hold so many sums at once.
constexpr int TOGETHER = 4;
constexpr int COMING = 16;  // keys and values are prefetched so many positions ahead
// Of a long prompt so many groups of queries read a stretch of the cache while it is near.
constexpr int GROUPS = 4, STRETCH = 256;
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

// Queries that read together; the first `shared` positions that they see are the same.
struct Group {
    Reading reads[TOGETHER];
    int count, shared;
};

// The key or value of a position that is read soon comes into the cache.
template <class W> inline void fetch(const W *all, int position, int E) {
    const char *one = reinterpret_cast<const char *>(all + size_t(position) * E);
    for (size_t at = 0; at < E * sizeof(W); at += LINE) __builtin_prefetch(one + at);
}

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
        for (int i = from + COMING; i < from + COMING + P && i < to; i++) fetch(keys, visible[i], E);
        dots<N, P>(reads, keys, visible, from, E);
    }
    for (; from < to; from++) dots<N, 1>(reads, keys, visible, from, E);
}

// Scores become weights that are still to be multiplied with what is returned.
inline float weighted(float *scores, int count, float scale) {
    for (int i = count; i < count + LANES; i++) scores[i] = -INFINITY;
    Lanes greatest = Lanes{} - INFINITY;
    for (int i = 0; i < count; i += LANES) {
        const Lanes score = load(scores + i) * scale;
        store(scores + i, score);
        greatest = larger(score, greatest);
    }
    float most = -INFINITY, each[LANES];
    store(each, greatest);
    for (int i = 0; i < LANES; i++) most = each[i] > most ? each[i] : most;
    Lanes sums = {};
    for (int i = 0; i < count; i += LANES) {
        store(scores + i, exponential(load(scores + i) - most));
        for (int rest = count; rest < i + LANES; rest++) scores[rest] = 0;
        sums += load(scores + i);
    }
    return count ? 1.0f / total(sums) : 0.0f;
}

// M times 16 numbers, from `e` on, of the sum of the weighted values of N queries, with those of the
// positions `from` to `to` of all that they see.
template <int N, int M, class W>
inline void mixture(const Reading *reads, const W *values, int from, int to, int E, int e) {
    Lanes sum[N][M] = {};
    if (from)
        for (int n = 0; n < N; n++)
            for (int m = 0; m < M; m++) sum[n][m] = load(reads[n].out + e + m * LANES);
    for (int i = from; i < to; i++) {
        if (e == 0 && i + COMING < to) fetch(values, reads[0].visible[i + COMING], E);
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
    for (int n = 0; n < N; n++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) store(reads[n].out + e + m * LANES, sum[n][m]);
}

// The same of all whole lanes.
template <int N, class W>
inline void mixtures(const Reading *reads, const W *values, int from, int to, int E) {
    const int whole = E / LANES * LANES;
    constexpr int M = sums_of(N);
    int e = 0;
    for (; e + M * LANES <= whole; e += M * LANES) mixture<N, M>(reads, values, from, to, E, e);
    for (; e < whole; e += LANES) mixture<N, 1>(reads, values, from, to, E, e);
}

// What a few groups of tokens read, each into its `out` [E]. Every sum has its order, however many
// groups there are.
template <class W>
inline void attend(Group *groups, int num, const W *keys, const W *values, int E, float scale) {
    int most = 0;
    for (int g = 0; g < num; g++) most = groups[g].shared > most ? groups[g].shared : most;
    const int stretch = num > 1 ? STRETCH : most;
    auto by_stretch = [&](auto read) {  // read(how many queries as a constant, group, from, to)
        for (int from = 0; from < most; from += stretch)
            for (int g = 0; g < num; g++) {
                const int end = groups[g].shared < from + stretch ? groups[g].shared : from + stretch;
                if (from < end)
                    with_constant<TOGETHER>(groups[g].count, [&](auto n) { read(n, groups[g], from, end); });
            }
    };
    by_stretch([&](auto n, Group &group, int from, int end) {
        all_dots<decltype(n)::value>(group.reads, keys, from, end, E);
    });
    float weight[GROUPS][TOGETHER];
    for (int g = 0; g < num; g++)
        for (int n = 0; n < groups[g].count; n++) {
            const Reading &own = groups[g].reads[n];
            all_dots<1>(&own, keys, groups[g].shared, own.count, E);
            weight[g][n] = weighted(own.scores, own.count, scale);
        }
    by_stretch([&](auto n, Group &group, int from, int end) {
        mixtures<decltype(n)::value>(group.reads, values, from, end, E);
    });
    const int whole = E / LANES * LANES;
    for (int g = 0; g < num; g++)
        for (int n = 0; n < groups[g].count; n++) {
            const Reading &own = groups[g].reads[n];
            if (own.count > groups[g].shared || !groups[g].shared)
                mixtures<1>(&own, values, groups[g].shared, own.count, E);
            for (int e = 0; e < whole; e += LANES)
                store(own.out + e, load(own.out + e) * weight[g][n]);
            for (int e = whole; e < E; e++) {
                float sum = 0;
                for (int i = 0; i < own.count; i++)
                    sum = fused(own.scores[i], widened(values[size_t(own.visible[i]) * E + e]), sum);
                own.out[e] = sum * weight[g][n];
            }
        }
}

}  // namespace
