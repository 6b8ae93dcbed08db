// A segment: memory that the ranks of a group on one machine share, and how they keep step in it.
//
// Every rank counts its steps, and shows the count (release) once what belongs to the step is written. All ranks take
// the same steps in the same order, so "everybody has reached step s" (acquire) means that what they wrote before it can
// be read. A rank has `depth` slots, and what belongs to step s lies in slot s mod depth. `collectives.hpp` says for each
// operation why nobody still reads a slot that is written again.
//
//   Header | Board of rank 0, 1, ... | notes of rank 0, 1, ... | slots of rank 0, 1, ... | heap of rank 0, 1, ...
//
// The heaps hold the arrays of `Group.empty`. They are large and empty: pages exist once they are touched.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "jitter.hpp"
#include "spreading.hpp"
#include "waiting.hpp"

namespace phalanx {

inline constexpr std::size_t cache_line = 64;
inline constexpr std::size_t page = 4096;
inline constexpr int depth = 4;

// What a rank shows at a step: the count of its steps, and what others need at once. One cache line, so that a short
// operation costs one transfer between cores.
struct alignas(cache_line) Line {
    Shared<std::uint64_t> step;
    Shared<std::uint64_t> mark;    // the operation's fingerprint, at its first step
    Shared<std::uint64_t> offset;  // where the rank's array lies in the segment; 0 if it does not
    Shared<int> core;              // where the rank ran when it arrived
    std::byte small[36];
};
static_assert(sizeof(Line) == cache_line);

// What a rank shows in a short broadcast. It has many of them, so that it need not wait for the others each time.
// `wanted` is what its owner waits for at a step: two ranks may each take the other for the root.
struct alignas(cache_line) Note {
    Shared<std::uint64_t> mark;
    Shared<std::uint64_t> wanted;
    Shared<std::uint64_t> wanted_at;
    std::byte data[488];
};
inline constexpr std::uint64_t notes = 64;

// Two lines, for even and odd steps: a rank that is one step ahead does not overwrite what others still read.
struct alignas(2 * cache_line) Board {
    Line lines[2];
    Shared<std::uint32_t> left;  // whether the rank has closed its group
};

struct Header {
    std::array<unsigned char, 16> nonce;
    alignas(cache_line) Bell bell;
    alignas(cache_line) Shared<std::uint32_t> leavers;  // how many ranks have
};

// How large the parts are: the same on all ranks.
struct Layout {
    int ranks = 0;
    std::size_t slot_bytes = 0;
    std::size_t heap_bytes = 0;

    std::size_t boards() const noexcept { return page; }
    std::size_t notebooks() const noexcept { return boards() + rounded(ranks * sizeof(Board)); }
    std::size_t slots() const noexcept { return notebooks() + rounded(ranks * notes * sizeof(Note)); }
    std::size_t heaps() const noexcept { return slots() + rounded(ranks * depth * slot_bytes); }
    std::size_t bytes() const noexcept { return heaps() + ranks * rounded(heap_bytes); }

    static constexpr std::size_t rounded(std::size_t bytes) noexcept { return (bytes + page - 1) / page * page; }
};

// One rank's view of the segment. Of the threads of a process only one may keep step at a time; `abort` may come from
// any.
class Segment {
public:
    Segment(std::byte* base, const Layout& layout, int rank, const Patience& patience)
        : base_(base), layout_(layout), rank_(rank), patience_(patience), spreading_(layout.ranks) {}

    int rank() const noexcept { return rank_; }
    int ranks() const noexcept { return layout_.ranks; }
    const Layout& layout() const noexcept { return layout_; }
    std::uint64_t step() const noexcept { return step_; }

    std::byte* slot(int rank, std::uint64_t number) const noexcept {
        return base_ + layout_.slots() + (rank * depth + number % depth) * layout_.slot_bytes;
    }

    Note& note(int rank, std::uint64_t step) const noexcept {
        return reinterpret_cast<Note*>(base_ + layout_.notebooks())[rank * notes + step % notes];
    }

    std::byte* heap(int rank) const noexcept {
        return base_ + layout_.heaps() + rank * Layout::rounded(layout_.heap_bytes);
    }

    // Where an array of this rank's heap begins, as seen by all; 0 for memory that lies elsewhere.
    std::uint64_t offset_of(const void* memory, std::size_t bytes) const noexcept {
        const auto* at = static_cast<const std::byte*>(memory);
        const std::byte* first = heap(rank_);
        const bool inside = at >= first && at + bytes <= first + layout_.heap_bytes;
        return inside && bytes > 0 ? static_cast<std::uint64_t>(at - base_) : 0;
    }

    // An array of another rank, which must lie in that rank's heap: what was read from shared memory is not trusted.
    std::byte* at(int rank, std::uint64_t offset, std::size_t bytes) const noexcept {
        const auto first = static_cast<std::uint64_t>(heap(rank) - base_);
        const bool inside = offset >= first && offset - first <= layout_.heap_bytes &&
                            bytes <= layout_.heap_bytes - (offset - first);
        return inside ? base_ + offset : nullptr;
    }

    // What this rank shows at its next step; others see it once it has arrived there.
    Line& next_line() const noexcept { return line(rank_, step_ + 1); }
    const Line& line_of(int rank, std::uint64_t step) const noexcept { return line(rank, step); }

    // Takes the next step without waiting for those who are behind, and wakes whoever waits for this rank alone.
    void hurry() noexcept {
        arrive();
        wake_sleepers();
    }

    // Takes the next step.
    void arrive() noexcept {
        ++step_;
        // One order for all: seen before the sleepers are counted, or one that has just looked would be missed.
        Line& mine = line(rank_, step_);
        mine.core.store(sched_getcpu(), std::memory_order_relaxed);
        mine.step.store(step_, std::memory_order_seq_cst);
        Bell& bell = header().bell;
        // Only the last one to arrive wakes the others: they all wait for everybody.
        if (bell.sleepers.load(std::memory_order_seq_cst) != 0 && all_reached(step_)) bell.wake();
    }

    // Waits until everybody has reached a step.
    Outcome wait(std::uint64_t step, const Bound& limits) {
        return wait(step, limits, 0, layout_.ranks, [] { return false; });
    }

    // Waits until one rank has, or `hopeless()`.
    template <class Hopeless>
    Outcome wait_for(int rank, std::uint64_t step, const Bound& limits, Hopeless hopeless) {
        return wait(step, limits, rank, rank + 1, hopeless);
    }

    bool reached(int rank, std::uint64_t step) const noexcept {
        return line(rank, step).step.load(std::memory_order_seq_cst) >= step;
    }

    // Makes everybody who sleeps look again.
    void wake_sleepers() noexcept {
        Bell& bell = header().bell;
        if (bell.sleepers.load(std::memory_order_seq_cst) != 0) bell.wake();
    }

    // The ranks that the last wait was for and that had not come.
    std::vector<int> missing() const {
        std::vector<int> found;
        for (int rank = awaited_.first; rank < awaited_.second; ++rank)
            if (!reached(rank, waited_for_)) found.push_back(rank);
        return found;
    }

    int leaver() const noexcept { return leaver_; }  // a rank that closed its group before it came

    // This rank will not come again: whoever waits for it need not.
    void leave() noexcept {
        boards()[rank_].left.store(1, std::memory_order_seq_cst);
        header().leavers.fetch_add(1, std::memory_order_seq_cst);
        abort();
    }

    // Ends every wait of this process, now and later.
    void abort() noexcept {
        aborted_.store(1, std::memory_order_seq_cst);
        header().bell.wake();
    }

    bool aborted() const noexcept { return aborted_.load(std::memory_order_relaxed) != 0; }

private:
    static constexpr int moment = 50;  // looks at the others, about a microsecond

    // For the ranks from `first` up to `last`.
    template <class Hopeless>
    Outcome wait(std::uint64_t step, const Bound& limits, int first, int last, Hopeless hopeless) {
        waited_for_ = step;
        awaited_ = {first, last};
        Bound bound = limits;
        bound.aborted = &aborted_;
        int known = first;  // ranks below are there
        leaver_ = -1;
        const auto ready = [&] {
            while (known < last && reached(known, step)) ++known;
            return known == last || hopeless() || find_leaver(known, last, step);
        };
        const auto crowded = [&] {
            return line(known, step - 1).core.load(std::memory_order_relaxed) == sched_getcpu();
        };
        bool is_ready = ready();
        for (int i = 0; i < moment && !is_ready; ++i) {
            relax();
            is_ready = ready();
        }
        Outcome outcome = Outcome::done;
        if (!is_ready) {
            spreading_.look(rank_, layout_.ranks, [&](int r) {
                return line(r, step - 1).core.load(std::memory_order_relaxed);
            });
            if (bound.before_long != nullptr) bound.before_long(bound.held);
            outcome = wait_until(header().bell, patience_, bound, ready, crowded);
            if (bound.after_long != nullptr) bound.after_long(bound.held);
        }
        return leaver_ < 0 ? outcome : Outcome::left;
    }

    Header& header() const noexcept { return *reinterpret_cast<Header*>(base_); }

    Board* boards() const noexcept { return reinterpret_cast<Board*>(base_ + layout_.boards()); }
    Line& line(int rank, std::uint64_t step) const noexcept { return boards()[rank].lines[step % 2]; }

    bool find_leaver(int first, int last, std::uint64_t step) noexcept {
        if (header().leavers.load(std::memory_order_seq_cst) == 0) return false;
        for (int rank = first; rank < last; ++rank)
            // In this order: it may have come, and left afterwards.
            if (boards()[rank].left.load(std::memory_order_seq_cst) != 0 && !reached(rank, step)) leaver_ = rank;
        return leaver_ >= 0;
    }

    bool all_reached(std::uint64_t step) const noexcept {
        for (int rank = 0; rank < layout_.ranks; ++rank)
            if (!reached(rank, step)) return false;
        return true;
    }

    std::byte* base_;
    Layout layout_;
    int rank_;
    Patience patience_;
    Spreading spreading_;
    std::uint64_t step_ = 0;
    std::uint64_t waited_for_ = 0;
    std::pair<int, int> awaited_{0, 0};
    int leaver_ = -1;
    Shared<std::uint32_t> aborted_{0};
};

}  // namespace phalanx
