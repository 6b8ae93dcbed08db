// One GPU in this process, as a group uses it: the context that all libraries share, and a stream of the group's own.
// Nothing here blocks in the driver: copies and kernels are only put on a stream, and their end is looked for.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "driver.hpp"
#include "phalanx/waiting.hpp"

namespace phalanx::cuda {

class Gpu {
public:
    // `event`: one without timing, for this group alone. `number`: as this process counts its GPUs.
    Gpu(const Driver& driver, void* context, void* stream, void* event, int number)
        : driver(driver), stream(stream), number(number), context_(context), event_(event) {}

    const Driver driver;
    void* const stream;
    const int number;

    // Makes the GPU the current one of this thread until the end of the scope. It nearly always is already.
    class Current {
    public:
        explicit Current(const Gpu& gpu) : driver_(gpu.driver) {
            void* found = nullptr;
            driver_.cuCtxGetCurrent(&found);
            if (found == gpu.context_) return;
            check("cuCtxPushCurrent", driver_.cuCtxPushCurrent_v2(gpu.context_));
            pushed_ = true;
        }
        ~Current() {
            void* before = nullptr;
            if (pushed_) driver_.cuCtxPopCurrent_v2(&before);
        }
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

    private:
        const Driver& driver_;
        bool pushed_ = false;
    };

    // Whether what is put on a stream of the program's is recorded for a CUDA graph, and not done.
    bool is_capturing(void* programs) const noexcept {
        int status = 0;
        return programs != nullptr && (driver.cuStreamIsCapturing(programs, &status) != 0 || status != 0);
    }

    bool is_idle(void* any) const { return is_over("cuStreamQuery", driver.cuStreamQuery(any)); }

    // Waits for all that a stream of the program's has to do now. If that is nothing, no mark is put on it: while other
    // processes use the GPU, even a mark has to wait for this one's turn.
    Outcome wait_for(void* programs, const Bound& bound) const {
        if (is_idle(programs)) return Outcome::done;
        mark(programs);
        return wait_for_mark(bound);
    }

    // A mark on a stream, and the wait for it. There is one: the next takes its place.
    void mark(void* any) const { check("cuEventRecord", driver.cuEventRecord(event_, any)); }
    Outcome wait_for_mark(const Bound& bound) const {
        return wait_until_over([this] { return is_over("cuEventQuery", driver.cuEventQuery(event_)); }, bound);
    }

    // Waits until this group's stream has done all that was put on it.
    Outcome finish(const Bound& bound) const {
        return wait_until_over([this] { return is_idle(stream); }, bound);
    }

    void to_host(void* host, Address from, std::size_t bytes, void* on) const {
        check("cuMemcpyDtoHAsync", driver.cuMemcpyDtoHAsync_v2(host, from, bytes, on));
    }

    void inside(Address to, Address from, std::size_t bytes) const {
        check("cuMemcpyDtoDAsync", driver.cuMemcpyDtoDAsync_v2(to, from, bytes, stream));
    }

    // A short copy goes in two rows: plain ones are done by the multiprocessors, for which they would have to wait while
    // another process computes. Those in rows are done by a copy engine.
    void to_device(Address to, const void* host, std::size_t bytes, void* on) const {
        constexpr std::size_t short_copy = 64 << 10;
        constexpr unsigned in_host = 1, on_device = 2;
        if (bytes > short_copy || bytes % 2 != 0) {
            check("cuMemcpyHtoDAsync", driver.cuMemcpyHtoDAsync_v2(to, host, bytes, on));
            return;
        }
        Copy2D copy;
        copy.from.type = in_host;
        copy.from.host = host;
        copy.to.type = on_device;
        copy.to.device = to;
        copy.from.pitch = copy.to.pitch = copy.width = bytes / 2;
        copy.height = 2;
        check("cuMemcpy2DAsync", driver.cuMemcpy2DAsync_v2(&copy, on));
    }

private:
    static constexpr std::int64_t spin_ns = 200'000, yield_ns = 3'000'000;
    static constexpr std::int64_t first_pause_ns = 20'000, longest_pause_ns = 500'000, signals_ns = 100'000'000;

    static bool is_over(const char* function, int code) {
        constexpr int not_ready = 600;
        if (code == not_ready) return false;
        check(function, code);
        return true;
    }

    // Most of what is waited for takes microseconds; what takes longer than a few milliseconds is looked for less often.
    template <class Over>
    static Outcome wait_until_over(Over over, const Bound& bound) {
        const std::int64_t began = monotonic_ns();
        std::int64_t pause = first_pause_ns, looked = began;
        while (!over()) {
            const std::int64_t now = monotonic_ns();
            if (bound.aborted != nullptr && bound.aborted->load(std::memory_order_relaxed) != 0) return Outcome::aborted;
            if (now >= bound.deadline_ns) return Outcome::timed_out;
            if (now - began < spin_ns) {
                relax();
            } else if (now - began < yield_ns) {
                sched_yield();
            } else {
                const timespec span{0, static_cast<long>(std::min(pause, bound.deadline_ns - now))};
                nanosleep(&span, nullptr);
                pause = std::min(2 * pause, longest_pause_ns);
                if (now - looked > signals_ns && bound.interrupted != nullptr) {
                    looked = now;
                    if (bound.interrupted()) return Outcome::interrupted;
                }
            }
        }
        return Outcome::done;
    }

    void* context_;
    void* event_;
};

}  // namespace phalanx::cuda
