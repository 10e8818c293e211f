// Products of bfloat16 in tiles (AMX), where the processor has them and the system gives them: 16
// outputs by 16 rows of 32 inputs in one instruction, which takes a row alone as long as 16 of them.
//
// Any number of rows is multiplied so. A number is the same whatever stands in the tile beside it:
// its inputs come in their order, in steps of 32. The weights are read as they lie, so the inputs are
// what is laid out for tiles: in groups of 16 rows, of each row two neighbouring inputs at a time.

#pragma once

namespace {
constexpr int PAIRS = 2 * LANES;
constexpr int EDGE = 16;  // outputs of a tile, and rows
}

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <initializer_list>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Linux gives a process tiles on request (arch_prctl(2), ARCH_REQ_XCOMP_PERM of XTILEDATA).
inline bool has_tiles() {
    static const bool given = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return given;
}

// The shapes of the eight tiles, as LDTILECFG reads them.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, none[14] = {};
    uint16_t bytes[16] = {};  // of a line
    uint8_t lines[16] = {};
};

// GCC's intrinsics do not say what memory they read.
inline void written() { __asm__ volatile("" ::: "memory"); }

struct Shape {
    int lines, bytes;
};

// All tiles anew.
inline void shape_tiles(std::initializer_list<Shape> of) {
    TileShapes shapes;
    int tile = 0;
    for (const Shape &one : of) {
        shapes.lines[tile] = uint8_t(one.lines);
        shapes.bytes[tile++] = uint16_t(one.bytes);
    }
    written();
    _tile_loadconfig(&shapes);
}

// Outputs [from, to) of `count` <= 2 EDGE rows, EDGE at a time. Two sums take turns, as a product in a
// tile takes as long as three of them may follow one another; meanwhile the next weights come.
template <class Keep>
inline void product_in_tiles(const bf16 *x, int count, int K, const bf16 *w, int from, int to, Keep keep) {
    const int first = count < EDGE ? count : EDGE, second = count - first;
    const bf16 *more = x + size_t(first) * K;
    const size_t line = size_t(K) * sizeof(bf16);
    alignas(64) float found[4][EDGE][EDGE];
    int shaped = 0;
    for (int o = from; o < to; o += EDGE) {
        const int outputs = to - o < EDGE ? to - o : EDGE;
        if (outputs != shaped) {
            const Shape sums = {outputs, 4 * first}, others = {outputs, 4 * (second ? second : first)};
            const Shape weights = {outputs, 4 * EDGE};
            shape_tiles({sums, sums, others, others, weights, weights, {EDGE, sums.bytes}, {EDGE, others.bytes}});
            shaped = outputs;
        }
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        const bf16 *own = w + size_t(o) * K;
        const char *next = reinterpret_cast<const char *>(own + size_t(EDGE) * K);
        for (int k = 0; k < K; k += 2 * PAIRS) {
            const bool is_whole = k + PAIRS < K;
            for (int i = 0; i < (is_whole ? 2 * EDGE : EDGE); i++, next += LINE) __builtin_prefetch(next, 0, 3);
            _tile_loadd(4, own + k, line);
            _tile_loadd(6, x + size_t(k) * first, 4 * first);
            _tile_dpbf16ps(0, 4, 6);
            if (second) {
                _tile_loadd(7, more + size_t(k) * second, 4 * second);
                _tile_dpbf16ps(2, 4, 7);
            }
            if (!is_whole) break;
            _tile_loadd(5, own + k + PAIRS, line);
            _tile_loadd(6, x + size_t(k + PAIRS) * first, 4 * first);
            _tile_dpbf16ps(1, 5, 6);
            if (second) {
                _tile_loadd(7, more + size_t(k + PAIRS) * second, 4 * second);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, found[0], 4 * EDGE);
        _tile_stored(1, found[1], 4 * EDGE);
        if (second) {
            _tile_stored(2, found[2], 4 * EDGE);
            _tile_stored(3, found[3], 4 * EDGE);
        }
        written();
        for (int r = 0; r < count; r++)
            for (int i = 0; i < outputs; i++) {
                const int sums = r / EDGE * 2;
                keep(r, o + i, found[sums][i][r % EDGE] + found[sums + 1][i][r % EDGE]);
            }
    }
    _tile_release();
}

}  // namespace
#else
namespace {
inline bool has_tiles() { return false; }
template <class Keep> inline void product_in_tiles(const bf16 *, int, int, const bf16 *, int, int, Keep) {}
}  // namespace
#endif
