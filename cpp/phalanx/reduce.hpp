// Reductions over plain memory: dst[i] = op(dst[i], src[i]), and the division that turns a sum into a mean.
//
// The results are the bits that NumPy gives on the same processor, with three choices where NumPy leaves room:
//   - complex products are (ac - bd) + (ad + bc)i with every step rounded, never fused;
//   - float16 and bfloat16 are computed in float and rounded once;
//   - a NaN in bfloat16 is always 0x7fc0.
// Integers wrap. Addresses need no alignment. dst and src may be the same array but must not overlap otherwise.
//
// The loops are built for several instruction sets, of which the best that this processor has is used (reduce.cpp): all give
// the same bits. Build with -ffp-contract=off: a fused multiply-add rounds differently. Nothing here knows about Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace phalanx {

// The numbers are shared with src/phalanx/_native.py, which checks them when it loads the core.
enum class Dtype : int {
    boolean, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, bfloat16, float32, float64,
    complex64, complex128,
};

enum class Op : int { sum, prod, min, max, band, bor, bxor };

// Bytes of one element; 0 for a number that is no Dtype.
constexpr std::size_t item_size(Dtype dtype) noexcept {
    switch (dtype) {
        case Dtype::boolean:
        case Dtype::int8:
        case Dtype::uint8: return 1;
        case Dtype::int16:
        case Dtype::uint16:
        case Dtype::float16:
        case Dtype::bfloat16: return 2;
        case Dtype::int32:
        case Dtype::uint32:
        case Dtype::float32: return 4;
        case Dtype::int64:
        case Dtype::uint64:
        case Dtype::float64:
        case Dtype::complex64: return 8;
        case Dtype::complex128: return 16;
    }
    return 0;
}

constexpr bool is_floating(Dtype dtype) noexcept { return dtype >= Dtype::float16; }  // also complex

constexpr bool has_op(Dtype dtype, Op op) noexcept {
    if (!is_floating(dtype)) return true;
    if (dtype >= Dtype::complex64) return op == Op::sum || op == Op::prod;
    return op == Op::sum || op == Op::prod || op == Op::min || op == Op::max;
}

// dst[i] = op(left[i], right[i]); dst may be one of the two. False, with nothing changed, where the dtype has no such
// operation.
bool reduce(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, Dtype dtype, Op op) noexcept;

// dst[i] = op(dst[i], src[i]).
inline bool reduce(void* to, const void* from, std::size_t count, Dtype dtype, Op op) noexcept {
    auto* dst = static_cast<std::byte*>(to);
    return reduce(dst, dst, static_cast<const std::byte*>(from), count, dtype, op);
}

// x[i] = x[i] / n, rounded once. False, with nothing changed, for integers and truth values: they have no mean.
bool divide(void* x, std::size_t count, std::int64_t n, Dtype dtype) noexcept;

// dst[i] = sources[0][i] op sources[1][i] op ..., from left to right, and with a divisor above 1 divided by it. dst may be
// any of the sources. 16-bit floats are rounded once, at the end. False as `reduce`.
bool reduce_many(std::byte* dst, const std::byte* const* sources, int n, std::size_t count, Dtype dtype, Op op,
                 std::int64_t divisor) noexcept;

// The instruction sets of this build that this processor has, the best one last: that one is used.
std::span<const char* const> instruction_sets() noexcept;
// Has all reductions use another of them: for tests, which compare. False if there is none of that name.
bool use_instruction_set(const char* name) noexcept;

}  // namespace phalanx
