// The fast path of a synchronous send or receive of a plain NumPy array: checks that the case is simple, moves the whole
// frame through the ring, and notes it in the journal, all in one call. What is not simple is declined without a trace,
// and a wait that lasts is handed over to the general way, which knows about deadlines, lost ranks and interrupts.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "gil.hpp"
#include "mapped_ring.hpp"
#include "message_line.hpp"
#include "ring_exchange.hpp"

namespace phalanx {

class FastMessages final : public MessageLine {
public:
    FastMessages(int peers, nb::object mailbox, nb::object arrays, nb::object recorder, double timeout,
                  std::size_t max_message, int spins, int yields)
        : MessageLine(std::move(mailbox), std::move(arrays), std::move(recorder), timeout, max_message),
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

    nb::object prepare_receive(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout) {
        Message message;
        const Route<RingIn>* const found = lookup(in_, src, message);
        if (found == nullptr || found->mapped == nullptr || !describe(message, out, tag, timeout, true, "numpy")) return nb::none();
        if (found->mapped->half() == nullptr || comes_later(src)) return nb::none();
        return prepare(message, out, false);
    }

    // Lets go of all channels. They refer to this object as well, and no garbage collector looks in here.
    void close() {
        for (auto& route : out_) route = {};
        for (auto& route : in_) route = {};
        forget_line();
    }

    // True: done. False: declined, nothing has happened. Otherwise (operation or None, seconds waited).
    nb::object send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        const Route<RingOut>* found = lookup(out_, dst, message);
        if (found == nullptr || found->mapped == nullptr || !describe(message, x, tag, timeout, false, library)) return nb::bool_(false);
        return send_in_turn(message, x);
    }

    // As `send`, but without a wait: True, False, or a `Prepared` of what has to wait for room.
    nb::object post_send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout) {
        Message message;
        const Route<RingOut>* found = lookup(out_, dst, message);
        if (found == nullptr || found->mapped == nullptr || !describe(message, x, tag, timeout, false, "numpy")) return nb::bool_(false);
        const Route<RingOut> route = *found;
        const Turn turn(*route.lock);
        if (!turn.taken || route.mapped->half() == nullptr) return nb::bool_(false);
        // What the other side can read where it lies waits for that where this one is about to wait for a message itself.
        const bool is_lent = first_in_line(false) != nullptr && route.mapped->loans.may_lend_in_exchange(message.array.bytes);
        if (!is_lent && is_free(route, message, nullptr) && put_at_once(route, message)) return nb::bool_(true);
        nb::object prepared = prepare(message, x, true);
        return prepared.is_none() ? nb::bool_(false) : prepared;
    }

    nb::object recv(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        const Route<RingIn>* found = lookup(in_, src, message);
        if (found == nullptr || found->mapped == nullptr || !describe(message, out, tag, timeout, true, library)) return nb::bool_(false);
        return receive_in_turn(message, out);
    }

    // Sends an array, and takes the one that comes for another. True: both are done. False: declined, nothing has happened.
    // Otherwise what each of them has come to: True, an operation that goes on with it, or False if it has not begun.
    nb::object exchange(nb::handle x, nb::handle dst, nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout) {
        Message sending, receiving;
        const Route<RingOut>* const found_out = lookup(out_, dst, sending);
        const Route<RingIn>* const found_in = lookup(in_, src, receiving);
        if (found_out == nullptr || found_in == nullptr || found_out->mapped == nullptr || found_in->mapped == nullptr)
            return nb::bool_(false);
        if (!describe(sending, x, tag, timeout, false, "numpy") || !describe(receiving, out, tag, timeout, true, "numpy"))
            return nb::bool_(false);
        return exchange_now(sending, x, receiving, out);
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
        if (!turn.taken || !is_free(route, message, nullptr)) return false;
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
    static constexpr std::size_t piece = 16 << 10;          // what is shown at once of a message that is not long

    template <class Mapped>
    struct Route {
        Mapped* mapped = nullptr;
        ChannelLock* lock = nullptr;
        nb::object ring;
        nb::object channel;
        nb::object queue;
    };

    // May sleep on this bell: whoever wants the channel rings it.
    class Sleeping {
    public:
        Sleeping(ChannelLock& lock, Bell& bell) noexcept : lock_(lock) { lock_.sleeps_on(&bell); }
        ~Sleeping() { lock_.sleeps_on(nullptr); }
        Sleeping(const Sleeping&) = delete;
        Sleeping& operator=(const Sleeping&) = delete;

    private:
        ChannelLock& lock_;
    };

    // Lets go of the GIL to wait for the other side, or to move many bytes.
    class Away {
    public:
        Away(ChannelLock& lock, Bell& bell) : sleeping_(lock, bell) {}

    private:
        Sleeping sleeping_;
        WithoutGil released_;
    };

    // Whether the next message to a rank may be this one: no other stands before it. `prepared`: of one that stands in line.
    bool is_free(const Route<RingOut>& route, const Message& message, const Prepared* prepared) const {
        return is_next(message, true, prepared) && route.mapped->half() != nullptr && PyObject_Size(route.queue.ptr()) == 0;
    }
    // Whether the next message of a rank is for this receive.
    bool is_free(const Route<RingIn>& route, const Message& message, const Prepared* prepared) const {
        return is_next(message, false, prepared) && route.mapped->half() != nullptr && route.mapped->resting &&
               !comes_later(nb::int_(message.peer));
    }

    nb::object send_next(Message& message, nb::handle x, const Prepared* prepared) override {
        const Route<RingOut> route = out_[static_cast<std::size_t>(message.peer)];
        if (route.mapped == nullptr) return nb::bool_(false);
        const Turn turn(*route.lock);
        if (!turn.taken || !is_free(route, message, prepared)) return nb::bool_(false);
        const RingOut::Stay stay(*route.mapped);
        return send_frame(*route.mapped->half(), route, message, x);
    }
    nb::object receive(Message& message, nb::handle out, const Prepared* prepared) override {
        const Route<RingIn> route = in_[static_cast<std::size_t>(message.peer)];
        if (route.mapped == nullptr) return nb::bool_(false);
        const Turn turn(*route.lock);
        if (!turn.taken || !is_free(route, message, prepared)) return nb::bool_(false);
        const RingIn::Stay stay(*route.mapped);
        return receive_frame(*route.mapped->half(), route, message, out);
    }
    bool is_open(const Message& message, bool sends) const override {
        const auto open = [&](const auto& routes) {
            const auto& route = routes[static_cast<std::size_t>(message.peer)];
            return route.mapped != nullptr && route.mapped->half() != nullptr;
        };
        return sends ? open(out_) : open(in_);
    }
    nb::object channel(const Message& message, bool sends) const override {
        const auto peer = static_cast<std::size_t>(message.peer);
        return sends ? out_[peer].channel : in_[peer].channel;
    }
    nb::object itself() override { return nb::find(*this); }

    class RingExchange final : public Exchange {
    public:
        // The locks are free, and so is the way, once `begin` says so.
        RingExchange(FastMessages& path, const Message& sending, const Message& receiving)
            : path_(path),
              sending_(sending),
              receiving_(receiving),
              to_(path.out_[static_cast<std::size_t>(sending.peer)]),
              from_(path.in_[static_cast<std::size_t>(receiving.peer)]) {}

        bool begin(const Prepared* out, const Prepared* in) {
            if (to_.mapped == nullptr || from_.mapped == nullptr) return false;
            out_turn_.emplace(*to_.lock);
            in_turn_.emplace(*from_.lock);
            if (!out_turn_->taken || !in_turn_->taken) return false;
            if (!path_.is_free(to_, sending_, out) || !path_.is_free(from_, receiving_, in)) return false;
            stay_out_.emplace(*to_.mapped);
            stay_in_.emplace(*from_.mapped);
            outgoing_.emplace(*to_.mapped, sending_);
            incoming_.emplace(*from_.mapped, receiving_);
            return true;
        }

        void move(Until until) override {
            Outgoing& outgoing = *outgoing_;
            Incoming& incoming = *incoming_;
            to_.mapped->half()->ask_for_no_byte();
            from_.mapped->half()->ask_for_no_byte();
            const Patience& patience = path_.patience_;
            const auto through = [&] { return outgoing.ended() && incoming.ended(); };
            if (sending_.array.bytes <= worth_releasing && receiving_.array.bytes <= worth_releasing) {
                const int spins = std::min(held_spins, patience.spins);
                for (int i = 0; i <= spins && !through(); ++i) {
                    outgoing.step();
                    if (!incoming.step()) relax();
                }
            }
            if (!through()) {
                const Sleeping going(*to_.lock, outgoing.bell()), coming(*from_.lock, incoming.bell());
                const WithoutGil released;
                const std::int64_t deadline_ns =
                    std::min(sending_.began + sending_.timeout_ns, receiving_.began + receiving_.timeout_ns);
                move_both(outgoing, incoming, until, patience, path_.bound_of(sending_, *to_.lock), path_.bound_of(receiving_, *from_.lock),
                          deadline_ns);
            }
            outgoing.take_back();
            if (outgoing.ended()) path_.note("send", sending_);
            if (incoming.ended()) path_.note("recv", receiving_);
        }

        Side sent() const override { return {outgoing_->begun(), outgoing_->ended(), outgoing_->done(), {}}; }
        Side received() const override { return {incoming_->begun(), incoming_->ended(), incoming_->done(), {}}; }
        ChannelLock& lock(bool sends) const override { return sends ? *to_.lock : *from_.lock; }
        nb::handle channel(bool sends) const override { return sends ? to_.channel : from_.channel; }

    private:
        FastMessages& path_;
        const Message &sending_, &receiving_;
        const Route<RingOut> to_;
        const Route<RingIn> from_;
        std::optional<Turn> out_turn_, in_turn_;
        std::optional<RingOut::Stay> stay_out_;
        std::optional<RingIn::Stay> stay_in_;
        std::optional<Outgoing> outgoing_;
        std::optional<Incoming> incoming_;
    };
    std::unique_ptr<Exchange> both(const Message& sending, const Message& receiving, const Prepared* out, const Prepared* in) override {
        auto exchange = std::make_unique<RingExchange>(*this, sending, receiving);
        if (!exchange->begin(out, in)) return nullptr;
        return exchange;
    }

    // False if there is no room for all of it now.
    bool put_at_once(const Route<RingOut>& route, const Message& message) {
        const RingOut::Stay stay(*route.mapped);
        RingWriter& ring = *route.mapped->half();
        const std::size_t bytes = message.array.bytes, size = message.head.size() + bytes;
        if (ring.room(size) < size || ring.other_closed()) return false;
        ring.ask_for_no_byte();
        {
            std::optional<Away> away;
            if (bytes > worth_releasing) away.emplace(*route.lock, ring.bell());
            ring.put(message.head.data(), message.head.size());
            put_in_pieces(ring, message.array.data, bytes);
        }
        note("send", message);
        return true;
    }

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
        put_in_pieces(ring, data, done);
        if (done < size) {
            const Away away(*route.lock, ring.bell());
            route.mapped->loans.write_on(ring, data, size, done, patience_, bound);
        }
        if (done < size) {
            const ChannelLock::Halfway halfway(*route.lock, route.channel);
            const nb::object hand_over = route.channel.attr("hand_over");
            return waited(in_any_case(route.channel, [&] { return hand_over(memory_of(x, message), done); }), message);
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
        std::size_t done = take_soon(ring, data, std::min(size, worth_releasing));
        if (done < size) {
            const Away away(*route.lock, ring.bell());
            route.mapped->loans.read_on(ring, data, size, done, patience_, bound);
        }
        if (done < size) {
            const nb::bytes description(head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
            const ChannelLock::Halfway halfway(*route.lock, route.channel);
            const nb::object hand_over = route.channel.attr("hand_over");
            const auto go_on = [&] { return hand_over(memory_of(out, message), message.tag, description, done); };
            return waited(in_any_case(route.channel, go_on), message);
        }
        note("recv", message);
        return nb::bool_(true);
    }

    // What there is room for, and what was put before it. The other side copies a piece while the next one comes.
    static void put_in_pieces(RingWriter& ring, const std::byte* data, std::size_t size) noexcept {
        for (std::size_t done = 0; done == 0 || done < size; done += piece) {
            ring.put(data + done, std::min(piece, size - done));
            ring.publish();
        }
    }
    // Takes what is there and what comes at once, so many bytes at most. Returns how many did.
    std::size_t take_soon(RingReader& ring, std::byte* to, std::size_t most) const noexcept {
        const int spins = std::min(held_spins, patience_.spins);
        std::size_t done = 0;
        for (int looks = 0; looks <= spins; ++looks) {
            const std::size_t count = std::min(most - done, ring.available(1));
            if (count > 0 || looks == 0) {  // what was skipped before is told with the first piece
                ring.peek(to + done, count);
                ring.skip(count);
                ring.publish();
                done += count;
                looks = 0;
            }
            if (done == most) break;
            relax();
        }
        return done;
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
        if (!turn.taken || !is_free(route, message, nullptr)) return nb::none();
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
