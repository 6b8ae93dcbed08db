// The lock of a channel that has a fast path: re-entrant as threading.RLock, but taken by the core without a call into
// Python. Whoever has to wait for it wakes a fast message that waits for the other side with it, and that gives way.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>

#include "gil.hpp"
#include "phalanx/waiting.hpp"
#include "recorder.hpp"

namespace phalanx {

// The GIL guards all of it but the word that waiting threads sleep on.
class ChannelLock {
public:
    // False if another thread has it, or waits for it.
    bool try_enter() noexcept {
        const unsigned long me = PyThread_get_thread_ident();
        if (depth_ != 0 && (owner_ != me || is_halfway_)) return false;
        if (depth_ == 0 && wanted_.load(std::memory_order_relaxed) != 0) return false;
        owner_ = me;
        ++depth_;
        return true;
    }

    // As `try_enter`. Where it fails, a fast message that has the lock gives way, though nobody waits for it.
    bool enter_or_ask() noexcept {
        const bool entered = try_enter();
        if (!entered) asked_.store(true, std::memory_order_relaxed);
        return entered;
    }
    bool asked() const noexcept { return asked_.load(std::memory_order_relaxed); }
    void forget_asking() noexcept { asked_.store(false, std::memory_order_relaxed); }

    void enter() {
        const unsigned long me = PyThread_get_thread_ident();
        if (depth_ != 0 && owner_ != me) wait();
        owner_ = me;
        ++depth_;
    }

    void exit() noexcept {
        if (--depth_ == 0 && wanted_.load(std::memory_order_relaxed) != 0) released_.wake();
    }

    // Nonzero while somebody waits for the lock.
    const Shared<std::uint32_t>& wanted() const noexcept { return wanted_; }

    // Of the holder, while it sleeps on this bell.
    void sleeps_on(Bell* bell) noexcept { asleep_ = bell; }

    // Of the holder, in the middle of a frame: signal handlers may run, and end the channel, but move nothing through it.
    class Halfway {
    public:
        Halfway(ChannelLock& lock, nanobind::handle channel) : lock_(lock), channel_(channel) {
            nanobind::setattr(channel_, "moving", nanobind::bool_(true));
            lock_.is_halfway_ = true;
        }
        ~Halfway() {
            lock_.is_halfway_ = false;
            if (PyObject_SetAttrString(channel_.ptr(), "moving", Py_False) != 0) PyErr_Clear();
        }
        Halfway(const Halfway&) = delete;
        Halfway& operator=(const Halfway&) = delete;

    private:
        ChannelLock& lock_;
        nanobind::handle channel_;
    };

private:
    void wait() {
        wanted_.fetch_add(1, std::memory_order_seq_cst);
        if (asleep_ != nullptr) asleep_->wake();
        while (depth_ != 0) {
            const std::uint32_t seen = released_.word.load(std::memory_order_seq_cst);
            {
                const WithoutGil released;
                detail::sleep_on(released_, seen, detail::slice_ns);
            }
            if (PyErr_CheckSignals() != 0) {
                wanted_.fetch_sub(1, std::memory_order_relaxed);
                throw nanobind::python_error();
            }
        }
        wanted_.fetch_sub(1, std::memory_order_relaxed);
    }

    unsigned long owner_ = 0;
    int depth_ = 0;
    bool is_halfway_ = false;
    Shared<std::uint32_t> wanted_{0};
    std::atomic<bool> asked_{false};
    Bell* asleep_ = nullptr;
    Bell released_;
};

// Whether an attribute of a channel is this very object, True or False.
inline bool says(nanobind::handle channel, nanobind::handle attribute, PyObject* value) noexcept {
    const nanobind::object found = nanobind::steal(PyObject_GetAttr(channel.ptr(), attribute.ptr()));
    if (!found.is_valid()) PyErr_Clear();
    return found.ptr() == value;
}

}  // namespace phalanx
