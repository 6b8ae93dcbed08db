// Wakes a background thread for work that no other thread has done within a moment.
//
// Most asynchronous operations are waited for at once, by a thread that then does them itself. Handing them over first would
// cost two changes of threads each. So the background thread is not woken: while there is work now and then, it wakes up by
// itself to see whether any has become old, without taking the GIL, and falls asleep only after a while without.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "gil.hpp"
#include "phalanx/waiting.hpp"

namespace phalanx {

class Alarm {
public:
    // `longest_nap`: in seconds. The longer there was nothing urgent, the longer are the naps, up to that. Each takes time from a
    // thread that does its work itself, where there are no more cores than those.
    explicit Alarm(double longest_nap = 0.001) : longest_nap_ns_(static_cast<std::int64_t>(longest_nap * 1e9)) {}

    // There is work. It is urgent once it is `grace_ns` old. Called with the lock held that guards the work, as `disarm` is.
    void arm() noexcept {
        if (armed_at_.load(std::memory_order_relaxed) != 0) return;  // there is older work
        armed_at_.store(monotonic_ns(), std::memory_order_seq_cst);
        if (asleep_.load(std::memory_order_seq_cst)) bell_.wake();
    }

    // There is no more work.
    void disarm() noexcept { armed_at_.store(0, std::memory_order_seq_cst); }

    // The work is urgent now.
    void hurry() noexcept {
        armed_at_.store(1, std::memory_order_seq_cst);
        bell_.wake();
    }

    void stop() noexcept {
        stopped_.store(true, std::memory_order_seq_cst);
        bell_.wake();
    }

    // For the background thread: returns when there is urgent work; false once it was stopped.
    bool wait() {
        const WithoutGil released;
        std::int64_t nap = nap_ns, idle = 0;
        for (;;) {
            const std::uint32_t seen = bell_.word.load(std::memory_order_seq_cst);
            if (stopped_.load(std::memory_order_seq_cst)) return false;
            const std::int64_t armed = armed_at_.load(std::memory_order_seq_cst);
            if (armed != 0) {
                idle = 0;
                const std::int64_t left = armed + grace_ns - monotonic_ns();
                if (left <= 0) return true;
                detail::sleep_on(bell_, seen, nap == nap_ns ? left : nap);
                nap = std::min(2 * nap, longest_nap_ns_);
            } else if (idle < awake_ns) {
                detail::sleep_on(bell_, seen, nap);
                idle += nap;
                nap = std::min(2 * nap, longest_nap_ns_);
            } else {
                asleep_.store(true, std::memory_order_seq_cst);
                if (armed_at_.load(std::memory_order_seq_cst) == 0) detail::sleep_on(bell_, seen, long_ns);
                asleep_.store(false, std::memory_order_seq_cst);
                idle = 0;
                nap = nap_ns;
            }
        }
    }

private:
    static constexpr std::int64_t grace_ns = 500'000;
    static constexpr std::int64_t nap_ns = 1'000'000;
    static constexpr std::int64_t awake_ns = 20 * nap_ns;
    static constexpr std::int64_t long_ns = 3'600'000'000'000;

    const std::int64_t longest_nap_ns_;
    std::atomic<std::int64_t> armed_at_{0};  // 0: there is no work
    std::atomic<bool> asleep_{false}, stopped_{false};
    Bell bell_;
};

}  // namespace phalanx
