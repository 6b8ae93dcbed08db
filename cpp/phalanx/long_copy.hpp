// Long copies: what fits no cache is copied sooner in other ways than memcpy's. Which way is the quickest, and from which
// length on, differs from machine to machine: `phalanx.tuning` measures it.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "jitter.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace phalanx {

enum class CopyBy : std::uint8_t {
    plain,  // memcpy
    ahead,  // asks for the lines of both sides some time before it comes to them: more of them are under way at once
    past,   // stores that bypass the caches: what is written need not be read first, and nothing is pushed out
};

namespace detail {

constexpr std::size_t line_bytes = 64;

inline void copy_line(std::byte* to, const std::byte* from) noexcept {
#if defined(__x86_64__)
    const auto* source = reinterpret_cast<const __m128i*>(from);
    auto* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_storeu_si128(target, a);
    _mm_storeu_si128(target + 1, b);
    _mm_storeu_si128(target + 2, c);
    _mm_storeu_si128(target + 3, d);
#else
    std::memcpy(to, from, line_bytes);
#endif
}

// `to` lies on a cache line.
inline void stream_lines(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    std::size_t at = 0;
#if defined(__x86_64__)
    for (; at + line_bytes <= bytes; at += line_bytes) {
        const auto* source = reinterpret_cast<const __m128i*>(from + at);
        auto* target = reinterpret_cast<__m128i*>(to + at);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
#elif defined(__aarch64__)
    for (; at + line_bytes <= bytes; at += line_bytes)
        asm volatile(
            "ldp q0, q1, [%0]\n ldp q2, q3, [%0, #32]\n stnp q0, q1, [%1]\n stnp q2, q3, [%1, #32]\n"
            :
            : "r"(from + at), "r"(to + at)
            : "v0", "v1", "v2", "v3", "memory");
#endif
    std::memcpy(to + at, from + at, bytes - at);
}

}  // namespace detail

inline void ahead_copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    constexpr std::size_t ahead = 1 << 10;
    // Of the last lines, those that are asked for lie behind the arrays: to ask for what is not there harms nobody.
    const auto lies = [](const std::byte* memory) { return reinterpret_cast<std::uintptr_t>(memory); };
    std::size_t at = 0;
    for (; at + detail::line_bytes <= bytes; at += detail::line_bytes) {
        __builtin_prefetch(reinterpret_cast<const void*>(lies(from) + at + ahead), 0, 3);
        __builtin_prefetch(reinterpret_cast<const void*>(lies(to) + at + ahead), 1, 3);
        detail::copy_line(to + at, from + at);
    }
    std::memcpy(to + at, from + at, bytes - at);
}

inline void stream_copy(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    const std::size_t past_line = reinterpret_cast<std::uintptr_t>(to) % detail::line_bytes;
    const std::size_t head = std::min(bytes, (detail::line_bytes - past_line) % detail::line_bytes);
    std::memcpy(to, from, head);
    detail::stream_lines(to + head, from + head, bytes - head);
}

// Nothing may come from nowhere: an empty array need not have an address. Where the two meet, they are the same.
inline void copy_by(CopyBy by, std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
    if (bytes == 0 || to == from) return;
    switch (by) {
        case CopyBy::plain: return jitter::copy(to, from, bytes);
        case CopyBy::ahead: return ahead_copy(to, from, bytes);
        case CopyBy::past: return stream_copy(to, from, bytes);
    }
}

// What the last cache holds, which all cores share; more than any array has where it is not known.
inline std::size_t last_cache_bytes() noexcept {
#if defined(_SC_LEVEL3_CACHE_SIZE)
    static const long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
    if (found > 0) return static_cast<std::size_t>(found);
#endif
    return SIZE_MAX;
}

}  // namespace phalanx
