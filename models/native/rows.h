// The inputs of a product: float32 as they lie; for matrices in bfloat16, where the processor has
// instructions for that, rounded to bfloat16.

#pragma once

#include "tiles.h"

namespace {

// Rows of inputs lie this far apart: at a power of two they would share few places of the cache.
inline constexpr size_t apart(size_t K) { return (K + LANES - 1) / LANES * LANES + LANES; }
inline constexpr size_t apart_narrow(size_t K) { return (K + PAIRS - 1) / PAIRS * PAIRS + PAIRS; }

// How inputs lie, and how many of them a step of a product takes.
template <class X> struct Inputs {
    static constexpr int STEP = LANES;
    static constexpr size_t apart(size_t K) { return ::apart(K); }
};
template <> struct Inputs<bf16> {
    static constexpr int STEP = PAIRS;
    static constexpr size_t apart(size_t K) { return apart_narrow(K); }
};

template <class W> struct Rows {
    typedef Inputs<float> Own;
    const float *x;
    int R, K;
    Rows(const float *inputs, int rows, int width, float *) : x(inputs), R(rows), K(width) {}
};

#ifdef __AVX512BF16__
// Behind the last input of a row there are zeros up to a whole step, but where they lie in tiles.
template <> struct Rows<bf16> {
    typedef Inputs<bf16> Own;
    const bf16 *x;
    int R, K;
    bool in_tiles;

    Rows(const float *inputs, int rows, int width, float *space)
        : R(rows), K(width), in_tiles(has_tiles() && width % PAIRS == 0) {
        bf16 *narrow = reinterpret_cast<bf16 *>(aligned(space));
        x = narrow;
        if (in_tiles)
            for_tiles(inputs, narrow);
        else
            for_steps(inputs, narrow);
    }

  private:
    void for_steps(const float *inputs, bf16 *narrow) const {
        const int width = K;
        for (int r = 0; r < R; r++)
            for (int k = 0; k < width; k += LANES) {
                const __mmask16 there = width - k < LANES ? (1u << (width - k)) - 1 : 0xffff;
                const __m512 part = _mm512_maskz_loadu_ps(there, inputs + r * apart(width) + k);
                const __m256i half = __m256i(_mm512_cvtneps_pbh(part));
                bf16 *at = narrow + r * apart_narrow(width) + k;
                _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), half);
                if (k + LANES >= width && width % PAIRS && width % PAIRS <= LANES)
                    _mm256_storeu_si256(reinterpret_cast<__m256i *>(at + LANES), __m256i{});
            }
    }

    // [K / 2, rows, 2] of each EDGE rows.
    void for_tiles(const float *inputs, bf16 *narrow) const {
        for (int first = 0; first < R; first += EDGE, narrow += size_t(EDGE) * K) {
            const int count = R - first < EDGE ? R - first : EDGE;
            for (int r = 0; r < count; r++) {
                const float *own = inputs + (first + r) * ::apart(K);
                bf16 *at = narrow + 2 * r;
                for (int k = 0; k < K; k += LANES) {
                    alignas(32) uint32_t pairs[LANES / 2];
                    const __m256i half = __m256i(_mm512_cvtneps_pbh(_mm512_loadu_ps(own + k)));
                    _mm256_store_si256(reinterpret_cast<__m256i *>(pairs), half);
                    for (int i = 0; i < LANES / 2; i++, at += 2 * count) memcpy(at, pairs + i, 4);
                }
            }
        }
    }
};
#endif

}  // namespace
