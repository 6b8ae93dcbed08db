// Messages that their calls do not wait for: they stand in line. The thread that waits for one moves it as a call that waits
// would, and one in the other direction along with it. src/phalanx/group/verbs/prepared.py has what Python does with them.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "alarm.hpp"
#include "call_site.hpp"
#include "interned.hpp"
#include "message_calls.hpp"

namespace phalanx {

class PreparedChannelMessage;

// Which way of an exchange has to be through; the other moves along.
enum class Until { both, sent, received };

// The messages of a lane whose channels are rings, or TCP. Everything with the GIL held, but for the waits themselves.
class MessageLine : protected MessageCalls {
public:
    using MessageCalls::Message;
    using Prepared = PreparedChannelMessage;

    MessageLine(const MessageLine&) = delete;
    MessageLine& operator=(const MessageLine&) = delete;

    // Messages may stand in line from now on. Those for which no thread waits become urgent by the alarm, and `start` starts the
    // thread that waits for it.
    void attend_by(nb::object alarm, nb::object start) {
        alarm_ = nb::cast<Alarm*>(alarm);
        alarm_object_ = std::move(alarm);
        start_ = std::move(start);
    }

protected:
    friend class PreparedChannelMessage;

    // One way of an exchange, as far as it has come.
    struct Side {
        bool begun, ended;
        std::size_t done;       // bytes of the array
        std::string_view rest;  // out: of the head, still to be sent. In: bytes that were read, and are not what was waited for
    };

    // A message out and one in, with the locks of both channels held.
    class Exchange {
    public:
        virtual ~Exchange() = default;
        virtual void move(Until until) = 0;
        virtual Side sent() const = 0;
        virtual Side received() const = 0;
        virtual ChannelLock& lock(bool sends) const = 0;
        virtual nb::handle channel(bool sends) const = 0;
    };

    using MessageCalls::MessageCalls;
    virtual ~MessageLine() = default;

    // The same answers as of `send` and `recv`. `message` is described. `prepared`: what stands in line, if it does.
    virtual nb::object send_next(Message& message, nb::handle x, const Prepared* prepared) = 0;
    virtual nb::object receive(Message& message, nb::handle out, const Prepared* prepared) = 0;
    // Null if one of them has to wait for another message.
    virtual std::unique_ptr<Exchange> both(const Message& sending, const Message& receiving, const Prepared* out, const Prepared* in) = 0;
    // False once the channel is closed, and in a forked child.
    virtual bool is_open(const Message& message, bool sends) const = 0;
    virtual nb::object channel(const Message& message, bool sends) const = 0;
    virtual nb::object itself() = 0;

    // The oldest one that stands in line, of a rank or of any; null if there is none.
    Prepared* first_in_line(bool sends, int peer = -1) const noexcept;
    // Whether no other stands before this one.
    bool is_next(const Message& message, bool sends, const Prepared* prepared) const noexcept {
        const Prepared* const first = first_in_line(sends, message.peer);
        return first == nullptr || first == prepared;
    }

    // One that stands in line once it begins; None if none may.
    nb::object prepare(const Message& message, nb::handle array, bool sends);
    // A call that waits. While others stand in line, the oldest one in the other direction moves along.
    nb::object send_in_turn(Message& message, nb::handle x) {
        return first_in_line(false) == nullptr ? send_next(message, x, nullptr) : move_along(message, x, true);
    }
    nb::object receive_in_turn(Message& message, nb::handle out) {
        return first_in_line(true) == nullptr ? receive(message, out, nullptr) : move_along(message, out, false);
    }
    // True: both are done. False: declined, nothing has happened. Otherwise what each of them has come to: True, an operation that
    // goes on with it, or False if it has not begun.
    nb::object exchange_now(const Message& sending, nb::handle x, const Message& receiving, nb::handle out);

    void forget_line() noexcept { start_.reset(); }

private:
    // What goes on with the parts of an exchange: True for one that has ended, None for one that has not begun.
    struct Rest {
        nb::object sent = nb::none(), received = nb::none();
        std::optional<nb::python_error> raised;  // by a signal handler
    };
    // `noted`: for a caller that may be interrupted before it has them.
    Rest rest_of(const Exchange& exchange, const Message& sending, nb::handle x, const Message& receiving, nb::handle out, bool noted) const;
    nb::object move_along(const Message& message, nb::handle array, bool sends);
    // Moves both at the same time, until `target` is through. False if that one is as before.
    bool move_pair(Prepared& sending, Prepared& receiving, Prepared& target);
    // Has somebody see to those that stand in line, if no thread waits for them soon; at once if a part of one has moved.
    void attend() noexcept;

    std::deque<Prepared*> line_;  // those for which no thread has waited yet, in the order of their calls
    Alarm* alarm_ = nullptr;
    nb::object alarm_object_, start_;
    bool is_attended_ = false;
};

// With the GIL held only, but for the wait itself, in which the thread has the channel's lock.
class PreparedChannelMessage {
public:
    using Message = MessageCalls::Message;

    PreparedChannelMessage(MessageLine& line, const Message& message, nb::handle array, bool sends)
        : line_(line),
          owner_(line.itself()),
          array_(nb::borrow(array)),
          message_(message),
          called_(message.began),
          site_(CallSite::current()),
          lock_(nb::getattr(line.channel(message, sends), lock_name())),
          sends_(sends) {}
    ~PreparedChannelMessage() { leave(); }
    PreparedChannelMessage(const PreparedChannelMessage&) = delete;
    PreparedChannelMessage& operator=(const PreparedChannelMessage&) = delete;

    // From now on it stands in line: no later message of that rank in this direction overtakes it.
    void begin() {
        if (!waits_ || std::exchange(begun_, true)) return;
        line_.line_.push_back(this);
        line_.attend();
    }

    // Moves it, waiting for the other side. False if that is left to the general way.
    bool run() {
        if (!waits_ || !begun_) return ended_;
        if (line_.first_in_line(sends_, message_.peer) != this) return false;
        const Unattended pause(line_);
        const CallSite::Lent lent(site_);
        const Moving moving(*this);
        message_.began = monotonic_ns();  // it counts as waiting from now on
        PreparedChannelMessage* const other = line_.first_in_line(!sends_);
        if (other != nullptr && line_.move_pair(sends_ ? *this : *other, sends_ ? *other : *this, *this)) return ended_;
        try {
            note(sends_ ? line_.send_next(message_, array_, this) : line_.receive(message_, array_, this));
        } catch (const nb::python_error&) {  // a signal handler's: what was handed over just before goes on
            if (!is_call_) operation_ = last_handed_over();
            throw;
        }
        if (!is_call_ && !operation_.is_none()) forget_handed_over(operation_);  // whoever posts it has it from here
        return ended_;
    }

    // A call that waits for it, and takes back what was handed over if it is interrupted.
    void is_a_call() noexcept { is_call_ = true; }

    // Ends the wait of another thread, and lets none begin: the general way has it from now on, unless this returns true, because
    // it has ended.
    bool stop() {
        ChannelLock& lock = *nb::cast<ChannelLock*>(lock_);
        lock.enter();
        lock.exit();
        // Then this is a signal handler, in the middle of it.
        if (is_moving_) {
            const nb::object nested = nb::module_::import_("phalanx.transports.channel").attr("nested")();
            PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(nested.ptr())), nested.ptr());
            throw nb::python_error();
        }
        leave();
        return ended_;
    }

    // What goes on with a part of it; None if nothing has moved.
    nb::object hand_over(nb::handle) {
        leave();
        return operation_;
    }

    void leave() noexcept {
        if (!std::exchange(waits_, false) || !begun_) return;
        auto& line = line_.line_;
        line.erase(std::remove(line.begin(), line.end(), this), line.end());
        line_.attend();
    }

    bool ended() const noexcept { return ended_; }
    // What goes on with the part of it that has moved; None if there is none.
    const nb::object& operation() const noexcept { return operation_; }
    nb::object array() const { return array_; }
    bool sends() const noexcept { return sends_; }
    int peer() const noexcept { return message_.peer; }
    std::int64_t tag() const noexcept { return message_.tag; }
    std::size_t bytes() const noexcept { return message_.array.bytes; }
    double began() const noexcept { return static_cast<double>(called_) * 1e-9; }
    double seconds() const noexcept { return static_cast<double>(message_.timeout_ns) * 1e-9; }
    const CallSite& site() const noexcept { return site_; }

private:
    friend class MessageLine;

    // What the fast path has said: True, False, or (what goes on with it, seconds).
    void note(const nb::object& answer) {
        if (answer.ptr() == Py_True)
            end();
        else if (answer.ptr() != Py_False)
            operation_ = answer[nb::int_(0)];
    }
    void end() noexcept {
        ended_ = true;
        leave();
    }

    static const nb::str& lock_name() {
        static const nb::str* const name = new nb::str(interned("lock"));  // never freed, as the interpreter's own
        return *name;
    }

    static void forget_handed_over(nb::handle operation) {
        in_interpreter([&] { nb::module_::import_("phalanx.transports.ring_channel").attr("forget_handed_over")(operation); });
    }

    // The handler of another signal may raise in there, and then it is not known.
    static nb::object last_handed_over() {
        for (int tries = 0; tries < 100; ++tries) {
            try {
                return in_interpreter(
                    [] { return nb::object(nb::module_::import_("phalanx.transports.ring_channel").attr("last_handed_over")()); });
            } catch (const nb::python_error&) {
            }
        }
        return nb::none();
    }

    // A signal handler that comes now may not have the general way go on with it.
    class Moving {
    public:
        explicit Moving(PreparedChannelMessage& one) noexcept : one_(one), before_(std::exchange(one.is_moving_, true)) {}
        ~Moving() { one_.is_moving_ = before_; }
        Moving(const Moving&) = delete;
        Moving& operator=(const Moving&) = delete;

    private:
        PreparedChannelMessage& one_;
        const bool before_;
    };

    // Nobody else need see to the line while this thread does.
    class Unattended {
    public:
        explicit Unattended(MessageLine& line) noexcept : line_(line) { line_.alarm_->disarm(); }
        ~Unattended() { line_.attend(); }
        Unattended(const Unattended&) = delete;
        Unattended& operator=(const Unattended&) = delete;

    private:
        MessageLine& line_;
    };

    MessageLine& line_;
    nb::object owner_;  // of the line
    nb::object array_;
    nb::object operation_ = nb::none();
    Message message_;
    std::int64_t called_;
    CallSite site_;
    nb::object lock_;
    const bool sends_;
    bool begun_ = false, waits_ = true, ended_ = false, is_call_ = false, is_moving_ = false;
};

inline MessageLine::Prepared* MessageLine::first_in_line(bool sends, int peer) const noexcept {
    const auto found = std::find_if(line_.begin(), line_.end(), [sends, peer](const Prepared* one) {
        return one->sends() == sends && (peer < 0 || one->peer() == peer);
    });
    return found == line_.end() ? nullptr : *found;
}

inline nb::object MessageLine::prepare(const Message& message, nb::handle array, bool sends) {
    if (alarm_ == nullptr || !start_.is_valid()) return nb::none();
    if (!is_attended_) {
        start_();  // the thread that sees to those for which nobody waits
        is_attended_ = true;
    }
    return nb::cast(new Prepared(*this, message, array, sends), nb::rv_policy::take_ownership);
}

inline nb::object MessageLine::move_along(const Message& message, nb::handle array, bool sends) {
    if (!is_open(message, sends) || first_in_line(sends, message.peer) != nullptr) return nb::bool_(false);
    Prepared one(*this, message, array, sends);
    one.is_a_call();
    one.begin();
    const bool ended = one.run();
    one.leave();  // also if it raises, at the end of this
    return ended ? nb::object(nb::bool_(true)) : waited(one.operation(), message);
}

inline bool MessageLine::move_pair(Prepared& sending, Prepared& receiving, Prepared& target) {
    if (sending.message_.array.overlaps(receiving.message_.array)) return false;
    const std::unique_ptr<Exchange> exchange = both(sending.message_, receiving.message_, &sending, &receiving);
    if (exchange == nullptr) return false;
    const Prepared::Moving moving_out(sending), moving_in(receiving);
    for (Prepared* const one : {&sending, &receiving}) one->message_.began = monotonic_ns();
    exchange->move(&target == &sending ? Until::sent : Until::received);
    if (exchange->sent().ended) sending.end();
    if (exchange->received().ended) receiving.end();
    if (sending.ended_ && receiving.ended_) return true;
    const Rest rest = rest_of(*exchange, sending.message_, sending.array_, receiving.message_, receiving.array_, target.is_call_);
    if (!sending.ended_) sending.operation_ = rest.sent;
    if (!receiving.ended_) receiving.operation_ = rest.received;
    if (rest.raised) throw nb::python_error(*rest.raised);
    return target.ended_ || !target.operation_.is_none();
}

inline nb::object MessageLine::exchange_now(const Message& sending, nb::handle x, const Message& receiving, nb::handle out) {
    if (sending.array.overlaps(receiving.array)) return nb::bool_(false);
    const std::unique_ptr<Exchange> exchange = both(sending, receiving, nullptr, nullptr);
    if (exchange == nullptr) return nb::bool_(false);
    exchange->move(Until::both);
    if (exchange->sent().ended && exchange->received().ended) return nb::bool_(true);
    const Rest rest = rest_of(*exchange, sending, x, receiving, out, true);
    if (rest.raised) throw nb::python_error(*rest.raised);
    if (rest.sent.is_none() && rest.received.is_none()) return nb::bool_(false);
    const auto or_false = [](const nb::object& part) { return part.is_none() ? nb::object(nb::bool_(false)) : part; };
    return nb::make_tuple(or_false(rest.sent), or_false(rest.received));
}

inline MessageLine::Rest MessageLine::rest_of(const Exchange& exchange, const Message& sending, nb::handle x, const Message& receiving,
                                              nb::handle out, bool noted) const {
    Rest rest;
    const Side sent = exchange.sent(), received = exchange.received();
    if (sent.ended) rest.sent = nb::bool_(true);
    if (received.ended) rest.received = nb::bool_(true);
    const bool sends_on = sent.begun && !sent.ended, receives_on = received.begun && !received.ended;
    const bool gives_back = !received.begun && !received.rest.empty();
    std::optional<ChannelLock::Halfway> halfway_out, halfway_in;
    if (sends_on) halfway_out.emplace(exchange.lock(true), exchange.channel(true));
    if (receives_on || gives_back) halfway_in.emplace(exchange.lock(false), exchange.channel(false));
    // An interrupt that waits to be raised would be so in the first call of Python.
    if (PyErr_CheckSignals() != 0) rest.raised.emplace();
    const auto go_on = [&](nb::handle channel, nb::object& found, auto hand_over) {
        try {
            found = or_tear(channel, hand_over);
        } catch (nb::python_error& interrupt) {
            if (!rest.raised) rest.raised.emplace(std::move(interrupt));
        }
    };
    if (sends_on)
        go_on(exchange.channel(true), rest.sent, [&] {
            const nb::bytes head(sent.rest.data(), sent.rest.size());
            return exchange.channel(true).attr("hand_over")(memory_of(x, sending), sent.done, head, noted);
        });
    if (receives_on)
        go_on(exchange.channel(false), rest.received, [&] {
            const ArrayHead& head = receiving.head;
            const nb::bytes description(head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
            return exchange.channel(false).attr("hand_over")(memory_of(out, receiving), receiving.tag, description, received.done, noted);
        });
    if (gives_back)
        go_on(exchange.channel(false), rest.received, [&] {
            return exchange.channel(false).attr("give_back")(nb::bytes(received.rest.data(), received.rest.size()));
        });
    return rest;
}

inline void MessageLine::attend() noexcept {
    if (alarm_ == nullptr) return;
    const bool has_moved = std::any_of(line_.begin(), line_.end(), [](const Prepared* one) { return !one->operation().is_none(); });
    if (has_moved) return alarm_->hurry();
    alarm_->disarm();
    if (!line_.empty()) alarm_->arm();
}

}  // namespace phalanx
