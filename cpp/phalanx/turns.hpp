// Bytes that are copied again and again, forwards and backwards by turns: what a cache has kept of the end of the last time
// is there at the beginning of the next. Always forwards, each line would have been pushed out just before it is needed.
#pragma once

#include <algorithm>
#include <cstddef>

namespace phalanx {

// `use(from, size)` for each piece of so many bytes.
template <class Use>
void each_piece(std::size_t bytes, std::size_t piece, bool backwards, Use use) {
    const std::size_t pieces = (bytes + piece - 1) / piece;
    for (std::size_t k = 0; k < pieces; ++k) {
        const std::size_t from = (backwards ? pieces - 1 - k : k) * piece;
        use(from, std::min(piece, bytes - from));
    }
}

// Of what goes in few pieces, because each costs a system call.
inline std::size_t backward_piece(std::size_t bytes) noexcept {
    constexpr std::size_t least = 128 << 10;  // a small part of the caches that it is for
    return std::max(least, bytes / 16 / least * least);
}

}  // namespace phalanx
