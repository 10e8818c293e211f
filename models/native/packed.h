// Matrices whose numbers are those of a GGUF file, packed as tightly; each matrix is of its own kind.
// The inputs are rounded to 8 bits, with one scale for every 32 of them.
//
// Behind the first 64 bytes, which say the kind, stand for every 16 outputs, and for every 32 of
// their inputs one after another: the weights' lower bits, their higher ones, scales. 64 bytes are 16
// times the 4 numbers of an output for 4 inputs, of 4 bits for 8, the first 4 in the lower halves of
// the bytes. Of 64 bytes of fifth bits bit k stands for inputs 4 k on; of fifth and sixth ones there
// are twice 64. A scale is of half precision, and so is what is added to all weights of a scale; or
// both are wholes, times two numbers in half precision that stand in front of every 256 inputs.
// Sums over a scale's weights are whole, hence exact in any order; these are added in theirs.

#pragma once

namespace {

enum Kind : int32_t { FLOATS, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

struct Packed {
    int32_t kind, unused[15];
};

// Lower and higher bits of a weight; what is subtracted from it (OFFSET) or from its product with the
// scale (HAS_LEAST: a value of each scale); whether scales are wholes.
template <int LOWER, int HIGHER, int OFFSET_, bool HAS_LEAST_, bool HAS_WHOLES_> struct Layout {
    static constexpr int LOW = LOWER, HIGH = HIGHER, OFFSET = OFFSET_;
    static constexpr bool HAS_LEAST = HAS_LEAST_, HAS_WHOLES = HAS_WHOLES_;
    static constexpr int PARTS = HIGH == 2 ? 2 : 1;  // scales of 32 inputs
    static constexpr int HIGHER_AT = LOW * 64, WEIGHTS = HIGHER_AT + HIGH * 64;
    static constexpr int SCALES = SIDE * (HAS_WHOLES ? PARTS + HAS_LEAST : 2 * (1 + HAS_LEAST));
    static constexpr int RECORD = WEIGHTS + SCALES;
    static constexpr int EVERY = HAS_WHOLES ? 8 : 1, FRONT = HAS_WHOLES ? SIDE * 2 * (1 + HAS_LEAST) : 0;
    // Products of two neighbours, of numbers up to 127, that 16 bits can add up.
    static constexpr int SAFE = LOW == 8 ? 1 : HIGH == 0 ? 8 : HIGH == 1 ? 4 : 2;
    static size_t strip(int G) { return size_t(G) * RECORD + size_t(G / EVERY) * FRONT; }
};

template <class F> inline auto with_layout(int32_t kind, F f) {
    switch (kind) {
    case Q4_0: return f(Layout<4, 0, 8, false, false>());
    case Q4_1: return f(Layout<4, 0, 0, true, false>());
    case Q5_0: return f(Layout<4, 1, 16, false, false>());
    case Q5_1: return f(Layout<4, 1, 0, true, false>());
    case Q8_0: return f(Layout<8, 0, 0, false, false>());
    case Q4_K: return f(Layout<4, 0, 0, true, true>());
    case Q5_K: return f(Layout<4, 1, 0, true, true>());
    default: return f(Layout<4, 2, 32, false, true>());
    }
}

inline constexpr int spans_of(int K) { return (K + 31) / 32; }

// The inputs as they are, and rounded: of each row K numbers of 8 bits; of every 32 their scale and,
// times that, their sum, and those of both halves; and -128 times the sum of the numbers.
template <> struct Rows<Packed> {
    const float *x;
    int8_t *numbers;
    float *scales, *sums, *halves;
    int32_t *offsets;
    int R, K, G;

    static constexpr int FLOATS_A_SPAN = 32 / 4 + 5;  // that they take
    static constexpr float LEAST = 1e-30f;  // what is smaller is zero

    Rows(const float *inputs, int rows, int width, float *space)
        : x(inputs), R(rows), K(width), G(spans_of(width)) {
        scales = space;
        sums = scales + size_t(rows) * G;
        halves = sums + size_t(rows) * G;
        offsets = reinterpret_cast<int32_t *>(halves + 2 * size_t(rows) * G);
        numbers = reinterpret_cast<int8_t *>(offsets + size_t(rows) * G);
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < G; g++) {
                const float *from = inputs + r * apart(width) + g * 32;
                const int count = width - g * 32;
                float part[32] = {};
                if (count < 32) memcpy(part, from, count * sizeof(float));
                round(count < 32 ? part : from, size_t(r) * G + g);
            }
    }

    void round(const float *part, size_t at) {
        int8_t *out = numbers + at * 32;
#ifdef __AVX2__
        const float largest = largest_of<32>(part), up = largest > LEAST ? 127.0f / largest : 0.0f;
        int32_t added[2];
        round_32(part, up, out, added);
#else
        float largest = 0;
        for (int i = 0; i < 32; i++) largest = std::fabs(part[i]) > largest ? std::fabs(part[i]) : largest;
        const float up = largest > LEAST ? 127.0f / largest : 0.0f;
        int32_t added[2] = {};
        for (int i = 0; i < 32; i++) {
            out[i] = int8_t(std::nearbyint(part[i] * up));
            added[i / 16] += out[i];
        }
#endif
        scales[at] = largest / 127.0f;
        sums[at] = scales[at] * float(added[0] + added[1]);
        for (int i = 0; i < 2; i++) halves[2 * at + i] = scales[at] * float(added[i]);
        offsets[at] = -128 * (added[0] + added[1]);
    }
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
constexpr int PACKED_ROWS = 8;  // rows by 16 outputs that the registers hold at once

inline __m512 halves(const uint8_t *at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(at)));
}
template <bool IS_SIGNED> inline __m512 wholes(const uint8_t *at) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(at));
    return _mm512_cvtepi32_ps(IS_SIGNED ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}

// Of 16 outputs the weights of inputs 4 k on, of 8 bits.
template <class L> inline __m512i weights_at(const uint8_t *w, int k) {
    // One factor of a product has no sign: weights that have one are given 128 more (see `offsets`).
    if constexpr (L::LOW == 8) return _mm512_xor_si512(_mm512_loadu_si512(w + k * 64), _mm512_set1_epi8(-128));
    const __m512i two = _mm512_loadu_si512(w + k / 2 * 64);
    const __m512i low = (k % 2 ? _mm512_srli_epi16(two, 4) : two) & _mm512_set1_epi8(15);
    if constexpr (L::HIGH == 0) return low;
    const int to = 4, from = L::HIGH == 1 ? k : k % 4 * 2;  // places of the bit in its byte
    const __m512i all = _mm512_loadu_si512(w + L::HIGHER_AT + (L::HIGH == 2 ? k / 4 * 64 : 0));
    const __m512i moved = from < to ? _mm512_slli_epi16(all, to - from) : _mm512_srli_epi16(all, from - to);
    return low | (moved & _mm512_set1_epi8(L::HIGH == 1 ? 16 : 48));
}

// Sixteen outputs of N rows: out [N, 16]. Meanwhile weights come: the next sixteen outputs', or, of rows so
// many that the products take longer than the memory, those of the next page, into the first cache.
template <class L, int N>
void packed_tile(const Rows<Packed> &x, int r, const uint8_t *w, bool prefetches, float *out) {
    constexpr bool IS_SLOW = N > 4;
    const size_t next = !prefetches ? 0 : IS_SLOW ? PAGE : L::strip(x.G);
    const ptrdiff_t apart = ptrdiff_t(x.G) * 32;  // rows
    __m512 sum[N] = {}, front = {}, least_front = {};
    for (int g = 0; g < x.G; g++, w += L::RECORD) {
        if (L::HAS_WHOLES && g % L::EVERY == 0) {
            front = halves(w);
            if (L::HAS_LEAST) least_front = halves(w + 32);
            w += L::FRONT;
        }
        if (next)
            for (int line = 0; line < L::RECORD; line += LINE) __builtin_prefetch(w + next + line, 0, IS_SLOW ? 3 : CACHE);
        const int8_t *own = x.numbers + (size_t(r) * x.G + g) * 32;
        const uint8_t *scales = w + L::WEIGHTS;
#pragma GCC unroll 2
        for (int part = 0; part < L::PARTS; part++) {
            __m512i total[N] = {};
            if (L::LOW == 8)
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) total[n] = _mm512_set1_epi32(x.offsets[ptrdiff_t(r + n) * x.G + g]);
#pragma GCC unroll 8
            for (int k = part * 8 / L::PARTS; k < (part + 1) * 8 / L::PARTS; k++) {
                const __m512i wide = weights_at<L>(w, k);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    int32_t four;
                    memcpy(&four, own + n * apart + 4 * k, 4);
                    total[n] = _mm512_dpbusd_epi32(total[n], wide, _mm512_set1_epi32(four));
                }
            }
            __m512 scale, least = {};
            if (L::HAS_WHOLES) {
                scale = front * wholes<!L::HAS_LEAST>(scales + SIDE * part);
                if (L::HAS_LEAST) least = -(least_front * wholes<false>(scales + SIDE));
            } else {
                scale = halves(scales);
                if (L::HAS_LEAST) least = halves(scales + 32);
            }
            if (L::OFFSET) least = scale * float(-L::OFFSET);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const ptrdiff_t at = ptrdiff_t(r + n) * x.G + g;
                const __m512 both = scale * x.scales[at];
                sum[n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(total[n]), both, sum[n]);
                if (L::OFFSET || L::HAS_LEAST) {
                    const float *added = L::PARTS == 2 ? x.halves + 2 * at + part : x.sums + at;
                    sum[n] = _mm512_fmadd_ps(least, _mm512_set1_ps(*added), sum[n]);
                }
            }
        }
    }
    for (int n = 0; n < N; n++) _mm512_storeu_ps(out + n * SIDE, sum[n]);
}
#elif defined(__AVX2__) && defined(__F16C__)
constexpr int PACKED_ROWS = 4;

inline __m256 halves(const uint8_t *at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(at)));
}
template <bool IS_SIGNED> inline __m256 wholes(const uint8_t *at) {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(at));
    return _mm256_cvtepi32_ps(IS_SIGNED ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight));
}

// Of half `m` of the 16 outputs the weights of inputs 4 k on, of 8 bits.
template <class L> inline __m256i weights_at(const uint8_t *w, int k, int m) {
    const auto line = [=](int at) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(w + at + m * 32));
    };
    if constexpr (L::LOW == 8) return line(k * 64);
    const __m256i two = line(k / 2 * 64);
    const __m256i low = _mm256_and_si256(k % 2 ? _mm256_srli_epi16(two, 4) : two, _mm256_set1_epi8(15));
    if constexpr (L::HIGH == 0) return low;
    const int to = 4, from = L::HIGH == 1 ? k : k % 4 * 2;  // places of the bit in its byte
    const __m256i all = line(L::HIGHER_AT + (L::HIGH == 2 ? k / 4 * 64 : 0));
    const __m256i moved = from < to ? _mm256_slli_epi16(all, to - from) : _mm256_srli_epi16(all, from - to);
    return _mm256_or_si256(low, _mm256_and_si256(moved, _mm256_set1_epi8(L::HIGH == 1 ? 16 : 48)));
}

// Sixteen outputs of N rows: out [N, 16]. Meanwhile the next sixteen outputs' weights come.
template <class L, int N>
void packed_tile(const Rows<Packed> &x, int r, const uint8_t *w, bool prefetches, float *out) {
    const __m256i ones = _mm256_set1_epi16(1);
    const size_t next = prefetches ? L::strip(x.G) : 0;
    const ptrdiff_t apart = ptrdiff_t(x.G) * 32;  // rows
    __m256 sum[N][2] = {}, front[2] = {}, least_front[2] = {};
    for (int g = 0; g < x.G; g++, w += L::RECORD) {
        if (L::HAS_WHOLES && g % L::EVERY == 0) {
            for (int m = 0; m < 2; m++) {
                front[m] = halves(w + 16 * m);
                if (L::HAS_LEAST) least_front[m] = halves(w + 32 + 16 * m);
            }
            w += L::FRONT;
        }
        if (next)
            for (int line = 0; line < L::RECORD; line += LINE) __builtin_prefetch(w + next + line, 0, CACHE);
        const int8_t *own = x.numbers + (size_t(r) * x.G + g) * 32;
        const uint8_t *scales = w + L::WEIGHTS;
#pragma GCC unroll 2
        for (int part = 0; part < L::PARTS; part++) {
            __m256i total[N][2] = {};
#pragma GCC unroll 8
            for (int k = part * 8 / L::PARTS; k < (part + 1) * 8 / L::PARTS; k += L::SAFE) {
                __m256i two[N][2];
#pragma GCC unroll 8
                for (int i = 0; i < L::SAFE; i++) {
                    const __m256i wide[2] = {weights_at<L>(w, k + i, 0), weights_at<L>(w, k + i, 1)};
#pragma GCC unroll 8
                    for (int n = 0; n < N; n++) {
                        int32_t four;
                        memcpy(&four, own + n * apart + 4 * (k + i), 4);
                        const __m256i row = _mm256_set1_epi32(four);
#pragma GCC unroll 2
                        for (int m = 0; m < 2; m++) {
                            const __m256i product =
                                L::LOW == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(wide[m]),
                                                                   _mm256_sign_epi8(row, wide[m]))
                                            : _mm256_maddubs_epi16(wide[m], row);
                            two[n][m] = i ? _mm256_add_epi16(two[n][m], product) : product;
                            settle(two[n][m]);
                        }
                    }
                }
#pragma GCC unroll 8
                for (int n = 0; n < N; n++)
#pragma GCC unroll 2
                    for (int m = 0; m < 2; m++) {
                        total[n][m] = _mm256_add_epi32(total[n][m], _mm256_madd_epi16(two[n][m], ones));
                        settle(total[n][m]);
                    }
            }
#pragma GCC unroll 2
            for (int m = 0; m < 2; m++) {
                __m256 scale, least = {};
                if (L::HAS_WHOLES) {
                    scale = front[m] * wholes<!L::HAS_LEAST>(scales + SIDE * part + 8 * m);
                    if (L::HAS_LEAST) least = -(least_front[m] * wholes<false>(scales + SIDE + 8 * m));
                } else {
                    scale = halves(scales + 16 * m);
                    if (L::HAS_LEAST) least = halves(scales + 32 + 16 * m);
                }
                if (L::OFFSET) least = scale * float(-L::OFFSET);
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    const ptrdiff_t at = ptrdiff_t(r + n) * x.G + g;
                    const __m256 both = scale * x.scales[at];
                    sum[n][m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(total[n][m]), both, sum[n][m]);
                    if (L::OFFSET || L::HAS_LEAST) {
                        const float *added = L::PARTS == 2 ? x.halves + 2 * at + part : x.sums + at;
                        sum[n][m] = _mm256_fmadd_ps(least, _mm256_set1_ps(*added), sum[n][m]);
                    }
                }
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int m = 0; m < 2; m++) _mm256_storeu_ps(out + n * SIDE + m * 8, sum[n][m]);
}
#else
constexpr int PACKED_ROWS = 4;

inline float half_at(const uint8_t *at) {
    const uint32_t bits = at[0] | at[1] << 8, size = bits >> 10 & 31, rest = bits & 1023;
    const float value = size == 31 ? (rest ? NAN : INFINITY)
                        : size     ? std::ldexp(float(1024 + rest), int(size) - 25)
                                   : std::ldexp(float(rest), -24);
    return bits >> 15 ? -value : value;
}

template <class L> inline int weight_at(const uint8_t *w, int i, int o) {
    const int k = i / 4, at = o * 4 + i % 4;
    if (L::LOW == 8) return int8_t(w[k * 64 + at]);
    const int low = k % 2 ? w[k / 2 * 64 + at] >> 4 : w[k / 2 * 64 + at] & 15;
    if (L::HIGH == 0) return low;
    if (L::HIGH == 1) return low | (w[L::HIGHER_AT + at] >> k & 1) << 4;
    return low | (w[L::HIGHER_AT + k / 4 * 64 + at] >> k % 4 * 2 & 3) << 4;
}

template <class L, int N>
void packed_tile(const Rows<Packed> &x, int r, const uint8_t *w, bool, float *out) {
    constexpr int EACH = 32 / L::PARTS;
    for (int n = 0; n < N * SIDE; n++) out[n] = 0;
    const uint8_t *front = w;
    for (int g = 0; g < x.G; g++, w += L::RECORD) {
        if (L::HAS_WHOLES && g % L::EVERY == 0) {
            front = w;
            w += L::FRONT;
        }
        const uint8_t *scales = w + L::WEIGHTS;
        for (int part = 0; part < L::PARTS; part++)
            for (int o = 0; o < SIDE; o++) {
                float scale, least = 0;
                if (L::HAS_WHOLES) {
                    const int own = scales[SIDE * part + o];
                    scale = half_at(front + 2 * o) * float(L::HAS_LEAST ? own : int8_t(own));
                    if (L::HAS_LEAST) least = -(half_at(front + 32 + 2 * o) * float(scales[SIDE + o]));
                } else {
                    scale = half_at(scales + 2 * o);
                    if (L::HAS_LEAST) least = half_at(scales + 32 + 2 * o);
                }
                if (L::OFFSET) least = scale * float(-L::OFFSET);
                for (int n = 0; n < N; n++) {
                    const size_t at = size_t(r + n) * x.G + g;
                    int32_t whole = 0;
                    for (int i = part * EACH; i < (part + 1) * EACH; i++)
                        whole += weight_at<L>(w, i, o) * x.numbers[at * 32 + i];
                    const float added = L::PARTS == 2 ? x.halves[2 * at + part] : x.sums[at];
                    float &sum = out[n * SIDE + o];
                    sum = std::fma(float(whole), scale * x.scales[at], sum);
                    if (L::OFFSET || L::HAS_LEAST) sum = std::fma(least, added, sum);
                }
            }
    }
}
#endif

typedef void (*Tile)(const Rows<Packed> &, int, const uint8_t *, bool, float *);

// That of a kind and a number of rows.
inline Tile tile_of(int32_t kind, int rows) {
    Tile found = nullptr;
    with_layout(kind, [&](auto layout) {
        with_constant<PACKED_ROWS>(rows, [&](auto count) {
            found = packed_tile<decltype(layout), decltype(count)::value>;
        });
    });
    return found;
}

// Outputs [from, to) of all rows.
template <class Keep>
inline void product(const Rows<Packed> &x, const Packed *weights, int from, int to, Keep keep) {
    const uint8_t *w = reinterpret_cast<const uint8_t *>(weights + 1);
    if (from >= to) return;
    if (weights->kind == FLOATS) {
        for (int r = 0; r < x.R; r += MANY) {  // more rows would be summed in another order
            const int count = x.R - r < MANY ? x.R - r : MANY;
            product(Rows<float>(x.x + r * apart(x.K), count, x.K, nullptr), reinterpret_cast<const float *>(w),
                    from, to, [=](int n, int o, float found) { keep(r + n, o, found); });
        }
        return;
    }
    const size_t strip = with_layout(weights->kind, [&](auto layout) { return decltype(layout)::strip(x.G); });
    const int passes = (x.R + PACKED_ROWS - 1) / PACKED_ROWS;
    float out[PACKED_ROWS * SIDE];
    for (int o = from / SIDE * SIDE; o < to; o += SIDE)
        for (int pass = passes, r = 0; pass; pass--) {
            const int count = (x.R - r + pass - 1) / pass;
            tile_of(weights->kind, count)(x, r, w + o / SIDE * strip, r == 0 && o + SIDE < to, out);
            const int first = from > o ? from - o : 0, last = to - o < SIDE ? to - o : SIDE;
            for (int n = 0; n < count; n++)
                if (last - first == SIDE)  // of known length, these become registers
#pragma GCC unroll 16
                    for (int i = 0; i < SIDE; i++) keep(r + n, o + i, out[n * SIDE + i]);
                else
                    for (int i = first; i < last; i++) keep(r + n, o + i, out[n * SIDE + i]);
            r += count;
        }
}

}  // namespace
