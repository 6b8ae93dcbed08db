// Threads that do something at the same moment, again and again, while the clock runs.
#pragma once

#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <thread>
#include <vector>

#include "waiting.hpp"

namespace phalanx {

// When to stop measuring: after so many rounds, or when the time is over; one round is always done.
struct Effort {
    int rounds = 1;
    std::int64_t budget_ns = 0;
};

namespace detail {

// Keeps this thread on one of the cores that it may use: else two members may share one for the whole measurement.
inline void stay_apart(int member) noexcept {
    cpu_set_t allowed, only;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
    int place = member % std::max(CPU_COUNT(&allowed), 1);
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (!CPU_ISSET(core, &allowed) || place-- > 0) continue;
        CPU_ZERO(&only);
        CPU_SET(core, &only);
        sched_setaffinity(0, sizeof(only), &only);
        return;
    }
}

}  // namespace detail

// The time of a round by those of its members, in ns.
using RoundTime = double (*)(const std::vector<std::int64_t>& spent);

// Where each has to do its part.
inline double of_the_slowest(const std::vector<std::int64_t>& spent) {
    return static_cast<double>(*std::max_element(spent.begin(), spent.end()));
}
// Where the parts could as well be of such lengths that all had taken the same time: on a virtual machine, a core is often slower
// than another.
inline double if_shared_out(const std::vector<std::int64_t>& spent) {
    double speeds = 0;
    for (const std::int64_t ns : spent) speeds += 1 / static_cast<double>(std::max<std::int64_t>(ns, 1));
    return static_cast<double>(spent.size()) / speeds;
}

// Calls `work(i)` on `members` threads, all at once in every round. Returns the seconds of the best round: the best is what the
// machine can do when nothing else disturbs it.
//
// The threads are new ones, on a core each. No signal comes to them: the program's own threads keep getting them.
template <class Work>
double best_round(int members, const Effort& effort, Work work, RoundTime time_of = of_the_slowest) {
    std::atomic<std::uint64_t> arrived{0};
    std::atomic<bool> over{false};
    std::vector<std::int64_t> spent(members);
    double best = std::numeric_limits<double>::infinity();
    const std::int64_t end = monotonic_ns() + effort.budget_ns;

    const auto meet = [&](std::uint64_t number) {
        arrived.fetch_add(1, std::memory_order_acq_rel);
        for (int looks = 0; arrived.load(std::memory_order_acquire) < number * members; ++looks) {
            if (looks % 64 == 63) sched_yield();  // there may be fewer cores than members
            relax();
        }
    };
    const auto play = [&](int i) {
        std::uint64_t met = 0;
        detail::stay_apart(i);
        work(i);  // warms up, and touches the memory
        for (int round = 0;; ++round) {
            meet(++met);
            if (over.load(std::memory_order_relaxed)) return;
            const std::int64_t before = monotonic_ns();
            work(i);
            spent[i] = monotonic_ns() - before;
            meet(++met);
            if (i != 0) continue;
            best = std::min(best, time_of(spent) * 1e-9);
            if (round + 1 >= effort.rounds || monotonic_ns() > end) over.store(true, std::memory_order_relaxed);
        }
    };
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::vector<std::thread> team;
    try {
        for (int i = 0; i < members; ++i) team.emplace_back(play, i);
    } catch (...) {
        // The threads that exist wait for the others: let them go.
        over.store(true);
        arrived.fetch_add(std::uint64_t{1} << 62);
        for (auto& thread : team) thread.join();
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    for (auto& thread : team) thread.join();
    return best;
}

}  // namespace phalanx
