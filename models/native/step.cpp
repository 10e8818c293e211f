// One forward of a Llama-shaped model for a few fed tokens, against a cache of keys and values.
//
// Every number is summed in one fixed order, whatever stands beside it: a dot product has 16 partial
// sums over its inputs, attention runs over the visible positions in their order. So a token has the
// same logits, bit for bit, alone or in a batch, decoded or verified as a node of a tree.
// Weights, keys and values are float32 or bfloat16 (widened as they are read, so that no bfloat16
// instruction is needed); all that is computed is float32.
// Letters: B rows, D hidden width, E head width, G query heads of a key head, H query heads, I
// neurons, J key/value heads, K inputs, L positions, O outputs, R flat rows, T fed tokens.

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef _OPENMP
#include <omp.h>
#endif

namespace {

typedef float f16v __attribute__((vector_size(64)));
typedef int32_t i16v __attribute__((vector_size(64)));
typedef uint32_t u16v __attribute__((vector_size(64)));
typedef uint16_t s16v __attribute__((vector_size(32)));
typedef float f8v __attribute__((vector_size(32)));
typedef float f4v __attribute__((vector_size(16)));

constexpr int LANES = 16;

struct bf16 {
    uint16_t bits;
};

inline float widened(float x) { return x; }
inline float widened(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline void put(float *at, float x) { *at = x; }
inline void put(bf16 *at, float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    at->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline f16v load(const float *at) {
    f16v out;
    memcpy(&out, at, sizeof out);
    return out;
}
inline f16v load(const bf16 *at) {
    s16v bits;
    memcpy(&bits, at, sizeof bits);
    u16v wide = __builtin_convertvector(bits, u16v) << 16;
    f16v out;
    memcpy(&out, &wide, sizeof out);
    return out;
}
inline void store(float *at, f16v x) { memcpy(at, &x, sizeof x); }

// The sums of four vectors, in one order for all: their lanes are mixed, then folded together.
inline f4v totals(f16v a, f16v b, f16v c, f16v d) {
    f16v ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
              __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    f16v cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
              __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    f16v all = __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    f8v half = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7) +
               __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
           __builtin_shufflevector(half, half, 4, 5, 6, 7);
}
inline float total(f16v x) { return totals(x, f16v{}, f16v{}, f16v{})[0]; }

// e^x of 16 numbers of at most 88: 2^n by the exponent, the rest by a polynomial (error 2e-7).
inline f16v exponential(f16v x) {
    const f16v zero = {};
    x = x < zero - 87.0f ? zero - 87.0f : x;
    x = x > zero + 88.0f ? zero + 88.0f : x;
    f16v n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    f16v r = x - n * 0.693359375f + n * 2.12194440e-4f;
    f16v p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    i16v scale = (__builtin_convertvector(n, i16v) + 127) << 23;
    f16v power;
    memcpy(&power, &scale, sizeof power);
    return p * power;
}

// out[r][o] = sum_k x[r][k] w[o][k] of R rows and O outputs.
template <int R, int O, class W>
inline void tile(const float *x, const W *w, int K, float out[R][O]) {
    f16v sum[R][O] = {};
    const int whole = K / LANES * LANES;
    for (int k = 0; k < whole; k += LANES) {
        f16v wide[O];
#pragma GCC unroll 8
        for (int o = 0; o < O; o++) wide[o] = load(w + size_t(o) * K + k);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            f16v row = load(x + size_t(r) * K + k);
#pragma GCC unroll 8
            for (int o = 0; o < O; o++) sum[r][o] += row * wide[o];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        if constexpr (O % 4 == 0)
#pragma GCC unroll 2
            for (int o = 0; o < O; o += 4) {
                f4v found = totals(sum[r][o], sum[r][o + 1], sum[r][o + 2], sum[r][o + 3]);
                memcpy(&out[r][o], &found, sizeof found);
            }
        else
            for (int o = 0; o < O; o++) out[r][o] = total(sum[r][o]);
        for (int k = whole; k < K; k++)
            for (int o = 0; o < O; o++) out[r][o] += x[size_t(r) * K + k] * widened(w[size_t(o) * K + k]);
    }
}

// All rows against O neighbouring outputs; `keep(row, output, value)` takes each number.
template <int O, class W, class Keep>
inline void strip(const float *x, const W *w, int R, int K, int o, Keep keep) {
    int r = 0;
    auto rows = [&](auto count) {
        constexpr int N = decltype(count)::value;
        float out[N][O];
        tile<N, O, W>(x + size_t(r) * K, w + size_t(o) * K, K, out);
        for (int i = 0; i < N; i++)
            for (int j = 0; j < O; j++) keep(r + i, o + j, out[i][j]);
        r += N;
    };
    struct One { enum { value = 1 }; };
    struct Two { enum { value = 2 }; };
    struct Three { enum { value = 3 }; };
    struct Four { enum { value = 4 }; };
    struct Six { enum { value = 6 }; };
    while (R - r >= 6 && R - r != 8) rows(Six());
    while (R - r >= 4) rows(Four());
    switch (R - r) {
        case 3: rows(Three()); break;
        case 2: rows(Two()); break;
        case 1: rows(One()); break;
    }
}

// Outputs [from, to) of all rows. One row alone takes eight outputs at a time: as many sums in flight.
template <class W, class Keep>
inline void product(const float *x, const W *w, int R, int K, int from, int to, Keep keep) {
    int o = from;
    if (R <= 2)
        for (; o + 8 <= to; o += 8) strip<8>(x, w, R, K, o, keep);
    for (; o + 4 <= to; o += 4) strip<4>(x, w, R, K, o, keep);
    for (; o < to; o++) strip<1>(x, w, R, K, o, keep);
}

// Root-mean-square norm; without a weight, a copy.
template <class W>
inline void normed(const float *x, const W *weight, int D, float eps, float *out) {
    f16v squares = {};
    const int whole = D / LANES * LANES;
    if (!weight) {
        memcpy(out, x, D * sizeof(float));
        return;
    }
    for (int d = 0; d < whole; d += LANES) {
        f16v part = load(x + d);
        squares += part * part;
    }
    float sum = total(squares);
    for (int d = whole; d < D; d++) sum += x[d] * x[d];
    const float scale = 1.0f / std::sqrt(sum / D + eps);
    for (int d = 0; d < whole; d += LANES) store(out + d, load(x + d) * scale * load(weight + d));
    for (int d = whole; d < D; d++) out[d] = x[d] * scale * widened(weight[d]);
}

}  // namespace

extern "C" {

struct Layer {
    const void *attention_norm, *query, *key, *value, *query_bias, *key_bias, *value_bias;
    const void *query_norm, *key_norm, *output, *output_bias, *mlp_norm, *gate, *up, *down;
};

struct Model {
    int32_t D, H, J, E, I, V, num_layers, num_embeddings;
    float eps, qk_eps;
    const void *embedding, *norm, *head;  // without a norm the head reads the residual as it is
    const Layer *layers;
    // EAGLE-3: with an entry norm the first layer's projections read 2 D numbers, the normed
    // embedding and the normed state (attention_norm) that is the residual, or becomes it normed.
    const void *entry_norm;
    int32_t is_residual_normed;
};

struct Call {
    int32_t B, T, max_len, span, num_taps, num_asked, threads, num_slots, num_positions;
    const int64_t *ids, *position, *slot, *start;
    const float *residual;          // in place of the embeddings of `ids`, or beside them, or null
    const uint8_t *mask;            // [B, T, span]
    const float *rotary;            // [positions, 2 E]: cos, signed sin
    void *const *keys, *const *values;  // a layer's [Z, J, max_len, E]
    const uint8_t *attention, *mlp;  // which sub-layers run, or null for all
    const int32_t *taps;            // rising
    float *const *tapped;           // [R, D] of each tap
    const int32_t *asked;           // flat rows whose logits are wanted
    float *logits;                  // [num_asked, V]
    float *last;                    // [R, D]: the residual behind the last layer, or null
    float *space;
};

static inline int64_t entry_width(const Model &m) { return int64_t(m.D) * (m.entry_norm ? 2 : 1); }

int64_t space_needed(const Model *m, int32_t R, int32_t span, int32_t threads) {
    const int64_t wide = (m->H + 2 * m->J) * int64_t(m->E);
    return R * (m->D + wide + int64_t(m->H) * m->E + m->I) + R * int64_t(span + 1) +
           threads * (R * entry_width(*m) + span + 2 * LANES + 2 * m->E);
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

// A head of one token: bias is in it; normed if the model does so, then rotated.
template <class W>
inline void rotated(float *head, const W *norm, float eps, const float *table, int E, float *aside) {
    if (norm) normed(head, norm, E, eps, head);
    const int half = E / 2;
    memcpy(aside, head, E * sizeof(float));
    for (int e = 0; e < E; e++)
        head[e] = aside[e] * table[e] + aside[e < half ? e + half : e - half] * table[E + e];
}

template <class W>
inline float dot(const float *x, const W *w, int E) {
    f16v sum = {};
    const int whole = E / LANES * LANES;
    for (int e = 0; e < whole; e += LANES) sum += load(x + e) * load(w + e);
    float out = total(sum);
    for (int e = whole; e < E; e++) out += x[e] * widened(w[e]);
    return out;
}

// What one head of one token reads, into out [E].
template <class W>
inline void attend(const float *query, const W *keys, const W *values, const int32_t *visible,
                   int count, int E, float scale, float *scores, float *out) {
    float most = -INFINITY;
    for (int i = 0; i < count; i++) {
        scores[i] = dot(query, keys + size_t(visible[i]) * E, E) * scale;
        most = scores[i] > most ? scores[i] : most;
    }
    for (int i = count; i < count + LANES; i++) scores[i] = -INFINITY;
    f16v sums = {};
    for (int i = 0; i < count; i += LANES) {
        f16v weight = exponential(load(scores + i) - most);
        for (int lane = 0; lane < LANES; lane++)
            if (i + lane >= count) weight[lane] = 0;
        sums += weight;
        store(scores + i, weight);
    }
    const float whole_weight = count ? 1.0f / total(sums) : 0.0f;
    const int whole = E / LANES * LANES;
    for (int e = 0; e < whole; e += LANES) {
        f16v sum = {};
        for (int i = 0; i < count; i++) sum += scores[i] * load(values + size_t(visible[i]) * E + e);
        store(out + e, sum * whole_weight);
    }
    for (int e = whole; e < E; e++) {
        float sum = 0;
        for (int i = 0; i < count; i++) sum += scores[i] * widened(values[size_t(visible[i]) * E + e]);
        out[e] = sum * whole_weight;
    }
}

// What would be read from outside of a table, if anything: nothing is computed then.
enum Outside { NONE, ID, POSITION, SLOT };

Outside outside(const Model &m, const Call &c) {
    for (int b = 0; b < c.B; b++)
        if (c.slot[b] < 0 || c.slot[b] >= c.num_slots || c.start[b] < 0) return SLOT;
    for (int r = 0; r < c.B * c.T; r++) {
        if ((!c.residual || m.entry_norm) && (c.ids[r] < 0 || c.ids[r] >= m.num_embeddings)) return ID;
        if (c.position[r] < 0 || c.position[r] >= c.num_positions) return POSITION;
    }
    return NONE;
}

template <class W>
Outside forward(const Model &m, const Call &c) {
    if (const Outside found = outside(m, c)) return found;
    const int R = c.B * c.T, D = m.D, E = m.E, H = m.H, J = m.J, I = m.I, G = H / J;
    const int wide = (H + 2 * J) * E;
    float *x = c.space, *heads = x + size_t(R) * D, *mixed = heads + size_t(R) * wide;
    float *neurons = mixed + size_t(R) * H * E;
    int32_t *counts = reinterpret_cast<int32_t *>(neurons + size_t(R) * I);
    int32_t *visible = counts + R;
    float *own_space = reinterpret_cast<float *>(visible + size_t(R) * c.span);
    const int entry = entry_width(m);
    const size_t own_size = size_t(R) * entry + c.span + 2 * LANES + 2 * E;
    const float scale = 1.0f / std::sqrt(float(E));

#ifdef _OPENMP
#pragma omp parallel num_threads(c.threads)
#endif
    {
#ifdef _OPENMP
        const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
#define TOGETHER _Pragma("omp barrier")
#else
        const int thread = 0, threads = 1;
#define TOGETHER
#endif
        float *flat = own_space + own_size * thread, *scores = flat + size_t(R) * entry;
        float *aside = scores + c.span + LANES;
        int from, to;

        share(R, 1, thread, threads, &from, &to);
        for (int r = from; r < to; r++) {
            if (c.residual)
                memcpy(x + size_t(r) * D, c.residual + size_t(r) * D, D * sizeof(float));
            else {
                const W *row = static_cast<const W *>(m.embedding) + size_t(c.ids[r]) * D;
                for (int d = 0; d < D; d++) x[size_t(r) * D + d] = widened(row[d]);
            }
            int count = 0;
            for (int p = 0; p < c.span; p++)
                if (c.mask[size_t(r) * c.span + p]) visible[size_t(r) * c.span + count++] = p;
            counts[r] = count;
        }
        TOGETHER

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
                    float *own = flat + size_t(r) * K;
                    if (is_entry) {
                        const W *row = static_cast<const W *>(m.embedding) + size_t(c.ids[r]) * D;
                        float *wide = own + D;  // the state goes there afterwards
                        for (int d = 0; d < D; d++) wide[d] = widened(row[d]);
                        normed(wide, static_cast<const W *>(m.entry_norm), D, m.eps, own);
                        own += D;
                    }
                    normed(x + size_t(r) * D, static_cast<const W *>(layer.attention_norm), D, m.eps,
                           own);
                }
                const void *weights[3] = {layer.query, layer.key, layer.value};
                const void *biases[3] = {layer.query_bias, layer.key_bias, layer.value_bias};
                const int sizes[3] = {H * E, J * E, J * E};
                int first = 0;
                share(wide, 8, thread, threads, &from, &to);
                for (int part = 0; part < 3; part++) {
                    const int a = from > first ? from - first : 0;
                    const int b = to - first < sizes[part] ? to - first : sizes[part];
                    const W *bias = static_cast<const W *>(biases[part]);
                    float *out = heads + first;
                    product(flat, static_cast<const W *>(weights[part]), R, K, a, b,
                            [=](int r, int o, float found) {
                                out[size_t(r) * wide + o] = bias ? found + widened(bias[o]) : found;
                            });
                    first += sizes[part];
                }
                TOGETHER
                share(c.B * J, 1, thread, threads, &from, &to);
                for (int task = from; task < to; task++) {
                    const int b = task / J, j = task % J;
                    const size_t origin = (size_t(c.slot[b]) * J + j) * c.max_len * E;
                    W *keys = static_cast<W *>(c.keys[l]) + origin;
                    W *values = static_cast<W *>(c.values[l]) + origin;
                    for (int t = 0; t < c.T; t++) {
                        const int r = b * c.T + t;
                        const size_t at = size_t(c.start[b]) + t;
                        if (at >= size_t(c.max_len)) continue;
                        float *key = heads + size_t(r) * wide + (H + j) * E;
                        const float *value = heads + size_t(r) * wide + (H + J + j) * E;
                        const float *table = c.rotary + size_t(c.position[r]) * 2 * E;
                        rotated(key, static_cast<const W *>(layer.key_norm), m.qk_eps, table, E, aside);
                        for (int e = 0; e < E; e++) {
                            put(keys + at * E + e, key[e]);
                            put(values + at * E + e, value[e]);
                        }
                    }
                    for (int t = 0; t < c.T; t++)
                        for (int g = 0; g < G; g++) {
                            const int r = b * c.T + t, h = j * G + g;
                            float *query = heads + size_t(r) * wide + h * E;
                            const float *table = c.rotary + size_t(c.position[r]) * 2 * E;
                            rotated(query, static_cast<const W *>(layer.query_norm), m.qk_eps, table, E,
                                    aside);
                            attend(query, keys, values, visible + size_t(r) * c.span, counts[r], E,
                                   scale, scores, mixed + (size_t(r) * H + h) * E);
                        }
                }
                TOGETHER
                const W *bias = static_cast<const W *>(layer.output_bias);
                const float *before = is_entry && m.is_residual_normed ? flat + D : x;
                const int stride = before == x ? D : K;
                share(D, 8, thread, threads, &from, &to);
                product(mixed, static_cast<const W *>(layer.output), R, H * E, from, to,
                        [=](int r, int o, float found) {
                            x[size_t(r) * D + o] = before[size_t(r) * stride + o] +
                                                   (bias ? found + widened(bias[o]) : found);
                        });
                TOGETHER
            }
            if (!c.mlp || c.mlp[l]) {
                for (int r = 0; r < R; r++)
                    normed(x + size_t(r) * D, static_cast<const W *>(layer.mlp_norm), D, m.eps,
                           flat + size_t(r) * D);
                share(I, 8, thread, threads, &from, &to);
                product(flat, static_cast<const W *>(layer.gate), R, D, from, to,
                        [=](int r, int o, float found) { neurons[size_t(r) * I + o] = found; });
                // silu(gate) * up, 16 at a time where the gates of a row lie side by side
                for (int r = 0; r < R; r++) {
                    float *row = neurons + size_t(r) * I;
                    for (int o = from; o < to; o += LANES) {
                        float part[LANES] = {};
                        const int n = to - o < LANES ? to - o : LANES;
                        memcpy(part, row + o, n * sizeof(float));
                        f16v gate = load(part);
                        store(part, gate / (exponential(-gate) + 1.0f));
                        memcpy(row + o, part, n * sizeof(float));
                    }
                }
                product(flat, static_cast<const W *>(layer.up), R, D, from, to,
                        [=](int r, int o, float found) { neurons[size_t(r) * I + o] *= found; });
                TOGETHER
                share(D, 8, thread, threads, &from, &to);
                product(neurons, static_cast<const W *>(layer.down), R, I, from, to,
                        [=](int r, int o, float found) { x[size_t(r) * D + o] += found; });
                TOGETHER
            }
        }
        if (c.last) {
            share(R, 1, thread, threads, &from, &to);
            memcpy(c.last + size_t(from) * D, x + size_t(from) * D, size_t(to - from) * D * sizeof(float));
        }
        if (c.num_asked || tap < c.num_taps) {
            const W *norm = static_cast<const W *>(m.norm);
            if (tap < c.num_taps) {
                share(R, 1, thread, threads, &from, &to);
                for (int r = from; r < to; r++)
                    normed(x + size_t(r) * D, norm, D, m.eps, c.tapped[tap] + size_t(r) * D);
            }
            for (int i = 0; i < c.num_asked; i++)
                normed(x + size_t(c.asked[i]) * D, norm, D, m.eps, flat + size_t(i) * D);
            float *logits = c.logits;
            const int V = m.V;
            share(V, 8, thread, threads, &from, &to);
            product(flat, static_cast<const W *>(m.head), c.num_asked, D, from, to,
                    [=](int r, int o, float found) { logits[size_t(r) * V + o] = found; });
        }
    }
    return NONE;
}

}  // namespace

extern "C" int step_float32(const Model *model, const Call *call) {
    return forward<float>(*model, *call);
}
extern "C" int step_bfloat16(const Model *model, const Call *call) {
    return forward<bf16>(*model, *call);
}
