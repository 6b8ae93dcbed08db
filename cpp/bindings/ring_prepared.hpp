// Messages through rings that their calls do not wait for. The thread that waits for one moves it as a call that waits would, and
// one in the other direction along with it; src/phalanx/group/verbs/prepared.py has what Python does with them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>

#include "call_site.hpp"
#include "fast_messages.hpp"

namespace phalanx {

// With the GIL held only, but for the wait itself, in which the thread has the channel's lock.
class FastMessages::Prepared {
public:
    Prepared(FastMessages& path, const Message& message, nb::handle array, bool sends)
        : path_(path),
          owner_(nb::find(path)),
          array_(nb::borrow(array)),
          message_(message),
          called_(message.began),
          site_(CallSite::current()),
          lock_((sends ? path.out_[index()].channel : path.in_[index()].channel).attr("lock")),
          sends_(sends) {}
    ~Prepared() { leave(); }
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;

    // From now on it stands in line: no later message of that rank in this direction overtakes it.
    void begin() {
        if (!waits_ || std::exchange(begun_, true)) return;
        path_.line_.push_back(this);
        path_.attend();
    }

    // Moves it, waiting for the other side. False if that is left to the general way.
    bool run() {
        if (!waits_ || !begun_) return ended_;
        if (path_.first_in_line(sends_, message_.peer) != this) return false;
        const Unattended pause(path_);
        const CallSite::Lent lent(site_);
        const Moving moving(*this);
        message_.began = monotonic_ns();  // it counts as waiting from now on
        Prepared* const other = path_.first_in_line(!sends_);
        if (other != nullptr && path_.move_pair(sends_ ? *this : *other, sends_ ? *other : *this, *this)) return ended_;
        try {
            note(sends_ ? path_.send_next(message_, array_, this) : path_.receive(message_, array_, this));
        } catch (const nb::python_error&) {  // a signal handler's: what was handed over just before goes on
            if (!is_call_) operation_ = last_handed_over();
            throw;
        }
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
        auto& line = path_.line_;
        line.erase(std::remove(line.begin(), line.end(), this), line.end());
        path_.attend();
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
    friend class FastMessages;

    std::size_t index() const noexcept { return static_cast<std::size_t>(message_.peer); }

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
        explicit Moving(Prepared& one) noexcept : one_(one), before_(std::exchange(one.is_moving_, true)) {}
        ~Moving() { one_.is_moving_ = before_; }
        Moving(const Moving&) = delete;
        Moving& operator=(const Moving&) = delete;

    private:
        Prepared& one_;
        const bool before_;
    };

    // Nobody else need see to the line while this thread does.
    class Unattended {
    public:
        explicit Unattended(FastMessages& path) noexcept : path_(path) { path_.alarm_->disarm(); }
        ~Unattended() { path_.attend(); }
        Unattended(const Unattended&) = delete;
        Unattended& operator=(const Unattended&) = delete;

    private:
        FastMessages& path_;
    };

    FastMessages& path_;
    nb::object owner_;  // of the path
    nb::object array_;
    nb::object operation_ = nb::none();
    Message message_;
    std::int64_t called_;
    CallSite site_;
    nb::object lock_;
    const bool sends_;
    bool begun_ = false, waits_ = true, ended_ = false, is_call_ = false, is_moving_ = false;
};

// The oldest one that stands in line, of a rank or of any; null if there is none.
inline FastMessages::Prepared* FastMessages::first_in_line(bool sends, int peer) const noexcept {
    const auto found = std::find_if(line_.begin(), line_.end(), [sends, peer](const Prepared* one) {
        return one->sends() == sends && (peer < 0 || one->peer() == peer);
    });
    return found == line_.end() ? nullptr : *found;
}

// Moves both at the same time, until `target` is through. False if that one is as before.
inline bool FastMessages::move_pair(Prepared& sending, Prepared& receiving, Prepared& target) {
    const Route<RingOut> to = out_[sending.index()];
    const Route<RingIn> from = in_[receiving.index()];
    if (to.mapped == nullptr || from.mapped == nullptr || sending.message_.array.overlaps(receiving.message_.array)) return false;
    const Turn out_turn(*to.lock), in_turn(*from.lock);
    if (!out_turn.taken || !in_turn.taken || !is_free(to, sending.message_, &sending) ||
        !is_free(from, receiving.message_, &receiving))
        return false;
    const Prepared::Moving moving_out(sending), moving_in(receiving);
    for (Prepared* const one : {&sending, &receiving}) one->message_.began = monotonic_ns();
    const RingOut::Stay stay_out(*to.mapped);
    const RingIn::Stay stay_in(*from.mapped);
    Outgoing outgoing(*to.mapped, sending.message_);
    Incoming incoming(*from.mapped, receiving.message_);
    exchange_through(to, sending.message_, outgoing, from, receiving.message_, incoming,
                     &target == &sending ? Until::sent : Until::received);
    if (outgoing.ended()) sending.end();
    if (incoming.ended()) receiving.end();
    if (sending.ended_ && receiving.ended_) return true;
    const Rest rest = rest_of_exchange(outgoing, incoming, {to, sending.message_, sending.array_},
                                       {from, receiving.message_, receiving.array_}, target.is_call_);
    if (!sending.ended_) sending.operation_ = rest.sent;
    if (!receiving.ended_) receiving.operation_ = rest.received;
    if (rest.raised) throw nb::python_error(*rest.raised);
    return target.ended_ || !target.operation_.is_none();
}

inline void FastMessages::attend() noexcept {
    if (alarm_ == nullptr) return;
    const bool has_moved = std::any_of(line_.begin(), line_.end(), [](const Prepared* one) { return !one->operation().is_none(); });
    if (has_moved) return alarm_->hurry();
    alarm_->disarm();
    if (!line_.empty()) alarm_->arm();
}

inline nb::object FastMessages::move_along(const Message& message, nb::handle array, bool sends) {
    const bool has_ring = sends ? is_open(out_, message) : is_open(in_, message);
    if (!has_ring || first_in_line(sends, message.peer) != nullptr) return nb::bool_(false);
    Prepared one(*this, message, array, sends);
    one.is_a_call();
    one.begin();
    const bool ended = one.run();
    one.leave();  // also if it raises, at the end of this
    return ended ? nb::object(nb::bool_(true)) : waited(one.operation(), message);
}

inline nb::object FastMessages::prepare(const Message& message, nb::handle array, bool sends) {
    if (alarm_ == nullptr || !start_.is_valid()) return nb::none();
    if (!is_attended_) {
        start_();  // the thread that sees to those for which nobody waits
        is_attended_ = true;
    }
    return nb::cast(new Prepared(*this, message, array, sends), nb::rv_policy::take_ownership);
}

}  // namespace phalanx
