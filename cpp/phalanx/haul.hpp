// The long copies of one operation: they are named first, and then made together, by several threads where there are cores to
// spare.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <vector>

#include "crew.hpp"
#include "long_copy.hpp"
#include "segment.hpp"
#include "turns.hpp"

namespace phalanx {

struct Load {
    std::byte* to;
    const std::byte* from;  // in memory that this process has; null if it lies in another's:
    int rank;               // in that of this rank,
    std::uint64_t home;     // at this address
    std::size_t bytes;
    std::size_t place;   // in the array that it is of
    CopyBy by;
    bool missed = false;

    Load part(std::size_t begin, std::size_t size) const noexcept {
        return {to + begin, from == nullptr ? nullptr : from + begin, rank, home + begin, size, place + begin, by};
    }
};

class Haul {
public:
    // An operation names one for each rank at most.
    Haul(Segment& segment, Crew& crew) : s_(segment), crew_(crew) { loads_.reserve(static_cast<std::size_t>(segment.ranks())); }

    bool empty() const noexcept { return loads_.empty(); }

    // From the memory of another rank's process, past the caches or not; `home` is that of its array.
    void read(std::byte* to, int rank, std::uint64_t home, std::size_t place, std::size_t bytes, bool past) {
        if (bytes > 0) loads_.push_back({to, nullptr, rank, home + place, bytes, place, past ? CopyBy::past : CopyBy::plain});
    }
    void copy(std::byte* to, const std::byte* from, std::size_t bytes, CopyBy by) {
        if (bytes > 0 && to != from) loads_.push_back({to, from, 0, 0, bytes, 0, by});
    }

    // Makes all of them, with so many threads that help at most, if there is so much to do that they are worth calling: those of
    // each rank, if nothing else is said. `miss(load)` is called for each that could not be read.
    template <class Miss>
    void carry_out(Miss miss) {
        carry_out(s_.thresholds().helpers, s_.thresholds().worth_helping, miss);
    }
    template <class Miss>
    void carry_out(int most, std::size_t worth, Miss miss) {
        if (loads_.empty()) return;
        const Emptying at_end{loads_};
        std::size_t total = 0;
        for (const Load& load : loads_) total += load.bytes;
        const int helpers = std::min(most, crew_.helpers_for(total, worth));
        if (helpers == 0)
            carry_by_turns();
        else
            share(Crew::piece_of(total, helpers, worth), helpers);
        for (const Load& load : loads_)
            if (load.missed) miss(load);
    }

private:
    static constexpr std::size_t scratch_bytes = 512 << 10;  // within the second-level cache of a core
    using Scratch = std::unique_ptr<std::byte[]>;

    // Whatever happens: the next operation has nothing to do with these.
    struct Emptying {
        std::vector<Load>& loads;
        ~Emptying() { loads.clear(); }
    };

    void carry_by_turns() noexcept {
        backwards_ = !backwards_;
        if (!backwards_) {
            for (Load& load : loads_) load.missed = !carry(load, 0);
            return;
        }
        for (auto load = loads_.rbegin(); load != loads_.rend(); ++load)
            each_piece(load->bytes, backward_piece(load->bytes), true, [&](std::size_t from, std::size_t size) {
                load->missed = load->missed || !carry(load->part(from, size), 0);
            });
    }

    bool carry(const Load& load, int hand) noexcept {
        if (load.from != nullptr) {
            copy_by(load.by, load.to, load.from, load.bytes);
            return true;
        }
        if (load.by == CopyBy::past) return read_past_caches(load, scratch_[static_cast<std::size_t>(hand)]);
        return s_.read(load.rank, load.to, load.home, load.bytes);
    }

    // The kernel copies into the caches. So it copies piece by piece to where they hold it, and from there it goes on past them.
    bool read_past_caches(const Load& load, Scratch& scratch) const noexcept {
        if (scratch == nullptr) scratch.reset(new (std::nothrow) std::byte[scratch_bytes + cache_line]);
        if (scratch == nullptr) return s_.read(load.rank, load.to, load.home, load.bytes);
        // It lies in its lines as the array does: the kernel is quicker then.
        const std::uintptr_t lies = reinterpret_cast<std::uintptr_t>(scratch.get());
        std::byte* const piece = scratch.get() + (load.home - lies) % cache_line;
        for (std::size_t at = 0; at < load.bytes; at += scratch_bytes) {
            const std::size_t size = std::min(scratch_bytes, load.bytes - at);
            if (!s_.read(load.rank, piece, load.home + at, size)) return false;
            stream_copy(load.to + at, piece, size);
        }
        return true;
    }

    void share(std::size_t piece, int helpers) {
        const auto pieces_of = [piece](const Load& load) { return (load.bytes + piece - 1) / piece; };
        std::size_t pieces = 0;
        for (const Load& load : loads_) pieces += pieces_of(load);
        auto work = [&](std::size_t k, int hand) {
            auto load = loads_.begin();
            for (; k >= pieces_of(*load); ++load) k -= pieces_of(*load);
            if (!carry(load->part(k * piece, std::min(piece, load->bytes - k * piece)), hand))
                std::atomic_ref<bool>(load->missed).store(true, std::memory_order_relaxed);
        };
        crew_.share(pieces, helpers, work);
    }

    Segment& s_;
    Crew& crew_;
    std::array<Scratch, Crew::largest + 1> scratch_;  // of each hand, once it has used it
    std::vector<Load> loads_;
    bool backwards_ = true;  // the last time that no helper was called
};

}  // namespace phalanx
