// float16 and bfloat16 as 16 bits of memory: how to widen them to float and how to round back.
//
// Both round to nearest, ties to even. The portable versions have no branch that depends on the data, so that a compiler
// can turn a loop over them into vector code. A part of reduce_loops.hpp, whose rules hold here, too.

#if defined(__aarch64__) && (defined(__GNUC__) || defined(__clang__))
#define PHALANX_NATIVE_FLOAT16 1
#endif

namespace phalanx::PHALANX_LOOPS {

// IEEE binary16 without help from the processor.
struct PortableHalf {
    static float widen(std::uint16_t half) noexcept {
        constexpr std::uint32_t infinite = 0x7c00u << 13;
        const std::uint32_t shifted = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
        const std::uint32_t exponent = shifted & infinite;
        const std::uint32_t rebased = shifted + ((127u - 15u) << 23);
        // A subnormal half is a normal float: let the subtraction of 2^-14 find its exponent.
        const float subnormal = __builtin_bit_cast(float, rebased + (1u << 23)) - __builtin_bit_cast(float, 113u << 23);
        const std::uint32_t special = rebased + ((128u - 16u) << 23);
        const std::uint32_t finite = exponent == 0 ? __builtin_bit_cast(std::uint32_t, subnormal) : rebased;
        const std::uint32_t magnitude = exponent == infinite ? special : finite;
        return __builtin_bit_cast(float, magnitude | (static_cast<std::uint32_t>(half & 0x8000u) << 16));
    }

    static std::uint16_t narrow(float value) noexcept {
        const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
        const std::uint32_t magnitude = bits & 0x7fffffffu;
        // Adding this makes the float's own rounding cut at the last bit of a subnormal half.
        constexpr std::uint32_t magic = (127u - 15u + 23u - 10u + 1u) << 23;
        const std::uint32_t subnormal =
            __builtin_bit_cast(std::uint32_t, __builtin_bit_cast(float, magnitude) + __builtin_bit_cast(float, magic)) - magic;
        const std::uint32_t odd = (magnitude >> 13) & 1u;
        const std::uint32_t normal = (magnitude - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
        const std::uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
        std::uint32_t half = magnitude < (113u << 23) ? subnormal : normal;
        half = magnitude >= ((127u + 16u) << 23) ? 0x7c00u : half;
        half = magnitude > 0x7f800000u ? nan : half;
        return static_cast<std::uint16_t>(half | ((bits >> 16) & 0x8000u));
    }
};

#if defined(PHALANX_NATIVE_FLOAT16)
struct Half {
    static float widen(std::uint16_t half) noexcept { return static_cast<float>(__builtin_bit_cast(__fp16, half)); }
    static std::uint16_t narrow(float value) noexcept {
        return __builtin_bit_cast(std::uint16_t, static_cast<__fp16>(value));
    }
};
#else
using Half = PortableHalf;
#endif

// The upper half of a float. Every NaN becomes the one quiet NaN 0x7fc0, so that results do not depend on which of two
// NaNs the processor kept.
struct Bfloat16 {
    static float widen(std::uint16_t brain) noexcept {
        return __builtin_bit_cast(float, static_cast<std::uint32_t>(brain) << 16);
    }

    static std::uint16_t narrow(float value) noexcept {
        const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
        const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
};

}  // namespace phalanx::PHALANX_LOOPS
