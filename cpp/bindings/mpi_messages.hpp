// The fast path of a send or receive of an array through MPI: as FastMessages does it over rings. An asynchronous receive is only
// prepared, and an asynchronous send of a long array only offered: the thread that waits for one of them moves it as it would a
// synchronous one, and with it all others of the group that are under way here. What no thread waits for, and what lasts, goes on
// the general way.
// src/phalanx/backends/mpi/protocol.py says what is sent.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstring>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "gil.hpp"
#include "message_calls.hpp"
#include "mpi_heads.hpp"
#include "mpi_transfers.hpp"
#include "mpi_unattended.hpp"
#include "mpi_wire.hpp"
#include "phalanx/wait_policy.hpp"

namespace phalanx {

class MpiMessages : MessageCalls {
public:
    class Prepared;  // mpi_prepared.hpp

    // `begins`: what the head of every short message of this lane begins with. `inbox`, `reader` and `lock` are as in
    // src/phalanx/backends/mpi; `general` goes on with what is not done here (handover.py), and `numbers` are those of the
    // messages of this rank. `members` are world ranks, by which MPI and the inbox know them. Messages of up to `whole` bytes
    // travel in their heads. `unattended` is the world's.
    MpiMessages(const MpiWire& wire, const nb::bytes& begins, int rank, const std::vector<int>& members, nb::object inbox,
                nb::object reader, nb::object lock, nb::object arrays, nb::object recorder, double timeout, std::size_t whole,
                std::size_t most, bool oversubscribed, nb::object general, nb::object numbers, nb::object unattended)
        : MessageCalls(inbox.attr("mailbox"), std::move(arrays), std::move(recorder), timeout, most),
          wire_(wire),
          heads_(wire, std::string(begins.c_str(), begins.size())),
          gone_(inbox.attr("gone")),
          talked_(inbox.attr("talked")),
          behind_(reader.attr("behind")),
          unread_(reader.attr("unread")),
          lock_object_(std::move(lock)),
          lock_(*nb::cast<ChannelLock*>(lock_object_)),
          whole_(whole),
          policy_(oversubscribed),
          general_(std::move(general)),
          numbers_(std::move(numbers)),
          unattended_object_(std::move(unattended)),
          unattended_(*nb::cast<UnattendedMessages*>(unattended_object_)) {
        for (int i = 0; i < static_cast<int>(members.size()); ++i) {
            const int number = members[static_cast<std::size_t>(i)];
            routes_.push_back(i == rank ? Route{} : Route{number, nb::int_(number)});
        }
    }

    // Declines everything from now on.
    void close() { closed_ = true; }

    // True: done. False: declined, nothing has happened. Otherwise (operation or None, seconds waited).
    nb::object send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout, const char* library) {
        Transfer sending;
        Route* const found = usable(dst, sending.message);
        if (found == nullptr || !describe(sending.message, x, tag, timeout, false, library)) return nb::bool_(false);
        return sending.message.array.bytes <= whole_ ? send_whole(*found, sending) : send_in_two(*found, sending, x);
    }

    // As `send`, but it never waits: a message that does not travel in its head is prepared.
    nb::object post_send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout) {
        Transfer sending;
        Route* const found = usable(dst, sending.message);
        if (found == nullptr || !describe(sending.message, x, tag, timeout, false, "numpy")) return nb::bool_(false);
        if (sending.message.array.bytes <= whole_) return send_whole(*found, sending);
        return prepare(sending.message, dst, x, true);
    }

    nb::object recv(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout, const char* library) {
        Transfer receiving;
        Message& message = receiving.message;
        Route* const found = usable(src, message);
        if (found == nullptr || !describe(message, out, tag, timeout, true, library)) return nb::bool_(false);
        const Turn turn(lock_);
        if (!turn.taken || is_behind(*found)) return nb::bool_(false);
        look_at(*found);
        receiving.set_time();
        const Listed listed(under_way_, found->incoming, receiving);
        return finish("recv", *found, receiving, false, [&] { return go_on_receiving(*found, receiving, out, nb::none()); });
    }

    // A message that the call does not wait for, and that is not begun; None: declined.
    nb::object prepare_receive(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout);
    nb::object prepare_send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout);

private:
    using Head = MpiHeads::Head;
    using Transfer = MpiTransfer;
    using Route = MpiRoute;
    using Listed = ListedMpiTransfer;

    nb::object prepare(Message& message, nb::handle peer, nb::handle array, bool sends);

    static constexpr unsigned sends_between_looks = 32;
    static constexpr std::size_t longest_head = 4096;  // what is longer goes the general way, which need not wait for it
    static constexpr int held_looks = 20;
    static constexpr std::size_t worth_holding = 16 << 10;  // bytes: MPI may copy more than these while it is looked at
    static constexpr long nap_ns = 20'000;
    static constexpr int nothing = -1, give_up = -2, came = -3;  // what a look has found, if not the number of a route
    static constexpr int most_looks_for_cancelled = 1'000'000;

    Route* usable(nb::handle rank, Message& message) {
        Route* const found = closed_ ? nullptr : lookup(routes_, rank, message);
        if (found == nullptr || found->rank < 0) return nullptr;
        return is_gone(*found) ? nullptr : found;
    }

    bool is_gone(const Route& route) const { return gone_.size() != 0 && gone_.contains(route.number); }

    // The other rank must hear when this one closes the group.
    void meet(Route& route) {
        if (!route.met && PySet_Add(talked_.ptr(), route.number.ptr()) != 0) throw nb::python_error();
        route.met = true;
    }

    void look_at(Route& route) {
        meet(route);
        route.sends = 0;
    }

    // Whether something has come, or is waited for, that a receive from this rank must not overtake.
    bool is_behind(const Route& route) const { return has_line() || comes_later(route.number); }

    // Whether heads have come that the general way has not looked at yet.
    bool has_line() const { return behind_.size() != 0 || PyObject_Size(unread_.ptr()) != 0; }

    // -- sending -------------------------------------------------------------------------------------------------------

    // Now and then: that the other rank has closed the group is heard by the general way only.
    bool must_look(Route& route) const { return ++route.sends % sends_between_looks == 0 && wire_.anything_waits(); }

    nb::object send_whole(Route& route, Transfer& sending) {
        if (must_look(route)) return nb::bool_(false);
        if (!begin_whole(route, sending)) return waited(nb::none(), sending.message);
        if (!sending.ended) return waited(go_on_sending(route, sending, nb::none()), sending.message);
        note("send", sending.message);
        return nb::bool_(true);
    }

    // False if MPI has not taken it.
    bool begin_whole(Route& route, Transfer& sending) {
        meet(route);
        sending.moving = heads_.message(sending.message.head, sending.message.array);
        if (!sending.moving->begin_head(route.rank)) return false;
        // Some MPIs send more than a few hundred bytes only when the receiver has looked, which it may be about to do.
        for (int i = 0; i < held_looks && !sending.look(); ++i) {}
        return true;
    }

    // Offers it, and sends its body when the receiver asks for it. Until then it can be taken back.
    nb::object send_in_two(Route& route, Transfer& sending, nb::handle x) {
        const Turn turn(lock_);
        // What has come for nothing that is under way here is for the general way, and the answer would be behind it.
        if (!turn.taken || has_line() || (under_way_ == 0 && wire_.anything_waits())) return nb::bool_(false);
        const Message& message = sending.message;
        sending.set_time();
        const Listed listed(under_way_, route.offered, sending);
        if (!offer(route, sending)) return waited(nb::none(), message);
        return finish("send", route, sending, true, [&] { return go_on_sending(route, sending, x); });
    }

    // False if MPI has not taken it.
    bool offer(Route& route, Transfer& sending) {
        meet(route);
        const nb::object number = nb::steal(PyIter_Next(numbers_.ptr()));
        if (!number.is_valid()) throw nb::python_error();
        sending.number = nb::cast<std::uint64_t>(number);
        return say(heads_.offer(sending.message.head, sending.message.array, sending.number), route.rank);
    }

    // The operation by which the general way goes on sending it.
    nb::object go_on_sending(const Route& route, Transfer& sending, nb::handle x) {
        const nb::object peer = route.number;
        if (sending.number == 0) {
            const nb::object request = given(std::move(sending.moving));
            return in_any_case([&] { return general_.attr("go_on_with_head")(peer, request); });
        }
        const nb::object memory = memory_of(x, sending.message);
        if (sending.moving == nullptr)
            return in_any_case([&] { return general_.attr("go_on_offering")(peer, sending.number, memory); });
        const nb::object request = given(std::move(sending.moving));
        return in_any_case([&] { return general_.attr("go_on_sending")(peer, memory, request); });
    }

    // -- receiving -----------------------------------------------------------------------------------------------------

    void accept(const Route& route, Transfer& receiving, std::uint64_t number) {
        auto ready = heads_.word(HeadWord::ready, number);
        auto body = std::make_unique<MpiRequest>(wire_);
        const PlainArray& array = receiving.message.array;
        if (!body->expect_body(array.data, array.bytes, route.rank, number)) failed("receiving a message");
        receiving.number = number;
        body_begins(receiving, std::move(body));
        if (!say(std::move(ready), route.rank)) failed("receiving a message");
    }

    // The sender had taken its offer back before it heard that it is wanted. The next message may be the one.
    void forget_body(Transfer& receiving) {
        receiving.moving->cancel();
        for (int i = 0; !receiving.moving->test(); ++i)
            if (i == most_looks_for_cancelled) failed("taking back a receive");
        receiving.moving.reset();
    }

    // The operation by which the general way goes on receiving it; None if it has only to be posted. `sink`: see handover.py.
    nb::object go_on_receiving(const Route& route, Transfer& receiving, nb::handle out, nb::handle sink) {
        if (receiving.moving == nullptr) return nb::none();
        const Message& message = receiving.message;
        const ArrayHead& head = message.head;
        const nb::bytes description(head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
        const nb::object peer = route.number, request = given(std::move(receiving.moving)), memory = memory_of(out, message);
        return in_any_case([&] {
            return general_.attr("go_on_receiving")(peer, receiving.number, memory, message.tag, description, request, sink);
        });
    }

    // -- both ----------------------------------------------------------------------------------------------------------

    // Moves a message of a call that waits for it.
    template <class GoOn>
    nb::object finish(const char* verb, Route& route, Transfer& transfer, bool sends, GoOn go_on) {
        try {
            move(route, transfer, sends);
        } catch (const nb::python_error&) {  // an interrupt: the caller takes back what the general way has
            if (!transfer.ended) go_on();
            throw;
        }
        if (!transfer.ended) return waited(go_on(), transfer.message);
        note(verb, transfer.message);
        return nb::bool_(true);
    }

    // Moves messages until this one has ended. False if it is time for the general way. With the lock held.
    bool move(const Route& route, Transfer& transfer, bool sends) {
        const int own = static_cast<int>(&route - routes_.data());
        const std::vector<int> others = other_routes(route);
        while (!transfer.look()) {
            const bool moving = transfer.moving != nullptr;
            int bytes = 0;  // of the head that was found
            const int found = await(transfer, [&] {
                if (transfer.look()) return came;
                // Who waits for an answer must hear everyone: another rank may wait for this one.
                if (sends && !moving && !wire_.anything_waits()) return nothing;
                if ((bytes = wire_.waiting(route.rank)) >= 0) return own;
                for (const int other : others)
                    if ((bytes = wire_.waiting(routes_[static_cast<std::size_t>(other)].rank)) >= 0) return other;
                return sends && !moving ? give_up : nothing;
            });
            if (found == nothing || found == give_up) return false;
            if (found != came && !take(routes_[static_cast<std::size_t>(found)], bytes, moving) && !moving) return false;
        }
        return true;
    }

    // Those on which other messages are under way.
    std::vector<int> other_routes(const Route& route) const {
        std::vector<int> found;
        if (under_way_ == static_cast<int>(route.incoming.size() + route.offered.size())) return found;
        for (std::size_t i = 0; i < routes_.size(); ++i)
            if (&routes_[i] != &route && !(routes_[i].incoming.empty() && routes_[i].offered.empty()))
                found.push_back(static_cast<int>(i));
        return found;
    }

    // Takes the next head of a rank. False if the general way has to look at it. `any`: takes it however long it is.
    bool take(Route& route, int bytes, bool any) {
        std::array<std::byte, longest_head> usual;
        std::vector<std::byte> longer;
        if (static_cast<std::size_t>(bytes) > usual.size()) {
            if (!any) return false;
            longer.resize(static_cast<std::size_t>(bytes));
        }
        std::byte* const read = longer.empty() ? usual.data() : longer.data();
        if (!wire_.receive_head(read, bytes, route.rank)) return false;
        const Head head(read, static_cast<std::size_t>(bytes));
        if (head.size() == heads_.shortest() ? hear(route, head) : match(route, head)) return true;
        const nb::object peer = route.number;
        const nb::bytes other(head.data(), head.size());
        in_any_case([&] { return general_.attr("give_back")(peer, other); });
        return false;
    }

    // Does what the word of the other rank says about a message with a body; false if that is none of these.
    bool hear(const Route& route, Head head) {
        const std::uint64_t number = MpiHeads::number_of(head);
        const bool ready = heads_.is_ours(head, HeadWord::ready);
        if (ready || heads_.is_ours(head, HeadWord::drop)) {
            for (Transfer* const sending : route.offered) {
                if (sending->number != number || sending->moving != nullptr || sending->ended) continue;
                if (ready)
                    send_body(route, *sending);
                else
                    sending->ended = true;
                return true;
            }
        } else if (heads_.is_ours(head, HeadWord::cut)) {
            for (Transfer* const receiving : route.incoming) {
                if (receiving->moving == nullptr || receiving->number != number || receiving->ended) continue;
                forget_body(*receiving);
                return true;
            }
        }
        return false;
    }

    void send_body(const Route& route, Transfer& sending) {
        auto body = std::make_unique<MpiRequest>(wire_);
        const PlainArray& array = sending.message.array;
        if (!body->begin_body(array.data, array.bytes, route.rank, sending.number)) failed("sending a message");
        body_begins(sending, std::move(body));
    }

    // Gives a message, or the offer of one, to the first receive of its tag. False if that does not fit, or if there is none.
    bool match(const Route& route, Head head) {
        if (is_behind(route) || !heads_.has_tag(head)) return false;
        const std::int64_t tag = heads_.tag_of(head);
        for (Transfer* const receiving : route.incoming) {
            const Message& message = receiving->message;
            if (receiving->ended || receiving->moving != nullptr || message.tag != tag) continue;
            if (heads_.is_whole(head, message.head, message.array.bytes)) {
                std::memcpy(message.array.data, head.data() + head.size() - message.array.bytes, message.array.bytes);
                return receiving->ended = true;
            }
            if (!heads_.is_offer(head, message.head, message.array.bytes)) return false;
            accept(route, *receiving, MpiHeads::number_of(head));
            return true;
        }
        return false;
    }

    // Both sides have agreed on it, so that it does not take longer than its bytes do.
    static void body_begins(Transfer& transfer, std::unique_ptr<MpiRequest> body) {
        const auto bytes = static_cast<std::int64_t>(transfer.message.array.bytes);
        transfer.moving = std::move(body);
        transfer.until_ns = std::min(monotonic_ns() + handover_ns + bytes, transfer.deadline_ns);  // at 1 GB/s
    }

    static nb::object given(std::unique_ptr<MpiRequest> request) {
        return nb::cast(request.release(), nb::rv_policy::take_ownership);
    }

    // Sends a head. Nobody waits until MPI has sent it.
    bool say(std::unique_ptr<MpiRequest> head, int rank) {
        if (!head->begin_head(rank)) return false;
        if (head->test()) return true;
        const nb::object request = given(std::move(head));
        in_any_case([&] { return general_.attr("keep")(request); });
        return true;
    }

    [[noreturn]] void failed(const char* what) {
        in_interpreter([&] { return general_.attr("fail")(what); });
        throw std::logic_error("MPI failed, and nobody said so");
    }

    // Looks until there is something, first a few times with the GIL. Returns `nothing` if it is time for the general way.
    template <class Look>
    int await(const Transfer& transfer, Look look) {
        const bool moving = transfer.moving != nullptr;
        if (!moving || transfer.message.array.bytes <= worth_holding)
            for (int i = 0; i < held_looks; ++i)
                if (const int found = look(); found != nothing) return found;
        lock_.forget_asking();
        Wait wait(policy_);
        const WithoutGil released;
        for (;;) {
            if (const int found = look(); found != nothing) {
                if (wait.waits()) wait.end(monotonic_ns());
                return found;
            }
            if (lock_.wanted().load(std::memory_order_relaxed) != 0 || lock_.asked()) return nothing;
            if (look_again(wait)) continue;
            if (monotonic_ns() >= transfer.until_ns) return nothing;
            pause(!moving);  // what MPI is moving goes on with every look
        }
    }

    static void pause(bool naps) {
        const timespec nap{0, nap_ns};
        if (naps)
            nanosleep(&nap, nullptr);
        else
            sched_yield();
    }

    const MpiWire wire_;
    const MpiHeads heads_;
    nb::dict gone_;
    nb::object talked_;
    nb::dict behind_;
    nb::object unread_;
    nb::object lock_object_;
    ChannelLock& lock_;
    const std::size_t whole_;
    WaitPolicy policy_;
    nb::object general_, numbers_;
    nb::object unattended_object_;
    UnattendedMessages& unattended_;
    std::vector<Route> routes_;  // never changed, because threads without the GIL read it
    int under_way_ = 0;          // transfers on all routes
    bool closed_ = false;
};

}  // namespace phalanx
