// The fast path of a synchronous send or receive of a plain NumPy array: checks that the case is simple, moves the whole
// frame through the ring, and notes it in the journal, all in one call. What is not simple is declined without a trace,
// and a wait that lasts is handed over to the general way, which knows about deadlines, lost ranks and interrupts.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "gil.hpp"
#include "mapped_ring.hpp"
#include "message_calls.hpp"

namespace phalanx {

class FastMessages : MessageCalls {
public:
    FastMessages(int peers, nb::object mailbox, nb::object arrays, nb::object recorder, double timeout,
                  std::size_t max_message, int spins, int yields)
        : MessageCalls(std::move(mailbox), std::move(arrays), std::move(recorder), timeout, max_message),
          patience_{spins, yields},
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
    nb::object send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        const Route<RingOut>* found = lookup(out_, dst, message);
        if (found == nullptr || found->mapped == nullptr || !describe(message, x, tag, timeout, false, library)) return nb::bool_(false);
        const Route<RingOut> route = *found;
        const Turn turn(*route.lock);
        if (!turn.taken || route.mapped->half() == nullptr || PyObject_Size(route.queue.ptr()) != 0)
            return nb::bool_(false);
        const RingOut::Stay stay(*route.mapped);
        return send_frame(*route.mapped->half(), route, message, x);
    }

    nb::object recv(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        const Route<RingIn>* found = lookup(in_, src, message);
        if (found == nullptr || found->mapped == nullptr || !describe(message, out, tag, timeout, true, library)) return nb::bool_(false);
        const Route<RingIn> route = *found;
        const Turn turn(*route.lock);
        if (!turn.taken || route.mapped->half() == nullptr || !route.mapped->resting || comes_later(src))
            return nb::bool_(false);
        const RingIn::Stay stay(*route.mapped);
        return receive_frame(*route.mapped->half(), route, message, out);
    }

    // The description and the bytes of the array that comes next from a rank, which stays where it is: (description, bytes).
    // None if something else comes, or nothing for a while.
    nb::object next_array(nb::handle src, nb::handle tag, nb::handle timeout) {
        const auto found = [&](const FrameHeader& header, nb::bytes description, RingReader&) {
            return header.payload <= max_message_ ? nb::object(nb::make_tuple(description, header.payload)) : nb::none();
        };
        return look_at_next<ArrayHead::longest>(src, tag, timeout, kind_array, found);
    }

    // Sends an object without arrays, whose structure `head` is. False: declined, nothing has happened.
    bool send_object(nb::bytes head, nb::handle dst, nb::handle tag, nb::handle timeout) {
        Message message;
        const Route<RingOut>* found = lookup(out_, dst, message);
        if (found == nullptr || found->mapped == nullptr || head.size() > longest_object) return false;
        if (!limits(message, timeout) || !read_tag(message, tag)) return false;
        const Route<RingOut> route = *found;
        const Turn turn(*route.lock);
        if (!turn.taken || route.mapped->half() == nullptr || PyObject_Size(route.queue.ptr()) != 0) return false;
        const RingOut::Stay stay(*route.mapped);
        RingWriter& ring = *route.mapped->half();
        const std::size_t size = sizeof(FrameHeader) + head.size();
        ring.ask_for_no_byte();
        if (ring.room(size) < size) {
            const Away away(*route.lock, ring.bell());
            await_room(ring, size, patience_, bound_of(message, *route.lock));
        }
        if (ring.room(size) < size || ring.other_closed()) return false;
        FrameHeader header;
        header.kind = kind_object;
        header.tag = static_cast<std::uint64_t>(message.tag);
        header.description = static_cast<std::uint32_t>(head.size());
        ring.put(&header, sizeof header);
        ring.put(head.c_str(), head.size());
        ring.publish();
        note("send_object", message);
        return true;
    }

    // The structure of the object without arrays that comes next from a rank, which stays where it is, and its place:
    // (structure, place). None if something else comes, or nothing for a while.
    nb::object next_object(nb::handle src, nb::handle tag, nb::handle timeout) {
        const auto found = [](const FrameHeader& header, nb::bytes head, RingReader& ring) {
            return header.payload == 0 ? nb::object(nb::make_tuple(head, ring.position())) : nb::none();
        };
        return look_at_next<longest_object>(src, tag, timeout, kind_object, found);
    }

    // Takes what `next_object` has found, `size` bytes at this place. False if another thread has taken it.
    bool take_object(nb::handle src, nb::handle tag, std::size_t size, std::uint64_t place) {
        Message message;
        const Route<RingIn>* found = lookup(in_, src, message);
        if (found == nullptr || found->mapped == nullptr || !read_tag(message, tag)) return false;
        const Route<RingIn> route = *found;
        const Turn turn(*route.lock);
        if (!turn.taken || route.mapped->half() == nullptr || !route.mapped->resting) return false;
        const RingIn::Stay stay(*route.mapped);
        RingReader& ring = *route.mapped->half();
        if (ring.position() != place || ring.available(sizeof(FrameHeader) + size) < sizeof(FrameHeader) + size) return false;
        ring.skip(sizeof(FrameHeader) + size);
        ring.publish();
        note("recv_object", message);
        return true;
    }

private:
    // With the GIL held: about the time that a message takes when the other side is waiting for it.
    static constexpr int held_spins = 80;
    static constexpr std::size_t longest_object = 4 << 10;  // its structure

    template <class Mapped>
    struct Route {
        Mapped* mapped = nullptr;
        ChannelLock* lock = nullptr;
        nb::object ring;
        nb::object channel;
        nb::object queue;
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

    nb::object send_frame(RingWriter& ring, const Route<RingOut>& route, const Message& message, nb::handle x) {
        const Bound bound = bound_of(message, *route.lock);
        const ArrayHead& head = message.head;
        const auto [data, size] = std::pair(message.array.data, message.array.bytes);
        ring.ask_for_no_byte();
        if (ring.room(head.size()) < head.size()) {
            const Away away(*route.lock, ring.bell());
            await_room(ring, head.size(), patience_, bound);
        }
        if (ring.room(head.size()) < head.size() || ring.other_closed()) return waited(nb::none(), message);
        ring.put(head.data(), head.size());
        // What may be lent goes as a whole: a part of it in the ring would be copied twice, before the rest.
        std::size_t done = route.mapped->loans.may_lend(size) ? 0 : std::min({size, ring.room(size), worth_releasing});
        ring.put(data, done);
        ring.publish();
        if (done < size) {
            const Away away(*route.lock, ring.bell());
            route.mapped->loans.write_on(ring, data, size, done, patience_, bound);
        }
        if (done < size) {
            const ChannelLock::Halfway halfway(*route.lock, route.channel);
            const nb::object hand_over = route.channel.attr("hand_over");
            return waited(in_any_case([&] { return hand_over(memory_of(x, message), done); }), message);
        }
        note("send", message);
        return nb::bool_(true);
    }

    nb::object receive_frame(RingReader& ring, const Route<RingIn>& route, const Message& message, nb::handle out) {
        const Bound bound = bound_of(message, *route.lock);
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
            route.mapped->loans.read_on(ring, data, size, done, patience_, bound);
        }
        if (done < size) {
            const nb::bytes description(head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
            const ChannelLock::Halfway halfway(*route.lock, route.channel);
            const nb::object hand_over = route.channel.attr("hand_over");
            return waited(in_any_case([&] { return hand_over(memory_of(out, message), message.tag, description, done); }), message);
        }
        note("recv", message);
        return nb::bool_(true);
    }

    // Waits for the next frame from a rank; `use(header, description, ring)` if it is of this kind, has this tag, and a
    // description of `most` bytes at most, else None. Nothing is taken.
    template <std::size_t most, class Use>
    nb::object look_at_next(nb::handle src, nb::handle tag, nb::handle timeout, std::uint8_t kind, Use use) {
        Message message;
        const Route<RingIn>* found = lookup(in_, src, message);
        if (found == nullptr || found->mapped == nullptr || !limits(message, timeout) || !read_tag(message, tag)) return nb::none();
        const Route<RingIn> route = *found;
        const Turn turn(*route.lock);
        if (!turn.taken || route.mapped->half() == nullptr || !route.mapped->resting || comes_later(src)) return nb::none();
        const RingIn::Stay stay(*route.mapped);
        RingReader& ring = *route.mapped->half();
        const Bound bound = bound_of(message, *route.lock);
        ring.ask_for_no_byte();
        FrameHeader header, wanted;
        if (!await(ring, *route.lock, sizeof header, bound)) return nb::none();
        ring.peek(&header, sizeof header);
        wanted.kind = kind;
        wanted.tag = static_cast<std::uint64_t>(message.tag);
        wanted.description = header.description;
        wanted.payload = header.payload;
        if (std::memcmp(&header, &wanted, sizeof header) != 0 || header.description > most) return nb::none();
        if (!await(ring, *route.lock, sizeof header + header.description, bound)) return nb::none();
        std::array<char, most> description;
        ring.peek(description.data(), header.description, sizeof header);
        return use(header, nb::bytes(description.data(), header.description), ring);
    }

    // Waits for the next frame; true if it begins as that of this array must. Nothing is taken.
    bool await_head(RingReader& ring, ChannelLock& lock, const ArrayHead& head, const Bound& bound) const {
        // The header first: what comes may be shorter than what is waited for.
        for (const std::size_t wanted : {sizeof(FrameHeader), head.size()})
            if (!await(ring, lock, wanted, bound) || !ring.begins_with(head.data(), wanted)) return false;
        return true;
    }

    // Waits for so many bytes.
    bool await(RingReader& ring, ChannelLock& lock, std::size_t wanted, const Bound& bound) const {
        const int spins = std::min(held_spins, patience_.spins);
        for (int i = 0; i < spins && ring.available(wanted) < wanted; ++i) relax();
        if (ring.available(wanted) < wanted) {
            const Away away(lock, ring.bell());
            await_bytes(ring, wanted, patience_, bound);
        }
        return ring.available(wanted) >= wanted;
    }

    Patience patience_;
    std::vector<Route<RingOut>> out_;
    std::vector<Route<RingIn>> in_;
};

}  // namespace phalanx
