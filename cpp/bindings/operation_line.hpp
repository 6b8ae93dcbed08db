// A line of operations of a process group of torch, as its Runner (phalanx.torch_backend) and the core share it: the operations, and
// whose turn it is. Objects of Python would do, but to call their methods takes longer than the rest of a wait.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <deque>
#include <stdexcept>
#include <utility>

#include "alarm.hpp"
#include "turn_lock.hpp"

namespace phalanx {

namespace nb = nanobind;

// Whose turn it is to run an operation of a line. For Python a lock.
class LineTurn : public TurnLock {
public:
    void enter() {
        while (!acquire(1e9))
            if (is_mine()) throw std::runtime_error("a signal handler cannot wait for an operation in the middle of another one");
    }
};

// The operations, in the order in which they run. With the GIL held only.
class OperationQueue {
public:
    bool is_away = false;  // the line's thread runs callbacks, and so cannot serve it

    // Of the line's thread; None while there is none.
    nb::object alarm() const { return alarm_object_; }
    void set_alarm(nb::object alarm) {
        alarm_ = alarm.is_none() ? nullptr : nb::cast<Alarm*>(alarm);
        alarm_object_ = std::move(alarm);
        if (alarm_ != nullptr && size() != 0) alarm_->arm();
    }
    bool is_served() const noexcept { return alarm_ != nullptr && !is_away; }

    std::size_t size() const noexcept { return operations_.size(); }
    bool is_next(nb::handle operation) const noexcept { return size() != 0 && operations_.front().ptr() == operation.ptr(); }

    // None if there is none.
    nb::object first() const { return size() != 0 ? operations_.front() : nb::none(); }

    void append(nb::object operation) {
        operations_.push_back(std::move(operation));
        if (alarm_ != nullptr) alarm_->arm();
    }
    void put_first(nb::object operation) {
        operations_.push_front(std::move(operation));
        if (alarm_ != nullptr) alarm_->arm();
    }

    nb::object take_first() {
        if (size() == 0) throw nb::index_error("the line is empty");
        nb::object first = std::move(operations_.front());
        operations_.pop_front();
        tell_of_fewer();
        return first;
    }

    // False if it is not there.
    bool remove(nb::handle operation) {
        for (auto one = operations_.begin(); one != operations_.end(); ++one) {
            if (one->ptr() != operation.ptr()) continue;
            const nb::object removed = std::move(*one);
            operations_.erase(one);
            tell_of_fewer();
            return true;
        }
        return false;
    }

private:
    void tell_of_fewer() noexcept {
        if (alarm_ == nullptr) return;
        alarm_->disarm();
        if (size() != 0) alarm_->arm();
    }

    std::deque<nb::object> operations_;
    nb::object alarm_object_ = nb::none();
    Alarm* alarm_ = nullptr;
};

}  // namespace phalanx
