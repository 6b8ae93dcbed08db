// The fast path of a synchronous send or receive of a plain NumPy array: checks that the case is simple, moves the whole
// frame through the ring, and notes it in the journal, all in one call. What is not simple is declined without a trace,
// and a wait that lasts is handed over to the general way, which knows about deadlines, lost ranks and interrupts.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "channel_lock.hpp"
#include "gil.hpp"
#include "mapped_ring.hpp"
#include "phalanx/frame.hpp"
#include "plain_array.hpp"
#include "recorder.hpp"

namespace phalanx {

namespace nb = nanobind;

class FastMessages {
public:
    // `mailbox` counts the receives that are posted and the messages that wait, by source; see transports/mailbox.py.
    FastMessages(int peers, nb::object mailbox, nb::object arrays, nb::object recorder, double timeout,
                  std::size_t max_message, int spins, int yields)
        : ahead_(mailbox.attr("ahead")),
          arrays_object_(std::move(arrays)),
          arrays_(*nb::cast<PlainArrays*>(arrays_object_)),
          recorder_object_(std::move(recorder)),
          recorder_(*nb::cast<Recorder*>(recorder_object_)),
          patience_{spins, yields},
          longest_ns_(std::min(handover_ns, static_cast<std::int64_t>(std::min(timeout, 1.0) * 1e9))),
          max_message_(max_message),
          out_(static_cast<std::size_t>(peers)),
          in_(static_cast<std::size_t>(peers)) {}

    // `queue` holds what is still to be sent on the channel.
    void open_out(std::size_t dst, nb::object ring, nb::object channel, nb::object queue) {
        out_.at(dst) = {nb::cast<RingOut*>(ring), nb::cast<ChannelLock*>(channel.attr("lock")), ring, channel, queue};
    }
    void open_in(std::size_t src, nb::object ring, nb::object channel) {
        in_.at(src) = {nb::cast<RingIn*>(ring), nb::cast<ChannelLock*>(channel.attr("lock")), ring, channel, {}};
    }

    // Lets go of all channels. They refer to this object as well, and no garbage collector looks in here.
    void close() {
        for (auto& route : out_) route = {};
        for (auto& route : in_) route = {};
    }

    // True: done. False: declined, nothing has happened. Otherwise (operation or None, seconds waited).
    nb::object send(nb::handle x, nb::handle dst, nb::handle tag) {
        Message message;
        Route<RingOut>* found = lookup(out_, dst, message);
        if (found == nullptr || !describe(message, x, tag, false)) return nb::bool_(false);
        const Route<RingOut> route = *found;
        const Turn turn(*route.lock);
        if (!turn.taken || route.mapped->half() == nullptr || PyObject_Size(route.queue.ptr()) != 0)
            return nb::bool_(false);
        const RingOut::Stay stay(*route.mapped);
        return send_frame(*route.mapped->half(), route, message, x);
    }

    nb::object recv(nb::handle out, nb::handle src, nb::handle tag) {
        Message message;
        Route<RingIn>* found = lookup(in_, src, message);
        if (found == nullptr || !describe(message, out, tag, true)) return nb::bool_(false);
        const Route<RingIn> route = *found;
        const Turn turn(*route.lock);
        if (!turn.taken || route.mapped->half() == nullptr || !route.mapped->resting || comes_later(src))
            return nb::bool_(false);
        const RingIn::Stay stay(*route.mapped);
        return receive_frame(*route.mapped->half(), route, message, out);
    }

private:
    // A wait that lasts so long is handed over: signals are looked at there, and a lost connection is seen.
    static constexpr std::int64_t handover_ns = 50'000'000;
    // With the GIL held: about the time that a message takes when the other side is waiting for it.
    static constexpr int held_spins = 80;

    template <class Mapped>
    struct Route {
        Mapped* mapped = nullptr;
        ChannelLock* lock = nullptr;
        nb::object ring;
        nb::object channel;
        nb::object queue;
    };

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

    struct Message {
        PlainArray array;
        ArrayHead head;
        int peer = -1;
        std::int64_t tag = 0;
        std::int64_t began = monotonic_ns();
    };

    // Lets go of the GIL to wait for the other side, or to move many bytes.
    class Away {
    public:
        Away(ChannelLock& lock, Bell& bell) : lock_(lock) { lock_.sleeps_on(&bell), release_.emplace(); }
        ~Away() {
            release_.reset();
            lock_.sleeps_on(nullptr);
        }
        Away(const Away&) = delete;
        Away& operator=(const Away&) = delete;

    private:
        ChannelLock& lock_;
        std::optional<WithoutGil> release_;
    };

    template <class Mapped>
    static Route<Mapped>* lookup(std::vector<Route<Mapped>>& routes, nb::handle rank, Message& message) {
        if (!PyLong_CheckExact(rank.ptr())) return nullptr;
        const Py_ssize_t index = PyLong_AsSsize_t(rank.ptr());
        if (index < 0) PyErr_Clear();
        if (index < 0 || static_cast<std::size_t>(index) >= routes.size()) return nullptr;
        message.peer = static_cast<int>(index);
        Route<Mapped>& route = routes[static_cast<std::size_t>(index)];
        return route.mapped == nullptr ? nullptr : &route;
    }

    bool describe(Message& message, nb::handle x, nb::handle tag, bool write) const {
        PlainArray& array = message.array;
        if (!PyLong_CheckExact(tag.ptr()) || !arrays_.look(x, write, array) || array.bytes > max_message_) return false;
        message.tag = PyLong_AsLongLong(tag.ptr());
        if (message.tag < 0) PyErr_Clear();
        return message.tag >= 0 && message.head.make(*array.dtype, array.dims, array.shape,
                                                     static_cast<std::uint64_t>(message.tag), array.bytes);
    }

    // Whether a receive or a message waits in the mailbox that this receive must not overtake.
    bool comes_later(nb::handle src) const {
        return ahead_.size() != 0 && (ahead_.contains(nb::none()) || ahead_.contains(src));
    }

    void note(const char* verb, const Message& message) {
        Record& record = recorder_.begin(verb);
        record.rank = message.peer;
        record.tag = message.tag;
        record.ended_ns = record.began_ns;
        record.began_ns = message.began;
    }

    static nb::object waited(nb::object operation, const Message& message) {
        return nb::make_tuple(operation, static_cast<double>(monotonic_ns() - message.began) * 1e-9);
    }

    nb::object send_frame(RingWriter& ring, const Route<RingOut>& route, const Message& message, nb::handle x) {
        const Bound bound{message.began + longest_ns_, &route.lock->wanted(), nullptr};
        const ArrayHead& head = message.head;
        const auto [data, size] = std::pair(message.array.data, message.array.bytes);
        ring.ask_for_no_byte();
        if (ring.room(head.size()) < head.size()) {
            const Away away(*route.lock, ring.bell());
            await_room(ring, head.size(), patience_, bound);
        }
        if (ring.room(head.size()) < head.size() || ring.other_closed()) return waited(nb::none(), message);
        ring.put(head.data(), head.size());
        std::size_t done = std::min({size, ring.room(size), worth_releasing});
        ring.put(data, done);
        ring.publish();
        if (done < size) {
            const Away away(*route.lock, ring.bell());
            write_on(ring, data, size, done, patience_, bound);
        }
        if (done < size) {
            const nb::object hand_over = route.channel.attr("hand_over");
            return waited(in_interpreter([&] { return hand_over(x, done); }), message);
        }
        note("send", message);
        return nb::bool_(true);
    }

    nb::object receive_frame(RingReader& ring, const Route<RingIn>& route, const Message& message, nb::handle out) {
        const Bound bound{message.began + longest_ns_, &route.lock->wanted(), nullptr};
        const ArrayHead& head = message.head;
        const auto [data, size] = std::pair(message.array.data, message.array.bytes);
        ring.ask_for_no_byte();
        if (!await_head(ring, *route.lock, head, bound)) return waited(nb::none(), message);
        ring.skip(head.size());
        std::size_t done = std::min({size, ring.available(size), worth_releasing});
        ring.peek(data, done);
        ring.skip(done);
        ring.publish();
        if (done < size) {
            const Away away(*route.lock, ring.bell());
            read_on(ring, data, size, done, patience_, bound);
        }
        if (done < size) {
            const nb::bytes description(head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
            const nb::object hand_over = route.channel.attr("hand_over");
            return waited(in_interpreter([&] { return hand_over(out, message.tag, description, done); }), message);
        }
        note("recv", message);
        return nb::bool_(true);
    }

    // Waits for the next frame; true if it begins as that of this array must. Nothing is taken.
    bool await_head(RingReader& ring, ChannelLock& lock, const ArrayHead& head, const Bound& bound) const {
        // The header first: what comes may be shorter than what is waited for.
        for (const std::size_t wanted : {sizeof(FrameHeader), head.size()}) {
            const int spins = std::min(held_spins, patience_.spins);
            for (int i = 0; i < spins && ring.available(wanted) < wanted; ++i) relax();
            if (ring.available(wanted) < wanted) {
                const Away away(lock, ring.bell());
                await_bytes(ring, wanted, patience_, bound);
            }
            if (ring.available(wanted) < wanted || !ring.begins_with(head.data(), wanted)) return false;
        }
        return true;
    }

    nb::dict ahead_;
    nb::object arrays_object_;
    PlainArrays& arrays_;
    nb::object recorder_object_;
    Recorder& recorder_;
    Patience patience_;
    std::int64_t longest_ns_;
    std::size_t max_message_;
    std::vector<Route<RingOut>> out_;
    std::vector<Route<RingIn>> in_;
};

}  // namespace phalanx
