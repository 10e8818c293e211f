// Draws: the argmax of scores plus Gumbel numbers, without computing most of these.
//
// A Gumbel number is -log(-log(1 - u)), u in (0, 1) a hash of counters (runtime/sampling/noise.py,
// with the same bits). It is below -log(u), which the exponent of u bounds: only where score and bound
// reach the best sum so far are logarithms taken, a few times in a thousand tokens. The best of the
// rounded sums is decided by sums in double precision unless two are closer than roundings may be.

#pragma once

namespace {

constexpr uint64_t HASH_STEP = 0x9E3779B97F4A7C15, HASH_1 = 0xBF58476D1CE4E5B9, HASH_2 = 0x94D049BB133111EB;
constexpr float BELOW_ONE = 1.0f - 0x1p-24f;
constexpr int AT_A_TIME = 64;

constexpr int DRAFT = 4;  // the stream of drafts

inline uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 32)) * HASH_1;
    x = (x ^ (x >> 29)) * HASH_2;
    return x ^ (x >> 32);
}

inline uint64_t key_of(int64_t seed, int stream, int64_t counter) {
    const uint64_t own = mixed(uint64_t(seed) * HASH_STEP + HASH_STEP) ^ uint64_t(stream);
    return mixed(own + uint64_t(counter) * HASH_STEP);
}

inline uint64_t key_within(uint64_t key, int64_t inner) { return mixed(key + uint64_t(inner) * HASH_STEP); }

// u; it may be rounded up to 1.
inline float uniform(uint64_t key, uint64_t code) {
    uint64_t x = (key ^ code) * HASH_1;
    x = (x ^ (x >> 32)) * HASH_2;
    return (float(int64_t(x >> 24)) + 0.5f) * 0x1p-40f;
}

inline double gumbel(float u) {
    return -std::log(-std::log1p(-double(u < BELOW_ONE ? u : BELOW_ONE)));
}

// What no sum of score and Gumbel number exceeds, of up to AT_A_TIME tokens, by a wide margin of rounding.
inline void bounds(const float *score, uint64_t key, const int64_t *code, int count, float *most) {
    float u[AT_A_TIME];
    int32_t bits[AT_A_TIME];
#pragma omp simd
    for (int i = 0; i < count; i++) u[i] = uniform(key, uint64_t(code[i]));
    memcpy(bits, u, count * sizeof(float));
#pragma omp simd
    for (int i = 0; i < count; i++) most[i] = score[i] + (float(127 - (bits[i] >> 23)) * 0.693148f + 0.001f);
}

// The best score; whether each of them is a number below infinity.
bool best_of(const float *score, int V, float *best) {
    float top = -INFINITY;
    int unknown = 0;
#pragma omp simd reduction(max : top) reduction(| : unknown)
    for (int v = 0; v < V; v++) {
        unknown |= !(score[v] < INFINITY);
        top = score[v] > top ? score[v] : top;
    }
    *best = top;
    return !unknown;
}

// The token; -1 where roundings decide, or a score is no number below infinity.
int64_t drawn(const float *score, uint64_t key, const int64_t *code, int V) {
    float top;
    int at = 0;
    if (!best_of(score, V, &top)) return -1;
    if (top == -INFINITY) return 0;
    while (score[at] != top) at++;
    const double near = 1e-4 + 1e-6 * std::fabs(double(top));  // more than what is rounded off
    auto sum = [=](int v) {
        return score[v] + gumbel(uniform(key, uint64_t(code[v])));
    };
    double best = sum(at), second = -INFINITY;
    for (int first = 0; first < V; first += AT_A_TIME) {
        const int count = V - first < AT_A_TIME ? V - first : AT_A_TIME;
        float most[AT_A_TIME];
        bounds(score + first, key, code + first, count, most);
        for (int i = 0; i < count; i++) {
            if (most[i] < best - near || first + i == at) continue;
            const double own = sum(first + i);
            if (own > best)
                second = best, best = own, at = first + i;
            else if (own > second)
                second = own;
        }
    }
    return best - second > near ? at : -1;
}

}  // namespace

// Where the keys of B rows of M draws come from: seed and counter of the row, to which `first` and
// `depth` [B, M] are added (null: the draw's own number where `is_chain`), and then, unless negative,
// `inner` and on.
struct Draws {
    int32_t B, M, V, stream, is_chain;
    int64_t first, inner;
    const int64_t *seed, *counter, *depth, *code;
    const float *score;
    int64_t *token;
};

// Draws B M tokens; how many could not be decided.
extern "C" int draw(const Draws *draws) {
    const Draws &d = *draws;
    int unknown = 0;
    for (int64_t r = 0; r < int64_t(d.B) * d.M; r++) {
        const int64_t b = r / d.M, m = r % d.M;
        const int64_t further = d.first + (d.depth ? d.depth[r] : d.is_chain ? m : 0);
        uint64_t key = key_of(d.seed[b], d.stream, d.counter[b] + further);
        if (d.inner >= 0) key = key_within(key, d.inner + m);
        d.token[r] = drawn(d.score + r * d.V, key, d.code, d.V);
        unknown += d.token[r] < 0;
    }
    return unknown;
}
