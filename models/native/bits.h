// Matrices of whole numbers: 8 or 4 bits a weight, and of a group of 64 inputs one scale, of 4 bits
// also what a 0 stands for. The inputs are rounded to 8 bits and one scale a group, as they are read.
//
// Of 16 outputs and a group, in this order: the weights, of 8 bits each plus 128; then the 16 scales;
// of 4 bits what 0 stands for, 16 times. 64 bytes are 16 times the 4 weights of an output, for 4
// inputs; of 4 bits for 8, the first 4 in the lower halves of the bytes. Sums over a group are whole,
// hence exact in any order; the groups are added in theirs.

#pragma once

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int GROUP = 64, SIDE = 16, LINE_16 = SIDE * sizeof(float);

template <int N> struct Bits {
    static constexpr int STEP = 32 / N;  // inputs that 64 bytes are for
    static constexpr int WEIGHTS = GROUP / STEP * 64, RECORD = WEIGHTS + (N == 4 ? 2 : 1) * LINE_16;
    uint8_t byte;
};
typedef Bits<8> Int8;
typedef Bits<4> Int4;

// Of which kind the LM head is.
template <class M> struct HeadOf {
    typedef M type;
};
template <> struct HeadOf<Int4> {
    typedef Int8 type;
};

template <int N> using Constant = std::integral_constant<int, N>;

// What the registers hold at once: rows by 16 outputs; and more rows by 16 outputs alone, which are
// taken where the weights then pass by less often.
#ifdef __AVX512VNNI__
constexpr int MANY_ROWS = 6, FEW_SIDES = 2, FEW_ROWS = 3, MANY_SIDES = 4, MOST_AT_ONCE = 8;
#else
constexpr int MANY_ROWS = 4, FEW_SIDES = 1, FEW_ROWS = 1, MANY_SIDES = 2, MOST_AT_ONCE = 4;
#endif

#ifdef __AVX2__
// A sum is taken here. Compilers put off the additions of whole numbers otherwise, and have no
// registers for all the products.
inline void settle(__m256i &sum) { asm("" : "+x"(sum)); }

template <int COUNT> inline float largest_of(const float *x) {
    const __m256 size = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
    __m256 most = _mm256_setzero_ps();
    for (int i = 0; i < COUNT; i += 8) most = _mm256_max_ps(most, _mm256_and_ps(_mm256_loadu_ps(x + i), size));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}

// 32 numbers times `up` as wholes of 8 bits, and the sums of the first and the last 16.
inline void round_32(const float *x, float up, int8_t *out, int32_t sums[2]) {
    __m256i half[2];
    for (int i = 0; i < 2; i++) {
        const __m256i a = _mm256_cvtps_epi32(_mm256_loadu_ps(x + 16 * i) * up);
        const __m256i b = _mm256_cvtps_epi32(_mm256_loadu_ps(x + 16 * i + 8) * up);
        half[i] = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
        const __m256i eight = _mm256_madd_epi16(half[i], _mm256_set1_epi16(1));
        __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
        sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
        sums[i] = _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
    }
    const __m256i all = _mm256_permute4x64_epi64(_mm256_packs_epi16(half[0], half[1]), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(out), all);
}
#endif

inline constexpr int groups_of(int K) { return (K + GROUP - 1) / GROUP; }

// Rounded: of each row K numbers of 8 bits; of each group its scale, its sum, and -128 times the sum
// of its numbers.
template <int BITS> struct Rows<Bits<BITS>> {
    int8_t *numbers;
    float *scales, *sums;
    int32_t *offsets;
    int R, K, G;

    Rows(const float *x, int rows, int width, float *space) : R(rows), K(width), G(groups_of(width)) {
        scales = space;
        sums = scales + size_t(rows) * G;
        offsets = reinterpret_cast<int32_t *>(sums + size_t(rows) * G);
        numbers = reinterpret_cast<int8_t *>(offsets + size_t(rows) * G);
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < G; g++) {
                const int rest = width - g * GROUP;
                round(x + r * apart(width) + g * GROUP, rest < GROUP ? rest : GROUP, r * G + g);
            }
    }

    void round(const float *x, int count, size_t at) {
        float part[GROUP] = {};
        memcpy(part, x, count * sizeof(float));
#ifdef __AVX512F__
        __m512 most = _mm512_setzero_ps();
        for (int i = 0; i < GROUP; i += LANES) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(part + i)));
        const float largest = _mm512_reduce_max_ps(most), up = largest > 0 ? 127.0f / largest : 0.0f;
        __m512i added = _mm512_setzero_si512();
        for (int i = 0; i < GROUP; i += LANES) {
            const __m512i whole = _mm512_cvtps_epi32(_mm512_loadu_ps(part + i) * up);
            added = _mm512_add_epi32(added, whole);
            _mm_storeu_si128(reinterpret_cast<__m128i *>(numbers + at * GROUP + i), _mm512_cvtepi32_epi8(whole));
        }
        const int32_t sum = _mm512_reduce_add_epi32(added);
#elif defined(__AVX2__)
        const float largest = largest_of<GROUP>(part), up = largest > 0 ? 127.0f / largest : 0.0f;
        int32_t halves[4];
        round_32(part, up, numbers + at * GROUP, halves);
        round_32(part + 32, up, numbers + at * GROUP + 32, halves + 2);
        const int32_t sum = halves[0] + halves[1] + halves[2] + halves[3];
#else
        float largest = 0;
        for (int i = 0; i < GROUP; i++) largest = std::fabs(part[i]) > largest ? std::fabs(part[i]) : largest;
        const float up = largest > 0 ? 127.0f / largest : 0.0f;
        int32_t sum = 0;
        for (int i = 0; i < GROUP; i++) {
            const int32_t whole = int32_t(std::nearbyint(part[i] * up));
            numbers[at * GROUP + i] = int8_t(whole);
            sum += whole;
        }
#endif
        scales[at] = largest / 127.0f;
        sums[at] = scales[at] * float(sum);
        offsets[at] = -128 * sum;
    }
};

// Of N rows and M times 16 outputs.
template <int N, int M, int BITS>
inline void whole_tile(const Rows<Bits<BITS>> &x, int r, const uint8_t *w, float out[N][M * SIDE]) {
    typedef Bits<BITS> Kind;
    constexpr int RECORD = Kind::RECORD, STEP = Kind::STEP;
    const size_t stride = size_t(x.G) * RECORD;
#ifdef __AVX512VNNI__
    constexpr int NEAR = M == MANY_SIDES ? 2 : 3;  // the cache into which the weights of the next M are prefetched
    const __m512i low = _mm512_set1_epi8(15);
    __m512 sum[N][M] = {};
    for (int g = 0; g < x.G; g++, w += RECORD) {
        __m512i part[N][M];
        const int8_t *own[N];
        for (int n = 0; n < N; n++) {
            const size_t at = size_t(r + n) * x.G + g;
            own[n] = x.numbers + at * GROUP;
            for (int m = 0; m < M; m++) part[n][m] = _mm512_set1_epi32(BITS == 8 ? x.offsets[at] : 0);
        }
#pragma GCC unroll 4
        for (int k = 0; k < GROUP / STEP; k++) {
            __m512i line[M];
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                line[m] = _mm512_loadu_si512(w + m * stride + k * 64);
                __builtin_prefetch(w + (M + m) * stride + k * 64, 0, NEAR);
            }
#pragma GCC unroll 2
            for (int half = 0; half < STEP / 4; half++) {
                __m512i wide[M];
#pragma GCC unroll 8
                for (int m = 0; m < M; m++)
                    wide[m] = BITS == 8 ? line[m] : (half ? _mm512_srli_epi16(line[m], 4) : line[m]) & low;
#pragma GCC unroll 8
                for (int n = 0; n < N; n++) {
                    int32_t four;
                    memcpy(&four, own[n] + STEP * k + 4 * half, 4);
                    const __m512i row = _mm512_set1_epi32(four);
#pragma GCC unroll 8
                    for (int m = 0; m < M; m++) part[n][m] = _mm512_dpbusd_epi32(part[n][m], wide[m], row);
                }
            }
        }
        for (int m = 0; m < M; m++) {
            const __m512 scale = _mm512_loadu_ps(w + m * stride + Kind::WEIGHTS);
            const __m512 least = BITS == 8 ? scale : _mm512_loadu_ps(w + m * stride + Kind::WEIGHTS + LINE_16);
            for (int n = 0; n < N; n++) {
                const size_t at = size_t(r + n) * x.G + g;
                const __m512 both = scale * x.scales[at];
                sum[n][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(part[n][m]), both, sum[n][m]);
                if (BITS == 4) sum[n][m] = _mm512_fmadd_ps(least, _mm512_set1_ps(x.sums[at]), sum[n][m]);
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int m = 0; m < M; m++) _mm512_storeu_ps(out[n] + m * SIDE, sum[n][m]);
#elif defined(__AVX2__)
    // Of 8 bits |weight| times the input under the weight's sign: two such products fit into 16 bits;
    // of 4 bits, as they are, 16.
    const __m256i middle = _mm256_set1_epi8(-128), low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    constexpr int LINES = BITS == 8 ? 1 : 4;  // whose products 16 bits add up
    __m256 sum[N][2 * M] = {};
    for (int g = 0; g < x.G; g++, w += RECORD) {
        if (r == 0)  // the first of all rows to see these weights: the next ones come
            for (int m = 0; m < M; m++)
                for (int line = 0; line < RECORD; line += 64)
                    __builtin_prefetch(w + (M + m) * stride + line, 0, 2);
        __m256i part[N][2 * M] = {};
        const int8_t *own[N];
        for (int n = 0; n < N; n++) own[n] = x.numbers + (size_t(r + n) * x.G + g) * GROUP;
#pragma GCC unroll 2
        for (int first = 0; first < GROUP / STEP; first += LINES) {
            __m256i two[N][2 * M];
#pragma GCC unroll 4
            for (int k = first; k < first + LINES; k++)
#pragma GCC unroll 2
                for (int half = 0; half < STEP / 4; half++) {
                    __m256i wide[2 * M];
#pragma GCC unroll 4
                    for (int m = 0; m < 2 * M; m++) {
                        const uint8_t *at = w + m / 2 * stride + k * 64 + m % 2 * 32;
                        const __m256i line = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(at));
                        wide[m] = BITS == 8 ? _mm256_xor_si256(line, middle)
                                            : _mm256_and_si256(half ? _mm256_srli_epi16(line, 4) : line, low);
                    }
#pragma GCC unroll 4
                    for (int n = 0; n < N; n++) {
                        int32_t four;
                        memcpy(&four, own[n] + STEP * k + 4 * half, 4);
                        const __m256i row = _mm256_set1_epi32(four);
#pragma GCC unroll 4
                        for (int m = 0; m < 2 * M; m++) {
                            const __m256i product =
                                BITS == 8 ? _mm256_maddubs_epi16(_mm256_abs_epi8(wide[m]),
                                                                 _mm256_sign_epi8(row, wide[m]))
                                          : _mm256_maddubs_epi16(wide[m], row);
                            two[n][m] = k > first || half ? _mm256_add_epi16(two[n][m], product) : product;
                            if (BITS == 4) settle(two[n][m]);
                        }
                    }
                }
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
#pragma GCC unroll 4
                for (int m = 0; m < 2 * M; m++) {
                    part[n][m] = _mm256_add_epi32(part[n][m], _mm256_madd_epi16(two[n][m], ones));
                    settle(part[n][m]);
                }
        }
#pragma GCC unroll 4
        for (int m = 0; m < 2 * M; m++) {
            const uint8_t *at = w + m / 2 * stride + Kind::WEIGHTS + m % 2 * 32;
            const __m256 scale = _mm256_loadu_ps(reinterpret_cast<const float *>(at));
            const __m256 least =
                BITS == 8 ? scale : _mm256_loadu_ps(reinterpret_cast<const float *>(at + LINE_16));
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                const size_t group = size_t(r + n) * x.G + g;
                const __m256 both = scale * x.scales[group];
                sum[n][m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(part[n][m]), both, sum[n][m]);
                if (BITS == 4) sum[n][m] = _mm256_fmadd_ps(least, _mm256_set1_ps(x.sums[group]), sum[n][m]);
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int m = 0; m < 2 * M; m++) _mm256_storeu_ps(out[n] + m * 8, sum[n][m]);
#else
    for (int n = 0; n < N; n++)
        for (int o = 0; o < M * SIDE; o++) {
            float sum = 0;
            for (int g = 0; g < x.G; g++) {
                const uint8_t *record = w + o / SIDE * stride + size_t(g) * RECORD;
                const size_t at = size_t(r + n) * x.G + g;
                int32_t part = BITS == 8 ? x.offsets[at] : 0;
                for (int i = 0; i < GROUP; i++) {
                    const int both = record[i / STEP * 64 + o % SIDE * 4 + i % 4];
                    const int weight = BITS == 8 ? both : i % 8 < 4 ? both & 15 : both >> 4;
                    part += weight * x.numbers[at * GROUP + i];
                }
                float scale, least;
                const uint8_t *own = record + Kind::WEIGHTS + o % SIDE * sizeof(float);
                memcpy(&scale, own, sizeof scale);
                sum = std::fma(float(part), scale * x.scales[at], sum);
                if (BITS == 8) continue;
                memcpy(&least, own + LINE_16, sizeof least);
                sum = std::fma(least, x.sums[at], sum);
            }
            out[n][o] = sum;
        }
#endif
}

// Outputs [from, to) of all rows.
template <int BITS, class Keep>
inline void product(const Rows<Bits<BITS>> &x, const Bits<BITS> *weights, int from, int to, Keep keep) {
    const uint8_t *w = reinterpret_cast<const uint8_t *>(weights);
    const size_t stride = size_t(x.G) * Bits<BITS>::RECORD;
    auto tiles = [&](auto rows, auto sides, int r, int o) {
        constexpr int N = decltype(rows)::value, M = decltype(sides)::value;
        float out[N][M * SIDE];
        whole_tile<N, M>(x, r, w + o / SIDE * stride, out);
        for (int n = 0; n < N; n++)
            for (int i = 0; i < M * SIDE; i++)
                if (o + i >= from && o + i < to) keep(r + n, o + i, out[n][i]);
    };
    auto strip = [&](auto rows, auto sides, int o) {
        constexpr int N = decltype(rows)::value;
        const int passes = (x.R + N - 1) / N;
        for (int pass = passes, r = 0; pass; pass--)
            with_constant<N>((x.R - r + pass - 1) / pass, [&](auto count) {
                tiles(count, sides, r, o);
                r += decltype(count)::value;
            });
    };
    const int end = (to + SIDE - 1) / SIDE * SIDE;
    int o = from / SIDE * SIDE;
    if (x.R <= FEW_ROWS)
        for (; o + MANY_SIDES * SIDE <= end; o += MANY_SIDES * SIDE)
            strip(Constant<FEW_ROWS>(), Constant<MANY_SIDES>(), o);
    if ((x.R + MOST_AT_ONCE - 1) / MOST_AT_ONCE < (x.R + MANY_ROWS - 1) / MANY_ROWS)
        for (; o < end; o += SIDE) strip(Constant<MOST_AT_ONCE>(), Constant<1>(), o);
    for (; o + FEW_SIDES * SIDE <= end; o += FEW_SIDES * SIDE)
        strip(Constant<MANY_ROWS>(), Constant<FEW_SIDES>(), o);
    for (; o < end; o += SIDE) strip(Constant<MANY_ROWS>(), Constant<1>(), o);
}

}  // namespace
