// The messages through MPI that their call does not wait for. The thread that waits for one moves it as it would one of a call
// that waits; src/phalanx/group/verbs/prepared.py has what Python does with it.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "call_site.hpp"
#include "mpi_messages.hpp"

namespace phalanx {

// At most one thread at a time is at it, with the lock of all messages held. With the
// GIL held only.
class MpiMessages::Prepared {
public:
    Prepared(MpiMessages& path, const Message& message, nb::handle array, bool sends)
        : path_(path),
          owner_(nb::find(path)),
          array_(nb::borrow(array)),
          called_(message.began),
          site_(CallSite::current()),
          sends_(sends) {
        transfer_.message = message;
        transfer_.set_time();
    }
    ~Prepared() {
        leave();
        if (transfer_.ended || transfer_.moving == nullptr) return;
        transfer_.moving.release();  // MPI still has the memory, and no caller ever got this object
        array_.release();
    }
    Prepared(const Prepared&) = delete;
    Prepared& operator=(const Prepared&) = delete;

    // Sends or offers it, or has it take its message from now on, unless that was done before, or the general way
    // has it. Raises if MPI refuses it.
    void begin() {
        if (!waits_ || std::exchange(begun_, true)) return;
        Route& route = this->route();
        const bool has_body = transfer_.message.array.bytes > path_.whole_;
        if (!sends_ || has_body) listed_.emplace(path_.under_way_, sends_ ? route.offered : route.incoming, transfer_);
        if (!sends_ || (has_body ? path_.offer(route, transfer_) : path_.begin_whole(route, transfer_))) return;
        begun_ = false;
        path_.failed("sending a message");
    }

    // Moves it. False if that is left to the general way. No signal is looked at between its end and the note of it.
    bool run() {
        if (!waits_) return transfer_.ended;
        const Turn turn(path_.lock_);
        if (!turn.taken) return false;
        if (transfer_.look()) return end();
        Route& route = this->route();
        if (path_.closed_ || path_.is_gone(route)) return false;
        if (transfer_.moving == nullptr && (sends_ ? path_.has_line() : path_.is_behind(route))) return false;
        const Attending attending(path_.unattended_, attended_);
        path_.look_at(route);
        Message& message = transfer_.message;
        message.began = monotonic_ns();  // it counts as waiting from now on
        const auto bytes = transfer_.moving != nullptr ? static_cast<std::int64_t>(message.array.bytes) : 0;
        transfer_.until_ns = std::min(message.began + handover_ns + bytes, transfer_.deadline_ns);
        return path_.move(route, transfer_, sends_) && end();
    }

    // Sends this one, and receives the other. False if that is left to the general way, which goes on with the `operation` of each.
    bool exchange(Prepared& receiving) {
        const Turn turn(path_.lock_);
        if (!turn.taken || path_.is_behind(receiving.route())) return false;
        try {
            receiving.begin();
            begin();
            if (run() && receiving.run()) return true;
        } catch (const nb::python_error&) {  // an interrupt: the caller takes back what the general way has
            hand_over(nb::none());
            receiving.hand_over(nb::none());
            throw;
        }
        hand_over(nb::none());
        receiving.hand_over(nb::none());
        return false;
    }

    // Leaves it to the general way. Returns the operation that goes on with it; None if it has ended, or has not begun. With the
    // lock held. `sink`: see handover.py.
    nb::object hand_over(nb::handle sink) {
        if (sends_ && begun_ && !transfer_.ended)
            operation_ = path_.go_on_sending(route(), transfer_, array_);
        else if (!sends_ && !transfer_.ended)
            operation_ = path_.go_on_receiving(route(), transfer_, array_, sink);
        leave();
        return operation_;
    }

    // The general way has it, or it has ended.
    void leave() noexcept {
        if (!std::exchange(waits_, false)) return;
        listed_.reset();
        if (!std::exchange(attended_, true)) path_.unattended_.remove();
    }

    bool overlaps(const Prepared& other) const noexcept {
        return transfer_.message.array.overlaps(other.transfer_.message.array);
    }

    bool ended() const noexcept { return transfer_.ended; }
    // For the general way, which goes on with it unless it has ended. With the lock held: no thread moves it.
    bool stop() const noexcept { return transfer_.ended; }
    nb::object operation() const { return operation_; }
    int peer() const noexcept { return transfer_.message.peer; }
    std::int64_t tag() const noexcept { return transfer_.message.tag; }
    std::size_t bytes() const noexcept { return transfer_.message.array.bytes; }
    double began() const noexcept { return static_cast<double>(called_) * 1e-9; }
    double seconds() const noexcept { return static_cast<double>(transfer_.message.timeout_ns) * 1e-9; }
    const CallSite& site() const noexcept { return site_; }

private:
    Route& route() const noexcept { return path_.routes_[static_cast<std::size_t>(transfer_.message.peer)]; }

    bool end() {
        const CallSite::Lent lent(site_);
        path_.note(sends_ ? "send" : "recv", transfer_.message);
        leave();
        return true;
    }

    class Attending {
    public:
        Attending(UnattendedMessages& all, bool& attended) : all_(all) {
            if (!std::exchange(attended, true)) all_.attend();
        }
        ~Attending() { all_.attended(); }
        Attending(const Attending&) = delete;
        Attending& operator=(const Attending&) = delete;

    private:
        UnattendedMessages& all_;
    };

    MpiMessages& path_;
    nb::object owner_;  // of the path
    nb::object array_;
    nb::object operation_ = nb::none();
    Transfer transfer_;
    std::int64_t called_;
    CallSite site_;
    std::optional<Listed> listed_;
    const bool sends_;
    bool begun_ = false, waits_ = true, attended_ = false;
};

inline nb::object MpiMessages::prepare_receive(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout) {
    Message message;
    Route* const found = usable(src, message);
    if (found == nullptr || !describe(message, out, tag, timeout, true, "numpy") || comes_later(found->number)) return nb::none();
    return prepare(message, src, out, false);
}

inline nb::object MpiMessages::prepare_send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout) {
    Message message;
    Route* const found = usable(dst, message);
    if (found == nullptr || !describe(message, x, tag, timeout, false, "numpy")) return nb::none();
    if (message.array.bytes <= whole_ && must_look(*found)) return nb::none();
    return prepare(message, dst, x, true);
}

inline nb::object MpiMessages::prepare(Message& message, nb::handle peer, nb::handle array, bool sends) {
    if (!unattended_.add()) return nb::none();
    // The thread that this has started may have run, and the group may be closed.
    if (usable(peer, message) == nullptr) return unattended_.remove(), nb::none();
    return nb::cast(new Prepared(*this, message, array, sends), nb::rv_policy::take_ownership);
}

}  // namespace phalanx
