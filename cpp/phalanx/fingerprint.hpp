// 64 bits that say which operation this is; the same numbers as src/phalanx/group/tracking/fingerprint.py.
#pragma once

#include <cstdint>

namespace phalanx {

constexpr std::uint64_t mix(std::uint64_t x) noexcept {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

// A shape as a number: arrays of (2, 3) and of (3, 2) are not alike.
template <class Length>
constexpr std::uint64_t extent_of(const Length* shape, int dims) noexcept {
    std::uint64_t extent = static_cast<std::uint64_t>(dims);
    for (int i = 0; i < dims; ++i) extent = mix(extent ^ mix(static_cast<std::uint64_t>(shape[i]) + 1));
    return extent;
}

// `kind` stands for what does not change from call to call: the operation, the dtype and the reduction.
constexpr std::uint64_t fingerprint_of(std::uint64_t kind, std::uint64_t sequence, std::uint64_t extent,
                                    std::uint64_t root) noexcept {
    std::uint64_t fingerprint = kind;
    for (const std::uint64_t part : {sequence, extent, root}) fingerprint = mix(fingerprint ^ mix(part + 1));
    return fingerprint != 0 ? fingerprint : 1;
}

}  // namespace phalanx
