// The asynchronous collectives of a group that have not ended, in the order in which they were issued. Each method is one step
// for all other threads, because it holds the GIL and runs no Python code before its end: a lock of Python costs as much as a
// short collective.
#pragma once

#include <nanobind/nanobind.h>

#include <deque>

#include "alarm.hpp"
#include "collective_calls.hpp"
#include "gil.hpp"

namespace phalanx {

namespace nb = nanobind;

class WorkQueue {
public:
    Alarm alarm;  // for the thread that runs what no other thread does

    // From now on that fast path is closed as long as there is something here. `path` may be of Python.
    void hold_back(nb::object path) {
        path_ = CollectiveCalls::of(path);
        path_owner_ = std::move(path);
        tell();
    }

    // False if the thread has ended: it would not run what came now.
    bool push(nb::object work, bool urgent) {
        if (is_over_) return false;
        works_.push_back(std::move(work));
        alarm.arm();
        if (urgent) alarm.hurry();
        tell();
        return true;
    }

    nb::object first() const { return works_.empty() ? nb::none() : works_.front(); }

    // Takes the first out, which has ended; false if another thread was quicker.
    bool pop(nb::handle work) {
        if (works_.empty() || works_.front().ptr() != work.ptr()) return false;
        const nb::object ended = std::move(works_.front());
        works_.pop_front();
        // Those behind it may wait for another thread's attention: the one that was busy has not looked at them.
        alarm.disarm();
        if (!works_.empty()) alarm.arm();
        tell();
        return true;
    }

    // True if it is empty, and stays so.
    bool end_if_empty() noexcept { return is_over_ = works_.empty(); }

    std::size_t size() const noexcept { return works_.size(); }

private:
    void tell() {
        if (path_ != nullptr)
            path_->paused = static_cast<int>(works_.size());
        else if (path_owner_.is_valid())
            tell_python();
    }

    // Another thread may come in between, and change it again.
    void tell_python() {
        std::size_t told = works_.size() + 1;
        while (told != works_.size()) {
            told = works_.size();
            in_interpreter([&] { nb::setattr(path_owner_, "paused", nb::int_(told)); return 0; });
        }
    }

    std::deque<nb::object> works_;
    nb::object path_owner_;
    CollectiveCalls* path_ = nullptr;  // null for one of Python
    bool is_over_ = false;
};

}  // namespace phalanx
