// Waiting for another process: spin a little, give the processor away a little, then sleep in a futex.
//
// The word that a sleeper watches lies in shared memory and changes with every event that could end its wait. Whoever
// makes such an event calls `announce`; it costs a system call only if somebody sleeps. No wait is unbounded: each ends
// at its deadline, when the group is aborted in this process, or when the program was interrupted.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

#include "jitter.hpp"

namespace phalanx {

// The numbers are shared with src/phalanx/group/engines/segment.py.
enum class Outcome : int { done, timed_out, aborted, interrupted, mismatch, left, broken };

inline std::int64_t monotonic_ns() noexcept {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

inline void relax() noexcept {
#if defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // "yield" does nothing on most ARM cores; this pauses for some cycles
#elif defined(__x86_64__)
    asm volatile("pause" ::: "memory");
#endif
}

// How long to try before sleeping. With a core for every rank the answer comes within microseconds, and sleeping would
// cost more. With fewer cores the one waited for may need this very core, so it is given away at once.
struct Patience {
    int spins = 2000;
    int yields = 0;
    // After a yield that took longer, others than our ranks want the core.
    std::int64_t long_yield_ns = 50'000;
    // A yield that took less has let nobody else run: the kernel prefers this rank for now, however often it yields.
    static constexpr std::int64_t vain_yield_ns = 1'500;
};

// How many times longer than usual to try before sleeping. To wake many ranks takes so long on some machines, above all
// virtual ones, that those who were woken first sleep again before the last one is there, and have to be woken once more for the
// next step, and so on. So a sleep that was short makes this rank try longer before the next one.
class Stamina {
public:
    int times() const noexcept { return times_; }

    void slept(std::int64_t ns) noexcept { times_ = ns < short_ns ? std::min(2 * times_, most) : 1; }

private:
    static constexpr int most = 16;
    static constexpr std::int64_t short_ns = 5'000'000;

    int times_ = 1;
};

inline constexpr std::uint32_t everybody = FUTEX_BITSET_MATCH_ANY;  // who sleep on a bell

// What ends a wait besides the event that it is for.
struct Bound {
    std::int64_t deadline_ns = 0;  // on the monotonic clock
    const Shared<std::uint32_t>* aborted = nullptr;
    bool (*interrupted)() = nullptr;  // asked ten times a second while asleep; true ends the wait
    // Whether a collective that was interrupted before all ranks had met can run again: then it has not failed. From that
    // meeting on it is not interrupted, because the others are in the middle of it.
    bool resumable = false;
    // How many times longer than usual to try before sleeping: what is waited for is known to come soon.
    int eagerness = 1;
    Stamina* stamina = nullptr;  // the same by what earlier waits have shown
    // How many times to rest before sleeping until woken, for `rest_ns` each: who is waited for is about to come to this
    // step and others after it, and need not stop to wake anybody.
    int rests = 0;
    static constexpr std::int64_t rest_ns = 100'000;
    std::uint32_t sleeper = everybody;  // whom to wake: one bit of 32, where the bell is rung for some sleepers and not for others
    // Called around a wait that takes longer than a moment: what is to be let go of meanwhile.
    void (*before_long)(void*) = nullptr;
    void (*after_long)(void*) = nullptr;
    void* held = nullptr;
};

// A word to sleep on, and who went to sleep since they were woken last, a bit for each (or for several: then they are woken
// together). Lies in shared memory, on a cache line of its own.
struct alignas(64) Bell {
    Shared<std::uint32_t> word{0};
    Shared<std::uint32_t> sleepers{0};

    // After a store that could end somebody's wait.
    void announce() noexcept {
        // The store must be seen before `sleepers` is read, or a sleeper that has just looked would be missed.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_relaxed) != 0) wake();
    }

    void wake(std::uint32_t whom = everybody) noexcept {
        sleepers.fetch_and(~whom, std::memory_order_seq_cst);  // who sleeps again says so again
        word.fetch_add(1, std::memory_order_seq_cst);
        syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, whom);
    }
};

namespace detail {

constexpr std::int64_t slice_ns = 100'000'000;  // the longest sleep: then signals are looked at

inline void sleep_on(Bell& bell, std::uint32_t seen, std::int64_t ns, std::uint32_t sleeper = everybody) noexcept {
    const std::int64_t until = monotonic_ns() + ns;
    const timespec end{static_cast<time_t>(until / 1'000'000'000), static_cast<long>(until % 1'000'000'000)};
    syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&bell.word), FUTEX_WAIT_BITSET, seen, &end, nullptr, sleeper);
}

// Gives the core away. Returns how long it took to get it back. If that was long, a sleeper that is woken gets it back sooner
// than one that stands in line.
inline std::int64_t timed_yield() noexcept {
    const std::int64_t before = monotonic_ns();
    sched_yield();
    return monotonic_ns() - before;
}

template <class Ready>
Outcome wait_asleep(Bell& bell, const Bound& bound, Ready ready) {
    for (;;) {
        // In this order: if the bell is rung in between, the word has changed, and nobody falls asleep unannounced.
        const std::uint32_t seen = bell.word.load(std::memory_order_seq_cst);
        bell.sleepers.fetch_or(bound.sleeper, std::memory_order_seq_cst);
        Outcome outcome = Outcome::done;
        bool over = ready();
        if (!over && bound.aborted->load(std::memory_order_relaxed) != 0) {
            outcome = Outcome::aborted;
            over = true;
        }
        std::int64_t left = 0;
        if (!over) {
            left = bound.deadline_ns - monotonic_ns();
            if (left <= 0) {
                outcome = Outcome::timed_out;
                over = true;
            }
        }
        if (over) return outcome;
        sleep_on(bell, seen, left < slice_ns ? left : slice_ns, bound.sleeper);
        if (!ready() && bound.interrupted != nullptr && bound.interrupted()) return Outcome::interrupted;
    }
}

}  // namespace detail

// Waits until `ready()`, which reads shared memory with acquire order and has no side effects. `crowded()` tells whether
// who is waited for seems to need this very core: then spinning would only keep it from coming.
template <class Ready, class Crowded>
Outcome wait_until(Bell& bell, const Patience& patience, const Bound& bound, Ready ready, Crowded crowded) {
    int yields = patience.yields;
    bool others = false;
    const int spins = patience.spins * std::max(bound.eagerness, bound.stamina != nullptr ? bound.stamina->times() : 1);
    for (int i = 0; i < spins && !others; ++i) {
        if (ready()) return Outcome::done;
        if (i % 16 == 15 && yields > 0 && crowded()) {
            --yields;
            others = detail::timed_yield() > patience.long_yield_ns;
        } else {
            relax();
        }
    }
    for (; yields > 0 && !others; --yields) {
        if (ready()) return Outcome::done;
        const std::int64_t ns = detail::timed_yield();
        others = ns > patience.long_yield_ns;
        // Who is waited for needs this core, and gets it only if this rank sleeps. Rests are for another to run ahead, and
        // cost more than a few yields in vain.
        if (ns < Patience::vain_yield_ns && patience.spins == 0 && bound.rests == 0 && crowded()) break;
    }
    for (int i = 0; i < bound.rests; ++i) {
        const timespec span{0, Bound::rest_ns};
        nanosleep(&span, nullptr);
        if (ready()) return Outcome::done;
        if (bound.aborted->load(std::memory_order_relaxed) != 0) break;
    }
    const std::int64_t since = monotonic_ns();
    const Outcome outcome = detail::wait_asleep(bell, bound, ready);
    if (bound.stamina != nullptr) bound.stamina->slept(monotonic_ns() - since);
    return outcome;
}

template <class Ready>
Outcome wait_until(Bell& bell, const Patience& patience, const Bound& bound, Ready ready) {
    return wait_until(bell, patience, bound, ready, [] { return false; });
}

}  // namespace phalanx
