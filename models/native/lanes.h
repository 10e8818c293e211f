// Sixteen numbers side by side, in registers as wide as the processor's: one of 512 bits, two of 256
// or four of 128. The order of every sum is the same everywhere.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;

typedef float f4 __attribute__((vector_size(16)));

// The whole numbers of as many lanes, and half as wide ones.
template <class V> struct Whole {
    typedef int32_t type __attribute__((vector_size(sizeof(V))));
    typedef uint16_t narrow __attribute__((vector_size(sizeof(V) / 2)));
};

// Two registers that are used as one.
template <class V> struct Pair {
    V lo, hi;
    Pair &operator+=(const Pair &x) {
        lo += x.lo;
        hi += x.hi;
        return *this;
    }
};
template <class V> inline Pair<V> operator+(Pair<V> x, Pair<V> y) { return {x.lo + y.lo, x.hi + y.hi}; }
template <class V> inline Pair<V> operator*(Pair<V> x, Pair<V> y) { return {x.lo * y.lo, x.hi * y.hi}; }
template <class V> inline Pair<V> operator/(Pair<V> x, Pair<V> y) { return {x.lo / y.lo, x.hi / y.hi}; }
template <class V> inline Pair<V> operator-(Pair<V> x) { return {-x.lo, -x.hi}; }
template <class V> inline Pair<V> operator+(Pair<V> x, float y) { return {x.lo + y, x.hi + y}; }
template <class V> inline Pair<V> operator-(Pair<V> x, float y) { return {x.lo - y, x.hi - y}; }
template <class V> inline Pair<V> operator*(Pair<V> x, float y) { return {x.lo * y, x.hi * y}; }
template <class V> inline Pair<V> operator*(float y, Pair<V> x) { return {x.lo * y, x.hi * y}; }

#if defined(__AVX512F__)
typedef float f16 __attribute__((vector_size(64)));
typedef f16 Lanes;
#elif defined(__AVX__)
typedef float f8 __attribute__((vector_size(32)));
typedef Pair<f8> Lanes;
#else
typedef Pair<Pair<f4>> Lanes;
#endif

// sum + x * y, rounded once where the processor can. Said outright: for some processors compilers
// split products that are added in a loop, in one function and not in the next.
inline float fused(float x, float y, float sum) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(x, y, sum);
#else
    return sum + x * y;
#endif
}
inline f4 fused(f4 x, f4 y, f4 sum) { return sum + x * y; }
#if defined(__AVX__) && !defined(__AVX512F__)
inline f8 fused(f8 x, f8 y, f8 sum) {
#ifdef __FMA__
    return _mm256_fmadd_ps(x, y, sum);
#else
    return sum + x * y;
#endif
}
#endif
#ifdef __AVX512F__
inline f16 fused(f16 x, f16 y, f16 sum) { return _mm512_fmadd_ps(x, y, sum); }
#endif
template <class V> inline Pair<V> fused(Pair<V> x, Pair<V> y, Pair<V> sum) {
    return {fused(x.lo, y.lo, sum.lo), fused(x.hi, y.hi, sum.hi)};
}
// The same x in every lane: less zero, which costs nothing, as adding it to -0 would change that.
template <class V> inline V fused(float x, V y, V sum) { return fused(x - V{}, y, sum); }
template <class V> inline Pair<V> fused(float x, Pair<V> y, Pair<V> sum) {
    return {fused(x, y.lo, sum.lo), fused(x, y.hi, sum.hi)};
}

// A weight of two bytes: the upper half of a float32.
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

template <class V> struct Reader {
    static V read(const float *at) {
        V out;
        memcpy(&out, at, sizeof out);
        return out;
    }
    static V read(const bf16 *at) {
        typename Whole<V>::narrow bits;
        memcpy(&bits, at, sizeof bits);
        V out;
#ifdef __AVX512F__  // of the general conversion to 16 lanes GCC makes four instructions
        if constexpr (sizeof(V) == 64) return V(_mm512_cvtepu16_epi32(__m256i(bits)) << 16);
#endif
        typename Whole<V>::type wide = __builtin_convertvector(bits, typename Whole<V>::type) << 16;
        memcpy(&out, &wide, sizeof out);
        return out;
    }
};
template <class V> struct Reader<Pair<V>> {
    template <class W> static Pair<V> read(const W *at) {
        return {Reader<V>::read(at), Reader<V>::read(at + sizeof(V) / sizeof(float))};
    }
};
template <class W> inline Lanes load(const W *at) { return Reader<Lanes>::read(at); }
inline void store(float *at, const Lanes &x) { memcpy(at, &x, sizeof x); }

// Four numbers: of each 128 bits of a, b, c and d the four sums, and these added.
inline f4 added(f4 x) { return x; }
inline f4 groups(f4 a, f4 b, f4 c, f4 d) {
    f4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
    f4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
    return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}
#if defined(__AVX__) && !defined(__AVX512F__)
inline f8 groups(f8 a, f8 b, f8 c, f8 d) {
    f8 ab = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13) +
            __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
    f8 cd = __builtin_shufflevector(c, d, 0, 8, 1, 9, 4, 12, 5, 13) +
            __builtin_shufflevector(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
    return __builtin_shufflevector(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
           __builtin_shufflevector(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
}
inline f4 added(f8 x) {
    return __builtin_shufflevector(x, x, 0, 1, 2, 3) + __builtin_shufflevector(x, x, 4, 5, 6, 7);
}
#endif
#ifdef __AVX512F__
inline f16 groups(f16 a, f16 b, f16 c, f16 d) {
    f16 ab = __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
             __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    f16 cd = __builtin_shufflevector(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
             __builtin_shufflevector(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    return __builtin_shufflevector(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
inline f4 added(f16 x) {
    auto half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
           __builtin_shufflevector(half, half, 4, 5, 6, 7);
}
#endif
template <class V> inline Pair<V> groups(Pair<V> a, Pair<V> b, Pair<V> c, Pair<V> d) {
    return {groups(a.lo, b.lo, c.lo, d.lo), groups(a.hi, b.hi, c.hi, d.hi)};
}
template <class V> inline f4 added(Pair<V> x) { return added(x.lo + x.hi); }

// The sums of four times 16 numbers, in one order for all.
inline f4 totals(const Lanes &a, const Lanes &b, const Lanes &c, const Lanes &d) {
    return added(groups(a, b, c, d));
}
inline float total(const Lanes &x) { return totals(x, Lanes{}, Lanes{}, Lanes{})[0]; }

// Of each two numbers the larger, or the smaller; the second where one of them is none.
template <class V> inline V larger(V x, V y) { return x > y ? x : y; }
template <class V> inline V smaller(V x, V y) { return x < y ? x : y; }
template <class V> inline Pair<V> larger(Pair<V> x, Pair<V> y) {
    return {larger(x.lo, y.lo), larger(x.hi, y.hi)};
}
template <class V> inline Pair<V> smaller(Pair<V> x, Pair<V> y) {
    return {smaller(x.lo, y.lo), smaller(x.hi, y.hi)};
}

// e^x of numbers of at most 88: 2^n by the exponent, the rest by a polynomial (error 2e-7).
template <class V> inline V exponential(V x) {
    const V zero = {};
    x = x < zero - 87.0f ? zero - 87.0f : x;
    x = x > zero + 88.0f ? zero + 88.0f : x;
    V n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    V r = x - n * 0.693359375f + n * 2.12194440e-4f;
    V p = zero + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    typename Whole<V>::type scale = (__builtin_convertvector(n, typename Whole<V>::type) + 127) << 23;
    V power;
    memcpy(&power, &scale, sizeof power);
    return p * power;
}
template <class V> inline Pair<V> exponential(Pair<V> x) { return {exponential(x.lo), exponential(x.hi)}; }

}  // namespace
