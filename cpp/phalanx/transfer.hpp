// Whole messages through a ring, in pieces, so that both sides copy at the same time and the pieces stay in the cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "phalanx/ring.hpp"

namespace phalanx {

namespace detail {

// Long messages go in longer pieces: fewer announcements, and the first piece no longer counts.
inline std::size_t piece_of(std::size_t message) noexcept { return message < (512u << 10) ? 32u << 10 : 64u << 10; }

template <class Ready>
Outcome wait_on(RingHalf& ring, const Patience& patience, const Bound& bound, Ready ready) {
    ring.part();
    const auto over = [&] { return ready() || ring.other_closed(); };
    const Outcome outcome = wait_until(ring.bell(), patience, bound, over, [&] { return ring.shares_core(); });
    if (outcome != Outcome::done) return outcome;
    return ready() ? Outcome::done : Outcome::aborted;
}

}  // namespace detail

// Waits until `count` bytes are there. `aborted` if the other side closes first.
inline Outcome await_bytes(RingReader& ring, std::size_t count, const Patience& patience, const Bound& bound) {
    return detail::wait_on(ring, patience, bound, [&] { return ring.available(count) >= count || ring.broken(); });
}

// Waits until `count` bytes fit.
inline Outcome await_room(RingWriter& ring, std::size_t count, const Patience& patience, const Bound& bound) {
    return detail::wait_on(ring, patience, bound, [&] { return ring.room(count) >= count || ring.broken(); });
}

// Writes on from `done`, which counts the bytes that are through, also where the outcome is not `done`.
inline Outcome write_on(RingWriter& ring, const std::byte* from, std::size_t size, std::size_t& done,
                        const Patience& patience, const Bound& bound) {
    const std::size_t piece = detail::piece_of(size);
    while (done < size) {
        if (ring.other_closed() || bound.aborted->load(std::memory_order_relaxed) != 0) return Outcome::aborted;
        const std::size_t count = std::min({ring.room(1), size - done, piece});
        if (count == 0) {
            const Outcome outcome = ring.broken() ? Outcome::aborted : await_room(ring, 1, patience, bound);
            if (outcome != Outcome::done) return outcome;
            continue;
        }
        ring.put(from + done, count, ring.copies(size));
        ring.publish();
        done += count;
    }
    return Outcome::done;
}

// Reads on from `done`, as `write_on`. Ends early, as done, if `elsewhere()`: what comes next does not come through the ring.
template <class Elsewhere>
Outcome read_on(RingReader& ring, std::byte* to, std::size_t size, std::size_t& done, const Patience& patience, const Bound& bound,
                Elsewhere elsewhere) {
    const std::size_t piece = detail::piece_of(size);
    while (done < size) {
        if (bound.aborted->load(std::memory_order_relaxed) != 0) return Outcome::aborted;
        const std::size_t count = std::min({ring.available(1), size - done, piece});
        if (count == 0) {
            if (elsewhere()) return Outcome::done;
            const auto comes = [&] { return ring.available(1) >= 1 || ring.broken() || elsewhere(); };
            const Outcome outcome = ring.broken() ? Outcome::aborted : detail::wait_on(ring, patience, bound, comes);
            if (outcome != Outcome::done) return outcome;
            continue;
        }
        ring.peek(to + done, count, 0, ring.copies(size));
        ring.skip(count);
        ring.publish();
        done += count;
    }
    return Outcome::done;
}
inline Outcome read_on(RingReader& ring, std::byte* to, std::size_t size, std::size_t& done, const Patience& patience,
                       const Bound& bound) {
    return read_on(ring, to, size, done, patience, bound, [] { return false; });
}

}  // namespace phalanx
