// One forward of a Llama-shaped model for a few fed tokens, against a cache of keys and values.
//
// Every number is summed in one fixed order, whatever stands beside it: a dot product has 16 partial
// sums over its inputs, attention runs over the visible positions in their order. So a token has the
// same logits, bit for bit, alone or in a batch, decoded or verified as a node of a tree. In float32
// that holds for up to MANY rows at once: those of prompts are summed in another order (many.h).
// Weights, keys and values are float32 or bfloat16, and all sums are float32. bfloat16 is widened as
// it is read; a processor that multiplies it by itself is given the inputs of matrices in bfloat16,
// too (rows.h). Matrices may be of 8 or 4 bits (bits.h), or as a GGUF file packs them (packed.h).
// Letters: B rows, D hidden width, E head width, G query heads of a key head, H query heads, I
// neurons, J key/value heads, K inputs, L positions, O outputs, R flat rows, T fed tokens.

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "lanes.h"

namespace {

constexpr int LINE = 64, PAGE = 4096, AHEAD = 4 * PAGE;
#if defined(__znver1__) || defined(__znver2__) || defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr int CACHE = 2;  // into which weights are prefetched: the second, as the first is soon full
#else
constexpr int CACHE = 3;  // the first
#endif

inline float *aligned(float *at) {
    return reinterpret_cast<float *>((reinterpret_cast<uintptr_t>(at) + 63) & ~uintptr_t(63));
}

// What the registers hold at once: so many rows by outputs, or fewer rows by more outputs.
#if defined(__AVX512F__)  // 32 registers, one for 16 numbers
constexpr int ROWS = 6, OUTPUTS = 4, MORE_OUTPUTS = 8;
#elif defined(__AVX__)  // 16, two for 16 numbers
constexpr int ROWS = 3, OUTPUTS = 2, MORE_OUTPUTS = 4;
#else  // 16 or 32, four for 16 numbers
constexpr int ROWS = 2, OUTPUTS = 2, MORE_OUTPUTS = 4;
#endif

// f(a constant equal to n), n from 1 to N.
template <int N, class F>
inline void with_constant(int n, F f) {
    if constexpr (N > 0) {
        if (n == N)
            f(std::integral_constant<int, N>());
        else
            with_constant<N - 1>(n, f);
    }
}

}  // namespace

#include "rows.h"

#include "bits.h"
#include "draw.h"

#include "cut.h"
#include "many.h"
#include "packed.h"
#include "blocks.h"
#include "kl.h"

namespace {

// The totals of the partial sums.
template <int R, int O> inline void added_up(const Lanes (&sum)[R][O], float out[R][O]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int o = 0; o < O; o += 4) {
            const Lanes none = {};
            f4 found = totals(sum[r][o], o + 1 < O ? sum[r][o + 1] : none,
                               o + 2 < O ? sum[r][o + 2] : none, o + 3 < O ? sum[r][o + 3] : none);
            memcpy(&out[r][o], &found, (O - o < 4 ? O - o : 4) * sizeof(float));
        }
}

// The partial sums of x[r][k] w[o][k] of R rows and O outputs. It also prefetches `lines` lines of
// memory from `next` on at every step.
template <int R, int O, class W>
inline void summed(const float *x, const W *w, int K, const char *next, int lines, Lanes (&sum)[R][O]) {
    for (int k = 0; k + LANES <= K; k += LANES) {
        Lanes wide[O];
#pragma GCC unroll 8
        for (int o = 0; o < O; o++) wide[o] = load(w + size_t(o) * K + k);
        for (int line = 0; line < lines; line++, next += LINE) __builtin_prefetch(next, 0, CACHE);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Lanes row = load(x + r * apart(K) + k);
#pragma GCC unroll 8
            for (int o = 0; o < O; o++) sum[r][o] = fused(row, wide[o], sum[r][o]);
        }
    }
}

// Their totals, and the inputs that are not a whole step.
template <int R, int O, class W>
inline void finished(const float *x, const W *w, int K, const Lanes (&sum)[R][O], float out[R][O]) {
    added_up<R, O>(sum, out);
    for (int r = 0; r < R; r++)
        for (int k = K / LANES * LANES; k < K; k++)
            for (int o = 0; o < O; o++)
                out[r][o] = fused(x[r * apart(K) + k], widened(w[size_t(o) * K + k]), out[r][o]);
}

#ifdef __AVX512BF16__
// The same, of inputs in bfloat16: 32 of them in a step, two to a partial sum.
template <int R, int O, class W>
inline void summed(const bf16 *x, const W *w, int K, const char *next, int lines, Lanes (&sum)[R][O]) {
    for (int k = 0; k < K; k += PAIRS) {
        const __mmask32 there = K - k < PAIRS ? (1u << (K - k)) - 1 : ~0u;
        __m512bh wide[O];
#pragma GCC unroll 8
        for (int o = 0; o < O; o++)
            wide[o] = __m512bh(_mm512_maskz_loadu_epi16(there, w + size_t(o) * K + k));
        for (int line = 0; line < lines; line++, next += LINE) __builtin_prefetch(next, 0, CACHE);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m512bh row = __m512bh(_mm512_loadu_si512(x + r * apart_narrow(K) + k));
#pragma GCC unroll 8
            for (int o = 0; o < O; o++) sum[r][o] = Lanes(_mm512_dpbf16_ps(__m512(sum[r][o]), row, wide[o]));
        }
    }
}

template <int R, int O, class W>
inline void finished(const bf16 *, const W *, int, const Lanes (&sum)[R][O], float out[R][O]) {
    added_up<R, O>(sum, out);
}
#endif

// out[r][o] = sum_k x[r][k] w[o][k] of R rows and O outputs side by side.
template <int R, int O, class X, class W>
inline void tile(const X *x, const W *w, int K, const char *next, int lines, float out[R][O]) {
    Lanes sum[R][O] = {};
    summed<R, O>(x, w, K, next, lines, sum);
    finished<R, O>(x, w, K, sum, out);
}

// The same of one row, output after output: memory is read in its order.
template <int O, class X, class W>
inline void in_order(const X *x, const W *w, int K, float out[1][O]) {
    Lanes sum[1][O] = {};
#pragma GCC unroll 8
    for (int o = 0; o < O; o++) {
        const W *own = w + size_t(o) * K;
        Lanes one[1][1] = {};
        summed<1, 1>(x, own, K, reinterpret_cast<const char *>(own) + AHEAD, 1, one);
        sum[0][o] = one[0][0];
    }
    finished<1, O>(x, w, K, sum, out);
}

// All rows against O neighbouring outputs, in passes of as many rows as the registers take. Meanwhile
// the weights of the next strip come, but where a single row reads whole pages: processors other than
// AMD's see that by themselves. `keep(row, output, value)` takes each number.
template <int O, class X, class W, class Keep>
inline void strip(const X *x, const W *w, int R, int K, int o, Keep keep) {
    constexpr int step = Inputs<X>::STEP;
    if (CACHE == 2 && R == 1 && K * sizeof(W) < PAGE) {
        float out[1][O];
        in_order<O, X, W>(x, w + size_t(o) * K, K, out);
        for (int j = 0; j < O; j++) keep(0, o + j, out[0][j]);
        return;
    }
    const int passes = (R + ROWS - 1) / ROWS;
    const bool is_seen = CACHE == 3 && R == 1 && K * sizeof(W) >= PAGE;
    const int lines = is_seen ? 0 : (O * step * int(sizeof(W)) + LINE * passes - 1) / (LINE * passes);
    const char *next = reinterpret_cast<const char *>(w + size_t(o + O) * K);
    for (int pass = passes, r = 0; pass; pass--)
        with_constant<ROWS>((R - r + pass - 1) / pass, [&](auto count) {
            constexpr int N = decltype(count)::value;
            if constexpr (N * O <= ROWS * OUTPUTS || O == 1) {
                float out[N][O];
                tile<N, O>(x + r * Inputs<X>::apart(K), w + size_t(o) * K, K, next, lines, out);
                next += size_t(K / step) * lines * LINE;
                for (int i = 0; i < N; i++)
                    for (int j = 0; j < O; j++) keep(r + i, o + j, out[i][j]);
            }
            r += N;
        });
}

// Outputs [from, to) of all rows; of a prompt so many rows at a time as stay in the second cache.
constexpr int MOST_ROWS = 16 * ROWS;

template <class W, class Keep>
inline void product(const Rows<W> &rows, const W *w, int from, int to, Keep keep) {
    const int K = rows.K;
    if constexpr (std::is_same<W, float>::value)
        if (rows.R > MANY) from = product_of_many(rows.x, rows.R, K, w, from, to, keep);
    if (from == to) return;
#ifdef __AVX512BF16__
    if constexpr (std::is_same<W, bf16>::value)
        if (rows.in_tiles) {
            for (int first = 0; first < rows.R; first += 2 * EDGE) {
                const int count = rows.R - first < 2 * EDGE ? rows.R - first : 2 * EDGE;
                auto own = [=](int r, int o, float found) { keep(first + r, o, found); };
                product_in_tiles(rows.x + size_t(first) * K, count, K, w, from, to, own);
            }
            return;
        }
#endif
    for (int first = 0; first < rows.R; first += MOST_ROWS) {
        const auto *x = rows.x + first * Rows<W>::Own::apart(K);
        const int count = rows.R - first < MOST_ROWS ? rows.R - first : MOST_ROWS;
        auto own = [=](int r, int o, float found) { keep(first + r, o, found); };
        int o = from;
        if (count * MORE_OUTPUTS <= ROWS * OUTPUTS)
            for (; o + MORE_OUTPUTS <= to; o += MORE_OUTPUTS) strip<MORE_OUTPUTS>(x, w, count, K, o, own);
        for (; o + OUTPUTS <= to; o += OUTPUTS) strip<OUTPUTS>(x, w, count, K, o, own);
        for (; o < to; o++) strip<1>(x, w, count, K, o, own);
    }
}

// Root-mean-square norm; without a weight, a copy.
template <class W>
inline void normed(const float *x, const W *weight, int D, float eps, float *out) {
    Lanes squares = {};
    const int whole = D / LANES * LANES;
    if (!weight) {
        memcpy(out, x, D * sizeof(float));
        return;
    }
    for (int d = 0; d < whole; d += LANES) {
        Lanes part = load(x + d);
        squares = fused(part, part, squares);
    }
    float sum = total(squares);
    for (int d = whole; d < D; d++) sum = fused(x[d], x[d], sum);
    const float scale = 1.0f / std::sqrt(sum / D + eps);
    for (int d = 0; d < whole; d += LANES) store(out + d, load(x + d) * scale * load(weight + d));
    for (int d = whole; d < D; d++) out[d] = x[d] * scale * widened(weight[d]);
}

}  // namespace

#include "attention.h"

extern "C" {

struct Layer {
    const void *attention_norm, *query, *key, *value, *query_bias, *key_bias, *value_bias;
    const void *query_norm, *key_norm, *output, *output_bias, *mlp_norm, *gate, *up, *down;
};

struct Model {
    int32_t D, H, J, E, I, V, num_layers, num_embeddings, window;  // of 0: none
    float eps, qk_eps;
    const void *embedding, *norm, *head;  // without a norm the head reads the residual as it is
    const Layer *layers;
    // EAGLE-3: with an entry norm the first layer's projections read 2 D numbers, the normed
    // embedding and the normed state (attention_norm) that is the residual, or becomes it normed.
    const void *entry_norm;
    int32_t is_residual_normed;
};

struct Call {
    int32_t B, T, max_len, span, num_taps, num_logit_rows, threads, num_slots, num_positions, num_true;
    const int64_t *ids, *position, *slot, *start;
    const int32_t *true_ones;         // rising flat indices: these alone are computed, and are the rows
                                    // of all results; null: all are
    const float *residual;          // in place of the embeddings of `ids`, or beside them, or null
    const uint8_t *mask;            // [B, T, span]; null: of each row a run of tokens
    const float *rotary;            // [positions, 2 E]: cos, signed sin
    void *const *keys, *const *values;  // a layer's [Z, J, max_len, E]
    const uint8_t *attention, *mlp;  // which sub-layers run, or null for all
    const int32_t *taps;            // rising
    float *const *tapped;           // [R, D] of each tap
    const int32_t *logit_rows;      // flat rows whose logits are wanted; null: the first ones
    float *logits;                  // [num_logit_rows, V]
    float *last;                    // [R, D]: the residual behind the last layer, or null
    float *space;
};

// The likeliest tokens one after another: behind the row `logit_rows` of each row of a forward without a
// mask the first, and `length` in all. The forwards read what the call names for each of them, one
// behind another: sub-layers (`attention`, `mlp`: [length, num_layers]) and places (`last`).
struct Chain {
    int32_t length, num_choices;  // the first so many logits are looked at
    int32_t last_id, last_position;  // what lies behind is fed as these
    const int64_t *ids;  // the token of each choice, or null where they are the same
    int64_t *tokens;  // [B, length]
    float *best;  // [B, length]: their logits
    int64_t *fed;  // [3, B]: working memory
    // of drawn tokens, else null: [B]; of choices; [B, length, num_choices]; working memory of choices
    const float *temperature;  // 0: the best is taken
    const Truncation *cut;  // null: nothing is cut
    const int64_t *seed, *round, *code;
    float *kept, *score, *aside;
};

static inline int64_t entry_width(const Model &m) { return int64_t(m.D) * (m.entry_norm ? 2 : 1); }

// Numbers that a rounded row takes, at most.
static inline int64_t rounded_width(const Model &m) {
    const int64_t inner = m.H * m.E > m.I ? m.H * m.E : m.I;
    const int64_t widest = entry_width(m) > inner ? entry_width(m) : inner;
    const int64_t in_8 = groups_of(widest) * (GROUP / 4 + 3), in_16 = apart_narrow(widest) / 2 + LANES;
    const int64_t packed = spans_of(widest) * Rows<Packed>::FLOATS_A_SPAN;
    const int64_t most = in_8 > in_16 ? in_8 : in_16;
    return most > packed ? most : packed;
}

int64_t space_needed(const Model *m, int32_t R, int32_t span, int32_t threads) {
    const int64_t wide = (m->H + 2 * m->J) * int64_t(m->E);
    return R * (m->D + wide + apart(m->H * m->E) + apart(m->I)) + R * int64_t(span + 2) + 8 * LANES +
           threads * (R * (apart(entry_width(*m)) + rounded_width(*m)) +
                      GROUPS * TOGETHER * apart(span + LANES) + apart(2 * m->E));
}
}

namespace {

// A share of `count` in whole blocks.
inline void share(int count, int block, int thread, int threads, int *from, int *to) {
    const int blocks = (count + block - 1) / block;
    *from = int(int64_t(blocks) * thread / threads) * block;
    *to = int(int64_t(blocks) * (thread + 1) / threads) * block;
    if (*to > count) *to = count;
    if (*from > count) *from = count;
}

// The first input that is outside of its table: nothing is computed then. UNDECIDED: a draw that
// rounding decides (draw.h).
enum Outside { UNDECIDED = -1, NONE, ID, POSITION, SLOT };

Outside outside(const Model &m, const Call &c) {
    for (int b = 0; b < c.B; b++)
        if (c.slot[b] < 0 || c.slot[b] >= c.num_slots || c.start[b] < 0) return SLOT;
    for (int r = 0; r < c.B * c.T; r++) {
        if ((!c.residual || m.entry_norm) && (c.ids[r] < 0 || c.ids[r] >= m.num_embeddings)) return ID;
        if (c.position[r] < 0 || c.position[r] >= c.num_positions) return POSITION;
    }
    return NONE;
}

// W: embedding, norms, biases, keys and values; M: matrices.
template <class W, class M>
Outside forward(const Model &m, const Call &c) {
    if (const Outside found = outside(m, c)) return found;
    const int R = c.true_ones ? c.num_true : c.B * c.T;
    const int D = m.D, E = m.E, H = m.H, J = m.J, I = m.I, G = H / J;
    const int wide = (H + 2 * J) * E;
    const size_t mixed_apart = apart(H * E), neurons_apart = apart(I);
    float *mixed = aligned(c.space), *neurons = mixed + R * mixed_apart;
    float *own_space = neurons + R * neurons_apart;
    const int entry = entry_width(m);
    const size_t rounded_size = R * rounded_width(m);
    const size_t scores_apart = apart(c.span + LANES);
    const size_t own_size =
        R * apart(entry) + rounded_size + GROUPS * TOGETHER * scores_apart + apart(2 * E);
    float *x = own_space + c.threads * own_size, *heads = x + size_t(R) * D;
    int32_t *counts = reinterpret_cast<int32_t *>(heads + size_t(R) * wide);
    int32_t *dense = counts + R;  // so many are the first ones, none left out
    int32_t *visible = dense + R;
    const float scale = 1.0f / std::sqrt(float(E));
    auto fed = [&](int r) { return c.true_ones ? c.true_ones[r] : r; };  // where a row was fed

#ifdef _OPENMP
#pragma omp parallel num_threads(c.threads)
#endif
    {
#ifdef _OPENMP
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
#define WAIT _Pragma("omp barrier")
#else
        const int thread = 0, threads = 1;
#define WAIT
#endif
        float *flat = own_space + own_size * thread, *rounded = flat + R * apart(entry);
        float *scores = rounded + rounded_size;
        float *aside = scores + GROUPS * TOGETHER * scores_apart;
        int from, to;

        share(R, 1, thread, threads, &from, &to);
        for (int r = from; r < to; r++) {
            const int at = fed(r);
            if (c.residual)
                memcpy(x + size_t(r) * D, c.residual + size_t(at) * D, D * sizeof(float));
            else {
                const W *row = static_cast<const W *>(m.embedding) + size_t(c.ids[at]) * D;
                for (int d = 0; d < D; d++) x[size_t(r) * D + d] = widened(row[d]);
            }
            int count = 0;
            const int own = int(c.start[at / c.T]) + at % c.T;  // of a run, and all before it
            int p = !c.mask && m.window && own >= m.window ? own - m.window + 1 : 0;
            const int end = c.mask || own >= c.span ? c.span : own + 1;
            for (; p < end; p++)
                if (!c.mask || c.mask[size_t(at) * c.span + p])
                    visible[size_t(r) * c.span + count++] = p;
            counts[r] = count;
            dense[r] = 0;
            while (dense[r] < count && visible[size_t(r) * c.span + dense[r]] == dense[r]) dense[r]++;
        }
        WAIT

        int tap = 0;
        for (int l = 0; l < m.num_layers; l++) {
            const Layer &layer = m.layers[l];
            if (tap < c.num_taps && c.taps[tap] == l) {
                share(R, 1, thread, threads, &from, &to);
                memcpy(c.tapped[tap] + size_t(from) * D, x + size_t(from) * D,
                       size_t(to - from) * D * sizeof(float));
                tap++;
            }
            if (!c.attention || c.attention[l]) {
                const bool is_entry = l == 0 && m.entry_norm;
                const int K = is_entry ? 2 * D : D;
                for (int r = 0; r < R; r++) {
                    float *own = flat + r * apart(K);
                    if (is_entry) {
                        const W *row = static_cast<const W *>(m.embedding) + size_t(c.ids[fed(r)]) * D;
                        float *token = own + D;  // the state goes there afterwards
                        for (int d = 0; d < D; d++) token[d] = widened(row[d]);
                        normed(token, static_cast<const W *>(m.entry_norm), D, m.eps, own);
                        own += D;
                    }
                    normed(x + size_t(r) * D, static_cast<const W *>(layer.attention_norm), D, m.eps,
                           own);
                }
                const void *weights[3] = {layer.query, layer.key, layer.value};
                const void *biases[3] = {layer.query_bias, layer.key_bias, layer.value_bias};
                const int sizes[3] = {H * E, J * E, J * E};
                const Rows<M> rows(flat, R, K, rounded);
                int first = 0;
                share(wide, SIDE, thread, threads, &from, &to);
                for (int part = 0; part < 3; part++) {
                    const int a = from > first ? from - first : 0;
                    const int b = to - first < sizes[part] ? to - first : sizes[part];
                    const W *bias = static_cast<const W *>(biases[part]);
                    float *out = heads + first;
                    product(rows, static_cast<const M *>(weights[part]), a, b,
                            [=](int r, int o, float found) {
                                out[size_t(r) * wide + o] = bias ? found + widened(bias[o]) : found;
                            });
                    first += sizes[part];
                }
                WAIT
                W *keys = static_cast<W *>(c.keys[l]), *values = static_cast<W *>(c.values[l]);
                auto origin = [&](int b, int j) { return (size_t(c.slot[b]) * J + j) * c.max_len * E; };
                share(R, 1, thread, threads, &from, &to);
                for (int r = from; r < to; r++) {
                    const int b = fed(r) / c.T;
                    const size_t at = size_t(c.start[b]) + fed(r) % c.T;
                    if (at >= size_t(c.max_len)) continue;
                    const float *table = c.rotary + size_t(c.position[fed(r)]) * 2 * E;
                    for (int j = 0; j < J; j++) {
                        float *key = heads + size_t(r) * wide + (H + j) * E;
                        const float *value = heads + size_t(r) * wide + (H + J + j) * E;
                        const size_t place = origin(b, j) + at * E;
                        rotated(key, static_cast<const W *>(layer.key_norm), m.qk_eps, table, E, aside);
                        for (int e = 0; e < E; e++) {
                            put(keys + place + e, key[e]);
                            put(values + place + e, value[e]);
                        }
                    }
                }
                WAIT
                int turn = 0;  // threads take turns, as later tokens see more
                for (int b = 0, begin = 0, end; b < c.B; b++, begin = end) {  // rows of a sequence
                    for (end = begin; end < R && fed(end) < (b + 1) * c.T;) end++;
                    const int queries = (end - begin) * G;
                    const int tile = TOGETHER * (queries < GROUPS * TOGETHER * threads ? 1 : GROUPS);
                    for (int j = 0; j < J; j++)
                        for (int at = begin * G; at < end * G; at += tile) {
                            if (turn++ % threads != thread) continue;
                            const int last = end * G - at < tile ? end * G : at + tile;
                            Group groups[GROUPS];
                            int num = 0;
                            for (int i = at; i < last; i += TOGETHER, num++) {
                                Group &group = groups[num];
                                const int r = i / G;
                                group.count = last - i < TOGETHER ? last - i : TOGETHER;
                                group.shared = counts[r];
                                for (int n = 0; n < group.count; n++) {
                                    const int own = (i + n) / G, h = j * G + (i + n) % G;
                                    float *query = heads + size_t(own) * wide + h * E;
                                    const float *table = c.rotary + size_t(c.position[fed(own)]) * 2 * E;
                                    rotated(query, static_cast<const W *>(layer.query_norm), m.qk_eps, table,
                                            E, aside);
                                    group.reads[n] = {query, visible + size_t(own) * c.span, counts[own],
                                                      scores + (num * TOGETHER + n) * scores_apart,
                                                      mixed + own * mixed_apart + h * E};
                                    if (own == r) continue;
                                    if (dense[r] < group.shared) group.shared = dense[r];
                                    if (dense[own] < group.shared) group.shared = dense[own];
                                }
                            }
                            attend(groups, num, keys + origin(b, j), values + origin(b, j), E, scale);
                        }
                }
                WAIT
                const W *bias = static_cast<const W *>(layer.output_bias);
                const float *before = is_entry && m.is_residual_normed ? flat + D : x;
                const size_t stride = before == x ? D : apart(K);
                share(D, SIDE, thread, threads, &from, &to);
                product(Rows<M>(mixed, R, H * E, rounded), static_cast<const M *>(layer.output), from, to,
                        [=](int r, int o, float found) {
                            x[size_t(r) * D + o] = before[r * stride + o] +
                                                   (bias ? found + widened(bias[o]) : found);
                        });
                WAIT
            }
            if (!c.mlp || c.mlp[l]) {
                for (int r = 0; r < R; r++)
                    normed(x + size_t(r) * D, static_cast<const W *>(layer.mlp_norm), D, m.eps,
                           flat + r * apart(D));
                const Rows<M> rows(flat, R, D, rounded);
                share(I, SIDE, thread, threads, &from, &to);
                product(rows, static_cast<const M *>(layer.gate), from, to,
                        [=](int r, int o, float found) { neurons[r * neurons_apart + o] = found; });
                // silu(gate) * up, 16 at a time where the gates of a row lie side by side
                for (int r = 0; r < R; r++) {
                    float *row = neurons + r * neurons_apart;
                    int o = from;
                    for (; o + LANES <= to; o += LANES) {
                        const Lanes gate = load(row + o);
                        store(row + o, gate / (exponential(-gate) + 1.0f));
                    }
                    float rest[LANES] = {};
                    if (o < to) memcpy(rest, row + o, (to - o) * sizeof(float));
                    const Lanes gate = load(rest);
                    store(rest, gate / (exponential(-gate) + 1.0f));
                    if (o < to) memcpy(row + o, rest, (to - o) * sizeof(float));
                }
                product(rows, static_cast<const M *>(layer.up), from, to,
                        [=](int r, int o, float found) { neurons[r * neurons_apart + o] *= found; });
                WAIT
                share(D, SIDE, thread, threads, &from, &to);
                product(Rows<M>(neurons, R, I, rounded), static_cast<const M *>(layer.down), from, to,
                        [=](int r, int o, float found) { x[size_t(r) * D + o] += found; });
                WAIT
            }
        }
        if (c.last) {
            share(R, 1, thread, threads, &from, &to);
            memcpy(c.last + size_t(from) * D, x + size_t(from) * D, size_t(to - from) * D * sizeof(float));
        }
        if (c.num_logit_rows || tap < c.num_taps) {
            const W *norm = static_cast<const W *>(m.norm);
            if (tap < c.num_taps) {
                share(R, 1, thread, threads, &from, &to);
                for (int r = from; r < to; r++)
                    normed(x + size_t(r) * D, norm, D, m.eps, c.tapped[tap] + size_t(r) * D);
            }
            for (int i = 0; i < c.num_logit_rows; i++)
                normed(x + size_t(c.logit_rows ? c.logit_rows[i] : i) * D, norm, D, m.eps, flat + i * apart(D));
            float *logits = c.logits;
            const int V = m.V;
            share(V, SIDE, thread, threads, &from, &to);
            typedef typename HeadOf<M>::type Head;
            product(Rows<Head>(flat, c.num_logit_rows, D, rounded), static_cast<const Head *>(m.head), from, to,
                    [=](int r, int o, float found) { logits[size_t(r) * V + o] = found; });
        }
    }
    return NONE;
}

// The first of the largest numbers as W holds them; what is none is larger than all.
template <class W> inline int largest(const float *x, int count, float *most) {
    int at = 0;
    for (int i = 0; i < count; i++) {
        W own;
        put(&own, x[i]);
        const float value = widened(own);
        if (i && value <= *most) continue;
        at = i;
        *most = value;
        if (value != value) break;
    }
    return at;
}

// The choice that row b draws as token `at` of its chain; -1 where rounding decides (draw.h).
template <class W> inline int64_t chosen(const float *x, const Chain &chain, int b, int at) {
    float *kept = chain.kept + (size_t(b) * chain.length + at) * chain.num_choices;
    for (int i = 0; i < chain.num_choices; i++) {
        W own;
        put(&own, x[i]);
        kept[i] = widened(own);
        chain.score[i] = kept[i] / chain.temperature[b];
    }
    float best;
    if (!chain.temperature[b]) return largest<float>(kept, chain.num_choices, &best);
    if (chain.cut) cut_row(chain.score, chain.num_choices, chain.cut[b], chain.aside);
    const uint64_t key = key_of(chain.seed[b], DRAFT, chain.round[b]);
    return drawn(chain.score, key_within(key, (int64_t(at) << 24) + 1), chain.code, chain.num_choices);
}

template <class W, class M> Outside chain(const Model &m, Call c, const Chain &chain) {
    int64_t *ids = chain.fed, *position = ids + c.B, *start = position + c.B;
    Outside found = forward<W, M>(m, c);
    for (int b = 0; b < c.B; b++) start[b] = c.start[b] + c.logit_rows[b] - b * c.T;
    if (c.last) c.last += size_t(c.B) * c.T * m.D;
    c.T = 1;
    c.logit_rows = nullptr;
    c.ids = ids;
    c.position = position;
    c.start = start;
    for (int at = 0; !found; at++) {
        c.span = 0;
        for (int b = 0; b < c.B; b++) {
            const size_t own = size_t(b) * chain.length + at;
            const float *logits = c.logits + size_t(b) * m.V;
            const int64_t best = chain.temperature ? chosen<W>(logits, chain, b, at)
                                                   : largest<W>(logits, chain.num_choices, chain.best + own);
            if (best < 0) return UNDECIDED;
            const int64_t id = chain.ids ? chain.ids[best] : best;
            chain.tokens[own] = id;
            ids[b] = id < chain.last_id ? id : chain.last_id;
            start[b]++;
            position[b] = start[b] < chain.last_position ? start[b] : chain.last_position;
            c.span = start[b] < c.span ? c.span : int(start[b]) + 1;
        }
        if (at + 1 == chain.length) break;
        if (c.attention) c.attention += m.num_layers;
        if (c.mlp) c.mlp += m.num_layers;
        found = forward<W, M>(m, c);
        if (c.last) c.last += size_t(c.B) * m.D;
    }
    return found;
}

}  // namespace

extern "C" int step_float32(const Model *model, const Call *call) {
    return forward<float, float>(*model, *call);
}
extern "C" int step_bfloat16(const Model *model, const Call *call) {
    return forward<bf16, bf16>(*model, *call);
}
extern "C" int step_float32_int8(const Model *model, const Call *call) {
    return forward<float, Int8>(*model, *call);
}
extern "C" int step_float32_int4(const Model *model, const Call *call) {
    return forward<float, Int4>(*model, *call);
}
extern "C" int step_bfloat16_int8(const Model *model, const Call *call) {
    return forward<bf16, Int8>(*model, *call);
}
extern "C" int step_bfloat16_int4(const Model *model, const Call *call) {
    return forward<bf16, Int4>(*model, *call);
}
extern "C" int step_float32_packed(const Model *model, const Call *call) {
    return forward<float, Packed>(*model, *call);
}
extern "C" int chain_float32_packed(const Model *model, const Call *call, const Chain *wanted) {
    return chain<float, Packed>(*model, *call, *wanted);
}
extern "C" int chain_float32(const Model *model, const Call *call, const Chain *wanted) {
    return chain<float, float>(*model, *call, *wanted);
}
extern "C" int chain_bfloat16(const Model *model, const Call *call, const Chain *wanted) {
    return chain<bf16, bf16>(*model, *call, *wanted);
}
extern "C" int chain_float32_int8(const Model *model, const Call *call, const Chain *wanted) {
    return chain<float, Int8>(*model, *call, *wanted);
}
extern "C" int chain_float32_int4(const Model *model, const Call *call, const Chain *wanted) {
    return chain<float, Int4>(*model, *call, *wanted);
}
extern "C" int chain_bfloat16_int8(const Model *model, const Call *call, const Chain *wanted) {
    return chain<bf16, Int8>(*model, *call, *wanted);
}
extern "C" int chain_bfloat16_int4(const Model *model, const Call *call, const Chain *wanted) {
    return chain<bf16, Int4>(*model, *call, *wanted);
}
// Bytes of each structure that a call is given, in the order of library.py's STRUCTURES.
extern "C" int64_t structure_bytes(int32_t at) {
    constexpr size_t bytes[] = {sizeof(Layer), sizeof(Model), sizeof(Call), sizeof(Chain), sizeof(Draws),
                                sizeof(Truncation), sizeof(Cuts), sizeof(ScoreRows), sizeof(Compared)};
    constexpr int32_t count = sizeof bytes / sizeof bytes[0];
    return 0 <= at && at < count ? int64_t(bytes[at]) : 0;
}
// Whether steps can take more than one thread: compilers may come without OpenMP.
extern "C" int has_threads() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
// Whether the processor multiplies numbers of 8 bits faster than wider ones.
// Whether several rows of bfloat16 take about as long as one (tiles.h).
extern "C" int has_bfloat16_tiles() { return has_tiles(); }

extern "C" int has_int8() {
#if defined(__AVX512VNNI__) || defined(__AVX2__)
    return 1;
#else
    return 0;
#endif
}
