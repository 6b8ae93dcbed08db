// Wakes a background thread for work that no other thread has done within a moment.
//
// Most asynchronous operations are waited for at once, by a thread that then does them itself. Handing them over first would
// cost two changes of threads each. So the background thread is not woken: while there is work now and then, it wakes up by
// itself to see whether any has become old, without taking the GIL, and falls asleep only after a while without.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>

#include "gil.hpp"
#include "phalanx/waiting.hpp"

namespace phalanx {

class Alarm {
public:
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
        int idle = 0;
        for (;;) {
            const std::uint32_t seen = bell_.word.load(std::memory_order_seq_cst);
            if (stopped_.load(std::memory_order_seq_cst)) return false;
            const std::int64_t armed = armed_at_.load(std::memory_order_seq_cst);
            if (armed != 0) {
                idle = 0;
                const std::int64_t left = armed + grace_ns - monotonic_ns();
                if (left <= 0) return true;
                detail::sleep_on(bell_, seen, left);
            } else if (++idle < naps) {
                detail::sleep_on(bell_, seen, nap_ns);
            } else {
                asleep_.store(true, std::memory_order_seq_cst);
                if (armed_at_.load(std::memory_order_seq_cst) == 0) detail::sleep_on(bell_, seen, long_ns);
                asleep_.store(false, std::memory_order_seq_cst);
                idle = 0;
            }
        }
    }

private:
    static constexpr std::int64_t grace_ns = 500'000;
    static constexpr std::int64_t nap_ns = 1'000'000;
    static constexpr int naps = 20;
    static constexpr std::int64_t long_ns = 3'600'000'000'000;

    std::atomic<std::int64_t> armed_at_{0};  // 0: there is no work
    std::atomic<bool> asleep_{false}, stopped_{false};
    Bell bell_;
};

}  // namespace phalanx
