// The fast path of a synchronous send or receive of a plain NumPy array over TCP: as FastMessages does it over rings. A send
// is one system call; a receive looks for its frame without the GIL, and reads it in one or two.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <vector>

#include "gil.hpp"
#include "mapped_ring.hpp"
#include "message_calls.hpp"
#include "phalanx/stream_transfer.hpp"

namespace phalanx {

class StreamMessages : MessageCalls {
public:
    StreamMessages(int peers, nb::object mailbox, nb::object arrays, nb::object recorder, double timeout,
                   std::size_t max_message, bool oversubscribed)
        : MessageCalls(std::move(mailbox), std::move(arrays), std::move(recorder), timeout, max_message),
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
    }

    // True: done. False: declined, nothing has happened. Otherwise (operation or None, seconds waited).
    nb::object send(nb::handle x, nb::handle dst, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        const auto* found = lookup(out_, dst, message);
        if (found == nullptr || *found == nullptr || !describe(message, x, tag, timeout, false, library)) return nb::bool_(false);
        const std::shared_ptr<Route> route = *found;
        const Turn turn(*route->lock);
        if (!turn.taken || PyObject_Size(route->queue.ptr()) != 0 || !says(route->channel, ended_, Py_False))
            return nb::bool_(false);
        const StreamFrame frame{message.head.data(), message.head.size(), message.array.data, message.array.bytes};
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
        const std::size_t left = frame.head_size - std::min(sent, frame.head_size);
        const nb::bytes head(frame.head + frame.head_size - left, left);
        const ChannelLock::Halfway halfway(*route->lock, route->channel);
        const nb::object hand_over = route->channel.attr("hand_over");
        const std::size_t of_payload = sent - (frame.head_size - left);
        return waited(in_any_case(route->channel, [&] { return hand_over(memory_of(x, message), of_payload, head); }), message);
    }

    nb::object recv(nb::handle out, nb::handle src, nb::handle tag, nb::handle timeout, const char* library) {
        Message message;
        const auto* found = lookup(in_, src, message);
        if (found == nullptr || *found == nullptr || !describe(message, out, tag, timeout, true, library)) return nb::bool_(false);
        const std::shared_ptr<Route> route = *found;
        const Turn turn(*route->lock);
        if (!turn.taken || !says(route->channel, resting_, Py_True) || comes_later(src)) return nb::bool_(false);
        return receive_frame(*route, message, out);
    }

private:
    // Read at once with the head, whatever it says: what is not for this receive goes back to the channel.
    static constexpr std::size_t together = 16 << 10;
    static constexpr std::size_t scratch_bytes = together + 512;
    static_assert(sizeof(ArrayHead) <= 512);

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

    nb::object receive_frame(Route& route, const Message& message, nb::handle out) {
        const ArrayHead& head = message.head;
        const auto [data, size] = std::pair(message.array.data, message.array.bytes);
        const std::size_t first = head.size() + std::min(size, together);
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
