// Whose turn it is to run a collective of a group. Taken by the fast path without a call into Python.
#pragma once

#include <nanobind/nanobind.h>

#include "gil.hpp"
#include "phalanx/waiting.hpp"

namespace phalanx {

// The GIL guards all of it but the word that waiting threads sleep on.
class TurnLock {
public:
    bool try_acquire() noexcept {
        if (held_) return false;
        held_ = true;
        holder_ = PyThread_get_thread_ident();
        return true;
    }

    bool is_held() const noexcept { return held_; }

    // Whether this very thread has it: then a signal's handler asks, in the middle of a collective.
    bool is_mine() const noexcept { return held_ && holder_ == PyThread_get_thread_ident(); }

    // False if the time was over first, or this thread has it already.
    bool acquire(double seconds) {
        const double longest = 1e9;  // also what an infinite wait is cut to
        const auto ns = static_cast<std::int64_t>((seconds < longest ? seconds : longest) * 1e9);
        const std::int64_t deadline = monotonic_ns() + ns;
        while (!try_acquire()) {
            const std::int64_t left = deadline - monotonic_ns();
            if (left <= 0 || is_mine()) return false;
            const std::uint32_t seen = released_.word.load(std::memory_order_seq_cst);
            ++waiting_;
            {
                const WithoutGil released;
                detail::sleep_on(released_, seen, left < detail::slice_ns ? left : detail::slice_ns);
            }
            --waiting_;
            if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
        }
        return true;
    }

    void release() noexcept {
        held_ = false;
        if (waiting_ != 0) released_.wake();
    }

private:
    bool held_ = false;
    unsigned long holder_ = 0;
    int waiting_ = 0;
    Bell released_;
};

// Has the turn until the end of the scope, if nobody else had it.
class TurnHeld {
public:
    explicit TurnHeld(TurnLock& turn) noexcept : taken(turn.try_acquire()), turn_(turn) {}
    ~TurnHeld() {
        if (taken) turn_.release();
    }
    TurnHeld(const TurnHeld&) = delete;
    TurnHeld& operator=(const TurnHeld&) = delete;
    const bool taken;

private:
    TurnLock& turn_;
};

}  // namespace phalanx
