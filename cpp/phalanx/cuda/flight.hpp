// The right to write to the memory of all ranks: held by the executor while its kernel may run, and taken away for good by a
// rank that gives an operation up.
//
// After a call has raised on a rank, nobody may write to that rank's memory any more, but a kernel cannot be called back. So
// a rank that gives up closes the flight. If no kernel was under way, none begins any more. If one was, the rank also sets a
// word on the GPU, without which no thread of a kernel writes, and waits: until the executor says that its kernel has ended,
// until its process has (then the GPU's driver has taken down what it had running), or for 0.8 s, because a rank that died
// must be named within a second. A kernel takes some milliseconds. So one that had begun before the word was set has ended by
// then, also if the executor's process is stopped and cannot say so. One that it launches when it goes on finds the word, and
// writes nothing.
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "gpu.hpp"
#include "phalanx/jitter.hpp"

namespace phalanx::cuda {

class Flight {
public:
    // `state` is shared by all ranks. `executor`: the process that executes; 0 if it is this one.
    Flight(Shared<std::uint32_t>& state, pid_t executor) : state_(state) {
#ifdef SYS_pidfd_open
        if (executor != 0) process_ = static_cast<int>(syscall(SYS_pidfd_open, executor, 0));
#endif
    }
    ~Flight() {
        if (process_ >= 0) ::close(process_);
    }
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;

    // Before a kernel is launched; false if a rank has given up.
    bool begin() noexcept {
        std::uint32_t none = 0;
        return state_.compare_exchange_strong(none, flying, std::memory_order_seq_cst);
    }

    // When it has ended.
    void end() noexcept { state_.fetch_and(~flying, std::memory_order_seq_cst); }

    // Returns once no kernel can write to this rank's memory any more, now or later. `close` sets the word on the GPU.
    template <class Close>
    void give_up(Close close) noexcept {
        if ((state_.fetch_or(closed, std::memory_order_seq_cst) & flying) == 0) return;
        close();
        const std::int64_t end = monotonic_ns() + patience_ns;
        while ((state_.load(std::memory_order_seq_cst) & flying) != 0 && !has_ended() && monotonic_ns() < end) {
            constexpr timespec pause{0, 200'000};
            nanosleep(&pause, nullptr);
        }
    }

private:
    static constexpr std::uint32_t flying = 1, closed = 2;
    static constexpr std::int64_t patience_ns = 800'000'000;

    bool has_ended() const noexcept {
        pollfd ended{process_, POLLIN, 0};
        return process_ >= 0 && poll(&ended, 1, 0) > 0;
    }

    Shared<std::uint32_t>& state_;
    int process_ = -1;
};

}  // namespace phalanx::cuda
