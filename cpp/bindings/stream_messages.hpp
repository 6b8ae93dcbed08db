// The fast path of a synchronous send or receive of a plain NumPy array over TCP: as FastMessages does it over rings. A send
// is one system call; a receive looks for its frame without the GIL, and reads it in one or two.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <vector>

#include "gil.hpp"
#include "mapped_ring.hpp"
#include "message_line.hpp"
#include "phalanx/stream_transfer.hpp"
#include "stream_exchange.hpp"

namespace phalanx {

class StreamMessages final : public MessageLine {
public:
    StreamMessages(int peers, nb::object mailbox, nb::object arrays, nb::object recorder, double timeout,
                   std::size_t max_message, bool oversubscribed)
        : MessageLine(std::move(mailbox), std::move(arrays), std::move(recorder), timeout, max_message),
          oversubscribed_(oversubscribed),
          out_(static_cast<std::size_t>(peers)),
          in_(static_cast<std::size_t>(peers)) {}

    // `channel` is a RingOutbound that stays with its stream; `queue` holds what is still to be sent on it.
    void open_out(std::size_t dst, nb::object channel, nb::object queue) {
        open(out_.at(dst), channel).queue = std::move(queue);
    }
    void open_in(std::size_t src, nb::object channel) {
        open(in_.at(src), channel).scratch = std::make_unique_for_overwrite<std::byte[]>(scratch_bytes);
    }

    // Lets go of all channels. They refer to this object as well, and no garbage collector looks in here.
    void close() {
        for (auto* routes : {&out_, &in_})
            for (auto& route : *routes) route.reset();
        forget_line();
    }

    // True: done. False: declined, nothing has happened. Otherwise (operation or None, seconds waited).
    nb::object send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        const auto* found = lookup(out_, dst, message);
        if (found == nullptr || *found == nullptr || !describe(message, x, tag, timeout, false, library)) return nb::bool_(false);
        return send_in_turn(message, x);
    }

    // As `send`, but without a wait: True, False, a `Prepared` of what has to wait, or what goes on with a message of which a part
    // is sent, with the seconds that it took.
    nb::object post_send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout) {
        Message message;
        const auto* found = lookup(out_, dst, message);
        if (found == nullptr || *found == nullptr || !describe(message, x, tag, timeout, false, "numpy")) return nb::bool_(false);
        const std::shared_ptr<Route> route = *found;
        const Turn turn(*route->lock);
        if (!turn.taken || !says(route->channel, ended_, Py_False)) return nb::bool_(false);
        if (message.head.size() + message.array.bytes <= worth_releasing && is_free_out(*route, message, nullptr)) {
            std::size_t sent = 0;
            const StreamFrame frame = frame_of(message);
            write_some(route->fd, frame, sent);
            if (sent == frame.whole()) {
                note("send", message);
                return nb::bool_(true);
            }
            if (sent > 0) return hand_over(*route, frame, sent, message, x);
        }
        nb::object prepared = prepare(message, x, true);
        return prepared.is_none() ? nb::bool_(false) : prepared;
    }

    nb::object prepare_receive(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout) {
        Message message;
        const auto* found = lookup(in_, src, message);
        if (found == nullptr || *found == nullptr || !describe(message, out, tag, timeout, true, "numpy")) return nb::none();
        if (!is_open(message, false) || comes_later(src)) return nb::none();
        return prepare(message, out, false);
    }

    nb::object recv(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        const auto* found = lookup(in_, src, message);
        if (found == nullptr || *found == nullptr || !describe(message, out, tag, timeout, true, library)) return nb::bool_(false);
        return receive_in_turn(message, out);
    }

    // Sends an array, and takes the one that comes for another; `exchange_now` says what is returned.
    nb::object exchange(nb::handle x, nb::handle dst, nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout) {
        Message sending, receiving;
        const auto *const found_out = lookup(out_, dst, sending), *const found_in = lookup(in_, src, receiving);
        if (found_out == nullptr || found_in == nullptr) return nb::bool_(false);
        if (!describe(sending, x, tag, timeout, false, "numpy") || !describe(receiving, out, tag, timeout, true, "numpy"))
            return nb::bool_(false);
        return exchange_now(sending, x, receiving, out);
    }

private:
    struct Route {
        int fd;
        ChannelLock* lock;
        nb::object channel;
        WaitPolicy policy;
        nb::object queue{};
        std::unique_ptr<std::byte[]> scratch{};
    };

    Route& open(std::shared_ptr<Route>& route, const nb::object& channel) const {
        route.reset(new Route{nb::cast<int>(channel.attr("stream").attr("fd")),
                              nb::cast<ChannelLock*>(channel.attr("lock")), channel, WaitPolicy(oversubscribed_)});
        return *route;
    }

    static StreamFrame frame_of(const Message& message) noexcept {
        return {message.head.data(), message.head.size(), message.array.data, message.array.bytes};
    }

    // Whether the next message to a rank may be this one: no other stands before it. `prepared`: of one that stands in line.
    bool is_free_out(const Route& route, const Message& message, const Prepared* prepared) const {
        return is_next(message, true, prepared) && PyObject_Size(route.queue.ptr()) == 0 && says(route.channel, ended_, Py_False);
    }
    // Whether the next message of a rank is for this receive.
    bool is_free_in(const Route& route, const Message& message, const Prepared* prepared) const {
        return is_next(message, false, prepared) && says(route.channel, resting_, Py_True) && !comes_later(nb::int_(message.peer));
    }
    const std::shared_ptr<Route>& route_of(const Message& message, bool sends) const {
        return (sends ? out_ : in_)[static_cast<std::size_t>(message.peer)];
    }

    bool is_open(const Message& message, bool sends) const override {
        const std::shared_ptr<Route>& route = route_of(message, sends);
        return route != nullptr && says(route->channel, ended_, Py_False);
    }
    nb::object channel(const Message& message, bool sends) const override { return route_of(message, sends)->channel; }
    nb::object itself() override { return nb::find(*this); }

    nb::object send_next(Message& message, nb::handle x, const Prepared* prepared) override {
        const std::shared_ptr<Route> route = route_of(message, true);
        if (route == nullptr) return nb::bool_(false);
        const Turn turn(*route->lock);
        if (!turn.taken || !is_free_out(*route, message, prepared)) return nb::bool_(false);
        const StreamFrame frame = frame_of(message);
        std::size_t sent = 0;
        bool alive = true;
        if (frame.whole() <= worth_releasing) alive = write_some(route->fd, frame, sent);
        if (alive && sent < frame.whole()) {
            Wait wait(route->policy);
            const Bound bound = bound_of(message, *route->lock);
            const WithoutGil released;
            write_on(route->fd, frame, sent, wait, bound);
        }
        if (sent == frame.whole()) {
            note("send", message);
            return nb::bool_(true);
        }
        if (sent == 0) return waited(nb::none(), message);  // also where it has ended: the general way finds out how
        return hand_over(*route, frame, sent, message, x);
    }

    // Has the general way go on with a message of which a part is sent.
    nb::object hand_over(const Route& route, const StreamFrame& frame, std::size_t sent, const Message& message, nb::handle x) const {
        const std::size_t left = frame.head_size - std::min(sent, frame.head_size);
        const nb::bytes head(frame.head + frame.head_size - left, left);
        const ChannelLock::Halfway halfway(*route.lock, route.channel);
        const nb::object go_on = route.channel.attr("hand_over");
        const std::size_t of_payload = sent - (frame.head_size - left);
        return waited(in_any_case(route.channel, [&] { return go_on(memory_of(x, message), of_payload, head); }), message);
    }

    nb::object receive(Message& message, nb::handle out, const Prepared* prepared) override {
        const std::shared_ptr<Route> route = route_of(message, false);
        if (route == nullptr) return nb::bool_(false);
        const Turn turn(*route->lock);
        if (!turn.taken || !is_free_in(*route, message, prepared)) return nb::bool_(false);
        return receive_frame(*route, message, out);
    }

    class StreamExchange final : public Exchange {
    public:
        // The locks are free, and so is the way, once `begin` says so.
        StreamExchange(StreamMessages& path, const Message& sending, const Message& receiving)
            : path_(path), sending_(sending), receiving_(receiving), to_(path.route_of(sending, true)), from_(path.route_of(receiving, false)) {}

        bool begin(const Prepared* out, const Prepared* in) {
            if (to_ == nullptr || from_ == nullptr) return false;
            out_turn_.emplace(*to_->lock);
            in_turn_.emplace(*from_->lock);
            if (!out_turn_->taken || !in_turn_->taken) return false;
            if (!path_.is_free_out(*to_, sending_, out) || !path_.is_free_in(*from_, receiving_, in)) return false;
            outgoing_.emplace(to_->fd, sending_);
            incoming_.emplace(from_->fd, from_->scratch.get(), receiving_);
            return true;
        }

        void move(Until until) override {
            if (sending_.array.bytes <= worth_releasing) outgoing_->step();
            if (receiving_.array.bytes <= worth_releasing) incoming_->step();
            if (!outgoing_->ended() || !incoming_->ended()) {
                Wait wait(from_->policy);
                const WithoutGil released;
                const std::int64_t deadline_ns =
                    std::min(sending_.began + sending_.timeout_ns, receiving_.began + receiving_.timeout_ns);
                move_both(*outgoing_, *incoming_, until, wait, path_.bound_of(sending_, *to_->lock), path_.bound_of(receiving_, *from_->lock),
                          deadline_ns);
            }
            if (outgoing_->ended()) path_.note("send", sending_);
            if (incoming_->ended()) path_.note("recv", receiving_);
        }

        Side sent() const override { return {outgoing_->begun(), outgoing_->ended(), outgoing_->done(), outgoing_->rest_of_head()}; }
        Side received() const override { return {incoming_->begun(), incoming_->ended(), incoming_->done(), incoming_->unread()}; }
        ChannelLock& lock(bool sends) const override { return sends ? *to_->lock : *from_->lock; }
        nb::handle channel(bool sends) const override { return sends ? to_->channel : from_->channel; }

    private:
        StreamMessages& path_;
        const Message &sending_, &receiving_;
        const std::shared_ptr<Route> to_, from_;
        std::optional<Turn> out_turn_, in_turn_;
        std::optional<StreamOutgoing> outgoing_;
        std::optional<StreamIncoming> incoming_;
    };
    std::unique_ptr<Exchange> both(const Message& sending, const Message& receiving, const Prepared* out, const Prepared* in) override {
        auto exchange = std::make_unique<StreamExchange>(*this, sending, receiving);
        if (!exchange->begin(out, in)) return nullptr;
        return exchange;
    }

    nb::object receive_frame(Route& route, const Message& message, nb::handle out) {
        const ArrayHead& head = message.head;
        const auto [data, size] = std::pair(message.array.data, message.array.bytes);
        const std::size_t first = head.size() + std::min(size, read_together);
        const Bound bound = bound_of(message, *route.lock);
        Wait wait(route.policy);
        std::byte* const scratch = route.scratch.get();
        std::size_t got = 0;
        std::size_t done = 0;
        bool fits = false;
        const bool alive = read_some(route.fd, scratch, first, got);
        {
            std::optional<WithoutGil> released;
            if (got < first || size > first) released.emplace();
            // The header first: what comes may be shorter than what is waited for.
            if (alive && got < sizeof(FrameHeader)) read_on(route.fd, scratch, sizeof(FrameHeader), first, got, wait, bound);
            fits = begins_as(head, scratch, got, sizeof(FrameHeader));
            if (fits && got < head.size()) read_on(route.fd, scratch, head.size(), first, got, wait, bound);
            fits = fits && begins_as(head, scratch, got, head.size());
            if (fits) {
                done = got - head.size();
                std::memcpy(data, scratch + head.size(), done);
                if (done < size) read_on(route.fd, data, size, size, done, wait, bound);
            }
        }
        if (!fits) {
            if (got > 0) {
                const ChannelLock::Halfway halfway(*route.lock, route.channel);
                const nb::object give_back = route.channel.attr("give_back");
                const nb::bytes read(scratch, got);
                in_any_case(route.channel, [&] { return give_back(read); });
            }
            return waited(nb::none(), message);
        }
        if (done < size) {
            const nb::bytes description(head.data() + sizeof(FrameHeader), head.size() - sizeof(FrameHeader));
            const ChannelLock::Halfway halfway(*route.lock, route.channel);
            const nb::object hand_over = route.channel.attr("hand_over");
            const auto go_on = [&] { return hand_over(memory_of(out, message), message.tag, description, done); };
            return waited(in_any_case(route.channel, go_on), message);
        }
        note("recv", message);
        wait.received();
        return nb::bool_(true);
    }

    static bool begins_as(const ArrayHead& head, const std::byte* read, std::size_t got, std::size_t wanted) noexcept {
        return got >= wanted && std::memcmp(read, head.data(), wanted) == 0;
    }

    bool oversubscribed_;
    nb::object ended_ = nb::steal(PyUnicode_InternFromString("ended"));
    nb::object resting_ = nb::steal(PyUnicode_InternFromString("resting"));
    std::vector<std::shared_ptr<Route>> out_;
    std::vector<std::shared_ptr<Route>> in_;
};

}  // namespace phalanx
