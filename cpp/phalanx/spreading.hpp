// Keeps the ranks of a machine apart when they fill it.
//
// Ranks that wake each other are drawn to one core, and as they run for microseconds only, the kernel takes long to move
// them apart again: half of the machine can stand idle meanwhile. A rank that finds more of them on its core than there
// should be moves itself, once: its own affinity is set to another core and at once back to what it was.
#pragma once

#include <sched.h>

#include <cstdint>
#include <vector>

#include "waiting.hpp"

namespace phalanx {

// Moves this thread to another core, and lets it be moved from there as before. Not if its affinity is not `allowed`.
inline void move_to(int core, const cpu_set_t& allowed) noexcept {
    cpu_set_t before, only;
    if (sched_getaffinity(0, sizeof(before), &before) != 0 || !CPU_EQUAL(&before, &allowed)) return;
    CPU_ZERO(&only);
    CPU_SET(core, &only);
    if (sched_setaffinity(0, sizeof(only), &only) == 0) sched_setaffinity(0, sizeof(before), &before);
}

// Keeps this thread on one core for as long as this exists. Not if its affinity is not `allowed`.
class StayOn {
public:
    StayOn(int core, const cpu_set_t& allowed) noexcept : allowed_(allowed) {
        cpu_set_t before;
        if (sched_getaffinity(0, sizeof(before), &before) != 0 || !CPU_EQUAL(&before, &allowed)) return;
        CPU_ZERO(&only_);
        CPU_SET(core, &only_);
        stays_ = sched_setaffinity(0, sizeof(only_), &only_) == 0;
    }
    StayOn(const StayOn&) = delete;
    StayOn& operator=(const StayOn&) = delete;
    ~StayOn() {
        cpu_set_t now;  // somebody may have moved it elsewhere meanwhile
        if (stays_ && sched_getaffinity(0, sizeof(now), &now) == 0 && CPU_EQUAL(&now, &only_))
            sched_setaffinity(0, sizeof(allowed_), &allowed_);
    }

private:
    cpu_set_t allowed_;
    cpu_set_t only_;
    bool stays_ = false;
};

// As `Spreading`, for two that wait for each other: one of them moves on to the next core.
class Parting {
public:
    // This thread is about to wait, and the one that it waits for was seen on the same core.
    void look() noexcept {
        if (++looks_ % every == 0) move(pause_ns);
    }

    // This thread was woken on the core of the one that woke it, where the kernel likes to put it, and which may go on.
    void woken() noexcept { move(woken_pause_ns); }

private:
    static constexpr int every = 8;  // waits between two moves
    static constexpr std::int64_t pause_ns = 2'000'000;
    static constexpr std::int64_t woken_pause_ns = 200'000;

    void move(std::int64_t least_pause_ns) noexcept {
        const std::int64_t now = monotonic_ns();
        cpu_set_t allowed;
        if (now - moved_ns_ < least_pause_ns || sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
        const int here = sched_getcpu();
        for (int i = 1; i < CPU_SETSIZE; ++i) {
            const int core = (here + i) % CPU_SETSIZE;
            if (!CPU_ISSET(core, &allowed)) continue;
            moved_ns_ = now;
            return core == here ? void() : move_to(core, allowed);
        }
    }

    int looks_ = 0;
    std::int64_t moved_ns_ = 0;
};

class Spreading {
public:
    // Only where the ranks fill all cores that they may use: otherwise the kernel has idle ones to choose from.
    explicit Spreading(int ranks) {
        if (sched_getaffinity(0, sizeof(allowed_), &allowed_) != 0) return;
        for (int core = 0; core < CPU_SETSIZE; ++core)
            if (CPU_ISSET(core, &allowed_)) cores_.push_back(core);
        if (cores_.size() < 2 || static_cast<std::size_t>(ranks) < cores_.size()) cores_.clear();
        share_ = cores_.empty() ? 0 : (ranks + static_cast<int>(cores_.size()) - 1) / static_cast<int>(cores_.size());
    }

    // Before a wait for `step`; `core_of(r)` is where rank r was seen last. The ranks look at the same steps, so that they see
    // the same and as many move as have to.
    template <class CoreOf>
    void look(std::uint64_t step, int rank, int ranks, CoreOf core_of) {
        if (cores_.empty() || step / every == looked_) return;
        looked_ = step / every;
        const int here = sched_getcpu();
        if (!is_surplus(rank, here, share_, core_of)) return;
        const std::int64_t now = monotonic_ns();
        if (now - moved_ns_ < pause_ns) return;
        moved_ns_ = now;
        move(rank, ranks, here, core_of);
    }

    // Whether this rank is one of those that are too many on its core: the last ones are. All of them move at once. If only one
    // did, a core with most of the ranks would stay so for as long as many operations take, as the kernel also brings some back.
    template <class CoreOf>
    static bool is_surplus(int rank, int here, int share, CoreOf core_of) {
        int before = 0;
        for (int r = 0; r < rank; ++r)
            if (core_of(r) == here) ++before;
        return before >= share;
    }

private:
    static constexpr std::uint64_t every = 4;             // steps between two looks
    static constexpr std::int64_t pause_ns = 2'000'000;  // between two moves

    template <class CoreOf>
    void move(int rank, int ranks, int here, CoreOf core_of) {
        int best = here;
        int fewest = ranks;
        for (std::size_t i = 0; i < cores_.size(); ++i) {
            // Each rank begins elsewhere: of several that move at once, not all go to the same core.
            const int core = cores_[(static_cast<std::size_t>(rank) + i) % cores_.size()];
            int crowd = 0;
            for (int r = 0; r < ranks; ++r)
                if (r != rank && core_of(r) == core) ++crowd;
            if (core != here && crowd < fewest) {
                best = core;
                fewest = crowd;
            }
        }
        if (best != here) move_to(best, allowed_);
    }

    cpu_set_t allowed_{};
    std::vector<int> cores_;
    int share_ = 0;  // ranks that a core should have
    std::uint64_t looked_ = 0;
    std::int64_t moved_ns_ = 0;
};

}  // namespace phalanx
