// What the fast paths of messages have in common: they look at a call of `send` or `recv`, and note it in the journal.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "channel_lock.hpp"
#include "gil.hpp"
#include "phalanx/frame.hpp"
#include "plain_array.hpp"
#include "recorder.hpp"

namespace phalanx {

namespace nb = nanobind;

class MessageCalls {
public:
    struct Message {
        PlainArray array;
        ArrayHead head;
        bool is_tensor = false;
        int peer = -1;
        std::int64_t tag = 0;
        std::int64_t began = monotonic_ns();
        std::int64_t timeout_ns = 0;
        std::int64_t longest_ns = 0;  // before the general way goes on
    };

protected:
    // `mailbox` counts the receives that are posted and the messages that wait, by source; see transports/mailbox.py.
    MessageCalls(nb::object mailbox, nb::object arrays, nb::object recorder, double timeout, std::size_t max_message)
        : ahead_(mailbox.attr("ahead")),
          arrays_object_(std::move(arrays)),
          arrays_(*nb::cast<PlainArrays*>(arrays_object_)),
          recorder_object_(std::move(recorder)),
          recorder_(*nb::cast<Recorder*>(recorder_object_)),
          timeout_ns_(in_ns(timeout)),
          max_message_(max_message) {}

    struct Turn {
        explicit Turn(ChannelLock& lock) noexcept : taken(lock.try_enter()), lock_(lock) {}
        ~Turn() {
            if (taken) lock_.exit();
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        const bool taken;

    private:
        ChannelLock& lock_;
    };

    static constexpr std::int64_t handover_ns = 50'000'000;

    // Of the rank that a call names; null if it is not the number of one.
    template <class Route>
    static Route* lookup(std::vector<Route>& routes, nb::handle rank, Message& message) {
        if (!PyLong_CheckExact(rank.ptr())) return nullptr;
        const Py_ssize_t index = PyLong_AsSsize_t(rank.ptr());
        if (index < 0) PyErr_Clear();
        if (index < 0 || static_cast<std::size_t>(index) >= routes.size()) return nullptr;
        message.peer = static_cast<int>(index);
        return &routes[static_cast<std::size_t>(index)];
    }

    // How long a call may take. False if that is not simply a number above 0.
    bool limits(Message& message, nb::handle timeout) const {
        set_time(message, timeout_ns_);
        if (timeout.is_none()) return true;
        if (!PyFloat_CheckExact(timeout.ptr()) && !PyLong_CheckExact(timeout.ptr())) return false;
        const double seconds = PyFloat_AsDouble(timeout.ptr());
        if (seconds == -1.0 && PyErr_Occurred() != nullptr) PyErr_Clear();
        if (!(seconds > 0.0)) return false;  // also if it is no number
        set_time(message, in_ns(seconds));
        return true;
    }

    static bool read_tag(Message& message, nb::handle tag) {
        if (!PyLong_CheckExact(tag.ptr())) return false;
        message.tag = PyLong_AsLongLong(tag.ptr());
        if (message.tag < 0) PyErr_Clear();
        return message.tag >= 0;
    }

    // False if the call is not as simple: the general way looks at it. `library`: of the array that `x` is, or stands for.
    bool describe(Message& message, nb::handle x, nb::handle tag, nb::handle timeout, bool write, const char* library) const {
        PlainArray& array = message.array;
        if (!limits(message, timeout) || !read_tag(message, tag)) return false;
        if (!arrays_.look(x, write, array) && !(message.is_tensor = arrays_.look_at_tensor(x, array))) return false;
        if (array.dtype == nullptr || array.gpu >= 0 || array.bytes > max_message_) return false;
        return message.head.make(*array.dtype, array.dims, array.shape, static_cast<std::uint64_t>(message.tag), array.bytes,
                                 message.is_tensor ? "torch" : library);
    }

    // What the general way goes on with: of a tensor, its memory, which is there whether or not it has a gradient.
    nb::object memory_of(nb::handle x, const Message& message) const {
        return message.is_tensor ? arrays_.flat(x) : nb::borrow(x);
    }

    // Whether a receive or a message waits in the mailbox that this receive must not overtake.
    bool comes_later(nb::handle src) const {
        return ahead_.size() != 0 && (ahead_.contains(nb::none()) || ahead_.contains(src));
    }

    // A wait that lasts is handed over: signals are looked at there, and a lost connection is seen.
    // What is long may last longer: a nanosecond a byte, half a second at most.
    Bound bound_of(const Message& message, const ChannelLock& lock) const {
        const std::int64_t longer = message.longest_ns + static_cast<std::int64_t>(std::min<std::size_t>(message.array.bytes, 500'000'000));
        return Bound{message.began + std::min(longer, message.timeout_ns), &lock.wanted(), nullptr};
    }

    void note(const char* verb, const Message& message) {
        Record& record = recorder_.begin_message(verb);
        record.rank = message.peer;
        record.tag = message.tag;
        record.bytes = message.array.bytes;
        const std::int64_t now = record.began_ns;
        record.began_ns = message.began;
        recorder_.show(record);
        recorder_.end(record, now);
    }

    static nb::object waited(nb::object operation, const Message& message) {
        return nb::make_tuple(operation, static_cast<double>(monotonic_ns() - message.began) * 1e-9);
    }

    // Calls what must happen, although an interrupt may wait to be raised: Python would raise it first thing in the call.
    template <class F>
    static nb::object in_any_case(F call) {
        if (PyErr_CheckSignals() == 0) return in_interpreter(call);
        nb::python_error interrupt;
        in_interpreter(call);
        throw std::move(interrupt);
    }

    // Has Python go on with a message of which a part has moved, with the channel `Halfway`. An interrupt may wait to be raised:
    // Python would raise it first thing in the call, so it is raised afterwards. One that comes in the call ends the channel.
    template <class F>
    static nb::object in_any_case(nb::handle channel, F call) {
        std::optional<nb::python_error> interrupt;
        if (PyErr_CheckSignals() != 0) interrupt.emplace();
        nb::object result = or_tear(channel, call);
        if (interrupt) throw std::move(*interrupt);
        return result;
    }
    template <class F>
    static nb::object or_tear(nb::handle channel, F call) {
        try {
            return in_interpreter(call);
        } catch (const nb::python_error&) {
            for (int tries = 0; tries < 100; ++tries) {  // the next signal may come in there
                try {
                    in_interpreter([&] { return channel.attr("tear")(); });
                    break;
                } catch (const nb::python_error&) {
                }
            }
            throw;
        }
    }

private:
    static constexpr double longest_seconds = 1e9;

    static void set_time(Message& message, std::int64_t timeout_ns) noexcept {
        message.timeout_ns = timeout_ns;
        message.longest_ns = std::min(handover_ns, timeout_ns);
    }

    static std::int64_t in_ns(double seconds) noexcept {
        return static_cast<std::int64_t>(std::min(seconds, longest_seconds) * 1e9);
    }

    nb::dict ahead_;
    nb::object arrays_object_;
    PlainArrays& arrays_;
    nb::object recorder_object_;
    Recorder& recorder_;
    std::int64_t timeout_ns_;

protected:
    const std::size_t max_message_;
};

}  // namespace phalanx
