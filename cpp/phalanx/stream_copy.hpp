// A copy whose stores bypass the caches: quicker where nobody reads the copy soon, and it would push out what is there.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace phalanx {

namespace detail {

// `to` lies on a cache line.
inline void stream_lines(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
#if defined(__x86_64__)
    std::size_t at = 0;
    for (; at + 64 <= bytes; at += 64) {
        const auto* source = reinterpret_cast<const __m128i*>(from + at);
        auto* target = reinterpret_cast<__m128i*>(to + at);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    std::memcpy(to + at, from + at, bytes - at);
    _mm_sfence();
#elif defined(__aarch64__)
    std::size_t at = 0;
    for (; at + 64 <= bytes; at += 64)
        asm volatile(
            "ldp q0, q1, [%0]\n ldp q2, q3, [%0, #32]\n stnp q0, q1, [%1]\n stnp q2, q3, [%1, #32]\n"
            :
            : "r"(from + at), "r"(to + at)
            : "v0", "v1", "v2", "v3", "memory");
    std::memcpy(to + at, from + at, bytes - at);
#else
    std::memcpy(to, from, bytes);
#endif
}

}  // namespace detail

inline void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    constexpr std::size_t line = 64;
    const std::size_t head = std::min(bytes, (line - reinterpret_cast<std::uintptr_t>(to) % line) % line);
    std::memcpy(to, from, head);
    detail::stream_lines(to + head, from + head, bytes - head);
}

// What the last cache holds, which all cores share. More than any array has where such copies were never quicker, or it is not
// known.
inline std::size_t last_cache_bytes() noexcept {
#if defined(__x86_64__) && defined(_SC_LEVEL3_CACHE_SIZE)
    static const long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (found > 0) return static_cast<std::size_t>(found);
#endif
    return SIZE_MAX;
}

}  // namespace phalanx
