// The prepared messages of a world that no thread waits for, and the alarm of the thread that then goes on with them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <utility>

#include "alarm.hpp"
#include "gil.hpp"
#include "phalanx/waiting.hpp"

namespace phalanx {

namespace nb = nanobind;

// Counts them. The background thread of the world, which has other `jobs`, too, goes on with them a moment later
// (src/phalanx/backends/mpi/progress_thread.py). With the GIL held only.
class UnattendedMessages {
public:
    // `start()` starts that thread.
    UnattendedMessages(nb::object alarm, nb::list jobs, nb::object start)
        : alarm_object_(std::move(alarm)), alarm_(*nb::cast<Alarm*>(alarm_object_)), jobs_(std::move(jobs)), start_(std::move(start)) {}

    // False if the system has no thread left: the general way says so.
    bool add() {
        try {
            if (!started_) in_interpreter([&] { return start_(); });
        } catch (const nb::python_error& error) {
            if (!error.matches(PyExc_RuntimeError)) throw;
            return false;
        }
        started_ = true;
        if (count_++ == 0) since_ = monotonic_ns();
        alarm_.arm();
        return true;
    }

    void remove() noexcept {
        if (--count_ == 0 && jobs_.size() == 0) alarm_.disarm();
    }

    // A thread waits for one of them, and most likely for the others after it: they have time until then, but not for ever.
    void attend() noexcept {
        --count_;
        if (jobs_.size() == 0) alarm_.disarm();
    }
    void attended() noexcept {
        if (count_ == 0) return;
        if (monotonic_ns() - since_ < longest_ns)
            alarm_.arm();
        else
            alarm_.hurry();
    }

    int count() const noexcept { return count_; }

private:
    nb::object alarm_object_;
    Alarm& alarm_;
    nb::list jobs_;
    nb::object start_;
    static constexpr std::int64_t longest_ns = 20'000'000;

    bool started_ = false;
    int count_ = 0;
    std::int64_t since_ = 0;  // there have been some
};

}  // namespace phalanx
