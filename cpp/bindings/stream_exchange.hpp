// A message out and a message in at the same time, over two TCP connections, in one thread: neither waits for the other to be
// through, so two ranks can exchange arrays of any length.
#pragma once

#include <poll.h>

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "message_line.hpp"
#include "phalanx/stream_transfer.hpp"

namespace phalanx {

// Read at once with the head, whatever it says: what is not for this receive goes back to the channel.
constexpr std::size_t read_together = 16 << 10;
constexpr std::size_t scratch_bytes = read_together + 512;
static_assert(sizeof(ArrayHead) <= 512);

// Bytes moved in one call: what comes is still in the cache when it is used.
constexpr std::size_t exchanged_at_once = 256 << 10;

// The way out. `step` writes what goes now.
class StreamOutgoing {
public:
    StreamOutgoing(int fd, const MessageCalls::Message& message) noexcept
        : fd_(fd), frame_{message.head.data(), message.head.size(), message.array.data, message.array.bytes} {}

    bool begun() const noexcept { return sent_ > 0; }
    bool ended() const noexcept { return sent_ == frame_.whole(); }
    bool is_lost() const noexcept { return lost_; }
    // Of the array.
    std::size_t done() const noexcept { return sent_ - std::min(sent_, frame_.head_size); }
    std::string_view rest_of_head() const noexcept {
        const std::size_t from = std::min(sent_, frame_.head_size);
        return {reinterpret_cast<const char*>(frame_.head) + from, frame_.head_size - from};
    }
    int fd() const noexcept { return fd_; }

    // True if anything has moved.
    bool step() noexcept {
        if (ended() || lost_) return false;
        const std::size_t before = sent_;
        lost_ = !write_some(fd_, frame_, sent_, exchanged_at_once);
        return sent_ > before;
    }

private:
    int fd_;
    StreamFrame frame_;
    std::size_t sent_ = 0;  // of the head as well
    bool lost_ = false;
};

// The way in. What comes may be another message than the one that is waited for: then it is refused.
class StreamIncoming {
public:
    // `scratch` has room for `scratch_bytes`.
    StreamIncoming(int fd, std::byte* scratch, const MessageCalls::Message& message) noexcept
        : fd_(fd),
          scratch_(scratch),
          head_(message.head),
          data_(static_cast<std::byte*>(message.array.data)),
          size_(message.array.bytes) {}

    bool begun() const noexcept { return begun_; }
    bool ended() const noexcept { return begun_ && done_ == size_; }
    bool refused() const noexcept { return refused_; }
    bool is_lost() const noexcept { return lost_; }
    std::size_t done() const noexcept { return done_; }
    // What was read, and is not a message that has begun.
    std::string_view unread() const noexcept {
        return {reinterpret_cast<const char*>(scratch_), begun_ ? 0 : got_};
    }
    int fd() const noexcept { return fd_; }

    // True if anything has moved.
    bool step() noexcept {
        if (ended() || refused_ || lost_) return false;
        if (begun_) {
            const std::size_t before = done_;
            lost_ = !read_some(fd_, data_, std::min(size_, done_ + exchanged_at_once), done_);
            return done_ > before;
        }
        const std::size_t before = got_;
        lost_ = !read_some(fd_, scratch_, head_.size() + std::min(size_, read_together), got_);
        if (got_ == before) return false;
        // The header first: what comes may be shorter than what is waited for.
        if (got_ >= sizeof(FrameHeader)) {
            const std::size_t comparable = got_ < head_.size() ? sizeof(FrameHeader) : head_.size();
            refused_ = std::memcmp(scratch_, head_.data(), comparable) != 0;
            begun_ = !refused_ && comparable == head_.size();
        }
        if (begun_) {
            done_ = got_ - head_.size();
            std::memcpy(data_, scratch_ + head_.size(), done_);
        }
        return true;
    }

private:
    int fd_;
    std::byte* scratch_;
    const ArrayHead& head_;
    std::byte* data_;
    std::size_t size_;
    std::size_t got_ = 0, done_ = 0;  // bytes of the scratch until it has begun, of the array since then
    bool begun_ = false, refused_ = false, lost_ = false;
};

// Moves both until they are through, or nothing has moved for a while and it is late, or nobody waits for what is left. Gives way
// to whoever wants one of the channels. `deadline_ns`: of the calls, which counts also while bytes move.
inline void move_both(StreamOutgoing& outgoing, StreamIncoming& incoming, Until until, Wait& wait, const Bound& out, const Bound& in,
                      std::int64_t deadline_ns) noexcept {
    // How long what has begun is worth waiting for where nobody asked for its end yet: the other side may be at it just now.
    constexpr std::int64_t grace_ns = 500'000;
    const auto came = [&] { return incoming.ended() || incoming.refused(); };
    const auto enough = [&] { return (until == Until::sent && outgoing.ended()) || (until == Until::received && came()); };
    const auto wanted = [](const Bound& bound) { return bound.aborted->load(std::memory_order_relaxed) != 0; };
    std::int64_t idle_since = 0;
    while (!(outgoing.ended() && came()) && !wanted(out) && !wanted(in)) {
        const bool sent = outgoing.step();
        if (incoming.step() || sent) {
            const std::int64_t now = monotonic_ns();
            if (wait.waits()) wait.end(now);
            idle_since = 0;
            if (now > deadline_ns) return;
            continue;
        }
        if (outgoing.is_lost() || incoming.is_lost()) return;
        if (enough()) {
            // What has not begun stays as it is; what has is worth some more looks.
            if (!outgoing.begun() || !incoming.begun()) return;
            const std::int64_t now = monotonic_ns();
            if (idle_since == 0) idle_since = now;
            if (now - idle_since > grace_ns) return;
        }
        if (look_again(wait)) continue;
        if (monotonic_ns() >= std::min(out.deadline_ns, in.deadline_ns)) return;
        pollfd polled[2] = {{outgoing.ended() ? -1 : outgoing.fd(), POLLOUT, 0}, {came() ? -1 : incoming.fd(), POLLIN, 0}};
        ::poll(polled, 2, detail::sleep_ms);
    }
}

}  // namespace phalanx
