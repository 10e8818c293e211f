// Blocks of a GGUF file, moved to where the step reads them (packed.h). Their numbers stay as they are.
// Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h

#pragma once

namespace {

template <class L> constexpr int block_bytes() {
    return L::HAS_WHOLES ? (L::LOW + L::HIGH) * 32 + (L::HIGH == 2 ? 18 : 16)
                         : (L::LOW + L::HIGH) * 4 + 2 * (1 + L::HAS_LEAST);
}

// Number i of a block, its offset not subtracted.
template <class L> inline int number_at(const uint8_t *block, int i) {
    if constexpr (L::LOW == 8) return block[2 + i];
    if constexpr (L::HIGH == 2) {  // twice 128 of them
        const int half = i / 128, at = i % 128;
        const int low = block[half * 64 + at % 64] >> at / 64 * 4 & 15;
        return low | (block[128 + half * 32 + at % 32] >> at / 32 * 2 & 3) << 4;
    }
    if constexpr (L::HAS_WHOLES) {
        const int low = block[(L::HIGH ? 48 : 16) + i / 64 * 32 + i % 32] >> i / 32 % 2 * 4 & 15;
        return L::HIGH ? low | (block[16 + i % 32] >> i / 32 & 1) << 4 : low;
    }
    const uint8_t *higher = block + (L::HAS_LEAST ? 4 : 2);
    const int low = higher[L::HIGH * 4 + i % 16] >> i / 16 * 4 & 15;
    return L::HIGH ? low | (higher[i / 8] >> i % 8 & 1) << 4 : low;
}

// Scales of the numbers 32 r on of a block, for output o of a record.
template <class L> inline void move_scales(const uint8_t *block, int r, int o, uint8_t *scales) {
    if constexpr (L::HIGH == 2) {
        for (int part = 0; part < 2; part++) scales[part * SIDE + o] = block[192 + 2 * r + part];
    } else if constexpr (L::HAS_WHOLES) {  // of 6 bits each: the upper two of the last four lie with the first
        const uint8_t *first = block + 4, *second = block + 8, *third = block + 12;
        const int at = r % 4;
        scales[o] = r < 4 ? first[at] & 63 : (third[at] & 15) | first[at] >> 6 << 4;
        scales[SIDE + o] = r < 4 ? second[at] & 63 : third[at] >> 4 | second[at] >> 6 << 4;
    } else {
        for (int part = 0; part <= L::HAS_LEAST; part++)
            memcpy(scales + part * 2 * SIDE + 2 * o, block + 2 * part, 2);
    }
}

// Sixteen outputs, or as many as there are.
template <class L>
void pack_strip(const uint8_t *rows, size_t row_bytes, int count, int K, uint8_t *out) {
    memset(out, 0, L::strip(K / 32));
    for (int g = 0; g < K / 32; g++, out += L::RECORD) {
        const uint8_t *block = rows + size_t(g / L::EVERY) * block_bytes<L>();
        if (L::HAS_WHOLES && g % L::EVERY == 0) {
            for (int o = 0; o < count; o++)
                for (int part = 0; part <= L::HAS_LEAST; part++)
                    memcpy(out + part * 2 * SIDE + 2 * o,
                           block + o * row_bytes + (L::HIGH == 2 ? 208 : 2 * part), 2);
            out += L::FRONT;
        }
        for (int o = 0; o < count; o++, block += row_bytes) {
            for (int i = 0; i < 32; i++) {
                const int number = number_at<L>(block, g % L::EVERY * 32 + i), k = i / 4, at = o * 4 + i % 4;
                if constexpr (L::LOW == 8) {
                    out[k * 64 + at] = uint8_t(number);
                } else {
                    out[k / 2 * 64 + at] |= (number & 15) << k % 2 * 4;
                    if constexpr (L::HIGH > 0) {
                        constexpr int STEPS = 8 / L::HIGH;  // of which a byte has the bits
                        out[L::HIGHER_AT + k / STEPS * 64 + at] |= number >> 4 << k % STEPS * L::HIGH;
                    }
                }
            }
            move_scales<L>(block, g % L::EVERY, o, out + L::WEIGHTS);
        }
    }
}

}  // namespace

extern "C" void pack(int32_t kind, const uint8_t *blocks, int32_t rows, int32_t K, uint8_t *out,
                     [[maybe_unused]] int32_t threads) {
    with_layout(kind, [=](auto layout) {
        typedef decltype(layout) L;
        const size_t row_bytes = size_t(K / 32 / L::EVERY) * block_bytes<L>();
#pragma omp parallel for num_threads(threads)
        for (int first = 0; first < rows; first += SIDE) {
            const int count = rows - first < SIDE ? rows - first : SIDE;
            pack_strip<L>(blocks + size_t(first) * row_bytes, row_bytes, count, K,
                          out + size_t(first / SIDE) * L::strip(K / 32));
        }
    });
}
