// Reductions over plain memory: dst[i] = op(dst[i], src[i]), and the division that turns a sum into a mean.
//
// The results are the bits that NumPy gives on the same processor, with three choices where NumPy leaves room:
//   - complex products are (ac - bd) + (ad + bc)i with every step rounded, never fused;
//   - float16 and bfloat16 are computed in float and rounded once;
//   - a NaN in bfloat16 is always 0x7fc0.
// Integers wrap. Addresses need no alignment. dst and src may be the same array but must not overlap otherwise.
//
// Build with -ffp-contract=off: a fused multiply-add rounds differently. Nothing here knows about Python.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "half.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace phalanx {

// The numbers are shared with src/phalanx/_native.py, which checks them when it loads the core.
enum class Dtype : int {
    boolean, int8, int16, int32, int64, uint8, uint16, uint32, uint64, float16, bfloat16, float32, float64,
    complex64, complex128,
};

enum class Op : int { sum, prod, min, max, band, bor, bxor };

namespace detail {

template <class T>
T load(const std::byte* from) noexcept {
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

template <class T>
void store(std::byte* to, T value) noexcept {
    std::memcpy(to, &value, sizeof(T));
}

template <class T, class F>
void combine(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, F op) noexcept {
    // dst may be left or right, never anything between: so no turn of the loop reads what an earlier one wrote.
#pragma GCC ivdep
    for (std::size_t i = 0; i < count * sizeof(T); i += sizeof(T))
        store<T>(dst + i, op(load<T>(left + i), load<T>(right + i)));
}

template <class T, class F>
void transform(std::byte* dst, std::size_t count, F op) noexcept {
    for (std::size_t i = 0; i < count * sizeof(T); i += sizeof(T)) store<T>(dst + i, op(load<T>(dst + i)));
}

// Unsigned and at least as wide as int, so that neither overflow nor promotion to a signed type is undefined.
template <class T>
using Wrapping = std::conditional_t<(sizeof(T) < sizeof(unsigned)), unsigned, std::make_unsigned_t<T>>;

// Integers, kept as they are stored. Signedness matters to min and max only.
template <class T>
bool reduce_integer(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, Op op) noexcept {
    using U = Wrapping<T>;
    switch (op) {
        case Op::sum:
            combine<T>(dst, left, right, count, [](T a, T b) { return static_cast<T>(static_cast<U>(a) + static_cast<U>(b)); });
            return true;
        case Op::prod:
            combine<T>(dst, left, right, count, [](T a, T b) { return static_cast<T>(static_cast<U>(a) * static_cast<U>(b)); });
            return true;
        case Op::min: combine<T>(dst, left, right, count, [](T a, T b) { return a < b ? a : b; }); return true;
        case Op::max: combine<T>(dst, left, right, count, [](T a, T b) { return a > b ? a : b; }); return true;
        case Op::band: combine<T>(dst, left, right, count, [](T a, T b) { return static_cast<T>(a & b); }); return true;
        case Op::bor: combine<T>(dst, left, right, count, [](T a, T b) { return static_cast<T>(a | b); }); return true;
        case Op::bxor: combine<T>(dst, left, right, count, [](T a, T b) { return static_cast<T>(a ^ b); }); return true;
    }
    return false;
}

// Truth values, one byte each. As in NumPy, a sum is "or" and a product is "and". Any byte but 0 counts as true.
inline bool reduce_boolean(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, Op op) noexcept {
    using T = std::uint8_t;
    switch (op) {
        case Op::sum:
        case Op::max:
        case Op::bor:
            combine<T>(dst, left, right, count, [](T a, T b) { return static_cast<T>((a | b) != 0); });
            return true;
        case Op::prod:
        case Op::min:
        case Op::band:
            combine<T>(dst, left, right, count, [](T a, T b) { return static_cast<T>((a != 0) & (b != 0)); });
            return true;
        case Op::bxor:
            combine<T>(dst, left, right, count, [](T a, T b) { return static_cast<T>((a != 0) != (b != 0)); });
            return true;
    }
    return false;
}

// min and max of float and double let a NaN through. Which of two zeros wins is the processor's choice in NumPy, so it
// is here too: ARM's own instruction orders -0 below +0, elsewhere the second operand wins among equals.
#if defined(__aarch64__)

template <class T>
struct Lanes;

template <>
struct Lanes<float> {
    static constexpr std::size_t count = 4;
    static float32x4_t load(const std::byte* p) noexcept {
        return vreinterpretq_f32_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)));
    }
    static void store(std::byte* p, float32x4_t v) noexcept {
        vst1q_u8(reinterpret_cast<std::uint8_t*>(p), vreinterpretq_u8_f32(v));
    }
    static float32x4_t fill(float v) noexcept { return vdupq_n_f32(v); }
    static float first(float32x4_t v) noexcept { return vgetq_lane_f32(v, 0); }
    static float32x4_t min(float32x4_t a, float32x4_t b) noexcept { return vminq_f32(a, b); }
    static float32x4_t max(float32x4_t a, float32x4_t b) noexcept { return vmaxq_f32(a, b); }
};

template <>
struct Lanes<double> {
    static constexpr std::size_t count = 2;
    static float64x2_t load(const std::byte* p) noexcept {
        return vreinterpretq_f64_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(p)));
    }
    static void store(std::byte* p, float64x2_t v) noexcept {
        vst1q_u8(reinterpret_cast<std::uint8_t*>(p), vreinterpretq_u8_f64(v));
    }
    static float64x2_t fill(double v) noexcept { return vdupq_n_f64(v); }
    static double first(float64x2_t v) noexcept { return vgetq_lane_f64(v, 0); }
    static float64x2_t min(float64x2_t a, float64x2_t b) noexcept { return vminq_f64(a, b); }
    static float64x2_t max(float64x2_t a, float64x2_t b) noexcept { return vmaxq_f64(a, b); }
};

template <class T>
T minimum(T a, T b) noexcept {
    return Lanes<T>::first(Lanes<T>::min(Lanes<T>::fill(a), Lanes<T>::fill(b)));
}

template <class T>
T maximum(T a, T b) noexcept {
    return Lanes<T>::first(Lanes<T>::max(Lanes<T>::fill(a), Lanes<T>::fill(b)));
}

// The compiler has no vector form of the one-element functions above, so the loop is spelled out, two vectors a turn.
template <class T, class V, class F>
void combine_lanes(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, V vector, F one) noexcept {
    using L = Lanes<T>;
    constexpr std::size_t width = L::count * sizeof(T);
    const std::size_t bytes = count * sizeof(T);
    std::size_t i = 0;
    for (; i + 2 * width <= bytes; i += 2 * width) {
        const auto low = vector(L::load(left + i), L::load(right + i));
        const auto high = vector(L::load(left + i + width), L::load(right + i + width));
        L::store(dst + i, low);
        L::store(dst + i + width, high);
    }
    combine<T>(dst + i, left + i, right + i, (bytes - i) / sizeof(T), one);
}

template <class T>
void combine_minimum(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count) noexcept {
    combine_lanes<T>(dst, left, right, count, Lanes<T>::min, minimum<T>);
}

template <class T>
void combine_maximum(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count) noexcept {
    combine_lanes<T>(dst, left, right, count, Lanes<T>::max, maximum<T>);
}

#else

template <class T>
T minimum(T a, T b) noexcept {
    return (a < b) | (a != a) ? a : b;
}

template <class T>
T maximum(T a, T b) noexcept {
    return (a > b) | (a != a) ? a : b;
}

template <class T>
void combine_minimum(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count) noexcept {
    combine<T>(dst, left, right, count, minimum<T>);
}

template <class T>
void combine_maximum(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count) noexcept {
    combine<T>(dst, left, right, count, maximum<T>);
}

#endif

template <class T>
bool reduce_floating(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, Op op) noexcept {
    switch (op) {
        case Op::sum: combine<T>(dst, left, right, count, [](T a, T b) { return a + b; }); return true;
        case Op::prod: combine<T>(dst, left, right, count, [](T a, T b) { return a * b; }); return true;
        case Op::min: combine_minimum<T>(dst, left, right, count); return true;
        case Op::max: combine_maximum<T>(dst, left, right, count); return true;
        default: return false;
    }
}

// 16-bit floats: widened, combined as float, rounded once. For sums and products of two values this is the correctly
// rounded result, because a float has more than twice the digits. Done in blocks that stay in the first-level cache:
// three plain loops become vector code where one loop with all three steps does not.
inline constexpr std::size_t block = 512;

template <class Format>
void widen(const std::byte* from, float* to, std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; ++i) to[i] = Format::widen(load<std::uint16_t>(from + 2 * i));
}

template <class Format>
void narrow(const float* from, std::byte* to, std::size_t count) noexcept {
    for (std::size_t i = 0; i < count; ++i) store<std::uint16_t>(to + 2 * i, Format::narrow(from[i]));
}

#if defined(PHALANX_NATIVE_FLOAT16)

template <>
inline void widen<Half>(const std::byte* from, float* to, std::size_t count) noexcept {
    std::size_t i = 0;
    for (; i + 4 <= count; i += 4) {
        const uint8x8_t bytes = vld1_u8(reinterpret_cast<const std::uint8_t*>(from + 2 * i));
        vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u8(bytes)));
    }
    for (; i < count; ++i) to[i] = Half::widen(load<std::uint16_t>(from + 2 * i));
}

template <>
inline void narrow<Half>(const float* from, std::byte* to, std::size_t count) noexcept {
    std::size_t i = 0;
    for (; i + 4 <= count; i += 4)
        vst1_u8(reinterpret_cast<std::uint8_t*>(to + 2 * i), vreinterpret_u8_f16(vcvt_f16_f32(vld1q_f32(from + i))));
    for (; i < count; ++i) store<std::uint16_t>(to + 2 * i, Half::narrow(from[i]));
}

#endif

// Of how many leading elements a processor's own instructions have made the result.
template <class Format>
std::size_t reduce_short_lanes(std::byte*, const std::byte* const*, int, std::size_t, Op, float) noexcept {
    return 0;
}

#if defined(PHALANX_NATIVE_FLOAT16)

template <class Format>
struct ShortLanes;

template <>
struct ShortLanes<Half> {
    static float32x4_t widen(uint16x4_t half) noexcept { return vcvt_f32_f16(vreinterpret_f16_u16(half)); }
    static uint16x4_t narrow(float32x4_t value) noexcept { return vreinterpret_u16_f16(vcvt_f16_f32(value)); }
};

template <>
struct ShortLanes<Bfloat16> {
    static float32x4_t widen(uint16x4_t brain) noexcept { return vreinterpretq_f32_u32(vshll_n_u16(brain, 16)); }
    static uint16x4_t narrow(float32x4_t value) noexcept {
        const uint32x4_t bits = vreinterpretq_u32_f32(value);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        const uint16x4_t is_number = vmovn_u32(vceqq_f32(value, value));
        return vbsl_u16(is_number, vshrn_n_u32(rounded, 16), vdup_n_u16(0x7fc0));
    }
};

template <class Format, class F>
std::size_t combine_short_lanes(std::byte* dst, const std::byte* const* sources, int n, std::size_t count, F op,
                                float divisor) noexcept {
    using L = ShortLanes<Format>;
    const float32x4_t by = vdupq_n_f32(divisor);
    std::size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const auto at = [i](const std::byte* from) {
            return vreinterpretq_u16_u8(vld1q_u8(reinterpret_cast<const std::uint8_t*>(from + 2 * i)));
        };
        const uint16x8_t first = at(sources[0]);
        float32x4_t low = L::widen(vget_low_u16(first));
        float32x4_t high = L::widen(vget_high_u16(first));
        for (int r = 1; r < n; ++r) {
            const uint16x8_t next = at(sources[r]);
            low = op(low, L::widen(vget_low_u16(next)));
            high = op(high, L::widen(vget_high_u16(next)));
        }
        if (divisor != 1) {
            low = vdivq_f32(low, by);
            high = vdivq_f32(high, by);
        }
        const uint16x8_t result = vcombine_u16(L::narrow(low), L::narrow(high));
        vst1q_u8(reinterpret_cast<std::uint8_t*>(dst + 2 * i), vreinterpretq_u8_u16(result));
    }
    return i;
}

template <class Format>
    requires std::is_same_v<Format, Half> || std::is_same_v<Format, Bfloat16>
std::size_t reduce_short_lanes(std::byte* dst, const std::byte* const* sources, int n, std::size_t count, Op op,
                               float divisor) noexcept {
    using V = float32x4_t;
    switch (op) {
        case Op::sum:
            return combine_short_lanes<Format>(dst, sources, n, count, [](V a, V b) { return vaddq_f32(a, b); }, divisor);
        case Op::prod:
            return combine_short_lanes<Format>(dst, sources, n, count, [](V a, V b) { return vmulq_f32(a, b); }, divisor);
        case Op::min:
            return combine_short_lanes<Format>(dst, sources, n, count, [](V a, V b) { return vminq_f32(a, b); }, divisor);
        case Op::max:
            return combine_short_lanes<Format>(dst, sources, n, count, [](V a, V b) { return vmaxq_f32(a, b); }, divisor);
        default: return 0;
    }
}

#endif

// In rank order, however many there are, with one rounding at the end.
template <class Format>
bool reduce_short_floats(std::byte* dst, const std::byte* const* sources, int n, std::size_t count, Op op,
                         float divisor) noexcept {
    if (op != Op::sum && op != Op::prod && op != Op::min && op != Op::max) return false;
    float total[block];
    float next[block];
    const std::size_t first = reduce_short_lanes<Format>(dst, sources, n, count, op, divisor);
    for (std::size_t done = first; done < count; done += block) {
        const std::size_t part = count - done < block ? count - done : block;
        auto* sum = reinterpret_cast<std::byte*>(total);
        widen<Format>(sources[0] + 2 * done, total, part);
        for (int i = 1; i < n; ++i) {
            widen<Format>(sources[i] + 2 * done, next, part);
            reduce_floating<float>(sum, sum, reinterpret_cast<const std::byte*>(next), part, op);
        }
        if (divisor != 1) transform<float>(sum, part, [divisor](float value) { return value / divisor; });
        narrow<Format>(total, dst + 2 * done, part);
    }
    return true;
}

template <class T>
bool reduce_complex(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, Op op) noexcept {
    struct Value { T re, im; };
    switch (op) {
        case Op::sum: return reduce_floating<T>(dst, left, right, 2 * count, op);
        case Op::prod:
            combine<Value>(dst, left, right, count, [](Value a, Value b) {
                return Value{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
            });
            return true;
        default: return false;
    }
}

// A power of two has an exact inverse, and multiplying by it rounds as the division would, only much faster.
template <class T>
bool divide_floating(std::byte* x, std::size_t count, std::int64_t n) noexcept {
    const T by = static_cast<T>(n);
    if (n > 0 && std::has_single_bit(static_cast<std::uint64_t>(n)))
        transform<T>(x, count, [inverse = 1 / by](T value) { return value * inverse; });
    else
        transform<T>(x, count, [by](T value) { return value / by; });
    return true;
}

template <class Format>
bool divide_short_float(std::byte* x, std::size_t count, std::int64_t n) noexcept {
    float values[block];
    for (std::size_t done = 0; done < count; done += block) {
        const std::size_t part = count - done < block ? count - done : block;
        widen<Format>(x + 2 * done, values, part);
        divide_floating<float>(reinterpret_cast<std::byte*>(values), part, n);
        narrow<Format>(values, x + 2 * done, part);
    }
    return true;
}

}  // namespace detail

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
inline bool reduce(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, Dtype dtype,
                   Op op) noexcept {
    const std::byte* const both[] = {left, right};
    switch (dtype) {
        case Dtype::boolean: return detail::reduce_boolean(dst, left, right, count, op);
        case Dtype::int8: return detail::reduce_integer<std::int8_t>(dst, left, right, count, op);
        case Dtype::int16: return detail::reduce_integer<std::int16_t>(dst, left, right, count, op);
        case Dtype::int32: return detail::reduce_integer<std::int32_t>(dst, left, right, count, op);
        case Dtype::int64: return detail::reduce_integer<std::int64_t>(dst, left, right, count, op);
        case Dtype::uint8: return detail::reduce_integer<std::uint8_t>(dst, left, right, count, op);
        case Dtype::uint16: return detail::reduce_integer<std::uint16_t>(dst, left, right, count, op);
        case Dtype::uint32: return detail::reduce_integer<std::uint32_t>(dst, left, right, count, op);
        case Dtype::uint64: return detail::reduce_integer<std::uint64_t>(dst, left, right, count, op);
        case Dtype::float16: return detail::reduce_short_floats<Half>(dst, both, 2, count, op, 1);
        case Dtype::bfloat16: return detail::reduce_short_floats<Bfloat16>(dst, both, 2, count, op, 1);
        case Dtype::float32: return detail::reduce_floating<float>(dst, left, right, count, op);
        case Dtype::float64: return detail::reduce_floating<double>(dst, left, right, count, op);
        case Dtype::complex64: return detail::reduce_complex<float>(dst, left, right, count, op);
        case Dtype::complex128: return detail::reduce_complex<double>(dst, left, right, count, op);
    }
    return false;
}

// dst[i] = op(dst[i], src[i]).
inline bool reduce(void* to, const void* from, std::size_t count, Dtype dtype, Op op) noexcept {
    auto* dst = static_cast<std::byte*>(to);
    return reduce(dst, dst, static_cast<const std::byte*>(from), count, dtype, op);
}

// x[i] = x[i] / n, rounded once. False, with nothing changed, for integers and truth values: they have no mean.
inline bool divide(void* x, std::size_t count, std::int64_t n, Dtype dtype) noexcept {
    auto* dst = static_cast<std::byte*>(x);
    switch (dtype) {
        case Dtype::float16: return detail::divide_short_float<Half>(dst, count, n);
        case Dtype::bfloat16: return detail::divide_short_float<Bfloat16>(dst, count, n);
        case Dtype::float32: return detail::divide_floating<float>(dst, count, n);
        case Dtype::float64: return detail::divide_floating<double>(dst, count, n);
        case Dtype::complex64: return detail::divide_floating<float>(dst, 2 * count, n);
        case Dtype::complex128: return detail::divide_floating<double>(dst, 2 * count, n);
        default: return false;
    }
}

namespace detail {

constexpr std::size_t tile = 4096;  // bytes that stay in the first-level cache while all sources are gone through

}  // namespace detail

// dst[i] = sources[0][i] op sources[1][i] op ..., from left to right, and with a divisor above 1 divided by it. dst may be
// any of the sources. 16-bit floats are rounded once, at the end. False as `reduce`.
inline bool reduce_many(std::byte* dst, const std::byte* const* sources, int n, std::size_t count, Dtype dtype, Op op,
                        std::int64_t divisor) noexcept {
    const auto by = static_cast<float>(divisor > 1 ? divisor : 1);
    if (dtype == Dtype::float16) return detail::reduce_short_floats<Half>(dst, sources, n, count, op, by);
    if (dtype == Dtype::bfloat16) return detail::reduce_short_floats<Bfloat16>(dst, sources, n, count, op, by);
    const std::size_t size = item_size(dtype);
    alignas(64) std::byte total[detail::tile];
    bool known = true;
    for (std::size_t start = 0; start < count; start += detail::tile / size) {
        const std::size_t part = count - start < detail::tile / size ? count - start : detail::tile / size;
        std::byte* to = dst + start * size;
        const std::byte* sum = sources[0] + start * size;
        for (int i = 1; i < n; ++i) {
            // Not in dst before the last turn: it may be a source that is still to be read.
            std::byte* next = i == n - 1 ? to : total;
            known = known && reduce(next, sum, sources[i] + start * size, part, dtype, op);
            sum = next;
        }
        if (n == 1 && to != sum) std::memcpy(to, sum, part * size);
        if (divisor > 1) known = known && divide(to, part, divisor, dtype);
    }
    return known;
}

}  // namespace phalanx
