// Pauses between any two steps on shared memory, drawn from a seed: what a busy machine does once in a million runs
// happens in every one. Built with -DPHALANX_JITTER only (`make jitter`); otherwise all of it compiles to nothing.
//
//   Shared<T>        std::atomic<T>; with jitter, a pause before and after each access
//   jitter::step()   a place where another thread or process may come in between
//   jitter::copy()   memcpy; with jitter, in pieces with pauses between them
#pragma once

#include <atomic>
#include <cstddef>
#include <cstring>

#if defined(PHALANX_JITTER)
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#endif

namespace phalanx {

#if !defined(PHALANX_JITTER)

template <class T>
using Shared = std::atomic<T>;

namespace jitter {

inline void step() noexcept {}
inline void copy(void* to, const void* from, std::size_t bytes) noexcept { std::memcpy(to, from, bytes); }

}  // namespace jitter

#else

namespace jitter {

// What the seed says about this process: how often it pauses, and for how long at most. Some processes are quick and some
// are slow, because it is the difference between them that opens a race.
struct Temper {
    std::uint64_t one_in = 0;  // 0: no pauses
    double longest_us = 0.0;
};

inline std::uint64_t next(std::uint64_t& state) noexcept {  // splitmix64
    std::uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

struct State {
    std::atomic<std::uint64_t> seed{0};
    std::atomic<std::uint64_t> generation{0};  // of the seed: threads notice a new one by it
    std::atomic<std::uint64_t> threads{0};     // that have drawn from this seed
};
inline State state;

// From now on this process pauses as the seed says; not at all with 0. Threads are told apart by the order in which they
// come here.
inline void seed(std::uint64_t value) noexcept {
    state.seed.store(value);
    state.threads.store(0);
    state.generation.fetch_add(1);
}

class Thread {
public:
    void step() noexcept {
        const std::uint64_t now = state.generation.load(std::memory_order_relaxed);
        if (now != generation_) begin(now);
        if (temper_.one_in == 0) return;
        const std::uint64_t drawn = next(random_);
        if (drawn % temper_.one_in != 0) return;
        if ((drawn >> 32) % rare == 0) return sleep(long_us);
        // Every order of magnitude is as likely: races have windows of all sizes.
        const double part = static_cast<double>(next(random_) >> 11) * 0x1p-53;
        pause(std::exp(part * std::log(temper_.longest_us)));
    }

private:
    static constexpr std::uint64_t rare = 1000;
    static constexpr double long_us = 20'000.0;

    void begin(std::uint64_t generation) noexcept {
        generation_ = generation;
        std::uint64_t of_process = state.seed.load();
        temper_ = {};
        if (of_process == 0) return;
        constexpr std::uint64_t rates[] = {8, 32, 128, 1024};
        constexpr double longest[] = {30.0, 300.0, 3000.0};
        temper_.one_in = rates[next(of_process) % std::size(rates)];
        temper_.longest_us = longest[next(of_process) % std::size(longest)];
        random_ = of_process ^ (state.threads.fetch_add(1) * 0xd1342543de82ef95u);
    }

    static void sleep(double us) noexcept {
        const timespec span{0, static_cast<long>(us * 1e3)};
        nanosleep(&span, nullptr);
    }

    static void pause(double us) noexcept {
        if (us > 20.0) return sleep(us);
        timespec begin{}, now{};
        clock_gettime(CLOCK_MONOTONIC, &begin);
        do {
            sched_yield();
            clock_gettime(CLOCK_MONOTONIC, &now);
        } while ((now.tv_sec - begin.tv_sec) * 1e6 + (now.tv_nsec - begin.tv_nsec) * 1e-3 < us);
    }

    std::uint64_t generation_ = 0;
    std::uint64_t random_ = 0;
    Temper temper_;
};

inline void step() noexcept {
    static thread_local Thread mine;
    mine.step();
}

inline void copy(void* to, const void* from, std::size_t bytes) noexcept {
    constexpr std::size_t pieces = 4;
    const std::size_t piece = std::max<std::size_t>(bytes / pieces, 1);
    for (std::size_t at = 0; at < bytes; at += piece) {
        step();
        std::memcpy(static_cast<char*>(to) + at, static_cast<const char*>(from) + at, std::min(piece, bytes - at));
    }
    step();
}

}  // namespace jitter

template <class T>
class Shared {
public:
    Shared() noexcept = default;
    constexpr Shared(T value) noexcept : value_(value) {}

    T load(std::memory_order order = std::memory_order_seq_cst) const noexcept {
        return between([&] { return value_.load(order); });
    }
    void store(T value, std::memory_order order = std::memory_order_seq_cst) noexcept {
        between([&] { return value_.store(value, order), 0; });
    }
    T exchange(T value, std::memory_order order = std::memory_order_seq_cst) noexcept {
        return between([&] { return value_.exchange(value, order); });
    }
    T fetch_add(T value, std::memory_order order = std::memory_order_seq_cst) noexcept {
        return between([&] { return value_.fetch_add(value, order); });
    }
    T fetch_sub(T value, std::memory_order order = std::memory_order_seq_cst) noexcept {
        return between([&] { return value_.fetch_sub(value, order); });
    }
    T fetch_or(T value, std::memory_order order = std::memory_order_seq_cst) noexcept {
        return between([&] { return value_.fetch_or(value, order); });
    }
    T fetch_and(T value, std::memory_order order = std::memory_order_seq_cst) noexcept {
        return between([&] { return value_.fetch_and(value, order); });
    }
    template <class... Orders>
    bool compare_exchange_strong(T& expected, T wanted, Orders... orders) noexcept {
        return between([&] { return value_.compare_exchange_strong(expected, wanted, orders...); });
    }
    template <class... Orders>
    bool compare_exchange_weak(T& expected, T wanted, Orders... orders) noexcept {
        return between([&] { return value_.compare_exchange_weak(expected, wanted, orders...); });
    }

    static constexpr bool is_always_lock_free = std::atomic<T>::is_always_lock_free;

private:
    template <class F>
    static auto between(F access) noexcept {
        jitter::step();
        const auto result = access();
        jitter::step();
        return result;
    }

    std::atomic<T> value_;
};

#endif

}  // namespace phalanx
