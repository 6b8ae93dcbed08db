// The loops of reduce.hpp for one instruction set, which are all in a namespace of its own. The files reduce_*.cpp include
// this one, and are compiled with that instruction set.
//
// So nothing here may call an inline function of another header, the standard library's included: if the compiler does not
// inline it, the linker may take the one of this file for the whole program, and that does not run on every processor.
// tests/test_native.py looks for such functions.

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "reduce.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX2__)
#include <immintrin.h>
#endif

#include "half.hpp"

namespace phalanx::PHALANX_LOOPS {

template <class T>
T load(const std::byte* from) noexcept {
    T value;
    __builtin_memcpy(&value, from, sizeof(T));
    return value;
}

template <class T>
void store(std::byte* to, T value) noexcept {
    __builtin_memcpy(to, &value, sizeof(T));
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
bool reduce_boolean(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, Op op) noexcept {
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
constexpr std::size_t block = 512;

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

#if defined(__AVX2__)

template <class V>
const V* as(const std::byte* from) noexcept {
    return reinterpret_cast<const V*>(from);
}
template <class V>
V* as(std::byte* to) noexcept {
    return reinterpret_cast<V*>(to);
}

// As many 16-bit floats at a time as floats fit into one vector.
template <class Format>
struct ShortVectors;

#if defined(__AVX512F__)

template <>
struct ShortVectors<Half> {
    using Values = __m512;
    static Values load(const std::byte* from) noexcept { return _mm512_cvtph_ps(_mm256_loadu_si256(as<__m256i>(from))); }
    static void store(std::byte* to, Values values) noexcept {
        _mm256_storeu_si256(as<__m256i>(to), _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

template <>
struct ShortVectors<Bfloat16> {
    using Values = __m512;
    static Values load(const std::byte* from) noexcept {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(as<__m256i>(from))), 16));
    }
    static void store(std::byte* to, Values values) noexcept {
        const __m512i bits = _mm512_castps_si512(values);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 is_nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
        const __m512i upper = _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), is_nan, _mm512_set1_epi32(0x7fc0));
        _mm256_storeu_si256(as<__m256i>(to), _mm512_cvtepi32_epi16(upper));
    }
};

inline __m512 fill(float value) noexcept { return _mm512_set1_ps(value); }
inline __m512 choose(__m512 a, __m512 b, __m512 smaller, __m512 larger) noexcept {
    const __mmask16 first = _mm512_cmp_ps_mask(smaller, larger, _CMP_LT_OQ) | _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(b, first, a);
}

#else

template <>
struct ShortVectors<Half> {
    using Values = __m256;
    static Values load(const std::byte* from) noexcept { return _mm256_cvtph_ps(_mm_loadu_si128(as<__m128i>(from))); }
    static void store(std::byte* to, Values values) noexcept {
        _mm_storeu_si128(as<__m128i>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
};

template <>
struct ShortVectors<Bfloat16> {
    using Values = __m256;
    static Values load(const std::byte* from) noexcept {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(as<__m128i>(from))), 16));
    }
    static void store(std::byte* to, Values values) noexcept {
        const __m256i bits = _mm256_castps_si256(values);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
        const __m256i upper = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7fc0), is_nan);
        const __m256i halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(upper, upper), 0b1000);
        _mm_storeu_si128(as<__m128i>(to), _mm256_castsi256_si128(halves));
    }
};

inline __m256 fill(float value) noexcept { return _mm256_set1_ps(value); }
inline __m256 choose(__m256 a, __m256 b, __m256 smaller, __m256 larger) noexcept {
    const __m256 first = _mm256_or_ps(_mm256_cmp_ps(smaller, larger, _CMP_LT_OQ), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_ps(b, a, first);
}

#endif

template <class Format, class F>
std::size_t combine_short_vectors(std::byte* dst, const std::byte* const* sources, int n, std::size_t count, F op,
                                  float divisor) noexcept {
    using Vectors = ShortVectors<Format>;
    using Values = typename Vectors::Values;
    constexpr std::size_t width = sizeof(Values) / sizeof(float);
    std::size_t i = 0;
    for (; i + width <= count; i += width) {
        Values total = Vectors::load(sources[0] + 2 * i);
        for (int r = 1; r < n; ++r) total = op(total, Vectors::load(sources[r] + 2 * i));
        if (divisor != 1) total = total / fill(divisor);
        Vectors::store(dst + 2 * i, total);
    }
    return i;
}

template <class Format>
    requires std::is_same_v<Format, Half> || std::is_same_v<Format, Bfloat16>
std::size_t reduce_short_lanes(std::byte* dst, const std::byte* const* sources, int n, std::size_t count, Op op,
                               float divisor) noexcept {
    using V = typename ShortVectors<Format>::Values;
    switch (op) {
        case Op::sum: return combine_short_vectors<Format>(dst, sources, n, count, [](V a, V b) { return a + b; }, divisor);
        case Op::prod: return combine_short_vectors<Format>(dst, sources, n, count, [](V a, V b) { return a * b; }, divisor);
        case Op::min:
            return combine_short_vectors<Format>(dst, sources, n, count, [](V a, V b) { return choose(a, b, a, b); }, divisor);
        case Op::max:
            return combine_short_vectors<Format>(dst, sources, n, count, [](V a, V b) { return choose(a, b, b, a); }, divisor);
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

// GCC fuses the sums and differences of products for AVX-512, whatever -ffp-contract says: so not for that.
#if defined(__AVX512F__)
#define PHALANX_NEVER_FUSED __attribute__((noinline, target("no-avx512f,no-fma")))
#else
#define PHALANX_NEVER_FUSED
#endif

template <class T>
PHALANX_NEVER_FUSED void multiply_complex(std::byte* dst, const std::byte* left, const std::byte* right,
                                          std::size_t count) noexcept {
#pragma GCC ivdep
    for (std::size_t i = 0; i < count * 2 * sizeof(T); i += 2 * sizeof(T)) {
        T a[2], b[2];
        __builtin_memcpy(a, left + i, sizeof(a));
        __builtin_memcpy(b, right + i, sizeof(b));
        const T product[2] = {a[0] * b[0] - a[1] * b[1], a[0] * b[1] + a[1] * b[0]};
        __builtin_memcpy(dst + i, product, sizeof(product));
    }
}

#undef PHALANX_NEVER_FUSED

template <class T>
bool reduce_complex(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, Op op) noexcept {
    switch (op) {
        case Op::sum: return reduce_floating<T>(dst, left, right, 2 * count, op);
        case Op::prod: multiply_complex<T>(dst, left, right, count); return true;
        default: return false;
    }
}

// A power of two has an exact inverse, and multiplying by it rounds as the division would, only much faster.
template <class T>
bool divide_floating(std::byte* x, std::size_t count, std::int64_t n) noexcept {
    const T by = static_cast<T>(n);
    if (n > 0 && (n & (n - 1)) == 0)
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

constexpr std::size_t tile = 4096;  // bytes that stay in the first-level cache while all sources are gone through

bool reduce_two(std::byte* dst, const std::byte* left, const std::byte* right, std::size_t count, Dtype dtype,
                Op op) noexcept {
    const std::byte* const both[] = {left, right};
    switch (dtype) {
        case Dtype::boolean: return reduce_boolean(dst, left, right, count, op);
        case Dtype::int8: return reduce_integer<std::int8_t>(dst, left, right, count, op);
        case Dtype::int16: return reduce_integer<std::int16_t>(dst, left, right, count, op);
        case Dtype::int32: return reduce_integer<std::int32_t>(dst, left, right, count, op);
        case Dtype::int64: return reduce_integer<std::int64_t>(dst, left, right, count, op);
        case Dtype::uint8: return reduce_integer<std::uint8_t>(dst, left, right, count, op);
        case Dtype::uint16: return reduce_integer<std::uint16_t>(dst, left, right, count, op);
        case Dtype::uint32: return reduce_integer<std::uint32_t>(dst, left, right, count, op);
        case Dtype::uint64: return reduce_integer<std::uint64_t>(dst, left, right, count, op);
        case Dtype::float16: return reduce_short_floats<Half>(dst, both, 2, count, op, 1);
        case Dtype::bfloat16: return reduce_short_floats<Bfloat16>(dst, both, 2, count, op, 1);
        case Dtype::float32: return reduce_floating<float>(dst, left, right, count, op);
        case Dtype::float64: return reduce_floating<double>(dst, left, right, count, op);
        case Dtype::complex64: return reduce_complex<float>(dst, left, right, count, op);
        case Dtype::complex128: return reduce_complex<double>(dst, left, right, count, op);
    }
    return false;
}

bool divide_all(void* x, std::size_t count, std::int64_t n, Dtype dtype) noexcept {
    auto* dst = static_cast<std::byte*>(x);
    switch (dtype) {
        case Dtype::float16: return divide_short_float<Half>(dst, count, n);
        case Dtype::bfloat16: return divide_short_float<Bfloat16>(dst, count, n);
        case Dtype::float32: return divide_floating<float>(dst, count, n);
        case Dtype::float64: return divide_floating<double>(dst, count, n);
        case Dtype::complex64: return divide_floating<float>(dst, 2 * count, n);
        case Dtype::complex128: return divide_floating<double>(dst, 2 * count, n);
        default: return false;
    }
}

// `size`: bytes of one element.
bool reduce_all(std::byte* dst, const std::byte* const* sources, int n, std::size_t count, std::size_t size, Dtype dtype,
                Op op, std::int64_t divisor) noexcept {
    const auto by = static_cast<float>(divisor > 1 ? divisor : 1);
    if (dtype == Dtype::float16) return reduce_short_floats<Half>(dst, sources, n, count, op, by);
    if (dtype == Dtype::bfloat16) return reduce_short_floats<Bfloat16>(dst, sources, n, count, op, by);
    alignas(64) std::byte total[tile];
    bool known = true;
    for (std::size_t start = 0; start < count; start += tile / size) {
        const std::size_t part = count - start < tile / size ? count - start : tile / size;
        std::byte* to = dst + start * size;
        const std::byte* sum = sources[0] + start * size;
        for (int i = 1; i < n; ++i) {
            // Not in dst before the last turn: it may be a source that is still to be read.
            std::byte* next = i == n - 1 ? to : total;
            known = known && reduce_two(next, sum, sources[i] + start * size, part, dtype, op);
            sum = next;
        }
        if (n == 1 && to != sum) __builtin_memcpy(to, sum, part * size);
        if (divisor > 1) known = known && divide_all(to, part, divisor, dtype);
    }
    return known;
}

}  // namespace phalanx::PHALANX_LOOPS
