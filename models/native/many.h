// Products of many rows in float32, such as a prompt's. A block of weights is transposed once for all
// rows, so that sixteen outputs are one register: each input is multiplied with a register of weights,
// and no partial sums are to be added up. Sums run over the inputs in their order, not in that of a dot
// product (step.cpp): the last bits differ. In bfloat16, where they could decide between two tokens,
// products of many rows are dot products, too.
// Letters: K inputs, N and R rows, O outputs, S registers of outputs.

#pragma once

namespace {

constexpr int MANY = 24;  // up to so many rows dot products are faster
constexpr int BLOCK = 256, AT_ONCE = 192;  // inputs of a block of weights, rows that read it

// What the registers hold: so many rows by registers of outputs.
#if defined(__AVX512F__)
constexpr int BLOCK_ROWS = 6, BLOCK_SIDES = 4;
#elif defined(__AVX__) || defined(__aarch64__)
constexpr int BLOCK_ROWS = 6, BLOCK_SIDES = 1;
#else
constexpr int BLOCK_ROWS = 3, BLOCK_SIDES = 1;
#endif

// O outputs' weights of `count` inputs, those of an input side by side: block [count, O].
template <int O> inline void transposed(const float *w, int K, int count, float *block) {
    const int whole = count / 4 * 4;
    for (int first = 0; first < whole; first += LANES) {  // few lines of memory at a time
        const int last = whole - first < LANES ? whole : first + LANES;
        for (int o = 0; o < O; o += 4)
            for (int k = first; k < last; k += 4) {
                f4 of[4];
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) memcpy(&of[i], w + size_t(o + i) * K + k, sizeof of[i]);
                const f4 ab = __builtin_shufflevector(of[0], of[1], 0, 4, 1, 5);
                const f4 cd = __builtin_shufflevector(of[2], of[3], 0, 4, 1, 5);
                const f4 behind_ab = __builtin_shufflevector(of[0], of[1], 2, 6, 3, 7);
                const f4 behind_cd = __builtin_shufflevector(of[2], of[3], 2, 6, 3, 7);
                const f4 lines[4] = {__builtin_shufflevector(ab, cd, 0, 1, 4, 5),
                                     __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
                                     __builtin_shufflevector(behind_ab, behind_cd, 0, 1, 4, 5),
                                     __builtin_shufflevector(behind_ab, behind_cd, 2, 3, 6, 7)};
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) memcpy(block + (k + i) * O + o, &lines[i], sizeof lines[i]);
            }
    }
    for (int k = whole; k < count; k++)
        for (int o = 0; o < O; o++) block[k * O + o] = w[size_t(o) * K + k];
}

// Weights that are prefetched one line of memory after another: some lines of each row.
struct Coming {
    const char *at;
    std::ptrdiff_t behind;  // from a row's last line to the next row's first
    int lines, left, in_row;

    Coming(const float *w, int K, int rows, int count) : at(reinterpret_cast<const char *>(w)) {
        in_row = lines = (count * int(sizeof(float)) + LINE - 1) / LINE;
        behind = std::ptrdiff_t(K * sizeof(float)) - lines * LINE;
        left = rows * lines;
    }

    void prefetch() {
        if (!left) return;
        __builtin_prefetch(at, 0, CACHE);
        left--;
        at += LINE;
        if (--in_row) return;
        in_row = lines;
        at += behind;
    }
};

// `sum` and what N rows add to it over the inputs of a block.
template <int N, int S>
inline void added(const float *x, size_t apart, const float *block, int count, Coming &next,
                  Lanes (&sum)[N][S]) {
    for (int k = 0; k < count; k++, block += S * LANES) {
        Lanes wide[S];
#pragma GCC unroll 4
        for (int s = 0; s < S; s++) wide[s] = load(block + s * LANES);
        next.prefetch();
#pragma GCC unroll 6
        for (int n = 0; n < N; n++)
#pragma GCC unroll 4
            for (int s = 0; s < S; s++) sum[n][s] = fused(x[n * apart + k], wide[s], sum[n][s]);
    }
}

// 16 S outputs of up to AT_ONCE rows.
template <int S, class Keep>
inline void block_product(const float *x, int R, int K, const float *w, Keep keep) {
    constexpr int O = S * LANES;
    alignas(64) float block[BLOCK * O], partial[AT_ONCE * O];
    for (int first = 0; first < K; first += BLOCK) {
        const int then = first + BLOCK, count = K - first < BLOCK ? K - first : BLOCK;
        transposed<O>(w + first, K, count, block);
        const int width = then < K && K - then < BLOCK ? K - then : count;
        Coming next(then < K ? w + then : w + size_t(O) * K, K, O, width);
        int r = 0;
        for (int pass = (R + BLOCK_ROWS - 1) / BLOCK_ROWS; pass; pass--)
            with_constant<BLOCK_ROWS>((R - r + pass - 1) / pass, [&](auto rows) {
                constexpr int N = decltype(rows)::value;
                Lanes sum[N][S] = {};
                if (first)
                    for (int n = 0; n < N; n++)
                        for (int s = 0; s < S; s++) sum[n][s] = load(partial + (r + n) * O + s * LANES);
                added<N, S>(x + r * apart(K) + first, apart(K), block, count, next, sum);
                float *out = partial + r * O;
                for (int n = 0; n < N; n++)
                    for (int s = 0; s < S; s++) store(out + n * O + s * LANES, sum[n][s]);
                if (then >= K)
                    for (int n = 0; n < N; n++)
                        for (int o = 0; o < O; o++) keep(r + n, o, out[n * O + o]);
                r += N;
            });
    }
}

// Outputs from `from` on of all rows, sixteen and more at a time: the first output that is not done.
template <class Keep>
inline int product_of_many(const float *x, int R, int K, const float *w, int from, int to, Keep keep) {
    int o = from;
    for (int first = 0; first < R; first += AT_ONCE) {
        const int count = R - first < AT_ONCE ? R - first : AT_ONCE;
        auto blocks = [&](auto sides) {
            constexpr int S = decltype(sides)::value, O = S * LANES;
            for (; o + O <= to; o += O)
                block_product<S>(x + first * apart(K), count, K, w + size_t(o) * K,
                                 [=](int r, int j, float found) { keep(first + r, o + j, found); });
        };
        o = from;
        blocks(std::integral_constant<int, BLOCK_SIDES>());
        blocks(std::integral_constant<int, 1>());
    }
    return o;
}

}  // namespace
